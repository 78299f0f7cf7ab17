// Tiles of rows of keys or queries in shared memory, and a warp's fragments of them for mma.m16n8k16.
#pragma once

#include "cuda/common/compiler.cuh"
#include "cuda/common/cp_async.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/sm80/params.h"

namespace flash_qla::cuda::sm80 {

// A row's 16-byte pieces change places with the row's number, so that eight rows' pieces of one column lie in different
// banks. Rows of 192 bytes (96 keys) shift by half of the banks from row to row: two bits of every second row are
// enough for them.
template <int kKeys>
__device__ __forceinline__ int piece_flip(int row) {
  return kKeys % 64 == 0 ? row & 7 : row >> 1 & 3;
}

template <int kKeys>
__device__ __forceinline__ uint32_t piece_offset(int row, int piece) {
  return static_cast<uint32_t>(row * kKeys * 2 + (piece ^ piece_flip<kKeys>(row)) * 16);
}

// Where a lane reads 16x16 blocks of a tile [rows x kKeys], for load_matrix_x4: matrices 0 to 3 are
//   kRightOperand  rows 0-7 left, rows 0-7 right, rows 8-15 left, rows 8-15 right. Plain: the right operands of two
//                  products whose columns are rows of the tile
//   kLeftOperand   rows 0-7 left, rows 8-15 left, rows 0-7 right, rows 8-15 right. Plain: a left operand; transposed:
//                  the right operands of two products that sum over rows of the tile
enum class Order { kRightOperand, kLeftOperand };

template <int kKeys>
class BlockReader {
 public:
  __device__ __forceinline__ BlockReader(uint32_t tile, int lane, Order order) {
    const int matrix = lane / 8;
    const int down = order == Order::kRightOperand ? matrix >> 1 : matrix & 1;
    const int right = order == Order::kRightOperand ? matrix & 1 : matrix >> 1;
    const int row = lane % 8;
    start_ = tile + static_cast<uint32_t>((down * 8 + row) * kKeys * 2);
    flip_ = static_cast<uint32_t>((right ^ piece_flip<kKeys>(row)) * 16);
  }
  // The lane's address in block (row, column).
  __device__ __forceinline__ uint32_t at(int row, int column) const {
    constexpr int kPeriod = kKeys % 64 == 0 ? 4 : 2;  // blocks whose pieces change places with each other
    const uint32_t within = static_cast<uint32_t>(column % kPeriod * 32) ^ flip_;
    return start_ + within + static_cast<uint32_t>(column / kPeriod * kPeriod * 32 + row * 16 * kKeys * 2);
  }

 private:
  uint32_t start_, flip_;
};

// Copies tiles of kRows rows of keys or queries by kThreads threads, of which this is number `thread`. Pieces past a
// row's `pieces` become zero.
template <int kKeys, int kRows, int kThreads>
class TileCopier {
 public:
  __device__ __forceinline__ TileCopier(int pieces, int thread) : whole_(pieces == kPieces) {
#pragma unroll
    for (int b = 0; b < kPeriod; ++b) {
      row_[b] = (b * kThreads + thread) / kPieces;
      const int piece = (b * kThreads + thread) % kPieces;
      first_[b] = piece_offset<kKeys>(row_[b], piece);
      column_[b] = piece < pieces ? piece * 8 : -1;
    }
  }
  // `count` rows from `from` on, `stride` elements apart; those past them become zero.
  __device__ __forceinline__ void copy(uint32_t tile, const uint16_t* from, int64_t stride, int count) const {
    if (count == kRows && whole_) {
      copy_pieces(tile, from, stride, [](uint32_t to, const uint16_t* at, int, int) { cp_async_16(to, at); });
    } else {
      copy_pieces(tile, from, stride, [&](uint32_t to, const uint16_t* at, int row, int column) {
        const bool inside = row < count && column >= 0;
        cp_async_16_or_zero(to, inside ? at : from, inside);  // a copy of nothing wants a legal address, too
      });
    }
  }

 private:
  static constexpr int kPieces = kKeys / 8;
  // After kPeriod rounds a thread is in the column where it began, kRowsOn rows further.
  static constexpr int kPeriod = kThreads % kPieces == 0 ? 1 : 3, kRowsOn = kThreads * kPeriod / kPieces;
  static_assert(kThreads * kPeriod % kPieces == 0 && kRows % kRowsOn == 0);

  template <class Copy>
  __device__ __forceinline__ void copy_pieces(uint32_t tile, const uint16_t* from, int64_t stride, Copy copy) const {
#pragma unroll
    for (int b = 0; b < kPeriod; ++b) {
      const uint16_t* at = from + row_[b] * stride + column_[b];
#pragma unroll
      for (int a = 0; a < kRows / kRowsOn; ++a, at += kRowsOn * stride) {
        // The rows before and those skipped share no bit, so that the places change in two steps.
        const uint32_t to = tile + (first_[b] ^ static_cast<uint32_t>(piece_flip<kKeys>(a * kRowsOn) * 16)) +
                            static_cast<uint32_t>(a * kRowsOn * kKeys * 2);
        copy(to, at, row_[b] + a * kRowsOn, column_[b]);
      }
    }
  }

