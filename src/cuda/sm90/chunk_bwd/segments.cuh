// A long sequence in pieces ("segments"), so that few heads fill the device. The state at a segment's edge is had in
// one of two ways, chosen on the device for each (edge, value head, direction):
//   warm-up   the pass starts up to kMostWarmup chunks before the edge with a state of zeros. What is left out is at
//   most
//             exp(sum g + sum log max(1, |1 - beta |k|^2|)) of the state before the window, both sums over the window:
//             it is taken where that is at most exp(-16) = 1.1e-7, below one fp32 rounding, whatever the keys.
//   exact     else. Over a segment both passes are affine in the state that enters, S_out = M S_in + F and
//             dS_out = M^T dS_in + R, with one M for both. A first round of passes makes F, R (from zeros) and M (from
//             the identity, without values), the combination below the states at the edges, and a second round starts
//             there.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

// Chunks. Beyond it a head costs less the exact way (the first round is three passes over a segment).
constexpr int kMostWarmup = 8;
constexpr float kWarmupBound = -16.0f;
constexpr int kExact = -1;  // in place of a number of chunks

// Where a segment lies.
struct Segment {
  SequenceInfo sequence;
  int n, index, count;  // which of its sequence's segments
  int begin, end;       // chunks
};

__device__ __forceinline__ int segments_of(const ChunkBackwardParams& p, int chunks) {
  return max(1, (chunks + p.segment_chunks - 1) / p.segment_chunks);  // an empty sequence still hands on its state
}

// False: the slot is empty.
__device__ __forceinline__ bool find_segment(const ChunkBackwardParams& p, int segment, Segment* s) {
  const int4* from = reinterpret_cast<const int4*>(p.segment_map + segment);
  const int4 x = from[0], y = from[1];
  s->n = x.x;
  s->index = x.y;
  s->count = x.z;
  s->sequence = {x.w, y.x, y.y, y.z, y.w};
  s->begin = s->index * p.segment_chunks;
  s->end = min(s->begin + p.segment_chunks, s->sequence.chunks());
  return s->n >= 0;
}

// How the pass reaches the segment's edge where it enters: chunks of warm-up, or kExact.
__device__ __forceinline__ int32_t& warmup_of(const ChunkBackwardParams& p, int segment, int head, bool reverse) {
  return p.warmups[(static_cast<int64_t>(segment) * p.Hv + head) * 2 + static_cast<int>(reverse)];
}

// Which round a pass that does not start at an exact edge belongs to: 0 or 1.
__device__ __forceinline__ int32_t& round_of(const ChunkBackwardParams& p, int segment, int head, bool reverse) {
  return p.rounds[(static_cast<int64_t>(segment) * p.Hv + head) * 2 + static_cast<int>(reverse)];
}

// What the first round leaves of a segment: F, R and M, [128 of V][128 of K] each (M: [column][row]).
enum Edge : int { kEdgeForward, kEdgeReverse, kEdgeTransition };
__device__ __forceinline__ int64_t edge_index(const ChunkBackwardParams& p, int segment, int head, Edge edge) {
  return (static_cast<int64_t>(segment) * p.Hv + head) * kEdgesOfSegment + edge;
}

// M is needed where an exact edge follows an exact edge.
__device__ __forceinline__ bool needs_transition(const ChunkBackwardParams& p, const Segment& s, int segment,
                                                 int head) {
  if (s.index == 0 || s.index + 1 == s.count) return false;
  return (warmup_of(p, segment, head, false) == kExact && warmup_of(p, segment + 1, head, false) == kExact) ||
         (warmup_of(p, segment, head, true) == kExact && warmup_of(p, segment - 1, head, true) == kExact);
}

// How a pass goes through a segment.
struct SegmentPass {
  bool is_first, is_last;  // of its sequence, in the pass's direction
  int warmup;              // chunks, or kExact
  bool feeds;              // the segment after it starts at an exact edge
};

__device__ __forceinline__ SegmentPass segment_pass(const ChunkBackwardParams& p, const Segment& s, int segment,
                                                    int head, bool reverse) {
  SegmentPass pass;
  pass.is_first = s.index == (reverse ? s.count - 1 : 0);
  pass.is_last = s.index == (reverse ? 0 : s.count - 1);
  pass.warmup = pass.is_first ? 0 : warmup_of(p, segment, head, reverse);
  pass.feeds = !pass.is_last && warmup_of(p, segment + (reverse ? -1 : 1), head, reverse) == kExact;
  return pass;
}

constexpr int kWarmupThreads = kMostWarmup * kChunk;  // a thread a token of the longest window

// One block a (segment, value head, direction).
template <typename T>
__global__ __launch_bounds__(kWarmupThreads) void sm90_chunk_bwd_warmups_kernel(const ChunkBackwardParams p) {
  launch_dependents();
  wait_for_predecessors();
  const bool reverse = blockIdx.x % 2 == 1;
  const int head = blockIdx.x / 2 % p.Hv, segment = blockIdx.x / 2 / p.Hv;
  Segment s;
  if (!find_segment(p, segment, &s)) return;
  __shared__ float chunk_sums[kWarmupThreads / 32];
  const int chunks = s.sequence.chunks(), which = threadIdx.x / kChunk, row = threadIdx.x % kChunk;
  // The window's chunks, counted from the edge.
  const int c = reverse ? s.end + which : s.begin - 1 - which;
  const int most = reverse ? chunks - s.end : s.begin;
  float bound = 0.0f;
  if (which < min(most, kMostWarmup)) {
    const int token = s.sequence.token + c * kChunk + row, valid = min(kChunk, s.sequence.length - c * kChunk);
    if (row < valid) {
      const uint4* k = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.k.data) +
                                                      row_offset(p.k, s.sequence.batch, token, head / p.group));
      float g = 0.0f, square = 0.0f;
      // Of a cumsum the chunk's last is the sum.
      if (p.g.data != nullptr && (!p.g_is_cumsum || row == valid - 1)) {
        constexpr float kMinLogDecay = -80.0f;  // docs/math.md
        g = load_element(p.g, row_offset(p.g, s.sequence.batch, token, head));
        if (!p.g_is_cumsum) g = g < kMinLogDecay ? kMinLogDecay : g;
      }
      const float beta =
          p.beta.data == nullptr ? 1.0f : load_element(p.beta, row_offset(p.beta, s.sequence.batch, token, head));
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        const uint4 bits = k[i];
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 x = unpack2<T>(words[w]);
          square += x.x * x.x + x.y * x.y;
        }
      }
      const float factor = fabsf(1.0f - beta * square);
      bound = g + (factor <= 1.0f ? 0.0f : logf(factor));
    }
  }
  bound = warp_sum(bound);
  if (threadIdx.x % 32 == 0) chunk_sums[threadIdx.x / 32] = bound;
  __syncthreads();
  if (threadIdx.x == 0) {
    int warmup = kExact;
    float sum = 0.0f;
    for (int w = 1; w <= min(most, kMostWarmup) && warmup == kExact; ++w) {
      sum += chunk_sums[2 * w - 2] + chunk_sums[2 * w - 1];
      // NaN is never small enough. A window that reaches the sequence's end starts from what is given there.
      if (sum <= kWarmupBound || w == most) warmup = w;
    }
    warmup_of(p, segment, head, reverse) = most == 0 ? 0 : warmup;
  }
}

}  // namespace flash_qla::cuda::sm90
