// Shared-memory barriers (mbarrier): the only hand-off between warps of different roles.
#pragma once

#include <cstdint>

namespace flash_qla::cuda {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Before a barrier's memory is used for anything else, another barrier among it; nobody waits for it any more.
__device__ __forceinline__ void mbarrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// In a build to look for races (FLASH_QLA_JITTER) a warp sleeps now and then, for longer than any step of a kernel
// takes, before it arrives and before and after it waits: what is only usually in order then is not.
__device__ __forceinline__ void jitter() {
#ifdef FLASH_QLA_JITTER
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  const uint32_t hash = (now ^ (threadIdx.x / 32 * 40503u)) * 2654435761u;
  // One time in 256, for 0.2 to 4.3 us.
  if (hash >> 24 == 0) asm volatile("nanosleep.u32 %0;" ::"r"(200 + (hash >> 12 & 0xfff)));
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A warp's arrival, once all its lanes have done (and __syncwarp() has said so): by lane 0 alone, and the barrier
// counts kWarpArrivals of them. compute-sanitizer's racecheck takes a hand-over for ordered only where the lanes that
// wrote arrive themselves, so in a build for it (FLASH_QLA_RACECHECK) all of them do.
#ifdef FLASH_QLA_RACECHECK
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

__device__ __forceinline__ void mbarrier_arrive_warp(uint32_t barrier, int lane) {
  jitter();
  if (kWarpArrivals == 32 || lane == 0) mbarrier_arrive(barrier);
}

// One arrival that also expects `bytes` of copy-engine traffic.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase is over; never waits.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// May wait for a while, where the GPU can (from compute capability 9.0 on).
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return mbarrier_test(barrier, parity);
#else
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
#endif
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  jitter();
  while (!mbarrier_try_wait(barrier, parity)) {
  }
  jitter();
}

// A number in shared memory that one thread of the block writes and others poll, and with it what the writer has
// written or observed before. racecheck reports such a pair unless both are read-modify-writes: in a build for it they
// are.
__device__ __forceinline__ void store_shared_release(uint32_t smem, uint32_t value) {
  if constexpr (kWarpArrivals == 32) {
    [[maybe_unused]] uint32_t before;
    asm volatile("atom.release.cta.shared.exch.b32 %0, [%1], %2;" : "=r"(before) : "r"(smem), "r"(value) : "memory");
  } else {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
  }
}

__device__ __forceinline__ uint32_t load_shared_acquire(uint32_t smem) {
  uint32_t value;
  if constexpr (kWarpArrivals == 32) {
    asm volatile("atom.acquire.cta.shared.or.b32 %0, [%1], 0;" : "=r"(value) : "r"(smem) : "memory");
  } else {
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
  }
  return value;
}

// Named hardware barrier among `threads` threads of the block (id 0 belongs to __syncthreads). racecheck takes note of
// it as each warp leaves, and reports what one that is ahead then reads of what one that is still there has written: in
// a build for it they meet twice.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  jitter();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  if constexpr (kWarpArrivals == 32) asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flash_qla::cuda
