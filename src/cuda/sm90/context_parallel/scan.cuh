// Boundary states of a sequence split: S' = M S + B through the chains of transitions, by the blocks that made the
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

using fwd::ChunkForwardKernelParams, fwd::ChunkWalker;

// The state groups' eight warps carry eight columns (V) of a chain's states, 16 rows each; an auxiliary warp brings
// transitions and local states, some ahead, through shared memory, and takes the boundary states away. (Transitions
// straight into registers, one ahead, took 1.15 to 1.4 us; with sixteen or 32 columns to a block the products alone
// take 1.1 or 1.8. Where the eight warps fetched local states and stored boundary states themselves, a step took 1,140
// clocks alone: the fence between a state and the products that read it waits for the stores as well.)
inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineColumns = 8;
static_assert(kCombineSlices == kHeadDim / kCombineColumns && kCombineWarps == kStateWarps);
// Named barriers; those before them are the auxiliary groups'. The eight warps meet at the first, all at the same place
// of the program. At the others, one side arrives where the other waits: the warp that brings, until the eight are
// through with the block's tiles, or with a piece; they, until it says which piece is next.
inline constexpr uint32_t kCombineBarrier = 4, kThroughBarrier = 5, kNextBarrier = 6;
inline constexpr uint32_t kCombineThreads = 32 * kCombineWarps;

// Eight columns of a state, as they lie in memory (boundary_place()).
inline constexpr int kSliceFloats = kHeadDim * kCombineColumns;

