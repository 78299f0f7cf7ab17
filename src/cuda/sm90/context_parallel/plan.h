// The sequence split of the fused Hopper forward, as plain functions: where sequences may be cut (cuts.h), which cuts
// are taken, and the tiles that follow (segments.h, regular_plan.h). They run on the device (list.cu) and, in a test,
// on the host. docs/design/sequence_split.md explains the scheme.
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
inline int32_t boundaries_of(const LengthSummary& lengths, const SplitGrid& grid) {
  const int32_t others = lengths.sequences - 1;
  const int32_t chunks = others > 0 ? static_cast<int32_t>((lengths.chunks - lengths.longest) / others) : 0;
  return pieces_of(lengths.longest, grid) - 1 + others * (pieces_of(chunks, grid) - 1);
}

// With `heavy` heads that do not decay and the others that do (kUsualWarmup), where all sequences but the longest are
// equal. guess: a choice that may well be the best, which spares most of the others.
inline BestChoice best_choice(const LengthSummary& lengths, const SplitGrid& grid, int32_t heads, int32_t heavy,
                              bool uncut_shared, int32_t sms, const SplitCosts& costs, int32_t guess) {
  SplitEstimate light[kMerges], without_decay[kMerges];
  const int32_t others = lengths.sequences - 1;
  for (int32_t kind = 0; kind < (others > 0 ? 2 : 1); ++kind) {
    const int32_t sequences = kind == 0 ? 1 : others;
    HeadSummary head;
    head.chunks = kind == 0 ? lengths.longest : static_cast<int32_t>((lengths.chunks - lengths.longest) / others);
    head.pieces = pieces_of(head.chunks, grid);
    for (int32_t i = 0; i < kMerges; ++i) {
      const float limit = long_tile(lengths.longest, grid, merge_step(i));
      SplitEstimate part;
      head.warmups = kUsualWarmup * (head.pieces - 1);
      head.heavy = 0;
      part.add(head, merge_step(i), limit, costs);
      light[i].add(part, sequences * (heads - heavy));
      part = SplitEstimate{};
      head.warmups = 0;
      head.heavy = head.pieces - 1;
      part.add(head, merge_step(i), limit, costs);
      without_decay[i].add(part, sequences * heavy);
    }
  }
  const float uncut = uncut_shared ? time_of_shared(lengths, heads, sms, costs) : 0.0f;
  const int32_t pieces = pieces_of(lengths.longest, grid);
  // Not what is the same as the one before, and not what must take longer than the best so far.
  const auto again = [&](int32_t i) {
    return i > 0 && joined_pieces(pieces, merge_step(i)) == joined_pieces(pieces, merge_step(i - 1));
  };
  const auto time_of = [&](int32_t i) {
    return time_of_choice(light[i % kMerges], without_decay[i / kMerges], i, uncut, sms, costs, SmGroups{});
  };
  BestChoice best{guess, time_of(guess)};
  for (int32_t i = 0; i < kMergeChoices; ++i) {
    const bool last = i == kMergeChoices - 1;
    if (!last && (again(i % kMerges) || again(i / kMerges) ||
                  least_time(light[i % kMerges], without_decay[i / kMerges], sms, costs) >= best.time)) {
      continue;
    }
    if (const float time = time_of(i); time < best.time) best = {i, time};
  }
  return best;
}

// No head decays: how heads are cut where that is not by whole pieces, and pairs of SMs make what waits for boundary
// states. A head that keeps all of its state may be cut at any chunk, not only where boundaries were looked at.
struct UndecayedSplit {
  int32_t segments = 0;  // of a head; 0: it is by whole pieces
  int32_t first = 0;     // chunks of the first one; the others are equal, or differ by a chunk
};

// The choices of lengths that are known beforehand, by how many eighths of the heads do not decay: one that some gates
// ask for is then looked up, not worked out. They are those of kUsualWarmup, and serve warm-ups near it.
struct UsualChoices {
  static constexpr int32_t kShares = 8;
  static constexpr int32_t kLeastWarmup = 4, kMostWarmup = 6;  // chunks, on average over a head's boundaries
  uint8_t of_share[kShares + 1] = {};
  uint16_t states[kShares + 1] = {};  // state tiles of each of the heads that do not decay
  UndecayedSplit undecayed;           // where no head decays and that is faster

  // Of `heavy` heads among `heads`, and all their state tiles; -1: these are no whole eighths.
  FLASH_QLA_HOST_DEVICE int32_t choice(int32_t heavy, int32_t heads, int32_t* state_tiles) const {
    const int32_t share = kShares * heavy / heads;
    *state_tiles = heavy * states[share];
    return share * heads == kShares * heavy ? of_share[share] : -1;
  }
};

