// The planning kernels of a context parallelism. docs/kernels/context_parallel.md.
#pragma once

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/context_parallel/carry.h"
#include "cuda/sm90/context_parallel/plan.h"
#include "cuda/sm90/context_parallel/plan_state.h"

namespace flash_qla::cuda::sm90::cp {

using fwd::Args;

// Places in the workspace.
struct PlanWorkspace {
  PlanCounters* counters;
  PlanStart* start;
  uint8_t* warmups;            // [boundaries, Hv] of warmup_chunks()
  PlannedSequence* sequences;  // [N] where there are many
  int32_t* kinds;              // [N * Hv] likewise
  int32_t* cut;                // where lengths are looked at first: whether they ask for a cut
  void* uncut;                 // chunk_forward_workspace_size(N) bytes, likewise
  uint32_t* readers;           // [N * Hv][2], see KernelArgs
  WorkItem *state_items, *output_items;
  Scan* scans;
  float4* cut_states;  // [slots, 128 * 128 / 4], cut_state_position() order
  void* transitions;   // [slots, kTransitionSteps] of TransitionRows
};

struct PlanArgs {
  Args args;
  PlanWorkspace workspace;
  Capacity capacity;
  Costs costs;
  // A boundary's value heads are looked at a few of a key head at a time: a unit each.
  int32_t group, parts, units;  // value heads of a key head; units of a key head; units of all boundaries
  Divisor by_boundary_units, by_parts;
  Divisor by_heads;  // value heads
  // Lengths that the call may well have, and what follows.
  LengthSummary expected_lengths;
  CutSpacing expected_cut_spacing;
  ChoiceTable choice_table;
  int32_t gates_first;  // boundaries' keys are read once their gates are known, and no more of them than they ask for
  int32_t in_place;     // final states overwrite initial ones
  // Not 0: a kernel before these has done the work where no sequence has so many chunks.
  int32_t least_longest;
  int32_t zero_fill_blocks;  // of the kernel that classifies
  int32_t sms;
  Carry carry;  // heads that it has are cut as it says, and have no state items
};

#ifdef __CUDACC__
// What the kernels that go by the plan find before there is one, by one thread. They start after that. Without `cut`
// that is the plan: no items.
__device__ __forceinline__ void reset_plan_start(const PlanWorkspace& workspace, bool cut) {
  if (cut) {
    workspace.counters->made = 0;
  } else {
    *workspace.counters = PlanCounters{};
    workspace.counters->made = 1;
  }
  *workspace.start = PlanStart{};
}
#endif

// The places from `base` on, and how many bytes they take.
size_t lay_out_plan(const Args& args, const Capacity& capacity, void* base, PlanWorkspace* workspace);

// Classifies the boundaries, makes carried heads' states at cuts where there are any, and lists the items.
cudaError_t launch_plan(PlanArgs params, cudaStream_t stream);

// The states at cuts of carried heads, behind the classification.
cudaError_t launch_carried(const PlanArgs& params, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::cp
