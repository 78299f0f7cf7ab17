// The CUDA paths against each other and against the host, on a machine with a GPU:
//   cuda_reference (the fp64 oracle on the device) against reference (the one on the host), fp64 tensors, to 1e-12;
//   cuda_generic, cuda_decode and sm90 against cuda_reference, at the bounds that the library promises;
// over drawn shapes and options, and over cases that are chosen for their size. Every output and the workspace start as
// NaN, every run is done twice and must give the same bits, inputs must stay as they are, and nothing may be written
// past the end of a tensor. Without a GPU it says so and succeeds.
//
//   generic_test [--cases N] [--seed S] [--only-case C] [--only NAME] [--small] [--once]
//
// prints a line for every failed check, one summary per group, and exits with 1 if any check failed. --once leaves out
// the second runs, --only the groups whose names (in run()) do not contain NAME.
#include <chrono>
#include <functional>
#include <map>

#include "calls.h"

namespace flash_qla::testing {
namespace {

struct Settings {
  int64_t cases = 150;  // drawn cases of each kind
  uint64_t seed = 1;
  int64_t only_case = -1;
  bool small = false;
  bool twice = true;
  std::string only;  // runs the tests whose name contains it
  // Longest batch row and largest K * V of a drawn case. The small ones still reach every kernel: K = 256 with V = 8.
  int64_t longest() const { return small ? 70 : 400; }
  int64_t largest_state() const { return small ? 256 * 8 : 256 * 256; }
};

// Bounds against fp64 by dtype of the inputs and of the output; the larger one holds.
double bound(const std::string& name, DType input, DType output) {
  const bool gate = name == "dg" || name == "dbeta" || name == "dA_log" || name == "ddt_bias";
  const bool gradient = name[0] == 'd';
  // The rounding of a half-precision output alone is up to 2^-9.
  if (input != DType::kFloat32 || output != DType::kFloat32) return gate ? 1.5e-2 : gradient ? 8e-3 : 5e-3;
  return 1e-5;
}

int head_dim(const std::string& name) {
  if (name == "dA_log" || name == "ddt_bias") return -1;
  const bool state =
      name == "final_state" || name == "state_pool" || name == "checkpoints" || name == "h" || name == "dh0";
  return state ? 1 : 2;
}

class Checker {
 public:
  Checker(std::string group, const Settings& settings, Arena& arena)
      : group_(std::move(group)), twice_(settings.twice), arena_(arena), start_(std::chrono::steady_clock::now()) {}

  // Compares path `path` with path `reference` on the host or the device. exact_bound: for all tensors, if above 0.
  template <class Call>
  void check(const std::string& what, const Call& drawn, const char* path, const char* reference,
             flash_qla_device_type reference_device, double exact_bound = 0.0) {
    ++cases_;
    Call expected = drawn, actual = drawn;
    if (const std::string error = run_call(expected, reference, reference_device, arena_); !error.empty()) {
      return fail(what, reference, error);
    }
    if (const std::string error = run_call(actual, path, FLASH_QLA_CUDA, arena_); !error.empty()) {
      return fail(what, path, error);
    }
    const NamedBuffers wanted = together(expected), got = together(actual);
    for (size_t i = 0; i < got.size(); ++i) {
      const auto& [name, buffer] = got[i];
      if (!buffer->present()) continue;
      const double error = relative_error(*buffer, *wanted[i].second, head_dim(name),
                                          exact_bound > 0.0 ? 0.0 : expected.least_norm(name));
      const double most =
          exact_bound > 0.0 ? exact_bound : bound(name, actual.in.shape.dtype, dtype(buffer->shape_view()));
      if (!(error <= most)) fail(what, path, name + " differs by " + number(error) + " (at most " + number(most) + ")");
      double& worst = worst_[name];
      worst = std::max(worst, error / most);
    }
    if (!twice_) return;
    Call again = drawn;
    if (const std::string error = run_call(again, path, FLASH_QLA_CUDA, arena_); !error.empty()) {
      return fail(what, path, error);
    }
    const NamedBuffers second = together(again);
    for (size_t i = 0; i < got.size(); ++i) {
      if (got[i].second->bytes() != second[i].second->bytes()) {
        fail(what, path, got[i].first + " is not the same in a second run");
      }
    }
  }

  // A case that is compared by other means than check().
  void count() { ++cases_; }

  void fail(const std::string& what, const char* path, const std::string& message) {
    ++failures_;
    std::printf("FAILED %s: %s: %s: %s\n", group_.c_str(), what.c_str(), path, message.c_str());
  }

  // Prints the summary; returns the number of failed checks.
  int64_t finish() const {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    std::printf("%s: %lld cases, %lld failed, %.1f s; largest error over its bound:", group_.c_str(),
                static_cast<long long>(cases_), static_cast<long long>(failures_), seconds);
    for (const auto& [name, ratio] : worst_) std::printf(" %s %.3g", name.c_str(), ratio);
    std::printf("\n");
    std::fflush(stdout);
    return failures_;
  }

 private:
  template <class Call>
  static NamedBuffers together(Call& call) {
    NamedBuffers all = call.outputs();
    for (auto& entry : call.in_place()) all.push_back(entry);
    return all;
  }
  static std::string number(double x) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.3g", x);
    return text;
  }

  std::string group_;
  bool twice_;
  Arena& arena_;
  std::chrono::steady_clock::time_point start_;
  int64_t cases_ = 0, failures_ = 0;
  std::map<std::string, double> worst_;
};

// Offsets of sequences cut anywhere, with empty ones, that leave up to 20 tokens at the end outside.
std::vector<int64_t> draw_offsets(int64_t T, Random& random) {
  std::vector<int64_t> offsets = {0};
  const int64_t sequences = random.integer(1, 6), end = std::max<int64_t>(0, T - random.integer(0, 20));
  for (int64_t n = 1; n < sequences; ++n) {
    offsets.push_back(random.chance(0.25) ? offsets.back() : random.integer(0, end));
  }
  std::sort(offsets.begin(), offsets.end());
  offsets.push_back(random.chance(0.15) ? offsets.back() : end);
  return offsets;
}

Shape draw_shape(DType type, int64_t longest, int64_t largest_state, Random& random) {
  static const std::vector<int64_t> kDims = {1, 3, 8, 16, 31, 32, 33, 64, 65, 96, 100, 128, 130, 192, 255, 256};
  static const std::vector<int64_t> kLengths = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 333};
  Shape s;
  s.dtype = type;
  do {
    s.K = random.pick(kDims);
    s.V = random.pick(kDims);
  } while (s.K * s.V > largest_state);
  do {
    s.T = random.pick(kLengths);
  } while (s.T > longest);
  s.Hq = random.integer(1, 3);
  s.Hv = s.Hq * random.integer(1, 3);
  if (random.chance(0.5)) {
    s.cu_seqlens = draw_offsets(s.T, random);
  } else {
    s.B = random.integer(1, 3);
  }
  return s;
}

