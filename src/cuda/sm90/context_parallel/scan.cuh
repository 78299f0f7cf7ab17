// Boundary states of a context parallelism: S' = M S + B through the scans of transitions, by the blocks that made the
// transitions, once all are there. Sums are fp32, states two bf16 each (pack_two_parts()), transitions as
// TransitionRows says.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/context_parallel/cut_states.cuh"

namespace flash_qla::cuda::sm90::cp {

using fwd::KernelArgs, fwd::QueueProducer;

// The state groups' eight warps carry eight columns (V) of a scan's states, 16 rows each; a producer warp brings
// transitions and local states, some ahead, through shared memory, and takes the states at cuts away. (Transitions
// straight into registers, one ahead, took 1.15 to 1.4 us; with sixteen or 32 columns to a block the products alone
// take 1.1 or 1.8. Where the eight warps fetched local states and stored states at cuts themselves, a step took 1,140
// clocks alone: the fence between a state and the products that read it waits for the stores as well.)
inline constexpr int kScanWarps = 8;
inline constexpr int kScanColumns = 8;
static_assert(kScanSlices == kHeadDim / kScanColumns && kScanWarps == kStateWarps);
// Named barriers; those before them are the producer warpgroups'. The eight warps meet at the first, all at the same
// place of the program. At the others, one side arrives where the other waits: the warp that brings, until the eight
// are through with the block's items, or with a piece; they, until it says which piece is next.
inline constexpr uint32_t kScanBarrier = 4, kThroughBarrier = 5, kNextBarrier = 6;
inline constexpr uint32_t kScanThreads = 32 * kScanWarps;

// Eight columns of a state, as they lie in memory (cut_state_position()).
inline constexpr int kSliceFloats = kHeadDim * kScanColumns;

template <int kParts>
struct ScanMemory {
  static constexpr int kStages = kParts == 1 ? 4 : 2;  // transitions: what there is room for
  // Local states, each of which its state at a cut takes the place of. A place is used again for the local state
  // kStates steps on, which comes kStages steps ahead of its time; what it held has left four steps before that.
  static constexpr int kStates = 8;
  static constexpr int kStoresUnderWay = kStates - kStages - 1;
  TransitionRows<kParts> transition[kStages][kScanWarps];
  float slice[kStates][kSliceFloats];
  // The states before and after a transition, as the products' right operands: by eight rows, of which first the upper
  // parts of all columns, then the lower ones.
  uint32_t state[2][2 * kScanWarps][2][32];
  uint64_t full[kStages], free[kStages];
  Scan scan;
  int32_t unit;
};

// Two floats as packed pairs of bf16: their values, and what those leave over. x y is then known to 2^-16; the
// transitions, products of 16-bit operands, are to 2^-9.
__device__ __forceinline__ uint2 pack_two_parts(float x, float y) {
  const uint32_t high = pack2<__nv_bfloat16>(x, y);
  const float2 back = unpack2<__nv_bfloat16>(high);
  return make_uint2(high, pack2<__nv_bfloat16>(x - back.x, y - back.y));
}

// A thread's share of sixteen rows and eight columns: [rows 0..7 or 8..15][one of two columns]. With g = lane / 4 and
// t = lane % 4, row g of the eight and columns 2t and 2t + 1. Which row of V a column is does not matter to the
// products: 2t and 2t + 1 are the two rows of one float4, the second half of the lanes the other way round, so that
// each read or write of a warp meets every bank of shared memory once.
using ScanShare = float[2][2];
__device__ __forceinline__ int share_place(int warp, int lane, int i, int e) {
  const int g = lane >> 2, t = lane & 3;
  return 4 * (16 * (2 * warp + i) + 4 * t + (g >> 1)) + (g & 1) + 2 * (e ^ t >> 1);
}

// Where the eight warps have met at a step's end they have read its transition: a thread says so for all of them.
inline constexpr bool kAllSayFree = kWarpArrivals != 1;
inline constexpr uint32_t kFreeArrivals = kAllSayFree ? kScanThreads : 1;

// A slice of a scan's states, of the first and after each transition.
__device__ __forceinline__ float* scan_slice(const KernelArgs& p, const Scan& scan, int slice, int step) {
  return reinterpret_cast<float*>(p.cut_states) +
         (static_cast<int64_t>(scan.first_slot) + step) * (4 * kCutStateVectors) + slice * kSliceFloats;
}
template <int kParts>
__device__ __forceinline__ void store_cut_state_slice(const KernelArgs& p, ScanMemory<kParts>& memory, const Scan& scan,
                                                      int slice, int step) {
  auto& from = memory.slice[step % ScanMemory<kParts>::kStates];
  if (elect_one()) {
    bulk_store(scan_slice(p, scan, slice, step), smem_address(from), sizeof(from));
    tma_store_commit();
  }
}

// The transitions and local states of a scan into their stages, and all states at cuts but the last out of them, by
// one warp, whose elected lane is always the same. stages: that have been used before.
template <int kParts>
__device__ __forceinline__ void load_transitions(const KernelArgs& p, ScanMemory<kParts>& memory, const Scan& scan,
                                                 int slice, uint32_t stages) {
  using Memory = ScanMemory<kParts>;
  constexpr uint32_t kStages = Memory::kStages;
  const auto load = [&](int step) {
    if (step > scan.transitions || !elect_one()) return;
    const uint32_t stage = (stages + static_cast<uint32_t>(step)) % kStages;
    auto& to = memory.transition[stage];
    const uint32_t full = smem_address(&memory.full[stage]);
    const auto load_local = [&](int i) {
      auto& local = memory.slice[i % Memory::kStates];
      bulk_load(smem_address(local), scan_slice(p, scan, slice, i), sizeof(local), full);
    };
    mbarrier_arrive_expect(full, sizeof(to) + (step == 1 ? 2 : 1) * sizeof(memory.slice[0]));
    if (step == 1) load_local(0);
    bulk_load(smem_address(to),
              static_cast<const char*>(p.transitions) + (static_cast<int64_t>(scan.first_slot) + step) * sizeof(to),
              sizeof(to), full);
    tma_store_wait_read<Memory::kStoresUnderWay>();
    load_local(step);
  };
  // They were written by ordinary stores, seen through the counter that another thread has read.
  fence_proxy_async_all();
#pragma unroll 1
  for (int step = 1; step <= static_cast<int>(kStages); ++step) load(step);
  // Each is waited for, the last ones as well: what nobody sees synccheck takes for an arrival too many.
#pragma unroll 1
  for (int step = 1; step <= scan.transitions; ++step) {
    const uint32_t number = stages + static_cast<uint32_t>(step);
    mbarrier_wait(smem_address(&memory.free[number % kStages]), number / kStages & 1);
    __syncwarp();
    if (step > 1) store_cut_state_slice(p, memory, scan, slice, step - 1);
    load(step + static_cast<int>(kStages));
  }
}

// A slice, eight columns, of all states of a scan. stages: see above.
template <int kParts>
__device__ __forceinline__ void multiply_transitions(ScanMemory<kParts>& memory, const Scan& scan, uint32_t stages,
                                                     int warp, int lane) {
  using Memory = ScanMemory<kParts>;
  constexpr uint32_t kStages = Memory::kStages;
  const int g = lane >> 2;
  const auto place_of = [&](int step, int i, int e) -> float& {
    return memory.slice[step % Memory::kStates][share_place(warp, lane, i, e)];
  };
  const auto read_local = [&](int step, ScanShare& local) {
#pragma unroll
    for (int i = 0; i < 4; ++i) local[i >> 1][i & 1] = place_of(step, i >> 1, i & 1);
  };
  const auto keep = [&](int step, const ScanShare& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) place_of(step, i >> 1, i & 1) = x[i >> 1][i & 1];
  };
  const auto share = [&](int buffer, const ScanShare& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 parts = pack_two_parts(x[i][0], x[i][1]);
      memory.state[buffer][2 * warp + i][0][lane] = parts.x;
      memory.state[buffer][2 * warp + i][1][lane] = parts.y;
    }
    fence_proxy_async();  // the products read by the asynchronous proxy, and so is what has been kept
    named_barrier_sync(kScanBarrier, kScanThreads);
  };
  // The warp's rows of a transition, in registers.
  struct Rows {
    uint32_t m[4 * kTransitionSteps * kParts];  // by parts, then by 16 columns
    float diagonal[2];
  };
  const auto wait_for = [&](int step) {
    const uint32_t number = stages + static_cast<uint32_t>(step);
    mbarrier_wait(smem_address(&memory.full[number % kStages]), number / kStages & 1);
  };
  const auto read_transition = [&](int step, Rows& to) {
    const TransitionRows<kParts>& rows = memory.transition[(stages + static_cast<uint32_t>(step)) % kStages][warp];
#pragma unroll
    for (int k = 0; k < kTransitionSteps; ++k) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint4 x = rows.columns[k][part][lane];
        uint32_t* m = to.m + 4 * (part * kTransitionSteps + k);
        m[0] = x.x, m[1] = x.y, m[2] = x.z, m[3] = x.w;
      }
    }
    to.diagonal[0] = rows.diagonal[g];
    to.diagonal[1] = rows.diagonal[8 + g];
  };
  ScanShare state;
  // What a transition needs beside the state is read under the products.
  const auto apply = [&](int step, Rows& now, Rows& next) {
    float sums[8];  // of the state's upper parts, and of the lower ones
    constexpr uint32_t kEightRowsBytes = sizeof(memory.state[0][0]);
    const uint64_t before =
        wgmma_block_descriptor(smem_address(memory.state[(step - 1) & 1]), kEightRowsBytes, kEightRowsBytes / 2);
    pin(now.m);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTransitionSteps * kParts; ++i) {
      const uint64_t rows = wgmma_advance(before, i % kTransitionSteps * 2 * kEightRowsBytes);
      i == 0 ? mma_rs_n16_trans_init<__nv_bfloat16>(sums, now.m, rows)
             : mma_rs_n16_trans<__nv_bfloat16>(sums, now.m + 4 * i, rows);
    }
    wgmma_commit();
    const float diagonal[2] = {now.diagonal[0], now.diagonal[1]};
    ScanShare local;
    read_local(step, local);
    if (step > 1) keep(step - 1, state);
    const bool more = step < scan.transitions;
    if (more) {
      wait_for(step + 1);
      if (kParts == 1) read_transition(step + 1, next);
    }
    wgmma_wait<0>();
    pin(sums);
    pin(now.m);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = state[e >> 1][e & 1];
      x = fmaf(diagonal[e >> 1], x, local[e >> 1][e & 1]) + (sums[4 + e] + sums[e]);
    }
    // Two do not fit beside each other.
    if (kParts == 2 && more) read_transition(step + 1, next);
    share(step & 1, state);
    if (kAllSayFree || (warp == 0 && lane == 0)) {
      mbarrier_arrive(smem_address(&memory.free[(stages + static_cast<uint32_t>(step)) % kStages]));
    }
  };
  // In two parts there are not registers for two transitions: the next one takes the place of this.
  Rows rows[kParts == 1 ? 2 : 1];
  Rows &one = rows[0], &other = rows[kParts == 1 ? 1 : 0];
  wait_for(1);
  read_local(0, state);
  share(0, state);
  read_transition(1, one);
