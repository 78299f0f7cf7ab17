// Building a Status: one message form for the whole library, "operation: argument rule (what was given)".
#pragma once

#include <cstdarg>
#include <cstdio>

#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

__attribute__((format(printf, 2, 3))) inline Status make_status(flash_qla_code code, const char* format, ...) {
  flash_qla_status status{};
  status.code = code;
  va_list list;
  va_start(list, format);
  std::vsnprintf(status.message, sizeof(status.message), format, list);
  va_end(list);
  return Status(status);
}

// Leaves the function with the Status of `expression` unless it is ok.
#define FLASH_QLA_RETURN_IF_ERROR(expression)                        \
  do {                                                               \
    if (::flash_qla::Status status_ = (expression); !status_.ok()) { \
      return status_;                                                \
    }                                                                \
  } while (0)

}  // namespace flash_qla
