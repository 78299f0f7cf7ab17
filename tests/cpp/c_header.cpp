// c_api.h stands alone in C++17.
#include "flash_qla/c_api.h"

int flash_qla_header_in_cpp() { return FLASH_QLA_OK; }
