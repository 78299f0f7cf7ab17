// The context parallelism of the fused Hopper forward, as plain functions: where sequences may be cut (cuts.h), which
// cuts are taken, and the items that follow (segments.h). They run on the device (list.cu) and, in a
// test, on the host. docs/kernels/context_parallel.md explains the scheme.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/context_parallel/estimate.h"

namespace flash_qla::cuda::sm90::cp {

// The best choice, and what it takes.
struct BestChoice {
  int32_t choice = 0;
  float time = 0.0f;
};

// Places where sequences may be cut, where all but the longest are equal.
inline int32_t boundaries_of(const LengthSummary& lengths, const CutSpacing& cut_spacing) {
  const int32_t others = lengths.sequences - 1;
  const int32_t chunks = others > 0 ? static_cast<int32_t>((lengths.chunks - lengths.longest) / others) : 0;
  return pieces_of(lengths.longest, cut_spacing) - 1 + others * (pieces_of(chunks, cut_spacing) - 1);
}

// With `exact` heads that do not decay and the others that do (kUsualWarmup), where all sequences but the longest are
// equal. guess: a choice that may well be the best, which spares most of the others.
inline BestChoice best_choice(const LengthSummary& lengths, const CutSpacing& cut_spacing, int32_t heads, int32_t exact,
                              int32_t sms, const Costs& costs, int32_t guess) {
  ItemEstimate decaying[kJoins], without_decay[kJoins];
  const int32_t others = lengths.sequences - 1;
  for (int32_t kind = 0; kind < (others > 0 ? 2 : 1); ++kind) {
    const int32_t sequences = kind == 0 ? 1 : others;
    HeadSummary head;
    head.chunks = kind == 0 ? lengths.longest : static_cast<int32_t>((lengths.chunks - lengths.longest) / others);
    head.pieces = pieces_of(head.chunks, cut_spacing);
    for (int32_t i = 0; i < kJoins; ++i) {
      const float limit = long_item(lengths.longest, cut_spacing, join_step(i));
      ItemEstimate part;
      head.warmups = kUsualWarmup * (head.pieces - 1);
      head.exact = 0;
      part.add(head, join_step(i), limit, costs);
      decaying[i].add(part, sequences * (heads - exact));
      part = ItemEstimate{};
      head.exact = 1;
      part.add(head, join_step(i), limit, costs);
      without_decay[i].add(part, sequences * exact);
    }
  }
  const int32_t pieces = pieces_of(lengths.longest, cut_spacing);
  // Not what is the same as the one before, and not what must take longer than the best so far.
  const auto again = [&](int32_t i) {
    return i > 0 && joined_pieces(pieces, join_step(i)) == joined_pieces(pieces, join_step(i - 1));
  };
  const auto time_of = [&](int32_t i) {
    return play_through(decaying[i % kJoins], without_decay[i / kJoins], sms, costs, SmGroups{});
  };
  BestChoice best{guess, time_of(guess)};
  for (int32_t i = 0; i < kJoinChoices; ++i) {
    if (again(i % kJoins) || again(i / kJoins) ||
        least_time(decaying[i % kJoins], without_decay[i / kJoins], sms, costs) >= best.time) {
      continue;
    }
    if (const float time = time_of(i); time < best.time) best = {i, time};
  }
  return best;
}

// The choices of lengths that are known beforehand, by how many eighths of the heads do not decay: one that some gates
// ask for is then looked up, not worked out. They are those of kUsualWarmup, and serve warm-ups near it.
struct ChoiceTable {
  static constexpr int32_t kShares = 8;
  static constexpr int32_t kLeastWarmup = 4, kMostWarmup = 6;  // chunks, on average over a head's boundaries
  uint8_t of_share[kShares + 1] = {};

