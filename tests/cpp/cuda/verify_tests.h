// Verification of draft tokens on the CUDA paths: drawn trees, pools and buffers of states, on a GPU or emulated.
#pragma once

#include "checker.h"

namespace flash_qla::testing {

struct VerifyCall {
  using Arguments = VerifyArguments;
  Inputs in;
  Buffer pool, initial_indices, parents, rows;
  Buffer o, states_out;  // states_out: [rows * T, Hv, ..]

  void draw(const Shape& s, const Features& f, Random& random) {
    Features features = f;
    features.initial_state = features.final_state = false;
    in.draw(s, features, random);
    const int64_t slots = s.B + 2, row_count = s.B + 1;
    const DType index = random.chance(0.5) ? DType::kInt32 : DType::kInt64;
    pool = Buffer(f.state_dtype, state_shape(s, f.v_first, slots), Layout::kPaddedRows);
    pool.fill([&](int64_t, int64_t, int64_t, int64_t) { return 0.5 * random.normal(); });
    const bool skips = random.chance(0.4);
    initial_indices = Buffer(index, {s.B});
    initial_indices.fill([&](int64_t, int64_t, int64_t, int64_t) {
      if (skips && random.chance(0.3)) return random.chance(0.5) ? -1.0 : static_cast<double>(slots);
      return static_cast<double>(random.integer(0, slots - 1));
    });
    if (random.chance(0.7)) {
      const double wild = random.chance(0.2) ? 0.2 : 0.0;
      parents = Buffer(index, {s.B, s.T});
      parents.fill([&](int64_t, int64_t t, int64_t, int64_t) {
        if (random.chance(wild)) return random.chance(0.5) ? 2147483647.0 : static_cast<double>(t);
        // As often as not the token before: chains with branches.
        return random.chance(0.5) ? static_cast<double>(t - 1) : static_cast<double>(random.integer(-1, t - 1));
      });
    }
    o = Buffer(s.dtype, {s.B, s.T, s.Hv, s.V}, any_layout(random, f.strided));
    if (random.chance(0.2)) return;
    states_out = Buffer(f.state_dtype, state_shape(s, f.v_first, row_count * s.T));
    if (random.chance(0.4)) return;
    std::vector<int64_t> order(static_cast<size_t>(row_count));
    std::iota(order.begin(), order.end(), 0);
    std::swap(order.front(), order.back());
    rows = Buffer(index, {s.B});
    rows.fill([&](int64_t n, int64_t, int64_t, int64_t) {
      if (random.chance(0.1)) return random.chance(0.5) ? -3.0 : static_cast<double>(row_count);
      return static_cast<double>(order[static_cast<size_t>(n)]);
    });
  }

  NamedBuffers inputs() {
    NamedBuffers all = in.buffers();
    for (auto [name, buffer] : NamedBuffers{{"state_pool", &pool},
                                            {"initial_state_indices", &initial_indices},
                                            {"parents", &parents},
                                            {"states_out_indices", &rows}}) {
      all.push_back({name, buffer});
    }
    return all;
  }
  NamedBuffers outputs() { return {{"o", &o}, {"states_out", &states_out}}; }
  NamedBuffers in_place() { return {}; }
  double least_norm(const std::string&) const { return 0.0; }

  template <class View>
  VerifyArguments arguments(View view) {
    ForwardArguments forward;
    in.set(forward, view);
    VerifyArguments args;
    args.options = forward.options;
    args.q = forward.q;
    args.k = forward.k;
    args.v = forward.v;
    args.g = forward.g;
    args.beta = forward.beta;
    args.A_log = forward.A_log;
    args.dt_bias = forward.dt_bias;
    args.state_pool = view(pool);
    args.initial_state_indices = view(initial_indices);
    args.parents = view(parents);
    args.o = view(o);
    args.states_out = by_token(view(states_out));
    args.states_out_indices = view(rows);
    return args;
  }
  Status workspace_size(const VerifyArguments& args, size_t* bytes) const {
    return Verify::workspace_size(args, bytes);
  }
  Status run(const VerifyArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    return Verify::run(args, workspace, bytes, stream);
  }
  Status explain(const VerifyArguments& args, char* text, size_t size) const {
    return flash_qla_verify_explain(&args, text, size);
  }

