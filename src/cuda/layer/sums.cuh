// Sums over parts that blocks have left: those of a column are added in an order that depends on their number alone, in
// double, so that the same call always has the same bits.
#pragma once

#include "cuda/common/overlap.cuh"

namespace flash_qla::cuda {

constexpr int kSumThreads = 1024;

// Calls put(column, sum) for each column of sums [parts, columns]. A block has kColumns of them side by side, and as
// many parts at a time as it has threads for: a column's hundreds of parts one behind the other would wait for memory
// as often.
template <int kColumns, class Put>
__device__ inline void add_parts(const float* sums, int64_t parts, int64_t columns, Put&& put) {
  begin_after_predecessors();
  constexpr int kParts = kSumThreads / kColumns;
  static_assert(kParts * kColumns == kSumThreads && (kParts & (kParts - 1)) == 0);
  __shared__ double s_sums[kParts][kColumns];
  const int lane = static_cast<int>(threadIdx.x) % kColumns, first = static_cast<int>(threadIdx.x) / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  double sum = 0.0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = first; part < parts; part += kParts) sum += sums[part * columns + column];
  }
  s_sums[first][lane] = sum;
#pragma unroll
  for (int half = kParts / 2; half > 0; half /= 2) {
    __syncthreads();
    if (first < half) s_sums[first][lane] += s_sums[first + half][lane];
  }
  if (first == 0 && column < columns) put(column, s_sums[0][lane]);
}

}  // namespace flash_qla::cuda
