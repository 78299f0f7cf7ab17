// Between the passes over segments (segments.cuh): how they reach their edges, which of them belong to which round, and after the first round the
// states at exact edges, one segment after another.
#pragma once

#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kRoundsThreads = 1024;

// One block. Passes that warm up may run in either round, unless an exact edge needs what they leave: they fill what
// the first round leaves idle of its last wave of blocks.
__global__ __launch_bounds__(kRoundsThreads) void sm90_chunk_bwd_rounds_kernel(const ChunkBackwardParams p,
                                                                               int multiprocessors) {
  launch_dependents();
  wait_for_predecessors();
  __shared__ int3 warp_total[kRoundsThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, pieces = p.segment_bound * p.Hv;
  // Blocks, in pairs of halves of V: bound to the first round, to the second, and free. A thread has a run of pieces,
  // so that the free ones are numbered in order.
  for (int i = thread; i < 2 * pieces; i += kRoundsThreads) {
    const int segment = i / 2 / p.Hv, head = i / 2 % p.Hv;
    const bool reverse = i % 2 == 1;
    Segment s;
    if (find_segment(p, segment, &s)) warmup_of(p, segment, head, reverse) = find_warmup(p, s, head, reverse);
  }
  __syncthreads();
  const int each = (pieces + kRoundsThreads - 1) / kRoundsThreads;
  const int begin = min(thread * each, pieces), end = min(begin + each, pieces);
  int3 sum = make_int3(0, 0, 0);
  for (int piece = begin; piece < end; ++piece) {
    const int segment = piece / p.Hv, head = piece % p.Hv;
    Segment s;
    if (!find_segment(p, segment, &s)) continue;
    sum.x += needs_transition(p, s, segment, head);
    for (int reverse = 0; reverse < 2; ++reverse) {
      const SegmentPass pass = segment_pass(p, s, segment, head, reverse);
      sum.x += pass.feeds;
      sum.y += pass.warmup == kExact;
      sum.z += pass.warmup != kExact && !pass.feeds;
    }
  }
  int3 before = sum;  // up to and with this thread
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, before.x, step), y = __shfl_up_sync(0xffffffffu, before.y, step);
    const int z = __shfl_up_sync(0xffffffffu, before.z, step);
    if (lane >= step) before = make_int3(before.x + x, before.y + y, before.z + z);
  }
  if (lane == 31) warp_total[warp] = before;
  __syncthreads();
  int3 all = make_int3(0, 0, 0);
  int free_before = before.z - sum.z;
  for (int w = 0; w < kRoundsThreads / 32; ++w) {
    const int3 t = warp_total[w];
    if (w < warp) free_before += t.z;
    all = make_int3(all.x + t.x, all.y + t.y, all.z + t.z);
  }
  // The fewest waves in all; without exact edges all is one round.
  int free_in_first = all.z;
  if (all.y > 0) {
    auto waves = [&](int pairs) { return (2 * pairs + multiprocessors - 1) / multiprocessors; };
    int best = 1 << 30;
    for (int first = max(1, waves(all.x)); first <= max(1, waves(all.x + all.z)); ++first) {
      const int fitting = max(0, min(all.z, first * multiprocessors / 2 - all.x));
      const int total = first + waves(all.y + all.z - fitting);
      if (total < best) {
        best = total;
        free_in_first = fitting;
      }
    }
  }
  for (int piece = begin; piece < end; ++piece) {
    const int segment = piece / p.Hv, head = piece % p.Hv;
    Segment s;
    if (!find_segment(p, segment, &s)) continue;
    for (int reverse = 0; reverse < 2; ++reverse) {
      const SegmentPass pass = segment_pass(p, s, segment, head, reverse);
      const bool free = pass.warmup != kExact && !pass.feeds;
      round_of(p, segment, head, reverse) = free && free_before >= free_in_first ? 1 : 0;
      free_before += free;
    }
  }
}

constexpr int kCombineThreads = 256;
constexpr int kCombineColumns = 8;  // of V, a block: 16 blocks share the reading of M
// M in shared memory: rows stay 16-byte aligned, and a warp reads 32 of a row or four each of 32 rows without bank
// conflicts.
constexpr int kCombineStride = kDim + 4;
constexpr uint32_t kCombineBytes = (kDim * kCombineStride + kCombineColumns * kDim) * 4;

// Longer chains are taken in pieces of so many segments.
constexpr int kCombineFlags = kCombineThreads;

// F and R become what leaves each segment. One block a (sequence, value head, direction, columns of V).
__global__ __launch_bounds__(kCombineThreads) void sm90_chunk_bwd_combine_kernel(const ChunkBackwardParams p) {
  launch_dependents();
  wait_for_predecessors();
  extern __shared__ __align__(16) float combine_smem[];
  float *M = combine_smem, *X = combine_smem + kDim * kCombineStride;  // X [128 of K][columns]
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
        *reinterpret_cast<float4*>(M + x / (kDim / 4) * kCombineStride + x % (kDim / 4) * 4) = fetched[i];
      }
      for (int x = thread; x < kCombineColumns * kDim; x += kCombineThreads) {
        X[x % kDim * kCombineColumns + x / kDim] = enters[x];
      }
      __syncthreads();
      turn = next_needed(turn + 1);
      fetch(turn);  // while this one is worked on
#pragma unroll 4
      for (int other = 0; other < kDim; other += 4) {
        // M is stored by columns: row k of M for the forward pass, column k for the reverse one.
        float m[4];
        if (reverse) {
          const float4 four = *reinterpret_cast<const float4*>(M + k * kCombineStride + other);
          m[0] = four.x;
          m[1] = four.y;
          m[2] = four.z;
          m[3] = four.w;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) m[i] = M[(other + i) * kCombineStride + k];
        }
        static_assert(kCombineColumns == 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 x = *reinterpret_cast<const float4*>(X + (other + i) * kCombineColumns + columns);
          sum[0] += m[i] * x.x;
          sum[1] += m[i] * x.y;
          sum[2] += m[i] * x.z;
          sum[3] += m[i] * x.w;
        }
      }
#pragma unroll
      for (int v = 0; v < kCombineColumns / 2; ++v) leaves[(columns + v) * kDim + k] = sum[v];
    }
  }
}

}  // namespace flash_qla::cuda::sm90
