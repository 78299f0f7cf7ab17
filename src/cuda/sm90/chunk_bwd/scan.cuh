// Between the passes over segments (segments.cuh): how they reach their edges, which of them belong to which round, and
// after the first round the states at exact edges, one segment after another.
#pragma once

#include "cuda/common/block_scan.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"

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

struct ScanTraits {
  static constexpr int kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kColumns = 8;  // of V, a block: 16 blocks share the reading of M
  static constexpr int kColumnBlocks = kHeadDim / kColumns;
  static constexpr int kFlags = kThreads;  // longer chains are taken in pieces of so many segments

  // M's of the segments to come, [4 quarters of the columns][128 rows][32], swizzled: lanes read a row's columns, or 16
  // bytes of a row each, without bank conflicts. In the place of the one just used the warps' parts of the product.
  static constexpr int kStages = 3;
  static constexpr uint32_t kQuarter = kHeadDim * 128;
  static constexpr uint32_t kStage = 4 * kQuarter;
  static constexpr uint32_t kPart = kHeadDim * kColumns * 4;  // of a warp: [2 halves of the columns][128 of K][4]
  static_assert(kWarps * kPart <= kStage);
  static constexpr uint32_t kState = kStages * kStage;  // what enters, as a part
  static constexpr uint32_t kBarriers = kState + kPart;
  static constexpr uint32_t kBytes = 1024 + kBarriers + kStages * 8;  // 1024: the swizzle's alignment, made up by hand
};

