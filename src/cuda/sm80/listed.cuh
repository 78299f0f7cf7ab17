// States after listed tokens, which may lie anywhere in a chunk. The pass leaves its state at the start of each chunk
// in which a token is listed; then the tokens from there on are computed as short sequences of their own, with nothing
// but the state to show for it. A state so depends on no later token, and has the bits of a call that ends there.
#pragma once

#include "cuda/sm80/block.cuh"
#include "cuda/sm80/call.h"

namespace flash_qla::cuda::sm80 {
namespace {

struct ListedTokens {
  int64_t entries = 0;              // M; 0: none are listed
  DeviceTensor positions, indices;  // [M] as the caller gave them
  ChunkLists lists;
  DeviceSequence* parts = nullptr;  // [M] from the chunk's start to the token; no tokens where nothing is wanted
  int64_t* slots = nullptr;         // [M] of the pool, or none
  DeviceStates states;              // [M, Hv] at the parts' starts, padded
  StepRecord* records = nullptr;    // [M, Hv, kStepsPerChunk]
};

constexpr int kListThreads = 256;

// A thread an entry. A position p stands for the token p - 1.
__global__ void __launch_bounds__(kListThreads)
    sm80_list_tokens_kernel(SequenceTable sequences, int64_t tokens, const __grid_constant__ PoolIndices pool,
                            const __grid_constant__ ListedTokens listed) {
  const int64_t m = static_cast<int64_t>(blockIdx.x) * kListThreads + threadIdx.x;
  if (m >= listed.entries) return;
  const int64_t token = load_index(listed.positions, m) - 1;
  DeviceSequence part{0, 0, 0, m};
  int64_t slot = kNoSlot, chunk = 0;
  if (token >= 0 && token < tokens && sequences.N > 0) {
    const bool dense = sequences.bounds == nullptr;
    const int64_t n = dense ? token / sequences.T
                            : last_not_above(sequences.N, token, [&](int64_t i) { return sequences.bounds[i]; });
    const DeviceSequence sequence = sequence_at(sequences, n);
    const int64_t t = (dense ? token % sequences.T : token) - sequence.begin;  // within the sequence
    if (t >= 0 && t < sequence.length && read_slot(pool, n) != kSkipRow) {
      slot = slot_or_none(pool, load_index(listed.indices, m));
      chunk = t / kChunkSize;
      if (slot != kNoSlot) {
        part = {sequence.b, sequence.begin + chunk * kChunkSize, t % kChunkSize + 1, m};
        // The order of a list varies from run to run; what is written does not, as every entry has its own state.
        listed.lists.next[m] = atomicExch(&listed.lists.first[sequence.first_chunk + chunk], static_cast<int32_t>(m));
      }
    }
  }
  listed.parts[m] = part;
  listed.slots[m] = slot;
}

ListedTokens take_listed(const flash_qla_forward_arguments& args, const Problem& p, Workspace* workspace) {
  ListedTokens listed{};
  if (!present(args.checkpoint_offsets)) return listed;
  listed.entries = args.checkpoint_offsets.shape[0];
  listed.positions = device_tensor(args.checkpoint_offsets);
  listed.indices = device_tensor(args.checkpoint_indices);
  listed.lists.first = workspace->take<int32_t>(p.chunk_bound);
  listed.lists.next = workspace->take<int32_t>(listed.entries);
  listed.parts = workspace->take<DeviceSequence>(listed.entries);
  listed.slots = workspace->take<int64_t>(listed.entries);
  listed.states = take_padded_states(p, listed.entries, p.V, workspace);
  listed.records = workspace->take<StepRecord>(listed.entries * p.Hv * kStepsPerChunk);
  return listed;
}

// Fills lists, parts and slots.
Status launch_list_tokens(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                          const ListedTokens& listed, cudaStream_t stream) {
  if (listed.entries == 0) return Status();
  // Every byte 0xff: -1.
  const size_t bytes = static_cast<size_t>(p.chunk_bound) * sizeof(int32_t);
  FLASH_QLA_RETURN_IF_ERROR(cuda_status(cudaMemsetAsync(listed.lists.first, 0xff, bytes, stream), "cudaMemsetAsync"));
  return launch("sm80_list_tokens", sm80_list_tokens_kernel, ceil_div(listed.entries, kListThreads), kListThreads, 0,
                stream, sequences, p.B * p.T, pool, listed);
}

// The parameters of both kernels for the parts, from those of the call.
PrepareParams for_parts(const PrepareParams& params, const ListedTokens& listed) {
  PrepareParams of_parts = params;
  of_parts.parts = listed.parts;
  of_parts.chunks = listed.entries;
  of_parts.normal_q = of_parts.normal_k = nullptr;
  of_parts.g_cumsum = of_parts.A = {};
  of_parts.decays = nullptr;
  of_parts.records = listed.records;
  return of_parts;
}
PassParams for_parts(const PassParams& params, const ListedTokens& listed) {
  PassParams of_parts = states_alone(params);
  of_parts.rule = {};
  of_parts.parts = listed.parts;
  of_parts.records = listed.records;
  of_parts.starts = listed.states;
  of_parts.pool_indices.final = {listed.slots, {1}, static_cast<int32_t>(DType::kInt64), 0};
  of_parts.initial_state = of_parts.final_state = {};
  return of_parts;
}

}  // namespace
}  // namespace flash_qla::cuda::sm80
