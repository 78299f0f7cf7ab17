// What the roundings of a tensor-core kernel alone cost, whatever the kernel: the bound where a case is ill-conditioned
// (docs/numerics.md). The chunk algorithm in double, forward and backward, with the operands of every product rounded
// to the inputs' dtype, and without any rounding beside it. Names are those of docs/math.md.
#pragma once

#include <map>

#include "calls.h"

namespace flash_qla::testing {

using Matrix = std::vector<double>;  // row by row

// A call's inputs as the recurrence sees them, the wrapping options applied.
class PlainInputs {
 public:
  explicit PlainInputs(Inputs& in)
      : shape_(in.shape),
        q_(rows(in.q, in.features.l2norm)),
        k_(rows(in.k, in.features.l2norm)),
        v_(rows(in.v, false)) {
    const Features& f = in.features;
    scale_ = std::isnan(f.scale) ? 1.0 / std::sqrt(static_cast<double>(shape_.K)) : f.scale;
    for (int64_t b = 0; b < shape_.B; ++b) {
      for (int64_t t = 0; t < shape_.T; ++t) {
        for (int64_t h = 0; h < shape_.Hv; ++h) {
          double g = f.g ? at(in.g, b, t, h) : 0.0;
          if (f.gate) {
            const double x = g + (f.dt_bias ? at(in.dt_bias, h) : 0.0);
            g = -std::exp(at(in.A_log, h)) * (x > 20.0 ? x : std::log1p(std::exp(x)));
          }
          double beta = f.beta ? at(in.beta, b, t, h) : 1.0;
          if (f.sigmoid) beta = (f.negative ? 2.0 : 1.0) / (1.0 + std::exp(-beta));
          decay_.push_back(std::max(g, kMinLogDecay));
          beta_.push_back(beta);
        }
      }
    }
  }

  static double at(Buffer& x, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
    const Tensor t = x.host();
    return load(t, offset_of(t, i, j, k, l));
  }
  // [K, V] of a row of [rows, Hv, ..] states; zero of an absent tensor.
  Matrix state(Buffer& x, bool v_first, int64_t row, int64_t head) const {
    Matrix S(static_cast<size_t>(shape_.K * shape_.V), 0.0);
    for (int64_t i = 0; i < shape_.K * shape_.V && x.present(); ++i) {
      const int64_t k = i / shape_.V, v = i % shape_.V;
      S[static_cast<size_t>(i)] = v_first ? at(x, row, head, v, k) : at(x, row, head, k, v);
    }
    return S;
  }

  const Shape& shape() const { return shape_; }
  double scale() const { return scale_; }
  // Rows of tokens t .. t + n - 1 of batch row b.
  Matrix q(int64_t b, int64_t t, int64_t n, int64_t head) const { return part(q_, shape_.Hq, shape_.K, b, t, n, head); }
  Matrix k(int64_t b, int64_t t, int64_t n, int64_t head) const { return part(k_, shape_.Hq, shape_.K, b, t, n, head); }
  Matrix v(int64_t b, int64_t t, int64_t n, int64_t head) const { return part(v_, shape_.Hv, shape_.V, b, t, n, head); }
  Matrix beta(int64_t b, int64_t t, int64_t n, int64_t head) const { return part(beta_, shape_.Hv, 1, b, t, n, head); }
  // Sums of the log decays from the first of these tokens on.
  Matrix cumsum(int64_t b, int64_t t, int64_t n, int64_t head) const {
    Matrix c = part(decay_, shape_.Hv, 1, b, t, n, head);
    for (size_t i = 1; i < c.size(); ++i) c[i] += c[i - 1];
    return c;
  }
  // [tokens, heads, size] of a tensor of the call, in the order of its elements.
  static Matrix rows(Buffer& x, bool normalize) {
    const Tensor t = x.host();
    Matrix all;
    for (int64_t b = 0; b < t.shape[0]; ++b) {
      for (int64_t i = 0; i < t.shape[1]; ++i) {
        for (int64_t h = 0; h < t.shape[2]; ++h) {
          const size_t first = all.size();
          double squares = 0.0;
          for (int64_t l = 0; l < t.shape[3]; ++l) {
            all.push_back(load(t, offset_of(t, b, i, h, l)));
            squares += all.back() * all.back();
          }
          for (size_t l = first; normalize && l < all.size(); ++l) {
            all[l] = rounded_to(dtype(t), all[l] / std::sqrt(squares + kL2NormEps));
          }
        }
      }
    }
    return all;
  }
  Matrix part(const Matrix& all, int64_t heads, int64_t size, int64_t b, int64_t t, int64_t n, int64_t head) const {
    Matrix m;
    for (int64_t i = 0; i < n; ++i) {
      const auto first = all.begin() + (((b * shape_.T + t + i) * heads + head) * size);
      m.insert(m.end(), first, first + size);
    }
    return m;
  }
  static double rounded_to(DType type, double x) {
    const float narrow = static_cast<float>(x);
    if (type == DType::kBFloat16) return to_float(to_bfloat16(narrow));
    return type == DType::kFloat16 ? to_float(to_float16(narrow)) : x;
  }

