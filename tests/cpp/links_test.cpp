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

namespace flash_qla {
namespace {

// Tokens [begin, end) of a [1, T, ...] tensor.
Tensor tokens(Tensor t, int64_t begin, int64_t end) {
  t.data = static_cast<char*>(t.data) + begin * t.stride[1] * size_of(dtype(t));
  t.shape[1] = end - begin;
  return t;
}

// The links of all ranks, packed as one collective would send them: [W, P = 1, Hv, K (V + K) + 4].
struct Gathered {
  int64_t W, Hv, K, V, row;
  std::vector<double> memory;

  Gathered(int64_t W, int64_t Hv, int64_t K, int64_t V)
      : W(W), Hv(Hv), K(K), V(V), row(K * (V + K) + 4), memory(static_cast<size_t>(W * Hv * row), std::nan("")) {}

  // S, M and kind of ranks [first, first + count), with `ndim` dimensions: those of one rank have no stream of its own.
  Tensor view(int64_t first, int64_t count, int64_t offset, std::vector<int64_t> shape, std::vector<int64_t> stride) {
    Tensor t{};
    t.data = memory.data() + first * Hv * row + offset;
    t.dtype = FLASH_QLA_FLOAT64;
    const std::vector<int64_t> outer_shape = {count, 1}, outer_stride = {Hv * row, Hv * row};
    for (size_t i = count == 1 ? 1 : 0; i < 2; ++i) {
      t.shape[t.ndim] = outer_shape[i];
      t.stride[t.ndim++] = outer_stride[i];
    }
    for (size_t i = 0; i < shape.size(); ++i) {
      t.shape[t.ndim] = shape[i];
      t.stride[t.ndim++] = stride[i];
    }
    return t;
  }
  Tensor S(int64_t first, int64_t count) { return view(first, count, 0, {Hv, K, V}, {row, V, 1}); }
  Tensor M(int64_t first, int64_t count) { return view(first, count, K * V, {Hv, K, K}, {row, K, 1}); }
  Tensor kind(int64_t first, int64_t count) { return view(first, count, K * (V + K), {Hv}, {row}); }
};

// One stream over W ranks of one part each.
class Ranks {
 public:
  Ranks(Case* whole, std::vector<int64_t> cuts, const char* path)
      : c_(*whole), cuts_(std::move(cuts)), path_(path), W_(static_cast<int64_t>(cuts_.size()) - 1) {
    for (int64_t rank = 0; rank < W_; ++rank) cut(rank);
  }

  // Results go into the whole call's buffers. Returns the rows of final_state, added up over the ranks.
  std::vector<double> forward() {
    Gathered all(W_, c_.Hv, c_.K, c_.V);
    for (int64_t rank = 0; rank < W_; ++rank) {
      ChunkSummaryArguments args;
      fill_common(rank, &args);
      args.v = tokens(c_.v.view(), cuts_[rank], cuts_[rank + 1]);
      args.initial_state = c_.h0.view();
      args.leaves = flags(&ranks_[rank].leaves);
      args.S = all.S(rank, 1);
      args.M = all.M(rank, 1);
      args.kind = all.kind(rank, 1);
      expect_ok(run<ChunkSummary>(args));
    }
    forward_links_ = all.memory;
    std::vector<double> sum(c_.final_state.data.size(), 0.0);
    for (int64_t rank = 0; rank < W_; ++rank) {
      Rank& r = ranks_[rank];
      r.entering = combine(&all, rank, &r.enters, false);
      ForwardArguments args = c_.forward(path_);
      for (Tensor* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.o}) {
        *t = tokens(*t, cuts_[rank], cuts_[rank + 1]);
      }
      args.cu_seqlens = offsets(&r);
      args.entering_rows = tensor(r.entering_rows.data(), DType::kInt64, {1});
      args.entering_state = tensor(r.entering.data(), DType::kFloat64, {1, c_.Hv, c_.K, c_.V});
      expect_ok(run<ChunkForward>(args));
      add_rows(r.ends, c_.final_state.data, &sum);
    }
    return sum;
  }

