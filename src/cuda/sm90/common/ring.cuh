// Rings in shared memory: of barriers, one to a stage, and of the stages themselves.
//
// Both are used in turns: use 0, 1, 2, .. of a ring of kCount has stage use % kCount, and is that stage's use / kCount
// - th. A barrier's phase is over when all that it counts has arrived; the parity of a use's phase tells it from the
// one before. Who waits may be one use of a stage behind the arrivals, but not two.
#pragma once

#include <cstdint>

#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90 {

// kBarriers: offset of the first barrier in the block's shared memory, 8 bytes each.
template <uint32_t kBarriers, int kCount>
struct Ring {
  static __device__ __forceinline__ uint32_t barrier(uint32_t use) { return smem() + kBarriers + 8 * (use % kCount); }
  static __device__ __forceinline__ uint32_t parity(uint32_t use) { return use / kCount & 1; }
  static __device__ __forceinline__ void wait(uint32_t use) { mbarrier_wait(barrier(use), parity(use)); }
  static __device__ __forceinline__ bool test(uint32_t use) { return mbarrier_test(barrier(use), parity(use)); }
  // By a warp whose lanes have met.
  static __device__ __forceinline__ void arrive(uint32_t use, int lane) { mbarrier_arrive_warp(barrier(use), lane); }
  // Of stage 0 .. kCount - 1, by one thread.
  static __device__ __forceinline__ void init(int stage, uint32_t arrivals) {
    mbarrier_init(smem() + kBarriers + 8 * stage, arrivals);
  }
};

// kTiles: offset of the first stage.
template <uint32_t kTiles, uint32_t kBytes, int kCount>
struct Stages {
  static __device__ __forceinline__ uint32_t tile(uint32_t use) { return smem() + kTiles + use % kCount * kBytes; }
};

}  // namespace flash_qla::cuda::sm90
