// The convolution of any strides, dtypes, widths and seq_idx, a warp for each token and up to 256 channels: correct
// first. Forward, and for the backward the gradient of u, from which those of the inputs follow.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/layer/conv_gates.cuh"
#include "cuda/layer/conv_sequences.cuh"

namespace flash_qla::cuda {

constexpr int kAnyThreads = 128;
constexpr int kUnitChannels = FLASH_QLA_MAX_HEAD_DIM;  // of a warp
constexpr int kLaneChannels = kUnitChannels / 32;

// Channels [first, first + count) of a head: all of one that is normalised, else at most kMost.
struct ConvUnit {
  int part, head, first, count;
};

template <int kMost, class Part>
__host__ __device__ inline int units_of_head(const Part& part) {
  return part.l2norm ? 1 : (part.dim + kMost - 1) / kMost;
}

// Of all parts.
template <int kMost, class Part>
int32_t units_of(const Part* parts, int num_parts) {
  int32_t units = 0;
  for (int i = 0; i < num_parts; ++i) units += parts[i].heads * units_of_head<kMost>(parts[i]);
  return units;
}

template <int kMost, class Part>
__device__ inline ConvUnit unit_at(const Part* parts, int num_parts, int unit) {
  int i = 0, of_head = units_of_head<kMost>(parts[0]);
  while (i + 1 < num_parts && unit >= parts[i].heads * of_head) {
    unit -= parts[i].heads * of_head;
    of_head = units_of_head<kMost>(parts[++i]);
  }
  const int head = unit / of_head, first = (unit - head * of_head) * kMost, rest = parts[i].dim - first;
  return {i, head, first, parts[i].l2norm || rest < kMost ? rest : kMost};
}

__device__ inline float warp_total(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// u of one token: lane l has channels l, l + 32 .. of the unit. scale: a factor of the weights and the bias.
template <class Part>
__device__ inline void any_u(const Part& part, const ConvSequences& s, const ConvUnit& unit, const ConvSpan& span,
                             int64_t slot, int64_t b, int64_t t, int width, float (&u)[kLaneChannels],
                             float scale = 1.0f) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t own = s.seq_idx.data != nullptr ? load_index(s.seq_idx, b, t) : 0;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int c = lane + 32 * i, channel = unit.head * part.dim + unit.first + c;
    u[i] = c < unit.count && part.bias.data != nullptr ? scale * load<float>(part.bias, offset_of(part.bias, channel))
                                                       : 0.0f;
  }
  for (int j = 0; j < width; ++j) {
    const int64_t position = t - (width - 1) + j;
    const bool input = position >= span.begin;
    if (s.seq_idx.data != nullptr && (!input || load_index(s.seq_idx, b, position) != own)) continue;
    if (!input && slot < 0) continue;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) {
      const int c = lane + 32 * i, channel = unit.head * part.dim + unit.first + c;
      if (c >= unit.count) continue;
      const float x = input ? load<float>(part.x, offset_of(part.x, b, position, unit.head, unit.first + c))
                            : load<float>(part.initial_state,
                                          offset_of(part.initial_state, slot, channel, s.L - (span.begin - position)));
      u[i] = fmaf(scale * load<float>(part.weight, offset_of(part.weight, channel, j)), x, u[i]);
    }
  }
}

// Whether a token has an output.
__device__ inline bool has_output(const ConvSequences& s, int64_t slot, int64_t b, int64_t t) {
  return slot != kSkipRow && (s.seq_idx.data == nullptr || load_index(s.seq_idx, b, t) >= 0);
}

}  // namespace flash_qla::cuda
