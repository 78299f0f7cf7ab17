// Between the passes over segments (segments.cuh): how they reach their edges, which of them belong to which round, and
// after the first round the states at exact edges, one segment after another.
#pragma once

#include "cuda/common/block_scan.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"
#include "cuda/sm90/context_parallel/chain_scan.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kRoundsThreads = 1024;
// Of so many passes it keeps the warm-ups in shared memory: 24 segments of 128 heads, 384 of 8.
constexpr int kKnownWarmups = 6144;

// One block. Passes that warm up may run in either round, unless an exact edge needs what they leave: they fill what
// the first round leaves idle of its last wave of blocks.
__global__ __launch_bounds__(kRoundsThreads) void sm90_chunk_bwd_rounds_kernel(const Args p, int multiprocessors) {
  // Beside prepare.cuh, whose chunks it waits for (find_warmup): all blocks of that kernel have started, and the plan
  // kernel has ended. At its end it waits for all of them, for the sake of the passes, which wait for this one alone.
  launch_dependents();
  __shared__ int32_t sums[3][kRoundsThreads / 32];
  __shared__ int listed[3];  // in the first round, in the second, and of that at exact edges
  __shared__ int8_t found[kKnownWarmups];
  const int thread = threadIdx.x, pieces = p.segment_bound * p.Hv;
  // Blocks, in pairs of halves of V: bound to the first round, to the second, and free. A thread has a run of pieces,
  // so that the free ones are numbered in order.
  for (int i = thread; i < 2 * p.N * p.Hv; i += kRoundsThreads) p.chain_listed[i] = 0;
  if (thread == 0) *p.chain_count = 0;
  if (thread < 3) listed[thread] = 0;
  for (int i = thread; i < 2 * pieces; i += kRoundsThreads) {
    const int segment = i / 2 / p.Hv, head = i / 2 % p.Hv;
    const bool reverse = i % 2 == 1;
    Segment s;
    if (!find_segment(p, segment, &s)) {
      // The last segment asks for its successor's, of which it takes nothing (warmups_at): initcheck wants it written.
      if (kWarpArrivals == 32) warmup_of(p, segment, head, reverse) = kExact;
      continue;
    }
    const int warmup = find_warmup(p, s, head, reverse);
    warmup_of(p, segment, head, reverse) = warmup;
    if (i < kKnownWarmups) found[i] = static_cast<int8_t>(warmup);
  }
  __syncthreads();
  const bool all_found = 2 * pieces <= kKnownWarmups;
  auto warmups_of = [&](int segment, int head, bool reverse) -> Warmups {
    if (!all_found) return warmups_at(p, segment, head, reverse);
    const int next = min(max(segment + (reverse ? -1 : 1), 0), p.segment_bound - 1), pass = reverse ? 1 : 0;
    return {found[(segment * p.Hv + head) * 2 + pass], found[(next * p.Hv + head) * 2 + pass]};
  };
  const int each = (pieces + kRoundsThreads - 1) / kRoundsThreads;
  const int begin = min(thread * each, pieces), end = min(begin + each, pieces);
  int32_t before[3] = {};  // of the thread at first, then of those before it
  for (int piece = begin; piece < end; ++piece) {
    const int segment = piece / p.Hv, head = piece % p.Hv;
    Segment s;
    if (!find_segment(p, segment, &s)) continue;
    bool transition = false;
    for (int reverse = 0; reverse < 2; ++reverse) {
      const int chain = (s.n * p.Hv + head) * 2 + reverse;
      const Warmups warmups = warmups_of(segment, head, reverse == 1);
      if (needs_transition(s, warmups)) {
        transition = true;
        if (atomicExch(p.chain_listed + chain, 1) == 0) {
          p.chains[atomicAdd(p.chain_count, 1)] = chain;  // in any order: it changes no result
        }
      }
      const SegmentPass pass = segment_pass(s, warmups, reverse == 1);
      before[0] += pass.feeds;
      before[1] += pass.warmup == kExact;
      before[2] += pass.warmup != kExact && !pass.feeds;
    }
    before[0] += transition;
  }
  int32_t counts[3];
  sum_before(before, counts, sums);
  const int bound = counts[0], at_exact = counts[1], unbound = counts[2];
  int free_before = before[2];
  // The fewest waves in all; without exact edges all is one round.
  int free_in_first = unbound;
  if (at_exact > 0) {
    auto waves = [&](int pairs) { return (2 * pairs + multiprocessors - 1) / multiprocessors; };
    int best = 1 << 30;
    for (int first = max(1, waves(bound)); first <= max(1, waves(bound + unbound)); ++first) {
      const int fitting = max(0, min(unbound, first * multiprocessors / 2 - bound));
      const int total = first + waves(at_exact + unbound - fitting);
      if (total < best) {
        best = total;
        free_in_first = fitting;
      }
    }
  }
  // The order within a list changes no result. In the second round those at exact edges come last: the others need not
  // wait for them (passes/kernel.cuh).
  const int free_in_second = unbound - free_in_first;
  auto list = [&](int round, int piece, Pass pass) {
    round_list(p, round)[atomicAdd(&listed[round], 1)] = list_entry(piece, pass);
  };
  auto list_exact = [&](int piece, Pass pass) {
    round_list(p, 1)[free_in_second + atomicAdd(&listed[2], 1)] = list_entry(piece, pass);
  };
  for (int piece = begin; piece < end; ++piece) {
    const int segment = piece / p.Hv, head = piece % p.Hv;
    Segment s;
    if (!find_segment(p, segment, &s)) continue;
    const Warmups both[2] = {warmups_of(segment, head, false), warmups_of(segment, head, true)};
    if (needs_transition(s, both[0]) || needs_transition(s, both[1])) list(0, piece, kTransitionPass);
#pragma unroll
    for (int reverse = 0; reverse < 2; ++reverse) {
      const SegmentPass at = segment_pass(s, both[reverse], reverse == 1);
      const Pass pass = reverse ? kReversePass : kForwardPass;
      if (at.warmup == kExact) {
        if (at.feeds) list(0, piece, pass);
        list_exact(piece, pass);
      } else if (at.feeds) {
        list(0, piece, pass);
      } else {
        list(free_before >= free_in_first ? 1 : 0, piece, pass);
        ++free_before;
      }
    }
  }
  __syncthreads();
  if (thread == 0) {
    p.round_counts[0] = listed[0];
    p.round_counts[1] = listed[1] + listed[2];
  }
  wait_for_predecessors();
}

