// What the kernels of path sm80 are called with.
#pragma once

#include <type_traits>

#include "cuda/common/gates.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pool.cuh"
#include "cuda/sm80/split.h"
#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// [B, T, heads, size] 16-bit elements as cp.async reads them: those of a row lie side by side, begin on a 16-byte
// boundary and are a multiple of 8; what is beyond K or V is zero.
struct Rows {
  const void* data;            // null: there are none
  int64_t batch, token, head;  // strides, elements
  int32_t pieces;              // of 16 bytes in a row
};

// Entries for each chunk, by its number.
struct ChunkLists {
  int32_t* first;  // [chunks] an entry, or -1; null: no lists
  int32_t* next;   // [entries] the next entry of the same chunk, or -1
};

struct PrepareParams {
  SequenceTable sequences;
  // Parts of at most a chunk in the place of the sequences' chunks, part i in place of chunk i; null: none.
  const DeviceSequence* parts;  // [chunks]
  int64_t chunks;
  PoolIndices pool_indices;
  Rows q, k;  // [B, T, Hq, K]
  // [B, T, Hq, row_elements] contiguous, where rows are left after division by their norms; null: taken as they are
  uint16_t *normal_q, *normal_k;
  Gates gates;
  DeviceTensor g_cumsum;  // [B, T, Hv]; absent: not wanted
  DeviceTensor A;         // [B, T, Hv, 64]; likewise
  StepRecord* records;    // [chunks, Hv, kStepsPerChunk]
  float* decays;          // [chunks, Hv] logarithm of what a chunk multiplies a state by at most; null: not wanted
  float scale;
  int32_t K, Hq, Hv, group;
  int32_t row_elements;     // of normal_q and normal_k
  int32_t heads_per_block;  // of a group

  // Of the backward.
  ReverseRecord* reverse_records;  // [chunks, Hv, kStepsPerChunk]
  ChunkGates* chunk_gates;         // [chunks, Hv]
};
static_assert(std::is_trivially_copyable_v<PrepareParams>);

// What the passes of the backward leave for the gradients, as 8x8 blocks whose rows are value columns; null: not
// wanted.
struct ChunkMatrices {
  char *states, *gradients;  // S at each chunk's start and dS at its end, [chunks, Hv, V / 8, K / 8] blocks
  char *errors, *d_errors;   // E and Z, [chunks, Hv, V / 8, 8] blocks
};

// Of all serial passes.
struct PassParams : ForwardStates {
  SequenceTable sequences;
  SegmentRule rule;
  // Parts that are computed from `starts` as sequences of their own, part i from row i; null: none. first_chunk is that
  // of the records.
  const DeviceSequence* parts;
  Rows q, k;                  // [B, T, Hq, K]
  Rows v;                     // [B, T, Hv, V]
  Rows o;                     // [B, T, Hv, o_columns]: rows begin on an 8-byte boundary
  const StepRecord* records;  // [chunks, Hv, kStepsPerChunk]

  ChunkLists listed;           // chunks of which the state at the start is wanted
  DeviceStates listed_states;  // [entries, Hv]

  // Of segments: states at their starts [rows, Hv] and transitions [rows, Hv], whose values are keys; and what is as
  // good as no transition. These and listed_states are fp32, keys beside each other and padded as the kernels have
  // them, values to whole strips.
  DeviceStates starts, transitions;
  const float* decays;  // [chunks, Hv]
  float decay_threshold;

  int32_t K, V, Hv, group;
  int32_t o_columns;  // V or more, a multiple of 4
  int32_t strips;     // of a block: 1, 2 or 4
  int32_t blocks_per_head;
  // Blocks from here on make transitions, one strip to 16 keys.
  int64_t first_transition;
  int32_t transition_blocks_per_head;
  int32_t stages, stage_bytes;
  int32_t keeps_states;  // at the starts of chunks

  // Of the backward.
  ChunkMatrices matrices;
  const ReverseRecord* reverse_records;  // [chunks, Hv, kStepsPerChunk]
  Rows d_o;                              // [B, T, Hv, V]; null and without pieces: zero
  Rows dv;                               // [B, T, Hv, dv_columns], rows on 8-byte boundaries; null: not wanted
  DeviceStates dht, dh0;                 // [N, Hv, K, V]; absent: zero, not wanted
  int32_t dv_columns;                    // V or more, a multiple of 4
  uint32_t reverse_blocks;
};
static_assert(std::is_trivially_copyable_v<PassParams>);

// Of dq or dk.
struct KeyGradients {
  Rows rows;                   // [B, T, Hq, K], on 4-byte boundaries; null: not wanted
  DeviceTensor inverse_norms;  // [B, T, Hq] what rows of q or k were multiplied by; absent: as they are
  float* parts;                // [B * T, Hq, K] before the l2 norm; null: not wanted
};

struct GradientsParams {
  SequenceTable sequences;
  Rows q, k;  // [B, T, Hq, K]
  Rows d_o;   // [B, T, Hv, V]; null: zero
  KeyGradients dq, dk;
  ChunkMatrices matrices;
  const ChunkGates* gates;      // [chunks, Hv]
  float *d_log_decay, *d_beta;  // [B * T, Hv]
  float scale;
  int32_t K, Hq, Hv, group;
  int32_t value_blocks;  // of 8 value columns
  bool starts_from_zero;
};
static_assert(std::is_trivially_copyable_v<GradientsParams>);

// Kernels of one dtype and padded number of keys.
template <class Params>
using Launch = Status (*)(const Params& params, int64_t blocks, cudaStream_t stream);
struct Kernels {
  Launch<PrepareParams> prepare, backward_prepare;
  Launch<PassParams> forward, states, scan, passes;  // states: without outputs; passes: of the backward
  Launch<GradientsParams> gradients;
};

// In a source for each number of keys, so that these compile side by side.
template <int kKeys>
const Kernels& kernels_of(DType type);

}  // namespace flash_qla::cuda::sm80
