// Groups of tests about the backward of path sm80: of cuda_generic_test on a GPU, and of cuda_emulation_test on the
// CPU.
#pragma once

#include "sm80_tests.cuh"

namespace flash_qla::testing {

inline BackwardCall draw_sm80_backward(DType type, const HeadDims& dims, Random& random) {
  static const std::vector<int64_t> kLengths = {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200};
  Shape s;
  s.dtype = type;
  s.K = dims.K;
  s.V = dims.V;
  s.T = random.pick(kLengths);
  s.Hq = random.integer(1, 2);
  s.Hv = s.Hq * (s.K * s.V > 128 * 128 ? random.integer(1, 2) : random.integer(1, 3));
  if (random.chance(0.5)) {
    s.cu_seqlens = draw_offsets(s.T, random);
  } else {
    s.B = random.integer(1, 2);
  }
  Features f = draw_features(type, random);
  f.any_length = random.chance(0.3);
  const bool cumsum = f.g && !f.gate && random.chance(0.3);
  BackwardCall call;
  call.draw(s, f, cumsum, random.chance(0.9), random.chance(0.5), random);
  if (random.chance(0.2)) {  // any gradient may be unwanted
    for (auto [name, buffer] : call.outputs()) {
      if (random.chance(0.5)) *buffer = Buffer();
    }
  }
  return call;
}

// Every option and gradient, drawn.
inline int64_t test_sm80_backward_of(const Settings& settings, Arena& arena, const Oracle& oracle, DType type,
                                     const HeadDims& dims) {
  char name[80];
  std::snprintf(name, sizeof(name), "backward, sm80, K %lld V %lld %s", static_cast<long long>(dims.K),
                static_cast<long long>(dims.V), name_of(type));
  Checker checker(name, settings, arena, "sm80");
  const auto draw = [&](Random& r) { return draw_sm80_backward(type, dims, r); };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const BackwardCall& call) {
    checker.check(what, call, "sm80", oracle.path, oracle.device);
  });
  return checker.finish();
}
inline int64_t test_sm80_backward(const Settings& settings, Arena& arena, const Oracle& oracle) {
  int64_t failures = 0;
  for (const HeadDims& dims : kSm80Dims) {
    for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
      failures += test_sm80_backward_of(settings, arena, oracle, type, dims);
    }
  }
  return failures;
}

}  // namespace flash_qla::testing
