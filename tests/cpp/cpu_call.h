// What the tests of the CPU backend share: calls with their tensors, made of a case's options, and distances.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/host_tensor.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla::cpu_call {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A tensor that owns its memory. With a gap its innermost rows lie `gap` elements apart and its memory begins with one.
struct Owned {
  std::vector<unsigned char> memory;
  Tensor t{};

  Owned() = default;
  Owned(DType type, std::vector<int64_t> shape, int64_t gap = 0) {
    t.ndim = static_cast<int32_t>(shape.size());
    t.dtype = static_cast<int32_t>(type);
    int64_t stride = 1;
    for (int32_t i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.stride[i] = stride;
      stride *= std::max<int64_t>(t.shape[i], 1) + (i == t.ndim - 1 ? gap : 0);
    }
    memory.assign(static_cast<size_t>((stride + gap) * size_of(type)), 0);
    t.data = memory.data() + gap * size_of(type);
  }
  Owned(const Owned& other) { *this = other; }
  Owned& operator=(const Owned& other) {
    memory = other.memory;
    t = other.t;
    if (!memory.empty()) {
      t.data = memory.data() + (static_cast<const unsigned char*>(other.t.data) - other.memory.data());
    }
    return *this;
  }
};

inline void for_each(const Tensor& t, const std::function<void(int64_t offset)>& fn) {
  int64_t shape[4] = {1, 1, 1, 1};
  for (int32_t i = 0; i < t.ndim; ++i) shape[i] = t.shape[i];
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      for (int64_t c = 0; c < shape[2]; ++c) {
        for (int64_t d = 0; d < shape[3]; ++d) fn(offset_of(t, a, b, c, d));
      }
    }
  }
}

inline void fill(const Tensor& t, const std::function<double()>& value) {
  for_each(t, [&](int64_t offset) { store(t, offset, value()); });
}

inline Owned indices(std::vector<int64_t> values, DType type = DType::kInt64, std::vector<int64_t> shape = {}) {
  Owned owned(type, shape.empty() ? std::vector<int64_t>{static_cast<int64_t>(values.size())} : shape);
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == DType::kInt32) {
      reinterpret_cast<int32_t*>(owned.t.data)[i] = static_cast<int32_t>(values[i]);
    } else if (type == DType::kBool) {
      reinterpret_cast<uint8_t*>(owned.t.data)[i] = values[i] != 0;
    } else {
      reinterpret_cast<int64_t*>(owned.t.data)[i] = values[i];
    }
  }
  return owned;
}

// Relative L2 distance of `t` to `expected`, leaving out elements that are finite in neither; infinity where only one
// of the two is finite. A tensor whose norm is below 1e-6 sqrt(n) is compared absolutely, at that.
inline double distance(const Tensor& t, const Tensor& expected) {
  double difference = 0.0, norm = 0.0, count = 0.0;
  bool same = true;
  std::vector<double> values;
  for_each(t, [&](int64_t offset) { values.push_back(load(t, offset)); });
  size_t i = 0;
  for_each(expected, [&](int64_t offset) {
    const double x = values[i++], y = load(expected, offset);
    same &= std::isfinite(x) == std::isfinite(y);
    if (!std::isfinite(x) || !std::isfinite(y)) return;
    difference += (x - y) * (x - y);
    norm += y * y;
    count += 1.0;
  });
  if (!same || i != values.size()) return kInfinity;
  return count == 0.0 ? 0.0 : std::sqrt(difference) / std::max(std::sqrt(norm), 1e-6 * std::sqrt(count));
}

// The same, worst over the heads (dimension `dim`).
inline double distance_per_head(Tensor t, Tensor expected, int dim) {
  double worst = 0.0;
  const int64_t heads = t.shape[dim];
  t.shape[dim] = expected.shape[dim] = 1;
  for (int64_t head = 0; head < heads; ++head) {
    worst = std::max(worst, distance(t, expected));
    t.data = static_cast<char*>(t.data) + t.stride[dim] * size_of(dtype(t));
    expected.data = static_cast<char*>(expected.data) + expected.stride[dim] * size_of(dtype(expected));
  }
  return worst;
}