template <int kParts>
struct CombineMemory {
  static constexpr int kStages = kParts == 1 ? 4 : 2;  // transitions: what there is room for
  // Local states, each of which its boundary state takes the place of. A place is used again for the local state
  // kStates steps on, which comes kStages steps ahead of its time; what it held has left four steps before that.
  static constexpr int kStates = 8;
  static constexpr int kStoresUnderWay = kStates - kStages - 1;
  TransitionRows<kParts> transition[kStages][kCombineWarps];
  float slice[kStates][kSliceFloats];
  // The states before and after a transition, as the products' right operands: by eight rows, of which first the upper
  // parts of all columns, then the lower ones.
  uint32_t state[2][2 * kCombineWarps][2][32];
  uint64_t full[kStages], free[kStages];
  TransitionChain chain;
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
using CombineShare = float[2][2];
__device__ __forceinline__ int share_place(int warp, int lane, int i, int e) {
  const int g = lane >> 2, t = lane & 3;
  return 4 * (16 * (2 * warp + i) + 4 * t + (g >> 1)) + (g & 1) + 2 * (e ^ t >> 1);
}

// Where the eight warps have met at a step's end they have read its transition: a thread says so for all of them.
inline constexpr bool kAllSayFree = kWarpArrivals != 1;
inline constexpr uint32_t kFreeArrivals = kAllSayFree ? kCombineThreads : 1;

// A slice of a chain's states, of the first and after each transition.
__device__ __forceinline__ float* chain_slice(const ChunkForwardKernelParams& p, const TransitionChain& chain,
                                              int slice, int step) {
  return reinterpret_cast<float*>(p.boundary_states) +
         (static_cast<int64_t>(chain.first_slot) + step) * (4 * kBoundaryVectors) + slice * kSliceFloats;
}
template <int kParts>
__device__ __forceinline__ void store_boundary_slice(const ChunkForwardKernelParams& p, CombineMemory<kParts>& memory,
                                                     const TransitionChain& chain, int slice, int step) {
  auto& from = memory.slice[step % CombineMemory<kParts>::kStates];
  if (elect_one()) {
    bulk_store(chain_slice(p, chain, slice, step), smem_address(from), sizeof(from));
    tma_store_commit();
  }
}

// The transitions and local states of a chain into their stages, and all boundary states but the last out of them, by
// one warp, whose elected lane is always the same. stages: that have been used before.
template <int kParts>
__device__ __forceinline__ void bring_transitions(const ChunkForwardKernelParams& p, CombineMemory<kParts>& memory,
                                                  const TransitionChain& chain, int slice, uint32_t stages) {
  using Memory = CombineMemory<kParts>;
  constexpr uint32_t kStages = Memory::kStages;
  const auto bring = [&](int step) {
    if (step > chain.transitions || !elect_one()) return;
    const uint32_t stage = (stages + static_cast<uint32_t>(step)) % kStages;
    auto& to = memory.transition[stage];
    const uint32_t full = smem_address(&memory.full[stage]);
    const auto bring_local = [&](int i) {
      auto& local = memory.slice[i % Memory::kStates];
      bulk_load(smem_address(local), chain_slice(p, chain, slice, i), sizeof(local), full);
    };
    mbarrier_arrive_expect(full, sizeof(to) + (step == 1 ? 2 : 1) * sizeof(memory.slice[0]));
    if (step == 1) bring_local(0);
    bulk_load(smem_address(to),
              static_cast<const char*>(p.transitions) + (static_cast<int64_t>(chain.first_slot) + step) * sizeof(to),
              sizeof(to), full);
    tma_store_wait_read<Memory::kStoresUnderWay>();
    bring_local(step);
  };
  // They were written by ordinary stores, seen through the counter that another thread has read.
  fence_proxy_async_all();
#pragma unroll 1
  for (int step = 1; step <= static_cast<int>(kStages); ++step) bring(step);
  // Each is waited for, the last ones as well: what nobody sees synccheck takes for an arrival too many.
#pragma unroll 1
  for (int step = 1; step <= chain.transitions; ++step) {
    const uint32_t number = stages + static_cast<uint32_t>(step);
    mbarrier_wait(smem_address(&memory.free[number % kStages]), number / kStages & 1);
    __syncwarp();
    if (step > 1) store_boundary_slice(p, memory, chain, slice, step - 1);
    bring(step + static_cast<int>(kStages));
  }
}

// A slice, eight columns, of all states of a chain. stages: see above.
template <int kParts>
__device__ __forceinline__ void multiply_transitions(CombineMemory<kParts>& memory, const TransitionChain& chain,
                                                     uint32_t stages, int warp, int lane) {
  using Memory = CombineMemory<kParts>;
  constexpr uint32_t kStages = Memory::kStages;
  const int g = lane >> 2;
  const auto place_of = [&](int step, int i, int e) -> float& {
    return memory.slice[step % Memory::kStates][share_place(warp, lane, i, e)];
  };
  const auto read_local = [&](int step, CombineShare& local) {
#pragma unroll
    for (int i = 0; i < 4; ++i) local[i >> 1][i & 1] = place_of(step, i >> 1, i & 1);
  };
  const auto keep = [&](int step, const CombineShare& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) place_of(step, i >> 1, i & 1) = x[i >> 1][i & 1];
  };
  const auto share = [&](int buffer, const CombineShare& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 parts = pack_two_parts(x[i][0], x[i][1]);
      memory.state[buffer][2 * warp + i][0][lane] = parts.x;
      memory.state[buffer][2 * warp + i][1][lane] = parts.y;
    }
    fence_proxy_async();  // the products read by the asynchronous proxy, and so is what has been kept
    named_barrier_sync(kCombineBarrier, kCombineThreads);
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
  CombineShare state;
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
    CombineShare local;
    read_local(step, local);
    if (step > 1) keep(step - 1, state);
    const bool more = step < chain.transitions;
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
    if (step + 1 > chain.transitions) break;
    apply(step + 1, other, one);
    if (step + 2 > chain.transitions) break;
  }
  keep(chain.transitions, state);
  fence_proxy_async();
}

template <typename Traits>
__device__ __forceinline__ int32_t opened_tiles() {
  return reinterpret_cast<const ChunkWalker*>(shared_memory() + Traits::kSmemWalker)->opened;
}

