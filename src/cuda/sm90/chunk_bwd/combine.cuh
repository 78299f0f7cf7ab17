// The states at segments' exact edges (segments.cuh), one segment after another.
#pragma once

#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kCombineThreads = 256;
constexpr int kCombineColumns = 8;        // of V, a block: 16 blocks share the reading of M
constexpr int kCombineStride = kDim + 1;  // M in shared memory: rows and columns are both read without bank conflicts
constexpr uint32_t kCombineBytes = (kDim * kCombineStride + kCombineColumns * kDim) * 4;

// F and R become what leaves each segment. One block a (sequence, value head, direction,
// columns of V).
__global__ __launch_bounds__(kCombineThreads) void sm90_chunk_bwd_combine_kernel(const ChunkBackwardParams p) {
  launch_dependents();
  wait_for_predecessors();
  extern __shared__ float combine_smem[];
  float *M = combine_smem, *X = combine_smem + kDim * kCombineStride;  // X [columns][128 of K]
  constexpr int kColumnBlocks = kDim / kCombineColumns;
  int index = blockIdx.x;
  const int v0 = index % kColumnBlocks * kCombineColumns;
  index /= kColumnBlocks;
  const bool reverse = index % 2 == 1;
  index /= 2;
  const int head = index % p.Hv, n = index / p.Hv, thread = threadIdx.x;
  const int first = p.cu_seqlens == nullptr ? n * p.segments_per_sequence : p.first_segment[n];
  Segment s;
  if (!find_segment(p, first, &s)) return;
  const Edge edge = reverse ? kEdgeReverse : kEdgeForward;
  auto slab = [&](int segment, Edge e) { return p.edges + edge_index(p, segment, head, e) * (kDim * kDim); };

  // A thread has half of the columns of one row of K.
  const int k = thread % kDim, columns = thread / kDim * (kCombineColumns / 2);
  for (int i = 1; i + 1 < s.count; ++i) {
    const int segment = first + (reverse ? s.count - 1 - i : i), before = segment + (reverse ? 1 : -1);
    const int after = segment + (reverse ? -1 : 1);
    if (warmup_of(p, segment, head, reverse) != kExact || warmup_of(p, after, head, reverse) != kExact) continue;
    const float4* from = reinterpret_cast<const float4*>(slab(segment, kEdgeTransition));
    const float* enters = slab(before, edge) + v0 * kDim;
    float* leaves = slab(segment, edge) + v0 * kDim;
    __syncthreads();
#pragma unroll 16
    for (int x = thread; x < kDim * kDim / 4; x += kCombineThreads) {
      const float4 four = from[x];
      float* to = M + x / (kDim / 4) * kCombineStride + x % (kDim / 4) * 4;
      to[0] = four.x;
      to[1] = four.y;
      to[2] = four.z;
      to[3] = four.w;
    }
    for (int x = thread; x < kCombineColumns * kDim; x += kCombineThreads) X[x] = enters[x];
    __syncthreads();
    float sum[kCombineColumns / 2];
#pragma unroll
    for (int v = 0; v < kCombineColumns / 2; ++v) sum[v] = leaves[(columns + v) * kDim + k];
    // M is stored by columns: row k of M for the forward pass, column k for the reverse one.
    const int row_step = reverse ? 1 : kCombineStride;
    const float* m = M + k * (reverse ? kCombineStride : 1);
#pragma unroll 8
    for (int other = 0; other < kDim; ++other) {
      const float factor = m[other * row_step];
#pragma unroll
      for (int v = 0; v < kCombineColumns / 2; ++v) sum[v] += factor * X[(columns + v) * kDim + other];
    }
#pragma unroll
    for (int v = 0; v < kCombineColumns / 2; ++v) leaves[(columns + v) * kDim + k] = sum[v];
    // The next segment reads what this block's threads have just written.
    __threadfence_block();
  }
}

}  // namespace flash_qla::cuda::sm90
