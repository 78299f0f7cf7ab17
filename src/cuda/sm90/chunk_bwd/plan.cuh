// The counters at zero. With cu_seqlens: which tokens each chunk slot and pair of chunks holds, found on the device.
#pragma once

#include "cuda/common/block_scan.cuh"
#include "cuda/common/sequences.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kPlanThreads = 1024;
// The last sequence that starts at or before `slot`: empty ones share their successor's start.
__device__ __forceinline__ int sequence_of(const int32_t* first, int N, int slot) {
  return static_cast<int>(last_not_above(N, slot, [&](int64_t n) { return first[n]; }));
}

// One block: running sums of the sequences' chunks, segments and pairs, then every slot finds its sequence by
// bisection.
__global__ __launch_bounds__(kPlanThreads) void sm90_chunk_bwd_plan_kernel(const Args p) {
  // In this order: what comes after it begins beside it and takes for granted that all before it has ended.
  wait_for_predecessors();
  launch_dependents();
  if (threadIdx.x == 0) {
    *p.small_count = 0;
    *p.last_count = 0;
    *p.ready_count = 0;
    *p.next_item = 0;
  }
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(p.pair_bound) * p.Hq; i += kPlanThreads) {
    p.progress[i] = 0;
    p.ready[i] = 0;
  }
  if (p.beside || p.segment_chunks > 0) {  // nobody else looks
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(p.chunk_bound) * p.Hq; i += kPlanThreads) p.prepared[i] = 0;
  }
  const bool packed = p.cu_seqlens != nullptr;
  if (!packed && p.segment_chunks == 0) return;
  __shared__ int32_t sums[3][kPlanThreads / 32];
  __shared__ int32_t warp_bound[kPlanThreads / 32];
  __shared__ int32_t last_bound;  // the largest offset so far
  const int thread = threadIdx.x;
  int32_t total[3] = {};  // chunks, segments and pairs
  if (p.N == 1) {         // there is nothing to add up, and what runs for the first time takes longest to come
    total[0] = sequence_info(p, 0).chunks();
    total[1] = p.segment_chunks > 0 ? segments_of(p, total[0]) : 0;
    total[2] = pairs_of(total[0]);
  }
  if (thread == 0) {
    if (packed && p.N > 1) p.bounds[0] = last_bound = given_offset(p, 0);
    if (p.N == 1 && p.segment_chunks > 0) p.first_segment[0] = 0;
  }
  __syncthreads();
  for (int base = p.N == 1 ? p.N : 0; base < p.N; base += kPlanThreads) {
    const int n = base + thread;
    int32_t length = n < p.N ? p.T : 0;
    if (packed) {
      // A running maximum: where offsets go back, a sequence begins where those before it have ended.
      const auto [before, bound] = block_scan(n < p.N ? given_offset(p, n + 1) : 0, last_bound, warp_bound,
                                              [](int32_t a, int32_t b) { return max(a, b); });
      if (n < p.N) {
        p.bounds[n + 1] = bound;
        length = bound - before;
      }
      __syncthreads();
      if (thread == kPlanThreads - 1) last_bound = bound;
    }
    const int32_t chunks = (length + kChunk - 1) / kChunk;
    const int32_t pairs = pairs_of(chunks);
    // Segments, or pairs whose states are kept in fp32: no call has both.
    const int32_t segments = n >= p.N                                    ? 0
                             : p.segment_chunks > 0                      ? segments_of(p, chunks)
                             : p.exact_by_sequence && wants_exact(pairs) ? pairs
                                                                         : 0;
    int32_t before[3] = {chunks, segments, pairs}, all[3];
    sum_before(before, all, sums);
    if (n < p.N) {
      if (packed) {
        p.first_slot[n] = total[0] + before[0];
        p.first_pair[n] = total[2] + before[2];
      }
      const int32_t first = total[1] + before[1];
      if (p.segment_chunks > 0) p.first_segment[n] = first;
      if (p.exact_by_sequence) p.first_exact[n] = segments > 0 ? first : -1;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) total[i] += all[i];
  }
  __syncthreads();  // what is looked up below is there
  if (packed) {
    if (thread == 0) {
      *p.total_chunks = total[0];
      *p.total_pairs = total[2];
    }
    for (int slot = thread; slot < total[0]; slot += kPlanThreads) {
      const int n = sequence_of(p.first_slot, p.N, slot);
      const SequenceInfo sequence = sequence_info(p, n);
      const int32_t offset = (slot - sequence.first_slot) * kChunk;
      p.chunk_map[slot] = {sequence.token + offset, min(kChunk, sequence.length - offset), n, 0};
    }
    for (int pair = thread; pair < total[2]; pair += kPlanThreads) {
      const int n = sequence_of(p.first_pair, p.N, pair);
      const SequenceInfo sequence = sequence_info(p, n);
      const int32_t chunk = 2 * (pair - sequence.first_pair);
      p.pair_map[pair] = {sequence.token + chunk * kChunk, min(2 * kChunk, sequence.length - chunk * kChunk),
                          sequence.first_slot + chunk, n};
    }
  }
  if (p.segment_chunks == 0) return;
  for (int segment = thread; segment < p.segment_bound; segment += kPlanThreads) {
    SegmentInfo info{};
    info.n = -1;
    if (segment < total[1]) {
      info.n = sequence_of(p.first_segment, p.N, segment);
      info.index = segment - p.first_segment[info.n];
      const SequenceInfo sequence = sequence_info(p, info.n);
      info.count = segments_of(p, sequence.chunks());
      info.token = sequence.token;
      info.length = sequence.length;
      info.first_slot = sequence.first_slot;
      info.batch = sequence.batch;
      info.first_pair = sequence.first_pair;
    }
    p.segment_map[segment] = info;
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
