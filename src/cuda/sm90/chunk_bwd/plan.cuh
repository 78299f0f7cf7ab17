// With cu_seqlens: which tokens each chunk slot holds, found on the device, and zero gradients for the tokens before
// the first sequence and after the last.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kPlanThreads = 1024;
// Clear the tokens outside all sequences. Usually there are none; 131 and the planning block are an H200's width.
constexpr int kPaddingBlocks = 131;

// Zeroes `columns` elements of each row [0, token, head] from `begin` on.
__device__ __forceinline__ void zero_rows(const StridedTensor& t, int begin, int end, int heads, int columns) {
  if (t.data == nullptr) return;
  const int64_t count = static_cast<int64_t>(end - begin) * heads * columns;
  for (int64_t i = (blockIdx.x - 1) * static_cast<int64_t>(kPlanThreads) + threadIdx.x; i < count;
       i += static_cast<int64_t>(kPaddingBlocks) * kPlanThreads) {
    const int64_t row = i / columns, column = i % columns;
    store_element(t, row_offset(t, 0, begin + row / heads, row % heads) + column * t.stride[3], 0.0f);
  }
}

__device__ __forceinline__ void zero_tokens(const ChunkBackwardParams& p, int begin, int end) {
  if (begin >= end) return;
  zero_rows(p.dq, begin, end, p.Hq, kDim);
  zero_rows(p.dk, begin, end, p.Hq, kDim);
  zero_rows(p.dv, begin, end, p.Hv, kDim);
  zero_rows(p.dg, begin, end, p.Hv, 1);
  zero_rows(p.dbeta, begin, end, p.Hv, 1);
}

// What the blocks after the first do.
__device__ __forceinline__ void zero_padding(const ChunkBackwardParams& p) {
  int32_t first = 0, last = 0, length = 0;
  sequence_range(p, 0, &first, &length);
  sequence_range(p, p.N - 1, &last, &length);
  zero_tokens(p, 0, first);
  zero_tokens(p, last + length, p.T);
}

// Block 0: a running sum of the sequences' chunk counts, then every slot finds its sequence by bisection.
__global__ __launch_bounds__(kPlanThreads) void sm90_chunk_bwd_plan_kernel(const ChunkBackwardParams p) {
  launch_dependents();
  wait_for_predecessors();
  if (blockIdx.x > 0) {
    zero_padding(p);
    return;
  }
  if (threadIdx.x == 0) *p.small_count = 0;
  if (p.cu_seqlens == nullptr) return;
  __shared__ int32_t warp_total[kPlanThreads / 32];
  __shared__ int32_t carry;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;
  if (thread == 0) carry = 0;
  __syncthreads();
  for (int base = 0; base < p.N; base += kPlanThreads) {
    const int n = base + thread;
    int32_t begin = 0, length = 0;
    if (n < p.N) sequence_range(p, n, &begin, &length);
    const int32_t chunks = (length + kChunk - 1) / kChunk;
    int32_t sum = chunks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    int32_t before = carry;
    for (int w = 0; w < warp; ++w) before += warp_total[w];
    if (n < p.N) p.first_slot[n] = min(before + sum - chunks, p.chunk_bound);
    __syncthreads();
    // Offsets that overlap could overflow the sum: it need not grow past the bound.
    if (thread == kPlanThreads - 1) carry = min(before + sum, p.chunk_bound);
    __syncthreads();
  }
  const int32_t total = carry;
  if (thread == 0) *p.total_chunks = total;
  for (int slot = thread; slot < total; slot += kPlanThreads) {
    int low = 0,
        high = p.N;  // the last sequence that starts at or before the slot: empty ones share their successor's start
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (p.first_slot[middle] <= slot) {
        low = middle;
      } else {
        high = middle;
      }
    }
    int32_t begin, length;
    sequence_range(p, low, &begin, &length);
    const int32_t offset = (slot - p.first_slot[low]) * kChunk;
    p.chunk_map[slot] = {begin + offset, max(0, min(kChunk, length - offset)), low, 0};
  }
}

}  // namespace flash_qla::cuda::sm90
