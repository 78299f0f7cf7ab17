// Arguments of the fused Hopper forward (K = V = 128, bf16 or fp16): plain pointers and strides, in elements; and what
// its launcher hands to the kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/sm90/common/state_set.h"
#include "cuda/sm90/context_parallel/plan_state.h"

namespace flash_qla::cuda::sm90::fwd {

using cp::PlanCounters, cp::Mode, cp::PlanStart, cp::WorkItem, cp::ItemList, cp::ItemTickets, cp::Scan;

inline constexpr int64_t kLargestGateStride = (int64_t{1} << 29) - 1;  // the kernel counts a stride's bytes in 32 bits

struct Args {
  // Token-major tensors. The last dimension is contiguous, every other stride a multiple of 8 elements, every base
  // 16-byte aligned.
  const void* q = nullptr;  // [T, Hq, 128]
  const void* k = nullptr;  // [T, Hq, 128]
  const void* v = nullptr;  // [T, Hv, 128]
  void* o = nullptr;        // [T, Hv, 128]; rows past the last offset become zero
  int64_t q_token_stride = 0, q_head_stride = 0;
  int64_t k_token_stride = 0, k_head_stride = 0;
  int64_t v_token_stride = 0, v_head_stride = 0;
  int64_t o_token_stride = 0, o_head_stride = 0;

  const float* g = nullptr;                       // [T, Hv] log decay, natural logarithm; null: no decay
  const float* beta = nullptr;                    // [T, Hv]; null: ones
  int64_t g_token_stride = 0, g_head_stride = 0;  // within kLargestGateStride, like those of beta
  int64_t beta_token_stride = 0, beta_head_stride = 0;

  // Null data: every sequence starts from zero. With indices, a sequence whose slot is skipped is skipped whole: its
  // rows of every output become zero, and it writes no state.
  StateSet initial;
  StateSet final_state;                        // null data: not written
  const uint8_t* has_initial_state = nullptr;  // [N] 0: start from zero, the slot is not read; null: ones
  int64_t has_initial_state_stride = 1;        // elements

  // Inputs are made by the kernel launched just before, which lets the next one start beside it.
  int32_t prepared = 0;

  // Training: what the backward needs, by a kernel of its own (save_a.h). Rows past the last offset become zero.
  float* g_cumsum = nullptr;  // [T, Hv] contiguous, natural logarithm, restarting at each chunk; null: not saved
  void* a = nullptr;  // [T, Hv, 64] contiguous and 16-byte aligned, gate-free UT transform, q's type; null: not saved

  // States on the way, one [K, V] or [V, K] matrix (state_v_first) per row and head, contiguous and 16-byte aligned.
  void* h = nullptr;  // [h_rows, Hv, K, V] at chunk starts, q's type; chunks counted over sequences, rows past the last
                      // become zero
  int64_t h_rows = 0;                          // a chunk at or past it is not kept
  void* checkpoints = nullptr;                 // [checkpoint_rows, Hv, K, V]
  int64_t checkpoint_rows = 0;                 // a state for a row at or past it is not kept
  const void* checkpoint_cu_starts = nullptr;  // [N + 1] first row of each sequence, int32 or int64
  int64_t checkpoint_starts_stride = 1;        // elements
  DType checkpoint_type = DType::kFloat32;
  int32_t checkpoint_every_chunks = 0;  // 0: none; otherwise one state every that many chunks
  int32_t checkpoint_starts_are_64_bit = 0;

  // States at the start of listed chunks, float32: a list of entries for each token that a chunk may start at.
  const int32_t* start_lists = nullptr;  // [T] first entry for the chunk that starts there, -1: none; null: no lists
  const int32_t* start_next = nullptr;   // [entries] the next entry for the same chunk, -1: none
  float* start_states = nullptr;         // [entries, Hv, K, V] or [entries, Hv, V, K], contiguous and 16-byte aligned

