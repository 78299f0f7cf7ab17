// The C and C++ interface of the layer's operations: parts, gates, inverse norms, refusals, workspaces. Every path of
// the host is held to the formulas, computed here by plain loops.
#include <cmath>

#include "call_case.h"

namespace flash_qla {
namespace {

double silu(double u) { return u / (1.0 + std::exp(-u)); }

// What Qwen3-Next has: by key head q, k, v of two value heads, and z; gates by key head too. fp64.
struct Interleaved {
  static constexpr int64_t B = 2, T = 5, Hq = 2, group = 2, K = 3, V = 4, W = 4, Hv = Hq * group;
  static constexpr int64_t pitch = 2 * K + 2 * group * V, channels = 2 * Hq * K + Hv * V;
  Buffer<double> x{{B, T, Hq* pitch}}, weight{{channels, W}}, y{{B, T, channels}}, norms{{B, T, 2 * Hq}};
  Buffer<double> ba{{B, T, Hq * 2 * group}}, A_log{{Hv}}, dt_bias{{Hv}}, g{{B, T, Hv}}, beta{{B, T, Hv}};
  Buffer<double> state{{B, channels, W}};
  ConvArguments args;

  Interleaved() {
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    for (auto* t : {&x, &weight, &ba, &A_log, &dt_bias, &state}) {
      for (double& value : t->data) value = normal(random);
    }
    args.num_parts = 3;
    args.activation = FLASH_QLA_ACTIVATION_SILU;
    for (int i = 0; i < 3; ++i) {
      flash_qla_conv_part& part = args.parts[i];
      const int64_t dim = i < 2 ? K : group * V, first = i * Hq * K, row = Hq * pitch;
      part.x = tensor(&x.data[static_cast<size_t>(i * K)], DType::kFloat64, {B, T, Hq, dim}, {T * row, row, pitch, 1});
      part.y = tensor(&y.data[static_cast<size_t>(first)], DType::kFloat64, {B, T, Hq, dim},
                      {T * channels, channels, dim, 1});
      part.weight = tensor(&weight.data[static_cast<size_t>(first * W)], DType::kFloat64, {Hq * dim, W});
      part.initial_state = part.final_state =
          tensor(&state.data[static_cast<size_t>(first * W)], DType::kFloat64, {B, Hq * dim, W}, {channels * W, W, 1});
      if (i == 2) continue;
      part.l2norm = 1;
      part.inverse_norm =
          tensor(&norms.data[static_cast<size_t>(i * Hq)], DType::kFloat64, {B, T, Hq}, {T * 2 * Hq, 2 * Hq, 1});
    }
    const int64_t row = Hq * 2 * group;
    args.b = tensor(ba.data.data(), DType::kFloat64, {B * T, Hq, group}, {row, 2 * group, 1});
    args.a = tensor(ba.data.data() + group, DType::kFloat64, {B * T, Hq, group}, {row, 2 * group, 1});
    args.A_log = A_log.view();
    args.dt_bias = dt_bias.view();
    args.g = g.view();
    args.beta = beta.view();
  }

