// The gates that come along with a convolution.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/layer/conv_params.h"

namespace flash_qla::cuda {

// Gates of all tokens by `blocks` blocks, of which this is `block`. A thread keeps its head, so that what belongs to a
// head is read once, and reads kAtOnce tokens before it computes one, so that they wait for memory together. Numbers of
// gates are below 2^32: reject_conv() sees to it.
template <int kAtOnce>
__device__ inline void finish_gates(const ConvGates& gates, uint32_t block, uint32_t blocks) {
  const uint32_t heads = static_cast<uint32_t>(gates.heads), T = static_cast<uint32_t>(gates.T);
  if (heads == 0) return;
  const uint32_t wide = min(heads, static_cast<uint32_t>(blockDim.x)), of_block = blockDim.x / wide;
  const uint32_t own = threadIdx.x / wide, step = blocks * of_block;
  if (own >= of_block) return;
  const bool has_g = gates.g.data != nullptr, has_beta = gates.beta.data != nullptr, one_row = gates.tokens == gates.T;
  for (uint32_t h = threadIdx.x % wide; h < heads; h += wide) {
    const auto raw_at = [&](const int64_t (&strides)[4], int64_t group) {
      const uint32_t of_key = static_cast<uint32_t>(group);
      return h / of_key * strides[2] + h % of_key * strides[3];
    };
    float rate = 0.0f, bias = 0.0f;
    int64_t a_at = 0, b_at = 0;
    if (has_g) {
      a_at = raw_at(gates.a_strides, gates.a_group);
      rate = -expf(unpack(gates.A_log, load_raw(gates.A_log, offset_of(gates.A_log, h))));
      if (gates.dt_bias.data != nullptr) {
        bias = unpack(gates.dt_bias, load_raw(gates.dt_bias, offset_of(gates.dt_bias, h)));
      }
    }
    if (has_beta) b_at = raw_at(gates.b_strides, gates.b_group);
#pragma unroll 1
    for (int64_t first = block * of_block + own; first < gates.tokens; first += kAtOnce * static_cast<int64_t>(step)) {
      uint32_t a[kAtOnce] = {}, b[kAtOnce] = {}, row[kAtOnce], token[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        // Past the last one it is that again: a condition would keep loads from being under way together.
        const int64_t n = min(first + k * static_cast<int64_t>(step), gates.tokens - 1);
        row[k] = one_row ? 0 : static_cast<uint32_t>(n) / T;
        token[k] = static_cast<uint32_t>(n) - row[k] * T;
        if (has_g) a[k] = load_raw(gates.a, row[k] * gates.a_strides[0] + token[k] * gates.a_strides[1] + a_at);
        if (has_beta) b[k] = load_raw(gates.b, row[k] * gates.b_strides[0] + token[k] * gates.b_strides[1] + b_at);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (first + k * static_cast<int64_t>(step) >= gates.tokens) continue;
        if (has_g) {
          float* g = static_cast<float*>(gates.g.data) + offset_of(gates.g, row[k], token[k], h);
          *g = rate * softplus(unpack(gates.a, a[k]) + bias);
        }
        if (has_beta) {
          float* beta = static_cast<float*>(gates.beta.data) + offset_of(gates.beta, row[k], token[k], h);
          *beta = gates.range * sigmoid(unpack(gates.b, b[k]));
        }
      }
    }
  }
}

}  // namespace flash_qla::cuda
