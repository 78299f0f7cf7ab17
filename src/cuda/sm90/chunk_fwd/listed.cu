#include "cuda/sm90/chunk_fwd/listed.h"

#include "cuda/common/sequences.cuh"
#include "cuda/sm90/chunk_fwd/launch.h"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"

namespace flash_qla::cuda::sm90::fwd {
namespace {

constexpr int kThreads = 256;

// The sequence that token `token` lies in, or -1.
__device__ int32_t sequence_of(const Args& args, int64_t token) {
  if (args.cu_seqlens == nullptr) return static_cast<int32_t>(token / args.dense_length);
  const auto n = static_cast<int32_t>(last_not_above(args.num_sequences, token, [&](int64_t i) {
    return load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, i);
  }));
  const SequenceSpan sequence = sequence_at(args, n);
  return token >= sequence.start && token < sequence.start + sequence.length ? n : -1;
}

__global__ void __launch_bounds__(kThreads)
    sm90_chunk_fwd_list_kernel(const __grid_constant__ Args args, const __grid_constant__ ListedStates listed) {
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (entry >= listed.entries) return;
  const int64_t position = load_index(listed.offsets, entry);
  int32_t row = 0, tokens = 0;
  int64_t slot = kNoSlot;
  if (position >= 1 && position <= args.num_tokens && args.num_sequences > 0) {
    const int32_t n = sequence_of(args, position - 1);
    if (n >= 0 && initial_slot(args, n) != kSkipSequence) {
      const int32_t before = static_cast<int32_t>(position - 1) - sequence_at(args, n).start;
      row = sequence_at(args, n).start + before / kChunk * kChunk;
      slot = usable_slot(listed.pool, load_index(listed.slots, entry));
      if (slot != kNoSlot) tokens = before % kChunk + 1;  // else nothing is gathered for the second forward to read
    }
  }
  listed.rows[entry] = row;
  listed.tokens[entry] = tokens;
  listed.indices[entry] = slot;
  // The order of a list varies from run to run; what is written does not, as every entry has its own state.
  if (slot != kNoSlot) listed.next[entry] = atomicExch(&listed.lists[row], static_cast<int32_t>(entry));
}

// A block gathers the rows of one token of one entry.
__global__ void __launch_bounds__(kThreads)
    sm90_chunk_fwd_gather_kernel(const __grid_constant__ Args args, const __grid_constant__ ListedStates listed) {
  const int64_t to = blockIdx.x, entry = to / kChunk;
  const int token = static_cast<int>(to % kChunk);
  if (token >= listed.tokens[entry] || listed.indices[entry] < 0) return;
  const int64_t from = listed.rows[entry] + token;
  constexpr int kPieces = kHeadDim / 8;  // of 16 bytes, in a row
  const auto gather = [&](void* rows, const void* tensor, int heads, int64_t token_stride, int64_t head_stride) {
    for (int i = threadIdx.x; i < heads * kPieces; i += kThreads) {
      const auto* row = static_cast<const uint16_t*>(tensor) + from * token_stride + i / kPieces * head_stride;
      static_cast<uint4*>(rows)[to * heads * kPieces + i] = reinterpret_cast<const uint4*>(row)[i % kPieces];
    }
  };
  gather(listed.k, args.k, args.num_key_heads, args.k_token_stride, args.k_head_stride);
  gather(listed.v, args.v, args.num_value_heads, args.v_token_stride, args.v_head_stride);
  for (int head = threadIdx.x; head < args.num_value_heads; head += kThreads) {
    const int64_t i = to * args.num_value_heads + head;
    if (listed.g != nullptr) listed.g[i] = args.g[from * args.g_token_stride + head * args.g_head_stride];
    if (listed.beta != nullptr)
      listed.beta[i] = args.beta[from * args.beta_token_stride + head * args.beta_head_stride];
  }
}

}  // namespace

