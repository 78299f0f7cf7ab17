// The inputs of one (sequence, value head) in fp64, with the options that wrap the recurrence applied: l2 norm, gate
// activation, beta sigmoid (docs/math.md, "Options that wrap the core").
#pragma once

#include <cmath>
#include <vector>

#include "core/host_tensor.h"

namespace flash_qla::reference {

using Vector = std::vector<double>;

inline double round_to(DType d, double x) {
  switch (d) {
    case DType::kBFloat16:
      return to_float(to_bfloat16(static_cast<float>(x)));
    case DType::kFloat16:
      return to_float(to_float16(static_cast<float>(x)));
    case DType::kFloat32:
      return static_cast<float>(x);
    default:
      return x;
  }
}

// Row (b, t, head) of q, k or v.
inline Vector load_row(const Tensor& t, int64_t b, int64_t token, int64_t head) {
  Vector row(static_cast<size_t>(t.shape[3]));
  for (int64_t i = 0; i < t.shape[3]; ++i) row[static_cast<size_t>(i)] = load(t, offset_of(t, b, token, head, i));
  return row;
}

inline double dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

inline double inverse_norm(const Vector& x) { return 1.0 / std::sqrt(dot(x, x) + kL2NormEps); }

// A row of q or k as the recurrence uses it.
inline Vector load_key(const Tensor& t, int64_t b, int64_t token, int64_t head, bool l2norm) {
  Vector x = load_row(t, b, token, head);
  if (l2norm) {
    const double r = inverse_norm(x);
    for (double& value : x) value = round_to(dtype(t), value * r);
  }
  return x;
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return x > 0.0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// Keeps NaN.
inline double clamp_log_decay(double g) { return g < kMinLogDecay ? kMinLogDecay : g; }

// The log decay of a token before the clamp. `t` counts from the sequence's start.
template <class Arguments>
double log_decay(const Arguments& args, bool g_is_cumsum, const Sequence& s, int64_t t, int64_t head) {
  if (!present(args.g)) return 0.0;
  const double g = load(args.g, offset_of(args.g, s.b, s.begin + t, head));
  if (g_is_cumsum) {
    return t % kChunkSize == 0 ? g : g - load(args.g, offset_of(args.g, s.b, s.begin + t - 1, head));
  }
  if (!args.options.use_gate_in_kernel) return g;
  const double bias = present(args.dt_bias) ? load(args.dt_bias, offset_of(args.dt_bias, head)) : 0.0;
  return -std::exp(load(args.A_log, offset_of(args.A_log, head))) * softplus(g + bias);
}

inline double beta_range(const flash_qla_options& options) { return options.allow_neg_eigval ? 2.0 : 1.0; }

template <class Arguments>
double load_beta(const Arguments& args, const Sequence& s, int64_t t, int64_t head) {
  if (!present(args.beta)) return 1.0;
  const double raw = load(args.beta, offset_of(args.beta, s.b, s.begin + t, head));
  return args.options.use_beta_sigmoid_in_kernel ? beta_range(args.options) * sigmoid(raw) : raw;
}

// Element (key i, value j) of a state tensor's row.
inline int64_t state_offset(const Tensor& t, bool v_first, int64_t row, int64_t head, int64_t i, int64_t j) {
  return v_first ? offset_of(t, row, head, j, i) : offset_of(t, row, head, i, j);
}

// A state is held as [K][V].
inline Vector load_state(const Tensor& t, bool v_first, int64_t row, int64_t head, int64_t K, int64_t V) {
  Vector S(static_cast<size_t>(K * V));
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      S[static_cast<size_t>(i * V + j)] = load(t, state_offset(t, v_first, row, head, i, j));
    }
  }
  return S;
}

// Row n of initial_state or dht, or what stands for it where ranks have parts of the sequence; zeros where neither is.
inline Vector load_boundary_state(const Tensor& t, const Tensor& rows, const Tensor& of_parts, bool v_first, int64_t n,
                                  int64_t head, int64_t K, int64_t V) {
  if (const int64_t part = part_of_row(rows, n); part >= 0) return load_state(of_parts, false, part, head, K, V);
  if (present(t)) return load_state(t, v_first, n, head, K, V);
  return Vector(static_cast<size_t>(K * V), 0.0);
}

inline void store_state(const Tensor& t, bool v_first, int64_t row, int64_t head, int64_t K, int64_t V,
                        const Vector& S) {
  for (int64_t i = 0; i < K; ++i) {
    for (int64_t j = 0; j < V; ++j) {
      store(t, state_offset(t, v_first, row, head, i, j), S[static_cast<size_t>(i * V + j)]);
    }
  }
}

// S^T x: [V]
inline Vector read_state(const Vector& S, const Vector& x, int64_t V) {
  Vector y(static_cast<size_t>(V), 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < y.size(); ++j) y[j] += S[i * y.size() + j] * x[i];
  }
  return y;
}

// S y: [K]
inline Vector apply_state(const Vector& S, const Vector& y, int64_t K) {
  Vector x(static_cast<size_t>(K), 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < y.size(); ++j) x[i] += S[i * y.size() + j] * y[j];
  }
  return x;
}

// S += a x y^T
inline void add_outer(Vector* S, double a, const Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < y.size(); ++j) (*S)[i * y.size() + j] += a * x[i] * y[j];
  }
}

inline void scale_by(Vector* S, double a) {
  for (double& value : *S) value *= a;
}

// Writes zero to every element, so that tokens and rows outside all sequences read as zero.
inline void fill_zero(const Tensor& t) {
  if (!present(t)) return;
  int64_t shape[4] = {1, 1, 1, 1};
  for (int32_t i = 0; i < t.ndim; ++i) shape[i] = t.shape[i];
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      for (int64_t c = 0; c < shape[2]; ++c) {
        for (int64_t d = 0; d < shape[3]; ++d) store(t, offset_of(t, a, b, c, d), 0.0);
      }
    }
  }
}

// One token as the recurrence uses it.
struct Token {
  Vector q, k, v;
  double decay = 1.0;  // e^g
  double beta = 1.0;
};

template <class Arguments>
Token load_token(const Arguments& args, bool g_is_cumsum, const Problem& p, const Sequence& s, int64_t t,
                 int64_t head) {
  const bool l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  Token token;
  token.q = load_key(args.q, s.b, s.begin + t, head / p.group, l2norm);
  token.k = load_key(args.k, s.b, s.begin + t, head / p.group, l2norm);
  token.v = load_row(args.v, s.b, s.begin + t, head);
  token.decay = std::exp(clamp_log_decay(log_decay(args, g_is_cumsum, s, t, head)));
  token.beta = load_beta(args, s, t, head);
  return token;
}

// One step of the recurrence: S becomes the state after the token. Returns u_t.
// u_t = beta_t (v_t - S~_t^T k_t), S_t = S~_t + k_t u_t^T with S~_t = e^g S_{t-1}
inline Vector step(const Token& token, Vector* S) {
  scale_by(S, token.decay);
  Vector u = read_state(*S, token.k, static_cast<int64_t>(token.v.size()));
  for (size_t j = 0; j < u.size(); ++j) u[j] = token.beta * (token.v[j] - u[j]);
  add_outer(S, 1.0, token.k, u);
  return u;
}

}  // namespace flash_qla::reference
