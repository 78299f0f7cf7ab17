// flash_qla.hpp stands alone in C++17.
#include "flash_qla/flash_qla.hpp"

int flash_qla_cpp_header() { return flash_qla::Status().code(); }