Features draw_features(DType type, int64_t K, Random& random) {
  static const std::vector<DType> kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  Features f;
  f.g = random.chance(0.9);
  // With one key of norm one and beta 1 a token replaces the whole state: every decay's gradient is exactly zero, and
  // two oracles in fp64 have only rounding left to compare.
  f.beta = (K == 1 && type == DType::kFloat64) || random.chance(0.9);
  f.l2norm = random.chance(0.3);
  f.gate = f.g && random.chance(0.3);
  f.dt_bias = f.gate && random.chance(0.5);
  f.sigmoid = f.beta && random.chance(0.3);
  f.negative = f.sigmoid && random.chance(0.5);
  f.v_first = random.chance(0.5);
  f.strided = random.chance(0.4);
  f.strong_decay = random.chance(0.3);
  f.initial_state = random.chance(0.5);
  f.final_state = random.chance(0.7);
  f.gate_dtype = random.chance(0.6) ? DType::kFloat32 : random.pick(kFloats);
  f.state_dtype = random.chance(0.6) ? DType::kFloat32 : random.pick(kFloats);
  if (type == DType::kFloat64) f.gate_dtype = f.state_dtype = DType::kFloat64;
  if (random.chance(0.1)) f.scale = random.chance(0.5) ? 0.0 : 0.7;
  return f;
}

PoolFeatures draw_pool_features(bool recurrent, bool varlen, Random& random) {
  PoolFeatures f;
  f.pool = random.chance(recurrent ? 0.8 : 0.4);
  f.skip_rows = random.chance(0.4);
  f.has_initial = random.chance(0.3);
  f.drafts = recurrent && !varlen && random.chance(0.4);
  f.accepted = recurrent && !varlen && random.chance(0.4);
  f.packed_checkpoints = random.chance(0.5);
  f.listed_checkpoints = random.chance(0.5);
  f.h = random.chance(0.4);
  f.A = random.chance(0.4);
  f.g_cumsum = random.chance(0.4);
  return f;
}

ForwardCall draw_forward(DType type, int64_t longest, int64_t largest_state, Random& random) {
  Shape s = draw_shape(type, longest, largest_state, random);
  const bool recurrent = random.chance(0.3);
  if (recurrent && random.chance(0.8)) {
    s.cu_seqlens.clear();
    s.B = random.integer(1, 5);
    s.T = random.integer(1, 6);
  }
  const PoolFeatures pool = draw_pool_features(recurrent, !s.cu_seqlens.empty(), random);
  if (recurrent && pool.pool && s.cu_seqlens.empty()) s.T = std::min<int64_t>(s.T, FLASH_QLA_MAX_DRAFT_TOKENS);
  ForwardCall call;
  Features f = draw_features(type, s.K, random);
  f.any_length = random.chance(0.3);
  call.draw(s, f, pool, recurrent, random);
  return call;
}

BackwardCall draw_backward(DType type, int64_t longest, int64_t largest_state, Random& random) {
  const Shape s = draw_shape(type, longest, largest_state, random);
  Features f = draw_features(type, s.K, random);
  f.any_length = random.chance(0.3);
  // The norm of a single key is a constant but for its epsilon of 1e-6: its gradient is a difference of equals, of
  // which fp64 keeps ten digits.
  if (s.K == 1 && type == DType::kFloat64) f.l2norm = f.any_length = false;
  const bool cumsum = f.g && !f.gate && random.chance(0.3);
  BackwardCall call;
  call.draw(s, f, cumsum, random.chance(0.9), random.chance(0.5), random);
  // Any gradient may be unwanted.
  if (random.chance(0.3)) {
    for (auto [name, buffer] : call.outputs()) {
      if (random.chance(0.5)) *buffer = Buffer();
    }
  }
  return call;
}

// The options that matter most to a call's error.
std::string describe(const Shape& s, const Features& f) {
  std::string text = s.dtype == DType::kBFloat16 ? " bf16" : s.dtype == DType::kFloat16 ? " fp16" : "";
  for (const auto& [on, name] : {std::pair<bool, const char*>{!f.g, "no g"},
                                 {!f.beta, "no beta"},
                                 {f.l2norm, "l2norm"},
                                 {f.gate, "gate"},
                                 {f.sigmoid, "sigmoid"},
                                 {f.negative, "negative"},
                                 {f.strided, "strided"},
                                 {f.strong_decay, "strong decay"},
                                 {f.initial_state, "initial state"},
                                 {!std::isnan(f.scale), "scale"}}) {
    if (on) text += std::string(" ") + name;
  }
  return text;
}

template <class Draw, class Check>
void for_each_case(const Settings& settings, int64_t cases, Draw draw, Check check) {
  for (int64_t i = 0; i < cases; ++i) {
    if (settings.only_case >= 0 && i != settings.only_case) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    auto call = draw(random);
    const Shape& s = call.in.shape;
    char what[320];
    std::snprintf(what, sizeof(what), "case %lld (B %lld T %lld N %lld Hq %lld Hv %lld K %lld V %lld,%s)",
                  static_cast<long long>(i), static_cast<long long>(s.B), static_cast<long long>(s.T),
                  static_cast<long long>(s.N()), static_cast<long long>(s.Hq), static_cast<long long>(s.Hv),
                  static_cast<long long>(s.K), static_cast<long long>(s.V), describe(s, call.in.features).c_str());
    check(std::string(what), call);
  }
}

DType draw_dtype(Random& random) {
  static const std::vector<DType> kTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  return random.pick(kTypes);
}

// The host's oracle takes O(T K V) steps of std::vector arithmetic, so these shapes are small.
constexpr int64_t kHostLongest = 130, kHostState = 66 * 66;

int64_t test_oracle(const Settings& settings, Arena& arena) {
  Checker forward("forward, cuda_reference against the host", settings, arena);
  const auto draw = [](Random& r) { return draw_forward(DType::kFloat64, kHostLongest, kHostState, r); };
  for_each_case(settings, settings.cases / 3, draw, [&](const std::string& what, const ForwardCall& call) {
    forward.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, 1e-12);
  });
  Checker backward("backward, cuda_reference against the host", settings, arena);
  const auto draw_back = [](Random& r) { return draw_backward(DType::kFloat64, kHostLongest, kHostState, r); };
  for_each_case(settings, settings.cases / 3, draw_back, [&](const std::string& what, const BackwardCall& call) {
    backward.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, 1e-12);
  });
  return forward.finish() + backward.finish();
}

int64_t test_generic(const Settings& settings, Arena& arena) {
  Checker forward("forward, cuda_generic", settings, arena);
  const auto draw = [&](Random& r) {
    return draw_forward(draw_dtype(r), settings.longest(), settings.largest_state(), r);
  };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
    forward.check(what, call, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  });
  Checker backward("backward, cuda_generic", settings, arena);
  const auto draw_back = [&](Random& r) {
    return draw_backward(draw_dtype(r), settings.longest(), settings.largest_state(), r);
  };
  for_each_case(settings, settings.cases, draw_back, [&](const std::string& what, const BackwardCall& call) {
    backward.check(what, call, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  });
  return forward.finish() + backward.finish();
}

ForwardCall draw_decode(Random& random) {
  Shape s;
  s.dtype = draw_dtype(random);
  s.B = random.integer(1, 6);
  s.T = random.chance(0.5) ? 1 : random.integer(2, FLASH_QLA_MAX_DRAFT_TOKENS);
  s.Hq = random.integer(1, 3);
  s.Hv = s.Hq * random.integer(1, 3);
  s.K = random.chance(0.5) ? 64 : 128;
  s.V = 16 * random.integer(1, 16);
  Features f = draw_features(s.dtype, s.K, random);
  if (f.strided && random.chance(0.5)) f.strided = false;
  PoolFeatures pool = draw_pool_features(true, false, random);
  if (!pool.pool) {
    // Without a pool the kernel wants contiguous float32 states.
    f.strided = false;
    f.state_dtype = DType::kFloat32;
  }
  ForwardCall call;
  call.draw(s, f, pool, true, random);
  return call;
}

