// How a call is cut into blocks and sequences into segments: by shapes, options and the number of multiprocessors
// alone, on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm80/split.h"
#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// What a call costs, in clocks at 1.755 GHz: fitted to the 18 times of benchmarks/results/h100_portable_forward.json
// (commit 1c2289f), which they meet within 10 %.
namespace cost {
// A step of a strip that is alone on its multiprocessor waits for its own products.
inline constexpr double kOneStep = 370, kOneStepPerKey = 7.5;
// How much longer two and four of them on one take.
inline constexpr double kTwo = 1.02, kFour = 1.5;
// What a multiprocessor gets of the L2 cache in a clock while all of them ask, and alone: bytes. An earlier form of the
// kernels with one strip to a block was bound by 16, calls of today would not fit with fewer than 20.
inline constexpr double kLoadedBytes = 20, kLoadedBytesAlone = 48;
// Of a step for states alone, in one with outputs.
inline constexpr double kStates = 0.5;
// Of two passes over segments, whatever their length, beyond what one pass over whole sequences takes: a launch,
// finding a block's segment, the first loads, states on their way out and in.
inline constexpr double kCut = 13000;
// Of the scan, and of a segment in it, where it does not wait for bytes: counted in its instructions, not measured.
inline constexpr double kScan = 6000, kSegment = 650, kSegmentPerKey = 5;
// A chunk and key head in `prepare`, of which each multiprocessor works on several: its share of them; and one of their
// value heads.
inline constexpr double kPrepare = 1500, kPreparePerKey = 44, kPrepareHead = 1200;
// What every call takes, whatever its length: four launches, offsets, the first loads and the last stores.
inline constexpr double kCall = 24000;
// A cut has to save this part of a call: the numbers above are right to about as much.
inline constexpr double kLeastGain = 0.1;
}  // namespace cost

// A step where `blocks` of `strips` strips work at a time: from three strips on a multiprocessor they wait for each
// other in shared memory, and all of them wait for the L2 cache.
inline double step_clocks(int64_t blocks, int strips, int64_t K, bool outputs, int multiprocessors) {
  const int64_t sms = std::max(multiprocessors, 1), keys = padded_keys(K);
  const int64_t on_one = ceil_div(blocks, sms) * strips;
  const double waiting = on_one <= 1   ? 1
                         : on_one == 2 ? cost::kTwo
                         : on_one == 3 ? (cost::kTwo + cost::kFour) / 2
                                       : cost::kFour / 4 * static_cast<double>(on_one);
  const int64_t rows = kStep * keys * 2, values = strips * kStep * kStrip * 2;
  const int64_t record = outputs ? static_cast<int64_t>(sizeof(StepRecord)) : kStateRecordBytes;
  const int64_t bytes = (outputs ? 2 : 1) * rows + record + values;
  return std::max(
      (cost::kOneStep + cost::kOneStepPerKey * static_cast<double>(keys)) * waiting * (outputs ? 1 : cost::kStates),
      static_cast<double>(blocks * bytes) / (cost::kLoadedBytes * static_cast<double>(sms)));
}

struct Strips {
  int of_a_block;
  double step;  // clocks
};

// Strips of a block share what it loads, but all of them are on one multiprocessor. A pass over `heads` parts and value
// heads, and over as many transitions (`outputs` false) as there are.
inline Strips best_strips(const Problem& p, int64_t heads, int64_t transitions, bool outputs, int multiprocessors) {
  const int64_t of_values = ceil_div(p.V, kStrip), of_keys = transitions > 0 ? padded_keys(p.K) / kStrip : 0;
  Strips best{};
  for (int strips = 1; strips <= kMostStrips && strips < 2 * std::max(of_values, of_keys); strips *= 2) {
    const int64_t blocks = heads * ceil_div(of_values, strips) + transitions * ceil_div(of_keys, strips);
    const double step = step_clocks(blocks, strips, p.K, outputs, multiprocessors);
    if (strips == 1 || step <= best.step) best = {strips, step};
  }
  return best;
}

// Of the pass with outputs over sequences (one segment each) or segments, and of that for states: the ends of all
// segments but the last one, and the transitions of all but it and the first one.
inline Strips strips_for_outputs(const Problem& p, int64_t segments, int multiprocessors) {
  return best_strips(p, p.N * p.Hv * segments, 0, true, multiprocessors);
}
inline Strips strips_for_states(const Problem& p, int64_t segments, int multiprocessors) {
  return best_strips(p, p.N * p.Hv * (segments - 1), p.N * p.Hv * (segments - 2), false, multiprocessors);
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
  const double outputs = steps * strips_for_outputs(p, segments, multiprocessors).step;
  if (segments == 1) return outputs;
  const double states = steps * strips_for_states(p, segments, multiprocessors).step;
  const int keys = padded_keys(p.K);
  const double blocks = static_cast<double>(p.N * p.Hv * ceil_div(p.V, kStrip));
  const double bytes = 4.0 * keys * keys, sms = std::max(multiprocessors, 1);
  const double segment = std::max({cost::kSegment + cost::kSegmentPerKey * keys, bytes / cost::kLoadedBytesAlone,
                                   blocks * bytes / (cost::kLoadedBytes * sms)});
  return outputs + states + cost::kCut + cost::kScan + segment * static_cast<double>(segments - 2);
}

// Clocks of all else.
inline double other_clocks(const Problem& p, int multiprocessors) {
  const double of_keys = static_cast<double>(p.Hq) * (cost::kPrepare + cost::kPreparePerKey * padded_keys(p.K));
  const double of_values = static_cast<double>(p.Hv) * cost::kPrepareHead;
  return cost::kCall + static_cast<double>(p.chunk_bound) / std::max(multiprocessors, 1) * (of_keys + of_values);
}

inline SplitPlan plan_split(const Problem& p, const flash_qla_options& options, int multiprocessors, bool smaller_too) {
  SplitPlan plan;
  const auto none = [&](const char* reason) {
    plan.parts = p.N;
    plan.strips = strips_for_outputs(p, 1, multiprocessors).of_a_block;
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
    const int64_t most = segments_of(rule, chunks, segment_chunks(rule, p.chunk_bound));
    if (!smaller_too) {
      if (most == 1) return none("not long enough for its heads");
      const double whole = pass_clocks(p, chunks, 1, multiprocessors);
      double least = whole;
      for (int64_t segments = most; segments >= rule.least_segments; segments /= 2) {
        const double cut = pass_clocks(p, chunks, segments, multiprocessors);
        if (cut >= least) continue;
        least = cut;
        rule.least_chunks = static_cast<int32_t>(std::max<int64_t>(kLeastChunks, chunks / segments));
      }
      if (whole - least < cost::kLeastGain * (whole + other_clocks(p, multiprocessors))) {
        return none("would not gain enough");
      }
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
  plan.strips = strips_for_outputs(p, segments, multiprocessors).of_a_block;
  plan.state_strips = strips_for_states(p, std::max<int64_t>(segments, 2), multiprocessors).of_a_block;
  plan.reason = forced ? "forced" : by_length ? "long sequences" : "few heads and long sequences";
  return plan;
}

}  // namespace flash_qla::cuda::sm80
