// Boundary states of a sequence split: S' = M S + B through the chains of transitions, by the blocks that made the
// transitions, once all are there. Sums are fp32, a product is three of tf32 (SplitFloat).
#pragma once

#include "../../common/bulk.cuh"
#include "../../common/mbarrier.cuh"
#include "chunk_stream.cuh"

namespace flash_qla::cuda::sm90 {

// A block carries eight columns (V) of a chain's states: the state groups' eight warps multiply, a thread of the
// auxiliary groups brings the transitions, 16 KB at a time.
inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineColumns = 8;
static_assert(kCombineSlices == kHeadDim / kCombineColumns && kCombineWarps == kStateWarps);
inline constexpr int kCombineStages = 8;        // two transitions: one is on its way while the other is used
inline constexpr int kStageRows = 32;           // of M^T: two of its eight groups of 16
inline constexpr int kStateRow = kHeadDim + 4;  // floats: eight rows of 16 bytes then are on different banks
inline constexpr int kStageVectors = kStageRows * kHeadDim / 4;
inline constexpr int kStagesPerTransition = kHeadDim / kStageRows;

struct CombineMemory {
  float4 transition[kCombineStages][kStageVectors];
  alignas(16) float state[2][kCombineColumns][kStateRow];
  uint64_t full[kCombineStages], empty[kCombineStages];
  int32_t unit;
};

// All warps of a block meet here. Not __syncthreads(), nor a named barrier: the roles come to their meetings from
// different places in the program, which is divergence to synccheck, and whose order racecheck does not see.
struct BlockMeeting {
  uint32_t barrier;
  uint32_t phase = 0;
  __device__ __forceinline__ void operator()() {
    __syncwarp();
    mbarrier_arrive_warp(barrier, static_cast<int>(threadIdx.x) % 32);
    mbarrier_wait(barrier, phase);
    phase ^= 1;
  }
};

// Called by all threads of a block when they are through with its tiles; `work(chain, slice, stages_before)` by those
// of one role. Both roles' calls meet. `first`: one thread of the block.
template <typename Traits, typename Work>
__device__ __forceinline__ void combine_boundaries(const ChunkForwardKernelParams& p, bool first, const Work& work) {
  static_assert(sizeof(CombineMemory) <= Traits::kSmemWalker);  // the walker and the barriers stay
  CombineMemory& memory = *reinterpret_cast<CombineMemory*>(shared_memory());
  const SplitProgress& progress = p.counters->progress;
  const int units = static_cast<int>(progress.pieces);
  // A block that had no tile leaves its SM to the next kernel. But as many stay as there are more pieces than tiles, on
  // SMs that no tile needs before the boundary states are there: with more of them 32 heads of 4,096 tokens took 0.15
  // to 0.16 ms in place of 0.13 without a cut.
  const bool had_tiles = reinterpret_cast<const ChunkWalker*>(shared_memory() + Traits::kSmemWalker)->opened > 0;
  const TileList& states = p.counters->states;
  const int idle = static_cast<int>(gridDim.x) - states.tiles - p.counters->outputs.tiles;
  const int helpers = min(units - states.tiles, idle);
  if (units == 0 || (!had_tiles && helpers <= 0)) return;
  BlockMeeting meet{smem() + Traits::kMeet};
  meet();  // the tiles' shared memory is free
  if (first) {
    // Where as many other blocks as there are pieces are still at their tiles, this one is not needed. The last finds
    // none.
    const bool needed = had_tiles ? static_cast<int>(atomicSub(&p.counters->blocks_running, 1u)) - 1 < units
                                  : static_cast<int>(atomicAdd(&p.counters->helpers, 1u)) < helpers;
    memory.unit = needed ? 0 : -1;
    if (needed) {
      for (int i = 0; i < kCombineStages; ++i) {
        mbarrier_init(smem_address(&memory.full[i]), 1);
        mbarrier_init(smem_address(&memory.empty[i]), kCombineWarps);
      }
      mbarrier_init_fence();
      // All state tiles have been given out, so those that are missing are being computed by blocks that run.
      while (load_acquire(&progress.states_left) != 0) __nanosleep(100);
    }
  }
  meet();
  if (memory.unit < 0) return;
  meet();
  uint32_t stages = 0;
  for (;;) {
    if (first) memory.unit = static_cast<int32_t>(atomicAdd(&p.counters->chain_ticket, 1u));
    meet();
    const int unit = memory.unit;
    if (unit >= units) return;
    const TransitionChain chain = p.chains[unit / kCombineSlices];
    work(memory, chain, unit % kCombineSlices, stages);
    stages += static_cast<uint32_t>(chain.transitions * kStagesPerTransition);
    meet();
    if (first) atomicSub(&p.counters->progress.pieces_left, 1u);
  }
}

// The transitions of a chain into the stages, by one thread.
__device__ __forceinline__ void bring_transitions(const ChunkForwardKernelParams& p, CombineMemory& memory,
                                                  const TransitionChain& chain, uint32_t stages) {
  // They were written by ordinary stores, seen through the counter that another thread has read.
  fence_proxy_async_all();
  const float4* from = p.transitions + (static_cast<int64_t>(chain.first_slot) + 1) * kBoundaryVectors;
#pragma unroll 1
  for (int i = 0; i < chain.transitions * kStagesPerTransition; ++i, ++stages) {
    const uint32_t stage = stages % kCombineStages, round = stages / kCombineStages;
    if (round > 0) mbarrier_wait(smem_address(&memory.empty[stage]), (round - 1) & 1);
    const uint32_t full = smem_address(&memory.full[stage]);
    mbarrier_arrive_expect(full, kStageVectors * 16);
    bulk_load(smem_address(memory.transition[stage]), from + i * kStageVectors, kStageVectors * 16, full);
  }
}

// A float as two of tf32's eleven bits, to the last two or three bits of its own: x y is taken for high high + high low
// + low high, 2^-22 of it off at most. The transitions, products of 16-bit operands, are known to 2^-9.
struct SplitFloat {
  uint32_t high, low;
  __device__ __forceinline__ explicit SplitFloat(float x) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
    low = __float_as_uint(x - __uint_as_float(high));
  }
};