int64_t test_decode(const Settings& settings, Arena& arena) {
  Checker decode("recurrent, cuda_decode", settings, arena);
  for_each_case(settings, settings.cases, draw_decode, [&](const std::string& what, const ForwardCall& call) {
    decode.check(what, call, "cuda_decode", "cuda_reference", FLASH_QLA_CUDA);
  });
  return decode.finish();
}

// NaN in one sequence: the others must not see it, and it must stand where the oracle has it.
int64_t test_nan(const Settings& settings, Arena& arena) {
  Checker checker("NaN stays in its sequence", settings, arena);
  Random random(7);
  Shape s;
  s.T = 200;
  s.Hv = 2;
  s.K = 48;
  s.V = 40;
  s.cu_seqlens = {0, 70, 130, 200};
  Features f;
  f.final_state = true;
  ForwardCall forward;
  forward.draw(s, f, PoolFeatures{}, false, random);
  forward.in.g.fill([&](int64_t, int64_t t, int64_t, int64_t) { return t == 90 ? NAN : -0.1 * random.uniform(); });
  checker.check("forward", forward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  for (const bool initial_state : {true, false}) {
    f.initial_state = initial_state;
    BackwardCall backward;
    backward.draw(s, f, false, true, false, random);
    backward.in.g.fill([&](int64_t, int64_t t, int64_t, int64_t) { return -0.1 * random.uniform() * (t % 3); });
    backward.d_o.fill([&](int64_t, int64_t t, int64_t, int64_t) { return t == 129 ? NAN : random.normal(); });
    checker.check(initial_state ? "backward" : "backward from zero", backward, "cuda_generic", "cuda_reference",
                  FLASH_QLA_CUDA);
  }
  return checker.finish();
}

// Whether two tensors have the same bits; both contiguous.
bool same(Buffer a, Buffer b) {
  return a.slice(0, 0, a.shape_view().shape[0]).bytes() == b.slice(0, 0, b.shape_view().shape[0]).bytes();
}

// A sequence's bits depend on nothing but the sequence: not on what else is in the batch, nor on where it is cut.
int64_t test_invariance(const Settings& settings, Arena& arena, const char* path, int64_t V,
                        const std::vector<int64_t>& cuts) {
  Checker checker(std::string("bits depend on the sequence alone, ") + path, settings, arena);
  Random random(13);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.T = 300;
  s.Hq = 2;
  s.Hv = 4;
  s.K = 128;
  s.V = V;
  s.cu_seqlens = {0, 17, 17, 209, 300};
  Features f;
  f.initial_state = f.final_state = true;
  f.cp_mode = FLASH_QLA_CP_OFF;
  ForwardCall batch;
  batch.draw(s, f, PoolFeatures{}, false, random);
  ForwardCall whole = batch;
  const auto run = [&](ForwardCall& call) {
    checker.count();
    const std::string error = run_call(call, path, FLASH_QLA_CUDA, arena);
    if (!error.empty()) checker.fail("forward", path, error);
  };
  run(whole);
  // Tokens [begin, end) of the batch as a call of their own, from `state`.
  const auto part = [&](int64_t begin, int64_t end, Buffer state) {
    ForwardCall call = batch;
    for (Buffer* buffer : {&call.in.q, &call.in.k, &call.in.v, &call.in.g, &call.in.beta, &call.o}) {
      *buffer = buffer->slice(1, begin, end);
    }
    call.in.shape.T = end - begin;
    call.in.shape.cu_seqlens.clear();
    call.in.cu_seqlens = Buffer();
    call.in.initial_state = state;
    call.final_state = batch.final_state.slice(0, 0, 1);
    run(call);
    return call;
  };
  // The third sequence alone, and cut.
  ForwardCall alone = part(17, 209, batch.in.initial_state.slice(0, 2, 3));
  if (!same(alone.o, whole.o.slice(1, 17, 209))) checker.fail("alone", path, "o differs");
  if (!same(alone.final_state, whole.final_state.slice(0, 2, 3))) checker.fail("alone", path, "state differs");
  for (const int64_t cut : cuts) {
    ForwardCall first = part(17, 17 + cut, batch.in.initial_state.slice(0, 2, 3));
    ForwardCall second = part(17 + cut, 209, first.final_state);
    if (!same(first.o, alone.o.slice(1, 0, cut))) checker.fail("cut", path, "o before the cut differs");
    if (!same(second.o, alone.o.slice(1, cut, 192))) checker.fail("cut", path, "o after the cut differs");
    if (!same(second.final_state, alone.final_state)) checker.fail("cut", path, "state differs");
  }
  return checker.finish();
}

// Tokens in sequences.
int64_t tokens_of(const Shape& s) { return s.cu_seqlens.empty() ? s.B * s.T : s.cu_seqlens.back() - s.cu_seqlens[0]; }

// A sequence in a batch that fills the card has the bits that it has alone, and those of a few of its heads alone.
int64_t test_sm90_batch(const Settings& settings, Arena& arena) {
  Checker checker("bits depend on neither batch nor heads, sm90", settings, arena);
  Random random(23);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.Hq = 4;
  s.Hv = 8;
  s.K = s.V = 128;
  s.cu_seqlens = {0};
  for (int n = 0; n < 40; ++n) s.cu_seqlens.push_back(s.cu_seqlens.back() + random.integer(1, 200));
  s.T = s.cu_seqlens.back();
  Features f;
  f.initial_state = f.final_state = true;
  f.cp_mode = FLASH_QLA_CP_OFF;
  ForwardCall batch;
  batch.draw(s, f, PoolFeatures{}, false, random);
  const auto run = [&](ForwardCall& call) {
    checker.count();
    const std::string error = run_call(call, "sm90", FLASH_QLA_CUDA, arena);
    if (!error.empty()) checker.fail("forward", "sm90", error);
  };
  run(batch);
  for (const int64_t n : {0, 7, 39}) {
    const int64_t begin = s.cu_seqlens[static_cast<size_t>(n)], end = s.cu_seqlens[static_cast<size_t>(n) + 1];
    for (const int64_t heads : {8, 2}) {  // value heads from 4 on; a whole group of one key head, or all
      const int64_t first = heads == 8 ? 0 : 4;
      ForwardCall alone = batch;
      const auto cut = [&](Buffer& x, int64_t head0, int64_t head1) {
        x = x.slice(1, begin, end);
        x = x.slice(2, head0, head1);
      };
      cut(alone.in.q, first / 2, (first + heads) / 2);
      cut(alone.in.k, first / 2, (first + heads) / 2);
      for (Buffer* x : {&alone.in.v, &alone.in.g, &alone.in.beta, &alone.o}) cut(*x, first, first + heads);
      for (Buffer* x : {&alone.in.initial_state, &alone.final_state}) {
        *x = x->slice(0, n, n + 1);
        *x = x->slice(1, first, first + heads);
      }
      Buffer o = alone.o, state = alone.final_state;
      alone.in.shape.T = end - begin;
      alone.in.shape.Hq = heads / 2;
      alone.in.shape.Hv = heads;
      alone.in.shape.cu_seqlens.clear();
      alone.in.cu_seqlens = Buffer();
      run(alone);
      const std::string what = "sequence " + std::to_string(n) + ", " + std::to_string(heads) + " heads";
      if (!same(alone.o, o)) checker.fail(what, "sm90", "o differs");
      if (!same(alone.final_state, state)) checker.fail(what, "sm90", "state differs");
    }
  }
  return checker.finish();
}

bool on_hopper() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major == 9;
}

