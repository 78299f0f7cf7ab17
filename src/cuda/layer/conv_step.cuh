// The convolution of one token of each row, as a decode step of a model has it: weights and states of four entries that
// lie without gaps, no norm. A thread has four neighbouring channels. What a thread reads it alone writes, so states
// and inputs are replaced in place.
#pragma once

#include "cuda/layer/conv_update.cuh"

namespace flash_qla::cuda {

constexpr int kStepChannels = 4;  // of a thread: 64 bytes of weights and states in 16-bit dtypes, by four loads

// Elements next to each other, on the boundary of an access.
template <class T, int kCount>
struct RowWords {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4, kWide = kWords % 4 == 0 ? 4 : 2;
  uint32_t words[kWords] = {};

  __device__ __forceinline__ void load(const void* data, int64_t first) {
    const auto* from = reinterpret_cast<const uint32_t*>(static_cast<const T*>(data) + first);
#pragma unroll
    for (int i = 0; i < kWords; i += kWide) {
      if constexpr (kWide == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + i);
        words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
      } else {
        const uint2 two = *reinterpret_cast<const uint2*>(from + i);
        words[i] = two.x, words[i + 1] = two.y;
      }
    }
  }
  __device__ __forceinline__ void store(void* data, int64_t first) const {
    auto* to = reinterpret_cast<uint32_t*>(static_cast<T*>(data) + first);
#pragma unroll
    for (int i = 0; i < kWords; i += kWide) {
      if constexpr (kWide == 4) {
        *reinterpret_cast<uint4*>(to + i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      } else {
        *reinterpret_cast<uint2*>(to + i) = make_uint2(words[i], words[i + 1]);
      }
    }
  }
  // The element's bits; in 16-bit dtypes with others above them.
  __device__ __forceinline__ uint32_t operator[](int i) const {
    return sizeof(T) == 4 ? words[i] : words[i / 2] >> 16 * (i % 2);
  }
};

// Blocks that 64 registers of a thread leave a multiprocessor: 74 KB of loads under way in 16-bit dtypes.
template <class T>
__global__ void __launch_bounds__(kUpdateThreads, 16)
    conv_step_kernel(const __grid_constant__ ConvParams p, int32_t channels, int32_t blocks_of_row, int64_t blocks) {
  // Whatever needs no memory comes in front of the wait.
  const uint32_t n = blockIdx.x / blocks_of_row;
  int channel = static_cast<int>((blockIdx.x - n * blocks_of_row) * kUpdateThreads + threadIdx.x) * kStepChannels;
  const bool active = channel < channels;
  int i = 0;
  while (i + 1 < p.num_parts && channel >= p.parts[i + 1].channel) ++i;
  const ConvPart& part = p.parts[i];
  channel -= static_cast<int>(part.channel);
  const int head = channel / part.dim, dim = channel - head * part.dim;
  const int64_t x_at = offset_of(part.x, n, 0, head, dim), y_at = offset_of(part.y, n, 0, head, dim);
  begin_after_predecessors();
  if (blockIdx.x >= blocks) return finish_gates<1>(p.gates, blockIdx.x - blocks, gridDim.x - blocks);
  if (!active) return;

  // Everything is on its way before anything is waited for; the state's place alone is read first.
  using Window = RowWords<T, kStepChannels * kShortWindow>;
  const ConvSlots slots = conv_slots(p.sequences, n);
  RowWords<T, kStepChannels> x, bias;
  Window weights, window;
  x.load(part.x.data, x_at);
  weights.load(part.weight.data, channel * kShortWindow);
  if (part.bias.data != nullptr) bias.load(part.bias.data, channel);
  if (slots.read >= 0) {
    window.load(part.initial_state.data, slots.read * part.initial_state.stride[0] + channel * kShortWindow);
  }
  float u[kStepChannels];
#pragma unroll
  for (int c = 0; c < kStepChannels; ++c) {
    ShortRow<T> row;
    constexpr int kWords = static_cast<int>(sizeof(T));
#pragma unroll
    for (int k = 0; k < kWords; ++k) row.bits[k] = window.words[c * kWords + k];
    row.append(x[c]);
    u[c] = float_of<T>(bias[c]);
#pragma unroll
    for (int j = 0; j < kShortWindow; ++j) {
      u[c] = fmaf(float_of<T>(weights[c * kShortWindow + j]), float_of<T>(row[j]), u[c]);
    }
#pragma unroll
    for (int k = 0; k < kWords; ++k) window.words[c * kWords + k] = row.bits[k];
    if (p.silu) u[c] *= sizeof(T) == 4 ? sigmoid_for<float>(u[c]) : sigmoid_for<T>(u[c]);
    if (slots.read == kSkipRow) u[c] = 0.0f;
  }
  RowWords<T, kStepChannels> y;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int c = 0; c < kStepChannels; ++c) y.words[c] = __float_as_uint(u[c]);
  } else {
    T* const none = nullptr;
    y.words[0] = pack_word(u[0], u[1], none);
    y.words[1] = pack_word(u[2], u[3], none);
  }
  y.store(part.y.data, y_at);
  if (slots.write != kNoSlot) {
    window.store(part.final_state.data, slots.write * part.final_state.stride[0] + channel * kShortWindow);
  }
}

// Whether a row of four channels' windows is read as vectors: [.., C, 4] without gaps, no row off the grid of 16 bytes.
inline bool has_rows_of_four(const DeviceTensor& t, int channel_dim, int64_t element_bytes) {
  if (t.data == nullptr) return true;
  return t.stride[channel_dim] == kShortWindow && t.stride[channel_dim + 1] == 1 &&
         (channel_dim == 0 || t.stride[0] * element_bytes % 16 == 0) && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

// Of a call whose tensors are of one dtype, of `bytes` an element.
inline bool is_step_part(const ConvPart& part, int64_t bytes) {
  return !part.l2norm && part.residual.data == nullptr && part.x.quads && part.y.quads &&
         (part.bias.data == nullptr || part.bias.quads) && part.dim % kStepChannels == 0 &&
         has_rows_of_four(part.weight, 0, bytes) && has_rows_of_four(part.initial_state, 1, bytes) &&
         has_rows_of_four(part.final_state, 1, bytes);
}

}  // namespace flash_qla::cuda
