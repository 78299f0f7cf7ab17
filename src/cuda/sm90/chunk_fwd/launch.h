// The fused Hopper forward: launches, and what is known of a call beforehand.
#pragma once

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/context_parallel/carry.h"

namespace flash_qla::cuda::sm90::fwd {

// How many CTAs work on an item: one, or a cluster of two, each with half of V. kAuto picks by the number of items and
// SMs.
enum class Variant : int32_t { kAuto = 0, kOneCta = 1, kTwoCta = 2 };

// Of a call that is not cut.
size_t chunk_forward_workspace_size(int32_t num_sequences);
// Of a call with these shapes and options on a card of `sms` SMs; reads num_tokens, num_sequences, num_key_heads,
// num_value_heads, dense_length, cu_seqlens (null or not), mode and force_split. smaller_too: what serves all calls of
// no more tokens and sequences, of which some may be cut where this one is not. carry: what the call goes on from.
size_t chunk_forward_workspace_size(const Args& args, int32_t sms, bool smaller_too = false,
                                    const cp::Carry& carry = {});

// Whether a call of these shapes may be cut (its gates and lengths decide on the device), and why or
// why not, as half a sentence. Reads the same members as above. carries: there is a carry.
struct Decision {
  bool planned;
  const char* reason;
};
Decision decide(const Args& args, int32_t sms, bool carries);

// Whether the forward of a call with `entries` listed tokens can write the states after them itself: where whole heads
// are made by one SM each and bits may depend on the list (a chunk ends at a listed token, and the next one begins
// there). Reads the same members.
bool writes_listed_states(const Args& args, int64_t entries, int32_t sms, bool carries);

// Enqueues the forward on `stream`: one kernel, after a small planning kernel where lengths vary, or the four to seven
// of a call that may be cut; one more where A or the gates' sums are wanted. No allocation, no synchronisation; the
// arguments must satisfy the comments above (they are not checked here, beyond what the tensor maps refuse).
// carry: what links of the same tokens have left; its heads are cut as these are, where the call may be cut at all.
cudaError_t launch_chunk_forward(const Args& args, Variant variant, cudaStream_t stream, const cp::Carry& carry = {});

// What the kernel of links (links/link_states.cuh) makes: last states and transitions of items, a matrix each.
struct LinkMatrices {
  const WorkItem* items;   // `slot`: which matrix
  PlanCounters* counters;  // `states`: how many items
  ItemTickets* tickets;    // zero
  float* matrices;         // [.., 128 of V, 128 of K], or of K first
  int32_t sms;
  bool keys_first;
};
// Of `args` what says of tokens, gates and initial states.
cudaError_t launch_link_states(const Args& args, const LinkMatrices& links, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::fwd