// No head decays, equal lengths: the fastest way to have pairs of SMs, which are faster for few tiles, make what waits
// for boundary states, all of it at once, and the microseconds that it takes without the planning. They start where SMs
// are through with state tiles, or with first segments, which one SM makes each: these are as much shorter that they
// end when the boundary states are there, if their SMs are wanted.
struct BestUndecayed {
  UndecayedSplit split;
  float time = 0.0f;  // 0: there are too many such tiles
};
inline BestUndecayed best_paired(const LengthSummary& lengths, int32_t most, int32_t heads, int32_t sms,
                                 const SplitCosts& costs) {
  BestUndecayed best;
  const int32_t all = lengths.sequences * heads, chunks = lengths.longest, at_once = std::max(sms - 1, 1);
  for (int32_t segments = 3; segments <= most && 2 * all * (segments - 1) <= sms; ++segments) {
    const int32_t dependent = all * (segments - 1), states = all * states_of_pieces(segments);
    const int32_t waves = (states + at_once - 1) / at_once, idle = sms - (states - (waves - 1) * at_once);
    const bool wanted = all > idle || 2 * dependent > sms - all;
    const float chain = costs.combine + costs.combine_step * static_cast<float>(segments - 2);
    const float ratio = wanted ? costs.first_share : 1.0f, others = static_cast<float>(segments - 1);
    const float even = static_cast<float>(chunks) / (others + ratio);
    const int32_t first = std::clamp(chunks - static_cast<int32_t>(even * others + 0.5f), 1, chunks - segments + 1);
    const int32_t longest = (chunks - first + segments - 2) / (segments - 1);
    const float state = static_cast<float>(std::max(first, longest)) * costs.state_step + costs.state_edge;
    const float before = static_cast<float>(waves - 1) * state, ready = before + state + chain;
    const float free = static_cast<float>(first) * costs.step + costs.tile_edge + costs.first_edge;
    const float share = static_cast<float>(2 * dependent) / static_cast<float>(sms);
    const float step = costs.half_step + costs.half_crowd * share * share;
    const float edge = costs.half_edge + costs.paired_edge;
    const float work = static_cast<float>(states) * state + static_cast<float>(all) * free;
    const float late = all > idle ? ready + free : before + free;
    const float end = std::max((all > idle ? late : ready) + static_cast<float>(longest) * step + edge, late);
    const float time = end + costs.load * work / static_cast<float>(sms);
    if (best.time == 0.0f || time < best.time) best = {{segments, first}, time};
  }
  return best;
}

