// Boundary states of a sequence split: S' = M S + B through the chains of transitions, by the blocks that made the
// transitions, once all are there. Sums are fp32, states two bf16 each (pack_two_parts()), transitions as
// TransitionRows says.
#pragma once

#include "../../common/bulk.cuh"
#include "../../common/fragment.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "../../common/wgmma.cuh"
#include "chunk_stream.cuh"

namespace flash_qla::cuda::sm90 {

// The state groups' eight warps carry eight columns (V) of a chain's states, 16 rows each; an auxiliary warp brings the
// transitions, some ahead, through shared memory. (Straight into registers, one ahead, a transition took 1.15 to 1.4
// us; with sixteen or 32 columns to a block the products alone take 1.1 or 1.8; a copy of its own rows by each warp is
// 0.1 us of its 0.6.)
inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineColumns = 8;
static_assert(kCombineSlices == kHeadDim / kCombineColumns && kCombineWarps == kStateWarps);
// Named barriers; those before them are the auxiliary groups'. The eight warps meet at the first, all at the same place
// of the program. At the others, one side arrives where the other waits: the warp that brings, until the eight are
// through with the block's tiles, or with a piece; they, until it says which piece is next.
inline constexpr uint32_t kCombineBarrier = 4, kThroughBarrier = 5, kNextBarrier = 6;
inline constexpr uint32_t kCombineThreads = 32 * kCombineWarps;

// Local states that are on their way: memory takes about a microsecond.
inline constexpr int kLocalAhead = 4;

template <int kParts>
struct CombineMemory {
  static constexpr uint32_t kStages = kParts == 1 ? 4 : 2;  // what there is room for
  TransitionRows<kParts> transition[kStages][kCombineWarps];
  // The states before and after a transition, as the products' right operands: by eight rows, of which first the upper
  // parts of all columns, then the lower ones.
  uint32_t state[2][2 * kCombineWarps][2][32];
  float2 local[kCombineWarps][kLocalAhead][2][32];
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
// t = lane % 4, row g of the eight and columns 2t and 2t + 1.
using CombineShare = float[2][2];

// A boundary state has two rows (K) of a column side by side; neighbours in g have the columns 2t and 2t + 1 of the
// same rows, and exchange what the other needs. `rows` and back.
__device__ __forceinline__ void to_share(const float2 (&rows)[2], CombineShare& share, bool odd) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, odd ? rows[i].x : rows[i].y, 4);
    share[i][0] = odd ? other : rows[i].x;
    share[i][1] = odd ? rows[i].y : other;
  }
}
__device__ __forceinline__ float2 from_share(const float (&columns)[2], bool odd) {
  const float other = __shfl_xor_sync(0xffffffffu, odd ? columns[0] : columns[1], 4);
  return odd ? make_float2(other, columns[1]) : make_float2(columns[0], other);
}

// Where the eight warps have met at a step's end they have read its transition: a thread says so for all of them.
inline constexpr bool kAllSayFree = kWarpArrivals != 1;
inline constexpr uint32_t kFreeArrivals = kAllSayFree ? kCombineThreads : 1;

// The transitions of a chain into their stages, by one warp. stages: that have been used before.
template <int kParts>
__device__ __forceinline__ void bring_transitions(const ChunkForwardKernelParams& p, CombineMemory<kParts>& memory,
                                                  const TransitionChain& chain, uint32_t stages) {
  constexpr uint32_t kStages = CombineMemory<kParts>::kStages;
  const auto bring = [&](int step) {
    if (step > chain.transitions || !elect_one()) return;
    const uint32_t stage = (stages + static_cast<uint32_t>(step)) % kStages;
    auto& to = memory.transition[stage];
    const uint32_t full = smem_address(&memory.full[stage]);
    mbarrier_arrive_expect(full, sizeof(to));
    bulk_load(smem_address(to),
              static_cast<const char*>(p.transitions) + (static_cast<int64_t>(chain.first_slot) + step) * sizeof(to),
              sizeof(to), full);
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
    bring(step + static_cast<int>(kStages));
  }
}

