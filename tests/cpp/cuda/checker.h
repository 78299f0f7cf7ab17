// What the device tests share: settings, the checks of one call on a path against another path, and drawn shapes,
// options and calls.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <set>

#include "calls.h"
#include "emulation.h"

namespace flash_qla::testing {

struct Settings {
  int64_t cases = 150;  // drawn cases of each kind
  uint64_t seed = 1;
  std::set<int64_t> only_cases;  // of the drawn ones; empty: all
  int64_t gigabytes = 24;        // of device memory: what the large cases take
  bool small = false;
  bool twice = true;
  bool kernels = false;  // prints which kernels were launched, and tails of sizes
  std::string only;      // runs the tests whose name contains it
  // Longest batch row and largest K * V of a drawn case. The small ones still reach every kernel: K = 256 with V = 8.
  int64_t longest() const { return small ? 70 : 400; }
  int64_t largest_state() const { return small ? 256 * 8 : 256 * 256; }
};

// What computes what results are compared with.
struct Oracle {
  const char* path;
  flash_qla_device_type device;
};
inline constexpr Oracle kDeviceOracle = {"cuda_reference", FLASH_QLA_CUDA}, kHostOracle = {"reference", FLASH_QLA_CPU};

// Bounds against fp64 by dtype of the inputs and of the output; the larger one holds.
inline double bound(const std::string& name, DType input, DType output) {
  const bool gate = name == "dg" || name == "dbeta" || name == "dA_log" || name == "ddt_bias";
  const bool gradient = name[0] == 'd' || name == "R";
  // The rounding of a half-precision output alone is up to 2^-9.
  if (input != DType::kFloat32 || output != DType::kFloat32) return gate ? 1.5e-2 : gradient ? 8e-3 : 5e-3;
  return 1e-5;
}

inline int head_dim(const std::string& name) {
  if (name == "dA_log" || name == "ddt_bias") return -1;
  const bool state = name == "final_state" || name == "state_pool" || name == "checkpoints" || name == "h" ||
                     name == "dh0" || name == "states_out" || name == "S" || name == "M" || name == "R";
  return state ? 1 : 2;
}

// What a call's results are held to beside the bounds of their dtypes.
template <class Call>
struct Yardsticks {
  double exact_bound = 0.0;  // above 0: in place of those bounds
  // The same call without something that may make it at most a tenth less exact, but for what may be dropped.
  const Call* plain = nullptr;
  // The call may be ill-conditioned: what is past its bound may be off by twice what an emulation of its dtype's
  // roundings is off by (docs/numerics.md).
  bool emulation = false;
};
inline constexpr double kMayBeDropped = 1.2e-7;  // of a state, relative to it (docs/numerics.md)

class Checker {
 public:
  // about: the path that must compute all of the group's cases; null: any may, and the summary tells them apart.
  Checker(std::string group, const Settings& settings, Arena& arena, const char* about = nullptr)
      : group_(std::move(group)),
        twice_(settings.twice),
        arena_(arena),
        about_(about),
        start_(std::chrono::steady_clock::now()) {}

