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

}  // namespace flash_qla::cuda::sm90