// The Hopper forward against the oracle: every option, on the drawn calls that it takes. What it leaves to cuda_generic
// are outputs in odd places: fewer than half of all calls, or the group fails.
int64_t test_sm90_forward(const Settings& settings, Arena& arena) {
  Checker checker("forward, sm90", settings, arena);
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  const auto draw = [&](Random& r) {
    DType type = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    Shape s = draw_shape(type, settings.small ? 140 : 400, settings.largest_state(), r);
    s.K = s.V = 128;
    // In bf16 the roundings of a token's score and of its beta are two factors of its whole output, up to 2^-9 each,
    // and may add to more than the bound where there are no others to average with (test_sm90_single_tokens).
    if (tokens_of(s) < 8) s.dtype = type = DType::kFloat16;
    ForwardCall call;
    call.draw(s, draw_features(type, s.K, r), draw_pool_features(false, !s.cu_seqlens.empty(), r), false, r);
    return call;
  };
  int64_t drawn = 0, taken = 0;
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
    ++drawn;
    ForwardCall copy = call;
    auto args = copy.arguments([](Buffer& b) { return b.present() ? b.host() : Tensor{}; });
    args.options.path = "sm90";
    args.options.device_type = FLASH_QLA_CUDA;
    args.options.device_index = device;
    if (!ChunkForward::can_implement(args).ok()) return;
    ++taken;
    checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
  });
  if (2 * taken < drawn) checker.fail("can_implement", "sm90", "takes too few calls");
  return checker.finish();
}

// Sequences of one token without a state before it: o = P V' with V' = beta v. Against these very roundings, not
// against the oracle: what is left is an ulp here and there, where the sum of q k went the other way.
int64_t test_sm90_single_tokens(const Settings& settings, Arena& arena) {
  Checker checker("single tokens, sm90", settings, arena);
  Random random(19);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.B = 40;
  s.T = 1;
  s.Hq = 2;
  s.Hv = 4;
  s.K = s.V = 128;
  ForwardCall call;
  call.draw(s, Features{}, PoolFeatures{}, false, random);
  checker.count();
  const std::string error = run_call(call, "sm90", FLASH_QLA_CUDA, arena);
  if (!error.empty()) checker.fail("forward", "sm90", error);
  Buffer expected(s.dtype, {s.B, s.T, s.Hv, s.V}), word(s.dtype, {1});
  const auto rounded = [&](double x) {
    word.fill([&](int64_t, int64_t, int64_t, int64_t) { return x; });
    return load(word.host(), 0);
  };
  const Tensor q = call.in.q.host(), k = call.in.k.host(), v = call.in.v.host(), beta = call.in.beta.host();
  double score = 0.0;
  expected.fill([&](int64_t b, int64_t t, int64_t head, int64_t column) {
    if (column == 0) {
      double dot = 0.0;
      for (int64_t i = 0; i < s.K; ++i) {
        dot += load(q, offset_of(q, b, t, head / 2, i)) * load(k, offset_of(k, b, t, head / 2, i));
      }
      score = rounded(dot / std::sqrt(static_cast<double>(s.K)));
    }
    const double corrected = rounded(load(beta, offset_of(beta, b, t, head)));
    return score * rounded(corrected * load(v, offset_of(v, b, t, head, column)));
  });
  const double difference = relative_error(call.o, expected, 2);
  if (!(difference <= 5e-4)) checker.fail("forward", "sm90", "o differs by " + std::to_string(difference));
  return checker.finish();
}

// The chunk algorithm in double with the roundings of a tensor-core kernel, for one dense batch row: the operands of
// every product are rounded to the inputs' dtype (those of the inverse to fp16). What is asked of a kernel where a case
// is ill-conditioned for all of them (docs/numerics.md). Names are those of docs/math.md.
class Emulation {
 public:
  explicit Emulation(ForwardCall& call)
      : call_(call), shape_(call.in.shape), word_(shape_.dtype, {1}), half_(DType::kFloat16, {1}) {}

  // Fills the call's o and final_state.
  void run() {
    const Shape& s = shape_;
    std::vector<double> o(static_cast<size_t>(s.T * s.Hv * s.V)), states;
    for (int64_t head = 0; head < s.Hv; ++head) {
      std::vector<double> S = start(head);
      for (int64_t t0 = 0; t0 < s.T; t0 += kChunkSize) step(head, t0, std::min(kChunkSize, s.T - t0), &S, &o);
      states.insert(states.end(), S.begin(), S.end());
    }
    call_.o.fill([&](int64_t, int64_t t, int64_t head, int64_t column) {
      return o[static_cast<size_t>((t * s.Hv + head) * s.V + column)];
    });
    call_.final_state.fill([&](int64_t, int64_t head, int64_t i, int64_t j) {
      return states[static_cast<size_t>((head * s.K + i) * s.V + j)];
    });
  }

 private:
  using Matrix = std::vector<double>;

