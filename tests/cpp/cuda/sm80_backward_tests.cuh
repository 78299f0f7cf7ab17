// Groups of tests about the backward of path sm80: of cuda_generic_test on a GPU, and of cuda_emulation_test on the
// CPU.
#pragma once

#include <algorithm>

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
    checker.check(what, call, "sm80", oracle.path, oracle.device, {.emulation = true});
  });
  return checker.finish();
}
inline int64_t test_sm80_backward(const Settings& settings, Arena& arena, const Oracle& oracle) {
  int64_t failures = 0;
  for (const HeadDims& dims : kSm80Dims) {
    for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
      if (takes(dims, type)) failures += test_sm80_backward_of(settings, arena, oracle, type, dims);
    }
  }
  return failures;
}

// Errors head by head with the gates of most models: three quarters of the heads decay by a few percent a token, the
// others do not. A state's gradient is the sum of the tokens that reach it, in heads that decay those of the first
// chunk above all: it keeps more digits than bf16 has (docs/numerics.md), though no bound of a single head asks for
// them. `dbeta`: gets the median head's error of it.
inline int64_t test_sm80_backward_heads_of(const Settings& settings, Arena& arena, const Oracle& oracle,
                                           const HeadDims& dims, double& dbeta) {
  constexpr double kMostOfMedian = 1e-3;  // of dh0: seen 3e-4 to 6e-4; of a sum of bf16 operands 1.7e-3
  const std::string what = "K " + std::to_string(dims.K) + " V " + std::to_string(dims.V);
  Checker checker("backward, sm80, heads, " + what, settings, arena, "sm80");
  Random random(1);  // errors of other draws differ by a tenth
  Shape s;
  s.dtype = DType::kBFloat16;
  s.T = 160;
  s.Hq = 4;
  s.Hv = 8;
  s.K = dims.K;
  s.V = dims.V;
  Features f;
  f.initial_state = true;
  BackwardCall call;
  call.draw(s, f, false, true, true, random);
  call.in.g.fill([&](int64_t, int64_t, int64_t head, int64_t) {
    return head % 4 == 0 ? 0.0 : -std::log1p(std::exp(random.normal())) / 16;
  });
  BackwardCall expected = call;
  if (const std::string error = run_call(expected, oracle.path, oracle.device, arena); !error.empty()) {
    checker.fail(what, oracle.path, error);
    return checker.finish();
  }
  checker.run(what, call, "sm80");
  const NamedBuffers got = call.outputs(), wanted = expected.outputs();
  for (size_t i = 0; i < got.size(); ++i) {
    const auto& [name, buffer] = got[i];
    if (!buffer->present()) continue;
    const int dim = head_dim(name);
    std::vector<double> errors;
    for (int64_t head = 0; head < buffer->host().shape[dim]; ++head) {
      Buffer part = buffer->slice(dim, head, head + 1), exact = wanted[i].second->slice(dim, head, head + 1);
      errors.push_back(relative_error(part, exact, dim));
    }
    std::sort(errors.begin(), errors.end());
    const double median = (errors[errors.size() / 2] + errors[(errors.size() - 1) / 2]) / 2;
    std::printf("  %s %s: median head %.2e, worst %.2e\n", what.c_str(), name.c_str(), median, errors.back());
    if (name == "dbeta") dbeta = median;
    const double most = name == "dh0" ? kMostOfMedian : bound(name, s.dtype, dtype(buffer->shape_view()));
    if (!(median <= most)) checker.fail(what, "sm80", name + ": the median head differs by " + std::to_string(median));
  }
  return checker.finish();
}