// F and R become what leaves each segment, in the chains that the rounds kernel has listed: (sequence, value head,
// direction), a block 16 columns of V. Where an edge between exact ones warms up, the chain begins again.
__global__ __launch_bounds__(cp::kChainThreads, 1) void sm90_chunk_bwd_scan_kernel(const Args p) {
  launch_dependents();
  cp::ChainMemory& memory = *dynamic_shared<cp::ChainMemory>();
  const cp::ChainPlace at;
  const int lane = threadIdx.x % 32, items = *p.chain_count * cp::kChainSlices;
  bool waited = false;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int chain = p.chains[item / cp::kChainSlices], v0 = item % cp::kChainSlices * cp::kChainColumns;
    const bool reverse = chain % 2 == 1;
    const int head = chain / 2 % p.Hv, first = p.first_segment[chain / 2 / p.Hv];
    Segment s;
    if (!find_segment(p, first, &s)) continue;
    const Edge edge = reverse ? kEdgeReverse : kEdgeForward;
    const int direction = reverse ? -1 : 1, begin = reverse ? first + s.count - 1 : first;
    const auto matrix = [&](int turn, Edge e) {
      return p.edges + edge_index(p, begin + direction * turn, head, e) * cp::kMatrix;
    };
    const auto load = [&](int turn, cp::ChainShare& columns) {
      const float* from = matrix(turn, edge) + v0 * kHeadDim + at.row;
#pragma unroll
      for (int i = 0; i < cp::kChainColumns; ++i) columns[i] = from[i * kHeadDim];
    };
    const int64_t stride = direction * (edge_index(p, 1, 0, edge) - edge_index(p, 0, 0, edge)) * cp::kMatrix;
    // Every warp finds out which of the next 32 segments are passed through.
    for (int base = 1; base + 1 < s.count; base += 32) {
      bool passed = false;
      if (base + lane + 1 < s.count) {
        const Warmups warmups = warmups_at(p, begin + direction * (base + lane), head, reverse);
        passed = warmups.own == kExact && warmups.next == kExact;
      }
      uint64_t left = __ballot_sync(0xffffffffu, passed);
      if (!waited) wait_for_predecessors();
      waited = true;
      for (int turn = base; left != 0;) {
        const int skipped = __ffsll(static_cast<long long>(left)) - 1;
        const int steps = __ffsll(static_cast<long long>(~(left >> skipped))) - 1;
        turn += skipped;
        cp::ChainShare state;
        load(turn - 1, state);
        const auto add = [&](int32_t step, cp::ChainShare& added) { load(turn + step, added); };
        const auto leave = [&](int32_t step, const cp::ChainShare& columns) {
          float* to = matrix(turn + step, edge) + v0 * kHeadDim + at.row;
#pragma unroll
          for (int i = 0; i < cp::kChainColumns; ++i) to[i * kHeadDim] = columns[i];
        };
        // M is kept by columns, the rows of M^T, by which the reverse pass multiplies.
        const float* transitions = matrix(turn, kEdgeTransition);
        if (reverse) {
          cp::scan_chain<cp::ChainRows::kOwn>(memory, transitions, stride, steps, state, add, leave);
        } else {
          cp::scan_chain(memory, transitions, stride, steps, state, add, leave);
        }
        turn += steps;
        left >>= skipped + steps;
      }
    }
  }
  // Blocks without work make room for passes that need not wait; one waits for the kernel's sake.
  if (!waited && blockIdx.x == 0) wait_for_predecessors();
}

}  // namespace flash_qla::cuda::sm90::bwd
