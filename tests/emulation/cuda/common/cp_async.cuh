// Copies of an emulated thread; src/cuda/common/cp_async.cuh says what each is for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_qla::cuda {

inline void cp_async_16(uint32_t smem, const void* global, int bytes) {
  cuda_emulation::async_copy(smem, global, 16, static_cast<size_t>(bytes));
}
inline void cp_async_commit() { cuda_emulation::async_commit(); }
template <int kGroups>
void cp_async_wait() {
  cuda_emulation::async_wait_group(kGroups);
}
inline void cp_async_arrive(uint32_t barrier) { cuda_emulation::async_arrive(barrier); }

}  // namespace flash_qla::cuda
