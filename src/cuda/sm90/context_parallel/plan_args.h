// The planning kernels of a sequence split. docs/design/sequence_split.md.
#pragma once

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/context_parallel/plan.h"
#include "cuda/sm90/context_parallel/plan_state.h"

namespace flash_qla::cuda::sm90::cp {

using fwd::ChunkForwardArgs;

// Places in the workspace.
struct SplitWorkspace {
  SplitCounters* counters;
  SplitStart* start;
  uint32_t* classifiers;  // [blocks that classify] pairs of SMs
  uint8_t* warmups;       // [boundaries, Hv] of warmup_chunks()
  CutSequence* cuts;      // [N]
  int32_t* cut;           // where lengths are looked at first: whether they ask for a cut
  void* unsplit;          // chunk_forward_workspace_size(N) bytes, likewise
  uint32_t* readers;      // [N * Hv][2], see ChunkForwardKernelParams
  Tile *state_tiles, *output_tiles;
  TransitionChain* chains;
  float4* boundary_states;  // [slots, 128 * 128 / 4], boundary_place() order
  void* transitions;        // [slots, kTransitionSteps] of TransitionRows
};

struct SplitKernelParams {
  ChunkForwardArgs args;
  SplitWorkspace workspace;
  SplitCapacity capacity;
  SplitCosts costs;
  int32_t uncut_shared;  // tiles without a cut are shared by several SMs, and another kernel's
  // A boundary's value heads are looked at a few of a key head at a time: a unit each.
  int32_t group, parts, units;  // value heads of a key head; units of a key head; units of all boundaries
  Divisor by_boundary_units, by_parts;
  Divisor by_heads;  // value heads
  // Lengths that the call may well have, and what follows.
  LengthSummary expected_lengths;
  SplitGrid expected_grid;
  UsualChoices usual_choices;
  int32_t gates_first;  // boundaries' keys are read once their gates are known, and no more of them than they ask for
  int32_t in_place;     // final states overwrite initial ones
  // Not 0: a kernel before these has done the work where no sequence has so many chunks.
  int32_t least_longest;
  int32_t unit_blocks, clear_blocks;  // of the kernel that classifies
  int32_t sms;
};

#ifdef __CUDACC__
// What the kernels that go by the plan find before there is one, by one thread. They start after that. Without `cut`
// that is the plan: no tiles.
__device__ __forceinline__ void reset_split_start(const SplitWorkspace& workspace, bool cut) {
  if (cut) {
    workspace.counters->made = 0;
  } else {
    *workspace.counters = SplitCounters{};
    workspace.counters->made = 1;
  }
  static_cast<SplitTickets&>(*workspace.start) = SplitTickets{};
}
#endif

// The places from `base` on, and how many bytes they take.
size_t lay_out_split(const ChunkForwardArgs& args, const SplitCapacity& capacity, void* base,
                     SplitWorkspace* workspace);

// Classifies the boundaries, then lists the tiles: two kernels.
cudaError_t launch_split_plan(SplitKernelParams params, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::cp
