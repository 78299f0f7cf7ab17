// The gates that come along with a convolution.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/layer/conv_params.h"

namespace flash_qla::cuda {

__device__ inline int64_t raw_offset(const int64_t (&strides)[4], uint32_t group, int64_t b, int64_t t, uint32_t h) {
  return b * strides[0] + t * strides[1] + h / group * strides[2] + h % group * strides[3];
}

// Elements first, first + step .. of the gates. All that the first kMost need is read before any is computed, so that
// they wait for memory once, and other loads may come between.
template <int kMost>
struct GateElements {
  struct Raw {
    uint32_t a = 0, b = 0, A_log = 0, dt_bias = 0;
  };
  uint32_t first, step;
  Raw raw[kMost];

  struct Place {
    uint32_t b, t, h;
  };
  // Below 2^32: reject_conv() sees to it. A division of 64 bits takes longer than the rest of an element.
  static __device__ __forceinline__ Place place_of(const ConvGates& gates, uint32_t element) {
    const uint32_t heads = gates.heads, T = gates.T, token = element / heads, b = token / T;
    return {b, token - b * T, element - token * heads};
  }
  __device__ __forceinline__ bool has(const ConvGates& gates, int k) const {
    return first + static_cast<int64_t>(k) * step < gates.tokens * gates.heads;
  }

  __device__ __forceinline__ void load(const ConvGates& gates, uint32_t from, uint32_t between) {
    first = from;
    step = between;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (!has(gates, k)) continue;
      const auto [b, t, h] = place_of(gates, first + k * step);
      if (gates.g.data != nullptr) {
        raw[k].a = load_raw(gates.a, raw_offset(gates.a_strides, gates.a_group, b, t, h));
        raw[k].A_log = load_raw(gates.A_log, offset_of(gates.A_log, h));
        if (gates.dt_bias.data != nullptr) raw[k].dt_bias = load_raw(gates.dt_bias, offset_of(gates.dt_bias, h));
      }
      if (gates.beta.data != nullptr) {
        raw[k].b = load_raw(gates.b, raw_offset(gates.b_strides, gates.b_group, b, t, h));
      }
    }
  }
  __device__ __forceinline__ void finish(const ConvGates& gates) const {
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      if (!has(gates, k)) continue;
      const auto [b, t, h] = place_of(gates, first + k * step);
      if (gates.g.data != nullptr) {
        const float bias = gates.dt_bias.data == nullptr ? 0.0f : unpack(gates.dt_bias, raw[k].dt_bias);
        const float rate = expf(unpack(gates.A_log, raw[k].A_log));
        store<float>(gates.g, offset_of(gates.g, b, t, h), -rate * softplus(unpack(gates.a, raw[k].a) + bias));
      }
      if (gates.beta.data != nullptr) {
        store<float>(gates.beta, offset_of(gates.beta, b, t, h), gates.range * sigmoid(unpack(gates.b, raw[k].b)));
      }
    }
  }
  // Those that are loaded, and all behind them.
  __device__ __forceinline__ void finish_all(const ConvGates& gates) {
    while (true) {
      finish(gates);
      if (!has(gates, kMost)) return;
      load(gates, first + kMost * step, step);
    }
  }
};

// Block `block` of `blocks` that share the gates' elements.
__device__ inline void finish_gates(const ConvGates& gates, uint32_t block, uint32_t blocks) {
  GateElements<1> elements;
  elements.load(gates, block * blockDim.x + threadIdx.x, blocks * blockDim.x);
  elements.finish_all(gates);
}

}  // namespace flash_qla::cuda
