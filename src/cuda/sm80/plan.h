// How a call is cut into blocks and sequences into segments: by shapes, options and the number of multiprocessors
// alone, on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm80/split.h"
#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// What a call costs, in clocks, by what was measured on an H100 (docs/kernels/sm80.md compares them).
namespace cost {
// A step of a strip that is alone on its multiprocessor waits for its own products.
inline constexpr double kStep = 310, kStepPerKey = 7.9;
// What a multiprocessor gets of the L2 cache in a clock while all of them ask, and alone: bytes.
inline constexpr double kLoadedBytes = 16, kLoadedBytesAlone = 48;
// Of a step for states alone, in one with outputs: two products of three.
inline constexpr double kStates = 0.65;
// Of two passes over segments, whatever their length, beyond what one pass over whole sequences takes: a launch,
// finding a block's segment, the first loads, states on their way out and in.
inline constexpr double kCut = 24000;
// Of the scan, and of a segment in it, where it does not wait for bytes: counted in its instructions, not measured.
inline constexpr double kScan = 6000, kSegment = 650, kSegmentPerKey = 5;
// A block of `prepare`, of which each multiprocessor works on several: its share of them, for a pair of value heads.
inline constexpr double kPrepare = 1800, kPreparePerKey = 44;
// A cut has to save this part of a call: the numbers above are right to about as much.
inline constexpr double kLeastGain = 0.1;
}  // namespace cost

// A step where `blocks` of `strips` strips work at a time: from three strips on a multiprocessor they wait for each
// other in shared memory, and all of them wait for the L2 cache.
inline double step_clocks(int64_t blocks, int strips, int64_t K, int multiprocessors, bool outputs = true) {
  const int64_t sms = std::max(multiprocessors, 1), keys = padded_keys(K);
  const int64_t on_one = ceil_div(blocks, sms) * strips;
  const double waiting = on_one <= 1   ? 1
                         : on_one == 2 ? 1.05
                         : on_one == 3 ? 1.25
                                       : 1.5 / 4 * static_cast<double>(on_one);
  const int64_t rows = kStep * keys * 2, values = strips * kStep * kStrip * 2;
  const size_t record = outputs ? sizeof(StepRecord) : offsetof(StepRecord, scaled_gamma);
  const int64_t bytes = (outputs ? 2 : 1) * rows + static_cast<int64_t>(record) + values;
  return std::max(
      (cost::kStep + cost::kStepPerKey * static_cast<double>(keys)) * waiting * (outputs ? 1 : cost::kStates),
      static_cast<double>(blocks * bytes) / (cost::kLoadedBytes * static_cast<double>(sms)));
}

// Strips of a block share what it loads, but all of them are on one multiprocessor. What takes the fewest clocks a
// step, which are left in `clocks`; blocks_of(strips): how many blocks there are then, of heads of `most` strips.
template <class Blocks>
int best_strips(Blocks blocks_of, int64_t most, int64_t K, int multiprocessors, bool outputs, double* clocks) {
  int best = 1;
  *clocks = step_clocks(blocks_of(1), 1, K, multiprocessors, outputs);
  for (int strips = 2; strips <= kMostStrips && strips < 2 * most; strips *= 2) {
    const double with = step_clocks(blocks_of(strips), strips, K, multiprocessors, outputs);
    if (with > *clocks) continue;
    best = strips;
    *clocks = with;
  }
  return best;
}

inline int strips_of_a_block(int64_t heads, int64_t K, int64_t V, int multiprocessors, double* clocks = nullptr) {
  const int64_t of_a_head = ceil_div(V, kStrip);
  double ignored;
  return best_strips([&](int strips) { return heads * ceil_div(of_a_head, strips); }, of_a_head, K, multiprocessors,
                     true, clocks != nullptr ? clocks : &ignored);
}

// The same of the pass for states of `heads` sequences' heads in `segments` segments: the ends of all but the last one,
// and the transitions of all but it and the first one.
inline int strips_for_states(int64_t heads, int64_t segments, int64_t K, int64_t V, int multiprocessors,
                             double* clocks = nullptr) {
  const int64_t of_values = ceil_div(V, kStrip), of_keys = padded_keys(K) / kStrip;
  double ignored;
  return best_strips(
      [&](int strips) {
        return heads * ((segments - 1) * ceil_div(of_values, strips) + (segments - 2) * ceil_div(of_keys, strips));
      },
      std::max(of_values, of_keys), K, multiprocessors, false, clocks != nullptr ? clocks : &ignored);
}

// Value heads of a group that one block of `prepare` takes: all of them, which then share the products of keys and
// queries, or two where that would leave multiprocessors without a block.
inline int64_t prepared_heads(int64_t chunks, int64_t key_heads, int64_t group, int multiprocessors) {
  constexpr int64_t kPair = 2;
  return group > kPair && chunks * key_heads < 2 * static_cast<int64_t>(multiprocessors) ? kPair : group;
}

