// X <- M X + B along the segments of a chain, in the precision of fp32: of links (links/link_chains.cu), of states at
// cuts from what links have left (carry.cu), and of the backward's (chunk_bwd/scan.cuh).
//
// By tensor cores, with numbers in two parts of tf32: M X = Mh Xh + (Mh Xl + Ml Xh), which leaves out 2^-22 of a
// product. Products in fp32 took 4,550 clocks a step: lanes read from shared memory for as long as they multiply.
// A warp has 32 rows of M, which nobody else needs: its lanes read them from memory as they multiply them.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::cp {

// A warp for each scheduler of a multiprocessor.
inline constexpr int kChainThreads = 128;
// A block takes 16 columns of X: as many blocks as a quarter of 32 heads has are one wave on an H100. With fewer
// columns the L2 cache, which all blocks read M from, takes longer than the products.
inline constexpr int kChainColumns = 16;
inline constexpr int kChainSlices = kHeadDim / kChainColumns;
inline constexpr int kMatrix = kHeadDim * kHeadDim;
// Terms of the sums that a warp takes at a time: two products' of the instruction. So many times are on their way from
// memory, for about 800 clocks, which the L2 cache's latency wants.
inline constexpr int kTermsAtOnce = 16, kTimesOfStep = kHeadDim / kTermsAtOnce, kTimesAhead = 4;
static_assert(kTimesOfStep % kTimesAhead == 0);  // a time's registers are the same in all steps
// Shared memory that a kernel of such blocks asks for: two then share a multiprocessor, and not more, as those that
// come first would crowd where there is room first.
inline constexpr int kChainBytes = 100 << 10;

// X in two parts, [column][row], by steps in turns. Quadruples of rows are permuted within 128 bytes, so that lanes
// which write, or read, at once meet all banks.
struct alignas(16) ChainMemory {
  uint32_t high[2][kChainColumns][kHeadDim], low[2][kChainColumns][kHeadDim];
};
static_assert(sizeof(ChainMemory) <= kChainBytes);

