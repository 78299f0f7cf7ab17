// The states at segments' exact edges (segments.cuh), one segment after another.
#pragma once

#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kCombineThreads = 256;
constexpr int kCombineColumns = 8;        // of V, a block: 16 blocks share the reading of M
constexpr int kCombineStride = kDim + 1;  // M in shared memory: rows and columns are both read without bank conflicts
constexpr uint32_t kCombineBytes = (kDim * kCombineStride + kCombineColumns * kDim) * 4;

// Longer chains are taken in pieces of so many segments.
constexpr int kCombineFlags = kCombineThreads;

// F and R become what leaves each segment. One block a (sequence, value head, direction, columns of V).
__global__ __launch_bounds__(kCombineThreads) void sm90_chunk_bwd_combine_kernel(const ChunkBackwardParams p) {
  launch_dependents();
  wait_for_predecessors();
  extern __shared__ float combine_smem[];
  float *M = combine_smem, *X = combine_smem + kDim * kCombineStride;  // X [columns][128 of K]
  __shared__ bool needed[kCombineFlags];
  constexpr int kColumnBlocks = kDim / kCombineColumns;
  int index = blockIdx.x;
  const int v0 = index % kColumnBlocks * kCombineColumns;
  index /= kColumnBlocks;
  const bool reverse = index % 2 == 1;
  index /= 2;
  const int head = index % p.Hv, first = p.first_segment[index / p.Hv], thread = threadIdx.x;
  Segment s;
  if (first >= p.segment_bound || !find_segment(p, first, &s)) return;
  const Edge edge = reverse ? kEdgeReverse : kEdgeForward;
  auto slab = [&](int segment, Edge e) { return p.edges + edge_index(p, segment, head, e) * (kDim * kDim); };
  const int last = first + s.count - 1, direction = reverse ? -1 : 1;
  auto segment_of = [&](int turn) { return reverse ? last - turn : first + turn; };

  // A thread has half of the columns of one row of K.
  const int k = thread % kDim, columns = thread / kDim * (kCombineColumns / 2);
  // M is stored by columns: row k of M for the forward pass, column k for the reverse one.
  const int other_step = reverse ? 1 : kCombineStride;
  const float* m = M + k * (reverse ? kCombineStride : 1);
  for (int base = 1; base + 1 < s.count; base += kCombineFlags) {
    const int turns = min(kCombineFlags, s.count - 1 - base);
    __syncthreads();
    if (thread < turns) {
      const int segment = segment_of(base + thread);
      needed[thread] =
          warmup_of(p, segment, head, reverse) == kExact && warmup_of(p, segment + direction, head, reverse) == kExact;
    }
    __syncthreads();
    auto next_needed = [&](int turn) {
      while (turn < turns && !needed[turn]) ++turn;
      return turn;
    };
    constexpr int kFetches = kDim * kDim / 4 / kCombineThreads;
    float4 fetched[kFetches];
    auto fetch = [&](int turn) {
      if (turn >= turns) return;
      const float4* from = reinterpret_cast<const float4*>(slab(segment_of(base + turn), kEdgeTransition)) + thread;
#pragma unroll
      for (int i = 0; i < kFetches; ++i) fetched[i] = from[i * kCombineThreads];
    };
    int turn = next_needed(0);
    fetch(turn);
    while (turn < turns) {
      const int segment = segment_of(base + turn);
      const float* enters = slab(segment - direction, edge) + v0 * kDim;
      float* leaves = slab(segment, edge) + v0 * kDim;
      float sum[kCombineColumns / 2];
#pragma unroll
      for (int v = 0; v < kCombineColumns / 2; ++v) sum[v] = leaves[(columns + v) * kDim + k];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kFetches; ++i) {
        const int x = thread + i * kCombineThreads;
        float* to = M + x / (kDim / 4) * kCombineStride + x % (kDim / 4) * 4;
        to[0] = fetched[i].x;
        to[1] = fetched[i].y;
        to[2] = fetched[i].z;
        to[3] = fetched[i].w;
      }
      for (int x = thread; x < kCombineColumns * kDim; x += kCombineThreads) X[x] = enters[x];
      __syncthreads();
      turn = next_needed(turn + 1);
      fetch(turn);  // while this one is worked on
#pragma unroll 16
      for (int other = 0; other < kDim; ++other) {
        const float factor = m[other * other_step];
#pragma unroll
        for (int v = 0; v < kCombineColumns / 2; ++v) sum[v] += factor * X[(columns + v) * kDim + other];
      }
#pragma unroll
      for (int v = 0; v < kCombineColumns / 2; ++v) leaves[(columns + v) * kDim + k] = sum[v];
    }
  }
}

}  // namespace flash_qla::cuda::sm90