// What a test asks for. Lengths empty: B sequences of T tokens; else packed, `padding` tokens after the last.
struct Case {
  std::string name;
  int64_t B = 1, T = 100, Hq = 2, Hv = 2, K = 32, V = 32;
  std::vector<int64_t> lengths;
  int64_t padding = 0;
  DType dtype = DType::kFloat32;
  DType gate_dtype = DType::kFloat32;
  bool has_g = true, has_beta = true, has_h0 = true;
  bool v_first = false, l2norm = false, gate = false, bias = true, sigmoid = false, neg = false;
  double scale = kNaN;
  double decay = 0.1;  // g is uniform in [-2 decay, 0]
  int64_t gap = 0;
  bool int32_offsets = false;
  bool has_do = true, has_dht = true, cumsum = false;
  int threads = 0;
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Inputs of a case, the same for every call with the same seed.
struct Inputs {
  Owned q, k, v, g, beta, A_log, dt_bias, cu_seqlens, h0, d_o, dht;
  int64_t N = 0, T = 0;
};

inline std::vector<int64_t> state_shape(const Case& c, int64_t rows) {
  return c.v_first ? std::vector<int64_t>{rows, c.Hv, c.V, c.K} : std::vector<int64_t>{rows, c.Hv, c.K, c.V};
}

inline DType accumulator(const Case& c) { return c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

inline Inputs make_inputs(const Case& c, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  Inputs in;
  in.N = c.B;
  in.T = c.T;
  if (!c.lengths.empty()) {
    std::vector<int64_t> offsets = {0};
    for (int64_t length : c.lengths) offsets.push_back(offsets.back() + length);
    in.N = static_cast<int64_t>(c.lengths.size());
    in.T = offsets.back() + c.padding;
    in.cu_seqlens = indices(offsets, c.int32_offsets ? DType::kInt32 : DType::kInt64);
  }
  const double key = 1.0 / std::sqrt(static_cast<double>(c.K));
  in.q = Owned(c.dtype, {c.B, in.T, c.Hq, c.K}, c.gap);
  in.k = Owned(c.dtype, {c.B, in.T, c.Hq, c.K}, c.gap);
  in.v = Owned(c.dtype, {c.B, in.T, c.Hv, c.V}, c.gap);
  fill(in.q.t, [&] { return normal(random) * key; });
  fill(in.k.t, [&] { return normal(random) * key; });
  fill(in.v.t, [&] { return normal(random); });
  if (c.has_g) {
    in.g = Owned(c.gate_dtype, {c.B, in.T, c.Hv}, c.gap);
    fill(in.g.t, [&] { return c.gate ? normal(random) : -2.0 * c.decay * uniform(random); });
  }
  if (c.has_beta) {
    in.beta = Owned(c.gate_dtype, {c.B, in.T, c.Hv}, c.gap);
    fill(in.beta.t, [&] { return c.sigmoid ? normal(random) : uniform(random); });
  }
  if (c.gate) {
    in.A_log = Owned(DType::kFloat32, {c.Hv});
    fill(in.A_log.t, [&] { return std::log(0.05 + 4.0 * uniform(random)); });
    if (c.bias) in.dt_bias = Owned(DType::kFloat32, {c.Hv});
    if (c.bias) fill(in.dt_bias.t, [&] { return normal(random) - 2.0; });
  }
  if (c.has_h0) {
    in.h0 = Owned(c.gate_dtype, state_shape(c, in.N), c.gap);
    fill(in.h0.t, [&] { return 0.5 * normal(random); });
  }
  in.d_o = Owned(c.dtype, {c.B, in.T, c.Hv, c.V}, c.gap);
  fill(in.d_o.t, [&] { return normal(random); });
  in.dht = Owned(accumulator(c), state_shape(c, in.N), c.gap);
  fill(in.dht.t, [&] { return normal(random); });
  return in;
}

inline void set_options(const Case& c, const char* path, flash_qla_options* options) {
  options->scale = c.scale;
  options->state_v_first = c.v_first;
  options->use_qk_l2norm_in_kernel = c.l2norm;
  options->use_gate_in_kernel = c.gate;
  options->use_beta_sigmoid_in_kernel = c.sigmoid;
  options->allow_neg_eigval = c.neg;
  options->path = path;
  options->num_threads = c.threads;
}

template <class Op, class Arguments>
void run(const Arguments& args) {
  size_t bytes = 0;
  Status status = Op::workspace_size(args, &bytes);
  ASSERT_TRUE(status.ok()) << status.message();
  std::vector<unsigned char> memory(bytes + 256, 0xff);  // NaN in every dtype
  void* workspace = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256);
  status = Op::run(args, workspace, bytes);
  ASSERT_TRUE(status.ok()) << status.message();
}

struct Outputs {
  Owned o, final_state, g_cumsum, A, h;
};

inline Owned poisoned(DType type, std::vector<int64_t> shape, int64_t gap = 0) {
  Owned owned(type, shape, gap);
  std::memset(owned.memory.data(), 0xff, owned.memory.size());
  return owned;
}

inline ForwardArguments forward_arguments(const Case& c, const Inputs& in, const char* path) {
  ForwardArguments args;
  set_options(c, path, &args.options);
  args.q = in.q.t;
  args.k = in.k.t;
  args.v = in.v.t;
  args.g = in.g.t;
  args.beta = in.beta.t;
  args.A_log = in.A_log.t;
  args.dt_bias = in.dt_bias.t;
  args.cu_seqlens = in.cu_seqlens.t;
  args.initial_state = in.h0.t;
  return args;
}

template <class Op>
Outputs forward(const Case& c, const Inputs& in, const char* path, bool all_outputs) {
  Outputs out;
  ForwardArguments args = forward_arguments(c, in, path);
  out.o = poisoned(c.dtype, {c.B, in.T, c.Hv, c.V}, c.gap);
  out.final_state = poisoned(accumulator(c), state_shape(c, in.N), c.gap);
  args.o = out.o.t;
  args.final_state = out.final_state.t;
  if (all_outputs) {
    const int64_t chunks = c.lengths.empty() ? c.B * ceil_div(in.T, kChunkSize) : in.T / kChunkSize + in.N;
    out.g_cumsum = poisoned(accumulator(c), {c.B, in.T, c.Hv});
    out.A = poisoned(c.dtype, {c.B, in.T, c.Hv, kChunkSize}, c.gap);
    out.h = poisoned(c.dtype, state_shape(c, chunks));
    args.g_cumsum = out.g_cumsum.t;
    args.A = out.A.t;
    args.h = out.h.t;
  }
  run<Op>(args);
  return out;
}

struct Gradients {
  Owned dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias;
};

// Arguments of the backward without outputs. `cumsum` is filled where the case gives it in place of g.
inline BackwardArguments backward_arguments(const Case& c, const Inputs& in, const char* path, Owned* cumsum) {
  BackwardArguments args;
  set_options(c, path, &args.options);
  args.q = in.q.t;
  args.k = in.k.t;
  args.v = in.v.t;
  args.g = in.g.t;
  args.beta = in.beta.t;
  args.A_log = in.A_log.t;
  args.dt_bias = in.dt_bias.t;
  args.cu_seqlens = in.cu_seqlens.t;
  args.initial_state = in.h0.t;
  if (c.cumsum) {
    *cumsum = forward<ChunkForward>(c, in, "reference", true).g_cumsum;
    args.g = cumsum->t;
    args.g_is_cumsum = 1;
  }
  if (c.has_do) args.d_o = in.d_o.t;
  if (c.has_dht) args.dht = in.dht.t;
  return args;
}

inline Gradients make_gradients(const Case& c, const Inputs& in) {
  Gradients out;
  out.dq = poisoned(c.dtype, {c.B, in.T, c.Hq, c.K}, c.gap);
  out.dk = poisoned(c.dtype, {c.B, in.T, c.Hq, c.K}, c.gap);
  out.dv = poisoned(c.dtype, {c.B, in.T, c.Hv, c.V}, c.gap);
  out.dg = poisoned(accumulator(c), {c.B, in.T, c.Hv}, c.gap);
  out.dbeta = poisoned(accumulator(c), {c.B, in.T, c.Hv}, c.gap);
  out.dh0 = poisoned(accumulator(c), state_shape(c, in.N), c.gap);
  if (c.gate) out.dA_log = poisoned(accumulator(c), {c.Hv});
  if (c.gate && c.bias) out.ddt_bias = poisoned(accumulator(c), {c.Hv});
  return out;
}

// Each gradient with the argument that receives it.
inline std::vector<std::pair<Owned*, Tensor*>> pairs(Gradients* g, BackwardArguments* args) {
  return {
      {&g->dq, &args->dq},       {&g->dk, &args->dk},   {&g->dv, &args->dv},         {&g->dg, &args->dg},
      {&g->dbeta, &args->dbeta}, {&g->dh0, &args->dh0}, {&g->dA_log, &args->dA_log}, {&g->ddt_bias, &args->ddt_bias}};
}

inline Gradients backward(const Case& c, const Inputs& in, const char* path) {
  Owned cumsum;
  BackwardArguments args = backward_arguments(c, in, path, &cumsum);
  Gradients out = make_gradients(c, in);
  for (auto [gradient, argument] : pairs(&out, &args)) *argument = gradient->t;
  run<ChunkBackward>(args);
  return out;
}

// Bounds of docs/numerics.md against fp64: float32 inputs, and half-width ones. The CPU computes in float32 either way;
// what remains for half-width inputs is the rounding of the results.
struct Bounds {
  double o, gradient, gate_gradient;
};
inline Bounds bounds(const Case& c) {
  if (c.dtype == DType::kFloat64) return {1e-13, 1e-12, 1e-12};
  if (c.dtype == DType::kFloat32) return c.cumsum ? Bounds{5e-5, 5e-5, 5e-5} : Bounds{1e-5, 1e-5, 1e-5};
  return {5e-3, 8e-3, 1.5e-2};
}

inline bool same_bits(const Owned& a, const Owned& b) { return a.memory == b.memory; }

inline void expect_near(const char* name, const Owned& t, const Owned& expected, int head_dim, double bound) {
  EXPECT_LE(distance_per_head(t.t, expected.t, head_dim), bound) << name;
}

}  // namespace flash_qla::cpu_call
