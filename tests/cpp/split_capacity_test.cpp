// What the planner of the context parallelism has room for: its lists must hold whatever a call's offsets say, for the
// kernels write them without a bound.
#include <tuple>
#include <utility>

#include "core/host_tensor.h"
#include "split_plan_model.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

// What offsets that may be anything are taken for, by contract: sequence n has tokens [max(cu[0 .. n]),
// max(cu[0 .. n + 1])) within the tensors, so that no token belongs to two.
std::vector<SequenceSpan> sequences_of(const std::vector<int64_t>& offsets, int64_t tokens) {
  Problem problem;
  problem.varlen = true;
  problem.T = tokens;
  problem.N = static_cast<int64_t>(offsets.size()) - 1;
  std::vector<SequenceSpan> sequences;
  for (const Sequence& s :
       host_sequences(tensor(offsets.data(), DType::kInt64, {static_cast<int64_t>(offsets.size())}), problem)) {
    sequences.push_back({static_cast<int32_t>(s.begin), static_cast<int32_t>(s.length),
                         static_cast<int32_t>(sequences.size()), static_cast<int32_t>(s.first_chunk)});
  }
  return sequences;
}

// Offsets out of order, overlapping, negative, past the end, or one pair again and again.
std::vector<int64_t> draw_offsets(int64_t tokens, std::mt19937& random) {
  auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  const int64_t kind = below(6), sequences = 1 + below(12);
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= sequences; ++n) {
    const int64_t inside = below(tokens + 1);
    switch (kind) {
      case 0:  // anywhere
        offsets.push_back(inside);
        break;
      case 1:  // all tokens, again and again
        offsets.push_back(n % 2 * tokens);
        break;
      case 2:  // backwards
        offsets.push_back(tokens - n * tokens / sequences);
        break;
      case 3:  // each overlaps the one before it
        offsets.push_back(n * tokens / (2 * sequences) + (n % 2) * tokens / 2);
        break;
      case 4:  // far outside
        offsets.push_back(below(2) == 0 ? inside : below(2) == 0 ? -1 - inside : tokens + inside);
        break;
      default:
        offsets.push_back(below(3) > 0    ? inside
                          : below(2) == 0 ? std::numeric_limits<int64_t>::max()
                                          : std::numeric_limits<int64_t>::min());
    }
  }
  return offsets;
}

// The mode, and whether a cut is forced.
constexpr std::pair<Mode, bool> kModes[] = {{Mode::kOff, false},
                                            {Mode::kAuto, false},
                                            {Mode::kAuto, true},
                                            {Mode::kInvariant, false},
                                            {Mode::kInvariant, true}};

TEST(Capacity, NoTokenIsInTwoSequences) {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) {
    const int64_t tokens = static_cast<int64_t>(random() % 5000);
    const std::vector<int64_t> offsets = draw_offsets(tokens, random);
    int64_t end = 0, most = std::numeric_limits<int64_t>::min();
    for (const SequenceSpan& s : sequences_of(offsets, tokens)) {
      most = std::max(most, offsets[static_cast<size_t>(s.index)]);
      const int64_t after = std::max(most, offsets[static_cast<size_t>(s.index) + 1]);
      ASSERT_EQ(s.start, std::clamp<int64_t>(most, 0, tokens));
      ASSERT_EQ(s.start + s.length, std::clamp<int64_t>(after, 0, tokens));
      ASSERT_GE(s.start, end);
      end = s.start + s.length;
    }
  }
}

// Plans of such offsets, whatever decays and on whatever card: every chunk once from the right state, and all lists
// within the room that shapes give them (check()).
TEST(Capacity, PlansOfAnyOffsetsFit) {
  std::mt19937 random(11);
  int64_t cut = 0, full = 0;
  for (int i = 0; i < 40000; ++i) {
    Batch batch = draw_options(random);
    std::tie(batch.mode, batch.forced) = kModes[random() % std::size(kModes)];
    batch.tokens = 1 + static_cast<int64_t>(random() % (1u << (6 + random() % 9)));
    const std::vector<int64_t> offsets = draw_offsets(batch.tokens, random);
    batch.sequences = sequences_of(offsets, batch.tokens);
    draw_chunks(random, &batch);
    const Plan plan = make_plan(batch);
    check(batch, plan);
    if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << "case " << i;
    cut += plan.output_items.size() > batch.maps.size();
    full += batch.summary().chunks * kChunk >= batch.tokens;
  }
  EXPECT_GT(cut, 7000);
  EXPECT_GT(full, 8000);
}

// [0, T, 0, T, ..]: taken pair by pair these are several sequences of all tokens each, more than there is room for.
TEST(Capacity, TheSameTokensTwiceFit) {
  std::mt19937 random(13);
  for (const auto& [mode, forced] : kModes) {
    for (const int64_t tokens : {2100, 4096, 16384}) {
      for (const int32_t heads : {1, 2, 4, 8}) {
        for (const bool all_exact : {false, true}) {
          Batch batch = draw_options(random);
          batch.mode = mode;
          batch.forced = forced;
          batch.heads = heads;
          batch.sms = 132;
          batch.tokens = tokens;
          batch.sequences = sequences_of({0, tokens, 0, tokens, 0, tokens}, tokens);
          draw_chunks(random, &batch);
          for (size_t s = 0; all_exact && s < batch.maps.size(); ++s) {
            for (Map& m : batch.maps[s]) m.a = 1;
            std::fill(batch.decay[s].begin(), batch.decay[s].end(), 0.0f);
          }
          check(batch, make_plan(batch));
          if (HasFatalFailure() || HasNonfatalFailure()) FAIL() << heads << " heads, " << tokens << " tokens";
        }
      }
    }
  }
}

}  // namespace
}  // namespace flash_qla::cuda::sm90::cp
