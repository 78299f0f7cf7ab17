// The options that wrap the recurrence (docs/math.md): gate activation, clamp, beta sigmoid, and their derivatives.
// Real is float in the kernels and double in the oracle.
#pragma once

#include <cmath>

#include "cuda/common/device_tensor.cuh"
#include "cuda/common/sequences.cuh"

namespace flash_qla::cuda {

template <class Real>
__device__ inline Real sigmoid(Real x) {
  return Real(1) / (Real(1) + exp(-x));
}

// Without a branch, whose both sides a warp would go through.
template <class Real>
__device__ inline Real softplus(Real x) {
  return (x > Real(0) ? x : Real(0)) + log1p(exp(-fabs(x)));
}

// Keeps NaN.
template <class Real>
__device__ inline Real clamp_log_decay(Real g) {
  return g < Real(kMinLogDecay) ? Real(kMinLogDecay) : g;
}

// g and beta as the caller gave them.
struct Gates {
  DeviceTensor g, beta;         // [B, T, Hv]; absent: no decay, ones
  DeviceTensor A_log, dt_bias;  // [Hv]
  int32_t use_gate;             // g is raw
  int32_t g_is_cumsum;          // g is the cumsum of each chunk
  int32_t use_sigmoid;          // beta is raw
  float beta_range;             // what the sigmoid is multiplied by
};

template <class Arguments>
Gates device_gates(const Arguments& args, bool g_is_cumsum) {
  return {device_tensor(args.g),
          device_tensor(args.beta),
          device_tensor(args.A_log),
          device_tensor(args.dt_bias),
          args.options.use_gate_in_kernel != 0,
          g_is_cumsum,
          args.options.use_beta_sigmoid_in_kernel != 0,
          args.options.allow_neg_eigval ? 2.f : 1.f};
}

// log decay = gate_rate * softplus(biased gate)
template <class Real>
__device__ inline Real gate_rate(const Gates& gates, int64_t head) {
  return -exp(load<Real>(gates.A_log, offset_of(gates.A_log, head)));
}

// The raw gate with its bias: what softplus is taken of.
template <class Real>
__device__ inline Real biased_gate(const Gates& gates, Real raw, int64_t head) {
  return gates.dt_bias.data == nullptr ? raw : raw + load<Real>(gates.dt_bias, offset_of(gates.dt_bias, head));
}

// Log decay of a token before the clamp. `chunk_start`: the token is the first of its chunk (looked at for a cumsum).
template <class Real>
__device__ inline Real log_decay(const Gates& gates, int64_t b, int64_t t, int64_t head, bool chunk_start) {
  if (gates.g.data == nullptr) return Real(0);
  const int64_t offset = offset_of(gates.g, b, t, head);
  const Real g = load<Real>(gates.g, offset);
  if (gates.g_is_cumsum) {
    // In double: the difference of two float32 values is then exact, and so is the decision whether it was clamped.
    return chunk_start ? g
                       : static_cast<Real>(static_cast<double>(g) - load<double>(gates.g, offset - gates.g.stride[1]));
  }
  return gates.use_gate ? gate_rate<Real>(gates, head) * softplus(biased_gate(gates, g, head)) : g;
}

template <class Real>
__device__ inline Real effective_beta(const Gates& gates, int64_t b, int64_t t, int64_t head) {
  if (gates.beta.data == nullptr) return Real(1);
  const Real raw = load<Real>(gates.beta, offset_of(gates.beta, b, t, head));
  return gates.use_sigmoid ? Real(gates.beta_range) * sigmoid(raw) : raw;
}

// Whether token t of a batch row is the first of a chunk of its sequence.
__device__ inline bool starts_chunk(const SequenceTable& table, int64_t t) {
  if (table.bounds == nullptr) return t % kChunkSize == 0;
  const int64_t n = last_not_above(table.N, t, [&](int64_t i) { return table.bounds[i]; });
  return (t - table.bounds[n]) % kChunkSize == 0;
}

}  // namespace flash_qla::cuda
