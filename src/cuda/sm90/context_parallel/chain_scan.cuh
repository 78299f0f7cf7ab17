// X <- M X + B along the segments of a chain, in fp32: of links (links/link_chains.cu), and of states at cuts from what
// links have left (carry.cu).
//
// Warps share the sum of a product: each takes 32 columns of M, and of X the rows that they meet, for all of X's
// elements, and the warps' parts are added through shared memory. So a thread has 8 x 8 sums, and reads two values from
// shared memory for eight products. With a thread to eight sums, which need no adding, nine values for eight products
// are read, and a step takes as long as that: 9,200 clocks against 2,048 of arithmetic.
#pragma once

#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::cp {

// A warp for each scheduler of a multiprocessor: more of them are more parts to add.
inline constexpr int kChainThreads = 128;
inline constexpr int kChainWarps = kChainThreads / 32;
// A block takes 16 columns of X. fp32 products: 16 columns are 262,144 of them a step, 1.2 us of a multiprocessor, and
// as many blocks as a quarter of 32 heads has are one wave on an H100. With fewer columns the L2 cache, which all
// blocks read M from, takes longer than the products.
inline constexpr int kChainColumns = 16;
inline constexpr int kChainSlices = kHeadDim / kChainColumns;
inline constexpr int kMatrix = kHeadDim * kHeadDim;
// What a thread adds up.
inline constexpr int kSumRows = 8, kSumColumns = 8;
static_assert(kHeadDim / kSumRows * (kChainColumns / kSumColumns) == 32);  // a warp's lanes
// Rows of M^T come through shared memory, to each warp its own: 8 rows at a time, so that twice as many are on their
// way while those are used, for about 1,100 clocks, which the L2 cache's latency wants. With the sums that is 90 KB of
// a multiprocessor. Two blocks fit, so that those without segments delay few.
inline constexpr int kWarpRows = kHeadDim / kChainWarps;
inline constexpr int kTileRows = 8, kTiles = kWarpRows / kTileRows;
inline constexpr int kChainStages = 3;

struct alignas(16) ChainMemory {
  float tiles[kChainWarps][kChainStages][kTileRows][kHeadDim];
  float sums[kChainWarps][kChainColumns][kHeadDim];  // [part][column][row]
  float state[kHeadDim][kChainColumns + 4];          // [row][column]; rows of 80 bytes: written without bank conflicts
};

// The thread's row of X, of which it has all columns. A warp has the rows that its columns of M meet.
struct ChainPlace {
  int row = static_cast<int>(threadIdx.x);
};
static_assert(kChainThreads == kHeadDim && kWarpRows == 32);
using ChainShare = float[kChainColumns];

// What a thread multiplies for one row of M^T.
struct ChainOperands {
  float m[kSumRows], x[kSumColumns];
};
__device__ __forceinline__ void load_four(float* to, const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// `steps` of them, by a block. transitions: M^T (going backward M) of the first step, those of the others follow it.
// add(step, share): the thread's share of B; after(step, share): of what X then is.
template <typename Add, typename After>
__device__ __forceinline__ void scan_chain(ChainMemory& s, const float* transitions, int32_t steps, ChainShare& state,
                                           const Add& add, const After& after) {
  const ChainPlace at;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // The rows 4r .. 4r + 3 and 64 more of the thread's sums: a quarter of a warp then reads 128 bytes side by side.
  constexpr int kFarRows = kHeadDim / 2;
  const int row = lane % (kHeadDim / kSumRows) * 4, column = lane / (kHeadDim / kSumRows) * kSumColumns;
  const int32_t tiles = steps * kTiles;
  const auto fetch = [&](int32_t tile) {
    if (tile < tiles) {
      const float* from = transitions + static_cast<int64_t>(tile / kTiles) * kMatrix +
                          (warp * kWarpRows + tile % kTiles * kTileRows) * kHeadDim + 4 * lane;
      const uint32_t to = smem_address(s.tiles[warp][tile % kChainStages]) + 16 * lane;
#pragma unroll
      for (int j = 0; j < kTileRows; ++j) cp_async_16(to + sizeof(float) * kHeadDim * j, from + kHeadDim * j);
    }
    cp_async_commit();
  };
  const auto enter = [&](int32_t tile) {
    cp_async_wait<kChainStages - 2>();
    __syncwarp();  // all lanes' copies of the tile are there, the state too; the tile before has been read
    fetch(tile + kChainStages - 1);
  };
  const auto load = [&](ChainOperands& to, int32_t tile, int j) {
    const float* m = s.tiles[warp][tile % kChainStages][j] + row;
    const float* x = s.state[warp * kWarpRows + tile % kTiles * kTileRows + j] + column;
    load_four(to.m, m);
    load_four(to.m + 4, m + kFarRows);
    load_four(to.x, x);
    load_four(to.x + 4, x + 4);
  };
  for (int32_t tile = 0; tile < kChainStages - 1; ++tile) fetch(tile);

  for (int32_t step = 0; step < steps; ++step) {
    ChainShare added = {};
    add(step, added);
#pragma unroll
    for (int i = 0; i < kChainColumns; i += 4) {
      *reinterpret_cast<float4*>(&s.state[at.row][i]) = make_float4(state[i], state[i + 1], state[i + 2], state[i + 3]);
    }
    float sums[kSumColumns][kSumRows] = {};
    // A row's operands are read while the products of the row before are made: a scheduler has no other warp.
    ChainOperands operands[2];
    enter(step * kTiles);
    load(operands[0], step * kTiles, 0);
#pragma unroll 1
    for (int32_t tile = step * kTiles; tile < (step + 1) * kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < kTileRows; ++j) {
        if (j + 1 < kTileRows) {
          load(operands[(j + 1) % 2], tile, j + 1);
        } else if (tile + 1 < (step + 1) * kTiles) {
          enter(tile + 1);
          load(operands[0], tile + 1, 0);
        }
        const ChainOperands& now = operands[j % 2];
#pragma unroll
        for (int c = 0; c < kSumColumns; ++c) {
#pragma unroll
          for (int r = 0; r < kSumRows; ++r) sums[c][r] = fmaf(now.m[r], now.x[c], sums[c][r]);
        }
      }
    }
    __syncthreads();  // the sums of the step before have been read
#pragma unroll
    for (int c = 0; c < kSumColumns; ++c) {
      float* to = s.sums[warp][column + c] + row;
      *reinterpret_cast<float4*>(to) = make_float4(sums[c][0], sums[c][1], sums[c][2], sums[c][3]);
      *reinterpret_cast<float4*>(to + kFarRows) = make_float4(sums[c][4], sums[c][5], sums[c][6], sums[c][7]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kChainColumns; ++i) {
      state[i] = added[i];
#pragma unroll
      for (int part = 0; part < kChainWarps; ++part) state[i] += s.sums[part][i][at.row];
    }
    after(step, state);
  }
}

}  // namespace flash_qla::cuda::sm90::cp