 private:
  Shape shape_;
  Matrix q_, k_, v_, decay_, beta_;
  double scale_ = 0.0;
};

// One head's chunks, with or without roundings.
class ChunkEmulation {
 public:
  ChunkEmulation(const PlainInputs& inputs, bool rounds) : in_(inputs), type_(inputs.shape().dtype), rounds_(rounds) {}

  // What a chunk of tokens t0 .. t0 + n - 1 is made of.
  struct Chunk {
    int64_t n;
    Matrix Q, K, V, beta, c, KK, QK, G;  // G[i][j] = e^(c_i - c_j) for j <= i, else 0
  };
  Chunk chunk(int64_t b, int64_t t0, int64_t n, int64_t head) const {
    const Shape& s = in_.shape();
    const int64_t key_head = head / (s.Hv / s.Hq);
    Chunk x{n,
            in_.q(b, t0, n, key_head),
            in_.k(b, t0, n, key_head),
            in_.v(b, t0, n, head),
            in_.beta(b, t0, n, head),
            in_.cumsum(b, t0, n, head),
            {},
            {},
            Matrix(static_cast<size_t>(n * n), 0.0)};
    const Matrix Kt = transposed(x.K, n, s.K);
    x.KK = product(x.K, Kt, n, s.K, n);
    x.QK = product(x.Q, Kt, n, s.K, n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j <= i; ++j) x.G[place(i, j, n)] = std::exp(x.c[place(i)] - x.c[place(j)]);
    }
    return x;
  }

