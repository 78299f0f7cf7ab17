// A model of the context parallelism on the host: drawn lengths, gates and cards, the plan that the planner makes of
// them, and what the kernels make of the plan. A chunk is modelled by an affine map x -> a x + b over a prime field, so
// that "computed exactly once, from the right state" is an equality: a chunk whose decay lets a start state be left out
// has a = 0, every other one has a != 0.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cuda/sm90/context_parallel/plan.h"

namespace flash_qla::cuda::sm90::cp {

inline constexpr uint64_t kPrime = 2147483647;

struct Map {
  uint64_t a, b;
};

struct Batch {
  Mode mode = Mode::kAuto;
  bool forced = false;
  bool finer = false;     // the finest grid that lengths known beforehand may get
  bool in_place = false;  // final states overwrite initial ones
  uint32_t order = 0;     // seed of the order in which free and dependent items are taken
  int32_t sms = 132, heads = 1;
  int64_t tokens = 0;  // rows of the tensors, padding included
  std::vector<SequenceSpan> sequences;
  std::vector<std::vector<Map>> maps;     // [sequence * heads + head][chunk]
  std::vector<std::vector<float>> decay;  // the same; NaN among them

  int32_t chunks(size_t s) const { return chunks_in(sequences[s].length); }
  LengthSummary summary() const {
    LengthSummary lengths;
    for (size_t s = 0; s < sequences.size(); ++s) {
      lengths.chunks += chunks(s);
      lengths.sequences += sequences[s].length > 0;
      lengths.longest = std::max(lengths.longest, chunks(s));
    }
    return lengths;
  }
};

// All of a batch but its sequences and what is in them.
inline Batch draw_options(std::mt19937& random) {
  auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  Batch batch;
  batch.mode = below(4) == 0 ? Mode::kInvariant : Mode::kAuto;
  batch.forced = below(3) == 0;
  batch.in_place = below(2) == 0;
  batch.order = static_cast<uint32_t>(random());
  batch.finer = below(2) == 0;
  batch.sms = 1 + below(16) * (1 + below(9));
  batch.heads = 1 + below(5);
  return batch;
}

inline void draw_chunks(std::mt19937& random, Batch* batch) {
  auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  for (size_t s = 0; s < batch->sequences.size(); ++s) {
    for (int32_t head = 0; head < batch->heads; ++head) {
      const int32_t kind = below(4);  // nothing decays; everything does; runs of both; rarely
      std::vector<Map> maps;
      std::vector<float> decay;
      for (int32_t c = 0; c < batch->chunks(s); ++c) {
        const bool forgets = kind == 1 || (kind == 2 && (c / 16) % 2 == 0) || (kind == 3 && below(12) == 0);
        const bool broken = below(200) == 0;
        maps.push_back({forgets && !broken ? 0 : 1 + random() % (kPrime - 1), random() % kPrime});
        decay.push_back(broken ? std::numeric_limits<float>::quiet_NaN() : forgets ? -20.0f : 0.05f);
      }
      batch->maps.push_back(maps);
      batch->decay.push_back(decay);
    }
  }
}

inline Batch draw(std::mt19937& random) {
  auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  Batch batch = draw_options(random);
  const int32_t n = below(6);
  const int32_t longest = 1 << below(14);
  int32_t chunk = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t length = below(4) == 0 ? 0 : 1 + below(longest);
    batch.sequences.push_back({static_cast<int32_t>(batch.tokens), length, i, chunk});
    batch.tokens += length;
    chunk += chunks_in(length);
  }
  batch.tokens += below(3) == 0 ? below(200) : 0;
  draw_chunks(random, &batch);
  return batch;
}

struct Plan {
  CutSpacing cut_spacing;
  Capacity capacity;
  Join join;
  std::vector<WorkItem> state_items, output_items;  // in the order of their tickets
  std::vector<Scan> scans;
  std::vector<uint8_t> warmups;  // [boundary][head]
};

// Takes items at their places, each of which must be free.
struct PlacedItems {
  std::vector<WorkItem> states, outputs;
  std::vector<Scan> scans;

  explicit PlacedItems(const ItemCounts& all) {
    WorkItem none{};
    none.row = -1;
    states.assign(static_cast<size_t>(all.states), none);
    outputs.assign(static_cast<size_t>(all.independent() + all.dependent), none);
    scans.assign(static_cast<size_t>(all.scans), {-1, -1});
  }

  struct Sink {
    PlacedItems& to;
    void state(int32_t at, const WorkItem& t) const { put(to.states, at, t, &WorkItem::row); }
    void output(int32_t at, const WorkItem& t) const { put(to.outputs, at, t, &WorkItem::row); }
    void scan(int32_t at, const Scan& c) const { put(to.scans, at, c, &Scan::first_slot); }
  };

