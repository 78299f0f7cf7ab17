// The convolution over whole sequences, channels side by side. A thread has eight channels and goes through a run of
// tokens; weights and the last inputs stay in registers, the next ones are on their way. The loop goes from one
// sequence's begin or end to the next, and asks nothing in between.
#pragma once

#include "cuda/layer/conv_gates.cuh"
#include "cuda/layer/conv_ring.cuh"
#include "cuda/layer/conv_sequences.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

// How the blocks of a launch are dealt out: columns of channels first, then runs of tokens.
struct ConvGrid {
  int32_t first_column[FLASH_QLA_MAX_CONV_PARTS + 1];  // of each part; the last: columns of all
  int32_t vector_weights;                              // bits: parts whose weights are read as vectors
  int32_t run_tokens;
  int32_t runs_of_row;
};

// The channels of a thread.
struct ConvPlace {
  int part, head, dim, lanes;  // lanes: neighbours that share a head which is normalised
  bool active;
  int channel;  // within the part
};

template <class Part>
__device__ __forceinline__ ConvPlace conv_place(const Part* parts, const ConvGrid& grid, int column) {
  ConvPlace place;
  place.part = column >= grid.first_column[2] ? 2 : (column >= grid.first_column[1] ? 1 : 0);
  const Part& part = parts[place.part];
  const int v = (column - grid.first_column[place.part]) * kConvThreads + static_cast<int>(threadIdx.x);
  const int of_head = part.dim / kVector;
  place.lanes = part.l2norm && of_head > 1 ? 1 << (32 - __clz(of_head - 1)) : 1;
  const int step = part.l2norm ? place.lanes : of_head;
  place.head = v / step;
  place.dim = (v % step) * kVector;
  place.active = place.head < part.heads && place.dim < part.dim;
  if (!place.active) place.head = place.dim = 0;  // reads what is there, writes nothing
  place.channel = place.head * part.dim + place.dim;
  return place;
}

// w[j][c] of a thread's channels.
template <class T, int kW>
__device__ __forceinline__ void load_weights(const DeviceTensor& weight, int channel, bool vectors,
                                             float (&w)[kW][kVector]) {
  if (vectors) {  // [C, W] without gaps, in T: channel c, weight j is element c * W + j
    const T* p = static_cast<const T*>(weight.data) + static_cast<int64_t>(channel) * kW;
    float flat[kW][kVector];
#pragma unroll
    for (int i = 0; i < kW; ++i) unpack(load_packed(p + i * kVector), flat[i]);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
#pragma unroll
      for (int j = 0; j < kW; ++j) w[j][c] = flat[(c * kW + j) / kVector][(c * kW + j) % kVector];
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
#pragma unroll
    for (int j = 0; j < kW; ++j) w[j][c] = load<float>(weight, offset_of(weight, channel + c, j));
  }
}

// A thread's biases, or sums of their gradients, in shared memory: most layers have none, and registers are short.
struct SharedBias {
  float4 x[2][kConvThreads];

  __device__ __forceinline__ void fill(const DeviceTensor& bias, int channel) {
    float b[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) b[c] = load<float>(bias, offset_of(bias, channel + c));
    x[0][threadIdx.x] = make_float4(b[0], b[1], b[2], b[3]);
    x[1][threadIdx.x] = make_float4(b[4], b[5], b[6], b[7]);
  }

  __device__ __forceinline__ void clear() {
    x[0][threadIdx.x] = x[1][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  __device__ __forceinline__ void add(const float (&b)[kVector]) {
    float4 &low = x[0][threadIdx.x], &high = x[1][threadIdx.x];
    low = make_float4(low.x + b[0], low.y + b[1], low.z + b[2], low.w + b[3]);
    high = make_float4(high.x + b[4], high.y + b[5], high.z + b[6], high.w + b[7]);
  }

  __device__ __forceinline__ void read(float (&b)[kVector]) const {
    const float4 low = x[0][threadIdx.x], high = x[1][threadIdx.x];
    b[0] = low.x, b[1] = low.y, b[2] = low.z, b[3] = low.w;
    b[4] = high.x, b[5] = high.y, b[6] = high.z, b[7] = high.w;
  }
};

// The inputs before token t of batch row b, oldest first; x: that token's. False: it belongs to no sequence, or to one
// that is skipped. Every thread of a warp asks for the same token.
template <class T, int kW>
__device__ __forceinline__ bool load_window(const ConvSequences& s, const DeviceTensor& state, const ConvSpan& span,
                                            int64_t t, const T* x, int step, int channel, float (&v)[kW][kVector]) {
  const int64_t slot = conv_read_slot(s, span.n);
#pragma unroll
  for (int k = 1; k < kW; ++k) {
    const int64_t steps = span.begin - (t - k);  // before the sequence
    if (steps > 0) {
      int64_t at = slot < 0 ? 0 : offset_of(state, slot, channel, s.L - steps);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        v[kW - 1 - k][c] = slot < 0 ? 0.0f : unpack(state, load_raw(state, at));
        at += state.stride[1];
      }
    } else {
      unpack(load_packed(at_token(x, -k, step)), v[kW - 1 - k]);
    }
  }
  return slot != kSkipRow;
}

// What u begins with.
__device__ __forceinline__ void open(bool has_bias, const SharedBias& bias, float (&u)[kVector]) {
#pragma unroll
  for (int c = 0; c < kVector; ++c) u[c] = 0.0f;
  if (has_bias) bias.read(u);
}

// Makes place for the next input, or gradient.
template <int kW>
__device__ __forceinline__ void move_on(float (&v)[kW][kVector]) {
#pragma unroll
  for (int j = 0; j + 1 < kW; ++j) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) v[j][c] = v[j + 1][c];
  }
}