// A call's split. Its arrays have room for any call of these sizes; with `smaller_too`, of no more tokens and
// sequences.
struct SplitPlan {
  SegmentRule rule{};                // least_chunks 0: none
  int64_t parts = 0;                 // numbers of segments, with gaps: at most
  int64_t rows = 0;                  // of states at segments' starts
  int strips = 1, state_strips = 1;  // of a block of the pass with outputs, and of that for states
  const char* reason = "";
};

// Clocks of the serial passes, and of the scan between them, where each sequence has `chunks` chunks and is cut into
// `segments`.
inline double pass_clocks(const Problem& p, int64_t chunks, int64_t segments, int multiprocessors) {
  const double steps = static_cast<double>(ceil_div(chunks, segments) * kStepsPerChunk);
  double step;
  strips_of_a_block(p.N * p.Hv * segments, p.K, p.V, multiprocessors, &step);
  const double outputs = steps * step;
  if (segments == 1) return outputs;
  strips_for_states(p.N * p.Hv, segments, p.K, p.V, multiprocessors, &step);
  const double states = cost::kCut + steps * step;
  const int keys = padded_keys(p.K);
  const double blocks = static_cast<double>(p.N * p.Hv * ceil_div(p.V, scan_strips(keys) * kStrip));
  const double bytes = 4.0 * keys * keys, sms = std::max(multiprocessors, 1);
  const double segment = std::max({cost::kSegment + cost::kSegmentPerKey * keys, bytes / cost::kLoadedBytesAlone,
                                   blocks * bytes / (cost::kLoadedBytes * sms)});
  return outputs + states + cost::kScan + segment * static_cast<double>(segments - 2);
}

inline double prepare_clocks(const Problem& p, int multiprocessors) {
  const double pairs = static_cast<double>(p.chunk_bound * p.Hq * ceil_div(p.group, 2));
  return pairs / std::max(multiprocessors, 1) * (cost::kPrepare + cost::kPreparePerKey * padded_keys(p.K));
}

inline SplitPlan plan_split(const Problem& p, const flash_qla_options& options, int multiprocessors, bool smaller_too) {
  SplitPlan plan;
  const auto none = [&](const char* reason) {
    plan.parts = p.N;
    plan.strips = strips_of_a_block(p.N * p.Hv, p.K, p.V, multiprocessors);
    plan.reason = reason;
    return plan;
  };
  if (options.cp_mode == FLASH_QLA_CP_OFF) return none("not asked for");
  const int64_t strips = p.Hv * ceil_div(p.V, kStrip), quarters = 4 * static_cast<int64_t>(multiprocessors);
  const bool forced = options.force_intra_cp != 0, by_length = options.cp_mode == FLASH_QLA_CP_INVARIANT;
  // No sequence has more chunks.
  const int64_t longest = ceil_div(p.T, kChunkSize);
  // Lengths are on the device: time is counted as if all sequences were equally long.
  const int64_t chunks = ceil_div(p.chunk_bound, std::max<int64_t>(p.N, 1));
  SegmentRule rule{kLeastChunks, kLeastSegments, 0, 0};
  if (forced) {
    rule.least_chunks = rule.least_segments = 2;
  } else if (by_length) {
    rule.least_chunks = kInvariantChunks;
  } else {
    rule.strips = static_cast<int32_t>(std::min<int64_t>(strips, INT32_MAX));
    rule.quarters = static_cast<int32_t>(quarters);
    if (rule.least_segments * strips > quarters) return none("the heads of a sequence keep the GPU busy");
    const int64_t segments = segments_of(rule, chunks, segment_chunks(rule, p.chunk_bound));
    if (!smaller_too) {
      if (segments == 1) return none("not long enough for its heads");
      const double whole = pass_clocks(p, chunks, 1, multiprocessors);
      const double saved = whole - pass_clocks(p, chunks, segments, multiprocessors);
      if (saved < cost::kLeastGain * (whole + prepare_clocks(p, multiprocessors))) return none("would not gain enough");
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
  const int64_t segments = segments_of(rule, chunks, segment_chunks(rule, p.chunk_bound));
  plan.strips = strips_of_a_block(p.N * p.Hv * segments, p.K, p.V, multiprocessors);
  plan.state_strips = strips_for_states(p.N * p.Hv, std::max<int64_t>(segments, 2), p.K, p.V, multiprocessors);
  plan.reason = forced ? "forced" : by_length ? "long sequences" : "few heads and long sequences";
  return plan;
}

}  // namespace flash_qla::cuda::sm80
