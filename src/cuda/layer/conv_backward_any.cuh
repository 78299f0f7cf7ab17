// The convolution's gradients for any strides, dtypes, widths, seq_idx and states: the gradient of u goes through
// memory.
#pragma once

#include "cuda/layer/conv_any.cuh"
#include "cuda/layer/conv_channel.cuh"
#include "cuda/layer/sums.cuh"

namespace flash_qla::cuda {

constexpr int64_t kSumTokens = 256;  // of a run whose terms one thread adds

__device__ inline int64_t du_offset(const ConvBackwardParams& p, int64_t b, int64_t t, int64_t channel) {
  return (b * p.sequences.T + t) * p.channels + channel;
}

// A token and the channels of a warp.
struct ConvItem {
  int64_t b, t;
  ConvUnit unit;
};

__device__ inline bool item_at(const ConvBackwardParams& p, int32_t units, ConvItem* item) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kAnyThreads / 32) + threadIdx.x / 32;
  if (i >= p.sequences.B * p.sequences.T * units) return false;
  const int64_t token = i / units;
  item->b = token / p.sequences.T;
  item->t = token - item->b * p.sequences.T;
  item->unit = unit_at<kUnitChannels>(p.parts, p.num_parts, static_cast<int>(i - token * units));
  return true;
}

// du, and dresidual: dy where there is an output.
__global__ void __launch_bounds__(kAnyThreads, 4)
    conv_du_kernel(const __grid_constant__ ConvBackwardParams p, int32_t units) {
  ConvItem item;
  if (!item_at(p, units, &item)) return;
  const ConvBackwardPart& part = p.parts[item.unit.part];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const ConvSpan span = span_at(p.sequences, item.b, item.t);
  const int64_t slot = conv_read_slot(p.sequences, span.n);
  const bool wanted = has_output(p.sequences, slot, item.b, item.t);
  float u[kLaneChannels], d[kLaneChannels], y[kLaneChannels], squares = 0.0f, along = 0.0f;
  any_u(part, p.sequences, item.unit, span, slot, item.b, item.t, p.width, u);
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int c = lane + 32 * i;
    const bool has = c < item.unit.count && wanted;
    d[i] = has && part.dy.data != nullptr
               ? load<float>(part.dy, offset_of(part.dy, item.b, item.t, item.unit.head, item.unit.first + c))
               : 0.0f;
    if (c < item.unit.count && part.dresidual.data != nullptr) {
      store<float>(part.dresidual, offset_of(part.dresidual, item.b, item.t, item.unit.head, item.unit.first + c),
                   d[i]);
    }
    y[i] = p.silu ? u[i] * sigmoid(u[i]) : u[i];
    if (!has) continue;
    squares = fmaf(y[i], y[i], squares);
    along = fmaf(y[i], d[i], along);
  }
  if (part.l2norm) {
    const float r = 1.0f / sqrtf(warp_total(squares) + static_cast<float>(kL2NormEps));
    along = warp_total(along) * r * r;
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) d[i] = r * (d[i] - along * y[i]);
  }
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const int c = lane + 32 * i;
    if (c >= item.unit.count) continue;
    if (p.silu) {
      const float s = sigmoid(u[i]);
      d[i] *= s + u[i] * s * (1.0f - s);
    }
    const int64_t channel = part.channel + item.unit.head * part.dim + item.unit.first + c;
    p.du[du_offset(p, item.b, item.t, channel)] = wanted ? d[i] : 0.0f;
  }
}

// dx of a token is made of du of the W tokens from it on, as far as they are of its sequence.
__global__ void __launch_bounds__(kAnyThreads)
    conv_dx_any_kernel(const __grid_constant__ ConvBackwardParams p, int32_t units) {
  ConvItem item;
  if (!item_at(p, units, &item)) return;
  const ConvSequences& s = p.sequences;
  const ConvBackwardPart& part = p.parts[item.unit.part];
  if (part.dx.data == nullptr) return;
  const ConvSpan span = span_at(s, item.b, item.t);
  const int64_t own = s.seq_idx.data != nullptr ? load_index(s.seq_idx, item.b, item.t) : 0;
  for (int c = static_cast<int>(threadIdx.x) % 32; c < item.unit.count; c += 32) {
    const int64_t channel = item.unit.head * part.dim + item.unit.first + c;
    float sum = 0.0f;
    for (int i = 0; i < p.width && span.n >= 0 && item.t + i < span.end; ++i) {
      if (s.seq_idx.data != nullptr && load_index(s.seq_idx, item.b, item.t + i) != own) continue;
      const float w = load<float>(part.weight, offset_of(part.weight, channel, p.width - 1 - i));
      sum = fmaf(w, p.du[du_offset(p, item.b, item.t + i, part.channel + channel)], sum);
    }
    const int64_t entry = item.t - (span.end - s.L);
    if (part.dfinal_state.data != nullptr && span.n >= 0 && entry >= 0) {
      sum += load<float>(part.dfinal_state, offset_of(part.dfinal_state, span.n, channel, entry));
    }
    store<float>(part.dx, offset_of(part.dx, item.b, item.t, item.unit.head, item.unit.first + c), sum);
  }
}

