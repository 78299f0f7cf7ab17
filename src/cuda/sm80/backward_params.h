// What the kernels of the backward are called with, and what they leave for each other in the workspace.
#pragma once

#include "cuda/sm80/params.h"
#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// The place of block (row, column) of a lower triangular matrix of a step's tokens whose blocks are kept as the reverse
// pass multiplies them, each of them transposed: pairs of block columns from the last to the first, for each of these
// pairs of rows (the 16 tokens that one product sums over), and in these column by column. The block above the diagonal
// is not kept.
constexpr int transposed_block(int row, int column) {
  const int pair = column / 2, later = kTileRows / 2 - 1 - pair;  // pairs of columns behind this one
  const int before = later * (2 * later + 1);                     // their blocks
  if (row / 2 == pair) return before + (column % 2 == 0 ? row % 2 : 2);
  return before + 3 + 4 * (row / 2 - pair - 1) + 2 * (column % 2) + row % 2;
}
static_assert(transposed_block(3, 3) == 2 && transposed_block(3, 1) == kTriangleBlocks - 1);

// What the reverse pass needs of one step and value head beside keys and queries. P is without beta here.
struct alignas(16) ReverseRecord {
  char inverse[StepRecord::kTriangleBytes];  // strict(G o A)^T
  char scores[StepRecord::kTriangleBytes];   // P^T
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

// Both serial passes. Matrices of value columns lie as the forward pass leaves its own.
struct PassesParams {
  ForwardParams forward;  // of the forward pass, and what both have in common
  const ReverseRecord* reverse_records;
  Rows d_o;                    // [B, T, Hv, V]; null and without pieces: zero
  Rows dv;                     // [B, T, Hv, dv_columns], rows on 8-byte boundaries; null: not wanted
  char *gradients, *d_errors;  // dS at each chunk's end, Z; null: not wanted
  DeviceStates dht;            // [N, Hv, K, V]; absent: zero
  DeviceStates dh0;            // [N, Hv, K, V]; absent: not wanted
  int32_t dv_columns;          // V or more, a multiple of 4
  uint32_t reverse_blocks;
};
static_assert(std::is_trivially_copyable_v<PassesParams>);

struct GradientsParams {
  SequenceTable sequences;
  Rows q, k;                                           // [B, T, Hq, K]
  Rows d_o;                                            // [B, T, Hv, V]; null: zero
  Rows dq, dk;                                         // [B, T, Hq, K], rows on 4-byte boundaries; null: not wanted
  const char *states, *gradients, *errors, *d_errors;  // S, dS, E and Z as the passes have left them
  const ChunkGates* gates;                             // [chunks, Hv]
  DeviceTensor q_inverse_norms, k_inverse_norms;       // [B, T, Hq] what rows were multiplied by; absent: as they are
  float *dq_parts, *dk_parts;                          // [B * T, Hq, K] before the l2 norm; null: not wanted
  float *d_log_decay, *d_beta;                         // [B * T, Hv]
  float scale;
  int32_t K, Hq, Hv, group;
  int32_t value_blocks;  // of 8 value columns
  bool starts_from_zero;
};
static_assert(std::is_trivially_copyable_v<GradientsParams>);

}  // namespace flash_qla::cuda::sm80
