// The groups of cuda_generic_test that are about the Hopper backward (path sm90), but for its segments.
#pragma once

#include "checker.h"

namespace flash_qla::testing {

// Takes the state before a call from some, and the gradient of o from others. Drawn last, and from numbers of their
// own: whatever else is drawn stays as it is.
inline void leave_out_some(BackwardCall& call, Random& r) {
  // So that the calls which tools/sanitize.sh picks by number stay whole.
  constexpr uint64_t kFirst = 69;
  Random own(kFirst + static_cast<uint64_t>(r.integer(0, int64_t{1} << 62)));
  if (own.chance(0.3)) {
    call.in.initial_state = Buffer();
    call.in.features.initial_state = false;
    if (own.chance(0.5)) call.dh0 = Buffer();  // else wanted all the same
  }
  if (call.dht.present() && own.chance(0.15)) call.d_o = Buffer();
}

// The Hopper backward against the oracle: every option, layout and length. few_tokens: the calls of a few tokens alone,
// as the library takes them, for where single numbers decide they are not this path's (docs/numerics.md); else the
// others, by this path.
inline int64_t test_sm90_backward(const Settings& settings, Arena& arena, bool few_tokens) {
  Checker checker(few_tokens ? "backward of few tokens" : "backward, sm90", settings, arena,
                  few_tokens ? nullptr : "sm90");
  const auto draw = [&](Random& r) {
    const DType type = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    Shape s;
    do {
      s = draw_shape(type, settings.longest(), 256 * 256, r);
    } while (tokens_of(s) == 0);
    s.K = s.V = 128;
    Features f = draw_features(type, r);
    f.initial_state = true;  // but for leave_out_some()
    f.force_intra_cp = r.chance(0.3);
    BackwardCall call;
    call.draw(s, f, f.g && !f.gate && r.chance(0.3), r.chance(0.9), r.chance(0.5), r);
    if (r.chance(0.3)) {
      for (auto [name, buffer] : call.outputs()) {
        if (r.chance(0.5) && !(f.gate && name == "dg")) *buffer = Buffer();  // a gate's dg measures dA_log's terms
      }
    }
    leave_out_some(call, r);
    return call;
  };
  // Many have a few tokens alone: more draws, for about as many calls by this path as a group has.
  for_each_case(settings, few_tokens ? settings.cases : 4 * settings.cases, draw,
                [&](const std::string& what, const BackwardCall& call) {
                  const bool few = tokens_of(call.in.shape) <= 64;
                  if (few != few_tokens) return;
                  checker.check(what, call, few ? nullptr : "sm90", "cuda_reference", FLASH_QLA_CUDA);
                });
  return checker.finish();
}

// Chunk slots are bounded by tokens / 64 + sequences, so these heads together would take 2 GB of scratch: they go in
// two halves, of which the first is the larger.
inline int64_t test_sm90_head_halves(const Settings& settings, Arena& arena) {
  Checker checker("heads in halves, sm90", settings, arena, "sm90");
  Random random(17);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.Hq = 3;
  s.Hv = 96;
  s.K = s.V = 128;
  s.T = 750;
  for (int64_t t = 0; t <= s.T; t += 3) s.cu_seqlens.push_back(t);
  for (const bool options : {false, true}) {
    Features f;
    f.l2norm = f.gate = f.dt_bias = f.sigmoid = options;
    BackwardCall call;
    call.draw(s, f, false, true, false, random);
    checker.check(options ? "all options" : "no options", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
  }
  return checker.finish();
}

// One sequence whose heads nearly fill the card: the serial passes then make what other calls leave to kernels of their
// own (docs/notebook/sm90_backward.md).
inline int64_t test_sm90_one_sequence(const Settings& settings, Arena& arena) {
  Checker checker("one sequence of many heads, sm90", settings, arena, "sm90");
  Random random(29);
  Shape s;
  // Few enough for the oracle's scratch, 8 MB a head, to fit into a small run's memory.
  s.Hq = settings.small ? 13 : 16;
  s.Hv = 2 * s.Hq;
  s.K = s.V = 128;
  s.T = settings.small ? 129 : 321;
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool options : {false, true}) {
      s.dtype = type;
      Features f;
      f.initial_state = !options;
      f.l2norm = f.gate = f.dt_bias = f.sigmoid = options;
      BackwardCall call;
      call.draw(s, f, !options, true, !options, random);
      checker.check(options ? "all options" : "cumsum and states", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
    }
  }
  return checker.finish();
}

// Packed sequences, empty ones among them, so many (more than 726 blocks of one half) and so short that a block of the
// serial passes goes on from one to another (docs/notebook/sm90_backward.md), and dense ones, fewer, of which a block
// takes both halves of V.
inline int64_t test_sm90_many_sequences(const Settings& settings, Arena& arena) {
  Checker checker("backward of many sequences, sm90", settings, arena, "sm90");
  Random random(37);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool packed : {true, false}) {
      Shape s;
      s.dtype = type;
      s.K = s.V = 128;
      if (packed) {
        s.Hq = 2;
        s.Hv = 8;
        s.cu_seqlens = {0};
        for (int n = 0; n < 24; ++n) {
          const int64_t most = settings.small ? 70 : 400;
          s.cu_seqlens.push_back(s.cu_seqlens.back() + (random.chance(0.2) ? 0 : random.integer(1, most)));
        }
        s.T = s.cu_seqlens.back() + 7;
      } else {
        s.Hq = s.Hv = 4;
        s.B = 10;
        s.T = settings.small ? 70 : 333;
      }
      Features f;
      f.initial_state = true;
      f.l2norm = f.sigmoid = !packed;
      BackwardCall call;
      call.draw(s, f, packed, true, true, random);
      checker.check(packed ? "packed" : "dense", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
    }
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
