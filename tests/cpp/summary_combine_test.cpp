// summary_combine: what machines compose of their ranks' links, and what float32 costs. Compiled a second time for
// emulated CUDA kernels (tests/emulation).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "call_case.h"
#include "stream_of_ranks.h"

namespace flash_qla {
namespace {

// Links of three kinds in one stream, as random matrices.
struct RandomLinks {
  int64_t L, C, Hv, K, V;
  std::vector<double> S, M, kind;

  RandomLinks(int64_t L, unsigned seed, int64_t heads = 2, int64_t K = 4, int64_t V = 3)
      : L(L), C(heads), Hv(heads), K(K), V(V) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    S.resize(static_cast<size_t>(L * C * Hv * K * V));
    M.resize(static_cast<size_t>(L * C * Hv * K * K));
    kind.resize(static_cast<size_t>(L * C * Hv));
    for (double& x : S) x = normal(random);
    for (double& x : M) x = normal(random) / std::sqrt(static_cast<double>(K));
    for (double& x : kind) x = static_cast<double>(std::uniform_int_distribution<int>(0, 2)(random));
    for (size_t i = 0; i < kind.size(); ++i) {  // what is not used must not be
      if (kind[i] != 2.0) std::fill_n(M.begin() + static_cast<int64_t>(i) * K * K, K * K, std::nan(""));
      if (kind[i] == 0.0) std::fill_n(S.begin() + static_cast<int64_t>(i) * K * V, K * V, std::nan(""));
    }
  }

  void make_affine() {
    std::fill(kind.begin(), kind.end(), 2.0);
    for (std::vector<double>* x : {&S, &M}) {
      for (size_t i = 0; i < x->size(); ++i) {
        if (std::isnan((*x)[i])) (*x)[i] = std::sin(static_cast<double>(i));
      }
    }
  }

  SummaryCombineArguments arguments(int64_t first, int64_t count, bool backward) {
    SummaryCombineArguments args;
    args.set_device(kTestedDevice);
    args.S = tensor(S.data() + first * C * Hv * K * V, DType::kFloat64, {count, C, Hv, K, V});
    args.M = tensor(M.data() + first * C * Hv * K * K, DType::kFloat64, {count, C, Hv, K, K});
    args.kind = tensor(kind.data() + first * C * Hv, DType::kFloat64, {count, C, Hv});
    args.backward = backward;
    return args;
  }

  // Links [first, first + count) as link `to` of `out`.
  void compose(int64_t first, int64_t count, bool backward, RandomLinks* out, int64_t to) {
    SummaryCombineArguments args = arguments(first, count, backward), target = out->arguments(to, 1, backward);
    const auto without_links = [](Tensor t) {
      std::copy(t.shape + 1, t.shape + t.ndim, t.shape);
      std::copy(t.stride + 1, t.stride + t.ndim, t.stride);
      --t.ndim;
      return t;
    };
    args.composed_S = without_links(target.S);
    args.composed_M = without_links(target.M);
    args.composed_kind = without_links(target.kind);
    const Status status = run<SummaryCombine>(args);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  std::vector<double> state(std::vector<int64_t> place, bool backward) {
    std::vector<double> result(place.size() * static_cast<size_t>(C * Hv * K * V), std::nan(""));
    SummaryCombineArguments args = arguments(0, L, backward);
    args.place = tensor(place.data(), DType::kInt64, {static_cast<int64_t>(place.size())});
    args.state = tensor(result.data(), DType::kFloat64, {static_cast<int64_t>(place.size()), C, Hv, K, V});
    const Status status = run<SummaryCombine>(args);
    EXPECT_TRUE(status.ok()) << status.message();
    return result;
  }
};

TEST(SummaryCombine, MachinesOfSeveralRanksComposeTheirLinks) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    for (const bool backward : {false, true}) {
      RandomLinks links(7, seed), machines(3, seed);
      links.compose(0, 2, backward, &machines, 0);
      links.compose(2, 3, backward, &machines, 1);
      links.compose(5, 2, backward, &machines, 2);
      // What enters the second machine's first rank, and the third's; backward, the first's last rank and the second's.
      const std::vector<double> whole =
          links.state(backward ? std::vector<int64_t>{1, 4} : std::vector<int64_t>{2, 5}, backward);
      const std::vector<double> composed =
          machines.state(backward ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 2}, backward);
      ASSERT_LT(distance(composed, whole), 1e-12) << "seed " << seed << (backward ? " backward" : "");
    }
  }
}

// Two links of more keys than a kernel takes at once: S_1 + M_1 S_0, and backward S_1 + M_1^T S_2.
TEST(SummaryCombine, ManyKeys) {
  for (const int64_t K : {33, 133, 256}) {
    const int64_t V = 20;
    RandomLinks links(3, 5, 1, K, V);
    links.make_affine();
    for (const bool backward : {false, true}) {
      for (const bool column_first : {false, true}) {  // M's columns lie side by side, or its rows do
        const int64_t other = backward ? 2 : 0;
        std::vector<double> expected(links.S.begin() + K * V, links.S.begin() + 2 * K * V);
        for (int64_t i = 0; i < K * K; ++i) {
          const int64_t row = column_first ? i % K : i / K, column = column_first ? i / K : i % K;
          const int64_t to = backward ? column : row, from = backward ? row : column;
          for (int64_t v = 0; v < V; ++v) {
            expected[to * V + v] += links.M[K * K + i] * links.S[(other * K + from) * V + v];
          }
        }
        std::vector<double> result(expected.size(), std::nan(""));
        std::vector<int64_t> place = {backward ? 0 : 2};
        SummaryCombineArguments args = links.arguments(0, 3, backward);
        if (column_first) std::swap(args.M.stride[3], args.M.stride[4]);
        args.place = tensor(place.data(), DType::kInt64, {1});
        args.state = tensor(result.data(), DType::kFloat64, {1, 1, 1, K, V});
        const Status status = run<SummaryCombine>(args);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_LT(distance(result, expected), 1e-13) << K << " keys" << (backward ? ", backward" : "");
      }
    }
  }
}

TEST(SummaryCombine, AFloat32LinkIsOffByRoundingsAlone) {
  RandomLinks links(6, 4);
  links.make_affine();
  for (std::vector<double>* values : {&links.S, &links.M}) {
    for (double& x : *values) x = static_cast<float>(x);
  }
  std::vector<float> S(links.S.begin(), links.S.end()), M(links.M.begin(), links.M.end()),
      kind(links.kind.begin(), links.kind.end());
  for (const bool backward : {false, true}) {
    const std::vector<double> expected = links.state({0, 5}, backward);
    std::vector<float> result(expected.size(), std::nanf(""));
    std::vector<int64_t> place = {0, 5};
    SummaryCombineArguments args = links.arguments(0, 6, backward);
    for (Tensor* t : {&args.S, &args.M, &args.kind}) t->dtype = FLASH_QLA_FLOAT32;
    args.S.data = S.data();
    args.M.data = M.data();
    args.kind.data = kind.data();
    args.place = tensor(place.data(), DType::kInt64, {2});
    args.state = tensor(result.data(), DType::kFloat32, {2, links.C, links.Hv, links.K, links.V});
    ASSERT_TRUE(run<SummaryCombine>(args).ok());
    const std::vector<double> found(result.begin(), result.end());
    EXPECT_LT(distance(found, expected), 1e-6);
  }
}

}  // namespace
}  // namespace flash_qla
