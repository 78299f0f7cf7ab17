// The CPU backend against the fp64 reference, forward, recurrent and backward, over shapes, dtypes and options; and
// what the reference cannot tell: bits that depend on nothing but the sequence.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/host_tensor.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

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

void for_each(const Tensor& t, const std::function<void(int64_t offset)>& fn) {
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

void fill(const Tensor& t, const std::function<double()>& value) {
  for_each(t, [&](int64_t offset) { store(t, offset, value()); });
}

Owned indices(std::vector<int64_t> values, DType type = DType::kInt64, std::vector<int64_t> shape = {}) {
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
double distance(const Tensor& t, const Tensor& expected) {
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
double distance_per_head(Tensor t, Tensor expected, int dim) {
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

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

// Inputs of a case, the same for every call with the same seed.
struct Inputs {
  Owned q, k, v, g, beta, A_log, dt_bias, cu_seqlens, h0, d_o, dht;
  int64_t N = 0, T = 0;
};

std::vector<int64_t> state_shape(const Case& c, int64_t rows) {
  return c.v_first ? std::vector<int64_t>{rows, c.Hv, c.V, c.K} : std::vector<int64_t>{rows, c.Hv, c.K, c.V};
}

DType accumulator(const Case& c) { return c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

Inputs make_inputs(const Case& c, unsigned seed = 1) {
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

void set_options(const Case& c, const char* path, flash_qla_options* options) {
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

Owned poisoned(DType type, std::vector<int64_t> shape, int64_t gap = 0) {
  Owned owned(type, shape, gap);
  std::memset(owned.memory.data(), 0xff, owned.memory.size());
  return owned;
}

ForwardArguments forward_arguments(const Case& c, const Inputs& in, const char* path) {
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
BackwardArguments backward_arguments(const Case& c, const Inputs& in, const char* path, Owned* cumsum) {
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

Gradients make_gradients(const Case& c, const Inputs& in) {
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
std::vector<std::pair<Owned*, Tensor*>> pairs(Gradients* g, BackwardArguments* args) {
  return {
      {&g->dq, &args->dq},       {&g->dk, &args->dk},   {&g->dv, &args->dv},         {&g->dg, &args->dg},
      {&g->dbeta, &args->dbeta}, {&g->dh0, &args->dh0}, {&g->dA_log, &args->dA_log}, {&g->ddt_bias, &args->ddt_bias}};
}

Gradients backward(const Case& c, const Inputs& in, const char* path) {
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
Bounds bounds(const Case& c) {
  if (c.dtype == DType::kFloat64) return {1e-13, 1e-12, 1e-12};
  if (c.dtype == DType::kFloat32) return c.cumsum ? Bounds{5e-5, 5e-5, 5e-5} : Bounds{1e-5, 1e-5, 1e-5};
  return {5e-3, 8e-3, 1.5e-2};
}

bool same_bits(const Owned& a, const Owned& b) { return a.memory == b.memory; }

void expect_near(const char* name, const Owned& t, const Owned& expected, int head_dim, double bound) {
  EXPECT_LE(distance_per_head(t.t, expected.t, head_dim), bound) << name;
}

class CpuBackend : public ::testing::TestWithParam<Case> {};

TEST_P(CpuBackend, ForwardMatchesReference) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Outputs ours = forward<ChunkForward>(c, in, "cpu", true);
  const Outputs reference = forward<ChunkForward>(c, in, "reference", true);
  const double bound = bounds(c).o;
  expect_near("o", ours.o, reference.o, 2, bound);
  expect_near("final_state", ours.final_state, reference.final_state, 1, bound);
  expect_near("g_cumsum", ours.g_cumsum, reference.g_cumsum, 2, bound);
  expect_near("A", ours.A, reference.A, 2, bound);
  expect_near("h", ours.h, reference.h, 1, bound);
}

TEST_P(CpuBackend, RecurrentMatchesReference) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Outputs ours = forward<Recurrent>(c, in, "cpu", false);
  const Outputs reference = forward<Recurrent>(c, in, "reference", false);
  expect_near("o", ours.o, reference.o, 2, bounds(c).o);
  expect_near("final_state", ours.final_state, reference.final_state, 1, bounds(c).o);
}

TEST_P(CpuBackend, BackwardMatchesReference) {
  const Case& c = GetParam();
  const Inputs in = make_inputs(c);
  const Gradients ours = backward(c, in, "cpu"), reference = backward(c, in, "reference");
  const Bounds bound = bounds(c);
  expect_near("dq", ours.dq, reference.dq, 2, bound.gradient);
  expect_near("dk", ours.dk, reference.dk, 2, bound.gradient);
  expect_near("dv", ours.dv, reference.dv, 2, bound.gradient);
  expect_near("dh0", ours.dh0, reference.dh0, 1, bound.gradient);
  expect_near("dg", ours.dg, reference.dg, 2, bound.gate_gradient);
  expect_near("dbeta", ours.dbeta, reference.dbeta, 2, bound.gate_gradient);
  if (c.gate) expect_near("dA_log", ours.dA_log, reference.dA_log, 0, bound.gate_gradient);
  if (c.gate && c.bias) expect_near("ddt_bias", ours.ddt_bias, reference.ddt_bias, 0, bound.gate_gradient);
}

std::vector<Case> cases() {
  std::vector<Case> list;
  const auto add = [&list](const std::string& name, const std::function<void(Case&)>& change) {
    Case c;
    c.name = name;
    change(c);
    list.push_back(c);
  };
  for (int64_t T : {1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 129, 300}) {
    add(std::string("T").append(std::to_string(T)), [T](Case& c) { c.T = T; });
  }
  for (auto [K, V] : {std::pair<int64_t, int64_t>{1, 1},
                      {1, 256},
                      {3, 5},
                      {16, 24},
                      {64, 128},
                      {128, 128},
                      {96, 192},
                      {100, 60},
                      {256, 256},
                      {255, 1}}) {
    add(std::string("K").append(std::to_string(K)).append("V").append(std::to_string(V)), [K = K, V = V](Case& c) {
      c.K = K;
      c.V = V;
      c.Hq = c.Hv = 1;
      c.T = 140;
    });
  }
  add("Batch", [](Case& c) { c.B = 3; });
  add("Groups", [](Case& c) { c.Hv = 6, c.B = 2; });
  add("Varlen", [](Case& c) { c.lengths = {0, 37, 0, 200, 64, 1, 0}, c.padding = 70, c.Hv = 4; });
  add("VarlenInt32", [](Case& c) { c.lengths = {65, 3}, c.int32_offsets = true; });
  add("AllEmpty", [](Case& c) { c.lengths = {0, 0}, c.padding = 5; });
  add("NoTokens", [](Case& c) { c.T = 0; });
  add("NoSequences", [](Case& c) { c.B = 0; });
  add("VFirst", [](Case& c) { c.v_first = true, c.V = 48; });
  add("Gaps", [](Case& c) { c.gap = 3, c.V = 40, c.lengths = {70, 20}; });
  add("Plain", [](Case& c) { c.has_g = c.has_beta = c.has_h0 = false; });
  add("NoBeta", [](Case& c) { c.has_beta = false, c.l2norm = true; });
  add("L2norm", [](Case& c) { c.l2norm = true, c.Hv = 4; });
  add("Gate", [](Case& c) { c.gate = c.sigmoid = true; });
  add("GateWithoutBias", [](Case& c) { c.gate = c.sigmoid = c.neg = c.l2norm = true, c.bias = false; });
  add("ScaleZero", [](Case& c) { c.scale = 0.0; });
  add("Scale", [](Case& c) { c.scale = -0.7; });
  add("NoDecay", [](Case& c) { c.decay = 0.0, c.T = 500; });
  add("StrongDecay", [](Case& c) { c.decay = 16.0, c.T = 200; });
  add("Growth", [](Case& c) { c.decay = -0.01, c.T = 200; });
  add("NoDo", [](Case& c) { c.has_do = false; });
  add("NoDht", [](Case& c) { c.has_dht = c.has_h0 = false; });
  add("Cumsum", [](Case& c) { c.cumsum = true, c.T = 200; });
  add("CumsumVarlen", [](Case& c) { c.cumsum = true, c.lengths = {100, 130}, c.decay = 2.0; });
  // 9000 tokens are more than the backward keeps the states of at once.
  add("Long", [](Case& c) { c.T = 9000, c.Hq = c.Hv = 1, c.K = c.V = 8; });
  for (auto [type, name] : {std::pair<DType, const char*>{DType::kBFloat16, "BFloat16"},
                            {DType::kFloat16, "Float16"},
                            {DType::kFloat64, "Float64"}}) {
    add(name, [type = type](Case& c) {
      c.dtype = c.gate_dtype = type;
      c.T = 200, c.K = 64, c.V = 64;
    });
    add(std::string(name) + "Options", [type = type](Case& c) {
      c.dtype = type, c.gate_dtype = DType::kBFloat16;
      c.Hv = 4, c.lengths = {90, 0, 33}, c.v_first = c.l2norm = c.gate = c.sigmoid = c.neg = true, c.gap = 1;
    });
  }
  return list;
}

INSTANTIATE_TEST_SUITE_P(Cases, CpuBackend, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

// A gate of -inf or far below the clamp: finite results, as the reference has them, and a gradient of exactly zero.
TEST(CpuBackendGates, ExtremeDecayIsFiniteWithZeroGradient) {
  Case c;
  c.T = 150;
  Inputs in = make_inputs(c);
  const std::vector<std::pair<int64_t, double>> gates = {{5, -kInfinity}, {64, -1e4}, {70, -100.0}};
  for (auto [t, g] : gates) store(in.g.t, offset_of(in.g.t, 0, t, 1), g);
  const Outputs out = forward<ChunkForward>(c, in, "cpu", false);
  expect_near("o", out.o, forward<ChunkForward>(c, in, "reference", false).o, 2, 1e-5);
  const Gradients ours = backward(c, in, "cpu"), reference = backward(c, in, "reference");
  expect_near("dk", ours.dk, reference.dk, 2, 1e-5);
  expect_near("dg", ours.dg, reference.dg, 2, 1e-5);
  for (auto [t, g] : gates) EXPECT_EQ(load(ours.dg.t, offset_of(ours.dg.t, 0, t, 1)), 0.0) << t;
  for_each(out.o.t, [&](int64_t offset) { ASSERT_TRUE(std::isfinite(load(out.o.t, offset))); });
}

TEST(CpuBackendGates, BetaZeroHasAnExactGradient) {
  Case c;
  c.T = 130;
  Inputs in = make_inputs(c);
  for (int64_t t : {0, 1, 63, 64, 100, 129}) store(in.beta.t, offset_of(in.beta.t, 0, t, 0), t == 100 ? 1e-35 : 0.0);
  for (int64_t t = 0; t < c.T; ++t) store(in.beta.t, offset_of(in.beta.t, 0, t, 1), 0.0);
  const Gradients ours = backward(c, in, "cpu"), reference = backward(c, in, "reference");
  expect_near("dbeta", ours.dbeta, reference.dbeta, 2, 1e-5);
}

// NaN at a token: the tokens before it in the same chunk and the other sequence keep their bits.
TEST(CpuBackendIsolation, NanReachesOnlyLaterTokensOfItsSequence) {
  Case c;
  c.lengths = {100, 80};
  const Inputs clean = make_inputs(c);
  const Outputs expected = forward<ChunkForward>(c, clean, "cpu", false);
  const auto poison = [](const Tensor& t, double x) { store(t, offset_of(t, 0, 21, 0, 3), x); };
  for (int which = 0; which < 5; ++which) {
    for (double value : {kNaN, kInfinity}) {
      Inputs in = clean;
      if (which == 0) poison(in.q.t, value);
      if (which == 1) poison(in.k.t, value);
      if (which == 2) poison(in.v.t, value);
      if (which == 3) store(in.g.t, offset_of(in.g.t, 0, 21, 0), kNaN);
      if (which == 4) store(in.beta.t, offset_of(in.beta.t, 0, 21, 0), value);
      const Outputs out = forward<ChunkForward>(c, in, "cpu", false);
      for (int64_t t = 0; t < in.T; ++t) {
        if (t >= 21 && t < 100) continue;
        for (int64_t head = 0; head < c.Hv; ++head) {
          for (int64_t j = 0; j < c.V; ++j) {
            const int64_t offset = offset_of(out.o.t, 0, t, head, j);
            ASSERT_EQ(load(out.o.t, offset), load(expected.o.t, offset)) << which << " " << t;
          }
        }
      }
      if (which != 0 && value != value) {
        const Outputs reference = forward<ChunkForward>(c, in, "reference", false);
        EXPECT_LE(distance(out.o.t, reference.o.t), 1e-5) << which;
      }
    }
  }
}

// Results depend on neither the number of threads, nor the run, nor the batch, nor which heads are in the call.
TEST(CpuBackendBits, IndependentOfThreadsRunsAndNeighbours) {
  Case c;
  c.lengths = {150, 0, 500, 70};
  c.Hq = 2, c.Hv = 4, c.K = 128, c.V = 64;
  const Inputs in = make_inputs(c);
  c.threads = 1;
  const Outputs out = forward<ChunkForward>(c, in, "cpu", true);
  const Gradients gradients = backward(c, in, "cpu");
  for (int threads : {2, 3, 7, 2, 2}) {
    c.threads = threads;
    const Outputs again = forward<ChunkForward>(c, in, "cpu", true);
    EXPECT_TRUE(same_bits(again.o, out.o) && same_bits(again.final_state, out.final_state) &&
                same_bits(again.h, out.h));
    const Gradients g = backward(c, in, "cpu");
    EXPECT_TRUE(same_bits(g.dq, gradients.dq) && same_bits(g.dk, gradients.dk) && same_bits(g.dv, gradients.dv));
    EXPECT_TRUE(same_bits(g.dg, gradients.dg) && same_bits(g.dbeta, gradients.dbeta) &&
                same_bits(g.dh0, gradients.dh0));
  }

  // The third sequence alone, and the second key head with its value heads alone.
  ForwardArguments args = forward_arguments(c, in, "cpu");
  const auto cut = [](Tensor t, int dim, int64_t begin, int64_t count) {
    t.data = static_cast<char*>(t.data) + begin * t.stride[dim] * size_of(dtype(t));
    t.shape[dim] = count;
    return t;
  };
  const auto part = [&](const Tensor& t, int64_t heads) { return cut(cut(t, 1, 150, 500), 2, heads / 2, heads / 2); };
  args.q = part(in.q.t, 2);
  args.k = part(in.k.t, 2);
  args.v = part(in.v.t, 4);
  args.g = part(in.g.t, 4);
  args.beta = part(in.beta.t, 4);
  args.cu_seqlens = Tensor{};
  args.initial_state = cut(cut(in.h0.t, 0, 2, 1), 1, 2, 2);
  const Owned o = poisoned(c.dtype, {1, 500, 2, c.V});
  args.o = o.t;
  run<ChunkForward>(args);
  const Tensor whole = part(out.o.t, 4);
  for (int64_t t = 0; t < 500; ++t) {
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t j = 0; j < c.V; ++j) {
        ASSERT_EQ(load(o.t, offset_of(o.t, 0, t, head, j)), load(whole, offset_of(whole, 0, t, head, j)));
      }
    }
  }
}

// A call large enough for several threads.
Case threaded_case() {
  Case c;
  c.T = 400, c.Hq = c.Hv = 4, c.K = c.V = 64, c.threads = 4;
  return c;
}

TEST(CpuBackendThreads, CallersBesideEachOther) {
  const Case c = threaded_case();
  const Inputs in = make_inputs(c);
  const Outputs expected = forward<ChunkForward>(c, in, "cpu", false);
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < wrong.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int repeat = 0; repeat < 10; ++repeat) {
        wrong[i] += !same_bits(forward<ChunkForward>(c, in, "cpu", false).o, expected.o);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

// A forked child has none of its parent's threads: it must neither hang nor differ.
TEST(CpuBackendThreads, WorksInAForkedChild) {
  const Case c = threaded_case();
  const Inputs in = make_inputs(c);
  const Outputs expected = forward<ChunkForward>(c, in, "cpu", false);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a hang ends the child
    _exit(same_bits(forward<ChunkForward>(c, in, "cpu", false).o, expected.o) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(CpuBackendBits, PrefillInTwoPartsEqualsOne) {
  for (DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    Case c;
    c.dtype = type;
    c.T = 300, c.K = 128, c.V = 64;
    const Inputs in = make_inputs(c);
    const Outputs whole = forward<ChunkForward>(c, in, "cpu", false);
    const int64_t first = 128;
    Owned o = poisoned(c.dtype, {1, c.T, c.Hv, c.V}), middle = poisoned(accumulator(c), state_shape(c, 1)),
          last = middle;
    for (int part = 0; part < 2; ++part) {
      ForwardArguments args = forward_arguments(c, in, "cpu");
      args.o = o.t;
      for (Tensor* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.o}) {
        t->data = static_cast<char*>(t->data) + (part == 0 ? 0 : first * t->stride[1] * size_of(dtype(*t)));
        t->shape[1] = part == 0 ? first : c.T - first;
      }
      if (part == 1) args.initial_state = middle.t;
      args.final_state = part == 0 ? middle.t : last.t;
      run<ChunkForward>(args);
    }
    EXPECT_TRUE(same_bits(o, whole.o));
    EXPECT_TRUE(same_bits(last, whole.final_state));
  }
}

// Each gradient asked for alone has the bits it has among all, and what is kept from the forward changes none.
TEST(CpuBackendArguments, EachGradientAlone) {
  Case c;
  c.Hv = 4, c.gate = c.sigmoid = c.l2norm = true;
  const Inputs in = make_inputs(c);
  Gradients all = backward(c, in, "cpu");
  const Outputs kept = forward<ChunkForward>(c, in, "cpu", true);
  Gradients one = make_gradients(c, in);
  Owned unused;
  BackwardArguments none = backward_arguments(c, in, "cpu", &unused);
  none.A = kept.A.t;
  none.o = kept.o.t;
  for (size_t i = 0; i < pairs(&one, &none).size(); ++i) {
    BackwardArguments args = none;
    auto [gradient, argument] = pairs(&one, &args)[i];
    *argument = gradient->t;
    run<ChunkBackward>(args);
    EXPECT_TRUE(same_bits(*gradient, *pairs(&all, &args)[i].first)) << i;
  }
}

TEST(CpuBackendArguments, RepeatedAndReversedInputs) {
  Case c;
  c.T = 90;
  Inputs in = make_inputs(c);
  // One gradient for every element of o, one key for every token, and the values backwards.
  for (int64_t& stride : in.d_o.t.stride) stride = 0;
  in.k.t.stride[1] = 0;
  in.v.t.data = static_cast<char*>(in.v.t.data) + (c.T - 1) * in.v.t.stride[1] * size_of(c.dtype);
  in.v.t.stride[1] = -in.v.t.stride[1];
  expect_near("o", forward<ChunkForward>(c, in, "cpu", false).o, forward<ChunkForward>(c, in, "reference", false).o, 2,
              1e-5);
  const Gradients ours = backward(c, in, "cpu"), reference = backward(c, in, "reference");
  expect_near("dq", ours.dq, reference.dq, 2, 1e-5);
  expect_near("dk", ours.dk, reference.dk, 2, 1e-5);
  expect_near("dv", ours.dv, reference.dv, 2, 1e-5);
  expect_near("dg", ours.dg, reference.dg, 2, 1e-5);
}

// Pools: rows that read, start from zero, are skipped, or only lose their write; checkpoints in the same call.
struct PoolCase {
  bool v_first;
  DType dtype;
};

void run_pool(const PoolCase& pool_case, const char* path, Owned* o, Owned* pool, Owned* checkpoints) {
  Case c;
  c.lengths = {130, 0, 40, 200, 64, 10, 20};
  c.padding = 9;
  c.Hv = 4, c.V = 24, c.has_h0 = false, c.v_first = pool_case.v_first;
  const Inputs in = make_inputs(c);
  const int64_t slots = 12;
  std::vector<int64_t> shape = state_shape(c, slots);
  *pool = Owned(pool_case.dtype, shape);
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  fill(pool->t, [&] { return normal(random); });
  // Sequence 0 reads and writes slot 3; 1 is empty and moves 1 to 2; 2 starts from zero and writes 5; 3 reads 0, writes
  // nowhere; 4 is skipped; 5 is past the pool, hence skipped; 6 starts from zero with a null index to read.
  const Owned initial = indices({3, 1, 4, 0, -1, 99, -1}, DType::kInt32), final = indices({3, 2, 5, -1, 6, 7, 8}),
              has = indices({1, 1, 0, 1, 1, 1, 0}, DType::kBool);
  const Owned offsets = indices({0, 17, 64, 130, 130 + 41, 170 + 128, 464, 470, 1000}),
              slot_list = indices({9, 9, 10, 11, -1, 4, 40, 6, 7});
  *checkpoints = Owned(DType::kFloat32, state_shape(c, 6));
  const Owned starts = indices({0, 1, 1, 1, 2, 2, 2, 2});
  ForwardArguments args = forward_arguments(c, in, path);
  *o = poisoned(c.dtype, {1, in.T, c.Hv, c.V});
  args.o = o->t;
  args.state_pool = pool->t;
  args.initial_state_indices = initial.t;
  args.final_state_indices = final.t;
  args.has_initial_state = has.t;
  args.checkpoint_every = 128;
  args.checkpoints = checkpoints->t;
  args.checkpoint_cu_starts = starts.t;
  args.checkpoint_offsets = offsets.t;
  args.checkpoint_indices = slot_list.t;
  run<ChunkForward>(args);
}

TEST(CpuBackendPool, PrefillMatchesReference) {
  for (const PoolCase& c : {PoolCase{true, DType::kFloat32}, PoolCase{false, DType::kFloat32},
                            PoolCase{true, DType::kBFloat16}, PoolCase{false, DType::kFloat16}}) {
    Owned o, pool, checkpoints, expected_o, expected_pool, expected_checkpoints;
    run_pool(c, "cpu", &o, &pool, &checkpoints);
    run_pool(c, "reference", &expected_o, &expected_pool, &expected_checkpoints);
    const double bound = c.dtype == DType::kFloat32 ? 1e-5 : 5e-3;
    expect_near("o", o, expected_o, 2, 1e-5);
    for (int64_t slot = 0; slot < pool.t.shape[0]; ++slot) {
      Tensor a = pool.t, b = expected_pool.t;
      for (Tensor* t : {&a, &b}) {
        t->data = static_cast<char*>(t->data) + slot * t->stride[0] * size_of(dtype(*t));
        t->shape[0] = 1;
      }
      EXPECT_LE(distance_per_head(a, b, 1), bound) << "slot " << slot;
    }
    expect_near("checkpoints", checkpoints, expected_checkpoints, 1, 1e-5);
  }
}

TEST(CpuBackendPool, DecodeWithDraftTokensMatchesReference) {
  for (const bool own_slots : {true, false}) {
    Case c;
    c.B = 4, c.T = 3, c.Hv = 4, c.has_h0 = false, c.v_first = true, c.l2norm = c.gate = c.sigmoid = true;
    const Inputs in = make_inputs(c);
    const auto decode = [&](const char* path, Owned* o, Owned* pool) {
      *pool = Owned(DType::kFloat32, state_shape(c, 16));
      std::mt19937 random(3);
      std::normal_distribution<double> normal;
      fill(pool->t, [&] { return normal(random); });
      const Owned initial = indices({0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1, -1}, DType::kInt32, {4, 3}),
                  final = indices({9, 10, 11, 3, -1, 5, 12, 13, 14, 15, 15, 15}, DType::kInt32, {4, 3}),
                  accepted = indices({1, 3, 2, 1}, DType::kInt32);
      ForwardArguments args = forward_arguments(c, in, path);
      *o = poisoned(c.dtype, {c.B, c.T, c.Hv, c.V});
      args.o = o->t;
      args.state_pool = pool->t;
      args.initial_state_indices = initial.t;
      if (own_slots) args.final_state_indices = final.t;
      args.num_accepted_tokens = accepted.t;
      run<Recurrent>(args);
    };
    Owned o, pool, expected_o, expected_pool;
    decode("cpu", &o, &pool);
    decode("reference", &expected_o, &expected_pool);
    expect_near("o", o, expected_o, 2, 1e-5);
    expect_near("pool", pool, expected_pool, 1, 1e-5);
  }
}

}  // namespace
}  // namespace flash_qla
