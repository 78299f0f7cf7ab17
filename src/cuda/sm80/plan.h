// How a call is cut into blocks and sequences into segments: by shapes, options and the number of multiprocessors
// alone, on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm80/split.h"
#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// Clocks that a step of the serial pass takes where `blocks` of `strips` strips work at a time, by what was measured on
// an H100 (docs/kernels/sm80.md): a strip alone on its multiprocessor waits for its own products; from three strips on
// they wait for each other in shared memory; and all of them wait for the L2 cache, which gives a multiprocessor about
// 16 bytes a clock.
inline double step_clocks(int64_t blocks, int strips, int64_t K, int multiprocessors) {
  constexpr double kLoadedBytes = 16;
  const int64_t sms = std::max(multiprocessors, 1), keys = padded_keys(K);
  const int64_t on_one = ceil_div(blocks, sms) * strips;
  const double waiting = on_one <= 1   ? 1
                         : on_one == 2 ? 1.05
                         : on_one == 3 ? 1.25
                                       : 1.5 / 4 * static_cast<double>(on_one);
  const int64_t bytes = 2 * kStep * keys * 2 + static_cast<int64_t>(sizeof(StepRecord)) + strips * kStep * kStrip * 2;
  return std::max((310 + 7.9 * static_cast<double>(keys)) * waiting,
                  static_cast<double>(blocks * bytes) / (kLoadedBytes * static_cast<double>(sms)));
}

// Strips of a block share what it loads, but all of them are on one multiprocessor.
inline int strips_of_a_block(int64_t heads, int64_t K, int64_t V, int multiprocessors) {
  const int64_t of_a_head = ceil_div(V, kStrip);
  const auto clocks = [&](int strips) {
    return step_clocks(heads * ceil_div(of_a_head, strips), strips, K, multiprocessors);
  };
  int best = 1;
  for (int strips = 2; strips <= kMostStrips && strips < 2 * of_a_head; strips *= 2) {
    if (clocks(strips) <= clocks(best)) best = strips;
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
  SegmentRule rule{};    // least_chunks 0: none
  int64_t parts = 0;     // numbers of segments, with gaps: at most
  int64_t rows = 0;      // of states at segments' starts
  int state_strips = 1;  // of a block of the pass for states
  const char* reason = "";
};

// Clocks of the serial passes of N sequences of `chunks` chunks that are cut into `segments`.
inline double pass_clocks(const Problem& p, int64_t N, double chunks, int64_t segments, int multiprocessors) {
  // Of a pass for states alone, in a step of one with outputs: two products of three.
  constexpr double kStates = 0.65;
  // Two launches more; and of the scan, a segment.
  constexpr double kLaunches = 10000, kScan = 1500;
  const auto step = [&](int64_t heads, int64_t columns) {
    const int strips = strips_of_a_block(heads, p.K, columns, multiprocessors);
    return step_clocks(heads * ceil_div(ceil_div(columns, kStrip), strips), strips, p.K, multiprocessors);
  };
  const double steps = chunks / static_cast<double>(segments) * kStepsPerChunk;
  const double outputs = steps * step(N * p.Hv * segments, p.V);
  if (segments == 1) return outputs;
  // Ends of all segments but the last one, transitions of all but it and the first one.
  const double states = steps * kStates * step(N * p.Hv, p.V * (segments - 1) + p.K * (segments - 2));
  return outputs + states + kLaunches + kScan * static_cast<double>(segments - 2);
}

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
    // Lengths are on the device: as if all sequences were equally long.
    constexpr double kLeastGain = 1.25;
    const int64_t segments = std::min(p.chunk_bound / kLeastChunks, quarters / strips) / std::max<int64_t>(p.N, 1);
    const double chunks = static_cast<double>(p.chunk_bound) / static_cast<double>(std::max<int64_t>(p.N, 1));
    if (!smaller_too &&
        (segments < rule.least_segments || pass_clocks(p, p.N, chunks, 1, multiprocessors) <
                                               kLeastGain * pass_clocks(p, p.N, chunks, segments, multiprocessors))) {
      return none("not long enough for its heads");
    }
  }
  // Without offsets the number of chunks is known, with them only that there are no more.
  const int64_t at_least = p.varlen || smaller_too ? rule.least_chunks : segment_chunks(rule, p.chunk_bound);
  if (longest < rule.least_segments * at_least) return none("no sequence is long enough");
  plan.rule = rule;
  int64_t rows = p.chunk_bound / at_least;
  if (rule.quarters > 0) rows = std::min(rows, quarters / strips);  // segments grow with the number of chunks
  plan.rows = rows + 1;
  plan.parts = p.N + rows;
  plan.state_strips = strips_of_a_block(plan.rows * p.Hv, p.K, p.V + p.K, multiprocessors);
  plan.reason = forced ? "forced" : by_length ? "long sequences" : "few heads and long sequences";
  return plan;
}

}  // namespace flash_qla::cuda::sm80
