// Copies from global to shared memory that a thread starts and does not wait for (cp.async).
#pragma once

#include <cstdint>

namespace flash_qla::cuda {

// 16 bytes. Both addresses are on 16-byte boundaries. Past L1: what is read is used once by an SM, or by blocks that
// share L2.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

// The same, or zeros. Not with a number of bytes to read, which may be anything: for that the compiler makes five
// instructions more.
__device__ __forceinline__ void cp_async_16_or_zero(uint32_t smem, const void* global, bool reads) {
  asm volatile(
      "{\n"
      ".reg .pred ignore;\n"
      "setp.eq.u32 ignore, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, ignore;\n"
      "}\n" ::"r"(smem),
      "l"(global), "r"(static_cast<uint32_t>(reads))
      : "memory");
}

// Closes a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but this thread's last kGroups groups are there.
template <int kGroups>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// An arrival of this thread on a barrier once all copies that it has started are there: one of those that the barrier
// was initialised to count.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace flash_qla::cuda