// A thread's share of 16 columns: of columns column(0) .. column(3) rows `row` .. row + 3, column by column.
struct ChainPlace {
  int lane = static_cast<int>(threadIdx.x) % 32;
  int row = static_cast<int>(threadIdx.x) / 32 * 32 + lane / 4 * 4;
  __device__ int column(int i) const { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
};
using ChainShare = float[kChainColumns];
inline constexpr int kShareRows = 4, kShareColumns = 4;
static_assert(kShareRows * kShareColumns == kChainColumns && kHeadDim == 128);

// A share of columns from column0 on of a matrix [column][row].
__device__ __forceinline__ void load_share(ChainShare& share, const float* matrix, int column0) {
  const ChainPlace at;
#pragma unroll
  for (int c = 0; c < kShareColumns; ++c) {
    const float* from = matrix + (column0 + at.column(c)) * kHeadDim + at.row;
    const float4 x = __ldcg(reinterpret_cast<const float4*>(from));
    share[4 * c] = x.x, share[4 * c + 1] = x.y, share[4 * c + 2] = x.z, share[4 * c + 3] = x.w;
  }
}
__device__ __forceinline__ void store_share(float* matrix, int column0, const ChainShare& share) {
  const ChainPlace at;
#pragma unroll
  for (int c = 0; c < kShareColumns; ++c) {
    float* to = matrix + (column0 + at.column(c)) * kHeadDim + at.row;
    *reinterpret_cast<float4*>(to) = make_float4(share[4 * c], share[4 * c + 1], share[4 * c + 2], share[4 * c + 3]);
  }
}
// Elsewhere: visit(element of the share, row, column).
template <typename Visit>
__device__ __forceinline__ void for_each_of_share(const Visit& visit) {
  const ChainPlace at;
#pragma unroll
  for (int i = 0; i < kChainColumns; ++i) visit(i, at.row + i % kShareRows, at.column(i / kShareRows));
}

// The place in ChainMemory of rows 4 `quad` .. of a column.
__device__ __forceinline__ int place_of_rows(int quad, int column) {
  return 4 * (quad ^ ((column & 6) ^ (column & 1) * 4));
}

// What lies side by side in memory: a row of M^T, or one of M.
enum class ChainRows { kTransposed, kOwn };

// `steps` of them, by a block. transitions: M^T of the first step, or with kOwn M; those of the others `stride`
// elements further each. add(step, share): the thread's share of B; after(step, share): of what X then is.
template <ChainRows kRows = ChainRows::kTransposed, typename Add, typename After>
__device__ __forceinline__ void scan_chain(ChainMemory& s, const float* transitions, int64_t stride, int32_t steps,
                                           ChainShare& state, const Add& add, const After& after) {
  constexpr bool kOwnRows = kRows == ChainRows::kOwn;
  const ChainPlace at;
  const int group = at.lane / 4, quarter = at.lane % 4;
  // A lane has four terms at a time of four rows, as [term][row], or with kOwn [row][term].
  transitions += kOwnRows ? at.row * kHeadDim + 4 * quarter : 4 * quarter * kHeadDim + at.row;
  float m[kTimesAhead][4][4];
  const auto fetch = [&](int32_t step, int time, float (&to)[4][4]) {
    if (step >= steps) return;
    const float* from = transitions + step * stride + time * kTermsAtOnce * (kOwnRows ? 1 : kHeadDim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(from + i * kHeadDim));
      to[i][0] = x.x, to[i][1] = x.y, to[i][2] = x.z, to[i][3] = x.w;
    }
  };
#pragma unroll
  for (int time = 0; time < kTimesAhead; ++time) fetch(0, time, m[time]);
  __syncthreads();  // what a scan before this one has left in shared memory has been read

#pragma unroll 1
  for (int32_t step = 0; step < steps; ++step) {
    ChainShare added = {};
    add(step, added);
    auto& high = s.high[step % 2];
    auto& low = s.low[step % 2];
#pragma unroll
    for (int c = 0; c < kShareColumns; ++c) {
      TwoParts x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = split_in_two(state[4 * c + i]);
      const int column = at.column(c), place = place_of_rows(at.row / 4, column);
      *reinterpret_cast<uint4*>(&high[column][place]) = make_uint4(x[0].high, x[1].high, x[2].high, x[3].high);
      *reinterpret_cast<uint4*>(&low[column][place]) = make_uint4(x[0].low, x[1].low, x[2].low, x[3].low);
    }
    __syncthreads();  // X of the step before has been read as well
    // [eight columns][of each four rows the first two, the others], in the fragments of the instruction.
    float sums[2][2][4] = {}, small_sums[2][2][4] = {};
#pragma unroll
    for (int time = 0; time < kTimesOfStep; ++time) {
      auto& now = m[time % kTimesAhead];
      TwoParts a[4][4];  // [row][term]
#pragma unroll
      for (int row = 0; row < 4; ++row) {
#pragma unroll
        for (int term = 0; term < 4; ++term) a[row][term] = split_in_two(kOwnRows ? now[row][term] : now[term][row]);
      }
      fetch(step + (time + kTimesAhead) / kTimesOfStep, (time + kTimesAhead) % kTimesOfStep, now);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = 8 * n + group, place = place_of_rows(time * kTermsAtOnce / 4 + quarter, column);
        const uint4 h = *reinterpret_cast<const uint4*>(&high[column][place]);
        const uint4 l = *reinterpret_cast<const uint4*>(&low[column][place]);
        const uint32_t xh[4] = {h.x, h.y, h.z, h.w}, xl[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int term = 0; term < 4; term += 2) {
#pragma unroll
          for (int rows = 0; rows < 2; ++rows) {
            const auto& upper = a[2 * rows];
            const auto& lower = a[2 * rows + 1];
            const uint32_t ah[4] = {upper[term].high, lower[term].high, upper[term + 1].high, lower[term + 1].high};
            const uint32_t al[4] = {upper[term].low, lower[term].low, upper[term + 1].low, lower[term + 1].low};
            mma_m16n8k8_tf32(sums[n][rows], ah, xh[term], xh[term + 1]);
            mma_m16n8k8_tf32(small_sums[n][rows], ah, xl[term], xl[term + 1]);
            mma_m16n8k8_tf32(small_sums[n][rows], al, xh[term], xh[term + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      const int n = i / 8, rows = i % 4 / 2, element = i % 2 * 2 + i / 4 % 2;
      state[i] = added[i] + (sums[n][rows][element] + small_sums[n][rows][element]);
    }
    after(step, state);
  }
}

}  // namespace flash_qla::cuda::sm90::cp
