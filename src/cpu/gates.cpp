#include "cpu/gates.h"

#include <cmath>

namespace flash_qla::cpu {
namespace {

// How far rounding can move the difference of two float32 sums of 64 decays of -80: the sums reach 5120, where half a
// unit in the last place is 2.5e-4. A difference this close to the clamp is a clamped gate.
constexpr double kCumsumRounding = 1e-3;

}  // namespace

HeadGates::HeadGates(const GateArguments& args, int64_t head) : args_(args), head_(head) {
  if (!args.use_gate) return;
  rate_ = std::exp(load(args.A_log, offset_of(args.A_log, head)));
  if (present(args.dt_bias)) bias_ = load(args.dt_bias, offset_of(args.dt_bias, head));
}

double HeadGates::raw_log_decay(int64_t b, int64_t token) const {
  if (!present(args_.g)) return 0.0;
  const double g = load(args_.g, offset_of(args_.g, b, token, head_));
  return args_.use_gate ? -rate_ * softplus(g + bias_) : g;
}

void HeadGates::cumsum(int64_t b, int64_t token, int64_t n, double* c) const {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double g = raw_log_decay(b, token + i);
    sum = args_.g_is_cumsum ? g : sum + clamp(g);
    c[i] = sum;
  }
}

double HeadGates::beta(int64_t b, int64_t token) const {
  if (!present(args_.beta)) return 1.0;
  const double raw = load(args_.beta, offset_of(args_.beta, b, token, head_));
  return args_.use_sigmoid ? args_.beta_range * sigmoid(raw) : raw;
}

void HeadGates::gradients(int64_t b, int64_t token, int64_t n, double* dg, double* dbeta,
                          GateParameterGradients* sums) const {
  double previous = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    const double g = raw_log_decay(b, token + i);
    const bool clamped = args_.g_is_cumsum ? g - previous < kMinLogDecay + kCumsumRounding : g < kMinLogDecay;
    previous = g;
    if (clamped) dg[i] = 0.0;  // the exact limit
    if (args_.use_gate && !clamped) {
      const double x = load(args_.g, offset_of(args_.g, b, token + i, head_)) + bias_;
      sums->A_log += dg[i] * g;
      dg[i] *= -rate_ * sigmoid(x);
      sums->dt_bias += dg[i];
    }
    if (args_.use_sigmoid) {
      const double y = sigmoid(load(args_.beta, offset_of(args_.beta, b, token + i, head_)));
      dbeta[i] *= args_.beta_range * y * (1.0 - y);
    }
  }
}

}  // namespace flash_qla::cpu
