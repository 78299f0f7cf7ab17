// Path sm80 on the CPU, against the recurrence in double precision.
#include "sm80_tests.cuh"

#include <gtest/gtest.h>

#include "memory.h"
#include "scheduler.h"

namespace flash_qla::testing {
namespace {

// Few enough for a minute; another order of threads for each call.
Settings settings_for(int64_t cases) {
  Settings settings;
  settings.cases = cases;
  return settings;
}

class Sm80 : public ::testing::TestWithParam<HeadDims> {};

TEST_P(Sm80, DrawnForward) {
  Arena arena(kPieces);
  const HeadDims dims = GetParam();
  cuda_emulation::counters() = {};
  const Settings settings = settings_for(dims.K * dims.V > 128 * 128 ? 8 : 15);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    if (takes(dims, type)) EXPECT_EQ(test_sm80_forward_of(settings, arena, kHostOracle, type, dims), 0);
  }
  EXPECT_GT(cuda_emulation::counters().products, 0);
  EXPECT_EQ(cuda_emulation::counters().bank_conflicts, 0);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm80, ::testing::ValuesIn(kSm80Dims), [](const auto& info) {
  return "K" + std::to_string(info.param.K) + "V" + std::to_string(info.param.V);
});

TEST(Sm80, DrawnSplit) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_split(settings_for(40), arena, kHostOracle), 0);
}

TEST(Sm80, PlannedSplit) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_planned_split(settings_for(1), arena, kHostOracle), 0);
}

TEST(Sm80, Invariance) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_invariance(settings_for(1), arena), 0);
}

TEST(Sm80, Neighbours) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_neighbours(settings_for(1), arena), 0);
}

TEST(Sm80, ListedTokens) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_listed(settings_for(1), arena), 0);
}

TEST(Sm80, MalformedDeviceData) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_malformed(settings_for(60), arena), 0);
}

// However a call is cut into blocks, which depends on the number of multiprocessors, its bits are the same.
TEST(Sm80, BitsDoNotDependOnTheCard) {
  Arena arena(kPieces);
  Checker checker("strips in a block, sm80", settings_for(1), arena, "sm80");
  const int as_it_was = cuda_emulation::settings().multiprocessors;
  for (const HeadDims& dims : {HeadDims{64, 128}, HeadDims{128, 144}}) {
    Random random(5);
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = 150;
    s.Hv = 5;
    s.K = dims.K;
    s.V = dims.V;
    Features f;
    f.final_state = f.initial_state = f.l2norm = true;
    ForwardCall drawn;
    drawn.draw(s, f, PoolFeatures{}, false, random);
    ForwardCall first = drawn;
    for (const int multiprocessors : {1000, 20, 10, 5, 1}) {
      cuda_emulation::settings().multiprocessors = multiprocessors;
      ForwardCall call = drawn;
      checker.run(std::to_string(multiprocessors) + " multiprocessors", call, "sm80");
      if (multiprocessors == 1000) first = call;
      if (!same(call.o, first.o) || !same(call.final_state, first.final_state)) {
        checker.fail(std::to_string(multiprocessors) + " multiprocessors", "sm80", "other bits");
      }
    }
  }
  cuda_emulation::settings().multiprocessors = as_it_was;
  EXPECT_EQ(checker.finish(), 0);
}

}  // namespace
}  // namespace flash_qla::testing
