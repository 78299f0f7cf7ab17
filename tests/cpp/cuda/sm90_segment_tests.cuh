// The group of cuda_generic_test that is about the Hopper backward's segments (docs/notebook/sm90_backward.md).
#pragma once

#include "sm90_backward_tests.cuh"
#include "sm90_split_tests.cuh"

namespace flash_qla::testing {

// Both passes cut wherever it is possible, against the oracle: edges that warm up and exact ones, in one head too.
inline int64_t test_sm90_segments(const Settings& settings, Arena& arena) {
  Checker checker("backward in segments, sm90", settings, arena, "sm90");
  const auto draw = [&](Random& r) {
    static const std::vector<int64_t> kLengths = {300, 640, 1000, 1537, 2100};
    Shape s;
    s.dtype = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    s.K = s.V = 128;
    s.Hq = r.integer(1, 2);
    s.Hv = s.Hq * r.integer(1, 3);
    do {
      s.T = settings.small ? r.integer(256, 400) : r.pick(kLengths);
      s.cu_seqlens = r.chance(0.6) ? draw_offsets(s.T, r) : std::vector<int64_t>{};
    } while (tokens_of(s) < 256);
    if (s.cu_seqlens.empty()) s.B = r.integer(1, 2);
    Features f = draw_features(s.dtype, r);
    f.initial_state = true;
    f.force_intra_cp = true;
    BackwardCall call;
    call.draw(s, f, false, true, r.chance(0.7), r);
    if (!f.gate && !f.strong_decay) mix_gates(call.in.g, r);
    leave_out_some(call, r);
    return call;
  };
  for_each_case(settings, settings.small ? settings.cases : settings.cases / 3, draw,
                [&](const std::string& what, const BackwardCall& call) {
                  checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
                });
  if (!settings.only_cases.empty()) return checker.finish();
  // Where nothing decays each token's dg is nearly the one number <dS, S>: of a pair of chunks, and of several, in
  // segments and whole. Where little of it is left, of what independent numbers of these norms would give, the
  // roundings of any kernel are past dg's bound (docs/numerics.md).
  Random random(43);
  for (const int64_t tokens : {127, 128, 190, 640}) {
    for (int i = 0; i < 6; ++i) {
      Shape s;
      s.dtype = i % 3 < 2 ? DType::kBFloat16 : DType::kFloat16;
      s.K = s.V = 128;
      s.Hv = 4;
      s.T = tokens;
      Features f;
      f.initial_state = true;
      f.force_intra_cp = i % 2 == 0;
      f.v_first = i % 4 < 2;
      BackwardCall call;
      call.draw(s, f, false, true, true, random);
      call.in.g.fill([&](int64_t, int64_t, int64_t, int64_t) { return -1e-3 * random.uniform(); });
      checker.check("no decay, " + std::to_string(tokens) + " tokens, " + std::to_string(i), call, "sm90",
                    "cuda_reference", FLASH_QLA_CUDA, {.emulation = true});
    }
  }
  return checker.finish();
}

// One long sequence of so many heads that its passes take half of the card, beside the kernel that makes their tiles:
// heads that forget beside some that do not, or do from a token on alone.
inline int64_t test_sm90_long_sequence(const Settings& settings, Arena& arena) {
  Checker checker("backward of a long sequence, sm90", settings, arena, "sm90");
  Random random(41);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool packed : {true, false}) {
      Shape s;
      s.dtype = type;
      s.K = s.V = 128;
      s.Hq = settings.small ? 2 : packed ? 8 : 5;
      s.Hv = settings.small ? 4 : packed ? 16 : 15;
      s.T = settings.small ? 2113 : packed ? 4480 : 2951;
      if (packed) s.cu_seqlens = {3, s.T - 60};
      Features f;
      f.initial_state = true;
      BackwardCall call;
      call.draw(s, f, packed, true, true, random);
      mix_gates(call.in.g, random);
      checker.check(packed ? "packed" : "dense", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
    }
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
