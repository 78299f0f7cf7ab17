// Tiles of 64 rows of 128 bytes in shared memory, swizzled: where a lane sits in their fragments, their tails, their
// descriptors and the product of two of them.
#pragma once

#include <cstdint>

#include "cuda/common/bulk.cuh"
#include "cuda/common/compiler.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90 {

// The place of a warp and lane in the fragments of one 64-row tile.
struct FragmentPosition {
  int warp, lane, q, row;  // q = lane % 4, row = 16 warp + lane / 4
  uint32_t swizzle;        // 16-byte chunk exclusive-or of the lane's ldmatrix / stmatrix row
  uint32_t
      trans_row;  // byte offset of that row, 16-row block 0: transposed (row = token or column, chunk = warp's 16 rows)
  uint32_t trans_chunk;  // swizzled chunk, in bytes
};

__device__ __forceinline__ FragmentPosition fragment_position(int thread) {
  FragmentPosition at;
  at.warp = (thread >> 5) & 3;
  at.lane = thread & 31;
  at.q = at.lane & 3;
  at.row = 16 * at.warp + (at.lane >> 2);
  at.swizzle = at.lane & 7;
  at.trans_row = (8 * (at.lane >> 4) + (at.lane & 7)) * 128;
  at.trans_chunk = ((2 * at.warp + ((at.lane >> 3) & 1)) ^ at.swizzle) << 4;
  return at;
}

// For stores of whole sectors. A row's four lanes hold word q of two blocks of four words, x and y: neighbours exchange
// halves, so that an even lane has words q and q + 1 of the first block, an odd one q - 1 and q of the second. Those
// lie paired_word(q) words from the first block's start.
__device__ __forceinline__ uint2 pair_words(uint32_t x, uint32_t y, int q) {
  const uint32_t other = __shfl_xor_sync(0xffffffffu, q & 1 ? x : y, 1);
  return q & 1 ? make_uint2(other, y) : make_uint2(x, other);
}
__device__ __forceinline__ int paired_word(int q) { return (q & 1) * 4 + (q & 2); }

// Zeros rows valid..63 of `halves` 64x64 swizzled half tiles, so that what follows the sequence in memory, Inf and NaN
// included, meets no product. By `threads` threads; the caller synchronises.
__device__ __forceinline__ void zero_tail_rows(uint32_t tile, int halves, int valid, int thread, int threads = 128) {
  const int per_half = (kChunk - valid) * 8;
#pragma unroll 1
  for (int i = thread; i < per_half * halves; i += threads) {
    const int half = i >= per_half;
    store_shared_u4(tile + half * kChunk * 128 + valid * 128 + (i - half * per_half) * 16, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
}

// The descriptor of a tile whose address all lanes of the warp have, in a form that the compiler knows to be uniform:
// what is computed from it needs no vector registers, and no moves to uniform ones before each wgmma.
__device__ __forceinline__ uint64_t uniform_descriptor(uint32_t tile, uint32_t leading_bytes = 16) {
  const uint64_t descriptor = wgmma_descriptor(tile, leading_bytes);
  const uint32_t low = uniform(static_cast<uint32_t>(descriptor));
  return (descriptor & 0xffffffff00000000u) | low;
}

// Starts D = A B^T of two [64][128] tiles.
template <typename T>
__device__ __forceinline__ void start_product(float (&d)[32], uint64_t a, uint64_t b) {
  wgmma_fence();
  mma_ss_n64_init<T>(d, a, b);
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const uint32_t offset = (i >> 2) * kChunk * 128 + (i & 3) * 32;
    mma_ss_n64<T>(d, wgmma_advance_uniform(a, offset), wgmma_advance_uniform(b, offset));
  }
  wgmma_commit();
}

}  // namespace flash_qla::cuda::sm90
