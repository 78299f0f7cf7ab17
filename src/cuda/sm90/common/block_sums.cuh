// Sums over the threads of a block, of several numbers at once.
#pragma once

#include <cstdint>

#include "cuda/common/warp.cuh"

namespace flash_qla::cuda::sm90 {

// Over the threads before each, in place; `all`: over all of them. sums: shared. By a block of kWarps warps, one to 32.
template <int kNumbers, int kWarps>
__device__ void sum_before(int32_t (&x)[kNumbers], int32_t (&all)[kNumbers], int32_t (*sums)[kWarps]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();  // the sums before have been read
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    const int32_t inclusive = prefix_sum(x[i], lane);
    if (lane == 31) sums[i][warp] = inclusive;
    x[i] = inclusive - x[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    const int32_t of_warp = lane < kWarps ? sums[i][lane] : 0;
    x[i] += __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
    all[i] = __reduce_add_sync(0xffffffffu, of_warp);
  }
}

}  // namespace flash_qla::cuda::sm90
