// Where each sequence of a call lies, on the device. cu_seqlens is read there alone: one small kernel clamps it, so
// that no value in it leads outside the tensors, and sums the chunks, so that later kernels find their sequence by
// bisection.
#pragma once

#include <cstdint>

#include "cuda/common/device_tensor.cuh"
#include "cuda/common/launch.h"

namespace flash_qla::cuda {

// One sequence: tokens [begin, begin + length) of batch row `b`; its chunks are numbered from `first_chunk`.
struct DeviceSequence {
  int64_t b, begin, length, first_chunk;
};

// The N sequences of a call.
struct SequenceTable {
  const int64_t* bounds;       // [N + 1] clamped cu_seqlens; NULL: dense, N sequences of T tokens
  const int64_t* first_chunk;  // [N + 1]
  int64_t N, T;
};

__device__ inline DeviceSequence sequence_at(const SequenceTable& table, int64_t n) {
  if (table.bounds == nullptr) return {n, 0, table.T, n * ceil_div(table.T, kChunkSize)};
  return {0, table.bounds[n], table.bounds[n + 1] - table.bounds[n], table.first_chunk[n]};
}

__device__ inline int64_t total_chunks(const SequenceTable& table) {
  return table.bounds == nullptr ? table.N * ceil_div(table.T, kChunkSize) : table.first_chunk[table.N];
}

// The last n of N for which at(n) <= number; at(0) is not above it.
template <class At>
__device__ __forceinline__ int64_t last_not_above(int64_t N, int64_t number, At at) {
  int64_t low = 0, high = N;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (at(middle) <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The sequence that has chunk number `chunk`, which is below total_chunks().
__device__ inline int64_t sequence_of_chunk(const SequenceTable& table, int64_t chunk) {
  if (table.bounds == nullptr) return chunk / ceil_div(table.T, kChunkSize);
  return last_not_above(table.N, chunk, [&](int64_t n) { return table.first_chunk[n]; });
}

// Whether token t of a batch row belongs to a sequence: those before the first offset and after the last do not.
__device__ inline bool in_a_sequence(const SequenceTable& table, int64_t t) {
  return table.bounds == nullptr || (t >= table.bounds[0] && t < table.bounds[table.N]);
}

// Takes the table's arrays from the workspace and, with a stream to run in, fills them.
SequenceTable take_sequences(const Problem& p, Workspace* workspace);
Status plan_sequences(const Tensor& cu_seqlens, const Problem& p, const SequenceTable& table, cudaStream_t stream);

}  // namespace flash_qla::cuda