void take_listed(const flash_qla_forward_arguments& call, const Args& args, Workspace* workspace,
                 ListedStates* listed) {
  listed->offsets = device_tensor(call.checkpoint_offsets);
  listed->slots = device_tensor(call.checkpoint_indices);
  listed->entries = call.checkpoint_offsets.shape[0];
  listed->pool = args.final_state;
  const int64_t entries = listed->entries, tokens = entries * kChunk, heads = args.num_value_heads;
  listed->lists = workspace->take<int32_t>(args.num_tokens);
  listed->next = workspace->take<int32_t>(entries);
  listed->rows = workspace->take<int32_t>(entries);
  listed->tokens = workspace->take<int32_t>(entries);
  listed->indices = workspace->take<int64_t>(entries);
  listed->states = workspace->take<float>(entries * heads * kHeadDim * kHeadDim);
  listed->k = workspace->take<uint16_t>(tokens * args.num_key_heads * kHeadDim);
  listed->v = workspace->take<uint16_t>(tokens * heads * kHeadDim);
  listed->o = workspace->take<uint16_t>(tokens * heads * kHeadDim);
  if (present(call.g)) listed->g = workspace->take<float>(tokens * heads);
  if (present(call.beta)) listed->beta = workspace->take<float>(tokens * heads);
  listed->workspace =
      workspace->take<char>(static_cast<int64_t>(chunk_forward_workspace_size(static_cast<int32_t>(entries))));
}

Status launch_list_starts(const Args& args, const ListedStates& listed, cudaStream_t stream) {
  if (listed.entries == 0 || args.num_tokens == 0) return Status();
  // Every byte 0xff: -1.
  FLASH_QLA_RETURN_IF_ERROR(
      cuda_status(cudaMemsetAsync(listed.lists, 0xff, static_cast<size_t>(args.num_tokens) * sizeof(int32_t), stream),
                  "cudaMemsetAsync"));
  return launch("sm90_chunk_fwd_list", sm90_chunk_fwd_list_kernel, ceil_div(listed.entries, kThreads), kThreads, 0,
                stream, args, listed);
}

Status launch_listed_states(const Args& args, const ListedStates& listed, cudaStream_t stream) {
  if (listed.entries == 0 || args.num_tokens == 0) return Status();
  FLASH_QLA_RETURN_IF_ERROR(launch("sm90_chunk_fwd_gather", sm90_chunk_fwd_gather_kernel, listed.entries * kChunk,
                                   kThreads, 0, stream, args, listed));
  Args step;
  step.q = step.k = listed.k;  // nobody wants the output
  step.v = listed.v;
  step.o = listed.o;
  step.q_token_stride = step.k_token_stride = args.num_key_heads * int64_t{kHeadDim};
  step.v_token_stride = step.o_token_stride = args.num_value_heads * int64_t{kHeadDim};
  step.q_head_stride = step.k_head_stride = step.v_head_stride = step.o_head_stride = kHeadDim;
  step.g = listed.g;
  step.beta = listed.beta;
  step.g_token_stride = step.beta_token_stride = args.num_value_heads;
  step.g_head_stride = step.beta_head_stride = 1;
  step.initial.data = listed.states;
  step.initial.slot_stride = args.num_value_heads * int64_t{kHeadDim} * kHeadDim;
  step.initial.head_stride = int64_t{kHeadDim} * kHeadDim;
  step.initial.slots = listed.entries;
  step.final_state = listed.pool;
  step.final_state.indices = listed.indices;
  step.final_state.index_stride = 1;
  step.final_state.indices_are_64_bit = 1;
  step.dense_length = kChunk;
  step.lengths = listed.tokens;
  step.num_tokens = listed.entries * kChunk;
  step.num_sequences = static_cast<int32_t>(listed.entries);
  step.num_key_heads = args.num_key_heads;
  step.num_value_heads = args.num_value_heads;
  step.state_v_first = args.state_v_first;
  step.type = args.type;
  step.workspace = listed.workspace;
  return cuda_status(launch_chunk_forward(step, Variant::kAuto, stream), "the sm90 forward to listed tokens");
}

}  // namespace flash_qla::cuda::sm90::fwd