#pragma unroll 1
  for (int step = 1;; step += 2) {
    apply(step, one, other);
    if (step + 1 > scan.transitions) break;
    apply(step + 1, other, one);
    if (step + 2 > scan.transitions) break;
  }
  keep(scan.transitions, state);
  fence_proxy_async();
}

template <typename Traits>
__device__ __forceinline__ int32_t opened_items() {
  return reinterpret_cast<const QueueProducer*>(shared_memory() + Traits::kSmemProducer)->opened;
}

// When the block's items are through: by the state groups' warps, each with its number among them, and (kLoads) by an
// producer warp.
template <typename Traits, bool kLoads>
__device__ __forceinline__ void scan_cut_states(const KernelArgs& p, int warp, int lane) {
  using Memory = ScanMemory<kTransitionParts<typename Traits::Element>>;
  static_assert(sizeof(Memory) <= Traits::kSmemProducer);  // the producer stays
  Memory& memory = *reinterpret_cast<Memory*>(shared_memory());
  const int32_t opened = opened_items<Traits>();
  const Progress& progress = p.counters->progress;
  const int units = static_cast<int>(progress.pieces);
  // A block that had no item leaves its SM to the next kernel. But as many stay as there are more pieces than items, on
  // SMs that no item needs before the states at cuts are there: with more of them 32 heads of 4,096 tokens took 0.15
  // to 0.16 ms in place of 0.13 without a cut.
  const bool had_tiles = opened > 0;
  const ItemList& states = p.counters->states;
  const int idle = static_cast<int>(gridDim.x) - states.items - p.counters->outputs.items;
  const int helpers = min(units - states.items, idle);
  if (units == 0 || (!had_tiles && helpers <= 0)) return;
  constexpr uint32_t kAllThreads = kScanThreads + 32;
  uint32_t stages = ~0u;  // the first transition's number is 1
  if constexpr (kLoads) {
    // This warp has no more to do some chunks before the others: it finds out what the block's first piece is
    // meanwhile.
    const auto take = [&](Scan& scan) {
      const int32_t unit = static_cast<int32_t>(atomicAdd(&p.counters->scan_ticket, 1u));
      if (unit < units) scan = p.scans[unit / kScanSlices];
      return unit;
    };
    int32_t unit = units;
    Scan scan{0, 0};
    if (lane == 0) {
      // Where as many other blocks as there are pieces are still at their items, this one is not needed. The last finds
      // none.
      const bool needed = had_tiles ? static_cast<int>(atomicSub(&p.counters->blocks_running, 1u)) - 1 < units
                                    : static_cast<int>(atomicAdd(&p.counters->helpers, 1u)) < helpers;
      if (needed) unit = take(scan);
    }
    __syncwarp();
    named_barrier_sync(kThroughBarrier, kAllThreads);  // the items' shared memory is free
    if (lane == 0) {
      for (uint32_t i = 0; i < Memory::kStages; ++i) {
        mbarrier_init(smem_address(&memory.full[i]), 1);
        mbarrier_init(smem_address(&memory.free[i]), kFreeArrivals);
      }
      mbarrier_init_fence();
      memory.unit = unit;
      memory.scan = scan;
      // All state items have been given out, so those that are missing are being computed by blocks that run.
      while (unit < units && load_acquire(&progress.states_left) != 0) __nanosleep(20);
    }
    while (true) {
      __syncwarp();
      named_barrier_arrive(kNextBarrier, kAllThreads);
      if (memory.unit >= units) return;
      const Scan own = memory.scan;
      const int slice = memory.unit % kScanSlices;
      load_transitions(p, memory, own, slice, stages);
      stages += static_cast<uint32_t>(own.transitions);
      __syncwarp();
      named_barrier_sync(kThroughBarrier, kAllThreads);
      store_cut_state_slice(p, memory, own, slice, own.transitions);
      if (elect_one()) {
        tma_store_wait_all();
        __threadfence();
        atomicSub(&p.counters->progress.slices_left, 1u);
      }
      __syncwarp();
      if (lane == 0) memory.unit = take(memory.scan);
    }
  } else {
    while (true) {
      __syncwarp();
      named_barrier_arrive(kThroughBarrier, kAllThreads);
      named_barrier_sync(kNextBarrier, kAllThreads);
      if (memory.unit >= units) return;
      const Scan scan = memory.scan;
      multiply_transitions(memory, scan, stages, warp, lane);
      stages += static_cast<uint32_t>(scan.transitions);
    }
  }
}

}  // namespace flash_qla::cuda::sm90::cp
