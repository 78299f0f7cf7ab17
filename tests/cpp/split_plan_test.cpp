// The planner of the context parallelism, run on the host over drawn lengths, gates and cards (split_plan_model.h).
#include <cmath>

#include "split_plan_model.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

TEST(SplitPlan, EveryChunkOnceFromTheRightState) {
  std::mt19937 random(1);
  int64_t cut = 0, chained = 0, warmed = 0, joined = 0;
  for (int i = 0; i < 100000; ++i) {
    const Batch batch = draw(random);
    const Plan plan = make_plan(batch);
    check(batch, plan);
    if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "case " << i;
    cut += plan.output_items.size() > batch.maps.size();
    chained += !plan.scans.empty();
    for (const WorkItem& t : plan.output_items) {
      warmed += t.warmup > 0;
      joined += t.tokens == 0 && t.flags == 0;
    }
  }
  // The cases meet what they are meant to meet.
  EXPECT_GT(cut, 10000);
  EXPECT_GT(chained, 5000);
  EXPECT_GT(warmed, 50000);
  EXPECT_GT(joined, 1000);
}

// Of equal sequences in heads of both kinds: every place has an item, and what waits comes after what does not.
TEST(SplitPlan, EveryPlaceHasAnItem) {
  std::mt19937 random(3);
  auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
  int64_t mixed = 0;
  for (int i = 0; i < 20000; ++i) {
    Batch batch;
    const int32_t n = 1 + below(3), chunks = 1 + below(300), length = (chunks - 1) * kChunk + 1 + below(kChunk);
    batch.heads = 1 + below(9);
    batch.in_place = below(4) == 0;
    CutSpacing cut_spacing;
    cut_spacing.set_spacing(kMinSpacing + below(12));
    for (int32_t s = 0; s < n; ++s) batch.sequences.push_back({s * chunks * kChunk, length, s, s * chunks});
    std::vector<bool> kinds;
    for (int32_t pair = 0; pair < n * batch.heads; ++pair) kinds.push_back(below(3) == 0);
    const auto warmups_of = [](int32_t) { return [](int32_t) { return kUsualWarmup; }; };
    int32_t independent = 0, first_items = 0;
    const PlacedItems placed =
        place_items(batch, cut_spacing, {join_choice(below(kJoinChoices)), batch.in_place},
                    n * chunks / cut_spacing.spacing + 1, kinds, warmups_of, &independent, &first_items);
    for (size_t t = 0; t < placed.outputs.size(); ++t) {
      ASSERT_GE(placed.outputs[t].row, 0);
      ASSERT_EQ((placed.outputs[t].flags & kItemFromCutState) != 0, t >= static_cast<size_t>(independent));
      if (t < static_cast<size_t>(first_items)) {
        ASSERT_EQ(placed.outputs[t].position, 0);
      }
    }
    for (const WorkItem& item : placed.states) ASSERT_GE(item.row, 0);
    for (const Scan& scan : placed.scans) ASSERT_GE(scan.first_slot, 0);
    if (HasFatalFailure()) FAIL() << "case " << i;
    mixed += independent > n * batch.heads && independent < static_cast<int32_t>(placed.outputs.size());
  }
  EXPECT_GT(mixed, 5000);
}