// One warp's part of a product, 16 of the 128 terms of each sum. acc[a][v]: row lane + 32 a.
template <bool kReverse>
__device__ __forceinline__ void add_terms(float (&acc)[4][ScanTraits::kColumns], uint32_t sM, uint32_t sX, int warp,
                                          int lane) {
  using Traits = ScanTraits;
  constexpr int kTerms = kHeadDim / Traits::kWarps;
  // M is stored by columns: its row for the forward pass, its column for the reverse one.
#pragma unroll 1
  for (int first = warp * kTerms; first < (warp + 1) * kTerms; first += 4) {
    float m[4][4];
#pragma unroll
    for (int a = 0; a < 4; ++a) {
      if constexpr (kReverse) {
        const uint32_t quarter = sM + first / 32 * Traits::kQuarter;
        const float4 four = load_shared_f4(tile_piece(quarter, lane + 32 * a, first % 32 / 4));
        m[a][0] = four.x;
        m[a][1] = four.y;
        m[a][2] = four.z;
        m[a][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          m[a][i] = load_shared_f1(tile_piece(sM + a * Traits::kQuarter, first + i, lane / 4) + lane % 4 * 4);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 x = load_shared_f4(sX + (half * kHeadDim + first + i) * 16);
#pragma unroll
        for (int a = 0; a < 4; ++a) {
          acc[a][4 * half] += m[a][i] * x.x;
          acc[a][4 * half + 1] += m[a][i] * x.y;
          acc[a][4 * half + 2] += m[a][i] * x.z;
          acc[a][4 * half + 3] += m[a][i] * x.w;
        }
      }
    }
  }
}

// F and R become what leaves each segment, in the chains that the rounds kernel has listed: (sequence, value head,
// direction), a block some columns of V.
__global__ __launch_bounds__(ScanTraits::kThreads,
                             1) void sm90_chunk_bwd_scan_kernel(const Args p, const __grid_constant__ Maps maps) {
  launch_dependents();
  using Traits = ScanTraits;
  extern __shared__ uint8_t raw[];
  __shared__ bool needed[Traits::kFlags];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u, sX = smem + Traits::kState;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  auto barrier = [&](uint32_t turn) { return smem + Traits::kBarriers + turn % Traits::kStages * 8; };
  if (thread == 0) {
    for (uint32_t stage = 0; stage < Traits::kStages; ++stage) mbarrier_init(barrier(stage), 1);
    mbarrier_init_fence();
  }
  uint32_t loaded = 0, used = 0;  // M's
  // A thread's results: four columns of one row.
  const int k = thread / 2, half = thread % 2;

  const int items = *p.chain_count * Traits::kColumnBlocks;
  bool waited = false;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int chain = p.chains[item / Traits::kColumnBlocks], v0 = item % Traits::kColumnBlocks * Traits::kColumns;
    const bool reverse = chain % 2 == 1;
    const int head = chain / 2 % p.Hv, first = p.first_segment[chain / 2 / p.Hv];
    Segment s;
    if (!find_segment(p, first, &s)) continue;
    const Edge edge = reverse ? kEdgeReverse : kEdgeForward;
    auto slab = [&](int segment, Edge e) { return p.edges + edge_index(p, segment, head, e) * (kHeadDim * kHeadDim); };
    const int last = first + s.count - 1, direction = reverse ? -1 : 1;

    int entered = -1;  // the segment whose result is in shared memory
    for (int base = 1; base + 1 < s.count; base += Traits::kFlags) {
      const int turns = min(Traits::kFlags, s.count - 1 - base);
      auto segment_of = [&](int turn) { return reverse ? last - base - turn : first + base + turn; };
      __syncthreads();
      if (thread < turns) {
        const int segment = segment_of(thread);
        const Warmups warmups = warmups_at(p, segment, head, reverse);
        needed[thread] = warmups.own == kExact && warmups.next == kExact;
      }
      if (!waited) wait_for_predecessors();
      waited = true;
      __syncthreads();
      auto next_needed = [&](int turn) {
        while (turn < turns && !needed[turn]) ++turn;
        return turn;
      };
      int ahead = next_needed(0);
      auto load_next = [&] {
        if (ahead >= turns) return;
        const uint32_t to = smem + loaded % Traits::kStages * Traits::kStage;
        if (thread == 0) {
          // Row by row it would take 1.2 us to ask for, which everybody would wait for.
          mbarrier_arrive_expect(barrier(loaded), Traits::kStage);
          tma_load_5d(to, &maps.edges, barrier(loaded), 0, 0, 0,
                      static_cast<int>(edge_index(p, segment_of(ahead), head, kEdgeTransition)), 0);
        }
        ++loaded;
        ahead = next_needed(ahead + 1);
      };
      for (int i = 0; i < Traits::kStages; ++i) load_next();
      float own[4];
      auto fetch_own = [&](int turn) {
        if (turn >= turns) return;
        const float* from = slab(segment_of(turn), edge) + (v0 + 4 * half) * kHeadDim + k;
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = from[i * kHeadDim];
      };
      int turn = next_needed(0);
      fetch_own(turn);
      while (turn < turns) {
        const int segment = segment_of(turn);
        if (entered != segment - direction) {
          const float* enters = slab(segment - direction, edge) + (v0 + 4 * half) * kHeadDim + k;
          store_shared_u4(sX + (half * kHeadDim + k) * 16,
                          make_uint4(__float_as_uint(enters[0]), __float_as_uint(enters[kHeadDim]),
                                     __float_as_uint(enters[2 * kHeadDim]), __float_as_uint(enters[3 * kHeadDim])));
          __syncthreads();
        }
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = own[i];
        turn = next_needed(turn + 1);
        fetch_own(turn);  // while this one is worked on

        const uint32_t stage = smem + used % Traits::kStages * Traits::kStage;
        float acc[4][Traits::kColumns] = {};
        mbarrier_wait(barrier(used), used / Traits::kStages % 2);
        if (reverse) {
          add_terms<true>(acc, stage, sX, warp, lane);
        } else {
          add_terms<false>(acc, stage, sX, warp, lane);
        }
        ++used;
        __syncthreads();
#pragma unroll
        for (int a = 0; a < 4; ++a) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            store_shared_u4(stage + warp * Traits::kPart + (h * kHeadDim + lane + 32 * a) * 16,
                            make_uint4(__float_as_uint(acc[a][4 * h]), __float_as_uint(acc[a][4 * h + 1]),
                                       __float_as_uint(acc[a][4 * h + 2]), __float_as_uint(acc[a][4 * h + 3])));
          }
        }
        __syncthreads();
#pragma unroll
        for (int w = 0; w < Traits::kWarps; ++w) {
          const float4 part = load_shared_f4(stage + w * Traits::kPart + (half * kHeadDim + k) * 16);
          sum[0] += part.x;
          sum[1] += part.y;
          sum[2] += part.z;
          sum[3] += part.w;
        }
        store_shared_u4(sX + (half * kHeadDim + k) * 16, make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]),
                                                                    __float_as_uint(sum[2]), __float_as_uint(sum[3])));
        entered = segment;
        fence_proxy_async();  // the next M but two comes where the parts are
        __syncthreads();
        load_next();
        float* leaves = slab(segment, edge) + (v0 + 4 * half) * kHeadDim + k;
#pragma unroll
        for (int i = 0; i < 4; ++i) leaves[i * kHeadDim] = sum[i];
      }
    }
  }
  // Blocks without work make room for passes that need not wait; one waits for the kernel's sake.
  if (!waited && blockIdx.x == 0) wait_for_predecessors();
}

}  // namespace flash_qla::cuda::sm90::bwd