  int row_[kPeriod], column_[kPeriod];  // of a thread's first pieces; below 0: past the row's end
  uint32_t first_[kPeriod];
  bool whole_;
};

// fp32 sums of a warp, [16 x 8 kTiles]: lane l has rows l / 4 (elements 0, 1) and l / 4 + 8 (2, 3), columns
// 8 tile + 2 (l % 4) and the next.
template <int kTiles>
struct Sums {
  float x[kTiles][4];

  // Calls visit(element, tile, number in it).
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(x[i][e], i, e);
    }
  }
  __device__ __forceinline__ void clear() {
    each([](float& x, int, int) { x = 0.f; });
  }
  __device__ __forceinline__ void scale(float factor) {
    each([=](float& x, int, int) { x *= factor; });
  }
};

// The same rounded to 16 bits, as the left operands of products that sum over the columns.
template <int kTiles>
struct Packed {
  uint32_t x[kTiles / 2][4];
};

template <class T, int kTiles>
__device__ __forceinline__ Packed<kTiles> pack(const Sums<kTiles>& sums) {
  Packed<kTiles> packed;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
      packed.x[i / 2][i % 2 * 2 + row] = pack2<T>(sums.x[i][2 * row], sums.x[i][2 * row + 1]);
  }
  return packed;
}

template <bool kTransposed>
__device__ __forceinline__ void load_blocks(uint32_t address, uint32_t (&x)[4]) {
  if constexpr (kTransposed) {
    load_matrix_x4_trans(address, x);
  } else {
    load_matrix_x4(address, x);
  }
}

// Two tiles of sums from `tile` on += left times the right operands of a 16x16 block.
template <class T, int kTiles>
__device__ __forceinline__ void multiply_two(Sums<kTiles>& sums, int tile, const uint32_t (&left)[4],
                                             const uint32_t (&b)[4]) {
  mma_m16n8k16<T>(sums.x[tile], left, b[0], b[1]);
  mma_m16n8k16<T>(sums.x[tile + 1], left, b[2], b[3]);
}
// The same of a block in shared memory; the lane's address in it.
template <class T, bool kTransposed, int kTiles>
__device__ __forceinline__ void multiply_block(Sums<kTiles>& sums, int tile, const uint32_t (&left)[4],
                                               uint32_t address) {
  uint32_t b[4];
  load_blocks<kTransposed>(address, b);
  multiply_two<T>(sums, tile, left, b);
}

// V of a strip, [tokens x 16]: 32 bytes a row, whose halves change places every four rows for the sake of the banks.
__device__ __forceinline__ uint32_t value_offset(int row, int half) {
  return static_cast<uint32_t>(row * 32 + (half ^ (row >> 2 & 1)) * 16);
}

// Values of a strip, of a pair of tiles of tokens and transposed: as sums have them, two elements of 16 bits each.
__device__ __forceinline__ void load_values(uint32_t values, int pair, int lane, uint32_t (&x)[4]) {
  const int matrix = lane / 8, row = (matrix >> 1) * 8 + lane % 8;
  load_matrix_x4_trans(values + value_offset(row, matrix & 1) + static_cast<uint32_t>(pair * 16 * 32), x);
}

__device__ __forceinline__ const uint16_t* row_at(const Rows& rows, int64_t b, int64_t token, int64_t head) {
  return static_cast<const uint16_t*>(rows.data) + b * rows.batch + token * rows.token + head * rows.head;
}

// A triangular matrix of a step as right operands, block after block in the order in which they lie, of its transpose
// or (kTransposed) of itself. Four blocks come with a load, kAhead while the four before them are used; the last load
// may reach past the last block.
template <bool kAhead, bool kTransposed>
class BlockStream {
 public:
  __device__ __forceinline__ void start(uint32_t blocks, int lane) {
    at_ = blocks + static_cast<uint32_t>(lane) * 16;
    if (kAhead) load(0);
  }
  // Block `number`: one more than that of the last call.
  __device__ __forceinline__ uint32_t take(int number) {
    const int quad = number / 4 + (kAhead ? 1 : 0);
    if (number % 4 == 0 && quad * 4 < kTriangleBlocks) load(quad);
    return r_[number / 4 % kBuffers][number % 4];
  }

 private:
  static constexpr int kBuffers = kAhead ? 2 : 1;
  __device__ __forceinline__ void load(int quad) {
    load_blocks<kTransposed>(at_ + static_cast<uint32_t>(quad) * 4 * kBlockBytes, r_[quad % kBuffers]);
  }
  uint32_t at_;
  uint32_t r_[kBuffers][4];
};

}  // namespace flash_qla::cuda::sm80