TEST(SplitPlan, InvariantPlansDoNotSeeTheBatch) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000; ++i) {
    Batch batch = draw(random);
    batch.mode = Mode::kInvariant;
    const Plan all = make_plan(batch);
    for (size_t s = 0; s < batch.sequences.size(); ++s) {
      Batch alone = batch;
      alone.sms = 1 + batch.sms / 2;
      alone.sequences = {{0, batch.sequences[s].length, 0, 0}};
      alone.tokens = batch.sequences[s].length;
      alone.maps.assign(batch.maps.begin() + static_cast<int64_t>(s) * batch.heads,
                        batch.maps.begin() + static_cast<int64_t>(s + 1) * batch.heads);
      alone.decay.assign(batch.decay.begin() + static_cast<int64_t>(s) * batch.heads,
                         batch.decay.begin() + static_cast<int64_t>(s + 1) * batch.heads);
      const Plan one = make_plan(alone);
      size_t next = 0;
      std::vector<WorkItem> mine;
      for (const WorkItem& t : all.output_items) {
        if (t.sequence == static_cast<int32_t>(s)) mine.push_back(t);
      }
      ASSERT_EQ(mine.size(), one.output_items.size());
      std::vector<WorkItem> items = one.output_items;
      for (std::vector<WorkItem>* list : {&mine, &items}) {
        std::sort(list->begin(), list->end(), [](const WorkItem& a, const WorkItem& b) {
          return std::pair(a.head, a.position + a.warmup) < std::pair(b.head, b.position + b.warmup);
        });
      }
      for (const WorkItem& t : items) {
        ASSERT_EQ(t.position, mine[next].position);
        ASSERT_EQ(t.tokens, mine[next].tokens);
        ASSERT_EQ(t.warmup, mine[next].warmup);
        ASSERT_EQ(t.flags, mine[next].flags);
        ++next;
      }
    }
  }
}

LengthSummary alike(int32_t sequences, int32_t chunks) {
  return {static_cast<int64_t>(sequences) * chunks, sequences, chunks};
}

TEST(SplitPlan, CutsOnlyWhereTheCardIsNotFull) {
  const Costs costs;
  // 64 heads of four sequences: 256 items on 132 SMs, 97 % of them in full waves.
  EXPECT_EQ(choose_cut_spacing(Mode::kAuto, false, alike(4, 128), 64, 132, costs).spacing, 0);
  EXPECT_EQ(choose_cut_spacing(Mode::kAuto, false, alike(8, 16), 64, 132, costs).spacing, 0);
  EXPECT_EQ(choose_cut_spacing(Mode::kOff, true, alike(1, 512), 8, 132, costs).spacing, 0);
  EXPECT_GT(choose_cut_spacing(Mode::kAuto, false, alike(1, 512), 8, 132, costs).spacing, 0);
  EXPECT_GT(choose_cut_spacing(Mode::kAuto, false, alike(4, 128), 48, 132, costs).spacing, 0);
  EXPECT_EQ(choose_cut_spacing(Mode::kAuto, false, {}, 8, 132, costs).spacing, 0);
}

// What was measured on a card of 132 SMs (docs/notebook/sequence_split.md).
TEST(SplitPlan, PlansWhereItWasMeasuredToPay) {
  auto pays = [&](int32_t key_heads, int32_t heads, int32_t sequences, int32_t tokens) {
    return estimate_plan(alike(sequences, chunks_in(tokens)), heads, 132, Costs(key_heads, heads), true).pays();
  };
  for (int32_t heads : {8, 16, 24, 32}) EXPECT_TRUE(pays(heads / 4, heads, 1, 32768)) << heads;
  for (int32_t heads : {8, 16, 32}) EXPECT_TRUE(pays(heads / 4, heads, 1, 8192)) << heads;
  EXPECT_TRUE(pays(2, 8, 1, 4096));
  EXPECT_TRUE(pays(16, 48, 4, 8192));
  EXPECT_TRUE(pays(4, 16, 2, 8192));
  // 4/16: 13 % less with a quarter of the heads without decay, 28 % with none of them, 14 % more with all.
  EXPECT_TRUE(pays(4, 16, 1, 4096));
  EXPECT_TRUE(pays(2, 8, 2, 4096));
  for (int32_t heads : {16, 24, 32}) EXPECT_FALSE(pays(heads / 4, heads, 1, 2048)) << heads;
  for (int32_t heads : {24, 32}) EXPECT_FALSE(pays(8, heads, 1, 4096)) << heads;
  for (int32_t tokens : {8192, 16384}) EXPECT_FALSE(pays(16, 48, 1, tokens)) << tokens;
  EXPECT_TRUE(pays(8, 24, 1, 8192));  // 11 % less, 25 % less, 9 % more, likewise
  for (int32_t heads : {8, 32, 64}) EXPECT_FALSE(pays(heads / 4, heads, 8, 1024)) << heads;
  for (int32_t heads : {32, 64}) EXPECT_FALSE(pays(heads / 4, heads, 4, 8192)) << heads;
  EXPECT_FALSE(pays(16, 64, 1, 32768));
  // 17 % less with a quarter of the heads without decay, half as much again where none decays: one SM to a head then.
  EXPECT_FALSE(pays(16, 48, 1, 32768));
  for (int32_t heads : {24, 32, 48}) EXPECT_FALSE(pays(heads / 4, heads, 2, 16384)) << heads;
  // As many key heads as value heads: more is read from memory.
  EXPECT_FALSE(pays(32, 32, 1, 8192));
}

