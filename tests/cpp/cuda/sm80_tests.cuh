// Groups of tests about path sm80: of cuda_generic_test on a GPU, and of cuda_emulation_test on the CPU.
#pragma once

#include "checker.h"
#include "invariance_tests.cuh"

namespace flash_qla::testing {

// Head dimensions that reach every kernel, with and without columns that are padded.
struct HeadDims {
  int64_t K, V;
};
inline constexpr HeadDims kSm80Dims[] = {{64, 64},   {96, 192}, {100, 60}, {128, 128}, {128, 256}, {192, 192},
                                         {256, 256}, {16, 16},  {5, 3},    {80, 40},   {32, 16}};
// In bf16 so few keys are left to another path.
inline bool takes(const HeadDims& dims, DType type) { return dims.K >= 32 || type == DType::kFloat16; }

inline DType draw_half(Random& random) { return random.chance(0.5) ? DType::kBFloat16 : DType::kFloat16; }

inline ForwardCall draw_sm80_forward(DType type, const HeadDims& dims, Random& random) {
  static const std::vector<int64_t> kLengths = {0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200};
  Shape s;
  s.dtype = type;
  s.K = dims.K;
  s.V = dims.V;
  s.T = random.pick(kLengths);
  s.Hq = random.integer(1, 2);
  s.Hv = s.Hq * (s.K * s.V > 128 * 128 ? 1 : random.integer(1, 5));
  if (random.chance(0.5)) {
    s.cu_seqlens = draw_offsets(s.T, random);
  } else {
    s.B = random.integer(1, 2);
  }
  Features f = draw_features(type, random);
  f.any_length = random.chance(0.3);
  ForwardCall call;
  call.draw(s, f, draw_pool_features(false, !s.cu_seqlens.empty(), random), false, random);
  return call;
}

// Every option and output, drawn.
inline int64_t test_sm80_forward_of(const Settings& settings, Arena& arena, const Oracle& oracle, DType type,
                                    const HeadDims& dims) {
  char name[80];
  std::snprintf(name, sizeof(name), "forward, sm80, K %lld V %lld %s", static_cast<long long>(dims.K),
                static_cast<long long>(dims.V), name_of(type));
  Checker checker(name, settings, arena, "sm80");
  const auto draw = [&](Random& r) { return draw_sm80_forward(type, dims, r); };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
    checker.check(what, call, "sm80", oracle.path, oracle.device, {.emulation = true});
  });
  return checker.finish();
}
inline int64_t test_sm80_forward(const Settings& settings, Arena& arena, const Oracle& oracle) {
  int64_t failures = 0;
  for (const HeadDims& dims : kSm80Dims) {
    for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
      if (takes(dims, type)) failures += test_sm80_forward_of(settings, arena, oracle, type, dims);
    }
  }
  return failures;
}

// Head by head gates that forget within a segment, slowly, or nothing.
inline void mix_sm80_gates(ForwardCall& call, Random& random) {
  static const std::vector<double> kFactors = {0.0, 0.01, 0.05, 0.3, 1.0};
  if (!call.in.g.present() || call.in.features.gate) return;
  std::vector<double> factors;
  for (int64_t head = 0; head < call.in.shape.Hv; ++head) factors.push_back(random.pick(kFactors));
  const Tensor t = call.in.g.host();
  call.in.g.fill([&](int64_t b, int64_t j, int64_t head, int64_t) {
    return factors[static_cast<size_t>(head)] * load(t, offset_of(t, b, j, head));
  });
}

