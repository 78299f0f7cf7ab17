// The contract's rules, in one place for all paths: shapes, dtypes and combinations. Reads no tensor memory.
#pragma once

#include "core/problem.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

enum class ForwardKind { kChunked, kRecurrent };

// `need_data`: also refuse tensors that have elements and no memory.
Status validate_forward(const flash_qla_forward_arguments& args, ForwardKind kind, const char* operation,
                        bool need_data, Problem* problem);
Status validate_backward(const flash_qla_backward_arguments& args, const char* operation, bool need_data,
                         Problem* problem);

}  // namespace flash_qla
