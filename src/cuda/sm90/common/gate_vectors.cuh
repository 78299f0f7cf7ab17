// The gate vectors of a chunk: cumulative sums, the factors that follow from them, mild and strong decay.
#pragma once

#include <cuda_bf16.h>
#include <cstdint>
#include <type_traits>

#include "cuda/common/fragment.cuh"
#include "cuda/sm90/common/sizes.h"
#include "cuda/sm90/common/trait_queries.h"

namespace flash_qla::cuda::sm90 {

// A chunk's decay is mild if no |c_C - c_t| exceeds kMildDecay (c_t: the sum of g up to token t, C the last). Then A_g
// and P need no factor for each pair of tokens: with V'' = (gC / gamma) V' in the place of V',
//   A_g'' = A diag(beta gC / gamma), O = diag(scale gamma) (Q S0 + P'' V''), P'' = lower(Q K^T) / gC, S1 = gC S0 + K^T
//   V''.
// bf16 has fp32's exponents, and e^50 either way leaves 10^16; there |c_C| is within it as well. In fp16 P'' might
// overflow: O = diag(scale gamma / gC) (gC Q S0 + P'' V'') with P'' = lower(Q K^T), and V'' is kept off the subnormals.
template <typename Element>
inline constexpr bool kWideExponents = std::is_same_v<Element, __nv_bfloat16>;
template <typename Element>
inline constexpr float kMildDecay = kWideExponents<Element> ? 50.0f : 5.0f;
// In bf16 a sequence's last chunk of so few tokens does not count as mild, whatever its decay: the rounding of beta_t
// is undone where it does not (make_gates()), and what few tokens are off by does not average out. Beyond half a chunk
// it does: the worst of some thousand heads of 33 tokens is at 4e-3, of 17 at 5e-3, of one at 7e-3 (docs/numerics.md).
inline constexpr int kShortChunk = 32;

struct NoSums {
  __device__ void operator()(float, float) const {}
};

// beta over what A_g's diagonal has of it. 1 where that is nothing, too large or no number.
__device__ __forceinline__ float beta_correction(float beta, float rounded) {
  const float ratio = __fdividef(beta, rounded);
  return fabsf(ratio - 1.0f) < 0.5f ? ratio : 1.0f;
}

// The gate vectors of one chunk by one warp; lane l holds tokens 2l and 2l + 1, their g, and their beta as load_beta()
// gets it. Every exponent is a difference, at most 0 for g <= 0, but for the bounded ones of a mild chunk. Vectors that
// the state groups read go to `state_gate`, the others to `gate`. save_sums() gets the sums of g up to both tokens.
// `few`: is_short_last_chunk().
// Where the chunk is not mild most of V' is the token's own beta_t W_t, for which A_g's diagonal has beta_t rounded.
// The factors that V' meets next, of rows in the state's update and of columns of P, are free to undo it.
template <typename Traits, typename LoadBeta, typename SaveSums = NoSums>
__device__ __forceinline__ void make_gates(const float& scale, float2 g, LoadBeta load_beta, bool short_chunk,
                                           uint32_t gate, uint32_t state_gate, int lane, SaveSums save_sums = {}) {
  const int block = lane >> 3;
  // Sums within the lane's block of 16 tokens.
  float cx = g.x < kGateFloor ? kGateFloor : g.x;  // keeps NaN
  float cy = cx + (g.y < kGateFloor ? kGateFloor : g.y);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, cy, step, 8);
    if ((lane & 7) >= step) {
      cx += below;
      cy += below;
    }
  }
  // Sums up to the end of each block.
  const float end0 = __shfl_sync(0xffffffffu, cy, 7);
  const float end1 = end0 + __shfl_sync(0xffffffffu, cy, 15);
  const float end2 = end1 + __shfl_sync(0xffffffffu, cy, 23);
  const float end3 = end2 + __shfl_sync(0xffffffffu, cy, 31);
  const float before = block == 0 ? 0.0f : block == 1 ? end0 : block == 2 ? end1 : end2;
  const float end = block == 0 ? end0 : block == 1 ? end1 : block == 2 ? end2 : end3;
  cx += before;
  cy += before;
  save_sums(cx, cy);
  using Element = typename Traits::Element;
  const bool mild =
      __all_sync(0xffffffffu, fabsf(end3 - cx) <= kMildDecay<Element> && fabsf(end3 - cy) <= kMildDecay<Element> &&
                                  (!kWideExponents<Element> || fabsf(end3) <= kMildDecay<Element>) && !short_chunk);
  const uint32_t place = ((lane & 3) * 20 + (lane >> 2) * 2) * 4;
  const uint32_t permuted = gate + place, state_permuted = state_gate + place;
  const uint32_t natural = gate + 8 * lane;
  const float2 beta = load_beta();
  const float gamma_x = exp2_approx(cx * kLog2e), gamma_y = exp2_approx(cy * kLog2e);
  const float rest_x = exp2_approx((end3 - cx) * kLog2e), rest_y = exp2_approx((end3 - cy) * kLog2e);
  store_shared_f2(state_permuted + Traits::kGateDecay, gamma_x, gamma_y);
  const float factor_p = kWideExponents<Element> ? exp2_approx(-end3 * kLog2e) : 1.0f;
  if (lane == 0) store_shared_f1(state_gate + Traits::kGateMild, mild ? factor_p : 0.0f);
  if (mild) {
    const float out_x = kWideExponents<Element> ? gamma_x : exp2_approx((cx - end3) * kLog2e);
    const float out_y = kWideExponents<Element> ? gamma_y : exp2_approx((cy - end3) * kLog2e);
    store_shared_f2(state_permuted + Traits::kGateScaled, out_x * scale, out_y * scale);
    if constexpr (kSavesA<Traits>) {
      store_shared_f2(permuted + Traits::kGateFactor, rest_x * beta.x, rest_y * beta.y);
    } else {
      store_shared_f2(permuted + Traits::kGateColumnA, rest_x * beta.x, rest_y * beta.y);
    }
    return;
  }
  if constexpr (kSavesA<Traits>) store_shared_f2(permuted + Traits::kGateFactor, 1.0f, 1.0f);
  store_shared_f2(state_permuted + Traits::kGateScaled, 1.0f, 1.0f);
  const float2 rounded = unpack2<Element>(pack2<Element>(beta.x, beta.y));
  const float exact_x = beta_correction(beta.x, rounded.x), exact_y = beta_correction(beta.y, rounded.y);
  const float scale_x = scale * exact_x, scale_y = scale * exact_y;
  store_shared_f2(state_permuted + Traits::kGateToEnd, rest_x * exact_x, rest_y * exact_y);
  store_shared_f2(natural + Traits::kGateSum, cx * kLog2e, cy * kLog2e);
  store_shared_f2(natural + Traits::kGateScaleP, scale_x, scale_y);
  const float column_x = exp2_approx((end - cx) * kLog2e), column_y = exp2_approx((end - cy) * kLog2e);
  store_shared_f2(permuted + Traits::kGateColumnA, column_x * beta.x, column_y * beta.y);
  store_shared_f2(permuted + Traits::kGateColumnP, column_x * scale_x, column_y * scale_y);
  store_shared_f2(natural + Traits::kGateRow, exp2_approx((cx - before) * kLog2e), exp2_approx((cy - before) * kLog2e));
  const int i = (lane >> 2) & 3, j = lane & 3;
  const float row_end = i == 1 ? end0 : i == 2 ? end1 : end2;
  const float column_end = j == 0 ? end0 : j == 1 ? end1 : end2;
  if (lane < 16)
    store_shared_f1(gate + Traits::kGatePair + 4 * lane, i > j ? exp2_approx((row_end - column_end) * kLog2e) : 0.0f);
}

}  // namespace flash_qla::cuda::sm90
