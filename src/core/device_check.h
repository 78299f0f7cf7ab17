// Checks of device data (offsets, indices), made only when the caller asks for them: they read memory and wait.
#pragma once

#include "core/problem.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

// True when options.check_device_data is set or the environment has FLASH_QLA_CHECK=1.
bool wants_device_check(const flash_qla_options& options);

// cu_seqlens starts at 0, never falls and ends at or before T; h has a row for each chunk. Of rows that are not
// skipped: slots are inside the pool, none is written twice or written by one row and read by another,
// checkpoint_cu_starts leaves the rows that a sequence fills. Accepted counts and checkpoint offsets are in range.
Status check_forward_data(const flash_qla_forward_arguments& args, const char* operation, const Problem& problem,
                          void* stream);

// cu_seqlens, likewise.
Status check_backward_data(const flash_qla_backward_arguments& args, const char* operation, const Problem& problem,
                           void* stream);

// Of rows that are not skipped: the slot is inside the pool, every parent is -1 or an earlier token, the row of
// states_out is below 0 or inside of it, and none is written twice.
Status check_verify_data(const flash_qla_verify_arguments& args, const char* operation, const Problem& problem,
                         void* stream);

}  // namespace flash_qla
