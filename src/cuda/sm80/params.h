// What the kernels of path sm80 are called with.
#pragma once

#include <type_traits>

#include "cuda/common/gates.cuh"
#include "cuda/common/pool.cuh"

namespace flash_qla::cuda::sm80 {

// [B, T, heads, size] 16-bit elements as cp.async reads them: those of a row lie side by side and begin on a 16-byte
// boundary.
struct Rows {
  const void* data;            // null: there are none
  int64_t batch, token, head;  // strides, elements
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
  char* records;          // [chunks, Hv, steps of a chunk] StepRecord
  float scale;
  int32_t K, Hq, Hv, group;
  int32_t row_elements;     // of normal_q and normal_k
  int32_t heads_per_block;  // of a group
};
static_assert(std::is_trivially_copyable_v<PrepareParams>);

struct ForwardParams {
  SequenceTable sequences;
  // Parts of sequences that are computed as sequences of their own; null: none. first_chunk is that of the records.
  const DeviceSequence* parts;  // [N]
  PoolIndices pool_indices;     // without an initial index: from `initial_state`, or zero
  Rows q, k;                    // [B, T, Hq, K]
  Rows v;                       // [B, T, Hv, V]
  Rows o;                       // [B, T, Hv, o_columns]: rows begin on an 8-byte boundary
  const char* records;

  DeviceStates pool;           // [slots, Hv, K, V]
  DeviceStates initial_state;  // [N, Hv, K, V]
  DeviceStates final_state;    // [N, Hv, K, V]
  DeviceStates h;              // [chunks, Hv, K, V]
  DeviceStates checkpoints;    // [rows, Hv, K, V]
  DeviceTensor checkpoint_starts;
  int64_t checkpoint_every;
  ChunkLists listed;           // chunks of which the state at the start is wanted
  DeviceStates listed_states;  // [entries, Hv, K, V]

  int32_t K, V, Hv, group;
  int32_t o_columns;  // V or more, a multiple of 4
  int32_t strips;     // of a block: 1, 2, 4 or 8
  int32_t blocks_per_head;
  int32_t stages, stage_bytes;
};
static_assert(std::is_trivially_copyable_v<ForwardParams>);

}  // namespace flash_qla::cuda::sm80