inline int64_t test_sm80_backward_heads(const Settings& settings, Arena& arena, const Oracle& oracle) {
  // Of dbeta: seen 2.6e-3; where it is an inner product of two tensors in bf16 3.0e-3. A single mean, because what the
  // median heads of one shape vary by is as much as lies between.
  constexpr double kMostOfMean = 2.8e-3;
  constexpr HeadDims kDims[] = {{64, 64}, {128, 128}, {256, 256}};
  int64_t failures = 0;
  double mean = 0.0;
  for (const HeadDims& dims : kDims) {
    double dbeta = NAN;
    failures += test_sm80_backward_heads_of(settings, arena, oracle, dims, dbeta);
    mean += dbeta / std::size(kDims);
  }
  const bool exact = mean <= kMostOfMean;
  std::printf("%s dbeta: median head %.2e, mean of %zu\n", exact ? " " : "FAILED", mean, std::size(kDims));
  return failures + (exact ? 0 : 1);
}

// dbeta does not have the rounding of Z, unless beta is too small to divide by: a token whose Z bf16 does not hold. Of
// all six value heads dbeta is <Z, E> = <q, k> <dO, v>, whatever beta.
inline int64_t test_sm80_backward_betas(const Settings& settings, Arena& arena) {
  Checker checker("backward, sm80, betas", settings, arena, "sm80");
  static const std::vector<double> kBetas = {1.0, -0.5, 0x1p-20, 0x1p-30, 0x1p-31, 0.0};
  constexpr double kRounding = 0x1p-8;  // of 1 + 2^-8 in bf16, which is <q, k>
  for (const int64_t K : {64, 256}) {
    Random random(settings.seed);
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = 65;
    s.Hv = static_cast<int64_t>(kBetas.size());
    s.K = K;
    s.V = 64;
    Features f;
    f.g = false;
    f.scale = 1.0;
    BackwardCall call;
    call.draw(s, f, false, true, false, random);
    // Keys of both halves of a block's warps, and of both slices.
    const auto key = [&](int64_t, int64_t, int64_t, int64_t i) { return i == 0 ? 1.0 : i == K - 1 ? 0x1p-4 : 0.0; };
    call.in.q.fill(key);
    call.in.k.fill(key);
    call.in.v.fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
    call.in.beta.fill([](int64_t, int64_t, int64_t head, int64_t) { return kBetas[static_cast<size_t>(head)]; });
    call.d_o.fill([](int64_t, int64_t token, int64_t, int64_t) { return token == 0 ? 1.0 : 0.0; });
    const std::string what = "K " + std::to_string(K);
    checker.run(what, call, "sm80");
    const Tensor dbeta = call.dbeta.host();
    for (int64_t head = 0; head < s.Hv; ++head) {
      const double beta = kBetas[static_cast<size_t>(head)], wanted = (1.0 + kRounding) * static_cast<double>(s.V);
      const double error = std::abs(load(dbeta, offset_of(dbeta, 0, 0, head)) / wanted - 1.0);
      if (!(error <= (std::abs(beta) < 0x1p-30 ? kRounding : 1e-6))) {
        checker.fail(what, "sm80", "head " + std::to_string(head) + ": dbeta differs by " + std::to_string(error));
      }
    }
  }
  return checker.finish();
}

// Buffers of a backward call that have a row for each token, and those that have one for each sequence.
using BackwardBuffers = std::vector<Buffer*>;
inline BackwardBuffers token_buffers(BackwardCall& c) {
  return {&c.in.q, &c.in.k, &c.in.v, &c.in.g, &c.in.beta, &c.d_o, &c.dq, &c.dk, &c.dv, &c.dg, &c.dbeta};
}
inline BackwardBuffers state_buffers(BackwardCall& c) { return {&c.in.initial_state, &c.dht, &c.dh0}; }

// Checks that the gradients of `part` are those of `whole` in [from, to) of a dimension: of tokens, or of key heads.
inline void check_part(Checker& checker, const std::string& what, BackwardCall part, BackwardCall& whole, int64_t from,
                       int64_t to, int64_t sequence, bool heads) {
  const int64_t group = whole.in.shape.Hv / whole.in.shape.Hq;
  const NamedBuffers got = part.outputs();
  NamedBuffers all = whole.outputs();
  for (size_t i = 0; i < got.size(); ++i) {
    const std::string& name = got[i].first;
    if (!got[i].second->present()) continue;
    const bool of_keys = name == "dq" || name == "dk";
    const int64_t scale = heads && !of_keys ? group : 1;
    const Buffer expected = name == "dh0" ? all[i].second->slice(heads ? 1 : 0, heads ? from * scale : sequence,
                                                                 heads ? to * scale : sequence + 1)
                                          : all[i].second->slice(heads ? 2 : 1, from * scale, to * scale);
    if (!same(*got[i].second, expected)) checker.fail(what, "sm80", name + " differs");
  }
}

