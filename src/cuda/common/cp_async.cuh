// Copies from global to shared memory that a thread starts and does not wait for (cp.async).
#pragma once

#include <cstdint>

namespace flash_qla::cuda {

// 16 bytes, of which `bytes` are read and the rest become zero. Both addresses are legal and on 16-byte boundaries,
// also where nothing is read. Past L1: what is read is used once by an SM, or by blocks that share L2.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
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
