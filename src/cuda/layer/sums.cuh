// Sums over parts that blocks have left: those of a column are added in an order that depends on their number alone, in
// double, so that the same call always has the same bits.
#pragma once

#include "cuda/common/overlap.cuh"

namespace flash_qla::cuda {

// Threads of a block: 32 columns side by side, and 32 parts at a time. A column's hundreds of parts one behind the
// other would wait for memory as often.
constexpr int kSumColumns = 32, kSumParts = 32, kSumThreads = kSumColumns * kSumParts;

// Calls put(column, sum) for each column of sums [parts, columns]. A block has kSumColumns of them.
template <class Put>
__device__ inline void add_parts(const float* sums, int64_t parts, int64_t columns, Put&& put) {
  begin_after_predecessors();
  __shared__ double s_sums[kSumParts][kSumColumns];
  const int lane = static_cast<int>(threadIdx.x) % kSumColumns, first = static_cast<int>(threadIdx.x) / kSumColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSumColumns + lane;
  double sum = 0.0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = first; part < parts; part += kSumParts) sum += sums[part * columns + column];
  }
  s_sums[first][lane] = sum;
  __syncthreads();
  if (first != 0 || column >= columns) return;
#pragma unroll 8
  for (int i = 1; i < kSumParts; ++i) sum += s_sums[i][lane];
  put(column, sum);
}

}  // namespace flash_qla::cuda
