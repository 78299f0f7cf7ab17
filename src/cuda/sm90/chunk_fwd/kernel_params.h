// What the launcher hands to the kernels.
#pragma once

#include <cuda.h>

#include "params.h"

namespace flash_qla::cuda::sm90 {

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

// How blocks find their sequences by themselves.
enum class BlockOrder : int32_t {
  kGiven = 0,    // in the given order, tiles round robin
  kOneTile = 1,  // likewise, with offsets and one tile at most
  kSorted = 2,   // up to kMostSorted with offsets, longest first
};

struct ChunkForwardKernelParams {
  CUtensorMap q, k, v, o;
  CUtensorMap h;  // of kernels with kStagedH
  ChunkForwardArgs args;
  // With a sequence split: the tiles by their tickets, and the boundary states and transitions by slot, in the order of
  // the state groups' registers (boundary_place()) and as operands of the combination (TransitionRows).
  const Tile* list;  // null: no split
  const TileList* sizes;
  TileTickets* tickets;
  float4* boundary_states;
  void* transitions;
  const TransitionChain* chains;
  SplitCounters* counters;
  SplitStart* start;
  // [N * Hv][2], where final states overwrite initial ones: warps of a half of a head's rows that have yet to read the
  // initial state; null elsewhere.
  uint32_t* readers;
  const PlannedSequence* plan;  // [N] longest first; null: blocks look themselves
  BlockOrder order;             // without a plan and a list
  // Tiles given out beyond the first of each block; null: they go by their numbers, or are dealt (kSorted).
  uint32_t* ticket;
  // Where lengths are looked at first, 0 there: the unsplit kernel does the work, else that of the lists. Null: no
  // such question.
  const int32_t* cut;
  int32_t tiles;     // N * Hv
  int32_t followed;  // 1: a kernel of the same call comes behind this one, and may start beside it
  // 1: `initial` is a map of the initial states, in boxes of a quarter of K, by which copy warps bring them
  // (StagedState). At the end, so that kernels that know nothing of it find the rest where they do.
  int32_t staged_initial;
  CUtensorMap initial;
  CUtensorMap a;  // of kernels with kKeepsA
};

// The kernel of one instantiation and its shape; each is compiled in a file of its own.
struct ChunkForwardKernel {
  const void* function;
  int32_t threads;
  int32_t smem_bytes;
  int32_t state_groups;               // of 64 rows of V
  int32_t blocks;                     // that work on a tile together: a cluster
  bool takes_slots = false;           // without a planner: its blocks look for skipped sequences themselves
  bool stages_states = false;         // initial states come by the copy engine where it can read them (StagedState)
  const void* behind_plan = nullptr;  // the function that goes behind a split's plan, if that is another one
};

ChunkForwardKernel chunk_forward_bf16();
ChunkForwardKernel chunk_forward_bf16_fast();
ChunkForwardKernel chunk_forward_bf16_fast_a();
ChunkForwardKernel chunk_forward_bf16_fast_h();
ChunkForwardKernel chunk_forward_bf16_fast_save();
ChunkForwardKernel chunk_forward_bf16_save();
ChunkForwardKernel chunk_forward_bf16_split();
ChunkForwardKernel chunk_forward_bf16_split_save();
ChunkForwardKernel chunk_forward_bf16_states();
ChunkForwardKernel chunk_forward_fp16();
ChunkForwardKernel chunk_forward_fp16_fast();
ChunkForwardKernel chunk_forward_fp16_fast_a();
ChunkForwardKernel chunk_forward_fp16_fast_h();
ChunkForwardKernel chunk_forward_fp16_fast_save();
ChunkForwardKernel chunk_forward_fp16_save();
ChunkForwardKernel chunk_forward_fp16_split();
ChunkForwardKernel chunk_forward_fp16_split_save();
ChunkForwardKernel chunk_forward_fp16_states();

}  // namespace flash_qla::cuda::sm90
