// Copies of an emulated thread; src/cuda/common/cp_async.cuh says what each is for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_qla::cuda {

inline void cp_async_16(uint32_t smem, const void* global) { cuda_emulation::async_copy(smem, global, 16, 16); }
inline void cp_async_16_or_zero(uint32_t smem, const void* global, bool reads) {
  cuda_emulation::async_copy(smem, global, 16, reads ? 16 : 0);
}
inline void cp_async_commit() { cuda_emulation::async_commit(); }
template <int kGroups>
void cp_async_wait() {
  cuda_emulation::async_wait_group(kGroups);
}
inline void cp_async_arrive(uint32_t barrier) { cuda_emulation::async_arrive(barrier); }

}  // namespace flash_qla::cuda
