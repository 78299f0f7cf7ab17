// flash_qla.h stands alone in C++17.
#include "flash_qla/flash_qla.h"

int flash_qla_header_in_cpp() { return FLASH_QLA_OK; }