// Sequences that are cut: as exact as whole ones, but for a tenth and what may be dropped.
inline int64_t test_sm80_split(const Settings& settings, Arena& arena, const Oracle& oracle) {
  Checker checker("forward, sm80, cut", settings, arena, "sm80");
  static const std::vector<HeadDims> kDims = {{64, 64}, {96, 48}, {100, 60}, {128, 32}, {192, 16}, {256, 48}};
  const auto draw = [&](Random& random) {
    const HeadDims dims = random.pick(kDims);
    Shape s;
    s.dtype = draw_half(random);
    s.K = dims.K;
    s.V = dims.V;
    s.T = random.integer(250, 640);
    s.Hv = random.integer(1, 2);
    if (random.chance(0.6)) s.cu_seqlens = draw_offsets(s.T, random);
    Features f = draw_features(s.dtype, random);
    f.cp_mode = random.chance(0.5) ? FLASH_QLA_CP_AUTO : FLASH_QLA_CP_INVARIANT;
    f.force_intra_cp = true;
    ForwardCall call;
    call.draw(s, f, draw_pool_features(false, !s.cu_seqlens.empty(), random), false, random);
    mix_sm80_gates(call, random);
    return call;
  };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
    ForwardCall whole = call;
    whole.in.features.cp_mode = FLASH_QLA_CP_OFF;
    checker.check(what, call, "sm80", oracle.path, oracle.device, {.plain = &whole, .emulation = true});
  });
  return checker.finish();
}

// The same as the library plans it: one long sequence of a few heads, and a short one beside it that stays whole.
inline int64_t test_sm80_planned_split(const Settings& settings, Arena& arena, const Oracle& oracle) {
  Checker checker("forward, sm80, planned to be cut", settings, arena, "sm80");
  for (const flash_qla_cp_mode mode : {FLASH_QLA_CP_AUTO, FLASH_QLA_CP_INVARIANT}) {
    for (const bool decays : {false, true}) {
      Random random(19);
      Shape s;
      s.dtype = DType::kBFloat16;
      s.K = 64;
      s.V = 32;
      const int64_t length = 8200;
      s.cu_seqlens = {0, 70, length + 70};
      s.T = length + 80;
      Features f;
      f.cp_mode = mode;
      f.g = decays;
      f.initial_state = f.final_state = true;
      ForwardCall call;
      call.draw(s, f, PoolFeatures{}, false, random);
      ForwardCall whole = call, cut = call;
      whole.in.features.cp_mode = FLASH_QLA_CP_OFF;
      const std::string what = mode == FLASH_QLA_CP_AUTO ? "auto" : "by length";
      checker.check(what, call, "sm80", oracle.path, oracle.device, {.plain = &whole});
      checker.run(what, cut, "sm80");
      checker.run(what, whole, "sm80");
      if (!decays && same(cut.o, whole.o)) checker.fail(what, "sm80", "nothing was cut");
      for (const auto& [begin, end] : {std::pair{int64_t{0}, int64_t{70}}, std::pair{length + 70, s.T}}) {
        if (!same(cut.o.slice(1, begin, end), whole.o.slice(1, begin, end))) {
          checker.fail(what, "sm80", "a sequence that is not cut has other bits");
        }
      }
    }
  }
  return checker.finish();
}

inline int64_t test_sm80_invariance(const Settings& settings, Arena& arena) {
  return test_invariance(settings, arena, "sm80", 64, 48, {64, 128}) +
         test_invariance(settings, arena, "sm80", 128, 128, {64, 128});
}

