// The paths cuda_generic and cuda_reference on the CPU, against the recurrence in double precision.
#include <gtest/gtest.h>

#include "checker.h"
#include "memory.h"

namespace flash_qla::testing {
namespace {

// The reference takes O(T K V) steps of std::vector arithmetic, so these shapes are small.
constexpr int64_t kLongest = 130, kLargestState = 66 * 66;

Settings few_cases() {
  Settings settings;
  settings.cases = 30;
  return settings;
}

TEST(Generic, DrawnForward) {
  Arena arena(kPieces);
  Checker checker("forward, cuda_generic emulated", few_cases(), arena, "cuda_generic");
  const auto draw = [](Random& r) { return draw_forward(draw_dtype(r), kLongest, kLargestState, r); };
  for_each_case(few_cases(), few_cases().cases, draw, [&](const std::string& what, const ForwardCall& call) {
    checker.check(what, call, "cuda_generic", "reference", FLASH_QLA_CPU);
  });
  EXPECT_EQ(checker.finish(), 0);
}

TEST(Generic, DrawnBackward) {
  Arena arena(kPieces);
  Checker checker("backward, cuda_generic emulated", few_cases(), arena, "cuda_generic");
  const auto draw = [](Random& r) { return draw_backward(draw_dtype(r), kLongest, kLargestState, r); };
  for_each_case(few_cases(), few_cases().cases, draw, [&](const std::string& what, const BackwardCall& call) {
    checker.check(what, call, "cuda_generic", "reference", FLASH_QLA_CPU);
  });
  EXPECT_EQ(checker.finish(), 0);
}

TEST(Generic, DrawnOracle) {
  Arena arena(kPieces);
  Checker checker("cuda_reference emulated", few_cases(), arena, "cuda_reference");
  const auto draw = [](Random& r) { return draw_forward(DType::kFloat64, kLongest, kLargestState, r); };
  for_each_case(few_cases(), 12, draw, [&](const std::string& what, const ForwardCall& call) {
    checker.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, {.exact_bound = 1e-12});
  });
  const auto draw_back = [](Random& r) { return draw_backward(DType::kFloat64, kLongest, kLargestState, r); };
  for_each_case(few_cases(), 4, draw_back, [&](const std::string& what, const BackwardCall& call) {
    checker.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, {.exact_bound = 1e-12});
  });
  EXPECT_EQ(checker.finish(), 0);
}

}  // namespace
}  // namespace flash_qla::testing
