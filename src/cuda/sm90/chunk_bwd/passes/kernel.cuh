// The two serial passes of the backward, concurrently in one launch: the forward pass keeps S at each chunk pair's
// start and V', the reverse pass keeps dS at each chunk pair's end and writes dv. Neither needs the other, so a short
// batch fills twice the SMs. Read this file first, then traits.cuh, forward.cuh, reverse.cuh and helpers.cuh.
//
// A block has one pass of one sequence (or segment of it: segments.cuh), value head and half of V, or both halves, each
// with a warpgroup (Variant). States are held transposed, S^T [64 of V, 128 of K], as fp32 accumulators of one
// warpgroup: packed, they are the A operand of the next product, and S never waits for shared memory.
//
//   load warp      K, V or Q, K, dO; G o A, P (or A) -loaded-> [stages x3 to x6]
//   gate warp      both halves: gate vectors -gates-> [gates of each stage];  else waits for prepare.cuh's chunks
//   prepare        both halves: A becomes G o A in its stage, P of the reverse pass comes beside it -gated-
//   warpgroup
//   state          forward: S K | (G o A) W | update -> V' in V's place      reverse: dS K | P^T dO | (G o A)^T dV' |
//   warpgroup(s)   update -> dv in dO's place;  -tokens_full-; states -state_full-> [state on its way out];  -empty-
//   store warp     V' or dv and states to memory; -empty-, -state_empty-
//   count warp     counts what is in memory for the gradients' kernel, which runs concurrently
#pragma once

#include "cuda/sm90/chunk_bwd/passes/forward.cuh"
#include "cuda/sm90/chunk_bwd/passes/helpers.cuh"
#include "cuda/sm90/chunk_bwd/passes/reverse.cuh"

