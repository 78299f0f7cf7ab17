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

// Tokens that the serial pass takes at once. Longer steps wait less often for a product's result; keys and queries of
// 64 tokens in two stages are beyond kMostSharedBytes from K = 128 on (85 KB with one strip and 96 keys, 113 KB with
// 128).
constexpr int step_tokens(int keys) { return keys <= 96 ? 64 : 32; }

// Strips that a block may have, one warp each: they share keys, queries and gates. Limited by registers, 65536 to a
// multiprocessor, and by shared memory (V of the strips): eight times 168 registers fit, eight times 233 do not.
constexpr int most_strips(int keys) { return keys == 128 ? 8 : 4; }

// ---- 8x8 blocks

// A matrix that one kernel leaves for another lies as 8x8 blocks of 16-bit elements, row by row, 128 bytes each: loads
// of whole blocks (ldmatrix) have no bank conflicts, and as transposes none either.
inline constexpr int kBlockBytes = 128;

// A lower triangular [tokens x tokens] matrix keeps the blocks on and below its diagonal, in the order in which the
// pass multiplies them: block columns in pairs (the 16 tokens that one product sums over), and in a pair row by row.
// The block above the diagonal that belongs to a pair's first row is zero and is not kept.
constexpr int triangle_blocks(int tokens) { return tokens / 8 * (tokens / 8 + 1) / 2; }
constexpr int triangle_block(int tokens, int row, int column) {
  const int pair = column / 2;
  const int before = pair * (tokens / 4 + 1 - 2 * pair);  // blocks of the pairs before
  return row == 2 * pair ? before : before + 1 + 2 * (row - 2 * pair - 1) + column % 2;
}
static_assert(triangle_block(32, 3, 3) == triangle_blocks(32) - 1 && triangle_block(64, 2, 2) == 15);

// What `prepare` leaves of one step and value head (docs/kernels/sm80.md has the names). Tokens past a sequence's end
// have no decay and a beta of 0.
template <int kTokens>
struct alignas(16) StepRecord {
  static constexpr int kTriangleBytes = triangle_blocks(kTokens) * kBlockBytes;
  char transform[kTriangleBytes];  // strict(G o T)
  float gamma[kTokens];            // e^c, c summed from the step's start
  float update[kTokens];           // beta e^(c at the step's end - c)
  float decay[4];                  // e^c at the step's end, four times
  // A pass without outputs copies what is above alone.
  float scaled_gamma[kTokens];   // scale e^c
  char outputs[kTriangleBytes];  // P B
};

template <int kKeys>
struct Traits {
  static constexpr int kStep = step_tokens(kKeys);
  static constexpr int kStepsPerChunk = static_cast<int>(kChunkSize) / kStep;
  static constexpr int kKeyTiles = kKeys / 8, kTokenTiles = kStep / 8;  // of a product's columns
  static constexpr int kMostThreads = 32 * (most_strips(kKeys) + 1);    // and the warp that loads
  using Record = StepRecord<kStep>;

  // A stage of the ring: rows of keys and of queries, the record, and V of each strip.
  static constexpr int kRowsBytes = kStep * kKeys * 2;
  static constexpr int kRecordBytes = static_cast<int>(sizeof(Record));
  static constexpr int kStateRecordBytes = static_cast<int>(offsetof(Record, scaled_gamma));
  static constexpr int kValueBytes = kStep * kStrip * 2;
  static constexpr int kKeysAt = 0, kQueriesAt = kRowsBytes, kRecordAt = 2 * kRowsBytes,
                       kValuesAt = kRecordAt + kRecordBytes;
  static constexpr int stage_bytes(int strips) { return kValuesAt + strips * kValueBytes; }

  // In front of the stages: barriers (full and free, a pair a stage), and what the block works on.
  static constexpr int kMostStages = 3, kPlaceAt = 16 * kMostStages, kStagesAt = kPlaceAt + 16;
  static_assert(kRecordBytes % 16 == 0 && kStateRecordBytes % 16 == 0);
  // A third stage took 5 to 10 % off a step where it fits.
  static constexpr int stages(int strips) {
    return kStagesAt + 3 * stage_bytes(strips) <= static_cast<int>(kMostSharedBytes) ? 3 : 2;
  }
  static constexpr int shared_bytes(int strips) { return kStagesAt + stages(strips) * stage_bytes(strips); }
  static_assert(shared_bytes(most_strips(kKeys)) <= static_cast<int>(kMostSharedBytes));
};

// The smallest of the compiled dimensions that holds K keys.
constexpr int padded_keys(int64_t K) { return K <= 64 ? 64 : K <= 96 ? 96 : K <= 128 ? 128 : K <= 192 ? 192 : 256; }

}  // namespace flash_qla::cuda::sm80
