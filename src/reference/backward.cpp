// Backward of the reference: the recurrence's own reverse, token by token. It shares no algebra with the chunked
// backward of docs/math.md, so that agreement between the two means something.
#include <cmath>

#include "core/host_tensor.h"
#include "core/registry.h"
#include "reference/paths.h"
#include "reference/tokens.h"

namespace flash_qla {
namespace reference {
namespace {

using Arguments = flash_qla_backward_arguments;

// Gradients that several heads or tokens add to, in fp64 until they are rounded once.
struct Sums {
  Vector dq, dk;            // [B, T, Hq, K]
  Vector dA_log, ddt_bias;  // [Hv]
};

struct TokenGradient {
  Vector dq, dk, dv;
  double dg = 0.0, dbeta = 0.0;
};

// Takes *dS from the gradient of the state after the token to that of the state before it.
TokenGradient reverse_step(const Token& token, const Vector& S_before, double scale, const Vector& d_o, Vector* dS) {
  const int64_t K = static_cast<int64_t>(token.k.size()), V = static_cast<int64_t>(token.v.size());
  Vector S_decayed = S_before;
  scale_by(&S_decayed, token.decay);
  Vector S_after = S_before;
  const Vector u = step(token, &S_after);
  Vector error = read_state(S_decayed, token.k, V);
  for (size_t j = 0; j < error.size(); ++j) error[j] = token.v[j] - error[j];

  TokenGradient grad;
  // o = scale S_t^T q
  grad.dq = apply_state(S_after, d_o, K);
  scale_by(&grad.dq, scale);
  add_outer(dS, scale, token.q, d_o);
  // S_t = S~ + k u^T
  grad.dk = apply_state(*dS, u, K);
  const Vector du = read_state(*dS, token.k, V);
  // u = beta (v - S~^T k)
  grad.dbeta = dot(du, error);
  grad.dv = du;
  scale_by(&grad.dv, token.beta);
  const Vector through_read = apply_state(S_decayed, grad.dv, K);
  for (size_t i = 0; i < grad.dk.size(); ++i) grad.dk[i] -= through_read[i];
  add_outer(dS, -1.0, token.k, grad.dv);
  // S~ = e^g S_{t-1}
  grad.dg = dot(*dS, S_decayed);
  scale_by(dS, token.decay);
  return grad;
}

// Gradient of x for y = x r(x), r the inverse norm, given dy.
Vector through_l2norm(const Vector& x, const Vector& dy) {
  const double r = inverse_norm(x);
  const double along = dot(dy, x) * r * r;
  Vector dx(x.size());
  for (size_t i = 0; i < x.size(); ++i) dx[i] = r * (dy[i] - along * x[i]);
  return dx;
}

// Chains dg and dbeta through the activations and stores them.
void store_gates(const Arguments& args, const Sequence& s, int64_t t, int64_t head, const TokenGradient& grad,
                 Sums* sums) {
  const int64_t token = s.begin + t;
  double dg = grad.dg;
  const double g = log_decay(args, args.g_is_cumsum != 0, s, t, head);
  if (g < kMinLogDecay) dg = 0.0;  // the clamp: the exact limit
  if (args.options.use_gate_in_kernel) {
    const double raw = load(args.g, offset_of(args.g, s.b, token, head));
    const double bias = present(args.dt_bias) ? load(args.dt_bias, offset_of(args.dt_bias, head)) : 0.0;
    if (dg != 0.0) sums->dA_log[static_cast<size_t>(head)] += dg * g;
    dg *= -std::exp(load(args.A_log, offset_of(args.A_log, head))) * sigmoid(raw + bias);
    sums->ddt_bias[static_cast<size_t>(head)] += dg;
  }
  if (present(args.dg)) store(args.dg, offset_of(args.dg, s.b, token, head), dg);
  if (present(args.dbeta)) {
    double dbeta = grad.dbeta;
    if (args.options.use_beta_sigmoid_in_kernel) {
      const double y = sigmoid(load(args.beta, offset_of(args.beta, s.b, token, head)));
      dbeta *= beta_range(args.options) * y * (1.0 - y);
    }
    store(args.dbeta, offset_of(args.dbeta, s.b, token, head), dbeta);
  }
}

void run_sequence(const Arguments& args, const Problem& p, const Sequence& s, int64_t n, int64_t head, Sums* sums) {
  const bool v_first = args.options.state_v_first != 0;
  const bool cumsum = args.g_is_cumsum != 0;
  Vector S =
      load_boundary_state(args.initial_state, args.entering_rows, args.entering_state, v_first, n, head, p.K, p.V);
  Vector dS = load_boundary_state(args.dht, args.leaving_rows, args.leaving_dht, v_first, n, head, p.K, p.V);

  // States at chunk starts; those inside a chunk are computed again when the chunk's turn comes.
  std::vector<Vector> chunk_states;
  for (int64_t t = 0; t < s.length; ++t) {
    if (t % kChunkSize == 0) chunk_states.push_back(S);
    step(load_token(args, cumsum, p, s, t, head), &S);
  }
  for (int64_t chunk = s.chunks() - 1; chunk >= 0; --chunk) {
    const int64_t begin = chunk * kChunkSize, end = std::min(s.length, begin + kChunkSize);
    std::vector<Vector> before;
    S = chunk_states[static_cast<size_t>(chunk)];
    for (int64_t t = begin; t < end; ++t) {
      before.push_back(S);
      step(load_token(args, cumsum, p, s, t, head), &S);
    }
    for (int64_t t = end - 1; t >= begin; --t) {
      const Token token = load_token(args, cumsum, p, s, t, head);
      const Vector d_o =
          present(args.d_o) ? load_row(args.d_o, s.b, s.begin + t, head) : Vector(static_cast<size_t>(p.V), 0.0);
      const TokenGradient grad = reverse_step(token, before[static_cast<size_t>(t - begin)], p.scale, d_o, &dS);
      for (int64_t j = 0; present(args.dv) && j < p.V; ++j) {
        store(args.dv, offset_of(args.dv, s.b, s.begin + t, head, j), grad.dv[static_cast<size_t>(j)]);
      }
      const int64_t row = ((s.b * p.T + s.begin + t) * p.Hq + head / p.group) * p.K;
      for (int64_t i = 0; i < p.K; ++i) {
        sums->dq[static_cast<size_t>(row + i)] += grad.dq[static_cast<size_t>(i)];
        sums->dk[static_cast<size_t>(row + i)] += grad.dk[static_cast<size_t>(i)];
      }
      store_gates(args, s, t, head, grad, sums);
    }
  }
  if (present(args.dh0)) store_state(args.dh0, v_first, n, head, p.K, p.V, dS);
}

// Gradient of the row before y = r x with r its inverse norm, given dy.
Vector through_given_norm(const Vector& y, const Vector& dy, double r) {
  const double along = dot(dy, y);
  Vector dx(y.size());
  for (size_t i = 0; i < y.size(); ++i) dx[i] = r * (dy[i] - along * y[i]);
  return dx;
}

// Rounds the sum over a group's value heads, after the l2 norm's chain rule.
void store_keys(const Tensor& out, const Tensor& x, const Tensor& inverse_norm, const Vector& sum, const Problem& p,
                const std::vector<Sequence>& sequences, bool l2norm) {
  fill_zero(out);
  for (const Sequence& s : sequences) {
    for (int64_t t = s.begin; present(out) && t < s.begin + s.length; ++t) {
      for (int64_t head = 0; head < p.Hq; ++head) {
        const auto first = sum.begin() + ((s.b * p.T + t) * p.Hq + head) * p.K;
        Vector dx(first, first + p.K);
        if (l2norm) dx = through_l2norm(load_row(x, s.b, t, head), dx);
        if (present(inverse_norm)) {
          const double r = load(inverse_norm, offset_of(inverse_norm, s.b, t, head));
          dx = through_given_norm(load_row(x, s.b, t, head), dx, r);
        }
        for (int64_t i = 0; i < p.K; ++i) store(out, offset_of(out, s.b, t, head, i), dx[static_cast<size_t>(i)]);
      }
    }
  }
}

void store_heads(const Tensor& out, const Vector& sum) {
  for (size_t i = 0; present(out) && i < sum.size(); ++i) store(out, offset_of(out, static_cast<int64_t>(i)), sum[i]);
}

Status run(const Arguments& args, const Problem& p, void*, void*) {
  for (const Tensor* t : {&args.dv, &args.dg, &args.dbeta}) fill_zero(*t);
  const size_t keys = static_cast<size_t>(p.B * p.T * p.Hq * p.K), heads = static_cast<size_t>(p.Hv);
  Sums sums{Vector(keys, 0.0), Vector(keys, 0.0), Vector(heads, 0.0), Vector(heads, 0.0)};
  const std::vector<Sequence> sequences = host_sequences(args.cu_seqlens, p);
  for (int64_t n = 0; n < p.N; ++n) {
    for (int64_t head = 0; head < p.Hv; ++head) {
      run_sequence(args, p, sequences[static_cast<size_t>(n)], n, head, &sums);
    }
  }
  const bool l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  store_keys(args.dq, args.q, args.q_inverse_norm, sums.dq, p, sequences, l2norm);
  store_keys(args.dk, args.k, args.k_inverse_norm, sums.dk, p, sequences, l2norm);
  store_heads(args.dA_log, sums.dA_log);
  store_heads(args.ddt_bias, sums.ddt_bias);
  return Status();
}

std::string accept(const Arguments&, const Problem&) { return {}; }
size_t no_workspace(const Arguments&, const Problem&) { return 0; }

}  // namespace
}  // namespace reference

const BackwardPath kReferenceChunkBackward = {"reference",       FLASH_QLA_CPU,           true,
                                              reference::accept, reference::no_workspace, reference::run};

}  // namespace flash_qla