namespace flash_qla::cuda::sm90::bwd {

template <typename T, Variant kVariant, bool kReverse>
__device__ __forceinline__ void run_states(const Args& p, const Maps& maps, const PassWork& found, uint32_t smem,
                                           const PassBarriers& bars, int warp, int lane) {
  using Traits = PassTraits<kVariant>;
  PassWork work = found;
  if constexpr (Traits::kBoth) {
    work.reverse = kReverse;
    work.warmup = 0;
    work.start = work.finish = kStateGiven;
  }
  constexpr int kCopyWarp = Traits::kCopyWarp;
  if (warp >= kCopyWarp) {
    if constexpr (Traits::kBoth) release_registers<Traits::kOtherRegisters>();
    // The warp that makes gates is not in the quarter of the multiprocessor where P's last rows are made.
    const int role = Traits::kBoth ? kCopyWarp + 3 - warp : warp - kCopyWarp;
    if (role == 0 && lane == 0) load_stages<kVariant, kReverse>(p, maps, work, smem, bars);
    if (role == 1) store_tiles<kVariant, kReverse>(p, maps, work, smem, bars, lane);
    if (role == 2) {
      if (starts_beside_plan<kVariant>(p)) {
        wait_for_predecessors();
        launch_dependents();
      }
      count_chunks<kVariant, kReverse>(p, work, smem, lane);
      // For the kernel after this one, which waits for this one alone.
      if (p.beside || p.segment_chunks > 0) wait_for_predecessors();
    }
    if (role == 3) {
      if constexpr (Traits::kBoth) {
        make_gate_stages<T, kVariant, kReverse>(p, work, smem, bars, lane);
      } else {
        if (p.beside && lane == 0) watch_prepared<kVariant, kReverse>(p, work, smem);
      }
    }
  } else if (Traits::kBoth && warp >= 8) {
    if constexpr (Traits::kBoth) {
      release_registers<Traits::kOtherRegisters>();
      make_stages<T, kVariant, kReverse>(p, work, smem, bars, {warp - 8, lane});
    }
  } else {
    if constexpr (Traits::kBoth) claim_registers<Traits::kStateRegisters>();
    PassWork mine = work;
    if constexpr (Traits::kBoth) mine.half = warp / 4;
    if constexpr (kReverse) {
      reverse_states<T, kVariant>(p, mine, smem, bars, {warp % 4, lane});
    } else {
      forward_states<T, kVariant>(p, mine, smem, bars, {warp % 4, lane});
    }
  }
}

// Whole sequences. Blocks: (reverse pass first: its steps are longer) x sequence x value head x half of V (or both).
template <Variant kVariant>
__device__ __forceinline__ void find_sequence_work(const Args& p, PassWork* work) {
  const uint32_t one_pass = gridDim.x / 2;
  work->reverse = blockIdx.x < one_pass;
  const uint32_t index = blockIdx.x - (work->reverse ? 0 : one_pass);
  work->take_whole(p, PassTraits<kVariant>::kBoth ? 2 * index : index);
  work->warmup = 0;
  work->start = kStateGiven;
  work->finish = kStateGiven;
}

// Segments. Blocks: what the rounds kernel has listed x half of V. False: nothing to do.
__device__ __forceinline__ bool find_segment_work(const Args& p, bool second_round, PassWork* work) {
  work->half = blockIdx.x % 2;
  const int index = blockIdx.x / 2, round = static_cast<int>(second_round);
  // What can be asked for at once is: a block's start is the time that its loads take one after another. Past the
  // list's end there are other numbers, of which nothing is taken.
  const int count = p.round_counts[round];
  // initcheck reports numbers that nobody wrote also where nothing is taken of them: the build for it asks in turns.
  if (kWarpArrivals == 32 && index >= count) return false;
  const int32_t entry = round_list(p, round)[index];
  if (index >= count) return false;
  const SegmentWork listed = segment_work(entry);
  const int head = listed.piece % p.Hv, segment = listed.piece / p.Hv;
  const bool reverse = listed.pass == kReversePass;
  const Warmups warmups = warmups_at(p, segment, head, reverse);
  Segment s;
  if (!find_segment(p, segment, &s)) return false;
  work->head = head;
  work->n = s.n;
  work->sequence = s.sequence;
  work->reverse = reverse;
  work->warmup = 0;
  work->steps = s.end - s.begin;
  work->first = reverse ? s.end - 1 : s.begin;
  if (listed.pass == kTransitionPass) {
    work->warmup = work->steps;
    work->start = kStateIdentity;
    work->finish = edge_index(p, segment, head, kEdgeTransition);
    return true;
  }
  const Edge edge = reverse ? kEdgeReverse : kEdgeForward;
  const SegmentPass at = segment_pass(s, warmups, reverse);
  const int64_t left_behind = at.is_last ? kStateGiven : kStateDropped;
  if (at.warmup == kExact) {
    if (second_round) {
      work->start = edge_index(p, segment + (reverse ? 1 : -1), head, edge);
      work->finish = left_behind;
    } else {  // F or R, for the segment after it
      work->warmup = work->steps;
      work->start = kStateZero;
      work->finish = edge_index(p, segment, head, edge);
    }
    return true;
  }
  work->finish = at.feeds ? edge_index(p, segment, head, edge) : left_behind;
  const int warmup = at.warmup;
  work->warmup = warmup;
  work->steps += warmup;
  work->first -= reverse ? -warmup : warmup;
  const bool reaches_end = reverse ? work->first + 1 == s.sequence.chunks() : work->first == 0;
  work->start = reaches_end ? kStateGiven : kStateZero;
  return true;
}

// The barriers and counters of a block, by one thread.
template <typename Traits>
__device__ __forceinline__ void init_pass(uint32_t smem, const PassBarriers& bars) {
  for (int i = 0; i < kMostStages; ++i) {
    mbarrier_init(bars.loaded(i), 1);
    mbarrier_init(bars.gates(i), kWarpArrivals);
    mbarrier_init(bars.gated(i), 4 * kWarpArrivals);
    mbarrier_init(bars.empty(i), (4 * Traits::kHalves + 1) * kWarpArrivals);
    mbarrier_init(bars.tokens_full(i), 4 * Traits::kHalves * kWarpArrivals);
  }
  for (int half = 0; half < 2; ++half) {
    mbarrier_init(bars.state_full(half), 4 * kWarpArrivals);
    mbarrier_init(bars.state_empty(half), kWarpArrivals);
  }
  mbarrier_init_fence();
  store_shared_release(smem + Traits::kStored, 0);
  store_shared_release(smem + Traits::kMade, 0);
}

template <typename T, Variant kVariant>
__global__ __launch_bounds__(PassTraits<kVariant>::kThreads,
                             1) void sm90_chunk_bwd_passes_kernel(const Args p, const __grid_constant__ Maps maps,
                                                                  bool second_round) {
  using Traits = PassTraits<kVariant>;
  // In this order: the gradients' blocks, which wait for what these count, come when all of these have started, and
  // find the counters as the kernels before have left them.
  // The second round of segments waits below: it starts beside the combination, after all blocks of which and so after
  // the first round has found the lists made. Only who starts at an exact edge needs what the combination leaves, the
  // others wait at their end.
  const bool waits_late = !Traits::kBoth && second_round;
  // With both halves, of one sequence with its A, they take nothing but the call's inputs until they count: they start
  // beside the plan kernel, and the warps that need what it leaves wait for it.
  const bool beside_plan = starts_beside_plan<kVariant>(p);
  if (!p.beside && !waits_late && !beside_plan) wait_for_predecessors();
  if (!beside_plan) launch_dependents();
  extern __shared__ uint8_t raw[];
  // The shuffle keeps it in a register: it is not made again in each step.
  const uint32_t smem = __shfl_sync(0xffffffffu, (smem_address(raw) + 1023u) & ~1023u, 0);
  const PassBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  PassWork work;
  if (!Traits::kBoth && p.segment_chunks > 0) {  // both halves: of whole sequences alone
    const bool found = find_segment_work(p, second_round, &work);
    if (waits_late && (found ? work.start >= 0 : blockIdx.x == 0)) wait_for_predecessors();
    if (!found) return;
  } else {
    find_sequence_work<kVariant>(p, &work);
  }
  work.key_head = work.head / p.group;

  if (threadIdx.x == 0) init_pass<Traits>(smem, bars);
  __syncthreads();

  if (work.reverse) {
    run_states<T, kVariant, true>(p, maps, work, smem, bars, warp, lane);
  } else {
    run_states<T, kVariant, false>(p, maps, work, smem, bars, warp, lane);
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