// When the block's tiles are through: by the state groups' warps, each with its number among them, and (kBrings) by an
// auxiliary one.
template <typename Traits, bool kBrings>
__device__ __forceinline__ void combine_boundaries(const ChunkForwardKernelParams& p, int warp, int lane) {
  using Memory = CombineMemory<kTransitionParts<typename Traits::Element>>;
  static_assert(sizeof(Memory) <= Traits::kSmemWalker);  // the walker stays
  Memory& memory = *reinterpret_cast<Memory*>(shared_memory());
  const int32_t opened = opened_tiles<Traits>();
  if (opened < 0) return;  // the plan is not there
  const SplitProgress& progress = p.counters->progress;
  const int units = static_cast<int>(progress.pieces);
  // A block that had no tile leaves its SM to the next kernel. But as many stay as there are more pieces than tiles, on
  // SMs that no tile needs before the boundary states are there: with more of them 32 heads of 4,096 tokens took 0.15
  // to 0.16 ms in place of 0.13 without a cut.
  const bool had_tiles = opened > 0;
  const TileList& states = p.counters->states;
  const int idle = static_cast<int>(gridDim.x) - states.tiles - p.counters->outputs.tiles;
  const int helpers = min(units - states.tiles, idle);
  if (units == 0 || (!had_tiles && helpers <= 0)) return;
  constexpr uint32_t kAllThreads = kCombineThreads + 32;
  uint32_t stages = ~0u;  // the first transition's number is 1
  if constexpr (kBrings) {
    // This warp has no more to do some chunks before the others: it finds out what the block's first piece is
    // meanwhile.
    const auto take = [&](TransitionChain& chain) {
      const int32_t unit = static_cast<int32_t>(atomicAdd(&p.counters->chain_ticket, 1u));
      if (unit < units) chain = p.chains[unit / kCombineSlices];
      return unit;
    };
    int32_t unit = units;
    TransitionChain chain{0, 0};
    if (lane == 0) {
      // Where as many other blocks as there are pieces are still at their tiles, this one is not needed. The last finds
      // none.
      const bool needed = had_tiles ? static_cast<int>(atomicSub(&p.counters->blocks_running, 1u)) - 1 < units
                                    : static_cast<int>(atomicAdd(&p.counters->helpers, 1u)) < helpers;
      if (needed) unit = take(chain);
    }
    __syncwarp();
    named_barrier_sync(kThroughBarrier, kAllThreads);  // the tiles' shared memory is free
    if (lane == 0) {
      for (uint32_t i = 0; i < Memory::kStages; ++i) {
        mbarrier_init(smem_address(&memory.full[i]), 1);
        mbarrier_init(smem_address(&memory.free[i]), kFreeArrivals);
      }
      mbarrier_init_fence();
      memory.unit = unit;
      memory.chain = chain;
      // All state tiles have been given out, so those that are missing are being computed by blocks that run.
      while (unit < units && load_acquire(&progress.states_left) != 0) __nanosleep(20);
    }
    while (true) {
      __syncwarp();
      named_barrier_arrive(kNextBarrier, kAllThreads);
      if (memory.unit >= units) return;
      const TransitionChain own = memory.chain;
      const int slice = memory.unit % kCombineSlices;
      bring_transitions(p, memory, own, slice, stages);
      stages += static_cast<uint32_t>(own.transitions);
      __syncwarp();
      named_barrier_sync(kThroughBarrier, kAllThreads);
      store_boundary_slice(p, memory, own, slice, own.transitions);
      if (elect_one()) {
        tma_store_wait_all();
        __threadfence();
        atomicSub(&p.counters->progress.pieces_left, 1u);
      }
      __syncwarp();
      if (lane == 0) memory.unit = take(memory.chain);
    }
  } else {
    while (true) {
      __syncwarp();
      named_barrier_arrive(kThroughBarrier, kAllThreads);
      named_barrier_sync(kNextBarrier, kAllThreads);
      if (memory.unit >= units) return;
      const TransitionChain chain = memory.chain;
      multiply_transitions(memory, chain, stages, warp, lane);
      stages += static_cast<uint32_t>(chain.transitions);
    }
  }
}

}  // namespace flash_qla::cuda::sm90::cp