 private:
  template <typename T>
  static void put(std::vector<T>& list, int32_t at, const T& x, int32_t T::* field) {
    ASSERT_TRUE(at >= 0 && at < static_cast<int32_t>(list.size()));
    ASSERT_EQ(list[static_cast<size_t>(at)].*field, -1);
    list[static_cast<size_t>(at)] = x;
  }
};

// The lists of a batch, as the planner's kernel makes them (list.cu). kinds: of each sequence and head, whether it is
// exact. independent: the items of these that depend on nothing; first_items: ... that come before all dependent ones.
template <typename Warmups>
PlacedItems place_items(const Batch& batch, const CutSpacing& cut_spacing, const CutChoice& choice, int32_t capacity,
                        const std::vector<bool>& kinds, const Warmups& warmups_of, int32_t* independent,
                        int32_t* first_items) {
  const auto cut = [&](size_t s) {
    const CutSequence cuts(batch.sequences[s], cut_spacing);
    return cuts.fits(capacity, cut_spacing) ? cuts : CutSequence(batch.sequences[s], CutSpacing{});
  };
  std::vector<size_t> order(batch.sequences.size());
  for (size_t s = 0; s < order.size(); ++s) order[s] = s;
  if (order.size() <= kMostOrdered) {
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return length_of_items(cut(a), choice) > length_of_items(cut(b), choice);
    });
  }
  std::vector<PlannedSequence> sequences;
  ItemCounts all{};
  const auto kind = [&](size_t place, int32_t head) {
    return kinds[order[place] * static_cast<size_t>(batch.heads) + static_cast<size_t>(head)];
  };
  for (size_t place = 0; place < order.size(); ++place) {
    PlannedSequence s{cut(order[place]), 0, 0, all};
    for (int32_t head = 0; head < batch.heads; ++head) ++(kind(place, head) ? s.exact : s.decaying);
    all += ItemCounts(s.cuts, choice, s.decaying, s.exact);
    sequences.push_back(s);
  }
  PlacedItems placed(all);
  *independent = all.independent();
  *first_items = 0;
  if (sequences.empty()) return placed;
  const OutputOrder groups(
      all, sequences[0].cuts,
      sequences[static_cast<size_t>(std::min(all.may_cut, static_cast<int32_t>(sequences.size()) - 1))].cuts, choice,
      batch.in_place, {});
  if (batch.in_place) *first_items = static_cast<int32_t>(kinds.size());
  for (size_t place = 0; place < order.size(); ++place) {
    const PlannedSequence& s = sequences[place];
    int32_t exact_before = 0;
    for (int32_t head = 0; head < batch.heads; ++head) {
      const bool is_exact = kind(place, head);
      const HeadItems items(s, groups, choice, head, is_exact, is_exact ? exact_before : head - exact_before, capacity,
                            cut_spacing);
      for (int32_t k = 0; k < items.segments.count; ++k) {
        items.emit(k, cut_spacing, warmups_of(head), PlacedItems::Sink{placed});
      }
      exact_before += is_exact;
    }
  }
  return placed;
}

// Items as blocks take them, which depends on when states at cuts are there; no dependent one before the first items
// are given out.
inline std::vector<WorkItem> in_drawn_order(const std::vector<WorkItem>& items, int32_t independent,
                                            int32_t first_items, uint32_t seed) {
  std::vector<WorkItem> taken;
  auto free = items.begin(), dependent = free + independent;
  const auto no_free = dependent, first = free + first_items;
  std::mt19937 order(seed);
  while (free != no_free || dependent != items.end()) {
    const bool ready = free >= first && dependent != items.end() && order() % 2 == 0;
    taken.push_back(free == no_free || ready ? *dependent++ : *free++);
  }
  return taken;
}