// Columns 8 slice .. 8 slice + 7 of all states of a chain. stages: see above.
template <int kParts>
__device__ __forceinline__ void multiply_transitions(const ChunkForwardKernelParams& p, CombineMemory<kParts>& memory,
                                                     const TransitionChain& chain, int slice, uint32_t stages, int warp,
                                                     int lane) {
  constexpr uint32_t kStages = CombineMemory<kParts>::kStages;
  const int g = lane >> 2, t = lane & 3;
  const bool odd = (g & 1) != 0;
  // Rows 16 warp .. of these columns, in a boundary state's order; eight rows further on 32 places, here of half a
  // float4 each.
  constexpr int kState = 2 * kBoundaryVectors, kEightRows = 2 * 32;
  float2* const states =
      reinterpret_cast<float2*>(p.boundary_states) + static_cast<int64_t>(chain.first_slot) * kState +
      2 * boundary_place(slice / 8, slice / 2 % 4, 2 * warp, 4 * (2 * t + (g & 1)) + (g >> 1)) + slice % 2;
  // A local state; every thread brings, and reads, what it needs itself.
  const auto bring_local = [&](int step) {
    if (step <= chain.transitions) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_async_8(smem_address(&memory.local[warp][step % kLocalAhead][i][lane]),
                     states + step * kState + kEightRows * i);
      }
    }
    copy_async_commit();
  };
  const auto read_local = [&](int step, CombineShare& share) {
    copy_async_wait<kLocalAhead - 1>();
    const auto& local = memory.local[warp][step % kLocalAhead];
    const float2 rows[2] = {local[0][lane], local[1][lane]};
    to_share(rows, share, odd);
    bring_local(step + kLocalAhead);
  };
  const auto share = [&](int buffer, const CombineShare& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 parts = pack_two_parts(x[i][0], x[i][1]);
      memory.state[buffer][2 * warp + i][0][lane] = parts.x;
      memory.state[buffer][2 * warp + i][1][lane] = parts.y;
    }
    fence_proxy_async();  // the products read by the asynchronous proxy
    named_barrier_sync(kCombineBarrier, kCombineThreads);
  };
  const auto keep = [&](int step, const CombineShare& x) {
#pragma unroll
    for (int i = 0; i < 2; ++i) states[step * kState + kEightRows * i] = from_share(x[i], odd);
  };
  // The warp's rows of a transition, in registers.
  struct Rows {
    uint32_t m[4 * kTransitionSteps * kParts];  // by parts, then by 16 columns
    float diagonal[2];
  };
  const auto read_transition = [&](int step, Rows& to) {
    const uint32_t number = stages + static_cast<uint32_t>(step), stage = number % kStages;
    mbarrier_wait(smem_address(&memory.full[stage]), number / kStages & 1);
    const TransitionRows<kParts>& rows = memory.transition[stage][warp];
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
    if (kParts == 1 && step < chain.transitions) read_transition(step + 1, next);
    if (step > 1) keep(step - 1, state);
    wgmma_wait<0>();
    pin(sums);
    pin(now.m);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = state[e >> 1][e & 1];
      x = fmaf(diagonal[e >> 1], x, local[e >> 1][e & 1]) + (sums[4 + e] + sums[e]);
    }
    // Two do not fit beside each other.
    if (kParts == 2 && step < chain.transitions) read_transition(step + 1, next);
    share(step & 1, state);
    if (kAllSayFree || (warp == 0 && lane == 0)) {
      mbarrier_arrive(smem_address(&memory.free[(stages + static_cast<uint32_t>(step)) % kStages]));
    }
  };
#pragma unroll
  for (int i = 0; i < kLocalAhead; ++i) bring_local(i);
  read_local(0, state);
  share(0, state);
  // In two parts there are not registers for two transitions: the next one takes the place of this.
  Rows rows[kParts == 1 ? 2 : 1];
  Rows &one = rows[0], &other = rows[kParts == 1 ? 1 : 0];
  read_transition(1, one);
#pragma unroll 1
  for (int step = 1;; step += 2) {
    apply(step, one, other);
    if (step + 1 > chain.transitions) break;
    apply(step + 1, other, one);
    if (step + 2 > chain.transitions) break;
  }
  keep(chain.transitions, state);
  copy_async_wait<0>();
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
      bring_transitions(p, memory, own, stages);
      stages += static_cast<uint32_t>(own.transitions);
      __syncwarp();
      named_barrier_sync(kThroughBarrier, kAllThreads);
      if (lane == 0) {
        __threadfence();
        atomicSub(&p.counters->progress.pieces_left, 1u);
        memory.unit = take(memory.chain);
      }
    }
  } else {
    while (true) {
      __syncwarp();
      named_barrier_arrive(kThroughBarrier, kAllThreads);
      named_barrier_sync(kNextBarrier, kAllThreads);
      if (memory.unit >= units) return;
      const TransitionChain chain = memory.chain;
      multiply_transitions(p, memory, chain, memory.unit % kCombineSlices, stages, warp, lane);
      stages += static_cast<uint32_t>(chain.transitions);
    }
  }
}

}  // namespace flash_qla::cuda::sm90