 private:
  // [rows * T, Hv, ..] as [rows, T, Hv, ..].
  Tensor by_token(Tensor t) const {
    if (t.ndim == 0) return t;
    for (int i = t.ndim; i > 1; --i) {
      t.shape[i] = t.shape[i - 1];
      t.stride[i] = t.stride[i - 1];
    }
    t.ndim = 5;
    t.shape[1] = in.shape.T;
    t.shape[0] = in.shape.T == 0 ? 0 : t.shape[0] / in.shape.T;
    t.stride[1] = t.stride[0];
    t.stride[0] *= in.shape.T;
    return t;
  }
};

inline std::string describe(const VerifyCall& call) {
  std::string text;
  for (const auto& [on, name] : {std::pair<bool, const char*>{call.parents.present(), "trees"},
                                 {call.states_out.present(), "states"},
                                 {call.rows.present(), "rows"},
                                 {call.in.features.v_first, "[V, K]"}}) {
    if (on) text += std::string(" ") + name;
  }
  return text;
}

// No case of these is ill-conditioned.
inline EmulatedErrors emulate(VerifyCall&) { return {}; }

inline VerifyCall draw_verify(DType type, int64_t largest_state, Random& random) {
  Shape s = draw_shape(type, 1, largest_state, random);
  s.cu_seqlens.clear();
  s.B = random.integer(1, 4);
  s.T = random.chance(0.3) ? random.integer(9, FLASH_QLA_MAX_DRAFT_TOKENS) : random.integer(1, 8);
  Features f = draw_features(type, random);
  f.any_length = random.chance(0.3);
  VerifyCall call;
  call.draw(s, f, random);
  return call;
}

// As many sequences as have more than 64 blocks of 32 columns (kFewBlocks in generic/verify_columns.cu), from where on
// path cuda_verify has fewer warps for a head.
inline int64_t many_sequences(const Shape& s) { return 64 / (s.Hv * ceil_div(s.V, int64_t{32})) + 1; }

// What path cuda_verify takes.
inline VerifyCall draw_verify_columns(Random& random) {
  static const std::vector<DType> kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  static const std::vector<int64_t> kKeys = {64, 128}, kValues = {16, 48, 64, 128, 256};
  Shape s;
  s.dtype = random.pick(kFloats);
  s.K = random.pick(kKeys);
  s.V = random.pick(kValues);
  s.Hq = random.integer(1, 2);
  s.Hv = s.Hq * random.integer(1, 3);
  s.B = random.integer(1, 3);
  s.T = random.chance(0.3) ? random.integer(9, FLASH_QLA_MAX_DRAFT_TOKENS) : random.integer(1, 8);
  Features f = draw_features(s.dtype, random);
  f.v_first = true;
  f.state_dtype = random.pick(kFloats);
  if (random.chance(0.3)) s.B = many_sequences(s);
  VerifyCall call;
  call.draw(s, f, random);
  return call;
}

// A sequence's bits do not depend on how many others there are, nor on the warps that its heads have.
inline int64_t test_verify_alone(const Settings& settings, Arena& arena) {
  constexpr const char* kPath = "cuda_verify";
  Checker checker("verify, bits depend on the sequence alone", settings, arena, kPath);
  Random random(settings.seed + 71);
  for (const DType states : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t K : {64, 128}) {
      Shape s;
      s.dtype = DType::kBFloat16;
      s.T = K == 64 ? 5 : 9;  // 9: more tokens than a block has warps to stage them
      s.Hq = 2;
      s.Hv = 4;
      s.K = K;
      s.V = 128;
      s.B = many_sequences(s);
      Features f;
      f.v_first = f.l2norm = f.gate = f.sigmoid = true;
      f.state_dtype = states;
      VerifyCall together;
      together.draw(s, f, random);
      together.initial_indices.fill([&](int64_t n, int64_t, int64_t, int64_t) { return static_cast<double>(n); });
      together.rows = Buffer();
      together.o = Buffer(s.dtype, {s.B, s.T, s.Hv, s.V});
      together.states_out = Buffer(states, state_shape(s, true, s.B * s.T));
      const VerifyCall drawn = together;
      checker.run("together", together, kPath);
      for (const int64_t n : {int64_t{0}, s.B - 1}) {
        VerifyCall alone = drawn;
        for (Buffer* buffer : {&alone.in.q, &alone.in.k, &alone.in.v, &alone.in.g, &alone.in.beta,
                               &alone.initial_indices, &alone.parents, &alone.o}) {
          if (buffer->present()) *buffer = buffer->slice(0, n, n + 1);
        }
        alone.in.shape.B = 1;
        alone.states_out = alone.states_out.slice(0, n * s.T, (n + 1) * s.T);
        checker.run("alone", alone, kPath);
        if (!same(alone.o, together.o.slice(0, n, n + 1))) checker.fail("alone", kPath, "o differs");
        if (!same(alone.states_out, together.states_out.slice(0, n * s.T, (n + 1) * s.T))) {
          checker.fail("alone", kPath, "states differ");
        }
      }
    }
  }
  return checker.finish();
}

// Returns how many checks failed. `reference`, on `where`: what float32 paths are compared with.
inline int64_t test_verify(const Settings& settings, Arena& arena, const char* reference, flash_qla_device_type where) {
  constexpr int64_t kHostState = 66 * 66;
  const bool on_host = where == FLASH_QLA_CPU;
  Checker oracle("verify, cuda_reference against the host", settings, arena, "cuda_reference");
  const auto draw_exact = [](Random& r) { return draw_verify(DType::kFloat64, kHostState, r); };
  for_each_case(settings, settings.cases / 3, draw_exact, [&](const std::string& what, const VerifyCall& call) {
    oracle.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, {.exact_bound = 1e-12});
  });
  Checker generic("verify, cuda_generic", settings, arena, "cuda_generic");
  const auto draw = [&](Random& r) {
    return draw_verify(draw_dtype(r), on_host ? kHostState : settings.largest_state(), r);
  };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const VerifyCall& call) {
    generic.check(what, call, "cuda_generic", reference, where);
  });
  Checker columns("verify, cuda_verify", settings, arena, "cuda_verify");
  for_each_case(settings, settings.cases, draw_verify_columns, [&](const std::string& what, const VerifyCall& call) {
    columns.check(what, call, nullptr, reference, where);
  });
  return oracle.finish() + generic.finish() + columns.finish() + test_verify_alone(settings, arena);
}

}  // namespace flash_qla::testing
