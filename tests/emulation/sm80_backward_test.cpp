// The backward of path sm80 on the CPU, against the recurrence in double precision.
#include "sm80_backward_tests.cuh"

#include <gtest/gtest.h>

#include <cstdlib>

#include "memory.h"
#include "scheduler.h"

namespace flash_qla::testing {
namespace {

// Few enough for a minute. FLASH_QLA_CASES and FLASH_QLA_SEED draw others.
Settings settings_for(int64_t cases) {
  Settings settings;
  settings.cases = cases;
  if (const char* given = std::getenv("FLASH_QLA_CASES")) settings.cases = std::atoi(given);
  if (const char* given = std::getenv("FLASH_QLA_SEED")) settings.seed = static_cast<uint64_t>(std::atoi(given));
  return settings;
}

class Sm80Backward : public ::testing::TestWithParam<HeadDims> {};

TEST_P(Sm80Backward, Drawn) {
  Arena arena(kPieces);
  const HeadDims dims = GetParam();
  cuda_emulation::counters() = {};
  const Settings settings = settings_for(dims.K * dims.V > 128 * 128 ? 6 : 10);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ(test_sm80_backward_of(settings, arena, kHostOracle, type, dims), 0);
  }
  EXPECT_GT(cuda_emulation::counters().products, 0);
  EXPECT_EQ(cuda_emulation::counters().bank_conflicts, 0);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm80Backward, ::testing::ValuesIn(kSm80Dims), [](const auto& info) {
  return "K" + std::to_string(info.param.K) + "V" + std::to_string(info.param.V);
});

}  // namespace
}  // namespace flash_qla::testing