// Other numbers, NaN or infinity in one sequence leave all others as they are, bit for bit.
inline int64_t test_sm80_neighbours(const Settings& settings, Arena& arena) {
  Checker checker("neighbours, sm80", settings, arena, "sm80");
  Random random(7);
  for (const HeadDims& dims : {HeadDims{64, 64}, HeadDims{100, 60}, HeadDims{128, 32}}) {
    for (const double bad : {0.25, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      Shape s;
      s.dtype = draw_half(random);
      s.T = 337;
      s.Hv = 2;
      s.K = dims.K;
      s.V = dims.V;
      s.cu_seqlens = {0, 70, 133, 260, 261, 333};
      Features f;
      f.initial_state = f.final_state = true;
      PoolFeatures kept;
      kept.h = kept.A = kept.g_cumsum = true;
      ForwardCall clean;
      clean.draw(s, f, kept, false, random);
      ForwardCall dirty = clean;
      // Sequences 1 and 3: the first, one in the middle and the last token of one, the only token of the other.
      const auto spoil = [&](Buffer& x) {
        const Tensor t = x.host();
        x.fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
          return j == 70 || j == 100 || j == 132 || j == 260 ? bad : load(t, offset_of(t, i, j, k, l));
        });
      };
      for (Buffer* x : {&dirty.in.q, &dirty.in.k, &dirty.in.v, &dirty.in.g, &dirty.in.beta}) spoil(*x);
      for (ForwardCall* call : {&clean, &dirty}) checker.run("forward", *call, "sm80");
      int64_t first_chunk = 0;
      for (size_t n = 0; n + 1 < s.cu_seqlens.size(); ++n) {
        const int64_t begin = s.cu_seqlens[n], end = s.cu_seqlens[n + 1], chunks = ceil_div(end - begin, kChunkSize);
        const int64_t row = static_cast<int64_t>(n);
        const auto differs = [&](Buffer ForwardCall::* of, int dim, int64_t from, int64_t to) {
          return (clean.*of).slice(dim, from, to).bytes() != (dirty.*of).slice(dim, from, to).bytes();
        };
        const std::string what = "sequence " + std::to_string(n);
        const bool spoiled = n == 1 || n == 3;
        if (differs(&ForwardCall::o, 1, begin, end) != spoiled) checker.fail(what, "sm80", "o");
        if (differs(&ForwardCall::final_state, 0, row, row + 1) != spoiled) checker.fail(what, "sm80", "final state");
        if (spoiled) {
          first_chunk += chunks;
          continue;
        }
        if (differs(&ForwardCall::A, 1, begin, end)) checker.fail(what, "sm80", "A");
        if (differs(&ForwardCall::g_cumsum, 1, begin, end)) checker.fail(what, "sm80", "g_cumsum");
        if (differs(&ForwardCall::h, 0, first_chunk, first_chunk + chunks)) checker.fail(what, "sm80", "h");
        first_chunk += chunks;
      }
    }
  }
  return checker.finish();
}

// States after listed tokens have the bits of a call that ends there, and do not see a NaN that follows in the chunk.
inline int64_t test_sm80_listed(const Settings& settings, Arena& arena) {
  Checker checker("listed tokens, sm80", settings, arena, "sm80");
  Random random(37);
  for (const HeadDims& dims : {HeadDims{64, 64}, HeadDims{128, 48}}) {
    Shape s;
    s.dtype = draw_half(random);
    s.Hv = 2;
    s.K = dims.K;
    s.V = dims.V;
    s.cu_seqlens = {0, 150, 150, 300};
    s.T = 310;
    Features f;
    f.cp_mode = FLASH_QLA_CP_OFF;
    PoolFeatures kept;
    kept.pool = kept.listed_checkpoints = true;
    ForwardCall clean;
    clean.draw(s, f, kept, false, random);
    constexpr int64_t kListed[] = {20, 21, 214, 284, 150};
    clean.checkpoint_offsets.fill(
        [&](int64_t i, int64_t, int64_t, int64_t) { return static_cast<double>(kListed[i]); });
    const ForwardCall drawn = clean;  // the pool is written in place
    ForwardCall dirty = clean;
    const auto spoil = [&](Buffer& x) {
      const Tensor t = x.host();
      x.fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        return j == 25 || j == 284 || j == 214 ? static_cast<double>(NAN) : load(t, offset_of(t, i, j, k, l));
      });
    };
    for (Buffer* x : {&dirty.in.k, &dirty.in.v, &dirty.in.beta}) spoil(*x);
    for (ForwardCall* call : {&clean, &dirty}) checker.run("listed", *call, "sm80");
    const Tensor slots = clean.checkpoint_indices.host();
    const auto state_of = [&](ForwardCall& call, int64_t i) {
      const int64_t slot = static_cast<int64_t>(load(slots, offset_of(slots, i)));
      return call.pool.slice(0, slot, slot + 1).bytes();
    };
    for (const int64_t i : {0, 1, 2}) {
      if (state_of(clean, i) != state_of(dirty, i)) {
        checker.fail("token " + std::to_string(kListed[i]), "sm80", "the state depends on what follows");
      }
    }
    for (const int64_t i : {0, 1, 4}) {  // of the first sequence: a call of its tokens alone
      ForwardCall alone = drawn;
      for (Buffer* x : {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta, &alone.o}) {
        *x = x->slice(1, 0, kListed[i]);
      }
      alone.in.shape.T = kListed[i];
      alone.in.shape.cu_seqlens.clear();
      alone.in.cu_seqlens = alone.checkpoint_offsets = alone.checkpoint_indices = alone.has_initial = Buffer();
      alone.initial_indices = alone.initial_indices.slice(0, 0, 1);
      alone.final_indices = clean.checkpoint_indices.slice(0, i, i + 1);
      checker.run("alone", alone, "sm80");
      if (state_of(clean, i) != state_of(alone, i)) {
        checker.fail("token " + std::to_string(kListed[i]), "sm80", "the state is not that of a call that ends there");
      }
    }
  }
  return checker.finish();
}

