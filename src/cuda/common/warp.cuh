// Sums over a warp.
#pragma once

namespace flash_qla::cuda {

// In all lanes, in the same order in each of them.
template <class Real>
__device__ __forceinline__ Real warp_sum(Real x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

}  // namespace flash_qla::cuda
