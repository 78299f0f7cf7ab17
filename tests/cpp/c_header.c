/* flash_qla.h stands alone in C99. */
#include "flash_qla/flash_qla.h"

int flash_qla_header_in_c(void) { return FLASH_QLA_OK; }
