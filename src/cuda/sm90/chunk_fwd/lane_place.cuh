// Where a warp and lane sit in the fragments of a 64-row tile.
#pragma once

#include <cstdint>

namespace flash_qla::cuda::sm90 {

// The place of a warp and lane in the fragments of one 64-row tile.
struct LanePlace {
  int warp, lane, q, row;  // q = lane % 4, row = 16 warp + lane / 4
  uint32_t swizzle;        // 16-byte chunk exclusive-or of the lane's ldmatrix / stmatrix row
  uint32_t
      trans_row;  // byte offset of that row, 16-row block 0: transposed (row = token or column, chunk = warp's 16 rows)
  uint32_t trans_chunk;  // swizzled chunk, in bytes
};

__device__ __forceinline__ LanePlace lane_place(int thread) {
  LanePlace at;
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

}  // namespace flash_qla::cuda::sm90
