// Path sm80 on the CPU, against the recurrence in double precision.
#include <gtest/gtest.h>

#include "checker.h"
#include "memory.h"
#include "scheduler.h"

namespace flash_qla::testing {
namespace {

struct HeadDims {
  int64_t K, V;
};
constexpr HeadDims kDims[] = {{64, 64}, {96, 192}, {100, 60}, {128, 128}, {128, 256}, {192, 192}, {256, 256}, {16, 16}};

Shape draw_sm80_shape(DType type, HeadDims dims, Random& random) {
  static const std::vector<int64_t> kLengths = {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200};
  Shape s;
  s.dtype = type;
  s.K = dims.K;
  s.V = dims.V;
  s.T = random.pick(kLengths);
  s.Hq = random.integer(1, 2);
  s.Hv = s.Hq * (s.K * s.V > 128 * 128 ? 1 : random.integer(1, 3));
  if (random.chance(0.5)) {
    s.cu_seqlens = draw_offsets(s.T, random);
  } else {
    s.B = random.integer(1, 2);
  }
  return s;
}

ForwardCall draw_sm80_forward(DType type, HeadDims dims, Random& random) {
  const Shape s = draw_sm80_shape(type, dims, random);
  const PoolFeatures pool = draw_pool_features(false, !s.cu_seqlens.empty(), random);
  ForwardCall call;
  call.draw(s, draw_features(type, random), pool, false, random);
  return call;
}

class Sm80 : public ::testing::TestWithParam<HeadDims> {};

TEST_P(Sm80, DrawnForward) {
  Arena arena(kPieces);
  Settings settings;
  settings.cases = GetParam().K * GetParam().V > 128 * 128 ? 10 : 16;
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    Checker checker(std::string("forward, sm80 emulated, ") + (type == DType::kBFloat16 ? "bf16" : "fp16"), settings,
                    arena, "sm80");
    const auto draw = [&](Random& r) { return draw_sm80_forward(type, GetParam(), r); };
    for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
      ++cuda_emulation::settings().seed;
      checker.check(what, call, "sm80", "reference", FLASH_QLA_CPU, {.emulation = true});
    });
    EXPECT_EQ(checker.finish(), 0);
  }
  const auto& counters = cuda_emulation::counters();
  std::printf("%lld products, %lld loads of matrices, %lld bank conflicts\n", static_cast<long long>(counters.products),
              static_cast<long long>(counters.matrix_loads), static_cast<long long>(counters.bank_conflicts));
}

BackwardCall draw_sm80_backward(DType type, HeadDims dims, Random& random) {
  Shape s = draw_sm80_shape(type, dims, random);
  while (s.T == 0) s = draw_sm80_shape(type, dims, random);
  const Features f = draw_features(type, random);
  BackwardCall call;
  call.draw(s, f, f.g && !f.gate && random.chance(0.3), random.chance(0.9), random.chance(0.5), random);
  if (random.chance(0.3)) {  // any gradient may be unwanted
    for (auto [name, buffer] : call.outputs()) {
      if (random.chance(0.5)) *buffer = Buffer();
    }
  }
  return call;
}

TEST_P(Sm80, DrawnBackward) {
  Arena arena(kPieces);
  Settings settings;
  settings.cases = GetParam().K * GetParam().V > 128 * 128 ? 10 : 16;
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    Checker checker(std::string("backward, sm80 emulated, ") + (type == DType::kBFloat16 ? "bf16" : "fp16"), settings,
                    arena, "sm80");
    const auto draw = [&](Random& r) { return draw_sm80_backward(type, GetParam(), r); };
    for_each_case(settings, settings.cases, draw, [&](const std::string& what, const BackwardCall& call) {
      ++cuda_emulation::settings().seed;
      checker.check(what, call, "sm80", "reference", FLASH_QLA_CPU);
    });
    EXPECT_EQ(checker.finish(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm80, ::testing::ValuesIn(kDims), [](const auto& info) {
  return "K" + std::to_string(info.param.K) + "V" + std::to_string(info.param.V);
});

}  // namespace
}  // namespace flash_qla::testing