  // Input of channel c (q of all heads, then k, then v) before the convolution.
  double input(int64_t b, int64_t t, int64_t c) const {
    const int64_t part = c < Hq * K ? 0 : c < 2 * Hq * K ? 1 : 2, dim = part < 2 ? K : group * V;
    const int64_t head = (c - part * Hq * K) / dim, i = (c - part * Hq * K) % dim;
    return x.data[static_cast<size_t>((b * T + t) * Hq * pitch + head * pitch + part * K + i)];
  }
};

class LayerPaths : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(CpuBackend, LayerPaths, testing::Values("cpu", "reference"));

TEST_P(LayerPaths, InterleavedPartsWithGatesAndStates) {
  Interleaved call;
  const auto state = call.state.data;
  call.args.options.path = GetParam();
  call.args.options.use_beta_sigmoid_in_kernel = call.args.options.allow_neg_eigval = 1;
  const Status status = run<ConvForward>(call.args);
  ASSERT_TRUE(status.ok()) << status.message();
  using C = Interleaved;
  for (int64_t b = 0; b < C::B; ++b) {
    for (int64_t t = 0; t < C::T; ++t) {
      std::vector<double> y(C::channels);
      for (int64_t c = 0; c < C::channels; ++c) {
        double u = 0.0;
        for (int64_t j = 0; j < C::W; ++j) {
          const int64_t from = t - (C::W - 1) + j;
          const double in = from >= 0 ? call.input(b, from, c)
                                      : state[static_cast<size_t>((b * C::channels + c) * C::W + C::W + from)];
          u += call.weight.data[static_cast<size_t>(c * C::W + j)] * in;
        }
        y[static_cast<size_t>(c)] = silu(u);
      }
      for (int64_t head = 0; head < 2 * C::Hq; ++head) {
        double sum = 1e-6;
        for (int64_t i = 0; i < C::K; ++i) sum += std::pow(y[static_cast<size_t>(head * C::K + i)], 2);
        const double r = 1.0 / std::sqrt(sum);
        EXPECT_NEAR(call.norms.data[static_cast<size_t>((b * C::T + t) * 2 * C::Hq + head)], r, 1e-12 * r);
        for (int64_t i = 0; i < C::K; ++i) y[static_cast<size_t>(head * C::K + i)] *= r;
      }
      for (int64_t c = 0; c < C::channels; ++c) {
        EXPECT_NEAR(call.y.data[static_cast<size_t>((b * C::T + t) * C::channels + c)], y[static_cast<size_t>(c)],
                    1e-12);
      }
      for (int64_t h = 0; h < C::Hv; ++h) {
        const size_t at =
            static_cast<size_t>((b * C::T + t) * C::Hq * 2 * C::group + h / C::group * 2 * C::group + h % C::group);
        const size_t out = static_cast<size_t>((b * C::T + t) * C::Hv + h);
        const double raw = call.ba.data[at + C::group] + call.dt_bias.data[static_cast<size_t>(h)];
        EXPECT_NEAR(call.g.data[out], -std::exp(call.A_log.data[static_cast<size_t>(h)]) * std::log1p(std::exp(raw)),
                    1e-11);
        EXPECT_NEAR(call.beta.data[out], 2.0 / (1.0 + std::exp(-call.ba.data[at])), 1e-14);
      }
    }
    for (int64_t c = 0; c < C::channels; ++c) {
      for (int64_t l = 0; l < C::W; ++l) {
        EXPECT_EQ(call.state.data[static_cast<size_t>((b * C::channels + c) * C::W + l)],
                  call.input(b, C::T - C::W + l, c));
      }
    }
  }
}

TEST_P(LayerPaths, AnUpdateIsAForwardOfTheSameTokens) {
  Interleaved whole, next;
  whole.args.options.path = next.args.options.path = GetParam();
  ASSERT_TRUE(run<ConvForward>(whole.args).ok());
  const Status status = run<ConvUpdate>(next.args);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(whole.y.data, next.y.data);
  EXPECT_EQ(whole.state.data, next.state.data);
  EXPECT_EQ(whole.g.data, next.g.data);
}

TEST_P(LayerPaths, GradientsOfPartsAreThoseOfOneBuffer) {
  Interleaved call;
  using C = Interleaved;
  Buffer<double> dy{{C::B, C::T, C::channels}}, dx{{C::B, C::T, C::Hq * C::pitch}}, dweight{{C::channels, C::W}};
  for (size_t i = 0; i < dy.data.size(); ++i) dy.data[i] = std::sin(static_cast<double>(i));
  ConvBackwardArguments args;
  args.options.path = GetParam();
  args.num_parts = 3;
  args.activation = FLASH_QLA_ACTIVATION_SILU;
  for (int i = 0; i < 3; ++i) {
    flash_qla_conv_backward_part& part = args.parts[i];
    const flash_qla_conv_part& from = call.args.parts[i];
    part.x = part.dx = from.x;
    part.dx.data = dx.data.data() + i * C::K;
    part.weight = part.dweight = from.weight;
    part.dweight.data = dweight.data.data() + i * C::Hq * C::K * C::W;
    part.initial_state = from.initial_state;
    part.dy = from.y;
    part.dy.data = dy.data.data() + i * C::Hq * C::K;
  }
  const Status status = run<ConvBackward>(args);
  ASSERT_TRUE(status.ok()) << status.message();
  // z's places are nobody's: they keep what they had.
  for (int64_t row = 0; row < C::B * C::T * C::Hq; ++row) {
    for (int64_t i = 2 * C::K + C::group * C::V; i < C::pitch; ++i) {
      EXPECT_EQ(dx.data[static_cast<size_t>(row * C::pitch + i)], kCanary);
    }
  }
  // The derivative along x itself is the central difference.
  const auto loss = [&](double step) {
    Interleaved at;
    at.args.options.path = GetParam();
    for (int i = 0; i < 2; ++i) at.args.parts[i].l2norm = 0, at.args.parts[i].inverse_norm = {};
    for (double& value : at.x.data) value *= 1.0 + step;
    EXPECT_TRUE(run<ConvForward>(at.args).ok());
    double sum = 0.0;
    for (size_t i = 0; i < dy.data.size(); ++i) sum += dy.data[i] * at.y.data[i];
    return sum;
  };
  double along = 0.0;
  for (size_t i = 0; i < dx.data.size(); ++i) {
    if (dx.data[i] != kCanary) along += dx.data[i] * call.x.data[i];
  }
  EXPECT_NEAR((loss(1e-5) - loss(-1e-5)) / 2e-5, along, 1e-7 * std::abs(along) + 1e-8);
}

TEST(LayerRefusal, OfStructuresOfAnotherSizeAndNull) {
  ConvArguments args;
  args.struct_size -= 8;
  EXPECT_NE(std::string(ConvForward::can_implement(args).message()).find("struct_size"), std::string::npos);
  EXPECT_EQ(flash_qla_conv_backward_run(nullptr, nullptr, 0, nullptr).code, FLASH_QLA_INVALID_VALUE);
  EXPECT_EQ(flash_qla_norm_gated_explain(nullptr, nullptr, 0).code, FLASH_QLA_INVALID_VALUE);
}

std::string refusal(const ConvArguments& args) { return ConvForward::can_implement(args).message(); }

TEST(LayerRefusal, NamesTheRule) {
  {
    Interleaved call;
    call.args.num_parts = 4;
    EXPECT_EQ(refusal(call.args), "conv_forward: num_parts (4) must be from 1 to 3");
  }
  {
    Interleaved call;
    call.args.activation = 2;
    EXPECT_EQ(refusal(call.args), "conv_forward: activation (2) must be 0 (none) or 1 (silu)");
  }
  {
    Interleaved call;
    call.args.parts[1].initial_state = {};
    EXPECT_EQ(refusal(call.args), "conv_forward: initial_state and final_state must be given in all parts, or in none");
  }
  {
    Interleaved call;
    call.args.parts[1].y = call.args.parts[0].y;
    EXPECT_EQ(refusal(call.args), "conv_forward: y must not share memory with y (they overlap)");
  }
  {
    Interleaved call;
    call.args.g = {};
    EXPECT_EQ(refusal(call.args), "conv_forward: a and g must both be given, or neither");
  }
  {
    Interleaved call;
    call.args.parts[2].l2norm = 1;
    call.args.parts[2].x.shape[3] = 300;
    EXPECT_EQ(refusal(call.args), "conv_forward: x.shape[3] (300) must be at most 256 with l2norm");
  }
  {
    Interleaved call;
    call.args.cache_seqlens = call.A_log.view();
    EXPECT_EQ(refusal(call.args), "conv_forward: cache_seqlens must be left to conv_update (it was given)");
  }
}

TEST(LayerWorkspace, OfShapesAloneGrowsWithTokens) {
  const auto bytes = [](int64_t T) {
    ConvArguments args;
    args.num_parts = 1;
    args.options.num_threads = 2;
    args.parts[0].x = args.parts[0].y = tensor(nullptr, DType::kBFloat16, {1, T, 1, 512});
    args.parts[0].weight = tensor(nullptr, DType::kFloat32, {512, 4});
    size_t size = 0;
    EXPECT_TRUE(ConvForward::workspace_size(args, &size).ok());
    return size;
  };
  EXPECT_LE(bytes(10), bytes(1000));
  EXPECT_GT(bytes(10), 0u);
}

TEST(LayerExplain, NamesThePath) {
  Interleaved call;
  EXPECT_EQ(ConvForward::explain(call.args).substr(0, 9), "path: cpu");
  EXPECT_EQ(ConvUpdate::explain(call.args).substr(0, 9), "path: cpu");
  EXPECT_NE(build_info().find("norm_gated_backward:"), std::string::npos);
}

TEST_P(LayerPaths, GatedNorm) {
  Buffer<double> x{{3, 5}}, z{{3, 5}}, weight{{5}}, y{{3, 5}}, r{{3}};
  for (size_t i = 0; i < 15; ++i) x.data[i] = std::sin(1.0 + i), z.data[i] = std::cos(2.0 + i);
  for (size_t i = 0; i < 5; ++i) weight.data[i] = 1.0 + 0.1 * i;
  NormGatedArguments args;
  args.options.path = GetParam();
  args.x = x.view();
  args.z = z.view();
  args.weight = weight.view();
  args.y = y.view();
  args.inverse_rms = r.view();
  const Status status = run<NormGated>(args);
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t row = 0; row < 3; ++row) {
    double mean = 0.0;
    for (size_t i = 0; i < 5; ++i) mean += x.data[row * 5 + i] * x.data[row * 5 + i] / 5.0;
    const double want = 1.0 / std::sqrt(mean + 1e-6);
    EXPECT_NEAR(r.data[row], want, 1e-13);
    for (size_t i = 0; i < 5; ++i) {
      EXPECT_NEAR(y.data[row * 5 + i], x.data[row * 5 + i] * want * weight.data[i] * silu(z.data[row * 5 + i]), 1e-13);
    }
  }
}

// A caller that normalises q and k itself hands over what the rows were multiplied by.
TEST_P(LayerPaths, GivenInverseNormsAreTheNormInTheKernel) {
  for (int64_t Hv : {2, 4}) {
    Case raw(1, 70, 2, Hv, 5, 4, {0, 3, 3, 69}), given = raw;
    BackwardArguments in_kernel = raw.backward(GetParam());
    in_kernel.options.use_qk_l2norm_in_kernel = 1;
    ASSERT_TRUE(run<ChunkBackward>(in_kernel).ok());
    Buffer<double> q_norm({1, 70, 2}), k_norm({1, 70, 2});
    for (auto [x, norm] : {std::pair{&given.q, &q_norm}, std::pair{&given.k, &k_norm}}) {
      for (size_t row = 0; row < norm->data.size(); ++row) {
        double sum = 1e-6;
        for (size_t i = 0; i < 5; ++i) sum += x->data[row * 5 + i] * x->data[row * 5 + i];
        norm->data[row] = 1.0 / std::sqrt(sum);
        for (size_t i = 0; i < 5; ++i) x->data[row * 5 + i] *= norm->data[row];
      }
    }
    BackwardArguments args = given.backward(GetParam());
    args.q_inverse_norm = q_norm.view();
    EXPECT_EQ(std::string(ChunkBackward::can_implement(args).message()),
              "chunk_backward: k_inverse_norm (None) must be given");
    args.k_inverse_norm = k_norm.view();
    const Status status = run<ChunkBackward>(args);
    ASSERT_TRUE(status.ok()) << status.message();
    for (const auto& [got, want] : {std::pair{&given.dq, &raw.dq}, std::pair{&given.dk, &raw.dk},
                                    std::pair{&given.dv, &raw.dv}, std::pair{&given.dbeta, &raw.dbeta}}) {
      for (size_t i = 0; i < want->data.size(); ++i) EXPECT_NEAR(got->data[i], want->data[i], 1e-11);
    }
    args.options.use_qk_l2norm_in_kernel = 1;
    EXPECT_FALSE(ChunkBackward::can_implement(args).ok());
  }
}

}  // namespace
}  // namespace flash_qla
