// A long sequence in pieces ("segments"), so that few heads fill the device. The state at a segment's edge is had in
// one of two ways, chosen on the device for each (edge, value head, direction):
//   warm-up   the pass starts up to kMostWarmup chunks before the edge with a state of zeros. What is left out is at
//   most
//             exp(sum g + sum log max(1, |1 - beta |k|^2|)) of the state before the window, both sums over the window
//             (prepare.cuh leaves them for each chunk):
//             it is taken where that is at most what a call lets go (decay_threshold), whatever the keys.
//   exact     else. Over a segment both passes are affine in the state that enters, S_out = M S_in + F and
//             dS_out = M^T dS_in + R, with one M for both. A first round of passes makes F, R (from zeros) and M (from
//             the identity, without values), the combination below the states at the edges, and a second round starts
//             there.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kExact = -1;  // in place of a number of chunks

// Where a segment lies.
struct Segment {
  SequenceInfo sequence;
  int n, index, count;  // which of its sequence's segments
  int begin, end;       // chunks
};

__device__ __forceinline__ int segments_of(const Args& p, int chunks) {
  return max(1, (chunks + p.segment_chunks - 1) / p.segment_chunks);  // an empty sequence still hands on its state
}

// False: the slot is empty.
__device__ __forceinline__ bool find_segment(const Args& p, int segment, Segment* s) {
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
__device__ __forceinline__ int32_t& warmup_of(const Args& p, int segment, int head, bool reverse) {
  return p.warmups[(static_cast<int64_t>(segment) * p.Hv + head) * 2 + static_cast<int>(reverse)];
}

// What a round goes through, listed one after another so that no block that has nothing to do comes before one that
// has.
enum Pass : int { kReversePass, kForwardPass, kTransitionPass };
struct SegmentWork {
  int piece;  // segment * Hv + head
  Pass pass;
};
__device__ __forceinline__ int32_t list_entry(int piece, Pass pass) { return piece * 3 + pass; }
__device__ __forceinline__ SegmentWork segment_work(int32_t entry) { return {entry / 3, static_cast<Pass>(entry % 3)}; }
__device__ __forceinline__ int32_t* round_list(const Args& p, int round) {
  return p.round_lists + static_cast<int64_t>(round) * 3 * p.segment_bound * p.Hv;
}

// What the first round leaves of a segment: F, R and M, [128 of V][128 of K] each (M: [column][row]).
enum Edge : int { kEdgeForward, kEdgeReverse, kEdgeTransition };
__device__ __forceinline__ int64_t edge_index(const Args& p, int segment, int head, Edge edge) {
  return (static_cast<int64_t>(segment) * p.Hv + head) * kEdgesOfSegment + edge;
}

// The warm-ups of a segment and of the one after it in the pass's direction. Both are asked for at once, whether or not
// there is such a one: each takes as long as all of them.
struct Warmups {
  int own, next;
};
__device__ __forceinline__ Warmups warmups_at(const Args& p, int segment, int head, bool reverse) {
  const int next = min(max(segment + (reverse ? -1 : 1), 0), p.segment_bound - 1);
  return {warmup_of(p, segment, head, reverse), warmup_of(p, next, head, reverse)};
}

// M is needed where an exact edge follows an exact edge, in a direction.
__device__ __forceinline__ bool needs_transition(const Segment& s, const Warmups& warmups) {
  return s.index != 0 && s.index + 1 != s.count && warmups.own == kExact && warmups.next == kExact;
}

// How a pass goes through a segment.
struct SegmentPass {
  bool is_first, is_last;  // of its sequence, in the pass's direction
  int warmup;              // chunks, or kExact
  bool feeds;              // the segment after it starts at an exact edge
};

__device__ __forceinline__ SegmentPass segment_pass(const Segment& s, const Warmups& warmups, bool reverse) {
  SegmentPass pass;
  pass.is_first = s.index == (reverse ? s.count - 1 : 0);
  pass.is_last = s.index == (reverse ? 0 : s.count - 1);
  pass.warmup = pass.is_first ? 0 : warmups.own;
  pass.feeds = !pass.is_last && warmups.next == kExact;
  return pass;
}

// The shortest window before an edge (behind it for the reverse pass) over which what is left out stays below the
// bound; kExact if there is none. Waits until prepare.cuh has left the sums of the window's chunks.
__device__ __forceinline__ int find_warmup(const Args& p, const Segment& s, int head, bool reverse) {
  const int most = reverse ? s.sequence.chunks() - s.end : s.begin;
  if (most == 0) return 0;
  for (bool all = false; !all;) {  // asked for at once
    all = true;
#pragma unroll
    for (int w = 1; w <= kMostWarmup; ++w) {
      const int c = reverse ? s.end - 1 + min(w, most) : s.begin - min(w, most);
      all &= load_relaxed(p.prepared + static_cast<int64_t>(s.sequence.first_slot + c) * p.Hq + head / p.group) != 0;
    }
    if (!all) __nanosleep(500);
  }
  acquire_loads();
  float growths[kMostWarmup];  // all on their way at once
#pragma unroll
  for (int w = 1; w <= kMostWarmup; ++w) {
    const int c = reverse ? s.end - 1 + min(w, most) : s.begin - min(w, most);
    growths[w - 1] = p.log_decay_sums[static_cast<int64_t>(s.sequence.first_slot + c) * p.Hv + head];
  }
  float sum = 0.0f;
  int warmup = kExact;
#pragma unroll
  for (int w = 1; w <= kMostWarmup; ++w) {
    sum += growths[w - 1];
    // NaN is never small enough. A window that reaches the sequence's end starts from what is given there.
    if (warmup == kExact && w <= most && (sum <= p.decay_threshold || w == most)) warmup = w;
  }
  return warmup;
}

}  // namespace flash_qla::cuda::sm90::bwd
