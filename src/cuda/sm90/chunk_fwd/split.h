// The kernels around a sequence split: planning before, boundary states in the middle. docs/design/sequence_split.md.
#pragma once

#include "kernel_params.h"

namespace flash_qla::cuda::sm90 {

// What the planner leaves for the kernels after it.
struct SplitCounters {
  uint32_t state_ticket, output_ticket;  // next tile of each list
  int32_t state_tiles, output_tiles;
  int32_t chains, slots;
  int32_t spacing, light_merge, heavy_merge;  // what was chosen; for tests
};

// Places in the workspace.
struct SplitWorkspace {
  SplitCounters* counters;
  uint8_t* warmups;       // [boundaries, Hv] of warmup_chunks()
  int32_t* first_chunks;  // [N]; where h is wanted and lengths vary
  Tile *state_tiles, *output_tiles;
  TransitionChain* chains;
  float4 *boundary_states, *transitions;  // [slots, 128 * 128 / 4], boundary_place() order
};

struct SplitKernelParams {
  ChunkForwardArgs args;
  SplitWorkspace workspace;
  SplitCapacity capacity;
  SplitCosts costs;
  int32_t sms;
};

// The places from `base` on, and how many bytes they take.
size_t lay_out_split(const ChunkForwardArgs& args, const SplitCapacity& capacity, void* base,
                     SplitWorkspace* workspace);

// Classifies the boundaries, then lists the tiles: two kernels.
cudaError_t launch_split_plan(const SplitKernelParams& params, cudaStream_t stream);
// Boundary states from the pieces' own states and transitions. Launched after the kernel of the state tiles; lets the
// next kernel start when it starts itself.
cudaError_t launch_split_combine(const SplitKernelParams& params, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90