  // The forward kernels: replaces S by the state after the chunk, and returns O. The inverse's operands are fp16, which
  // is what one costs that is multiplied on tensor cores.
  Matrix forward(const Chunk& x, Matrix* S) const {
    const int64_t n = x.n, K = in_.shape().K, V = in_.shape().V;
    Matrix A = rounded(inverse(x, rounds_)), P(A.size());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        A[place(i, j, n)] *= x.G[place(i, j, n)] * x.beta[place(j)];
        P[place(i, j, n)] = in_.scale() * x.G[place(i, j, n)] * x.QK[place(i, j, n)];
      }
    }
    const Matrix S0 = rounded(*S), KS = product(x.K, S0, n, K, V), QS = product(x.Q, S0, n, K, V);
    Matrix W = x.V;
    for (size_t i = 0; i < W.size(); ++i) W[i] -= std::exp(x.c[i / static_cast<size_t>(V)]) * KS[i];
    Matrix values = product(rounded(A), rounded(W), n, n, V);
    Matrix O = product(rounded(P), rounded(values), n, n, V);
    for (size_t i = 0; i < O.size(); ++i) {
      const double c = x.c[i / static_cast<size_t>(V)];
      O[i] = PlainInputs::rounded_to(type_, O[i] + in_.scale() * std::exp(c) * QS[i]);  // as an oracle's is stored
      values[i] *= std::exp(x.c.back() - c);
    }
    add_decayed(S, std::exp(x.c.back()), product(transposed(x.K, n, K), rounded(values), K, n, V));
    return O;
  }

  // The backward kernels (tools/emulate_backward.py is the same in PyTorch). What the forward pass leaves of a chunk:
  struct Saved {
    Chunk x;
    Matrix GA, P, S0, values;
  };
  Saved forward_pass(Chunk x, Matrix* S) const {
    const int64_t n = x.n, K = in_.shape().K, V = in_.shape().V;
    Saved saved{x, rounded(inverse(x, false)), x.QK, rounded(*S), {}};
    for (size_t i = 0; i < saved.P.size(); ++i) {
      saved.GA[i] = rounded(x.G[i] * saved.GA[i]);
      saved.P[i] = rounded(in_.scale() * x.G[i] * x.QK[i]);
    }
    // On the diagonal G o A is 1: what that multiplies is added in float32.
    const Matrix own = scaled(error(x, saved.S0), x.beta, V);
    Matrix values = sum(own, product(below(saved.GA, n), rounded(own), n, n, V));
    saved.values = rounded(values);
    add_decayed(S, std::exp(x.c.back()),
                product(transposed(x.K, n, K), rounded(scaled(values, ratios(x), V)), K, n, V));
    return saved;
  }
  // Of the chunk's tokens; dq is that of the query as the recurrence sees it.
  struct Gradients {
    Matrix dq, dg, dbeta;
  };
  // Replaces dS by the gradient of the state before the chunk.
  Gradients backward_pass(const Saved& saved, const Matrix& dO, Matrix* dS) const {
    const Chunk& x = saved.x;
    const int64_t n = x.n, K = in_.shape().K, V = in_.shape().V;
    const Matrix dS1 = rounded(*dS), ratio = ratios(x);
    Matrix gamma, rho, strength;
    for (int64_t i = 0; i < n; ++i) {
      const bool small = std::abs(x.beta[place(i)]) < (type_ == DType::kFloat16 ? 0x1p-6 : 0x1p-30);
      gamma.push_back(std::exp(x.c[place(i)]));
      rho.push_back(small ? x.beta[place(i)] : 1.0);
      strength.push_back(small ? 1.0 : x.beta[place(i)]);
    }
    const Matrix own =
        sum(scaled(product(x.K, dS1, n, K, V), ratio, V), product(transposed(saved.P, n, n), dO, n, n, V));
    const Matrix Z = sum(own, product(transposed(below(saved.GA, n), n, n), rounded(own), n, n, V));
    const Matrix dO_rows = rounded(scaled(scaled(dO, gamma, V), Matrix(gamma.size(), in_.scale()), V));
    const Matrix dv = rounded(scaled(Z, strength, V));
    Matrix dP = product(dO, transposed(saved.values, n, V), n, V, n),
           D = product(dv, transposed(saved.values, n, V), n, V, n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        dP[place(i, j, n)] = rounded(in_.scale() * x.G[place(i, j, n)] * dP[place(i, j, n)]);
        D[place(i, j, n)] = j < i ? rounded(-rho[place(i)] * x.G[place(i, j, n)] * D[place(i, j, n)]) : 0.0;
      }
    }
    const Matrix S0t = transposed(saved.S0, K, V);
    const Matrix dq = sum(product(dO_rows, S0t, n, V, K), product(dP, x.K, n, n, K));
    const Matrix dv_rows = rounded(scaled(scaled(dv, gamma, V), scaled(rho, Matrix(rho.size(), -1.0), 1), V));
    const Matrix plus = sum(product(dv_rows, S0t, n, V, K), product(D, x.K, n, n, K));
    const Matrix carried = scaled(product(saved.values, transposed(dS1, K, V), n, V, K), ratio, K);
    const Matrix minus =
        sum(carried, sum(product(transposed(dP, n, n), x.Q, n, n, K), product(transposed(D, n, n), x.K, n, n, K)));
    const Matrix of_q = inner(x.Q, dq, K), of_plus = inner(x.K, plus, K), of_minus = inner(x.K, minus, K);
    const Matrix of_carried = inner(x.K, carried, K);
    Matrix dg(static_cast<size_t>(n));
    double since = std::exp(x.c.back()) * inner(dS1, saved.S0, K * V)[0];
    for (const double part : of_carried) since += part;
    for (int64_t i = n - 1; i >= 0; --i) {
      since += of_q[place(i)] + of_plus[place(i)] - of_minus[place(i)];
      dg[place(i)] = since;
    }
    Matrix GKK = below(x.KK, n);
    for (size_t i = 0; i < GKK.size(); ++i) GKK[i] *= -x.G[i];
    const Matrix of_error = inner(dv, sum(error(x, saved.S0), product(GKK, saved.values, n, n, V)), V);
    Matrix dbeta = inner(dv, saved.values, V);
    for (int64_t i = 0; i < n; ++i) {
      const double b = x.beta[place(i)];
      dbeta[place(i)] = rho[place(i)] == 1.0 ? dbeta[place(i)] / (b * b) : of_error[place(i)];
    }
    add_decayed(
        dS, std::exp(x.c.back()),
        sum(product(transposed(x.Q, n, K), dO_rows, K, n, V),
            product(transposed(x.K, n, K),
                    rounded(scaled(scaled(scaled(Z, gamma, V), x.beta, V), Matrix(gamma.size(), -1.0), V)), K, n, V)));
    return {dq, dg, dbeta};
  }

 private:
  static size_t place(int64_t i) { return static_cast<size_t>(i); }
  static size_t place(int64_t i, int64_t j, int64_t n) { return static_cast<size_t>(i * n + j); }
  double rounded(double x) const { return rounds_ ? PlainInputs::rounded_to(type_, x) : x; }
  Matrix rounded(Matrix x) const {
    for (double& value : x) value = rounded(value);
    return x;
  }
  // [n, m] = a [n, k] b [k, m]
  static Matrix product(const Matrix& a, const Matrix& b, int64_t n, int64_t k, int64_t m) {
    Matrix c(static_cast<size_t>(n * m), 0.0);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t l = 0; l < k; ++l) {
        const double x = a[place(i, l, k)];
        for (int64_t j = 0; j < m; ++j) c[place(i, j, m)] += x * b[place(l, j, m)];
      }
    }
    return c;
  }
  static Matrix transposed(const Matrix& a, int64_t n, int64_t m) {
    Matrix c(a.size());
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < m; ++j) c[place(j, i, n)] = a[place(i, j, m)];
    }
    return c;
  }
  static Matrix sum(Matrix a, const Matrix& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }
  // Each row of `columns` by a number of its own.
  static Matrix scaled(Matrix a, const Matrix& by, int64_t columns) {
    for (size_t i = 0; i < a.size(); ++i) a[i] *= by[i / static_cast<size_t>(columns)];
    return a;
  }
  // Inner products of rows of so many elements.
  static Matrix inner(const Matrix& a, const Matrix& b, int64_t columns) {
    Matrix sums(a.size() / static_cast<size_t>(columns), 0.0);
    for (size_t i = 0; i < a.size(); ++i) sums[i / static_cast<size_t>(columns)] += a[i] * b[i];
    return sums;
  }
  static Matrix below(Matrix a, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = i; j < n; ++j) a[place(i, j, n)] = 0.0;
    }
    return a;
  }
  static void add_decayed(Matrix* S, double decay, const Matrix& update) {
    for (size_t i = 0; i < S->size(); ++i) (*S)[i] = decay * (*S)[i] + update[i];
  }
  static Matrix ratios(const Chunk& x) {
    Matrix ratio;
    for (const double c : x.c) ratio.push_back(std::exp(x.c.back() - c));
    return ratio;
  }
  // V - diag(gamma) K S
  Matrix error(const Chunk& x, const Matrix& S) const {
    Matrix W = x.V;
    const int64_t K = in_.shape().K, V = in_.shape().V;
    const Matrix KS = product(x.K, S, x.n, K, V);
    for (size_t i = 0; i < W.size(); ++i) W[i] -= std::exp(x.c[i / static_cast<size_t>(V)]) * KS[i];
    return W;
  }
  // (I + strict_lower(diag(beta) K K^T))^-1; half: of elements rounded to fp16.
  static Matrix inverse(const Chunk& x, bool half) {
    const int64_t n = x.n;
    Matrix A(static_cast<size_t>(n * n), 0.0), M = below(scaled(x.KK, x.beta, n), n);
    for (double& m : M) m = half ? PlainInputs::rounded_to(DType::kFloat16, m) : m;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t l = 0; l < i; ++l) {
        for (int64_t j = 0; j <= l; ++j) A[place(i, j, n)] -= M[place(i, l, n)] * A[place(l, j, n)];
      }
      A[place(i, i, n)] = 1.0;
    }
    return A;
  }

  const PlainInputs& in_;
  const DType type_;
  const bool rounds_;
};

