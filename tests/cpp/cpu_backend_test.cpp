// The CPU backend against the fp64 reference, forward, recurrent and backward, over shapes, dtypes and options.
#include "cpu_call.h"

namespace flash_qla {
namespace {

using namespace cpu_call;

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

}  // namespace
}  // namespace flash_qla
