// The forward for any strides, dtypes, widths and seq_idx.
#pragma once

#include "cuda/layer/conv_any.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

__global__ void __launch_bounds__(kAnyThreads)
    conv_forward_any_kernel(const __grid_constant__ ConvParams p, int32_t units) {
  finish_gates<1>(p.gates, blockIdx.x, gridDim.x);
  constexpr int kWarps = kAnyThreads / 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (item >= p.sequences.B * p.sequences.T * units) return;
  const int64_t token = item / units, b = token / p.sequences.T, t = token % p.sequences.T;
  const ConvUnit unit = unit_at<kUnitChannels>(p.parts, p.num_parts, static_cast<int>(item - token * units));
  const ConvPart& part = p.parts[unit.part];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ConvSpan span = span_at(p.sequences, b, t);
  const int64_t slot = conv_read_slot(p.sequences, span.n);
  const bool wanted = has_output(p.sequences, slot, b, t);
  // By the vector kernel's operations: rounded to 16 bits, a result does not depend on how x lies.
  const bool exact = is_wide(part.x);
  const float scale = !p.silu ? 1.0f : exact ? silu_scale<float>() : silu_scale<__half>();
  float u[kLaneChannels];
  any_u(part, p.sequences, unit, span, slot, b, t, p.width, u, scale);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    if (p.silu) u[i] = exact ? scaled_silu<float>(u[i]) : scaled_silu<__half>(u[i]);
    if (lane + 32 * i < unit.count) sum = fmaf(u[i], u[i], sum);
  }
  if (part.l2norm) {
    const float r = 1.0f / sqrtf((wanted ? warp_total(sum) : 0.0f) + static_cast<float>(kL2NormEps));
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) u[i] *= r;
    if (part.inverse_norm.data != nullptr && lane == 0) {
      store<float>(part.inverse_norm, offset_of(part.inverse_norm, b, t, unit.head), r);
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int c = lane + 32 * i;
    if (c >= unit.count) continue;
    if (part.residual.data != nullptr) {
      u[i] += load<float>(part.residual, offset_of(part.residual, b, t, unit.head, unit.first + c));
    }
    store<float>(part.y, offset_of(part.y, b, t, unit.head, unit.first + c), wanted ? u[i] : 0.0f);
  }
}

}  // namespace flash_qla::cuda