// The bits of a sequence depend on nothing but the sequence, those of a key head on nothing but its heads.
inline int64_t test_sm80_backward_invariance(const Settings& settings, Arena& arena) {
  Checker checker("backward: bits depend on the sequence and the heads alone, sm80", settings, arena, "sm80");
  Random random(13);
  for (const HeadDims& dims : {HeadDims{64, 48}, HeadDims{192, 32}}) {
    Shape s;
    s.dtype = draw_half(random);
    s.T = 300;
    s.Hq = 2;
    s.Hv = 4;
    s.K = dims.K;
    s.V = dims.V;
    s.cu_seqlens = {0, 17, 17, 209, 300};
    Features f;
    f.initial_state = f.l2norm = true;
    f.cp_mode = FLASH_QLA_CP_OFF;
    BackwardCall batch;
    batch.draw(s, f, false, true, true, random);
    BackwardCall whole = batch;
    checker.run("batch", whole, "sm80");
    for (int64_t n = 0; n < s.N(); ++n) {
      const int64_t begin = s.cu_seqlens[static_cast<size_t>(n)], end = s.cu_seqlens[static_cast<size_t>(n) + 1];
      if (begin == end) continue;
      BackwardCall alone = batch;
      for (Buffer* x : token_buffers(alone)) *x = x->slice(1, begin, end);
      for (Buffer* x : state_buffers(alone)) *x = x->slice(0, n, n + 1);
      alone.in.shape.T = end - begin;
      alone.in.shape.cu_seqlens.clear();
      alone.in.cu_seqlens = Buffer();
      checker.run("alone", alone, "sm80");
      check_part(checker, "sequence " + std::to_string(n), alone, whole, begin, end, n, false);
    }
    for (int64_t head = 0; head < s.Hq; ++head) {
      BackwardCall alone = batch;
      const int64_t group = s.Hv / s.Hq;
      for (Buffer* x : token_buffers(alone)) {
        const bool of_keys = x == &alone.in.q || x == &alone.in.k || x == &alone.dq || x == &alone.dk;
        *x = of_keys ? x->slice(2, head, head + 1) : x->slice(2, head * group, (head + 1) * group);
      }
      for (Buffer* x : state_buffers(alone)) *x = x->slice(1, head * group, (head + 1) * group);
      alone.in.shape.Hq = 1;
      alone.in.shape.Hv = group;
      checker.run("head", alone, "sm80");
      check_part(checker, "key head " + std::to_string(head), alone, whole, head, head + 1, 0, true);
    }
  }
  return checker.finish();
}

