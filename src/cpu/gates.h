// Gate and beta of one value head: activations, cumulative sums in fp64, and the way back for their gradients.
#pragma once

#include <cmath>

#include "core/host_tensor.h"
#include "core/problem.h"

namespace flash_qla::cpu {

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

inline double softplus(double x) { return x > 0.0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// The gate's part of a call's arguments, forward or backward.
struct GateArguments {
  template <class Arguments>
  GateArguments(const Arguments& args, bool g_is_cumsum)
      : g(args.g),
        beta(args.beta),
        A_log(args.A_log),
        dt_bias(args.dt_bias),
        g_is_cumsum(g_is_cumsum),
        use_gate(args.options.use_gate_in_kernel != 0),
        use_sigmoid(args.options.use_beta_sigmoid_in_kernel != 0),
        beta_range(args.options.allow_neg_eigval ? 2.0 : 1.0) {}

  Tensor g, beta;         // [B, T, Hv]
  Tensor A_log, dt_bias;  // [Hv]
  bool g_is_cumsum, use_gate, use_sigmoid;
  double beta_range;
};

// Gradients of the gate's parameters, summed over the tokens of one (sequence, value head).
struct GateParameterGradients {
  double A_log = 0.0, dt_bias = 0.0;
};

class HeadGates {
 public:
  HeadGates(const GateArguments& args, int64_t head);

  // Cumulative log decay of the n tokens of a chunk that begins at `token`, each decay clamped at kMinLogDecay.
  void cumsum(int64_t b, int64_t token, int64_t n, double* c) const;

  // Log decay of one token, clamped; not for a cumsum.
  double log_decay(int64_t b, int64_t token) const { return clamp(raw_log_decay(b, token)); }

  double beta(int64_t b, int64_t token) const;

  // Takes gradients of the n tokens' log decay and beta to those of g and beta as they were given, in place.
  void gradients(int64_t b, int64_t token, int64_t n, double* dg, double* dbeta, GateParameterGradients* sums) const;

 private:
  // Keeps NaN.
  static double clamp(double g) { return g < kMinLogDecay ? kMinLogDecay : g; }
  double raw_log_decay(int64_t b, int64_t token) const;

  const GateArguments& args_;
  int64_t head_;
  double rate_ = 0.0;  // e^A_log
  double bias_ = 0.0;
};

}  // namespace flash_qla::cpu