// The terms of a run of tokens in the gradients of weights and bias, a thread for each channel.
__global__ void __launch_bounds__(kStateThreads)
    conv_sums_any_kernel(const __grid_constant__ ConvBackwardParams p, int64_t columns, int64_t runs_of_row) {
  const ConvSequences& s = p.sequences;
  const int64_t run = blockIdx.x / columns, b = run / runs_of_row, first = run % runs_of_row * kSumTokens;
  const int64_t last = first + kSumTokens < s.T ? first + kSumTokens : s.T;
  const int64_t number = blockIdx.x % columns * kStateThreads + threadIdx.x;
  const bool active = number < p.channels;
  const ConvChannel c = channel_at(p.parts, p.num_parts, active ? number : 0);
  const ConvBackwardPart& part = p.parts[c.part];
  float sums[FLASH_QLA_MAX_CONV_WIDTH + 1];
#pragma unroll
  for (int j = 0; j <= FLASH_QLA_MAX_CONV_WIDTH; ++j) sums[j] = 0.0f;
  ConvSpan span;
  span.end = -1;
  int64_t slot = kSkipRow;
  for (int64_t t = first; t < last; ++t) {
    if (t >= span.end) {
      span = span_at(s, b, t);
      slot = conv_read_slot(s, span.n);
    }
    if (span.n < 0 || !active) continue;
    const float du = p.du[du_offset(p, b, t, part.channel + c.channel)];
    const int64_t own = s.seq_idx.data != nullptr ? load_index(s.seq_idx, b, t) : 0;
#pragma unroll
    for (int j = 0; j < FLASH_QLA_MAX_CONV_WIDTH; ++j) {
      if (j >= p.width) continue;
      const int64_t position = t - (p.width - 1) + j;
      float x = 0.0f;
      if (position >= span.begin) {
        const bool apart = s.seq_idx.data != nullptr && load_index(s.seq_idx, b, position) != own;
        if (!apart) x = load<float>(part.x, offset_of(part.x, b, position, c.head, c.dim));
      } else if (slot >= 0 && s.seq_idx.data == nullptr) {
        x = load<float>(part.initial_state,
                        offset_of(part.initial_state, slot, c.channel, s.L - (span.begin - position)));
      }
      sums[j] = fmaf(du, x, sums[j]);
    }
    sums[FLASH_QLA_MAX_CONV_WIDTH] += du;
  }
  if (!active) return;
  float* out = p.sums + run * (p.width + 1) * p.channels + number;
#pragma unroll
  for (int j = 0; j < FLASH_QLA_MAX_CONV_WIDTH; ++j) {
    if (j < p.width) out[j * p.channels] = sums[j];
  }
  out[p.width * p.channels] = sums[FLASH_QLA_MAX_CONV_WIDTH];
}

// Gradients of weights and bias from the runs' parts.
constexpr int kSumColumns = 32;  // there are thousands of columns, and some fifty parts

__global__ void __launch_bounds__(kSumThreads) conv_add_sums_kernel(const __grid_constant__ ConvBackwardParams p) {
  add_parts<kSumColumns>(p.sums, p.runs, (p.width + 1) * p.channels, [&](int64_t column, double sum) {
    const int64_t j = column / p.channels;
    const ConvChannel c = channel_at(p.parts, p.num_parts, column - j * p.channels);
    const ConvBackwardPart& part = p.parts[c.part];
    const DeviceTensor& out = j < p.width ? part.dweight : part.dbias;
    if (out.data == nullptr) return;
    store<double>(out, j < p.width ? offset_of(out, c.channel, j) : offset_of(out, c.channel), sum);
  });
}

// Gradients of initial states: through the first W - 1 outputs, and through the final states.
__global__ void __launch_bounds__(kStateThreads)
    conv_dinitial_kernel(const __grid_constant__ ConvBackwardParams p, int64_t columns) {
  const ConvSequences& s = p.sequences;
  const int64_t number = blockIdx.x % columns * kStateThreads + threadIdx.x;
  if (number >= p.channels) return;
  const ConvSpan span = span_of(s, blockIdx.x / columns);
  const ConvChannel c = channel_at(p.parts, p.num_parts, number);
  const ConvBackwardPart& part = p.parts[c.part];
  if (part.dinitial_state.data == nullptr) return;
  const int64_t length = span.end - span.begin;
  for (int64_t entry = 0; entry < s.L; ++entry) {
    const int64_t steps = s.L - entry;  // before the first token
    float sum = 0.0f;
    for (int64_t t = 0; t < length && t + steps <= p.width - 1; ++t) {
      const float w = load<float>(part.weight, offset_of(part.weight, c.channel, p.width - 1 - steps - t));
      sum = fmaf(w, p.du[du_offset(p, span.b, span.begin + t, part.channel + c.channel)], sum);
    }
    if (part.dfinal_state.data != nullptr && entry >= length) {
      sum += load<float>(part.dfinal_state, offset_of(part.dfinal_state, span.n, c.channel, entry - length));
    }
    store<float>(part.dinitial_state, offset_of(part.dinitial_state, span.n, c.channel, entry), sum);
  }
}

}  // namespace flash_qla::cuda
