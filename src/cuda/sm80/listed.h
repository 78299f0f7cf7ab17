// States after listed tokens, which may lie anywhere in a chunk. The pass leaves its state at the start of each chunk
// in which a token is listed; then the tokens from there on are computed as short sequences of their own, with nothing
// but the state to show for it. A state so depends on no later token, and has the bits of a call that ends there.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/params.h"

namespace flash_qla::cuda::sm80 {

struct ListedTokens {
  int64_t entries = 0;              // M; 0: none are listed
  DeviceTensor positions, indices;  // [M] as the caller gave them
  ChunkLists lists;
  DeviceSequence* parts = nullptr;  // [M] from the chunk's start to the token; no tokens where nothing is wanted
  int64_t* slots = nullptr;         // [M] of the pool, or none
  float* states = nullptr;          // [M, Hv, V, K] at the parts' starts
  StepRecord* records = nullptr;    // [M, Hv, kStepsPerChunk]

  DeviceStates start_states(const Problem& p) const;
};

ListedTokens take_listed(const flash_qla_forward_arguments& args, const Problem& p, Workspace* workspace);

// Fills lists, parts and slots.
Status launch_list_tokens(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                          const ListedTokens& listed, cudaStream_t stream);

// The parameters of both kernels for the parts, from those of the call.
PrepareParams for_parts(const PrepareParams& params, const ListedTokens& listed);
ForwardParams for_parts(const ForwardParams& params, const ListedTokens& listed, const Problem& p);

}  // namespace flash_qla::cuda::sm80
