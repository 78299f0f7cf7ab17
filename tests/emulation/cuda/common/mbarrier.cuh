// Barriers in shared memory of an emulated block; src/cuda/common/mbarrier.cuh says what each is for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flash_qla::cuda {

inline uint32_t smem_address(const void* pointer) { return cuda_emulation::shared_address(pointer); }

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) { cuda_emulation::mbarrier_init(barrier, arrivals); }
inline void mbarrier_invalidate(uint32_t barrier) { cuda_emulation::mbarrier_invalidate(barrier); }
inline void mbarrier_arrive(uint32_t barrier) { cuda_emulation::mbarrier_arrive(barrier); }
inline bool mbarrier_test(uint32_t barrier, uint32_t parity) { return cuda_emulation::mbarrier_test(barrier, parity); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity,
                          cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::mbarrier_wait(barrier, parity, where);
}

inline constexpr uint32_t kWarpArrivals = 1;
inline void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  if (lane == 0) mbarrier_arrive(barrier);
}

inline void named_barrier_sync(uint32_t id, uint32_t threads,
                               cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::barrier_sync(id, threads, where);
}

}  // namespace flash_qla::cuda
