// The paths of the CPU against results that are known in closed form, central differences, and each other.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "call_case.h"

namespace flash_qla {
namespace {

TEST(ClosedForm, OneToken) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 1, 1, 1, 3, 2);
    const Status s = run<ChunkForward>(c.forward(path.c_str()));
    ASSERT_TRUE(s.ok()) << s.message();
    const double decay = std::exp(c.g.data[0]), beta = c.beta.data[0];
    double o[2] = {0, 0};
    for (int j = 0; j < 2; ++j) {
      double read = 0;
      for (int i = 0; i < 3; ++i) read += decay * c.h0.data[i * 2 + j] * c.k.data[i];
      for (int i = 0; i < 3; ++i) {
        const double state = decay * c.h0.data[i * 2 + j] + c.k.data[i] * beta * (c.v.data[j] - read);
        EXPECT_NEAR(c.final_state.data[i * 2 + j], state, 1e-14) << path;
        o[j] += state * c.q.data[i] / std::sqrt(3.0);
      }
      EXPECT_NEAR(c.o.data[j], o[j], 1e-14) << path;
    }
  }
}

TEST(ClosedForm, OrthonormalKeysWithoutDecayAreADictionary) {
  // g = 0, beta = 1, key t the t-th unit vector: row t of the state is value t, and query t reads value t.
  for (const std::string& path : cpu_paths()) {
    constexpr int64_t K = 100, V = 7;
    Case c(1, K, 1, 1, K, V);
    for (int64_t t = 0; t < K; ++t) {
      for (int64_t i = 0; i < K; ++i) c.k.data[t * K + i] = c.q.data[t * K + i] = t == i ? 1.0 : 0.0;
      c.g.data[t] = 0.0;
      c.beta.data[t] = 1.0;
    }
    ForwardArguments args = c.forward(path.c_str());
    args.options.scale = 1.0;
    ASSERT_TRUE(run<ChunkForward>(args).ok());
    for (int64_t i = 0; i < K * V; ++i) {
      EXPECT_NEAR(c.final_state.data[i], c.v.data[i], 1e-13) << path;
      EXPECT_NEAR(c.o.data[i], c.v.data[i], 1e-13) << path;
    }
  }
}

TEST(ClosedForm, DecayAloneScalesTheState) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 130, 1, 1, 3, 2);
    double total = 0;
    for (int64_t t = 0; t < 130; ++t) {
      c.beta.data[t] = 0.0;
      total += c.g.data[t];
    }
    ASSERT_TRUE(run<ChunkForward>(c.forward(path.c_str())).ok());
    for (int i = 0; i < 6; ++i) {
      EXPECT_NEAR(c.final_state.data[i] / (std::exp(total) * c.h0.data[i]), 1.0, 1e-10) << path;
    }
  }
}

double loss(Case& c, const char* path) {
  EXPECT_TRUE(run<ChunkForward>(c.forward(path)).ok());
  double sum = 0;
  for (size_t i = 0; i < c.o.data.size(); ++i) sum += c.o.data[i] * c.d_o.data[i];
  for (size_t i = 0; i < c.final_state.data.size(); ++i) sum += c.final_state.data[i] * c.dht.data[i];
  return sum;
}

void expect_central_differences(Case& c, const char* path) {
  const Status s = run<ChunkBackward>(c.backward(path));
  ASSERT_TRUE(s.ok()) << s.message();
  struct Pair {
    const char* name;
    Buffer<double>* input;
    const Buffer<double>* gradient;
  };
  const Pair pairs[] = {{"q", &c.q, &c.dq}, {"k", &c.k, &c.dk},          {"v", &c.v, &c.dv},
                        {"g", &c.g, &c.dg}, {"beta", &c.beta, &c.dbeta}, {"h0", &c.h0, &c.dh0}};
  constexpr double kStep = 1e-5;  // truncation (step^2) and rounding (1e-16 / step) are both near 1e-10
  for (const Pair& pair : pairs) {
    const size_t stride = std::max<size_t>(1, pair.input->data.size() / 12);
    for (size_t i = 0; i < pair.input->data.size(); i += stride) {
      double& x = pair.input->data[i];
      const double before = x;
      x = before + kStep;
      const double above = loss(c, path);
      x = before - kStep;
      const double below = loss(c, path);
      x = before;
      EXPECT_NEAR(pair.gradient->data[i], (above - below) / (2 * kStep), 2e-8)
          << path << " d" << pair.name << "[" << i << "]";
    }
  }
}

