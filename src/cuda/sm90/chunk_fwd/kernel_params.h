// What the launcher hands to the kernels.
#pragma once

#include <cuda.h>

#include "params.h"

namespace flash_qla::cuda::sm90 {

// What the planner leaves for the kernels after it.
struct SplitCounters {
  uint32_t state_ticket, output_ticket, half_ticket;  // next tile of each list
  uint32_t states_done;                  // by warps: state tiles whose last state is in memory
  uint32_t blocks_running;               // that have had a state tile and may get more
  uint32_t chain_ticket;                 // next piece of a chain
  // Of the tiles that write O one kernel takes all, the other has none: whole heads, or halves of V each.
  int32_t state_tiles, output_tiles, half_tiles;
  int32_t chains;
  int32_t spacing, light_merge, heavy_merge, early_tiles;  // what was chosen; for tests
};

struct ChunkForwardKernelParams {
  CUtensorMap q, k, v, o;
  ChunkForwardArgs args;
  // With a sequence split: the tiles by their tickets, how many there are, and the boundary states and transitions by
  // slot, in the order of the state groups' registers (boundary_place()).
  const Tile* list;  // null: no split
  const int32_t* list_size;
  float4* boundary_states;
  float4* transitions;
  const TransitionChain* chains;
  SplitCounters* counters;
  // [N * Hv][2], where final states overwrite initial ones: warps of a half of a head's rows that have yet to read the
  // initial state; null elsewhere.
  uint32_t* readers;
  const PlannedSequence* plan;  // [N] longest first; null: sequences in their own order, tiles dealt round robin
  uint32_t* ticket;             // tiles given out, with plan beyond the first of each block; with plan or list
  int32_t tiles;                // N * Hv, twice that with V split
};

// The kernel of one instantiation and its shape; each is compiled in a file of its own.
struct ChunkForwardKernel {
  const void* function;
  int32_t threads;
  int32_t smem_bytes;
  int32_t state_groups;
};

ChunkForwardKernel chunk_forward_bf16();
ChunkForwardKernel chunk_forward_bf16_save();
ChunkForwardKernel chunk_forward_bf16_split();
ChunkForwardKernel chunk_forward_bf16_split_save();
ChunkForwardKernel chunk_forward_bf16_states();
ChunkForwardKernel chunk_forward_fp16();
ChunkForwardKernel chunk_forward_fp16_save();
ChunkForwardKernel chunk_forward_fp16_split();
ChunkForwardKernel chunk_forward_fp16_split_save();
ChunkForwardKernel chunk_forward_fp16_states();

}  // namespace flash_qla::cuda::sm90