  static double at(Buffer& x, int64_t i, int64_t j, int64_t k, int64_t l = 0) {
    const Tensor t = x.host();
    return load(t, offset_of(t, i, j, k, l));
  }
  double rounded(double x) {
    word_.fill([&](int64_t, int64_t, int64_t, int64_t) { return x; });
    return load(word_.host(), 0);
  }
  Matrix rounded(Matrix x) {
    for (double& value : x) value = rounded(value);
    return x;
  }
  // [n, m] = a [n, k] b [k, m]
  static Matrix product(const Matrix& a, const Matrix& b, int64_t n, int64_t k, int64_t m) {
    Matrix c(static_cast<size_t>(n * m), 0.0);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t l = 0; l < k; ++l) {
        const double x = a[static_cast<size_t>(i * k + l)];
        for (int64_t j = 0; j < m; ++j) c[static_cast<size_t>(i * m + j)] += x * b[static_cast<size_t>(l * m + j)];
      }
    }
    return c;
  }
  static Matrix transposed(const Matrix& a, int64_t n, int64_t m) {
    Matrix c(a.size());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m; ++j) c[static_cast<size_t>(j * n + i)] = a[static_cast<size_t>(i * m + j)];
    }
    return c;
  }

  // An element of what the inverse is made of: in fp16, which is what an inverse costs that is multiplied on tensor
  // cores.
  double inverted(double x) {
    half_.fill([&](int64_t, int64_t, int64_t, int64_t) { return x; });
    return load(half_.host(), 0);
  }

  Matrix start(int64_t head) {
    Matrix S;
    for (int64_t i = 0; i < shape_.K * shape_.V; ++i) {
      S.push_back(call_.in.initial_state.present() ? at(call_.in.initial_state, 0, head, i / shape_.V, i % shape_.V)
                                                   : 0.0);
    }
    return S;
  }

  void step(int64_t head, int64_t t0, int64_t n, Matrix* S, Matrix* o) {
    const int64_t K = shape_.K, V = shape_.V, group = shape_.Hv / shape_.Hq;
    const double scale = 1.0 / std::sqrt(static_cast<double>(K));
    const auto rows = [&](Buffer& x, int64_t h, int64_t size) {
      Matrix m;
      for (int64_t i = 0; i < n * size; ++i) m.push_back(at(x, 0, t0 + i / size, h, i % size));
      return m;
    };
    const Matrix Q = rows(call_.in.q, head / group, K), Kt = transposed(rows(call_.in.k, head / group, K), n, K);
    const Matrix keys = rows(call_.in.k, head / group, K), values = rows(call_.in.v, head, V);
    std::vector<double> c, beta;
    for (int64_t i = 0; i < n; ++i) {
      c.push_back((i > 0 ? c.back() : 0.0) + std::max(kMinLogDecay, at(call_.in.g, 0, t0 + i, head)));
      beta.push_back(at(call_.in.beta, 0, t0 + i, head));
    }
    const auto decay = [&](int64_t i, int64_t j) {
      return std::exp(c[static_cast<size_t>(i)] - c[static_cast<size_t>(j)]);
    };
    const Matrix KK = product(keys, Kt, n, K, n), QK = product(Q, Kt, n, K, n);
    Matrix A(static_cast<size_t>(n * n), 0.0), P = A;
    for (int64_t i = 0; i < n; ++i) {
      A[static_cast<size_t>(i * n + i)] = 1.0;
      for (int64_t j = 0; j < i; ++j) {
        double sum = 0.0;
        for (int64_t l = j; l < i; ++l) {
          sum += inverted(beta[static_cast<size_t>(i)] * KK[static_cast<size_t>(i * n + l)]) *
                 A[static_cast<size_t>(l * n + j)];
        }
        A[static_cast<size_t>(i * n + j)] = -sum;
      }
    }
    A = rounded(A);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        A[static_cast<size_t>(i * n + j)] *= decay(i, j) * beta[static_cast<size_t>(j)];
        P[static_cast<size_t>(i * n + j)] = scale * decay(i, j) * QK[static_cast<size_t>(i * n + j)];
      }
    }
    const Matrix S0 = rounded(*S), KS = product(keys, S0, n, K, V), QS = product(Q, S0, n, K, V);
    Matrix W = values;
    for (int64_t i = 0; i < n * V; ++i) {
      W[static_cast<size_t>(i)] -= std::exp(c[static_cast<size_t>(i / V)]) * KS[static_cast<size_t>(i)];
    }
    const Matrix corrected = product(rounded(A), rounded(W), n, n, V);
    const Matrix PV = product(rounded(P), rounded(corrected), n, n, V);
    Matrix last = corrected;
    for (int64_t i = 0; i < n * V; ++i) {
      const size_t e = static_cast<size_t>(i);
      (*o)[static_cast<size_t>(((t0 + i / V) * shape_.Hv + head) * V + i % V)] =
          scale * std::exp(c[static_cast<size_t>(i / V)]) * QS[e] + PV[e];
      last[e] *= decay(n - 1, i / V);
    }
    const Matrix update = product(Kt, rounded(last), K, n, V);
    for (size_t i = 0; i < S->size(); ++i) (*S)[i] = std::exp(c.back()) * (*S)[i] + update[i];
  }

  ForwardCall& call_;
  const Shape shape_;
  Buffer word_, half_;
};

// Keys that make the triangular inverse grow. The bound is twice the error of an emulation where the case is
// ill-conditioned for any kernel of the dtype.
int64_t test_sm90_keys(const Settings& settings, Arena& arena) {
  Checker checker("correlated keys, sm90", settings, arena);
  struct Keys {
    const char* name;
    double common, own, length;  // of a shared direction, of one's own, of the whole key
  };
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const Keys& keys :
         {Keys{"random", 0, 1, 1}, Keys{"correlated", 1, 0.3, 1}, Keys{"identical", 1, 0, 1}, Keys{"long", 0, 1, 8}}) {
      for (const double beta : {0.5, 0.98, 1.0, 2.0}) {
        if (settings.small && beta != 0.98) continue;  // the others take the same way through the kernel
        for (const bool decays : {false, true}) {
          Random random(29);
          Shape s;
          s.dtype = type;
          s.T = 200;
          s.Hq = 1;
          s.Hv = 2;
          s.K = s.V = 128;
          Features f;
          f.initial_state = f.final_state = true;
          ForwardCall call;
          call.draw(s, f, PoolFeatures{}, false, random);
          std::vector<double> direction;
          for (int64_t i = 0; i < s.K; ++i) direction.push_back(random.normal());
          call.in.k.fill([&](int64_t, int64_t, int64_t, int64_t i) {
            return keys.common * direction[static_cast<size_t>(i)] + keys.own * random.normal();
          });
          Inputs::scale_rows(call.in.k);
          const Tensor k = call.in.k.host();
          call.in.k.fill([&](int64_t i, int64_t j, int64_t h, int64_t l) {
            return keys.length * load(k, offset_of(k, i, j, h, l));
          });
          call.in.beta.fill([&](int64_t, int64_t, int64_t, int64_t) { return beta / (keys.length * keys.length); });
          if (!decays) call.in.g.fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0; });
          char what[96];
          std::snprintf(what, sizeof(what), "%s keys, %s, beta %g%s", keys.name,
                        type == DType::kBFloat16 ? "bf16" : "fp16", beta, decays ? ", decay" : "");
          checker.count();
          ForwardCall expected = call, emulated = call;
          for (const auto& [which, path] : {std::pair<ForwardCall*, const char*>{&expected, "cuda_reference"},
                                            std::pair<ForwardCall*, const char*>{&call, "sm90"}}) {
            const std::string error = run_call(*which, path, FLASH_QLA_CUDA, arena);
            if (!error.empty()) checker.fail(what, path, error);
          }
          Emulation(emulated).run();
          for (const bool state : {false, true}) {
            const auto error = [&](ForwardCall& c) {
              return state ? relative_error(c.final_state, expected.final_state, 1)
                           : relative_error(c.o, expected.o, 2);
            };
            const double got = error(call), yardstick = error(emulated), most = std::max(5e-3, 2.0 * yardstick);
            std::printf("  %-40s %-5s %.2e, emulation %.2e\n", what, state ? "state" : "o", got, yardstick);
            if (!(got <= most)) {
              checker.fail(what, "sm90",
                           (state ? "the state" : "o") + std::string(" differs by ") + std::to_string(got) +
                               " (at most " + std::to_string(most) + ")");
            }
          }
        }
      }
    }
  }
  return checker.finish();
}

// NaN and infinity in q, k, v, g and beta of one sequence, side by side with finite ones whose last chunk is not full.
int64_t test_sm90_nan(const Settings& settings, Arena& arena) {
  Checker checker("NaN stays in its sequence, sm90", settings, arena);
  Random random(7);
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = 333;
    s.Hv = 2;
    s.K = s.V = 128;
    s.cu_seqlens = {0, 70, 133, 260, 261, 333};
    Features f;
    f.final_state = true;
    f.initial_state = true;
    ForwardCall clean;
    clean.draw(s, f, PoolFeatures{}, false, random);
    ForwardCall dirty = clean;
    // Sequences 1 and 3 alone: the first and the last token of one, the only token of the other.
    const auto spoil = [&](Buffer& x) {
      const Tensor t = x.host();
      x.fill([&](int64_t i, int64_t j, int64_t k, int64_t l) {
        return j == 70 || j == 132 || j == 260 ? bad : load(t, offset_of(t, i, j, k, l));
      });
    };
    for (Buffer* x : {&dirty.in.q, &dirty.in.k, &dirty.in.v, &dirty.in.g, &dirty.in.beta}) spoil(*x);
    for (ForwardCall* call : {&clean, &dirty}) {
      checker.count();
      const std::string error = run_call(*call, "sm90", FLASH_QLA_CUDA, arena);
      if (!error.empty()) checker.fail("forward", "sm90", error);
    }
    const auto same_part = [&](Buffer& a, Buffer& b, int dim, int64_t begin, int64_t end) {
      return a.slice(dim, begin, end).bytes() == b.slice(dim, begin, end).bytes();
    };
    for (const int64_t n : {0, 2, 4}) {
      const size_t i = static_cast<size_t>(n);
      if (!same_part(clean.o, dirty.o, 1, s.cu_seqlens[i], s.cu_seqlens[i + 1])) {
        checker.fail("sequence " + std::to_string(n), "sm90", "o depends on a neighbour");
      }
      if (!same_part(clean.final_state, dirty.final_state, 0, n, n + 1)) {
        checker.fail("sequence " + std::to_string(n), "sm90", "the final state depends on a neighbour");
      }
    }
  }
  return checker.finish();
}