// A choice that is looked up takes as long as the best one, or nearly so.
TEST(SplitPlan, UsualChoicesAreNearTheBest) {
  constexpr int32_t kSms = 132;
  double worst = 1.0, sum = 0.0;
  int cases = 0;
  for (const int32_t heads : {4, 8, 16, 24, 32, 48, 64}) {
    for (const int32_t sequences : {1, 2, 4}) {
      for (const int32_t tokens : {2048, 4096, 8192, 16384, 32768}) {
        const Costs costs(heads / 4, heads);
        const LengthSummary lengths = alike(sequences, chunks_in(tokens / sequences));
        const PlanEstimate estimate = estimate_plan(lengths, heads, kSms, costs, true);
        if (!estimate.pays()) continue;
        const ChoiceTable usual = choice_table(lengths, estimate.cut_spacing, heads, kSms, costs);
        const int32_t pieces = pieces_of(lengths.longest, estimate.cut_spacing);
        for (int32_t exact = 0; exact <= heads; ++exact) {
          for (int32_t warmup = ChoiceTable::kLeastWarmup; warmup <= ChoiceTable::kMostWarmup; ++warmup) {
            float best = 0.0f, looked_up = 0.0f;
            for (int32_t choice = 0; choice < kJoinChoices; ++choice) {
              ItemEstimate parts[2];
              for (const bool decays : {false, true}) {
                const HeadSummary head{lengths.longest, pieces, !decays, warmup * (pieces - 1)};
                const int32_t step = join_step(decays ? choice % kJoins : choice / kJoins);
                ItemEstimate part;
                part.add(head, step, long_item(lengths.longest, estimate.cut_spacing, step), costs);
                parts[decays].add(part, sequences * (decays ? heads - exact : exact));
              }
              const float time = play_through(parts[1], parts[0], kSms, costs, SmGroups{});
              if (choice == 0 || time < best) best = time;
              if (choice == usual.choice(sequences * exact, sequences * heads)) looked_up = time;
            }
            if (looked_up == 0.0f) continue;
            const double ratio = looked_up / best;
            worst = std::max(worst, ratio);
            sum += ratio;
            ++cases;
          }
        }
      }
    }
  }
  EXPECT_GT(cases, 500);
  EXPECT_LT(worst, 1.08);
  EXPECT_LT(sum / cases, 1.001);
}

// Lengths that only the device knows: 28672 + 4096 gain 13 to 30 %, 2 x 16384 lose with a cut.
TEST(SplitPlan, LengthsDecideOnTheDevice) {
  const Costs costs;
  auto cuts = [&](int32_t heads, std::vector<int32_t> tokens) {
    LengthSummary lengths;
    for (const int32_t t : tokens) {
      lengths.chunks += chunks_in(t);
      lengths.longest = std::max(lengths.longest, chunks_in(t));
      ++lengths.sequences;
    }
    return choose_cut_spacing(Mode::kAuto, false, lengths, heads, 132, costs, kLeastUnequal).spacing > 0;
  };
  for (int32_t heads : {24, 32, 48, 64}) {
    EXPECT_TRUE(cuts(heads, {28672, 4096})) << heads;
    EXPECT_FALSE(cuts(heads, {16384, 16384})) << heads;
  }
  EXPECT_FALSE(cuts(32, {8192, 8192, 8192, 8192}));
}