// Relative L2 errors of an emulation, of the worst head, by the tensor's name.
using EmulatedErrors = std::map<std::string, double>;

// Differences and norms of a tensor's head, squared.
struct EmulatedSums {
  double difference = 0.0, norm = 0.0;
  void add(const Matrix& got, const Matrix& want) {
    for (size_t i = 0; i < got.size(); ++i) {
      difference += (got[i] - want[i]) * (got[i] - want[i]);
      norm += want[i] * want[i];
    }
  }
  double relative() const { return std::sqrt(difference / std::max(norm, 1e-300)); }
};

// Sequences that are well-formed: [first token, end) of batch row b, and whose initial state is row `index`.
template <class Visit>
void for_each_sequence(const Shape& s, const Visit& visit) {
  for (int64_t n = 0; n < s.N(); ++n) {
    const size_t i = static_cast<size_t>(n);
    const bool packed = !s.cu_seqlens.empty();
    visit(n, packed ? 0 : n, packed ? s.cu_seqlens[i] : 0, packed ? s.cu_seqlens[i + 1] : s.T);
  }
}

// Where sequence n starts from; empty: it is skipped.
inline Matrix start_of(ForwardCall& call, const PlainInputs& inputs, int64_t n, int64_t head) {
  const bool v_first = call.in.features.v_first;
  if (!call.pool.present()) return inputs.state(call.in.initial_state, v_first, n, head);
  if (call.has_initial.present() && PlainInputs::at(call.has_initial, n) == 0.0) {
    Buffer none;
    return inputs.state(none, v_first, n, head);
  }
  const int64_t slots = call.pool.shape_view().shape[0];
  const int64_t slot = slot_or_skip(load_index(call.initial_indices.host(), n), -1, slots);
  return slot < 0 ? Matrix() : inputs.state(call.pool, v_first, slot, head);
}