  // Likewise; returns dh0 added up. After forward().
  std::vector<double> backward() {
    Gathered all(W_, c_.Hv, c_.K, c_.V);
    all.memory = forward_links_;  // M; S is written over
    std::vector<double> kinds = all.memory;
    for (int64_t rank = 0; rank < W_; ++rank) {
      Gathered forward(W_, c_.Hv, c_.K, c_.V);
      forward.memory = kinds;
      ChunkSummaryBackwardArguments args;
      fill_common(rank, &args);
      args.q = tokens(c_.q.view(), cuts_[rank], cuts_[rank + 1]);
      args.d_o = tokens(c_.d_o.view(), cuts_[rank], cuts_[rank + 1]);
      args.dht = c_.dht.view();
      args.enters = flags(&ranks_[rank].enters);
      args.forward_kind = forward.kind(rank, 1);
      args.R = all.S(rank, 1);
      args.kind = all.kind(rank, 1);
      expect_ok(run<ChunkSummaryBackward>(args));
    }
    std::vector<double> sum(c_.dh0.data.size(), 0.0);
    for (int64_t rank = 0; rank < W_; ++rank) {
      Rank& r = ranks_[rank];
      std::vector<double> leaving = combine(&all, rank, &r.leaves, true);
      BackwardArguments args = c_.backward(path_);
      for (Tensor* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.d_o, &args.dq, &args.dk, &args.dv,
                        &args.dg, &args.dbeta}) {
        *t = tokens(*t, cuts_[rank], cuts_[rank + 1]);
      }
      args.cu_seqlens = offsets(&r);
      args.entering_rows = tensor(r.entering_rows.data(), DType::kInt64, {1});
      args.entering_state = tensor(r.entering.data(), DType::kFloat64, {1, c_.Hv, c_.K, c_.V});
      args.leaving_rows = tensor(r.leaving_rows.data(), DType::kInt64, {1});
      args.leaving_dht = tensor(leaving.data(), DType::kFloat64, {1, c_.Hv, c_.K, c_.V});
      expect_ok(run<ChunkBackward>(args));
      add_rows(r.starts, c_.dh0.data, &sum);
    }
    return sum;
  }

 private:
  struct Rank {
    std::vector<int64_t> local, rows, entering_rows, leaving_rows;
    std::vector<uint8_t> starts, ends, enters, leaves, through;
    std::vector<double> entering;
  };

