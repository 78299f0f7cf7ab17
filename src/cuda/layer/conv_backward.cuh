// The convolution's gradients, channels side by side, in one pass: a thread has eight channels and goes through a run
// of tokens with the last inputs and the last gradients of u in registers; dx follows W - 1 tokens behind. The terms of
// weights and bias stay in registers to the run's end, where each thread leaves its part of the sums.
#pragma once

#include "cuda/layer/conv_forward.cuh"

namespace flash_qla::cuda {

// One thread's run. kNorms: some part has heads that are normalised.
template <class T, int kW, bool kNorms>
struct ConvBackwardRun {
  const ConvBackwardParams& p;
  const ConvBackwardPart& part;
  const ConvPlace& place;
  const int64_t b, first;
  const int tokens, beyond;  // of the run; and those of the row from its start on
  const T *x, *dy;
  T* dx;
  const SharedBias* bias;  // or NULL
  SharedBias* dbias;       // sums, or NULL where they are not wanted
  float w[kW][kVector], dw[kW][kVector];

  // du of a token from its inputs v and dy.
  __device__ __forceinline__ void gradient(const Packed<T> (&v)[kW], int i, bool skip, float (&du)[kVector]) {
    float u[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) u[c] = 0.0f;
    if (bias != nullptr) bias->read(u);
#pragma unroll
    for (int j = 0; j < kW; ++j) {
      float tap[kVector];
      unpack(v[j], tap);
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] = fmaf(w[j][c], tap[c], u[c]);
    }
    unpack(load_packed(dy + i * part.dy.stride[1]), du);
    if constexpr (kNorms) {
      if (part.l2norm) through_norm(u, du);
    }
    if (p.silu) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) du[c] *= silu_slope(u[c], sigmoid_for<T>(u[c]));
    }
#pragma unroll
    for (int c = 0; c < kVector; ++c) du[c] = skip ? 0.0f : du[c];
  }

  __device__ __forceinline__ void through_norm(const float (&u)[kVector], float (&d)[kVector]) {
    float squares = 0.0f, along = 0.0f, y[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      y[c] = p.silu ? u[c] * sigmoid_for<T>(u[c]) : u[c];
      squares = fmaf(y[c], y[c], squares);
      along = fmaf(y[c], d[c], along);
    }
    if (!place.active) squares = along = 0.0f;
    squares = group_sum_of(squares, place.lanes) + static_cast<float>(kL2NormEps);
    const float r = 1.0f / sqrtf(squares);
    along = group_sum_of(along, place.lanes) / squares;
#pragma unroll
    for (int c = 0; c < kVector; ++c) d[c] = r * (d[c] - along * y[c]);
  }

  // starts: a bit for each token of the run, and of the W - 1 after it, at which another sequence begins.
  template <bool kStarts>
  __device__ __forceinline__ void all(uint64_t starts) {
    Packed<T> v[kW];       // the last inputs, newest last
    float d[kW][kVector];  // the last du, newest last
#pragma unroll
    for (int j = 0; j < kW; ++j) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) d[j][c] = dw[j][c] = 0.0f;
    }
    bool skip = begin(0, v);
    const int last = tokens + kW - 1;
#pragma unroll 1
    for (int i = 0; i < last; ++i) {
      const bool inside = i < beyond;
      if constexpr (kStarts) {
        if (i > 0 && inside && (starts >> i & 1) != 0) {
          skip = begin(i, v);
          // What is before belongs to another sequence: it waits for no more gradients.
          flush(i, d);
        }
      }
      if (inside) {
        v[kW - 1] = load_packed(x + i * part.x.stride[1]);
        gradient(v, i, skip, d[kW - 1]);
      } else {
#pragma unroll
        for (int c = 0; c < kVector; ++c) d[kW - 1][c] = 0.0f;
      }
      if (i < tokens) {
        if (dbias != nullptr) dbias->add(d[kW - 1]);
#pragma unroll
        for (int j = 0; j < kW; ++j) {
          float tap[kVector];
          unpack(v[j], tap);
#pragma unroll
          for (int c = 0; c < kVector; ++c) dw[j][c] = fmaf(d[kW - 1][c], tap[c], dw[j][c]);
        }
      }
      store_dx<kStarts>(i - (kW - 1), d);
#pragma unroll
      for (int j = 0; j + 1 < kW; ++j) {
        v[j] = v[j + 1];
#pragma unroll
        for (int c = 0; c < kVector; ++c) d[j][c] = d[j + 1][c];
      }
    }
  }

  int stored = 0;  // tokens whose dx is there

  // dx of token s, the oldest of d. A sequence's last tokens have been stored where the next one began.
  template <bool kStarts>
  __device__ __forceinline__ void store_dx(int s, const float (&d)[kW][kVector]) {
    if (s < 0 || s >= tokens) return;
    if constexpr (kStarts) {
      if (s < stored) return;
      stored = s + 1;
    }
    float sum[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      sum[c] = 0.0f;
#pragma unroll
      for (int j = 0; j < kW; ++j) sum[c] = fmaf(w[kW - 1 - j][c], d[j][c], sum[c]);
    }
    if (place.active && dx != nullptr) store_packed(dx + s * part.dx.stride[1], pack<T>(sum));
  }

  // Stores dx of the W - 1 tokens before token i, which get nothing from it on, and forgets their du.
  __device__ __forceinline__ void flush(int i, float (&d)[kW][kVector]) {
#pragma unroll
    for (int k = 0; k + 1 < kW; ++k) {
      // d[j] is du of token i - (W - 1) + j; after k rounds the oldest is token i - (W - 1) + k.
#pragma unroll
      for (int c = 0; c < kVector; ++c) d[kW - 1][c] = 0.0f;
      store_dx<true>(i - (kW - 1) + k, d);
#pragma unroll
      for (int j = 0; j + 1 < kW; ++j) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) d[j][c] = d[j + 1][c];
      }
    }
