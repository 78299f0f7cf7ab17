// Scans over the threads of a block, and sums of several numbers at once.
#pragma once

#include <cstdint>

#include "cuda/common/warp.cuh"

namespace flash_qla::cuda {

// By `combine`, from `first` on: of what the threads before this one have, and with its own x. shared: an element a
// warp.
template <class Number>
struct BlockScan {
  Number before, through;
};
template <class Number, class Combine>
__device__ __forceinline__ BlockScan<Number> block_scan(Number x, Number first, Number* shared, Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Number other = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x = combine(x, other);
  }
  __syncthreads();  // what was there before has been read
  if (lane == 31) shared[warp] = x;
  __syncthreads();
  Number before = first;
  for (int w = 0; w < warp; ++w) before = combine(before, shared[w]);
  const Number neighbour = __shfl_up_sync(0xffffffffu, x, 1);
  return {lane > 0 ? combine(before, neighbour) : before, combine(before, x)};
}

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

}  // namespace flash_qla::cuda