  // Compares path `path` with path `reference` on the host or the device.
  template <class Call>
  void check(const std::string& what, const Call& drawn, const char* path, const char* reference,
             flash_qla_device_type reference_device, const Yardsticks<Call>& held_to = {}) {
    const auto& [exact_bound, plain, emulation] = held_to;
    Call expected = drawn, actual = drawn;
    if constexpr (requires { expected.complete(); }) expected.complete();
    if (const std::string error = run_call(expected, reference, reference_device, arena_); !error.empty()) {
      count("none");
      return fail(what, reference, error);
    }
    if (!run(what, actual, path)) return;
    Call yardstick = plain != nullptr ? *plain : Call();
    if (plain != nullptr) {
      const std::string error = run_call(yardstick, path, FLASH_QLA_CUDA, arena_);
      if (!error.empty()) return fail(what, path, error);
    }
    const NamedBuffers wanted = together(expected), got = together(actual), yards = together(yardstick);
    EmulatedErrors emulated;
    for (size_t i = 0; i < got.size(); ++i) {
      const auto& [name, buffer] = got[i];
      if (!buffer->present()) continue;
      // With one key of norm one and beta 1 a token replaces the whole state, and the norm of a single key is a
      // constant but for its epsilon: gradients are then zero, or small, as differences of terms of order one. Two
      // oracles in fp64 agree on such terms, not on the digits that are left of their difference.
      const bool cancels = exact_bound > 0.0 && drawn.in.shape.K == 1;
      const double error = relative_error(*buffer, *wanted[i].second, head_dim(name),
                                          exact_bound > 0.0 ? 0.0 : expected.least_norm(name), cancels ? 1.0 : 1e-6);
      double most = exact_bound > 0.0 ? exact_bound : bound(name, actual.in.shape.dtype, dtype(buffer->shape_view()));
      if (emulation && !(error <= most)) {
        if (Call inputs = drawn; emulated.empty()) emulated = emulate(inputs);
        most = std::max(most, 2.0 * emulated[head_dim(name) == 1 ? "state" : name]);
      }
      if (plain != nullptr) {
        const double without = relative_error(*yards[i].second, *wanted[i].second, head_dim(name));
        most = std::min(most, 1.1 * without + kMayBeDropped);
      }
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

  // A case that is compared by other means than check(), on the device. Returns whether it ran.
  template <class Call>
  bool run(const std::string& what, Call& call, const char* path) {
    std::string computed_by;
    const std::string error = run_call(call, path, FLASH_QLA_CUDA, arena_, &computed_by);
    count(computed_by);
    if (!error.empty()) fail(what, path, error);
    return error.empty();
  }

  // A case that runs elsewhere, by this path.
  void count(const std::string& path) { ++cases_[path]; }

  void fail(const std::string& what, const char* path, const std::string& message) {
    ++failures_;
    std::printf("FAILED %s: %s: %s: %s\n", group_.c_str(), what.c_str(), path == nullptr ? "default path" : path,
                message.c_str());
  }

  // Prints the summary, at its end how many cases each path has computed; returns the number of failed checks.
  int64_t finish() {
    int64_t cases = 0;
    std::string paths;
    for (const auto& [path, count] : cases_) {
      cases += count;
      paths += (paths.empty() ? " " : ", ") + path + " " + std::to_string(count);
      if (about_ != nullptr && path != about_) fail(std::to_string(count) + " cases", about_, "computed by " + path);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    std::printf("%s: %lld cases, %lld failed, %.1f s; largest error over its bound:", group_.c_str(),
                static_cast<long long>(cases), static_cast<long long>(failures_), seconds);
    for (const auto& [name, ratio] : worst_) std::printf(" %s %.3g", name.c_str(), ratio);
    std::printf(";%s\n", paths.c_str());
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
  const char* about_;
  std::chrono::steady_clock::time_point start_;
  std::map<std::string, int64_t> cases_;  // by the path that computed them
  int64_t failures_ = 0;
  std::map<std::string, double> worst_;
};

// Offsets of sequences cut anywhere, with empty ones, that leave up to 20 tokens at the end outside.
inline std::vector<int64_t> draw_offsets(int64_t T, Random& random) {
  std::vector<int64_t> offsets = {0};
  const int64_t sequences = random.integer(1, 6), end = std::max<int64_t>(0, T - random.integer(0, 20));
  for (int64_t n = 1; n < sequences; ++n) {
    offsets.push_back(random.chance(0.25) ? offsets.back() : random.integer(0, end));
  }
  std::sort(offsets.begin(), offsets.end());
  offsets.push_back(random.chance(0.15) ? offsets.back() : end);
  return offsets;
}

inline Shape draw_shape(DType type, int64_t longest, int64_t largest_state, Random& random) {
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

inline Features draw_features(DType type, Random& random) {
  static const std::vector<DType> kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  Features f;
  f.g = random.chance(0.9);
  f.beta = random.chance(0.9);
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

inline PoolFeatures draw_pool_features(bool recurrent, bool varlen, Random& random) {
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

inline ForwardCall draw_forward(DType type, int64_t longest, int64_t largest_state, Random& random) {
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
  Features f = draw_features(type, random);
  f.any_length = random.chance(0.3);
  call.draw(s, f, pool, recurrent, random);
  return call;
}

inline BackwardCall draw_backward(DType type, int64_t longest, int64_t largest_state, Random& random) {
  const Shape s = draw_shape(type, longest, largest_state, random);
  Features f = draw_features(type, random);
  f.any_length = random.chance(0.3);
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
inline std::string describe(const Shape& s, const Features& f) {
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

// What else a call has.
inline std::string describe(const ForwardCall& call) {
  std::string text;
  for (const auto& [on, name] : {std::pair<bool, const char*>{call.in.features.force_intra_cp, "forced"},
                                 {call.in.features.cp_mode == FLASH_QLA_CP_INVARIANT, "by length"},
                                 {call.pool.present(), "pool"},
                                 {call.pool.present() && !call.final_indices.present(), "in place"},
                                 {call.checkpoints.present(), "checkpoints"},
                                 {call.checkpoint_offsets.present(), "listed"},
                                 {call.h.present(), "h"},
                                 {call.A.present(), "A"}}) {
    if (on) text += std::string(" ") + name;
  }
  return text;
}
inline std::string describe(const BackwardCall& call) { return call.in.features.force_intra_cp ? " forced" : ""; }

template <class Draw, class Check>
void for_each_case(const Settings& settings, int64_t cases, Draw draw, Check check) {
  for (int64_t i = 0; i < cases; ++i) {
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    auto call = draw(random);
    const Shape& s = call.in.shape;
    char what[400];
    std::snprintf(what, sizeof(what), "case %lld (B %lld T %lld N %lld Hq %lld Hv %lld K %lld V %lld,%s)",
                  static_cast<long long>(i), static_cast<long long>(s.B), static_cast<long long>(s.T),
                  static_cast<long long>(s.N()), static_cast<long long>(s.Hq), static_cast<long long>(s.Hv),
                  static_cast<long long>(s.K), static_cast<long long>(s.V),
                  (describe(s, call.in.features) + describe(call)).c_str());
    check(std::string(what), call);
  }
}

inline DType draw_dtype(Random& random) {
  static const std::vector<DType> kTypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  return random.pick(kTypes);
}

inline const char* name_of(DType type) { return type == DType::kBFloat16 ? "bf16" : "fp16"; }

// Whether two tensors have the same bits; both contiguous.
inline bool same(Buffer a, Buffer b) {
  return a.slice(0, 0, a.shape_view().shape[0]).bytes() == b.slice(0, 0, b.shape_view().shape[0]).bytes();
}

// Tokens in sequences.
inline int64_t tokens_of(const Shape& s) {
  return s.cu_seqlens.empty() ? s.B * s.T : s.cu_seqlens.back() - s.cu_seqlens[0];
}

}  // namespace flash_qla::testing
