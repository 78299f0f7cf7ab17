// Streams that are cut over ranks, as a user of the C++ interface computes them: cut, summary, links side by side,
// combine, call. One process has all ranks, and results go into the buffers of the whole stream.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "call_case.h"
#include "core/context_parallel.h"

namespace flash_qla {

template <class T>
inline constexpr DType kElement = std::is_same_v<T, double> ? DType::kFloat64 : DType::kFloat32;

// A call of packed sequences in T, from one in double.
template <class T>
struct StreamCase {
  int64_t T_, Hq, Hv, K, V, N;
  Buffer<T> q, k, v, g, beta, h0, o, final_state, d_o, dht, dq, dk, dv, dg, dbeta, dh0;
  Buffer<int32_t> cu_seqlens;

  explicit StreamCase(const Case& c)
      : T_(c.T),
        Hq(c.Hq),
        Hv(c.Hv),
        K(c.K),
        V(c.V),
        N(c.N),
        q(as(c.q)),
        k(as(c.k)),
        v(as(c.v)),
        g(as(c.g)),
        beta(as(c.beta)),
        h0(as(c.h0)),
        o(as(c.o)),
        final_state(as(c.final_state)),
        d_o(as(c.d_o)),
        dht(as(c.dht)),
        dq(as(c.dq)),
        dk(as(c.dk)),
        dv(as(c.dv)),
        dg(as(c.dg)),
        dbeta(as(c.dbeta)),
        dh0(as(c.dh0)),
        cu_seqlens(c.cu_seqlens) {}

  ForwardArguments forward() {
    ForwardArguments args;
    fill(&args);
    args.o = o.view();
    args.final_state = final_state.view();
    return args;
  }

  BackwardArguments backward() {
    BackwardArguments args;
    fill(&args);
    args.d_o = d_o.view();
    args.dht = dht.view();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    args.dg = dg.view();
    args.dbeta = dbeta.view();
    args.dh0 = dh0.view();
    return args;
  }

 private:
  static Buffer<T> as(const Buffer<double>& from) {
    Buffer<T> to(from.shape);
    std::transform(from.data.begin(), from.data.end(), to.data.begin(), [](double x) { return static_cast<T>(x); });
    return to;
  }

  template <class Arguments>
  void fill(Arguments* args) {
    args->q = q.view();
    args->k = k.view();
    args->v = v.view();
    args->g = g.view();
    args->beta = beta.view();
    args->initial_state = h0.view();
    args->cu_seqlens = cu_seqlens.view();
  }
};

// Tokens [begin, end) of a [1, T, ...] tensor.
inline Tensor tokens(Tensor t, int64_t begin, int64_t end) {
  t.data = static_cast<char*>(t.data) + begin * t.stride[1] * size_of(dtype(t));
  t.shape[1] = end - begin;
  return t;
}

// The links of all ranks, packed as one collective would send them: [W, P = 1, Hv, K (V + K) + 4].
template <class T>
struct Gathered {
  int64_t W, Hv, K, V, row;
  std::vector<T> memory;

  Gathered(int64_t W, int64_t Hv, int64_t K, int64_t V)
      : W(W),
        Hv(Hv),
        K(K),
        V(V),
        row(K * (V + K) + 4),
        memory(static_cast<size_t>(W * Hv * row), std::numeric_limits<T>::quiet_NaN()) {}

