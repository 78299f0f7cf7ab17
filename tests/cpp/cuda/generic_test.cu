// The CUDA paths against each other and against the host, on a machine with a GPU:
//   cuda_reference (the fp64 oracle on the device) against reference (the one on the host), fp64 tensors, to 1e-12;
//   cuda_generic, cuda_decode and sm90 against cuda_reference, at the bounds that the library promises;
// over drawn shapes and options, and over cases that are chosen for their size. Every output and the workspace start as
// NaN, every run is done twice and must give the same bits, inputs must stay as they are, and nothing may be written
// past the end of a tensor. Without a GPU it says so and succeeds.
//
//   generic_test [--cases N] [--seed S] [--only-case C] [--small] [--once]
//
// prints a line for every failed check, one summary per group, and exits with 1 if any check failed. --once leaves out
// the the second runs.
#include <chrono>
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
  Checker(const char* group, const Settings& settings, Arena& arena)
      : group_(group), twice_(settings.twice), arena_(arena), start_(std::chrono::steady_clock::now()) {}

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
      const double error = relative_error(*buffer, *wanted[i].second, head_dim(name));
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

template <class Draw, class Check>
void for_each_case(const Settings& settings, int64_t cases, Draw draw, Check check) {
  for (int64_t i = 0; i < cases; ++i) {
    if (settings.only_case >= 0 && i != settings.only_case) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    auto call = draw(random);
    const Shape& s = call.in.shape;
    char what[160];
    std::snprintf(what, sizeof(what), "case %lld (B %lld T %lld N %lld Hq %lld Hv %lld K %lld V %lld)",
                  static_cast<long long>(i), static_cast<long long>(s.B), static_cast<long long>(s.T),
                  static_cast<long long>(s.N()), static_cast<long long>(s.Hq), static_cast<long long>(s.Hv),
                  static_cast<long long>(s.K), static_cast<long long>(s.V));
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
  // With an initial state: the gradient of a decay that acts on nothing is 0 * NaN, and whether that is formed is no
  // rule.
  f.initial_state = true;
  BackwardCall backward;
  backward.draw(s, f, false, true, false, random);
  backward.in.g.fill([&](int64_t, int64_t t, int64_t, int64_t) { return -0.1 * random.uniform() * (t % 3); });
  backward.d_o.fill([&](int64_t, int64_t t, int64_t, int64_t) { return t == 129 ? NAN : random.normal(); });
  checker.check("backward", backward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  return checker.finish();
}

// Whether two tensors have the same bits; both contiguous.
bool same(Buffer a, Buffer b) {
  return a.slice(0, 0, a.shape_view().shape[0]).bytes() == b.slice(0, 0, b.shape_view().shape[0]).bytes();
}

// A sequence's bits depend on nothing but the sequence: not on what else is in the batch, nor on where it is cut.
int64_t test_invariance(const Settings& settings, Arena& arena) {
  Checker checker("bits depend on the sequence alone", settings, arena);
  Random random(13);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.T = 300;
  s.Hq = 2;
  s.Hv = 4;
  s.K = 128;
  s.V = 72;
  s.cu_seqlens = {0, 17, 17, 209, 300};
  Features f;
  f.initial_state = f.final_state = true;
  ForwardCall batch;
  batch.draw(s, f, PoolFeatures{}, false, random);
  ForwardCall whole = batch;
  const auto run = [&](ForwardCall& call) {
    checker.count();
    const std::string error = run_call(call, "cuda_generic", FLASH_QLA_CUDA, arena);
    if (!error.empty()) checker.fail("forward", "cuda_generic", error);
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
  // The third sequence alone, and cut after 64 and 100 tokens.
  ForwardCall alone = part(17, 209, batch.in.initial_state.slice(0, 2, 3));
  if (!same(alone.o, whole.o.slice(1, 17, 209))) checker.fail("alone", "cuda_generic", "o differs");
  if (!same(alone.final_state, whole.final_state.slice(0, 2, 3)))
    checker.fail("alone", "cuda_generic", "state differs");
  for (const int64_t cut : {64, 100}) {
    ForwardCall first = part(17, 17 + cut, batch.in.initial_state.slice(0, 2, 3));
    ForwardCall second = part(17 + cut, 209, first.final_state);
    if (!same(first.o, alone.o.slice(1, 0, cut))) checker.fail("cut", "cuda_generic", "o before the cut differs");
    if (!same(second.o, alone.o.slice(1, cut, 192))) checker.fail("cut", "cuda_generic", "o after the cut differs");
    if (!same(second.final_state, alone.final_state)) checker.fail("cut", "cuda_generic", "state differs");
  }
  return checker.finish();
}

// The Hopper backward: what it takes (most of it, or the group fails) against the oracle.
int64_t test_sm90_backward(const Settings& settings, Arena& arena) {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  if (major != 9) {
    std::printf("no Hopper GPU: sm90 was not tested\n");
    return 0;
  }
  Checker checker("backward, sm90", settings, arena);
  const auto draw = [](Random& r) {
    const DType type = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    Shape s = draw_shape(type, 400, 256 * 256, r);
    s.K = s.V = 128;
    s.T = std::max<int64_t>(s.T, 1);
    Features f = draw_features(type, s.K, r);
    f.l2norm = f.gate = f.dt_bias = f.sigmoid = f.negative = false;
    f.strided = r.chance(0.2);
    // Without a state before it a lone token's decay acts on nothing: its gradient is the rounding of terms that
    // cancel.
    f.initial_state = true;
    BackwardCall call;
    call.draw(s, f, f.g && r.chance(0.3), r.chance(0.9), r.chance(0.5), r);
    if (r.chance(0.3)) {
      for (auto [name, buffer] : call.outputs()) {
        if (r.chance(0.5)) *buffer = Buffer();
      }
    }
    return call;
  };
  int64_t drawn = 0, taken = 0;
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const BackwardCall& call) {
    ++drawn;
    BackwardCall copy = call;
    auto args = copy.arguments([](Buffer& b) { return b.present() ? b.host() : Tensor{}; });
    args.options.path = "sm90";
    args.options.device_type = FLASH_QLA_CUDA;
    args.options.device_index = device;
    if (!ChunkBackward::can_implement(args).ok()) return;  // strides that the copy engine does not take
    ++taken;
    checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
  });
  if (2 * taken < drawn) checker.fail("can_implement", "sm90", "takes too few calls");
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
  std::printf("%s", build_info().c_str());
  // The large cases take the most; initcheck pays for every megabyte.
  Arena arena(settings.small ? size_t{256} << 20 : size_t{24} << 30);
  int64_t failures = test_oracle(settings, arena) + test_generic(settings, arena) + test_decode(settings, arena) +
                     test_nan(settings, arena) + test_invariance(settings, arena) + test_sm90_backward(settings, arena);
  if (!settings.small) failures += test_large(settings, arena);
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
    } else if (flag == "--small") {
      settings.small = true;
    } else if (flag == "--once") {
      settings.twice = false;
    } else {
      std::fprintf(stderr, "usage: generic_test [--cases N] [--seed S] [--only-case C] [--small] [--once]\n");
      return 2;
    }
  }
  return flash_qla::testing::run(settings);
}
