// The gates that come along with a convolution.
#include "cpu/gates.h"

#include <cmath>

#include "cpu/layer/conv_output.h"
#include "cpu/threads.h"

namespace flash_qla::cpu {

void conv_gates(const flash_qla_conv_arguments& args, const ConvProblem& p) {
  if (!present(args.g) && !present(args.beta)) return;
  const GateView a = gate_view(args.a, p), b = gate_view(args.b, p);
  const double range = args.options.allow_neg_eigval ? 2.0 : 1.0;
  std::vector<double> rate(static_cast<size_t>(p.gate_heads), 0.0), bias = rate;
  for (int64_t h = 0; present(args.g) && h < p.gate_heads; ++h) {
    rate[static_cast<size_t>(h)] = std::exp(load(args.A_log, offset_of(args.A_log, h)));
    if (present(args.dt_bias)) bias[static_cast<size_t>(h)] = load(args.dt_bias, offset_of(args.dt_bias, h));
  }
  const int64_t runs = ceil_div(p.B * p.T, kRunTokens);
  constexpr double kOperations = 100.0;  // two exponentials and a logarithm in double
  const double operations = kOperations * static_cast<double>(p.B * p.T * p.gate_heads);
  const int64_t threads = worthwhile_threads(thread_count(args.options.num_threads, runs), operations);
  parallel_for(runs, threads, [&](int64_t run, int64_t) {
    for (int64_t i = run * kRunTokens; i < std::min((run + 1) * kRunTokens, p.B * p.T); ++i) {
      const int64_t row = i / p.T, t = i % p.T;
      for (int64_t h = 0; h < p.gate_heads; ++h) {
        if (present(args.g)) {
          const double raw = load(a.tensor, a.offset(row, t, h)) + bias[static_cast<size_t>(h)];
          store(args.g, offset_of(args.g, row, t, h), -rate[static_cast<size_t>(h)] * softplus(raw));
        }
        if (present(args.beta)) {
          store(args.beta, offset_of(args.beta, row, t, h), range * sigmoid(load(b.tensor, b.offset(row, t, h))));
        }
      }
    }
  });
}

}  // namespace flash_qla::cpu