inline Plan make_plan(const Batch& batch) {
  Plan plan;
  plan.cut_spacing = choose_cut_spacing(batch.mode, batch.forced, batch.summary(), batch.heads, batch.sms, Costs{});
  if (batch.finer && batch.mode == Mode::kAuto && !batch.forced && plan.cut_spacing.spacing > 0) {
    plan.cut_spacing.set_spacing(
        std::max(spacing_of(batch.summary().chunks * batch.heads, kMostItemsPerSm * batch.sms), kMinSpacing));
  }
  plan.capacity = plan_capacity(batch.mode, batch.forced, batch.tokens, static_cast<int32_t>(batch.sequences.size()),
                                batch.heads, batch.sms);
  // Every boundary is classified; a number that two of them share would show here.
  plan.warmups.assign(static_cast<size_t>(plan.capacity.slots), 255);
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const CutSequence cuts(batch.sequences[s], plan.cut_spacing);
    for (int32_t i = 1; i < cuts.pieces; ++i) {
      const int32_t at = cuts.at(i), number = cuts.number(i, plan.cut_spacing);
      EXPECT_GE(at - (i > 1 ? cuts.at(i - 1) : 0), plan.cut_spacing.spacing);
      // Tokens before the first sequence are counted in the numbers, but not where the spacing is chosen.
      EXPECT_TRUE(number <= plan.capacity.boundaries || batch.sequences[0].start > 0);
      if (number >= plan.capacity.boundaries) continue;
      for (size_t other = 0; other < batch.sequences.size(); ++other) {
        EXPECT_EQ(CutSequence(batch.sequences[other], plan.cut_spacing).find(number, plan.cut_spacing),
                  other == s ? i : 0);
      }
      for (int32_t head = 0; head < batch.heads; ++head) {
        const std::vector<float>& decay = batch.decay[s * static_cast<size_t>(batch.heads) + static_cast<size_t>(head)];
        uint8_t& warmup = plan.warmups[static_cast<size_t>(number * batch.heads + head)];
        EXPECT_EQ(warmup, 255);
        warmup = static_cast<uint8_t>(warmup_chunks(at, warmup_limit(plan.cut_spacing), kDecayThreshold,
                                                    [&](int32_t c) { return decay[static_cast<size_t>(c)]; }));
      }
    }
  }
  auto warmups_of = [&](int32_t head) {
    return [&plan, &batch, head](int32_t number) {
      return static_cast<int32_t>(plan.warmups[static_cast<size_t>(number * batch.heads + head)]);
    };
  };
  std::vector<HeadSummary> summaries;
  std::vector<bool> kinds;
  for (const SequenceSpan& s : batch.sequences) {
    CutSequence cuts(s, plan.cut_spacing);
    if (!cuts.fits(plan.capacity.boundaries, plan.cut_spacing)) cuts = CutSequence(s, CutSpacing{});
    for (int32_t head = 0; head < batch.heads; ++head) {
      HeadSummary summary{cuts.chunks, cuts.pieces, 0, 0};
      for (int32_t i = 1, exact = 0; i < summary.pieces; ++i) {
        if ((i - 1) % kBoundariesInRow == 0) exact = 0;
        const int32_t warmup = warmups_of(head)(cuts.number(i, plan.cut_spacing));
        exact += warmup == 0;
        if (exact >= boundaries_of_exact_head(summary.pieces)) summary.exact = 1;
        summary.warmups += warmup;
      }
      summaries.push_back(summary);
      kinds.push_back(summary.exact != 0);
    }
  }
  if (batch.mode == Mode::kAuto && !batch.forced) {
    const Costs costs;
    const LengthSummary lengths = batch.summary();
    ItemEstimate estimates[2][kJoins];  // of decaying heads, of exact ones
    for (const HeadSummary& summary : summaries) {
      for (int32_t i = 0; i < kJoins; ++i) {
        estimates[summary.exact][i].add(summary, join_step(i),
                                        long_item(lengths.longest, plan.cut_spacing, join_step(i)), costs);
      }
    }
    float best = std::numeric_limits<float>::infinity();
    for (int32_t choice = 0; choice < kJoinChoices; ++choice) {
      const float time =
          play_through(estimates[0][choice % kJoins], estimates[1][choice / kJoins], batch.sms, costs, SmGroups{});
      if (time < best) {
        best = time;
        plan.join = join_choice(choice);
      }
    }
  }
  int32_t independent = 0, first_items = 0;
  const PlacedItems placed = place_items(batch, plan.cut_spacing, {plan.join, batch.in_place}, plan.capacity.boundaries,
                                         kinds, warmups_of, &independent, &first_items);
  plan.state_items = placed.states;
  plan.scans = placed.scans;
  plan.output_items = in_drawn_order(placed.outputs, independent, first_items, batch.order);
  return plan;
}

inline uint64_t initial_state(const WorkItem& t) { return static_cast<uint64_t>(t.sequence * 1000 + t.head + 1); }

inline Map run(const Batch& batch, const WorkItem& t, uint64_t x) {
  const std::vector<Map>& maps =
      batch.maps[static_cast<size_t>(t.sequence) * static_cast<size_t>(batch.heads) + static_cast<size_t>(t.head)];
  uint64_t a = 1;
  for (int32_t c = t.position; c < t.position + chunks_in(t.tokens); ++c) {
    const Map& m = maps[static_cast<size_t>(c)];
    a = a * m.a % kPrime;
    x = (m.a * x + m.b) % kPrime;
  }
  return {a, x};
}

