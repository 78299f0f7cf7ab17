// What the state warpgroups of all kernels do with the tokens of a chunk between two products.
#pragma once

#include <cstdint>

#include "cuda/common/fragment.cuh"
#include "cuda/common/wgmma.cuh"

namespace flash_qla::cuda::sm90 {

// What the state groups of all kernels do with 16 tokens of a transposed accumulator (eight values a thread), the
// factors being by tokens. W^T = V^T - u^T diag(gamma), V packed:
template <typename Element>
__device__ __forceinline__ void subtract_from_values(uint32_t* v, const float* u, const float4& gamma) {
  float2 y = unpack2<Element>(v[0]);
  v[0] = pack2<Element>(fmaf(-gamma.x, u[0], y.x), fmaf(-gamma.y, u[1], y.y));
  y = unpack2<Element>(v[1]);
  v[1] = pack2<Element>(fmaf(-gamma.x, u[2], y.x), fmaf(-gamma.y, u[3], y.y));
  y = unpack2<Element>(v[2]);
  v[2] = pack2<Element>(fmaf(-gamma.z, u[4], y.x), fmaf(-gamma.w, u[5], y.y));
  y = unpack2<Element>(v[3]);
  v[3] = pack2<Element>(fmaf(-gamma.z, u[6], y.x), fmaf(-gamma.w, u[7], y.y));
}
// ... times another factor of the tokens.
template <typename Element>
__device__ __forceinline__ void subtract_from_values(uint32_t* v, const float* u, const float4& gamma,
                                                     const float4& factor) {
  float2 y = unpack2<Element>(v[0]);
  v[0] = pack2<Element>(fmaf(-gamma.x, u[0], y.x) * factor.x, fmaf(-gamma.y, u[1], y.y) * factor.y);
  y = unpack2<Element>(v[1]);
  v[1] = pack2<Element>(fmaf(-gamma.x, u[2], y.x) * factor.x, fmaf(-gamma.y, u[3], y.y) * factor.y);
  y = unpack2<Element>(v[2]);
  v[2] = pack2<Element>(fmaf(-gamma.z, u[4], y.x) * factor.z, fmaf(-gamma.w, u[5], y.y) * factor.w);
  y = unpack2<Element>(v[3]);
  v[3] = pack2<Element>(fmaf(-gamma.z, u[6], y.x) * factor.z, fmaf(-gamma.w, u[7], y.y) * factor.w);
}
__device__ __forceinline__ void scale_tokens(float* x, const float4& factor) {
  x[0] *= factor.x, x[1] *= factor.y, x[2] *= factor.x, x[3] *= factor.y;
  x[4] *= factor.z, x[5] *= factor.w, x[6] *= factor.z, x[7] *= factor.w;
}

template <typename Element>
__device__ __forceinline__ void pack_scaled(uint32_t* packed, const float* x, const float4& factor) {
  packed[0] = pack2<Element>(x[0] * factor.x, x[1] * factor.y);
  packed[1] = pack2<Element>(x[2] * factor.x, x[3] * factor.y);
  packed[2] = pack2<Element>(x[4] * factor.z, x[5] * factor.w);
  packed[3] = pack2<Element>(x[6] * factor.z, x[7] * factor.w);
}

// V'^T as the next product's operand.
template <typename Element>
__device__ __forceinline__ void pack_values(uint32_t (&packed)[16], const float (&low)[16], const float (&high)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    packed[i] = pack2<Element>(low[2 * i], low[2 * i + 1]);
    packed[8 + i] = pack2<Element>(high[2 * i], high[2 * i + 1]);
  }
}
// The same times factors of the tokens, at the thread's columns of a gate vector.
template <typename Element>
__device__ __forceinline__ void pack_scaled_values(uint32_t (&packed)[16], const float (&low)[16],
                                                   const float (&high)[16], uint32_t factors) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    pack_scaled<Element>(packed + 4 * b, b < 2 ? low + 8 * b : high + 8 * (b - 2), load_shared_f4(factors + 16 * b));
  }
}
// In place.
__device__ __forceinline__ void scale_values(float (&low)[16], float (&high)[16], uint32_t factors) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    scale_tokens(b < 2 ? low + 8 * b : high + 8 * (b - 2), load_shared_f4(factors + 16 * b));
  }
}
// O^T = scale diag(gamma) (Q S)^T.
__device__ __forceinline__ void scale_outputs(float (&o)[32], float scale, uint32_t gammas) {
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    const float4 gamma = load_shared_f4(gammas + 16 * b);
    scale_tokens(o + 8 * b, make_float4(gamma.x * scale, gamma.y * scale, gamma.z * scale, gamma.w * scale));
  }
}

// V'^T = W^T Ag^T, tokens 0..31 and 32..63: the first need two 16-token steps only, Ag being lower triangular.
template <typename Element>
__device__ __forceinline__ void multiply_lower(float (&low)[16], float (&high)[16], const uint32_t (&w)[16],
                                               uint64_t a_rows) {
  wgmma_fence();
  mma_rs_n32_init<Element>(low, w, a_rows);
  mma_rs_n32_init<Element>(high, w, wgmma_advance_uniform(a_rows, 4096));
  mma_rs_n32<Element>(low, w + 4, wgmma_advance_uniform(a_rows, 32));
  mma_rs_n32<Element>(high, w + 4, wgmma_advance_uniform(a_rows, 4096 + 32));
  mma_rs_n32<Element>(high, w + 8, wgmma_advance_uniform(a_rows, 4096 + 64));
  mma_rs_n32<Element>(high, w + 12, wgmma_advance_uniform(a_rows, 4096 + 96));
  wgmma_commit();
}

}  // namespace flash_qla::cuda::sm90
