// Streams that are cut over ranks, as a user of the C++ interface does it: cut, summary, links side by side, combine,
// call. Held to one call over the whole stream by the reference; and what the four operations refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "call_case.h"
#include "stream_of_ranks.h"

namespace flash_qla {
namespace {

class Links : public testing::TestWithParam<const char*> {};

TEST_P(Links, EveryResultIsThatOfOneRank) {
  hold_to_one_rank<double>(GetParam(), DeviceType::kCpu, 60, 150, 5, 3, 1e-12, [](Case*, int) {});
}

INSTANTIATE_TEST_SUITE_P(Paths, Links, testing::Values("cpu", "reference"),
                         [](const auto& info) { return std::string(info.param); });

// Links of three kinds in one stream, as random matrices.
struct RandomLinks {
  int64_t L, C = 2, Hv = 2, K = 4, V = 3;
  std::vector<double> S, M, kind;

  RandomLinks(int64_t L, unsigned seed) : L(L) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    S.resize(static_cast<size_t>(L * C * Hv * K * V));
    M.resize(static_cast<size_t>(L * C * Hv * K * K));
    kind.resize(static_cast<size_t>(L * C * Hv));
    for (double& x : S) x = normal(random);
    for (double& x : M) x = 0.5 * normal(random);
    for (double& x : kind) x = static_cast<double>(std::uniform_int_distribution<int>(0, 2)(random));
    for (size_t i = 0; i < kind.size(); ++i) {  // what is not used must not be
      if (kind[i] != 2.0) std::fill_n(M.begin() + static_cast<int64_t>(i) * K * K, K * K, std::nan(""));
      if (kind[i] == 0.0) std::fill_n(S.begin() + static_cast<int64_t>(i) * K * V, K * V, std::nan(""));
    }
  }

  SummaryCombineArguments arguments(int64_t first, int64_t count, bool backward) {
    SummaryCombineArguments args;
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

TEST(SummaryCombine, AFloat32LinkIsOffByRoundingsAlone) {
  RandomLinks links(6, 4);
  std::fill(links.kind.begin(), links.kind.end(), 2.0);
  for (std::vector<double>* x : {&links.S, &links.M}) {
    for (size_t i = 0; i < x->size(); ++i) {
      if (std::isnan((*x)[i])) (*x)[i] = std::sin(static_cast<double>(i));
      (*x)[i] = static_cast<float>((*x)[i]);
    }
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

// Every rule is broken once; nothing is written.
template <class Op, class Arguments>
std::string refusal(Arguments args) {
  return run<Op>(args).message();
}

TEST(ChunkSummary, RefusesWhatTheContractForbids) {
  Case c(1, 5, 1, 2, 3, 4);
  Buffer<double> S({1, 2, 3, 4}), M({1, 2, 3, 3}), kind({1, 2});
  std::vector<int64_t> rows = {0, 0};
  std::vector<uint8_t> yes = {1};
  const auto legal = [&] {
    ChunkSummaryArguments args;
    args.k = c.k.view();
    args.v = c.v.view();
    args.g = c.g.view();
    args.beta = c.beta.view();
    args.rows = tensor(rows.data(), DType::kInt64, {1, 2});
    args.leaves = args.through = tensor(yes.data(), DType::kBool, {1});
    args.S = S.view();
    args.M = M.view();
    args.kind = kind.view();
    return args;
  };
  const auto refused = [&](auto&& change) {
    ChunkSummaryArguments args = legal();
    change(args);
    const std::string message = refusal<ChunkSummary>(args);
    EXPECT_TRUE(S.untouched() && M.untouched() && kind.untouched()) << message;
    return message;
  };
  EXPECT_EQ(refused([](auto& a) { a.rows = Tensor{}; }), "chunk_summary: rows (None) must be given");
  EXPECT_EQ(refused([](auto& a) { a.leaves.dtype = FLASH_QLA_INT32; }),
            "chunk_summary: leaves.dtype (int32) must be bool");
  EXPECT_EQ(refused([](auto& a) { a.through.shape[0] = 2; }),
            "chunk_summary: through.shape[0] (2) must be rows.shape[0] (1)");
  EXPECT_EQ(refused([](auto& a) { a.M.shape[3] = 4; }), "chunk_summary: M.shape[3] (4) must be k.shape[3] (3)");
  EXPECT_EQ(refused([](auto& a) { a.S.dtype = FLASH_QLA_FLOAT32; }),
            "chunk_summary: S.dtype (float32) must be float64, as k is");
  EXPECT_EQ(refused([](auto& a) { a.S.stride[1] = 0; }),
            "chunk_summary: S.stride[1] (0) must not be zero: it is written");
  EXPECT_EQ(refused([](auto& a) { a.options.path = "no"; }), "chunk_summary: path (no) must be one of: cpu, reference");
  EXPECT_TRUE(run<ChunkSummary>(legal()).ok());
}

TEST(ChunkForward, RefusesHalfAPairOfEnteringStates) {
  Case c(1, 5, 1, 2, 3, 4);
  std::vector<int64_t> rows = {0};
  Buffer<double> states({1, 2, 3, 4});
  ForwardArguments args = c.forward("cpu");
  args.entering_rows = tensor(rows.data(), DType::kInt64, {1});
  EXPECT_EQ(refusal<ChunkForward>(args), "chunk_forward: entering_state (None) must be given");
  EXPECT_EQ(refusal<Recurrent>(args), "recurrent: entering_state (None) must be given");
  args.entering_state = states.view();
  EXPECT_EQ(refusal<Recurrent>(args), "recurrent: entering_rows must be left to the chunked forward (it was given)");
  args.entering_state.shape[2] = 4;
  EXPECT_EQ(refusal<ChunkForward>(args), "chunk_forward: entering_state.shape[2] (4) must be q.shape[3] (3)");
  EXPECT_TRUE(c.o.untouched());
}

}  // namespace
}  // namespace flash_qla