// What a plan promises for sequences of these lengths, and how they would be cut: the time with it, as a share of that
// without, where a quarter, half or all of the heads do not decay.
struct SplitPromise {
  SplitGrid grid;  // none: a plan is not possible
  float quarter = 0.0f, half = 0.0f;
  // Of known lengths alone, and with a cut; and what the plan then takes that leaves all heads to several SMs each.
  float all = 0.0f, all_uncut = 0.0f;
  // Whatever the gates are, or nearly so: no plan without a cut need be allowed for. When the gates are known the time
  // of planning is gone, cut or not.
  bool surely() const { return grid.spacing > 0 && all <= (1.0f + kMostLossOfAll) * all_uncut; }
  bool pays(float least_gain = kLeastGain) const {
    const float without_decay = surely() ? all : std::min(all, all_uncut);
    const float loss_of_all = kWeightOfAll * std::max(without_decay - 1.0f, 0.0f);
    return grid.spacing > 0 && quarter + loss_of_all <= 1.0f - least_gain && half <= 1.0f + kMostLossOfHeavy;
  }
};
// known: the plan may take finer pieces, if they give more where a quarter of the heads do not decay; else the device
// chooses the grid by itself.
inline SplitPromise promise_of_plan(const LengthSummary& lengths, int32_t heads, int32_t sms, const SplitCosts& costs,
                                    bool known) {
  SplitPromise promise;
  promise.grid = choose_grid(SplitMode::kAuto, false, lengths, heads, sms, costs);
  if (promise.grid.spacing == 0) return promise;
  const float unsplit = unsplit_time(lengths, heads, sms, costs);
  const bool shared = shares_pay(static_cast<int64_t>(lengths.sequences) * heads, sms);
  int32_t guess = 0;
  const auto share = [&](const SplitGrid& grid, int32_t heavy, bool uncut_shared) {
    const BestChoice best = best_choice(lengths, grid, heads, heavy, uncut_shared, sms, costs, guess);
    guess = best.choice;
    return (costs.planning(boundaries_of(lengths, grid)) + best.time) / unsplit;
  };
  promise.quarter = share(promise.grid, heads / 4, shared);
  if (known) {
    // What a grid takes, as a share of what the usual one takes where a quarter of the heads do not decay; with the
    // other gates beside it, as far as they weigh.
    const float usual_quarter = promise.quarter;
    const float usual_half = share(promise.grid, heads / 2, shared), usual_none = share(promise.grid, 0, shared);
    const auto others = [&](const SplitGrid& grid, float half) {
      const float none = share(grid, 0, shared), loss_of_all = std::max(share(grid, heads, shared) - 1.0f, 0.0f);
      return kWeightOfOthers * (half / usual_half + none / usual_none) + kWeightOfAll * loss_of_all / usual_quarter;
    };
    const int32_t usual = promise.grid.spacing;
    const int32_t finest = std::max(spacing_of(lengths.chunks * heads, kMostItemsPerSm * sms), kMinSpacing);
    const float usual_others = others(promise.grid, usual_half);
    float best = 1.0f - kLeastOfGrid;
    const auto consider = [&](int32_t spacing) {
      if (spacing == usual) return;
      SplitGrid grid;
      grid.set_spacing(spacing);
      const float quarter = share(grid, heads / 4, shared), value = quarter / usual_quarter;
      if (value >= best) return;
      const float half = share(grid, heads / 2, shared);
      if (half > 1.0f + kMostLossOfHeavy) return;  // the call would not be planned
      if (const float all = value + others(grid, half) - usual_others; all < best) {
        promise.grid = grid;
        promise.quarter = quarter;
        best = all;
      }
    };
    for (int32_t i = kFinerGrids; i > 0; --i) consider(usual - (usual - finest) * i / kFinerGrids);
    const int32_t step = std::max(usual / kCoarserGrids, 1);
    for (int32_t spacing = usual + step; spacing <= 2 * usual + 1; spacing += step) consider(spacing);
  }
  promise.half = share(promise.grid, heads / 2, shared);
  if (known) {
    promise.all = share(promise.grid, heads, false);
    const float planning = costs.planning(boundaries_of(lengths, promise.grid));
    promise.all_uncut = (planning + time_of_shared(lengths, heads, sms, costs)) / unsplit;
  }
  return promise;
}

// Whether a kernel of pairs of SMs goes behind a plan: it makes what waits for boundary states if no head decays.
// uncut_shared: a kernel of several SMs to a head goes there anyway. Else it is one that every call pays for, and must
// be worth it: a cut would lose to a call without a split, and so much of that is made good.
inline bool pairs_pay(const LengthSummary& lengths, const SplitPromise& promise, int32_t heads, bool uncut_shared,
                      int32_t sms, const SplitCosts& costs) {
  const int32_t pieces = pieces_of(lengths.longest, promise.grid);
  const BestUndecayed best = best_paired(lengths, pieces, heads, sms, costs);
  if (best.time == 0.0f) return false;
  const float planning = costs.planning(boundaries_of(lengths, promise.grid));
  const float cut = promise.all * unsplit_time(lengths, heads, sms, costs) - planning;
  if (uncut_shared) return best.time < std::min(cut, time_of_shared(lengths, heads, sms, costs));
  return promise.all > 1.0f && kWeightOfAll * (cut - best.time) > costs.behind;
}

// paired: pairs of SMs may make what waits for boundary states.
inline UsualChoices usual_choices(const LengthSummary& lengths, const SplitGrid& grid, int32_t heads, bool uncut_shared,
                                  int32_t sms, const SplitCosts& costs, bool paired = false) {
  UsualChoices choices;
  BestChoice best;
  for (int32_t share = 0; share <= UsualChoices::kShares; ++share) {
    const int32_t heavy = share * heads / UsualChoices::kShares;
    best = best_choice(lengths, grid, heads, heavy, uncut_shared, sms, costs, best.choice);
    const int32_t guess = best.choice;
    const int32_t pieces = joined_pieces(pieces_of(lengths.longest, grid), merge_choice(guess).heavy);
    choices.of_share[share] = static_cast<uint8_t>(guess);
    choices.states[share] = static_cast<uint16_t>(states_of_pieces(pieces));
  }
  if (!paired) return choices;
  const BestUndecayed by_pairs = best_paired(lengths, pieces_of(lengths.longest, grid), heads, sms, costs);
  if (by_pairs.time > 0.0f && by_pairs.time < best.time * (1.0f - kLeastOfUndecayed)) {
    choices.undecayed = by_pairs.split;
  }
  return choices;
}

}  // namespace flash_qla::cuda::sm90::cp