// Of a forward call: "o", and "state" for all that holds states, whose error is that of the last ones.
inline EmulatedErrors emulate(ForwardCall& call) {
  const PlainInputs inputs(call.in);
  const Shape& s = inputs.shape();
  const ChunkEmulation kernel(inputs, true), exact(inputs, false);
  EmulatedErrors worst;
  for (int64_t head = 0; head < s.Hv; ++head) {
    EmulatedSums o, state;
    for_each_sequence(s, [&](int64_t n, int64_t b, int64_t begin, int64_t end) {
      Matrix S = start_of(call, inputs, n, head), truth = S;
      if (S.empty()) return;
      for (int64_t t = begin; t < end; t += kChunkSize) {
        const auto chunk = kernel.chunk(b, t, std::min(kChunkSize, end - t), head);
        o.add(kernel.forward(chunk, &S), exact.forward(chunk, &truth));
      }
      state.add(S, truth);
    });
    worst["o"] = std::max(worst["o"], o.relative());
    worst["state"] = std::max(worst["state"], state.relative());
  }
  return worst;
}

// Gradients of the queries themselves, of those of the queries as the recurrence sees them: [tokens, heads, size] each,
// as PlainInputs::rows(). The norm takes from each what lies along its query.
inline Matrix through_norm(const Matrix& dq, Buffer& queries) {
  const Matrix q = PlainInputs::rows(queries, false);
  const size_t size = static_cast<size_t>(queries.shape_view().shape[3]);
  Matrix through(dq.size());
  for (size_t first = 0; first < dq.size(); first += size) {
    double squares = kL2NormEps, along = 0.0;
    for (size_t i = first; i < first + size; ++i) squares += q[i] * q[i], along += q[i] * dq[i];
    for (size_t i = first; i < first + size; ++i) {
      through[i] = (dq[i] - q[i] * along / squares) / std::sqrt(squares);
    }
  }
  return through;
}

