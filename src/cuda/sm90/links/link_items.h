// Links between ranks' parts, as plain functions: into how many segments the tokens of a link are cut, and what is made
// of each. They run on the device (link_chains.cu) and, in a test, on the host.
//
// A *chain* is the pass of one (part, value head). Of a head whose gates forget it is a window of a few chunks, one
// segment that starts from zero. Else it is cut, so that the card's SMs share it: of each segment its last state from
// zero (of the first: from what the pass starts from), and its transition, the last state from the identity without
// values. Along the segments S <- M S + B gives S, and M <- M M the part's own transition, where that is wanted.
// Going backward it is the gradient of the state that enters a segment, from zero (of the last: from the gradient of
// the final state), and D <- M^T D + R: segments are numbered as the pass goes, the last tokens' first.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/sm90/context_parallel/carry.h"

namespace flash_qla::cuda::sm90::links {

using cp::LinkChain, cp::WorkItem, cp::segment_start, cp::kChunk, cp::kItemFromStart, cp::kItemToCutState,
    cp::kItemTransition;

// Chunks up to which a window is looked for, from either end of a part. Its norms take 15 us for both ends of 32 heads
// (a guess), and an item of so many chunks is no longer than the segments that 32,768 tokens of eight heads are cut in.
inline constexpr int32_t kMostLinkWindow = 64;

// Segments of a chain, at most; and what a step along them and an item's start and end take, in chunks of an item
// (guesses from the arithmetic of link_chains.cu and from costs.h); and a chunk of a reverse pass, of which two blocks
// take half of V each.
inline constexpr int32_t kMostLinkSegments = 64;
inline constexpr float kLinkStep = 0.9f, kLinkEdge = 2.0f, kReverseChunk = 0.75f;
// A chunk of the forward, with its outputs (costs.h: step beside state_step).
inline constexpr float kForwardChunk = 1.18f;

// By a chain's own length alone, where bits may not depend on other heads: as Mode::kInvariant cuts sequences.
inline constexpr int32_t kInvariantLinkSpacing = 32, kInvariantLinkSegments = 16;

// Items to an SM that a plan may have beyond those of chains that are not cut: one wave, or two shorter ones.
inline constexpr int32_t kLinkItemsPerSm = 2;

// How chains that are cut are cut.
struct LinkSpacing {
  int32_t chunks = 1;  // of a segment, or more
  int32_t most = 1;    // segments of a chain
  FLASH_QLA_HOST_DEVICE int32_t segments(int32_t of_chain) const {
    const int32_t wanted = (of_chain + chunks - 1) / chunks;
    return wanted < 1 ? 1 : wanted < most ? wanted : most;
  }
};

FLASH_QLA_HOST_DEVICE inline LinkSpacing invariant_link_spacing() {
  return {kInvariantLinkSpacing, kInvariantLinkSegments};
}
// So that the longest chain has `segments`.
FLASH_QLA_HOST_DEVICE inline LinkSpacing even_link_spacing(int32_t longest, int32_t segments) {
  const int32_t chunks = (longest + segments - 1) / segments;
  return {chunks > 1 ? chunks : 1, kMostLinkSegments};
}

// An estimate of what so many states and transitions of chains take, in chunks: they are about equal.
FLASH_QLA_HOST_DEVICE inline float link_time(int32_t states, int32_t transitions, int32_t longest, int32_t segments,
                                             int32_t sms, bool backward) {
  const auto waves = [sms](int32_t items) { return static_cast<float>((items + sms - 1) / sms); };
  const float length = static_cast<float>((longest + segments - 1) / segments);
  const float scan = static_cast<float>(segments - 1) * kLinkStep;
  if (!backward) return waves(states + transitions) * (length + kLinkEdge) + scan;
  return waves(2 * states) * (kReverseChunk * length + kLinkEdge) + waves(transitions) * (length + kLinkEdge) + scan;
}

// And of what the forward takes that goes on from them, of `chains` heads as long as the longest: no less than its
// longest segment, nor than an even share of all.
FLASH_QLA_HOST_DEVICE inline float carried_time(int32_t states, int32_t chains, int32_t longest, int32_t segments,
                                                int32_t sms) {
  const float waves = static_cast<float>((states + sms - 1) / sms), length = static_cast<float>(longest);
  const float each = waves * ceilf(length / static_cast<float>(segments));
  const float even = length * static_cast<float>(chains) / static_cast<float>(sms);
  return kForwardChunk * (each > even ? each : even);
}

// Matrices, and items, that a plan has at most, whatever the gates are. A chain that is not cut has two.
FLASH_QLA_HOST_DEVICE inline int64_t link_capacity(int64_t chains, bool by_length, int32_t sms) {
  return by_length ? 2 * kInvariantLinkSegments * chains : 2 * chains + int64_t{kLinkItemsPerSm} * sms;
}

// The tokens of a chain: [from, to) of a row whose first token is `first`, and whose first chunk has number
// `first_chunk`.
struct LinkTokens {
  int32_t first, first_chunk, from, to;
  int32_t row;
  FLASH_QLA_HOST_DEVICE int32_t chunks() const { return (to - from + kChunk - 1) / kChunk; }
};

// The i-th item of a chain, of `i` below matrices(). starts: its first segment starts from the row's given state.
FLASH_QLA_HOST_DEVICE inline WorkItem link_item(const LinkChain& chain, int32_t i, const LinkTokens& tokens,
                                                bool starts, int32_t head, bool backward) {
  const bool transition = i >= chain.segments;
  const int32_t segment = transition ? i - chain.transitions() : i;         // without the first, or all
  const int32_t place = backward ? chain.segments - 1 - segment : segment;  // in the order of tokens
  const int32_t begin = segment_start(tokens.chunks(), place, chain.segments) * kChunk;
  const int32_t end = place + 1 == chain.segments ? tokens.to - tokens.from
                                                  : segment_start(tokens.chunks(), place + 1, chain.segments) * kChunk;
  WorkItem t{};
  t.row = tokens.first + tokens.from + begin;
  t.tokens = end - begin;
  t.sequence = tokens.row;
  t.chunk = tokens.first_chunk + (tokens.from + begin) / kChunk;
  t.position = (tokens.from + begin) / kChunk;
  t.slot = transition ? chain.transition_cell(segment) : chain.state_cell(segment);
  t.head = static_cast<int16_t>(head);
  t.flags = kItemToCutState | (transition ? kItemTransition : 0) |
            (!transition && segment == 0 && starts ? kItemFromStart : 0);
  return t;
}

}  // namespace flash_qla::cuda::sm90::links