// Adds the number of 32-bit words in which a and b differ.
__global__ void count_different_kernel(const uint32_t* a, const uint32_t* b, int64_t words, unsigned long long* count) {
  unsigned long long different = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += gridDim.x * blockDim.x) {
    different += a[i] != b[i];
  }
  if (different > 0) atomicAdd(count, different);
}

// Keeps `gridDim.x` blocks busy for `clocks` clocks.
__global__ void spin_kernel(int64_t clocks) {
  const int64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
}

// A forward call on the device whose outputs are compared there, again and again, with what they were before.
class RepeatedCall {
 public:
  RepeatedCall(ForwardCall& call, Arena& arena) {
    for (auto [name, buffer] : call.inputs()) buffer->upload(arena);
    for (auto [name, buffer] : call.outputs()) {
      if (!buffer->present()) continue;
      buffer->upload(arena);
      const size_t bytes = buffer->bytes().size();
      outputs_.push_back({static_cast<char*>(buffer->device().data), bytes / 4 * 4});
    }
    args_ = call.arguments([](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
    args_.options.path = "sm90";
    args_.options.device_type = FLASH_QLA_CUDA;
    check_cuda(cudaGetDevice(&args_.options.device_index), "cudaGetDevice");
    status_ = ChunkForward::workspace_size(args_, &workspace_bytes_);
    workspace_ = arena.take(workspace_bytes_);
    count_ = static_cast<unsigned long long*>(arena.take(sizeof(*count_)));
    check_cuda(cudaMemset(count_, 0, sizeof(*count_)), "cudaMemset");
  }
  const Status& status() const { return status_; }

  // Room for one set of results.
  std::vector<char*> take_results(Arena& arena) const {
    std::vector<char*> results;
    for (const auto& [data, bytes] : outputs_) results.push_back(static_cast<char*>(arena.take(bytes)));
    return results;
  }
  void keep(const std::vector<char*>& results, cudaStream_t stream) const {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      check_cuda(cudaMemcpyAsync(results[i], outputs_[i].first, outputs_[i].second, cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
    }
  }
  void poison(cudaStream_t stream) const {
    for (const auto& [data, bytes] : outputs_) {
      check_cuda(cudaMemsetAsync(data, 0xff, bytes, stream), "cudaMemsetAsync");
    }
  }
  void run(cudaStream_t stream) { status_ = ChunkForward::run(args_, workspace_, workspace_bytes_, stream); }
  void compare(const std::vector<char*>& results, cudaStream_t stream) const {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      count_different_kernel<<<64, 256, 0, stream>>>(reinterpret_cast<const uint32_t*>(outputs_[i].first),
                                                     reinterpret_cast<const uint32_t*>(results[i]),
                                                     static_cast<int64_t>(outputs_[i].second / 4), count_);
    }
  }
  // Words that have differed so far. Waits for the device.
  unsigned long long different() const {
    unsigned long long count = 0;
    check_cuda(cudaDeviceSynchronize(), "sm90, again and again");
    check_cuda(cudaMemcpy(&count, count_, sizeof(count), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return count;
  }
  const ForwardArguments& arguments() const { return args_; }

 private:
  ForwardArguments args_;
  Status status_;
  size_t workspace_bytes_ = 0;
  void* workspace_ = nullptr;
  unsigned long long* count_ = nullptr;
  std::vector<std::pair<char*, size_t>> outputs_;
};

// bf16 numbers of about unit norm in a row of 128, made on the device.
__global__ void fill_rows_kernel(uint16_t* data, int64_t n, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9ull;
    const float value = (static_cast<float>(x >> 40) * 0x1p-24f - 0.5f) * 0.3f;
    data[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
  }
}

// More sequences than a grid dimension other than the first holds, and elements past the 2^31st.
int64_t test_sm90_large(const Settings& settings, Arena& arena) {
  Checker checker("large, sm90", settings, arena);
  Random random(31);
  Shape many;
  many.T = 65536;
  many.Hv = 2;
  many.K = many.V = 128;
  many.dtype = DType::kBFloat16;
  many.cu_seqlens.resize(65537);
  std::iota(many.cu_seqlens.begin(), many.cu_seqlens.end(), 0);
  ForwardCall call;
  call.draw(many, Features{}, PoolFeatures{}, false, random);
  checker.check("65,536 sequences of one token", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);

  // The last of two sequences begins past element 2^31 of v and o. Alone it must give the same bits.
  checker.count();
  arena.reset();
  constexpr int64_t kHq = 8, kHv = 128, kDim = 128, kFirst = (int64_t{1} << 17) + 5, kLast = 300,
                    kTokens = kFirst + kLast;
  const auto take = [&](int64_t heads, uint32_t seed) {
    const Tensor t = tensor(arena.take(static_cast<size_t>(kTokens * heads * kDim * 2)), DType::kBFloat16,
                            {1, kTokens, heads, kDim});
    fill_rows_kernel<<<1024, 256>>>(static_cast<uint16_t*>(t.data), kTokens * heads * kDim, seed);
    return t;
  };
  ForwardArguments whole;
  whole.q = take(kHq, 1);
  whole.k = take(kHq, 2);
  whole.v = take(kHv, 3);
  whole.o = take(kHv, 4);
  const auto take_states = [&](int64_t rows) {
    return tensor(arena.take(static_cast<size_t>(rows * kHv * kDim * kDim * 4)), DType::kFloat32,
                  {rows, kHv, kDim, kDim});
  };
  whole.final_state = take_states(2);
  const int32_t offsets[] = {0, kFirst, kTokens};
  whole.cu_seqlens = tensor(arena.take(sizeof(offsets)), DType::kInt32, {3});
  check_cuda(cudaMemcpy(whole.cu_seqlens.data, offsets, sizeof(offsets), cudaMemcpyHostToDevice), "cudaMemcpy");
  whole.options.path = "sm90";
  whole.options.device_type = FLASH_QLA_CUDA;
  whole.options.cp_mode = FLASH_QLA_CP_OFF;
  check_cuda(cudaGetDevice(&whole.options.device_index), "cudaGetDevice");
  ForwardArguments alone = whole;
  for (Tensor* t : {&alone.q, &alone.k, &alone.v, &alone.o}) {
    t->shape[1] = kLast;
    t->data = static_cast<uint16_t*>(t->data) + kFirst * t->stride[1];
  }
  alone.o.data = arena.take(static_cast<size_t>(kLast * kHv * kDim * 2));
  alone.final_state = take_states(1);
  alone.cu_seqlens = Tensor{};
  for (const ForwardArguments* args : {&whole, &alone}) {
    size_t bytes = 0;
    Status status = ChunkForward::workspace_size(*args, &bytes);
    if (status.ok()) status = ChunkForward::run(*args, arena.take(bytes), bytes);
    if (!status.ok()) checker.fail("elements past 2^31", "sm90", status.message());
  }
  auto* count = static_cast<unsigned long long*>(arena.take(sizeof(unsigned long long)));
  check_cuda(cudaMemset(count, 0, sizeof(*count)), "cudaMemset");
  const int64_t values = kLast * kHv * kDim, states = kHv * kDim * kDim;
  count_different_kernel<<<64, 256>>>(
      reinterpret_cast<const uint32_t*>(static_cast<uint16_t*>(whole.o.data) + kFirst * kHv * kDim),
      static_cast<const uint32_t*>(alone.o.data), values / 2, count);
  count_different_kernel<<<64, 256>>>(static_cast<const uint32_t*>(whole.final_state.data) + states,
                                      static_cast<const uint32_t*>(alone.final_state.data), states, count);
  unsigned long long different = 0;
  check_cuda(cudaMemcpy(&different, count, sizeof(different), cudaMemcpyDeviceToHost), "sm90, elements past 2^31");
  if (different > 0) {
    checker.fail("elements past 2^31", "sm90", std::to_string(different) + " words differ from the slice alone");
  }
  return checker.finish();
}

// The same bits a thousand times over, half of them beside another kernel that takes a varying part of the card.
int64_t test_sm90_repeat(const Settings& settings, Arena& arena) {
  Checker checker("a thousand runs, sm90", settings, arena);
  cudaStream_t stream, other;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  const int runs = settings.small ? 20 : 1000;
  for (const bool keeps : {false, true}) {
    Random random(keeps ? 5 : 3);
    Shape s;
    s.dtype = keeps ? DType::kFloat16 : DType::kBFloat16;
    s.Hq = 2;
    s.Hv = 8;
    s.K = s.V = 128;
    // More tiles than a card has multiprocessors, of very different lengths.
    s.cu_seqlens = {0};
    for (int n = 0; n < 40; ++n) s.cu_seqlens.push_back(s.cu_seqlens.back() + random.integer(0, n % 8 == 0 ? 400 : 90));
    s.T = s.cu_seqlens.back() + 10;
    Features f;
    f.initial_state = f.final_state = true;
    PoolFeatures kept;
    kept.h = kept.A = kept.g_cumsum = keeps;
    ForwardCall call;
    call.draw(s, f, kept, false, random);
    checker.check(keeps ? "what training keeps" : "plain", call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
    arena.reset();
    RepeatedCall repeated(call, arena);
    const std::vector<char*> first = repeated.take_results(arena);
    repeated.run(stream);
    repeated.keep(first, stream);
    for (int i = 0; i < runs && repeated.status().ok(); ++i) {
      if (i % 2 == 1)
        spin_kernel<<<static_cast<unsigned>(random.integer(1, 160)), 64, 0, other>>>(random.integer(1000, 200000));
      repeated.poison(stream);
      repeated.run(stream);
      repeated.compare(first, stream);
    }
    if (!repeated.status().ok()) checker.fail("run", "sm90", repeated.status().message());
    if (const auto words = repeated.different(); words > 0) {
      checker.fail(keeps ? "what training keeps" : "plain", "sm90",
                   std::to_string(words) + " words moved between runs");
    }
  }
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
  return checker.finish();
}

// Ten thousand replays of captured graphs whose lengths change in place: [512] + [6] * (N - 1), which has hung others'
// kernels, and drawn ones, empty sequences included.
int64_t test_sm90_soak(const Settings& settings, Arena& arena) {
  Checker checker("graph replays with changing lengths, sm90", settings, arena);
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const std::vector<int64_t> counts = settings.small ? std::vector<int64_t>{33} : std::vector<int64_t>{33, 64, 97, 128};
  const int replays = settings.small ? 50 : 2500, patterns = settings.small ? 3 : 8;
  for (const int64_t N : counts) {
    Random random(static_cast<uint64_t>(N));
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = 512 + 6 * (N - 1);
    s.Hq = 2;
    s.Hv = 4;
    s.K = s.V = 128;
    s.cu_seqlens.assign(static_cast<size_t>(N) + 1, 0);
    Features f;
    f.initial_state = f.final_state = true;
    PoolFeatures kept;
    kept.h = kept.A = kept.g_cumsum = N % 2 == 1;  // both kernels
    ForwardCall call;
    call.draw(s, f, kept, false, random);
    std::vector<ForwardCall> drawn;
    for (int i = 0; i < patterns; ++i) {
      std::vector<int64_t> offsets = {0};
      if (i == 0) {
        offsets.push_back(512);
        while (static_cast<int64_t>(offsets.size()) <= N) offsets.push_back(offsets.back() + 6);
      } else {
        const int64_t end = i == 1 ? 0 : s.T - random.integer(0, 40);  // once all of them are empty
        while (static_cast<int64_t>(offsets.size()) < N) {
          offsets.push_back(random.chance(0.2) ? offsets.back() : random.integer(0, end));
        }
        std::sort(offsets.begin(), offsets.end());
        offsets.push_back(end);
      }
      call.in.shape.cu_seqlens = offsets;
      call.in.cu_seqlens.fill(
          [&](int64_t n, int64_t, int64_t, int64_t) { return static_cast<double>(offsets[static_cast<size_t>(n)]); });
      checker.check(std::to_string(N) + " sequences, pattern " + std::to_string(i), call, "sm90", "cuda_reference",
                    FLASH_QLA_CUDA);
      drawn.push_back(call);
    }
    arena.reset();
    RepeatedCall repeated(call, arena);
    const Tensor cu_seqlens = repeated.arguments().cu_seqlens;
    const size_t offset_bytes = call.in.cu_seqlens.bytes().size();
    std::vector<void*> offsets;
    std::vector<std::vector<char*>> expected;
    const auto set_lengths = [&](size_t i) {
      check_cuda(cudaMemcpyAsync(cu_seqlens.data, offsets[i], offset_bytes, cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
    };
    for (size_t i = 0; i < drawn.size(); ++i) {
      drawn[i].in.cu_seqlens.upload(arena);
      offsets.push_back(drawn[i].in.cu_seqlens.device().data);
      expected.push_back(repeated.take_results(arena));
      set_lengths(i);
      repeated.poison(stream);
      repeated.run(stream);
      repeated.keep(expected[i], stream);
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    repeated.run(stream);
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    if (!repeated.status().ok()) checker.fail("run", "sm90", repeated.status().message());
    for (int i = 0; i < replays; ++i) {
      const size_t pattern = static_cast<size_t>(random.integer(0, patterns - 1));
      set_lengths(pattern);
      repeated.poison(stream);
      check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
      repeated.compare(expected[pattern], stream);
    }
    if (const auto words = repeated.different(); words > 0) {
      checker.fail(std::to_string(N) + " sequences", "sm90", std::to_string(words) + " words differ in the replays");
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
  return checker.finish();
}

// The Hopper backward against the oracle: every option, layout and length.
int64_t test_sm90_backward(const Settings& settings, Arena& arena) {
  Checker checker("backward, sm90", settings, arena);
  const auto draw = [&](Random& r) {
    DType type = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    Shape s;
    do {
      s = draw_shape(type, settings.longest(), 256 * 256, r);
    } while (tokens_of(s) == 0);
    s.K = s.V = 128;
    // dg and dbeta are one inner product a token, and dq and dk of a lone token have one for a factor. The relative
    // error of a few such numbers measures how much their terms cancel, which no rounding to bf16 survives
    // (docs/numerics.md).
    if (tokens_of(s) < kChunkSize) s.dtype = type = DType::kFloat16;
    Features f = draw_features(type, s.K, r);
    // Without a state before it a lone token's decay acts on nothing: its gradient is the rounding of terms that
    // cancel.
    f.initial_state = true;
    // Under strong decay the final state's gradient reaches but a few tokens, whose numbers outweigh all others.
    const bool decays = f.gate || f.strong_decay;
    // In fp16 it may also decay to below the smallest number.
    const bool has_d_o = decays || type == DType::kFloat16 || r.chance(0.9),
               has_dht = (!decays || type == DType::kFloat16) && r.chance(0.5);
    f.force_intra_cp = r.chance(0.3);
    BackwardCall call;
    call.draw(s, f, f.g && !f.gate && r.chance(0.3), has_d_o, has_dht, r);
    if (r.chance(0.3)) {
      for (auto [name, buffer] : call.outputs()) {
        if (r.chance(0.5) && !(f.gate && name == "dg")) *buffer = Buffer();  // a gate's dg measures dA_log's terms
      }
    }
    if (tokens_of(s) < 8) call.dg = call.dbeta = call.dA_log = call.ddt_bias = Buffer();
    // The final state's gradient alone gives all tokens of a head much the same dg: one number, that may cancel.
    if (!has_d_o || f.scale == 0.0) call.dg = call.dA_log = call.ddt_bias = Buffer();
    return call;
  };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const BackwardCall& call) {
    checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
  });
  return checker.finish();
}

// Chunk slots are bounded by tokens / 64 + sequences, so these heads together would take 2 GB of scratch: they go in
// two halves, of which the first is the larger.
int64_t test_sm90_head_halves(const Settings& settings, Arena& arena) {
  Checker checker("heads in halves, sm90", settings, arena);
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

int64_t test_large(const Settings& settings, Arena& arena) {
  Checker checker("large", settings, arena);
  Random random(11);
  const auto both = [&](const char* what, const Shape& s, Features f) {
    f.initial_state = f.final_state = true;
    ForwardCall forward;
    forward.draw(s, f, PoolFeatures{}, false, random);
    checker.check(std::string(what) + ", forward", forward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
    BackwardCall backward;
    backward.draw(s, f, false, true, true, random);
    checker.check(std::string(what) + ", backward", backward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  };
  Shape many;
  many.T = 65536;
  many.Hv = 2;
  many.K = 16;
  many.V = 8;
  many.dtype = DType::kBFloat16;
  many.cu_seqlens.resize(65537);
  std::iota(many.cu_seqlens.begin(), many.cu_seqlens.end(), 0);
  both("65,536 sequences of one token", many, Features{});

  Shape models;
  models.T = 1000;
  models.Hq = 16;
  models.Hv = 32;
  models.K = models.V = 128;
  models.dtype = DType::kBFloat16;
  Features raw;
  raw.l2norm = raw.gate = raw.dt_bias = raw.sigmoid = true;
  both("16 and 32 heads of 128", models, raw);

  Shape olmo = models;
  olmo.T = 300;
  olmo.K = 96;
  olmo.V = 192;
  both("K 96, V 192", olmo, Features{});

  Shape longer;
  longer.T = 1 << 20;
  longer.K = longer.V = 8;
  ForwardCall forward;
  Features f;
  f.final_state = true;
  forward.draw(longer, f, PoolFeatures{}, false, random);
  checker.check("a million tokens, forward", forward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  longer.T = 1 << 17;
  BackwardCall backward;
  backward.draw(longer, f, false, true, true, random);
  checker.check("131,072 tokens, backward", backward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  return checker.finish();
}

int run(const Settings& settings) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: nothing was tested\n");
    return 0;
  }
  std::printf("%s\n", build_info().c_str());
  // The large cases take the most; initcheck pays for every megabyte.
  Arena arena(settings.small ? size_t{256} << 20 : size_t{24} << 30);
  struct Group {
    const char* name;
    bool needs_hopper;
    std::function<int64_t()> test;
  };
  std::vector<Group> groups = {
      {"oracle", false, [&] { return test_oracle(settings, arena); }},
      {"generic", false, [&] { return test_generic(settings, arena); }},
      {"decode", false, [&] { return test_decode(settings, arena); }},
      {"nan", false, [&] { return test_nan(settings, arena); }},
      {"invariance", false, [&] { return test_invariance(settings, arena, "cuda_generic", 72, {64, 100}); }},
      {"sm90 forward", true, [&] { return test_sm90_forward(settings, arena); }},
      {"sm90 forward, single tokens", true, [&] { return test_sm90_single_tokens(settings, arena); }},
      {"sm90 forward, keys", true, [&] { return test_sm90_keys(settings, arena); }},
      {"sm90 forward, repeats", true, [&] { return test_sm90_repeat(settings, arena); }},
      {"sm90 forward, soak", true, [&] { return test_sm90_soak(settings, arena); }},
      {"sm90 forward, batch", true, [&] { return test_sm90_batch(settings, arena); }},
      {"sm90 forward, nan", true, [&] { return test_sm90_nan(settings, arena); }},
      {"sm90 forward, invariance", true, [&] { return test_invariance(settings, arena, "sm90", 128, {64, 128}); }},
      {"sm90 backward", true, [&] { return test_sm90_backward(settings, arena); }}};
  if (!settings.small) {
    groups.push_back({"sm90 backward, head halves", true, [&] { return test_sm90_head_halves(settings, arena); }});
    groups.push_back({"sm90 forward, large", true, [&] { return test_sm90_large(settings, arena); }});
    groups.push_back({"large", false, [&] { return test_large(settings, arena); }});
  }
  const bool hopper = on_hopper();
  int64_t failures = 0, done = 0;
  for (const Group& group : groups) {
    if (std::string(group.name).find(settings.only) == std::string::npos) continue;
    ++done;
    if (group.needs_hopper && !hopper) {
      std::printf("%s: no Hopper GPU, not tested\n", group.name);
    } else {
      failures += group.test();
    }
  }
  if (done == 0) {
    std::fprintf(stderr, "--only names no group\n");
    return 2;
  }
  std::printf("%lld failed\n", static_cast<long long>(failures));
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flash_qla::testing

int main(int argc, char** argv) {
  flash_qla::testing::Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::atoll(argv[++i]) : 0; };
    if (flag == "--cases") {
      settings.cases = value();
    } else if (flag == "--seed") {
      settings.seed = static_cast<uint64_t>(value());
    } else if (flag == "--only-case") {
      settings.only_case = value();
    } else if (flag == "--only" && i + 1 < argc) {
      settings.only = argv[++i];
    } else if (flag == "--small") {
      settings.small = true;
    } else if (flag == "--once") {
      settings.twice = false;
    } else {
      std::fprintf(stderr,
                   "usage: generic_test [--cases N] [--seed S] [--only-case C] [--only NAME] [--small] [--once]\n");
      return 2;
    }
  }
  return flash_qla::testing::run(settings);
}
