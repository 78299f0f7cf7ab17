// Checks of device data (offsets, indices), made only when the caller asks for them: they read memory and wait.
#pragma once

#include "core/problem.h"
#include "flash_qla/flash_qla.h"

namespace flash_qla {

// True when options.check_device_data is set or the environment has FLASH_QLA_CHECK=1.
bool wants_device_check(const flash_qla_options& options);

// cu_seqlens starts at 0, never falls and ends at or before `tokens`.
Status check_sequences(const Tensor& cu_seqlens, const flash_qla_options& options, const char* operation,
                       const Problem& problem, void* stream);

// Pool slots are inside the pool, none is written twice or written by one row and read by another; accepted counts and
// checkpoint offsets are in range.
Status check_pool(const flash_qla_forward_arguments& args, const char* operation, const Problem& problem, void* stream);

// checkpoint_cu_starts leaves each sequence the rows that it fills. cu_seqlens has been checked before.
Status check_checkpoint_rows(const flash_qla_forward_arguments& args, const char* operation, const Problem& problem,
                             void* stream);

}  // namespace flash_qla
