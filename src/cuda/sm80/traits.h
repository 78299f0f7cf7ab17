// Compile-time shape of the kernels of path sm80, and what they leave for each other in the workspace. kKeys is K
// padded to one of 64, 96, 128, 192 and 256.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace flash_qla::cuda::sm80 {

// Value columns that one warp carries: the rows of mma.m16n8k16.
inline constexpr int kStrip = 16;

// The most shared memory that a block may ask for on every GPU from compute capability 8.0 on (8.6, 8.9 and 12.x).
inline constexpr size_t kMostSharedBytes = 99 * 1024;

// What is compiled for: ten times the compute capability's number, 0 on the host.
#ifdef __CUDA_ARCH__
inline constexpr int kArchitecture = __CUDA_ARCH__;
#else
inline constexpr int kArchitecture = 0;
#endif

// Fewer keys lie along each other, and without decay every rounding stays: the outputs of heads of 16 keys are off by
// 5.4e-3 in bf16, of 32 by 4.3e-3, and dh0 of heads of 16 by up to twice its bound (docs/numerics.md).
inline constexpr int64_t kLeastBf16Keys = 32;

// Tokens that the serial pass takes at once. With 64 there would be fewer steps, but more products in the triangles
// (136 for 120 with 64 keys), inverses of four times the work, and from 128 keys on no room for two stages.
inline constexpr int kStep = 32;
inline constexpr int kChunk = static_cast<int>(kChunkSize), kStepsPerChunk = kChunk / kStep;

// Strips that a block may have, one warp each, which share keys, queries and gates. With five warps a thread may have
// 255 registers; with nine it would have 168, which is too few from 128 keys on.
inline constexpr int kMostStrips = 4, kMostPassThreads = 32 * (kMostStrips + 1);

// In shared memory for what the warps of a block want to know at times only.
inline constexpr int kPlaceBytes = 64;

inline constexpr int kValueBytes = kStep * kStrip * 2;  // of V of a strip and step

// ---- 8x8 blocks

// A matrix that one kernel leaves for another lies as 8x8 blocks of 16-bit elements, row by row, 128 bytes each: loads
// of whole blocks (ldmatrix) have no bank conflicts, and as transposes none either.
inline constexpr int kBlockBytes = 128;
inline constexpr int kChunkBlocks = static_cast<int>(kChunkSize) / 8;

// A lower triangular matrix of a step's tokens keeps the blocks on and below its diagonal, in the order in which the
// pass multiplies them: block columns in pairs (the 16 tokens that one product sums over), and in a pair row by row.
// The block above the diagonal that belongs to a pair's first row is zero and is not kept.
inline constexpr int kTileRows = kStep / 8, kTriangleBlocks = kTileRows * (kTileRows + 1) / 2;
constexpr int triangle_block(int row, int column) {
  const int pair = column / 2;
  const int before = pair * (2 * kTileRows + 1 - 2 * pair);  // blocks of the pairs before
  return row == 2 * pair ? before : before + 1 + 2 * (row - 2 * pair - 1) + column % 2;
}
static_assert(triangle_block(2, 2) == 7 && triangle_block(3, 3) == kTriangleBlocks - 1);

// The same in the order of the reverse pass: pairs of block columns from the last to the first, for each of these pairs
// of rows (the 16 tokens that one product sums over), and in these column by column.
constexpr int reverse_block(int row, int column) {
  const int pair = column / 2, later = kTileRows / 2 - 1 - pair;  // pairs of columns behind this one
  const int before = later * (2 * later + 1);                     // their blocks
  if (row / 2 == pair) return before + (column % 2 == 0 ? row % 2 : 2);
  return before + 3 + 4 * (row / 2 - pair - 1) + 2 * (column % 2) + row % 2;
}
static_assert(reverse_block(3, 3) == 2 && reverse_block(3, 1) == kTriangleBlocks - 1);

// What `prepare` leaves of one step and value head (docs/kernels/sm80.md has the names). Tokens past a sequence's end
// have no decay and a beta of 0.
struct alignas(16) StepRecord {
  static constexpr int kTriangleBytes = kTriangleBlocks * kBlockBytes;
  char transform[kTriangleBytes];  // strict(G o T)
  float gamma[kStep];              // e^c, c summed from the step's start
  float update[kStep];             // beta e^(c at the step's end - c)
  float decay[4];                  // e^c at the step's end, four times
  // A pass without outputs copies what is above alone.
  float scaled_gamma[kStep];     // scale e^c
  char outputs[kTriangleBytes];  // P B
};
inline constexpr int kStateRecordBytes = static_cast<int>(offsetof(StepRecord, scaled_gamma));
static_assert(kStateRecordBytes % 16 == 0);

// What the reverse pass needs of one step and value head beside keys and queries. P is without beta here.
struct alignas(16) ReverseRecord {
  char inverse[StepRecord::kTriangleBytes];  // strict(G o A)
  char scores[StepRecord::kTriangleBytes];   // P
  float to_end[kStep];                       // e^(c at the step's end - c)
  float scaled_gamma[kStep];                 // scale e^c
  float minus_gamma[kStep];                  // -e^c
  float beta[kStep];
  float decay[4];  // e^c at the step's end, four times
};

// The gates of a chunk and value head for the gradients: c from the chunk's start, in powers of two, as a sum of two
// floats.
struct ChunkGates {
  float high[kChunk], low[kChunk], beta[kChunk];
};

// Record: what a stage has of a step beside its rows.
template <int kKeys, class Record = StepRecord>
struct Traits {
  static constexpr int kKeyTiles = kKeys / 8, kTokenTiles = kStep / 8;  // of a product's columns

  // A stage of the ring: rows of keys and of queries, the record, and V of each strip.
  static constexpr int kRowsBytes = kStep * kKeys * 2;
  static constexpr int kRecordBytes = static_cast<int>(sizeof(Record));
  static constexpr int kKeysAt = 0, kQueriesAt = kRowsBytes, kRecordAt = 2 * kRowsBytes,
                       kValuesAt = kRecordAt + kRecordBytes;
  static constexpr int stage_bytes(int strips) { return kValuesAt + strips * kValueBytes; }

  // In front of the stages: barriers (full and free, a pair a stage) and Place.
  static constexpr int kMostStages = 3, kPlaceAt = 16 * kMostStages, kStagesAt = kPlaceAt + kPlaceBytes;
  static_assert(kRecordBytes % 16 == 0);
  // A third stage took 5 to 10 % off a step where it fits.
  static constexpr int stages(int strips) {
    return kStagesAt + 3 * stage_bytes(strips) <= static_cast<int>(kMostSharedBytes) ? 3 : 2;
  }
  static constexpr int shared_bytes(int strips) { return kStagesAt + stages(strips) * stage_bytes(strips); }
  static_assert(shared_bytes(kMostStrips) <= static_cast<int>(kMostSharedBytes));
};

// The smallest of the compiled dimensions that holds K keys.
constexpr int padded_keys(int64_t K) { return K <= 64 ? 64 : K <= 96 ? 96 : K <= 128 ? 128 : K <= 192 ? 192 : 256; }

// Whole strips.
constexpr int64_t padded_values(int64_t V) { return ceil_div(V, kStrip) * kStrip; }

}  // namespace flash_qla::cuda::sm80