TEST(Gradients, CentralDifferences) {
  for (const std::string& path : cpu_paths()) {
    Case dense(2, 5, 1, 2, 3, 4);
    expect_central_differences(dense, path.c_str());
    Case packed(1, 70, 1, 2, 3, 2, {0, 0, 66, 66, 69});
    expect_central_differences(packed, path.c_str());
  }
}

TEST(Gradients, OnlyWhatIsAskedForIsWritten) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 70, 1, 2, 3, 2);
    ASSERT_TRUE(run<ChunkBackward>(c.backward(path.c_str())).ok());
    const std::vector<double> dk = c.dk.data;
    Case again(1, 70, 1, 2, 3, 2);
    BackwardArguments args = again.backward(path.c_str());
    args.dq = args.dv = args.dg = args.dbeta = args.dh0 = {};
    ASSERT_TRUE(run<ChunkBackward>(args).ok());
    EXPECT_EQ(again.dk.data, dk) << path;
    for (const Buffer<double>* x : {&again.dq, &again.dv, &again.dg, &again.dbeta, &again.dh0})
      EXPECT_TRUE(x->untouched());
  }
}

TEST(Recurrent, EqualsTheChunkedForward) {
  for (const std::string& path : cpu_paths()) {
    Case a(2, 70, 1, 2, 5, 3), b(2, 70, 1, 2, 5, 3);
    ASSERT_TRUE(run<ChunkForward>(a.forward(path.c_str())).ok());
    ASSERT_TRUE(run<Recurrent>(b.forward(path.c_str())).ok());
    for (size_t i = 0; i < a.o.data.size(); ++i) EXPECT_NEAR(a.o.data[i], b.o.data[i], 1e-12);
    for (size_t i = 0; i < a.final_state.data.size(); ++i)
      EXPECT_NEAR(a.final_state.data[i], b.final_state.data[i], 1e-12);
  }
}

TEST(Paths, AgreeTo1em12) {
  // The reference and whatever else this build has for the CPU, on packed sequences with activations.
  const std::vector<int32_t> offsets = {0, 0, 66, 66, 130};
  Case truth(1, 131, 2, 4, 16, 8, offsets);
  ASSERT_TRUE(run<ChunkForward>(truth.forward()).ok());
  ASSERT_TRUE(run<ChunkBackward>(truth.backward()).ok());
  for (const std::string& path : cpu_paths()) {
    Case c(1, 131, 2, 4, 16, 8, offsets);
    ASSERT_TRUE(run<ChunkForward>(c.forward(path.c_str())).ok());
    ASSERT_TRUE(run<ChunkBackward>(c.backward(path.c_str())).ok());
    const auto expect_near = [&](const char* name, const Buffer<double>& got, const Buffer<double>& want) {
      double error = 0, norm = 0;
      for (size_t i = 0; i < got.data.size(); ++i) {
        error += (got.data[i] - want.data[i]) * (got.data[i] - want.data[i]);
        norm += want.data[i] * want.data[i];
      }
      EXPECT_LE(std::sqrt(error), 1e-12 * std::sqrt(norm)) << path << " " << name;
    };
    expect_near("o", c.o, truth.o);
    expect_near("final_state", c.final_state, truth.final_state);
    expect_near("dq", c.dq, truth.dq);
    expect_near("dk", c.dk, truth.dk);
    expect_near("dv", c.dv, truth.dv);
    expect_near("dg", c.dg, truth.dg);
    expect_near("dbeta", c.dbeta, truth.dbeta);
    expect_near("dh0", c.dh0, truth.dh0);
    EXPECT_EQ(c.o.data.back(), 0.0) << "the token after the last offset";
  }
}

}  // namespace
}  // namespace flash_qla