// The kernel that asks for lengths compares the longest with one number: it must be what the grid's choice says.
TEST(SplitPlan, OneLengthTellsWhetherToCut) {
  int asked = 0;
  for (const int32_t heads : {8, 20, 32, 48, 64, 100}) {
    for (const int32_t sequences : {2, 3}) {
      for (const int32_t chunks : {100, 337, 512, 2000}) {
        const Costs costs(heads / 4, heads);
        const int32_t equal = (chunks + sequences - 1) / sequences;
        const auto cut = [&](int32_t longest) {
          return choose_cut_spacing(Mode::kAuto, false, {chunks, sequences, longest}, heads, 132, costs, kLeastUnequal)
                     .spacing > 0;
        };
        if (cut(equal)) continue;  // nobody asks then
        const int32_t least = least_longest(chunks, sequences, heads, 132, costs);
        asked += least > 0;
        // Up to 2 % beside equal ones the uncut time is that of whole waves, and may be more than a little beyond.
        for (int32_t longest = equal + equal / 50 + 2; longest <= chunks; ++longest) {
          ASSERT_EQ(cut(longest), least > 0 && longest >= least) << heads << ' ' << sequences << ' ' << longest;
        }
      }
    }
  }
  EXPECT_GT(asked, 20);
}

TEST(SplitPlan, GrowthAndNaNAreExact) {
  auto steady = [](float x) { return [x](int32_t) { return x; }; };
  EXPECT_EQ(warmup_chunks(20, 10, kDecayThreshold, steady(-3.2f)), 5);
  EXPECT_EQ(warmup_chunks(20, 10, kDecayThreshold, steady(-1.6f)), 10);
  EXPECT_EQ(warmup_chunks(20, 10, kDecayThreshold, steady(-1.5f)), 0);
  EXPECT_EQ(warmup_chunks(20, 10, kDecayThreshold, steady(0.0f)), 0);
  EXPECT_EQ(warmup_chunks(20, 10, kDecayThreshold, steady(std::nanf(""))), 0);
  // The sequence's start comes first: from there, where the rate is that of a decaying head.
  EXPECT_EQ(warmup_chunks(3, 10, kDecayThreshold, steady(-4.0f)), 3);
  EXPECT_EQ(warmup_chunks(3, 10, kDecayThreshold, steady(-1.5f)), 0);
  EXPECT_EQ(warmup_chunks(11, 10, kDecayThreshold, steady(-1.5f)), 0);
}