  // States after listed tokens, into slots of final_state, where the forward writes them itself
  // (writes_listed_states()).
  const void* listed_offsets = nullptr;  // [num_listed] the state after the tokens before it, int32 or int64
  const void* listed_slots = nullptr;    // [num_listed] int32 or int64
  int64_t listed_offsets_stride = 1, listed_slots_stride = 1;  // elements
  int32_t num_listed = 0;
  int32_t listed_offsets_are_64_bit = 0, listed_slots_are_64_bit = 0;

  // Sequences. With offsets, sequence i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]; without, i * dense_length ..
  const void* cu_seqlens = nullptr;  // [N + 1] int32 or int64, on the device
  int64_t dense_length = 0;          // tokens of each sequence when cu_seqlens is null
  const int32_t* lengths = nullptr;  // [N] of the dense_length tokens of each, as many belong to it; null: all
  int64_t num_tokens = 0;            // T, the rows of q, k, v, o
  int32_t cu_seqlens_are_64_bit = 0;
  int32_t num_sequences = 0;      // N
  int32_t num_key_heads = 0;      // Hq
  int32_t num_value_heads = 0;    // Hv, a multiple of Hq
  int32_t state_v_first = 0;      // states are [V, K]
  DType type = DType::kBFloat16;  // of q, k, v, o
  float scale = 0.0f;             // of q k^T

  // Context parallelism: segments of one sequence concurrently (docs/kernels/context_parallel.md).
  Mode split = Mode::kOff;
  int32_t force_split = 0;                  // cut wherever it is possible
  float decay_threshold = kDecayThreshold;  // logarithm of the share of a state that may be dropped; kDecayThreshold or
                                            // less

  void* workspace = nullptr;  // chunk_forward_workspace_size() bytes, 256-byte aligned, any contents
};
static_assert(std::is_trivially_copyable_v<Args>);

struct KernelArgs {
  CUtensorMap q, k, v, o;
  CUtensorMap h;  // of kernels with kStoresHByTma
  Args args;
  // Where the call may be cut: the items by their tickets, and the states at cuts and transitions by slot, in the order
  // of the state groups' registers (cut_state_position()) and as operands of the scan (TransitionRows).
  const WorkItem* list;  // null: nothing is cut
  const ItemList* sizes;
  ItemTickets* tickets;
  float4* cut_states;
  void* transitions;
  const Scan* scans;
  PlanCounters* counters;
  // [N * Hv][2], where final states overwrite initial ones: warps of a half of a head's rows that have yet to read the
  // initial state; null elsewhere.
  uint32_t* readers;
  const SequenceSpan* plan;  // [N] longest first; null: blocks look themselves
  int32_t one_item;          // with offsets: blocks have an item at most, and find its sequence themselves
  // Items given out beyond the first of each block; null: they go by their numbers.
  uint32_t* ticket;
  // Where lengths are looked at first, 0 there: the uncut kernel does the work, else that of the lists. Null: no
  // such question.
  const int32_t* cut;
  int32_t items;       // N * Hv
  int32_t followed;    // 1: a kernel of the same call comes after this one, and may start beside it
  int32_t carried;     // 1: states of carried heads are not made again, so that there may be none to make
  CUtensorMap a;       // of kernels with kSavesA
  int32_t keys_first;  // of links: matrices are stored by rows of K, not of V
};

// The kernel of one instantiation and its shape; each is compiled in a file of its own.
struct Kernel {
  const void* function;
  int32_t threads;
  int32_t smem_bytes;
  int32_t state_groups;      // of 64 rows of V
  int32_t blocks;            // that work on an item together: a cluster
  bool takes_slots = false;  // without a planner: its blocks look for skipped sequences themselves
};

Kernel one_cta(DType type);
Kernel one_cta_save(DType type);
Kernel one_cta_save_a(DType type);
Kernel one_cta_save_h(DType type);
Kernel two_cta(DType type);
Kernel two_cta_save(DType type);
Kernel segment_states(DType type);
Kernel link_states(DType type);

}  // namespace flash_qla::cuda::sm90::fwd
