// What the planner leaves in memory for the kernels after it.
#pragma once

#include <cstdint>

#include "cuda/sm90/context_parallel/work_items.h"

namespace flash_qla::cuda::sm90::cp {

// A list of items, given out by tickets. First those that depend on nothing but the plan; then, of items that write O,
// those that wait for states at cuts, which have tickets of their own: they are taken from when these states are
// there, or the others are all given out.
struct ItemList {
  int32_t items, dependent_items;
};
struct ItemTickets {
  uint32_t ticket, dependent_ticket;
};

// How far the states at cuts are.
struct Progress {
  uint32_t states_left;  // by warps: last states, and transitions, of state items that are not in memory yet
  uint32_t slices_left;  // of scans
  uint32_t pieces;
  uint32_t first_items;  // of those that write O: given out before any dependent one
};

// What the planner leaves for the kernels after it.
struct PlanCounters {
  ItemList states, outputs;
  Progress progress;
  uint32_t blocks_running;                     // that have had a state item and may get more
  uint32_t helpers;                            // blocks without an item that may stay for the scans
  uint32_t scan_ticket;                        // next piece of a scan
  int32_t spacing, decaying_join, exact_join;  // what was chosen; for tests
  int32_t exact_heads;                         // sequences times heads that are exact; for tests
  uint32_t planner_tpc;                        // of SMs, of which the planner holds one
  uint32_t made;                               // 1: all of this is there, and the lists; 0 before
};

// What there is before the plan: tickets can be taken then.
struct PlanStart {
  ItemTickets states, outputs;
};

}  // namespace flash_qla::cuda::sm90::cp
