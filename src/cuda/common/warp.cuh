// Sums over the lanes of a warp.
#pragma once

namespace flash_qla::cuda {

// In all lanes, in the same order in each of them.
template <class Real>
__device__ __forceinline__ Real warp_sum(Real x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Over four neighbouring lanes, as share rows of the results of mma; in all of them.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Of this lane and those before it.
template <class Real>
__device__ __forceinline__ Real prefix_sum(Real x, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Real other = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}

}  // namespace flash_qla::cuda
