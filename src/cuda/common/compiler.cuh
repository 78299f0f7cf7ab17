// Work-arounds for the compiler (nvcc and ptxas 12.8 to 13.5), each with a name. None of them changes what is computed:
// they say in which registers values lie, and in which order instructions come. Registers against wgmma: pin()
// (cuda/common/wgmma.cuh).
#pragma once

#include <cstdint>

namespace flash_qla::cuda {

// A number whose origin the compiler does not see: addresses made from it are made again where they are used, not kept
// in registers, of which there are few.
template <typename Number>
__device__ __forceinline__ Number recompute(Number value) {
  asm volatile("" : "+r"(value));
  return value;
}
// The same of variables in their place, of 32 bits or, alone, of 64.
template <typename A>
__device__ __forceinline__ void recompute_from(A& a) {
  if constexpr (sizeof(A) == 8) {
    asm volatile("" : "+l"(a));
  } else {
    asm volatile("" : "+r"(a));
  }
}
template <typename A, typename B>
__device__ __forceinline__ void recompute_from(A& a, B& b) {
  asm volatile("" : "+r"(a), "+r"(b));
}
template <typename A, typename B, typename C>
__device__ __forceinline__ void recompute_from(A& a, B& b, C& c) {
  asm volatile("" : "+r"(a), "+r"(b), "+r"(c));
}

// A number that all lanes of the warp have, in a form that the compiler knows to be the same in all of them: what is
// computed from it, descriptors above all, stays in uniform registers and needs no moves to them.
__device__ __forceinline__ uint32_t uniform(uint32_t value) { return __reduce_or_sync(0xffffffffu, value); }

// The number of the warpgroup in its block, of kGroups, in such a form: by votes.
template <int kGroups = 4>
__device__ __forceinline__ int warpgroup_number() {
  if constexpr (kGroups > 4) {
    return (__any_sync(0xffffffffu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xffffffffu, threadIdx.x & 256) ? 2 : 0) +
           (__any_sync(0xffffffffu, threadIdx.x & 512) ? 4 : 0);
  } else {
    return (__any_sync(0xffffffffu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xffffffffu, threadIdx.x & 256) ? 2 : 0);
  }
}

// A thread's number out of a shuffle by its own lane: ptxas reads the special register again for a number that it knows
// to come from there, or keeps what it has made of it, and spills.
__device__ __forceinline__ int thread_from_shuffle(int thread, int lane) {
  return __shfl_sync(0xffffffffu, thread, lane);
}

// Always true, which only the launcher knows: an item count is not negative. ptxas moves what belongs under a product
// between or before the product's wgmmas, unless a branch holds it.
template <typename KernelArgs>
__device__ __forceinline__ bool keep_in_branch(const KernelArgs& p) {
  return p.items >= 0;
}

}  // namespace flash_qla::cuda