  // S, M and kind of ranks [first, first + count), with `ndim` dimensions: those of one rank have no stream of its own.
  Tensor view(int64_t first, int64_t count, int64_t offset, std::vector<int64_t> shape, std::vector<int64_t> stride) {
    Tensor t{};
    t.data = memory.data() + first * Hv * row + offset;
    t.dtype = static_cast<int32_t>(kElement<T>);
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
template <class T>
class Ranks {
 public:
  // `path`: of the operations that have one of this name; NULL: the library's choice. `device`: of all tensors.
  Ranks(StreamCase<T>* whole, std::vector<int64_t> cuts, const char* path, DeviceType device)
      : c_(*whole), cuts_(std::move(cuts)), path_(path), device_(device), W_(static_cast<int64_t>(cuts_.size()) - 1) {
    for (int64_t rank = 0; rank < W_; ++rank) cut(rank);
  }

  // Results go into the whole call's buffers. Returns the rows of final_state, added up over the ranks.
  std::vector<T> forward() {
    Gathered<T> all(W_, c_.Hv, c_.K, c_.V);
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
    std::vector<T> sum(c_.final_state.data.size(), T(0));
    for (int64_t rank = 0; rank < W_; ++rank) {
      Rank& r = ranks_[rank];
      r.entering = combine(&all, rank, &r.enters, false);
      ForwardArguments args = c_.forward();
      choose(&args);
      for (Tensor* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.o}) {
        *t = tokens(*t, cuts_[rank], cuts_[rank + 1]);
      }
      args.cu_seqlens = offsets(&r);
      args.entering_rows = tensor(r.entering_rows.data(), DType::kInt64, {1});
      args.entering_state = tensor(r.entering.data(), kElement<T>, {1, c_.Hv, c_.K, c_.V});
      expect_ok(run<ChunkForward>(args));
      add_rows(r.ends, c_.final_state.data, &sum);
    }
    return sum;
  }

  // Likewise; returns dh0 added up. After forward().
  std::vector<T> backward() {
    Gathered<T> all(W_, c_.Hv, c_.K, c_.V);
    all.memory = forward_links_;  // M; S is written over
    std::vector<T> kinds = all.memory;
    for (int64_t rank = 0; rank < W_; ++rank) {
      Gathered<T> forward(W_, c_.Hv, c_.K, c_.V);
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
    std::vector<T> sum(c_.dh0.data.size(), T(0));
    for (int64_t rank = 0; rank < W_; ++rank) {
      Rank& r = ranks_[rank];
      std::vector<T> leaving = combine(&all, rank, &r.leaves, true);
      BackwardArguments args = c_.backward();
      choose(&args);
      for (Tensor* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.d_o, &args.dq, &args.dk, &args.dv,
                        &args.dg, &args.dbeta}) {
        *t = tokens(*t, cuts_[rank], cuts_[rank + 1]);
      }
      args.cu_seqlens = offsets(&r);
      args.entering_rows = tensor(r.entering_rows.data(), DType::kInt64, {1});
      args.entering_state = tensor(r.entering.data(), kElement<T>, {1, c_.Hv, c_.K, c_.V});
      args.leaving_rows = tensor(r.leaving_rows.data(), DType::kInt64, {1});
      args.leaving_dht = tensor(leaving.data(), kElement<T>, {1, c_.Hv, c_.K, c_.V});
      expect_ok(run<ChunkBackward>(args));
      add_rows(r.starts, c_.dh0.data, &sum);
    }
    return sum;
  }

 private:
  struct Rank {
    std::vector<int64_t> local, rows, entering_rows, leaving_rows;
    std::vector<uint8_t> starts, ends, enters, leaves, through;
    std::vector<T> entering;
  };

  template <class Arguments>
  void choose(Arguments* args) const {
    args->options.path = path_;
    args->set_device(device_);
  }
  template <class Paths>
  bool has_path(const Paths& paths) const {
    return path_ != nullptr && std::any_of(paths.begin(), paths.end(),
                                           [this](const auto* path) { return std::string(path->name) == path_; });
  }

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
    args.set_device(device_);
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
    choose(args);
    args->k = tokens(c_.k.view(), cuts_[rank], cuts_[rank + 1]);
    args->g = tokens(c_.g.view(), cuts_[rank], cuts_[rank + 1]);
    args->beta = tokens(c_.beta.view(), cuts_[rank], cuts_[rank + 1]);
    args->cu_seqlens = offsets(&ranks_[rank]);
    args->rows = tensor(ranks_[rank].rows.data(), DType::kInt64, {1, 2});
    args->through = flags(&ranks_[rank].through);
  }

