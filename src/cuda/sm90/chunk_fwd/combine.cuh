// Boundary states of a sequence split: S' = M S + B through the chains of transitions, in fp32, by the blocks that made
// the transitions, once all are there.
#pragma once

#include "../../common/bulk.cuh"
#include "../../common/mbarrier.cuh"
#include "chunk_stream.cuh"

namespace flash_qla::cuda::sm90 {

// A block carries eight columns (V) of a chain's states: the state groups' eight warps multiply, a thread of the
// auxiliary groups brings the transitions, 16 KB at a time.
inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineColumns = 8;
inline constexpr int kCombineSlices = kHeadDim / kCombineColumns;
inline constexpr int kCombineStages = 8;  // two transitions: one is on its way while the other is used
inline constexpr int kStageRows = 32;     // of M^T: two of its eight groups of 16
inline constexpr int kStageVectors = kStageRows * kHeadDim / 4;
inline constexpr int kStagesPerTransition = kHeadDim / kStageRows;

struct CombineMemory {
  float4 transition[kCombineStages][kStageVectors];
  float state[2][kHeadDim][kCombineColumns];
  uint64_t full[kCombineStages], empty[kCombineStages];
  int32_t unit;
};

// All warps of a block meet here. Not __syncthreads(): the roles come to their meetings from different places in the
// program, which is divergence to synccheck, and whose order racecheck does not see.
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
  const int units = p.counters->chains * kCombineSlices;
  // A block that had no tile leaves its SM to the next kernel.
  const bool had_tiles = reinterpret_cast<const ChunkWalker*>(shared_memory() + Traits::kSmemWalker)->opened > 0;
  if (units == 0 || !had_tiles) return;
  BlockMeeting meet{smem() + Traits::kMeet};
  meet();  // the tiles' shared memory is free
  if (first) {
    // Where as many other blocks as there are pieces are still at their tiles, this one is not needed. The last finds
    // none.
    const bool needed = static_cast<int>(atomicSub(&p.counters->blocks_running, 1u)) - 1 < units;
    memory.unit = needed ? 0 : -1;
    if (needed) {
      for (int i = 0; i < kCombineStages; ++i) {
        mbarrier_init(smem_address(&memory.full[i]), 1);
        mbarrier_init(smem_address(&memory.empty[i]), kCombineWarps);
      }
      mbarrier_init_fence();
      // All state tiles have been given out, so those that are missing are being computed by blocks that run.
      const uint32_t all = static_cast<uint32_t>(p.counters->state_tiles) * kCombineWarps;
      while (load_acquire(&p.counters->states_done) < all) __nanosleep(100);
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

// Columns v0 .. v0 + 7 of S are rows of S^T: half of what a warp's lanes hold of one state group. As there, a thread
// has S^T at row v0 + lane / 4, columns 8 j + 2 (lane % 4) and the next, for two j. By the eight warps of the state
// groups.
__device__ __forceinline__ void multiply_transitions(const ChunkForwardKernelParams& p, CombineMemory& memory,
                                                     const TransitionChain& chain, int slice, uint32_t stages, int warp,
                                                     int lane) {
  const int half = slice & 1, column = lane >> 2;
  int places[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) places[b] = 2 * boundary_place(slice / 8, slice / 2 % 4, 2 * warp + b, lane) + half;
  float2* local =
      reinterpret_cast<float2*>(p.boundary_states + static_cast<int64_t>(chain.first_slot) * kBoundaryVectors);
  auto share = [&](int buffer, const float2(&x)[2]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int row = 8 * (2 * warp + b) + 2 * (lane & 3);
      memory.state[buffer][row][column] = x[b].x;
      memory.state[buffer][row + 1][column] = x[b].y;
    }
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
    const float (&state)[kHeadDim][kCombineColumns] = memory.state[(step - 1) & 1];
    float sums[4][kCombineColumns] = {};
#pragma unroll 1
    for (int i = 0; i < kStagesPerTransition; ++i, ++stages) {
      const uint32_t stage = stages % kCombineStages;
      mbarrier_wait(smem_address(&memory.full[stage]), stages / kCombineStages & 1);
#pragma unroll
      for (int rows = 0; rows < kStageRows / 16; ++rows) {
        const int row = kStageRows * i + 16 * rows + (lane >> 2);
        float4 m[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) m[b] = memory.transition[stage][(rows * 16 + 2 * warp + b) * 32 + lane];
#pragma unroll
        for (int v = 0; v < kCombineColumns; v += 4) {
          const float4 low = *reinterpret_cast<const float4*>(&state[row][v]);
          const float4 high = *reinterpret_cast<const float4*>(&state[row + 8][v]);
          const float lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
          for (int b = 0; b < 2; ++b) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              sums[2 * b][v + c] = fmaf(m[b].x, lows[c], fmaf(m[b].z, highs[c], sums[2 * b][v + c]));
              sums[2 * b + 1][v + c] = fmaf(m[b].y, lows[c], fmaf(m[b].w, highs[c], sums[2 * b + 1][v + c]));
            }
          }
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(smem_address(&memory.empty[stage]));
    }
    // The eight lanes of a column of lanes have summed different rows: each ends with the sum for one of the eight
    // columns, its own.
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float half_sums[4], quarter_sums[2];
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const float other = __shfl_xor_sync(0xffffffffu, column & 4 ? sums[e][v] : sums[e][v + 4], 16);
        half_sums[v] = (column & 4 ? sums[e][v + 4] : sums[e][v]) + other;
      }
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const float other = __shfl_xor_sync(0xffffffffu, column & 2 ? half_sums[v] : half_sums[v + 2], 8);
        quarter_sums[v] = (column & 2 ? half_sums[v + 2] : half_sums[v]) + other;
      }
      const float other = __shfl_xor_sync(0xffffffffu, column & 1 ? quarter_sums[0] : quarter_sums[1], 4);
      const float sum = (column & 1 ? quarter_sums[1] : quarter_sums[0]) + other;
      (e & 1 ? mine[e / 2].y : mine[e / 2].x) += sum;
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) local[places[b]] = mine[b];
    share(step & 1, mine);
  }
}

}  // namespace flash_qla::cuda::sm90
