// Links between ranks' parts on path "sm90": the kernels around the segments, and what they leave each other.
#pragma once

#include "cuda/generic/links.cuh"
#include "cuda/sm90/context_parallel/link_items.h"
#include "cuda/sm90/context_parallel/plan_state.h"

namespace flash_qla::cuda::sm90::cp {

// In the workspace.
struct LinkCounters {
  PlanCounters plan;
  ItemTickets tickets;
};
struct LinkWorkspace {
  LinkCounters* counters;
  LinkChain* chains;  // [P, Hv]
  WorkItem* items;    // [capacity]
  float* cells;       // [capacity, 128, 128]: S^T, or M^T
  int64_t capacity;
  int32_t by_length;  // segments are cut by their chain's length alone
  int32_t sms;
};

LinkWorkspace take_link_workspace(int64_t chains, bool by_length, int32_t sms, Workspace* workspace);

// What the passes of a call are cut into.
Status launch_link_items(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream);
// Along the segments, to S and M of all links; zeros where a link has none.
Status launch_link_scan(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::cp