  static Tensor flags(std::vector<uint8_t>* x) {
    return tensor(x->data(), DType::kBool, {static_cast<int64_t>(x->size())});
  }
  static Tensor offsets(Rank* r) {
    return tensor(r->local.data(), DType::kInt64, {static_cast<int64_t>(r->local.size())});
  }
  static void expect_ok(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

  // All N sequences are rows of every rank, so that states are one tensor for all of them.
  void cut(int64_t rank) {
    Rank r{std::vector<int64_t>(c_.N + 1), std::vector<int64_t>(2),
           std::vector<int64_t>(1),        std::vector<int64_t>(1),
           std::vector<uint8_t>(c_.N),     std::vector<uint8_t>(c_.N),
           std::vector<uint8_t>(1),        std::vector<uint8_t>(1),
           std::vector<uint8_t>(1),        {}};
    SequenceCutArguments args;
    args.cu_seqlens = c_.cu_seqlens.view();
    args.bounds = tensor(cuts_.data() + rank, DType::kInt64, {1, 2});
    args.last_part = rank + 1 == W_ ? 0 : -1;
    args.all_rows = 1;
    args.local_cu_seqlens = offsets(&r);
    args.starts_here = flags(&r.starts);
    args.ends_here = flags(&r.ends);
    args.rows = tensor(r.rows.data(), DType::kInt64, {1, 2});
    args.enters = flags(&r.enters);
    args.leaves = flags(&r.leaves);
    args.through = flags(&r.through);
    args.entering_rows = tensor(r.entering_rows.data(), DType::kInt64, {1});
    args.leaving_rows = tensor(r.leaving_rows.data(), DType::kInt64, {1});
    expect_ok(run<SequenceCut>(args));
    ranks_.push_back(std::move(r));
  }

  template <class Arguments>
  void fill_common(int64_t rank, Arguments* args) {
    args->options.path = path_;
    args->k = tokens(c_.k.view(), cuts_[rank], cuts_[rank + 1]);
    args->g = tokens(c_.g.view(), cuts_[rank], cuts_[rank + 1]);
    args->beta = tokens(c_.beta.view(), cuts_[rank], cuts_[rank + 1]);
    args->cu_seqlens = offsets(&ranks_[rank]);
    args->rows = tensor(ranks_[rank].rows.data(), DType::kInt64, {1, 2});
    args->through = flags(&ranks_[rank].through);
  }

  std::vector<double> combine(Gathered* all, int64_t rank, std::vector<uint8_t>* wanted, bool backward) {
    std::vector<double> state(static_cast<size_t>(c_.Hv * c_.K * c_.V), std::nan(""));
    std::vector<int64_t> place = {rank};
    SummaryCombineArguments args;
    args.options.path = path_;
    args.S = all->S(0, W_);
    args.M = all->M(0, W_);
    args.kind = all->kind(0, W_);
    if (W_ == 1) {  // a rank's own view has no dimension of links
      for (Tensor* t : {&args.S, &args.M, &args.kind}) {
        std::copy_backward(t->shape, t->shape + t->ndim, t->shape + t->ndim + 1);
        std::copy_backward(t->stride, t->stride + t->ndim, t->stride + t->ndim + 1);
        t->shape[0] = 1;
        ++t->ndim;
      }
    }
    args.place = tensor(place.data(), DType::kInt64, {1});
    args.wanted = flags(wanted);
    args.backward = backward;
    args.state = tensor(state.data(), DType::kFloat64, {1, 1, c_.Hv, c_.K, c_.V});
    expect_ok(run<SummaryCombine>(args));
    return state;
  }

  void add_rows(const std::vector<uint8_t>& counts, const std::vector<double>& states, std::vector<double>* sum) {
    const size_t size = static_cast<size_t>(c_.Hv * c_.K * c_.V);
    for (size_t n = 0; n < counts.size(); ++n) {
      for (size_t i = 0; counts[n] && i < size; ++i) (*sum)[n * size + i] += states[n * size + i];
    }
  }

  Case& c_;
  std::vector<int64_t> cuts_;
  const char* path_;
  int64_t W_;
  std::vector<Rank> ranks_;
  std::vector<double> forward_links_;
};

double distance(const std::vector<double>& x, const std::vector<double>& y) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-6 * std::sqrt(static_cast<double>(x.size()) + 1.0));
}

class Links : public testing::TestWithParam<const char*> {};

TEST_P(Links, EveryResultIsThatOfOneRank) {
  const char* path = GetParam();
  std::mt19937 random(3);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 60; ++round) {
    const int64_t W = draw(1, 5);
    std::vector<int32_t> offsets = {0};
    for (int64_t n = draw(1, 4); n > 0; --n) {
      offsets.push_back(offsets.back() + static_cast<int32_t>(draw(0, 3) ? draw(0, 150) : 0));
    }
    Case whole(1, offsets.back(), 1, 2, 5, 3, offsets);
    std::vector<int64_t> cuts = {0, whole.T};
    for (int64_t i = 1; i < W; ++i) {
      cuts.push_back(draw(0, 2) ? draw(0, whole.T) : offsets[static_cast<size_t>(draw(0, whole.N))]);
    }
    std::sort(cuts.begin(), cuts.end());
    Case parts = whole;
    ASSERT_TRUE(run<ChunkForward>(whole.forward()).ok());
    ASSERT_TRUE(run<ChunkBackward>(whole.backward()).ok());
    Ranks ranks(&parts, cuts, path);
    EXPECT_LT(distance(ranks.forward(), whole.final_state.data), 1e-12) << "round " << round;
    EXPECT_LT(distance(ranks.backward(), whole.dh0.data), 1e-12) << "round " << round;
    const std::pair<const Buffer<double>*, const Buffer<double>*> tensors[] = {
        {&parts.o, &whole.o},   {&parts.dq, &whole.dq}, {&parts.dk, &whole.dk},
        {&parts.dv, &whole.dv}, {&parts.dg, &whole.dg}, {&parts.dbeta, &whole.dbeta}};
    for (const auto& [found, expected] : tensors) {
      EXPECT_LT(distance(found->data, expected->data), 1e-12)
          << "round " << round << " tensor " << (&found - &tensors[0].first);
    }
    if (HasFailure()) return;
  }
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