// Offsets and slots that lead anywhere, and numbers of every kind: nothing but the outputs is written, and a
// well-formed call behind it has the right bits.
inline int64_t test_sm80_malformed(const Settings& settings, Arena& arena) {
  Checker checker("malformed device data, sm80", settings, arena, "sm80");
  Random probe_random(97);
  const ForwardCall probe = draw_sm80_forward(DType::kBFloat16, {64, 64}, probe_random);
  ForwardCall right = probe;
  checker.run("well-formed", right, "sm80");
  for (int64_t i = 0; i < settings.cases; ++i) {
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    const HeadDims dims = kSm80Dims[random.integer(0, std::size(kSm80Dims) - 1)];
    const DType type = takes(dims, DType::kBFloat16) ? draw_half(random) : DType::kFloat16;
    ForwardCall call = draw_sm80_forward(type, {dims.K, std::min<int64_t>(dims.V, 64)}, random);
    call.in.features.force_intra_cp = random.chance(0.5);
    const Shape& s = call.in.shape;
    const auto anywhere = [&](Buffer& x, int64_t end) {
      const double how = random.uniform();
      if (!x.present() || how < 0.2) return;
      x.fill([&](int64_t, int64_t, int64_t, int64_t) {
        const double kind = how < 0.6 ? 0.0 : random.uniform();
        if (kind < 0.6) return static_cast<double>(random.integer(0, end));
        if (kind < 0.8) return static_cast<double>(random.chance(0.5) ? -random.integer(1, 3) : end + 1);
        return random.chance(0.5) ? -2147483648.0 : 2147483647.0;
      });
    };
    anywhere(call.in.cu_seqlens, s.T);
    const int64_t slots = call.pool.present() ? call.pool.shape_view().shape[0] : 0;
    for (Buffer* x : {&call.initial_indices, &call.final_indices, &call.checkpoint_indices}) anywhere(*x, slots);
    anywhere(call.checkpoint_offsets, s.B * s.T);
    if (call.checkpoints.present()) anywhere(call.checkpoint_starts, call.checkpoints.shape_view().shape[0]);
    for (Buffer* x : {&call.in.q, &call.in.k, &call.in.v, &call.in.g, &call.in.beta, &call.in.initial_state}) {
      if (!x->present() || random.chance(0.7)) continue;
      static const std::vector<double> kBad = {NAN, INFINITY, -INFINITY, 1e30, -1e4, 88.0};
      const double bad = random.pick(kBad);
      const Tensor t = x->host();
      x->fill([&](int64_t b, int64_t j, int64_t k, int64_t l) {
        return random.chance(0.05) ? bad : load(t, offset_of(t, b, j, k, l));
      });
    }
    checker.run("case " + std::to_string(i), call, "sm80");
    ForwardCall again = probe;
    checker.run("well-formed, behind case " + std::to_string(i), again, "sm80");
    if (!same(again.o, right.o)) checker.fail("well-formed, behind case " + std::to_string(i), "sm80", "other bits");
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