// Other numbers, NaN or infinity in one sequence leave all others as they are, bit for bit.
inline int64_t test_sm80_backward_neighbours(const Settings& settings, Arena& arena) {
  Checker checker("backward: neighbours, sm80", settings, arena, "sm80");
  Random random(7);
  for (const HeadDims& dims : {HeadDims{64, 64}, HeadDims{100, 60}, HeadDims{192, 32}}) {
    for (const double bad : {0.25, static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      Shape s;
      s.dtype = draw_half(random);
      s.T = 337;
      s.Hv = 2;
      s.K = dims.K;
      s.V = dims.V;
      s.cu_seqlens = {0, 70, 133, 260, 261, 333};
      Features f;
      f.initial_state = true;
      BackwardCall clean;
      clean.draw(s, f, false, true, random.chance(0.5), random);
      BackwardCall dirty = clean;
      // Sequences 1 and 3: the first, one in the middle and the last token of one, the only token of the other.
      for (Buffer* x : {&dirty.in.q, &dirty.in.k, &dirty.in.v, &dirty.in.g, &dirty.in.beta, &dirty.d_o}) {
        const Tensor t = x->host();
        x->fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
          return j == 70 || j == 100 || j == 132 || j == 260 ? bad : load(t, offset_of(t, i, j, k, l));
        });
      }
      for (BackwardCall* call : {&clean, &dirty}) checker.run("backward", *call, "sm80");
      const NamedBuffers before = clean.outputs(), after = dirty.outputs();
      for (size_t i = 0; i < before.size(); ++i) {
        const auto& [name, buffer] = before[i];
        if (!buffer->present()) continue;
        for (int64_t n = 0; n < s.N(); ++n) {
          const int64_t begin = name == "dh0" ? n : s.cu_seqlens[static_cast<size_t>(n)],
                        end = name == "dh0" ? n + 1 : s.cu_seqlens[static_cast<size_t>(n) + 1];
          const int dim = name == "dh0" ? 0 : 1;
          const bool differs = !same(buffer->slice(dim, begin, end), after[i].second->slice(dim, begin, end));
          if (differs != (n == 1 || n == 3)) checker.fail("sequence " + std::to_string(n), "sm80", name);
        }
      }
    }
  }
  return checker.finish();
}

inline void check_same(Checker& checker, const std::string& what, BackwardCall& a, BackwardCall& b) {
  const NamedBuffers got = a.outputs(), wanted = b.outputs();
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i].second->present() && !same(*got[i].second, *wanted[i].second)) {
      checker.fail(what, "sm80", "other bits of " + got[i].first);
    }
  }
}

// Offsets that lead anywhere, and numbers of every kind: nothing but the outputs is written, and a well-formed call
// behind it has the right bits.
inline int64_t test_sm80_backward_malformed(const Settings& settings, Arena& arena) {
  Checker checker("backward: malformed device data, sm80", settings, arena, "sm80");
  Random probe_random(97);
  const BackwardCall probe = draw_sm80_backward(DType::kBFloat16, {64, 64}, probe_random);
  BackwardCall right = probe;
  checker.run("well-formed", right, "sm80");
  for (int64_t i = 0; i < settings.cases; ++i) {
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    const HeadDims drawn = kSm80Dims[random.integer(0, std::size(kSm80Dims) - 1)];
    const HeadDims dims = {std::max(drawn.K, int64_t{32}), std::min<int64_t>(drawn.V, 64)};
    BackwardCall call = draw_sm80_backward(draw_half(random), dims, random);
    const int64_t T = call.in.shape.T;
    if (call.in.cu_seqlens.present() && random.chance(0.8)) {
      const bool inside = random.chance(0.4);
      call.in.cu_seqlens.fill([&](int64_t, int64_t, int64_t, int64_t) {
        const double kind = inside ? 0.0 : random.uniform();
        if (kind < 0.6) return static_cast<double>(random.integer(0, T));
        if (kind < 0.8) return static_cast<double>(random.chance(0.5) ? -random.integer(1, 3) : T + 1);
        return random.chance(0.5) ? -2147483648.0 : 2147483647.0;
      });
    }
    for (Buffer* x : {&call.in.q, &call.in.k, &call.in.v, &call.in.g, &call.in.beta, &call.in.initial_state, &call.d_o,
                      &call.dht}) {
      if (!x->present() || random.chance(0.7)) continue;
      static const std::vector<double> kBad = {NAN, INFINITY, -INFINITY, 1e30, -1e4, 88.0};
      const double bad = random.pick(kBad);
      const Tensor t = x->host();
      x->fill([&](int64_t b, int64_t j, int64_t k, int64_t l) {
        return random.chance(0.05) ? bad : load(t, offset_of(t, b, j, k, l));
      });
    }
    checker.run("case " + std::to_string(i), call, "sm80");
    BackwardCall again = probe;
    checker.run("well-formed, behind case " + std::to_string(i), again, "sm80");
    check_same(checker, "well-formed, behind case " + std::to_string(i), again, right);
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