// What docs/numerics.md promises: a state left out before a warm-up changes what follows by at most 1.2e-7 of the
// largest norm that the state has had. Keys of norm 2 and beta 2, so that every token stretches the state sevenfold
// along its key; a huge initial state; in double precision, so that nothing else is seen.
TEST(SplitPlan, WhatAWarmupDropsIsBelowThePromise) {
  constexpr int kDim = 8, kChunks = 24;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  using State = std::vector<double>;  // [K, V]
  auto norm = [](const State& x) {
    double sum = 0;
    for (double e : x) sum += e * e;
    return std::sqrt(sum);
  };
  double tightest = 0;
  int dropped = 0;
  for (int trial = 0; trial < 200; ++trial) {
    // All keys alike: the bound is an equality for the part of the state along them.
    const bool alike = trial % 2 == 0;
    const double beta = trial % 4 < 2 ? 2.0 : 1.0, size = 2.0;
    const double growth = std::log(std::max(1.0, std::abs(1.0 - beta * size * size)));
    const double rate = -growth - 0.02 - 0.3 * (trial % 10) / 10.0;
    std::vector<State> keys, values;
    std::vector<double> gates;
    std::vector<float> decay(kChunks, 0.0f);
    for (int t = 0; t < kChunks * kChunk; ++t) {
      State k(kDim), v(kDim);
      double sum = 0;
      for (double& x : k) x = normal(random), sum += x * x;
      for (double& x : k) x *= size / std::sqrt(sum);
      for (double& x : v) x = normal(random);
      keys.push_back(alike && t > 0 ? keys[0] : k);
      values.push_back(v);
      gates.push_back(rate * (1.0 + 0.1 * normal(random)));
      decay[static_cast<size_t>(t / kChunk)] += static_cast<float>(gates.back() + growth);
    }
    auto step = [&](State& s, int t, bool with_values) {
      const State &k = keys[static_cast<size_t>(t)], &v = values[static_cast<size_t>(t)];
      for (double& x : s) x *= std::exp(gates[static_cast<size_t>(t)]);
      for (int c = 0; c < kDim; ++c) {
        double error = with_values ? v[static_cast<size_t>(c)] : 0.0;
        for (int r = 0; r < kDim; ++r) error -= s[static_cast<size_t>(r * kDim + c)] * k[static_cast<size_t>(r)];
        for (int r = 0; r < kDim; ++r) s[static_cast<size_t>(r * kDim + c)] += k[static_cast<size_t>(r)] * beta * error;
      }
    };
    std::vector<State> starts;  // at each chunk
    State s(kDim * kDim);
    for (int i = 0; i < kDim * kDim; ++i) s[static_cast<size_t>(i)] = 1e8 * keys[0][static_cast<size_t>(i / kDim)];
    double largest = norm(s);
    for (int t = 0; t < kChunks * kChunk; ++t) {
      if (t % kChunk == 0) starts.push_back(s);
      step(s, t, true);
      largest = std::max(largest, norm(s));
    }
    for (int32_t position = 1; position < kChunks; ++position) {
      const int32_t warmup =
          warmup_chunks(position, 22, kDecayThreshold, [&](int32_t c) { return decay[static_cast<size_t>(c)]; });
      if (warmup == 0 || warmup == position) continue;  // nothing is left out
      ++dropped;
      // By linearity the error is the state that was left out, carried through the warm-up without values.
      State error = starts[static_cast<size_t>(position - warmup)];
      for (int t = (position - warmup) * kChunk; t < position * kChunk; ++t) step(error, t, false);
      ASSERT_LE(norm(error), 1.2e-7 * largest);
      tightest = std::max(tightest, norm(error) / largest);
    }
  }
  EXPECT_GT(dropped, 1000);
  EXPECT_GT(tightest, 1e-9);  // the states that are dropped are not small ones
}

TEST(SplitPlan, DivisorsDivide) {
  std::mt19937 random(4);
  for (int i = 0; i < 100000; ++i) {
    const int32_t by = 1 + static_cast<int32_t>(random() >> (1 + random() % 31)),
                  x = static_cast<int32_t>(random() >> 1);
    ASSERT_EQ(Divisor(by).divide(x), x / by);
    const int32_t multiple = x / by * by;
    ASSERT_EQ(Divisor(by).divide(multiple), multiple / by);
    const int32_t below = std::max(multiple - 1, 0);
    ASSERT_EQ(Divisor(by).divide(below), below / by);
  }
}

TEST(SplitPlan, EvenMerges) {
  for (int32_t pieces = 1; pieces < 200; ++pieces) {
    for (int32_t join : {1, 2, 3, 5, 16, kNoCut}) {
      const Segmentation segments(pieces, join, false);
      ASSERT_EQ(segments.count, join >= pieces ? 1 : (pieces + join - 1) / join);
      ASSERT_EQ(segments.first_piece(0), 0);
      ASSERT_EQ(segments.first_piece(segments.count), pieces);
      std::vector<int32_t> by_order(static_cast<size_t>(segments.count), 0);
      for (int32_t k = 0; k < segments.count; ++k) {
        const int32_t size = segments.first_piece(k + 1) - segments.first_piece(k);
        ASSERT_LE(size, join);
        ASSERT_TRUE(size == segments.least || size == segments.least + 1);
        int32_t& at = by_order[static_cast<size_t>(segments.order(k))];
        ASSERT_EQ(at, 0);
        at = size;
      }
      ASSERT_TRUE(std::is_sorted(by_order.rbegin(), by_order.rend()));
      ASSERT_EQ(segments.order(0), 0);
      ASSERT_EQ(segments.order(segments.count - 1), segments.count - 1);
    }
  }
}

}  // namespace
}  // namespace flash_qla::cuda::sm90::cp