// d += A B, m16n8k8.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Columns v0 .. v0 + 7 of S, by the eight warps of the state groups, 16 rows each. Rows and sums are dealt to the
// products so that a transition's float4 is one thread's share of A (transition_place()): with g = lane / 4 and
// t = lane % 4, rows g and g + 8 are S's rows 16 warp + 8 (g / 4) + 2 (g % 4) and the next; of 16 rows of S^T that are
// summed over, 4 s + t and that plus 8, s = 0 and 1.
__device__ __forceinline__ void multiply_transitions(const ChunkForwardKernelParams& p, CombineMemory& memory,
                                                     const TransitionChain& chain, int slice, uint32_t stages, int warp,
                                                     int lane) {
  const int g = lane >> 2, t = lane & 3;
  const int row = 16 * warp + 8 * (g >> 2) + 2 * (g & 3);
  // This thread's rows of columns v0 + 2 t and the next, in a boundary state's order.
  int places[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    places[b] =
        2 * boundary_place(slice / 8, slice / 2 % 4, 2 * warp + (g >> 2), 4 * (2 * t + b) + (g & 3)) + (slice & 1);
  }
  float2* local =
      reinterpret_cast<float2*>(p.boundary_states + static_cast<int64_t>(chain.first_slot) * kBoundaryVectors);
  auto share = [&](int buffer, const float2(&x)[2]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) *reinterpret_cast<float2*>(&memory.state[buffer][2 * t + b][row]) = x[b];
    named_barrier_sync(1, 32 * kCombineWarps);
  };
  float2 mine[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) mine[b] = __ldcg(local + places[b]);
  share(0, mine);
#pragma unroll 1
  for (int step = 1; step <= chain.transitions; ++step) {
    local += 2 * kBoundaryVectors;
#pragma unroll
    for (int b = 0; b < 2; ++b) mine[b] = __ldcg(local + places[b]);
    // Lane 8 i + n brings columns 4 i .. 4 i + 3 of row n, for a matrix each.
    uint32_t state = smem_address(&memory.state[(step - 1) & 1][lane & 7][4 * (lane >> 3)]);
    // Sums of their own for each kind of product and each s: one would be a chain of 48.
    float sums[2][3][4] = {};
#pragma unroll 1
    for (int i = 0; i < kStagesPerTransition; ++i, ++stages) {
      const uint32_t stage = stages % kCombineStages;
      mbarrier_wait(smem_address(&memory.full[stage]), stages / kCombineStages & 1);
#pragma unroll
      for (int rows = 0; rows < kStageRows / 16; ++rows, state += 16 * sizeof(float)) {
        uint32_t raw[4];
        load_matrix_x4(state, raw[0], raw[1], raw[2], raw[3]);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const float4 m = memory.transition[stage][((rows * kCombineWarps + warp) * 2 + s) * 32 + lane];
          const SplitFloat parts[4] = {SplitFloat(m.x), SplitFloat(m.y), SplitFloat(m.z), SplitFloat(m.w)};
          const uint32_t high[4] = {parts[0].high, parts[1].high, parts[2].high, parts[3].high};
          const uint32_t low[4] = {parts[0].low, parts[1].low, parts[2].low, parts[3].low};
          const SplitFloat b0(__uint_as_float(raw[s])), b1(__uint_as_float(raw[2 + s]));
          mma_tf32(sums[s][0], high, b0.high, b1.high);
          mma_tf32(sums[s][1], high, b0.low, b1.low);
          mma_tf32(sums[s][2], low, b0.high, b1.high);
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&memory.empty[stage]));
    }
    float sum[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum[e] = ((sums[0][1][e] + sums[0][2][e]) + (sums[1][1][e] + sums[1][2][e])) + (sums[0][0][e] + sums[1][0][e]);
    }
    mine[0].x += sum[0], mine[1].x += sum[1], mine[0].y += sum[2], mine[1].y += sum[3];
#pragma unroll
    for (int b = 0; b < 2; ++b) local[places[b]] = mine[b];
    share(step & 1, mine);
  }
}

}  // namespace flash_qla::cuda::sm90
