// The gates that come along with a convolution.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/layer/conv_params.h"

namespace flash_qla::cuda {

__device__ inline int64_t raw_offset(const int64_t (&strides)[4], uint32_t group, int64_t b, int64_t t, uint32_t h) {
  return b * strides[0] + t * strides[1] + h / group * strides[2] + h % group * strides[3];
}

// Block `block` of `blocks` that share the gates' elements.
__device__ inline void finish_gates(const ConvGates& gates, uint32_t block, uint32_t blocks) {
  // Below 2^32: reject_conv() sees to it. A division of 64 bits takes longer than the rest of an element.
  const uint32_t heads = gates.heads, T = gates.T;
  for (int64_t i = static_cast<int64_t>(block) * blockDim.x + threadIdx.x; i < gates.tokens * gates.heads;
       i += static_cast<int64_t>(blocks) * blockDim.x) {
    const uint32_t element = i, token = element / heads, h = element - token * heads, b = token / T, t = token - b * T;
    if (gates.g.data != nullptr) {
      const float raw = load<float>(gates.a, raw_offset(gates.a_strides, gates.a_group, b, t, h));
      const float bias = gates.dt_bias.data == nullptr ? 0.0f : load<float>(gates.dt_bias, offset_of(gates.dt_bias, h));
      const float rate = expf(load<float>(gates.A_log, offset_of(gates.A_log, h)));
      store<float>(gates.g, offset_of(gates.g, b, t, h), -rate * softplus(raw + bias));
    }
    if (gates.beta.data != nullptr) {
      const float raw = load<float>(gates.b, raw_offset(gates.b_strides, gates.b_group, b, t, h));
      store<float>(gates.beta, offset_of(gates.beta, b, t, h), gates.range * sigmoid(raw));
    }
  }
}

}  // namespace flash_qla::cuda