// Of a backward call: "dq", "state" for dh0, and, where the gates are log decays and beta comes without an activation,
// "dg" and "dbeta". Nothing of a call whose gates are sums.
inline EmulatedErrors emulate(BackwardCall& call) {
  if (call.g_is_cumsum) return {};
  const PlainInputs inputs(call.in);
  const Shape& s = inputs.shape();
  const bool v_first = call.in.features.v_first;
  const Matrix all_d_o = call.d_o.present() ? PlainInputs::rows(call.d_o, false)
                                            : Matrix(static_cast<size_t>(s.B * s.T * s.Hv * s.V), 0.0);
  EmulatedErrors worst;
  Matrix all_dq[2];  // with roundings; without
  for (Matrix& dq : all_dq) dq.resize(static_cast<size_t>(s.B * s.T * s.Hq * s.K));
  for (int64_t head = 0; head < s.Hv; ++head) {
    const int64_t key_head = head / (s.Hv / s.Hq);
    EmulatedSums dg, dbeta, dh0;
    for_each_sequence(s, [&](int64_t n, int64_t b, int64_t begin, int64_t end) {
      std::vector<ChunkEmulation::Gradients> found[2];
      Matrix state_gradient[2];
      for (const int which : {0, 1}) {
        const ChunkEmulation kernel(inputs, which == 0);
        Matrix S = inputs.state(call.in.initial_state, v_first, n, head);
        Matrix& dS = state_gradient[which] = inputs.state(call.dht, v_first, n, head);
        std::vector<ChunkEmulation::Saved> saved;
        for (int64_t t = begin; t < end; t += kChunkSize) {
          saved.push_back(kernel.forward_pass(kernel.chunk(b, t, std::min(kChunkSize, end - t), head), &S));
        }
        for (size_t i = saved.size(); i-- > 0;) {
          const int64_t t = begin + static_cast<int64_t>(i) * kChunkSize;
          const Matrix d_o = inputs.part(all_d_o, s.Hv, s.V, b, t, saved[i].x.n, head);
          found[which].push_back(kernel.backward_pass(saved[i], d_o, &dS));
          const Matrix& dq = found[which].back().dq;
          for (size_t j = 0; j < dq.size(); ++j) {
            const int64_t token = b * s.T + t + static_cast<int64_t>(j) / s.K;
            const int64_t at = (token * s.Hq + key_head) * s.K + static_cast<int64_t>(j) % s.K;
            all_dq[which][static_cast<size_t>(at)] += dq[j];
          }
        }
      }
      for (size_t i = 0; i < found[0].size(); ++i) {
        dg.add(found[0][i].dg, found[1][i].dg);
        dbeta.add(found[0][i].dbeta, found[1][i].dbeta);
      }
      dh0.add(state_gradient[0], state_gradient[1]);
    });
    worst["dg"] = std::max(worst["dg"], dg.relative());
    worst["dbeta"] = std::max(worst["dbeta"], dbeta.relative());
    worst["state"] = std::max(worst["state"], dh0.relative());
  }
  for (Matrix& dq : all_dq) dq = call.in.features.l2norm ? through_norm(dq, call.in.q) : dq;
  for (int64_t head = 0; head < s.Hq; ++head) {
    EmulatedSums dq;
    for (int64_t b = 0; b < s.B; ++b) {
      dq.add(inputs.part(all_dq[0], s.Hq, s.K, b, 0, s.T, head), inputs.part(all_dq[1], s.Hq, s.K, b, 0, s.T, head));
    }
    worst["dq"] = std::max(worst["dq"], dq.relative());
  }
  // Of a raw gate, and of a beta before its activation, the gradients have another factor a token.
  if (call.in.features.gate) worst.erase("dg");
  if (call.in.features.sigmoid) worst.erase("dbeta");
  return worst;
}

}  // namespace flash_qla::testing