  std::vector<T> combine(Gathered<T>* all, int64_t rank, std::vector<uint8_t>* wanted, bool backward) {
    std::vector<T> state(static_cast<size_t>(c_.Hv * c_.K * c_.V), std::numeric_limits<T>::quiet_NaN());
    std::vector<int64_t> place = {rank};
    SummaryCombineArguments args;
    choose(&args);
    if (!has_path(summary_combine_paths())) args.options.path = nullptr;
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
    args.state = tensor(state.data(), kElement<T>, {1, 1, c_.Hv, c_.K, c_.V});
    expect_ok(run<SummaryCombine>(args));
    return state;
  }

  void add_rows(const std::vector<uint8_t>& counts, const std::vector<T>& states, std::vector<T>* sum) {
    const size_t size = static_cast<size_t>(c_.Hv * c_.K * c_.V);
    for (size_t n = 0; n < counts.size(); ++n) {
      for (size_t i = 0; counts[n] && i < size; ++i) (*sum)[n * size + i] += states[n * size + i];
    }
  }

  StreamCase<T>& c_;
  std::vector<int64_t> cuts_;
  const char* path_;
  DeviceType device_;
  int64_t W_;
  std::vector<Rank> ranks_;
  std::vector<T> forward_links_;
};

// Relative L2 distance; absolute, at 1e-6 a value, to what is next to nothing.
template <class X, class Y>
double distance(const std::vector<X>& x, const std::vector<Y>& y) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < x.size(); ++i) {
    difference += (static_cast<double>(x[i]) - y[i]) * (static_cast<double>(x[i]) - y[i]);
    norm += static_cast<double>(y[i]) * y[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-6 * std::sqrt(static_cast<double>(x.size()) + 1.0));
}

// Drawn streams over drawn ranks by a path, held to one call over the whole stream by the reference. `change`: what a
// test does to a case before.
template <class T, class Change>
void hold_to_one_rank(const char* path, DeviceType device, int rounds, int64_t longest, int64_t K, int64_t V,
                      double bound, Change&& change) {
  std::mt19937 random(3);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < rounds; ++round) {
    const int64_t W = draw(1, 5);
    std::vector<int32_t> offsets = {0};
    for (int64_t n = draw(1, 4); n > 0; --n) {
      offsets.push_back(offsets.back() + static_cast<int32_t>(draw(0, 3) ? draw(0, longest) : 0));
    }
    Case drawn(1, offsets.back(), 1, 2, K, V, offsets);
    change(&drawn, round);
    std::vector<int64_t> cuts = {0, drawn.T};
    for (int64_t i = 1; i < W; ++i) {
      cuts.push_back(draw(0, 2) ? draw(0, drawn.T) : offsets[static_cast<size_t>(draw(0, drawn.N))]);
    }
    std::sort(cuts.begin(), cuts.end());
    StreamCase<T> parts(drawn);
    StreamCase<T> whole = parts;
    ForwardArguments forward = whole.forward();
    BackwardArguments backward = whole.backward();
    forward.options.path = backward.options.path = "reference";
    ASSERT_TRUE(run<ChunkForward>(forward).ok());
    ASSERT_TRUE(run<ChunkBackward>(backward).ok());
    Ranks<T> ranks(&parts, cuts, path, device);
    EXPECT_LT(distance(ranks.forward(), whole.final_state.data), bound) << "round " << round;
    EXPECT_LT(distance(ranks.backward(), whole.dh0.data), bound) << "round " << round;
    const std::pair<const Buffer<T>*, const Buffer<T>*> tensors[] = {
        {&parts.o, &whole.o},   {&parts.dq, &whole.dq}, {&parts.dk, &whole.dk},
        {&parts.dv, &whole.dv}, {&parts.dg, &whole.dg}, {&parts.dbeta, &whole.dbeta}};
    for (const auto& [found, expected] : tensors) {
      EXPECT_LT(distance(found->data, expected->data), bound)
          << "round " << round << " tensor " << (found == &parts.o ? "o" : "gradient");
    }
    if (testing::Test::HasFailure()) return;
  }
}

}  // namespace flash_qla
