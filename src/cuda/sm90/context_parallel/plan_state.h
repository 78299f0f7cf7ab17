// What the planner leaves in memory for the kernels after it.
#pragma once

#include <cstdint>

#include "cuda/sm90/context_parallel/work_items.h"

namespace flash_qla::cuda::sm90::cp {

// A list of tiles, given out by tickets. First those that depend on nothing but the plan; then, of tiles that write O,
// those that wait for boundary states, which have tickets of their own: they are taken from when these states are
// there, or the others are all given out.
struct TileList {
  int32_t tiles, dependent_tiles;
};
struct TileTickets {
  uint32_t ticket, dependent_ticket;
};

// How far the boundary states are.
struct SplitProgress {
  uint32_t states_left;  // by warps: last states, and transitions, of state tiles that are not in memory yet
  uint32_t pieces_left;  // of chains
  uint32_t pieces;
  uint32_t first_tiles;  // of those that write O: given out before any dependent one
};

// What the planner leaves for the kernels after it.
struct SplitCounters {
  // Of the tiles that write O one kernel takes all, the other has none: whole heads, or halves of V each; or whole
  // heads those that depend on nothing, which halves then count as given out, and halves the others.
  TileList states, outputs, halves;
  SplitProgress progress;
  uint32_t blocks_running;                    // that have had a state tile and may get more
  uint32_t helpers;                           // blocks without a tile that may stay for the chains
  uint32_t chain_ticket;                      // next piece of a chain
  int32_t spacing, light_merge, heavy_merge;  // what was chosen; for tests
  uint32_t even;                              // 1: an even plan; for tests
  uint32_t planner_pair;                      // of SMs, of which the planner holds one; for tests
  uint32_t made;                              // 1: all of this is there, and the lists; 0 before
};

// What there is before the plan. Tickets can be taken then, and the planner says how many state tiles there will be
// some microseconds before the plan is there, so that SMs without one can go on to the next kernel.
struct SplitTickets {
  TileTickets states, outputs, halves;
  uint32_t announced;  // 0: nothing is known; else one more than planner_pair << 16 | state tiles, at most so many
  uint32_t left;       // blocks of the state kernel that left on it
  uint32_t likely;     // as `announced`, before any gate is known: a quarter of the heads heavy
};
struct SplitStart : SplitTickets {
  // Pairs of SMs in the order in which they get state tiles, from 1 on: there before `likely` and `announced`.
  static constexpr int kPairs = 96;  // SMs with higher numbers get what is left
  uint32_t place[kPairs];
};

}  // namespace flash_qla::cuda::sm90::cp