// Runs the plan as the kernels do, and compares every state that a chunk's outputs start from with the true one.
inline void check(const Batch& batch, const Plan& plan) {
  ASSERT_LE(static_cast<int64_t>(plan.state_items.size()), plan.capacity.state_items);
  ASSERT_LE(static_cast<int64_t>(plan.output_items.size()), plan.capacity.output_items);
  ASSERT_LE(static_cast<int64_t>(plan.scans.size()), plan.capacity.scans);
  constexpr uint64_t kUnwritten = ~uint64_t{0};
  std::vector<uint64_t> state(static_cast<size_t>(plan.capacity.slots), kUnwritten), transition(state);
  for (const WorkItem& t : plan.state_items) {
    ASSERT_TRUE(t.slot >= 0 && t.slot < plan.capacity.slots);
    ASSERT_EQ(t.tokens % kChunk, 0);  // the transition's chunks are whole: V alone is cleared in them
    ASSERT_FALSE(t.flags & (kItemFromCutState | kItemToEnd));
    const Map end = run(batch, t, t.flags & kItemFromStart ? initial_state(t) : 0);
    const bool is_transition = (t.flags & kItemTransition) != 0;
    std::vector<uint64_t>& target = is_transition ? transition : state;
    ASSERT_EQ(target[static_cast<size_t>(t.slot)], kUnwritten);
    target[static_cast<size_t>(t.slot)] = is_transition ? end.a : end.b;
  }
  for (const Scan& scan : plan.scans) {
    ASSERT_EQ(transition[static_cast<size_t>(scan.first_slot)], kUnwritten);
    for (int32_t i = 1; i <= scan.transitions; ++i) {
      const size_t slot = static_cast<size_t>(scan.first_slot + i);
      ASSERT_LT(slot, state.size());
      ASSERT_NE(transition[slot], kUnwritten);
      ASSERT_NE(state[slot], kUnwritten);
      state[slot] = (transition[slot] * state[slot - 1] + state[slot]) % kPrime;
      transition[slot] = kUnwritten;  // used once
    }
  }
  for (uint64_t x : transition) ASSERT_EQ(x, kUnwritten);

  std::vector<std::vector<int>> written(batch.maps.size());
  for (size_t i = 0; i < written.size(); ++i) written[i].assign(batch.maps[i].size(), 0);
  std::vector<int> ends(batch.maps.size(), 0);
  std::vector<bool> overwritten(batch.maps.size(), false);
  for (const WorkItem& t : plan.output_items) {
    if (t.tokens == 0 && t.flags == 0) continue;  // joined to the segment before
    const SequenceSpan& s = batch.sequences[static_cast<size_t>(t.sequence)];
    const size_t index = static_cast<size_t>(t.sequence * batch.heads + t.head);
    ASSERT_EQ(t.row, s.start + t.position * kChunk);
    ASSERT_EQ(t.chunk, s.first_chunk + t.position);
    ASSERT_LE(t.row + t.tokens, s.start + s.length);
    ASSERT_EQ((t.flags & kItemFromStart) != 0, t.position == 0);
    ASSERT_EQ((t.flags & kItemToEnd) != 0, t.row + t.tokens == s.start + s.length);
    ends[index] += (t.flags & kItemToEnd) != 0;
    // The item that overwrites an initial state waits for those that read it: their tickets must be earlier.
    ASSERT_FALSE(batch.in_place && (t.flags & kItemFromStart) && overwritten[index]);
    overwritten[index] = overwritten[index] || (t.flags & kItemToEnd) != 0;
    uint64_t x = 0, truth = initial_state(t);
    if (t.flags & kItemFromStart) x = truth;
    if (t.flags & kItemFromCutState) x = state[static_cast<size_t>(t.slot)];
    for (int32_t c = 0; c < t.position + chunks_in(t.tokens); ++c) {
      if (c >= t.position + t.warmup) {
        ASSERT_EQ(x, truth) << "sequence " << t.sequence << " head " << t.head << " chunk " << c;
        ++written[index][static_cast<size_t>(c)];
      }
      const Map& m = batch.maps[index][static_cast<size_t>(c)];
      truth = (m.a * truth + m.b) % kPrime;
      if (c >= t.position) x = (m.a * x + m.b) % kPrime;
    }
  }
  for (const std::vector<int>& head : written) {
    for (int count : head) ASSERT_EQ(count, 1);
  }
  for (int count : ends) ASSERT_EQ(count, 1);
}

}  // namespace flash_qla::cuda::sm90::cp