// One thread's run.
template <class T, int kW>
struct ConvRun {
  const ConvParams& p;
  const ConvPart& part;
  const ConvPlace& place;
  const SharedBias& bias;
  const int b, first;
  const int tokens, x_step, y_step;
  const T* x;  // of the run's first token
  T* y;
  const T* residual;  // or NULL
  float* norms;       // of the run's first token, where this thread stores a head's; else NULL
  float w[kW][kVector];

  // From u of token i to what is stored.
  __device__ __forceinline__ void finish(int i, float (&u)[kVector], bool skip) {
    if (p.silu) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] *= sigmoid_for<T>(u[c]);
    }
    if (part.l2norm) normalise(i, u, skip);
    if (residual != nullptr) {
      float add[kVector];
      unpack(load_packed(at_token(residual, i, token_step<T>(part.residual))), add);
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] += add[c];
    }
    if (skip) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] = 0.0f;
    }
    if (place.active) store_packed(at_token(y, i, y_step), pack<T>(u));
  }

  __device__ __forceinline__ void normalise(int i, float (&u)[kVector], bool skip) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum = fmaf(u[c], u[c], sum);
    if (!place.active) sum = 0.0f;
    sum = group_sum(sum, place.lanes) + static_cast<float>(kL2NormEps);
    const float r = sizeof(T) == 4 ? 1.0f / sqrtf(sum) : rsqrtf(sum);
#pragma unroll
    for (int c = 0; c < kVector; ++c) u[c] *= r;
    if (norms == nullptr) return;
    norms[i * part.inverse_norm.stride[1]] = skip ? 1.0f / sqrtf(static_cast<float>(kL2NormEps)) : r;
  }

  // All tokens, sequence by sequence.
  __device__ __forceinline__ void all(TokenRing<T, 1>& ring) {
    constexpr int kNext = TokenRing<T, 1>::kSlots - 1;
    for (int i = 0; i < tokens;) {
      const ConvSpan span = span_at(p.sequences, b, first + i);
      const int end = static_cast<int>(span.end - first < tokens ? span.end - first : tokens);
      float v[kW][kVector];  // the last inputs, newest last
      const bool wanted = load_window<T, kW>(p.sequences, part.initial_state, span, first + i, at_token(x, i, x_step),
                                             x_step, place.channel, v);
#pragma unroll kW  // the window is where it was after so many
      for (; i < end; ++i) {
        fetch(ring, i + kNext);
        ring.wait();
        unpack(ring.take(i, 0), v[kW - 1]);
        float u[kVector];
        open(part.bias.data != nullptr, bias, u);
#pragma unroll
        for (int j = 0; j < kW; ++j) {
#pragma unroll
          for (int c = 0; c < kVector; ++c) u[c] = fmaf(w[j][c], v[j][c], u[c]);
        }
        finish(i, u, !wanted);
        move_on(v);
      }
    }
  }

  __device__ __forceinline__ void fetch(TokenRing<T, 1>& ring, int i) const {
    ring.fetch(i, 0, at_token(x, i < tokens ? i : 0, x_step), i < tokens);
    ring.close();
  }
};

// Four blocks a multiprocessor, as registers allow.
template <class T, int kW>
__global__ void __launch_bounds__(kConvThreads, sizeof(T) == 4 ? 3 : 4)
    conv_forward_kernel(const __grid_constant__ ConvParams p, const __grid_constant__ ConvGrid grid) {
  const int columns = grid.first_column[FLASH_QLA_MAX_CONV_PARTS];
  const int run = static_cast<int>(blockIdx.x) / columns, b = run / grid.runs_of_row;  // at most 2^31 - 1 tokens
  const ConvPlace place = conv_place(p.parts, grid, static_cast<int>(blockIdx.x) - run * columns);
  const ConvPart& part = p.parts[place.part];
  const int first = (run - b * grid.runs_of_row) * grid.run_tokens, rest = static_cast<int>(p.sequences.T) - first;
  const int tokens = min(rest, grid.run_tokens);
  const auto at = [&](const DeviceTensor& t) {
    return b * t.stride[0] + first * t.stride[1] + place.head * t.stride[2] + place.dim;
  };
  __shared__ SharedBias s_bias;
  ConvRun<T, kW> run_of = {p, part, place, s_bias, b, first, tokens, token_step<T>(part.x), token_step<T>(part.y)};
  run_of.x = static_cast<const T*>(part.x.data) + at(part.x);
  run_of.y = static_cast<T*>(part.y.data) + at(part.y);
  run_of.residual =
      part.residual.data == nullptr ? nullptr : static_cast<const T*>(part.residual.data) + at(part.residual);
  // On their way before anything else is asked for.
  TokenRing<T, 1>& ring = *dynamic_shared<TokenRing<T, 1>>();
  for (int i = 0; i + 1 < ring.kSlots; ++i) run_of.fetch(ring, i);
  load_weights<T, kW>(part.weight, place.channel, grid.vector_weights >> place.part & 1, run_of.w);
  if (part.bias.data != nullptr) s_bias.fill(part.bias, place.channel);
  run_of.norms = nullptr;
  if (part.inverse_norm.data != nullptr && place.active && place.dim == 0) {
    run_of.norms = static_cast<float*>(part.inverse_norm.data) + offset_of(part.inverse_norm, b, first, place.head);
  }
  finish_gates(p.gates, blockIdx.x, gridDim.x);
  run_of.all(ring);
}

}  // namespace flash_qla::cuda
