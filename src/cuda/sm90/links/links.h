// Links between ranks' parts on path "sm90": the kernels around the segments, and what they leave each other.
#pragma once

#include "cuda/generic/links.cuh"
#include "cuda/sm90/chunk_bwd/link_tile.h"
#include "cuda/sm90/context_parallel/plan_state.h"
#include "cuda/sm90/links/link_items.h"

namespace flash_qla::cuda::sm90::links {

using cp::ItemTickets, cp::PlanCounters;

// In the workspace.
struct LinkCounters {
  PlanCounters plan;  // of what the forward's kernel makes
  ItemTickets tickets;
  int32_t reverse_items, tiles;
};
struct LinkWorkspace {
  LinkCounters* counters;
  LinkChain* chains;  // [P, Hv]; these, their order and the cells may be a carry's
  int32_t* order;     // [P, Hv] numbers of chains: first those that are cut, which take long
  WorkItem* items;    // [capacity] of the forward's kernel: states and transitions; going backward, transitions alone
  float* cells;       // [capacity, 128, 128]: S^T, dS^T and M^T; going backward M
  int64_t capacity;
  int32_t by_length;  // segments are cut by their chain's length alone
  int32_t carries;    // the forward goes on from them
  int32_t sms;

  // Going backward; else NULL.
  WorkItem* reverse_items;  // [capacity] states; `position` is the cell that they start from, -1: from zero
  bwd::LinkTile* tiles;     // [most_tiles] the (chunk, value head) pairs of all chains
  int64_t most_tiles;
  int32_t has_given;  // there are gradients of final states: in cells [capacity, capacity + P * Hv)
};

// Chunks: that all rows may have, going backward; 0: forward. carry: the caller's, for chains and cells.
LinkWorkspace take_link_workspace(int64_t chains, int64_t chunks, int64_t Hv, bool has_given, bool by_length,
                                  int32_t sms, const cp::Carry& carry, Workspace* workspace);

// Within how many chunks of a row's end each head forgets, up to kMostLinkWindow: [ends][P, Hv], 0: later or never. The
// end is that which the pass comes to, and for a part that is gone through forward the start of it as well.
inline constexpr int kLinkEnds = 2;
Status launch_link_windows(const LinkParams& params, bool backward, int32_t* windows, cudaStream_t stream);
// The passes and kinds, and what the passes are cut into; given gradients into their cells. windows: NULL: nothing is
// forgotten.
Status launch_link_items(const LinkParams& params, const LinkWorkspace& workspace, const int32_t* windows,
                         cudaStream_t stream);
// Along the segments, to S and M, or R, of all links; zeros where a link has none.
Status launch_link_scan(const LinkParams& params, const LinkWorkspace& workspace, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::links