  // Of `exact` heads among `heads`; -1: these are no whole eighths.
  FLASH_QLA_HOST_DEVICE int32_t choice(int32_t exact, int32_t heads) const {
    const int32_t share = kShares * exact / heads;
    return share * heads == kShares * exact ? of_share[share] : -1;
  }
};

// What a plan promises for sequences of these lengths, and how they would be cut: the time with it, as a share of that
// without, where a quarter, half or all of the heads do not decay.
struct PlanEstimate {
  CutSpacing cut_spacing;  // none: a plan is not possible
  float quarter = 0.0f, half = 0.0f;
  float all = 0.0f;  // of known lengths alone
  bool pays(float least_gain = kLeastGain) const {
    const float loss_of_all = kWeightOfAll * std::max(all - 1.0f, 0.0f);
    return cut_spacing.spacing > 0 && quarter + loss_of_all <= 1.0f - least_gain && half <= 1.0f + kMostLossOfExact;
  }
};
// known: the plan may take finer pieces, if they give more where a quarter of the heads do not decay; else the device
// chooses the spacing by itself.
inline PlanEstimate estimate_plan(const LengthSummary& lengths, int32_t heads, int32_t sms, const Costs& costs,
                                  bool known) {
  PlanEstimate estimate;
  estimate.cut_spacing = choose_cut_spacing(Mode::kAuto, false, lengths, heads, sms, costs);
  if (estimate.cut_spacing.spacing == 0) return estimate;
  const float uncut = uncut_time(lengths, heads, sms, costs);
  int32_t guess = 0;
  const auto share = [&](const CutSpacing& cut_spacing, int32_t exact) {
    const BestChoice best = best_choice(lengths, cut_spacing, heads, exact, sms, costs, guess);
    guess = best.choice;
    return (costs.planning(boundaries_of(lengths, cut_spacing)) + best.time) / uncut;
  };
  estimate.quarter = share(estimate.cut_spacing, heads / 4);
  if (known) {
    // What a spacing takes, as a share of what the usual one takes where a quarter of the heads do not decay; with the
    // other gates beside it, as far as they weigh.
    const float usual_quarter = estimate.quarter;
    const float usual_half = share(estimate.cut_spacing, heads / 2), usual_none = share(estimate.cut_spacing, 0);
    const auto others = [&](const CutSpacing& cut_spacing, float half) {
      const float none = share(cut_spacing, 0), loss_of_all = std::max(share(cut_spacing, heads) - 1.0f, 0.0f);
      return kWeightOfOthers * (half / usual_half + none / usual_none) + kWeightOfAll * loss_of_all / usual_quarter;
    };
    const int32_t usual = estimate.cut_spacing.spacing;
    const int32_t finest = std::max(spacing_of(lengths.chunks * heads, kMostItemsPerSm * sms), kMinSpacing);
    const float usual_others = others(estimate.cut_spacing, usual_half);
    float best = 1.0f - kLeastOfSpacing;
    const auto consider = [&](int32_t spacing) {
      if (spacing == usual) return;
      CutSpacing cut_spacing;
      cut_spacing.set_spacing(spacing);
      const float quarter = share(cut_spacing, heads / 4), value = quarter / usual_quarter;
      if (value >= best) return;
      const float half = share(cut_spacing, heads / 2);
      if (half > 1.0f + kMostLossOfExact) return;  // the call would not be planned
      if (const float all = value + others(cut_spacing, half) - usual_others; all < best) {
        estimate.cut_spacing = cut_spacing;
        estimate.quarter = quarter;
        best = all;
      }
    };
    for (int32_t i = kFinerSpacings; i > 0; --i) consider(usual - (usual - finest) * i / kFinerSpacings);
    const int32_t step = std::max(usual / kCoarserSpacings, 1);
    for (int32_t spacing = usual + step; spacing <= 2 * usual + 1; spacing += step) consider(spacing);
  }
  estimate.half = share(estimate.cut_spacing, heads / 2);
  if (known) estimate.all = share(estimate.cut_spacing, heads);
  return estimate;
}

inline ChoiceTable choice_table(const LengthSummary& lengths, const CutSpacing& cut_spacing, int32_t heads, int32_t sms,
                                const Costs& costs) {
  ChoiceTable choices;
  BestChoice best;
  for (int32_t share = 0; share <= ChoiceTable::kShares; ++share) {
    const int32_t exact = share * heads / ChoiceTable::kShares;
    best = best_choice(lengths, cut_spacing, heads, exact, sms, costs, best.choice);
    choices.of_share[share] = static_cast<uint8_t>(best.choice);
  }
  return choices;
}

}  // namespace flash_qla::cuda::sm90::cp
