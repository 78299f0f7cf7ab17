// How a call is cut into blocks and sequences into segments: by shapes, options and the number of multiprocessors
// alone, on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm80/split.h"
#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// Strips of a block share what it loads, but all of them are on one multiprocessor: the most of them with which the
// fullest multiprocessor has no more strips than it would have with one a block.
inline int strips_of_a_block(int64_t heads, int64_t V, int multiprocessors) {
  const int64_t of_a_head = ceil_div(V, kStrip), sms = std::max(multiprocessors, 1);
  const int64_t fullest = ceil_div(heads * of_a_head, sms);
  int best = 1;
  for (int strips = 2; strips <= kMostStrips && strips < 2 * of_a_head; strips *= 2) {
    if (ceil_div(heads * ceil_div(of_a_head, strips), sms) * strips <= fullest) best = strips;
  }
  return best;
}

// Value heads of a group that one block of `prepare` takes: all of them, which then share the products of keys and
// queries, or two where that would leave multiprocessors without a block.
inline int64_t prepared_heads(int64_t chunks, int64_t key_heads, int64_t group, int multiprocessors) {
  constexpr int64_t kPair = 2;
  return group > kPair && chunks * key_heads < 2 * static_cast<int64_t>(multiprocessors) ? kPair : group;
}

// Scratch of the backward up to which all heads go through together; the tests take less.
inline size_t most_scratch = size_t{768} << 20;

// A call's split. Its arrays have room for any call of these sizes; with `smaller_too`, of no more tokens and
// sequences.
struct SplitPlan {
  SegmentRule rule{};  // least_chunks 0: none
  int64_t parts = 0;   // numbers of segments, with gaps: at most
  int64_t rows = 0;    // of states at segments' starts
  const char* reason = "";
};

inline SplitPlan plan_split(const Problem& p, const flash_qla_options& options, int multiprocessors, bool smaller_too) {
  SplitPlan plan;
  const auto none = [&](const char* reason) {
    plan.parts = p.N;
    plan.reason = reason;
    return plan;
  };
  if (options.cp_mode == FLASH_QLA_CP_OFF) return none("not asked for");
  const int64_t strips = p.Hv * ceil_div(p.V, kStrip), quarters = 4 * static_cast<int64_t>(multiprocessors);
  const bool forced = options.force_intra_cp != 0, by_length = options.cp_mode == FLASH_QLA_CP_INVARIANT;
  // No sequence has more chunks.
  const int64_t longest = ceil_div(p.T, kChunkSize);
  SegmentRule rule{kLeastChunks, kLeastSegments, 0, 0};
  if (forced) {
    rule.least_chunks = rule.least_segments = 2;
  } else if (by_length) {
    rule.least_chunks = kInvariantChunks;
  } else {
    rule.strips = static_cast<int32_t>(std::min<int64_t>(strips, INT32_MAX));
    rule.quarters = static_cast<int32_t>(quarters);
    if (rule.least_segments * strips > quarters) return none("the heads of a sequence keep the GPU busy");
    if (!smaller_too && 2 * p.N * strips > quarters) return none("the sequences keep the GPU busy");
  }
  // Without offsets the number of chunks is known, with them only that there are no more.
  const int64_t at_least = p.varlen || smaller_too ? rule.least_chunks : segment_chunks(rule, p.chunk_bound);
  if (longest < rule.least_segments * at_least) return none("no sequence is long enough");
  plan.rule = rule;
  int64_t rows = p.chunk_bound / at_least;
  if (rule.quarters > 0) rows = std::min(rows, quarters / strips);  // segments grow with the number of chunks
  plan.rows = rows + 1;
  plan.parts = p.N + rows;
  plan.reason = forced ? "forced" : by_length ? "long sequences" : "few heads and long sequences";
  return plan;
}

}  // namespace flash_qla::cuda::sm80
