// What the kernels of path sm80 are called with.
#pragma once

#include <type_traits>

#include "cuda/common/gates.cuh"
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

struct ReverseRecord;
struct ChunkGates;

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

struct ForwardParams {
  SequenceTable sequences;
  SegmentRule rule;
  // Parts that are computed from `starts` as sequences of their own, part i from row i; null: none. first_chunk is that
  // of the records.
  const DeviceSequence* parts;
  PoolIndices pool_indices;
  Rows q, k;                  // [B, T, Hq, K]
  Rows v;                     // [B, T, Hv, V]
  Rows o;                     // [B, T, Hv, o_columns]: rows begin on an 8-byte boundary
  const StepRecord* records;  // [chunks, Hv, kStepsPerChunk]

  DeviceStates pool;           // [slots, Hv, K, V]
  DeviceStates initial_state;  // [N, Hv, K, V]
  DeviceStates final_state;    // [N, Hv, K, V]
  DeviceStates h;              // [chunks, Hv, K, V]
  DeviceStates checkpoints;    // [rows, Hv, K, V]
  DeviceTensor checkpoint_starts;
  int64_t checkpoint_every;
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

  // Of the backward: S at each chunk's start and E, as 8x8 blocks, [chunks, Hv, V / 8, K / 8] and [chunks, Hv, V / 8,
  // 8] of them, rows of a block being value columns.
  char *states, *errors;
};
static_assert(std::is_trivially_copyable_v<ForwardParams>);

}  // namespace flash_qla::cuda::sm80
