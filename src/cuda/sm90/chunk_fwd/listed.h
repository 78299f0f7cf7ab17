// States after listed tokens, each into a slot of the pool, where the forward does not write them itself
// (writes_listed_states()) because its bits may not depend on the list, or several blocks work on a head.
//
// The forward keeps the float32 state at the start of the chunk that a listed token lies in. A second, small forward
// goes on from there to the token: one sequence of 1 to 64 tokens for each entry of the list, over rows gathered from
// the call's. At a chunk's end it does what the forward did, so the state has the bits that the next chunk started
// from.
#pragma once

#include "cuda/common/device_tensor.cuh"
#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_fwd/args.h"

namespace flash_qla::cuda::sm90::fwd {

struct ListedStates {
  DeviceTensor offsets, slots;  // [entries] token positions and pool slots; absent: no list
  int64_t entries = 0;
  StateSet pool;

  // Scratch.
  int32_t* lists = nullptr;    // [T] Args::start_lists
  int32_t* next = nullptr;     // [entries]
  int32_t* rows = nullptr;     // [entries] first token of the chunk
  int32_t* tokens = nullptr;   // [entries] tokens to go on for, 0: the entry names no token or no slot
  int64_t* indices = nullptr;  // [entries] slot of the state, -1: none
  float* states = nullptr;     // [entries, Hv, 128, 128]
  uint16_t *k = nullptr, *v = nullptr, *o = nullptr;  // [entries * 64, Hq or Hv, 128]
  float *g = nullptr, *beta = nullptr;                // [entries * 64, Hv]
  char* workspace = nullptr;                          // of the second forward
};

// The list of `call`, whose pool is args' final_state, and the scratch for it.
void take_listed(const flash_qla_forward_arguments& call, const Args& args, Workspace* workspace, ListedStates* listed);

// Before the forward: fills the lists that it reads.
Status launch_list_starts(const Args& args, const ListedStates& listed, cudaStream_t stream);

// After the forward.
Status launch_listed_states(const Args& args, const ListedStates& listed, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::fwd
