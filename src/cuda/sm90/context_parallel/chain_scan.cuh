// X <- M X + B along the segments of a chain, in fp32: of links (links/link_chains.cu), and of states at cuts from what
// links have left (carry.cu).
#pragma once

#include "cuda/common/cp_async.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::cp {

inline constexpr int kChainThreads = 256;
// A block takes 16 columns of X. fp32 products: 16 columns are 262,144 of them a step, 1.2 us of a multiprocessor, and
// as many blocks as a quarter of 32 heads has are one wave on an H100.
inline constexpr int kChainColumns = 16;
inline constexpr int kChainSlices = kHeadDim / kChainColumns;
inline constexpr int kColumnsPerThread = kChainColumns * kHeadDim / kChainThreads;
inline constexpr int kMatrix = kHeadDim * kHeadDim;
// Transitions come through shared memory in tiles of 32 rows. Three of them are on their way while one is used: 48 KB
// of a multiprocessor, which the L2 cache's latency wants. Three blocks fit, so that those without segments delay
// nobody.
inline constexpr int kTileRows = 32, kTiles = kHeadDim / kTileRows;
inline constexpr int kChainStages = 4;

struct alignas(16) ChainMemory {
  float tiles[kChainStages][kTileRows][kHeadDim];
  float state[kChainColumns][kHeadDim];  // [column][row]
};

// The thread's row of X, and the first of its kColumnsPerThread columns.
struct ChainPlace {
  int row = static_cast<int>(threadIdx.x) % kHeadDim;
  int first = static_cast<int>(threadIdx.x) / kHeadDim * kColumnsPerThread;
};
using ChainShare = float[kColumnsPerThread];

// `steps` of them, by a block. transitions: M^T (going backward M) of the first step, those of the others follow it.
// add(step, share): the thread's share of B; after(step, share): of what X then is.
template <typename Add, typename After>
__device__ __forceinline__ void scan_chain(ChainMemory& s, const float* transitions, int32_t steps, ChainShare& state,
                                           const Add& add, const After& after) {
  const ChainPlace at;
  const int32_t tiles = steps * kTiles;
  const auto fetch = [&](int32_t tile) {
    if (tile < tiles) {
      const float* from = transitions + static_cast<int64_t>(tile) * (kTileRows * kHeadDim);
      const uint32_t to = smem_address(s.tiles[tile % kChainStages]);
#pragma unroll
      for (int i = 0; i < kTileRows * kHeadDim / (4 * kChainThreads); ++i) {
        const int place = 4 * (i * kChainThreads + static_cast<int>(threadIdx.x));
        cp_async_16(to + sizeof(float) * place, from + place);
      }
    }
    cp_async_commit();
  };
  for (int32_t tile = 0; tile < kChainStages - 1; ++tile) fetch(tile);

  ChainShare added = {};
  if (steps > 0) add(0, added);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    if (tile % kTiles == 0) {  // the next segment
      const int32_t step = tile / kTiles;
      __syncthreads();  // the state before has been read
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; ++i) {
        s.state[at.first + i][at.row] = state[i];
        state[i] = added[i];
      }
      if (step + 1 < steps) add(step + 1, added);
    }
    cp_async_wait<kChainStages - 2>();
    __syncthreads();  // all threads' copies of the tile are there, the state too; the tile before has been read
    fetch(tile + kChainStages - 1);
    const int base = tile % kTiles * kTileRows;
#pragma unroll 4
    for (int j = 0; j < kTileRows; j += 4) {
      float m[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) m[n] = s.tiles[tile % kChainStages][j + n][at.row];
#pragma unroll
      for (int i = 0; i < kColumnsPerThread; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(&s.state[at.first + i][base + j]);
        state[i] = fmaf(m[3], x.w, fmaf(m[2], x.z, fmaf(m[1], x.y, fmaf(m[0], x.x, state[i]))));
      }
    }
    if (tile % kTiles == kTiles - 1) after(tile / kTiles, state);
  }
}

}  // namespace flash_qla::cuda::sm90::cp