#pragma unroll
    for (int j = 0; j + 1 < kW; ++j) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) d[j][c] = 0.0f;
    }
  }

  // The inputs before token i; whether it belongs to no sequence.
  __device__ __forceinline__ bool begin(int i, Packed<T> (&v)[kW]) {
    const ConvSpan span = span_at(p.sequences, b, first + i);
    const int64_t slot = conv_read_slot(p.sequences, span.n);
#pragma unroll
    for (int k = 1; k < kW; ++k) {
      const int64_t steps = span.begin - (first + i - k);  // before the sequence
      if (steps > 0) {
        float before[kVector];  // exact in T: states of another dtype go another way
        load_history(part.initial_state, p.sequences, slot, steps, place.channel, before);
        v[kW - 1 - k] = pack<T>(before);
      } else {
        v[kW - 1 - k] = load_packed(x + (i - k) * part.x.stride[1]);
      }
    }
    return slot == kSkipRow;
  }
};

// A kernel of its own with norms: what the other does not execute would still take its registers.
template <class T, int kW, bool kNorms>
__global__ void __launch_bounds__(kConvThreads, sizeof(T) == 4 || kNorms ? 2 : 3)
    conv_backward_kernel(const __grid_constant__ ConvBackwardParams p, const __grid_constant__ ConvGrid grid) {
  const int columns = grid.first_column[FLASH_QLA_MAX_CONV_PARTS];
  const ConvPlace place = conv_place(p.parts, grid, static_cast<int>(blockIdx.x) % columns);
  const ConvBackwardPart& part = p.parts[place.part];
  const int64_t run = blockIdx.x / columns, b = run / grid.runs_of_row;
  const int64_t first = run % grid.runs_of_row * grid.run_tokens, rest = p.sequences.T - first;
  const int tokens = static_cast<int>(rest < grid.run_tokens ? rest : grid.run_tokens);
  const int beyond = static_cast<int>(rest < tokens + kW - 1 ? rest : tokens + kW - 1);
  const auto at = [&](const DeviceTensor& t) {
    return b * t.stride[0] + first * t.stride[1] + place.head * t.stride[2] + place.dim;
  };
  ConvBackwardRun<T, kW, kNorms> of_run = {p, part, place, b, first, tokens, beyond};
  of_run.x = static_cast<const T*>(part.x.data) + at(part.x);
  of_run.dy = static_cast<const T*>(part.dy.data) + at(part.dy);
  of_run.dx = part.dx.data == nullptr ? nullptr : static_cast<T*>(part.dx.data) + at(part.dx);
  load_weights<T, kW>(part.weight, place.channel, grid.vector_weights >> place.part & 1, of_run.w);
  __shared__ SharedBias s_bias, s_dbias;
  of_run.bias = part.bias.data == nullptr ? nullptr : &s_bias;
  if (of_run.bias != nullptr) s_bias.fill(part.bias, place.channel);
  of_run.dbias = part.dbias.data == nullptr ? nullptr : &s_dbias;
  if (of_run.dbias != nullptr) s_dbias.clear();

  const ConvSequences& s = p.sequences;
  const ConvSpan span = span_at(s, b, first);
  if (s.cu_seqlens.data == nullptr || (span.n >= 0 && span.end >= first + beyond)) {
    of_run.template all<false>(0);
  } else {
    of_run.template all<true>(starts_in_run(s.cu_seqlens, s.N, first, beyond));
  }
  if (!place.active) return;
  float* out = p.sums + (run * p.channels + part.channel + place.channel) * (kW + 1);
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
#pragma unroll
    for (int j = 0; j < kW; ++j) out[c * (kW + 1) + j] = of_run.dw[j][c];
  }
  if (of_run.dbias == nullptr) return;
  float dbias[kVector];
  of_run.dbias->read(dbias);
#pragma unroll
  for (int c = 0; c < kVector; ++c) out[c * (kW + 1) + kW] = dbias[c];
}

}  // namespace flash_qla::cuda
