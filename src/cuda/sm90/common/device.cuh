// The block and its SM: dynamic shared memory, numbers in global memory as they are now, addresses.
#pragma once

#include <cstdint>

#include "cuda/common/mbarrier.cuh"

namespace flash_qla::cuda::sm90 {

// The block's dynamic shared memory. A function, not a pointer handed down: its address is a constant that needs no
// register.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}
__device__ __forceinline__ uint32_t smem() { return smem_address(shared_memory()); }

// SMs 2i and 2i + 1 share a cache of instructions: i of this one.
__device__ __forceinline__ uint32_t tpc() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm / 2;
}

// A number as it is in memory at this moment.
template <typename Number>
__device__ __forceinline__ uint32_t load_now(const Number* data) {
  static_assert(sizeof(Number) == 4);
  return static_cast<uint32_t>(*static_cast<const volatile Number*>(data));
}

// base + count * bytes, in one instruction.
__device__ __forceinline__ const void* advance(const void* base, int count, int bytes) {
  uint64_t sum;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(sum) : "r"(count), "r"(bytes), "l"(reinterpret_cast<uint64_t>(base)));
  return reinterpret_cast<const void*>(sum);
}

}  // namespace flash_qla::cuda::sm90
