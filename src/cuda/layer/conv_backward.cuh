// The convolution's gradients, channels side by side, in one pass: a thread has eight channels and goes through a run
// of tokens with the last inputs and the last gradients of u in registers; dx follows W - 1 tokens behind. The terms of
// weights and bias stay in registers to the run's end, where each thread leaves its part of the sums.
#pragma once

#include "cuda/layer/conv_forward.cuh"

namespace flash_qla::cuda {

// One thread's run. kNorms: some part has heads that are normalised.
template <class T, int kW, bool kNorms>
struct ConvBackwardRun {
  using Ring = TokenRing<T, 2>;

  const ConvBackwardParams& p;
  const ConvBackwardPart& part;
  const ConvPlace& place;
  const SharedBias& bias;
  SharedBias& dbias;  // sums
  const bool has_bias, has_dbias;
  const int b, first;        // row of the batch, and token, that the run begins with
  const int tokens, beyond;  // of the run; and those of the row from its start on, W - 1 more at most
  int x_step, dy_step, dx_step;
  const T *x, *dy;
  T* dx;
  float w[kW][kVector], dw[kW][kVector];

  __device__ __forceinline__ void fetch(Ring& ring, int i) const {
    const bool wanted = i < beyond;
    ring.fetch(i, 0, at_token(x, wanted ? i : 0, x_step), wanted);
    ring.fetch(i, 1, at_token(dy, wanted ? i : 0, dy_step), wanted);
    ring.close();
  }

  // From dy of a token to du; v: its inputs.
  __device__ __forceinline__ void gradient(const Packed<T> (&v)[kW], float (&du)[kVector]) {
    float u[kVector];
    open(has_bias, bias, u);
#pragma unroll
    for (int j = 0; j < kW; ++j) {
      float tap[kVector];
      unpack(v[j], tap);
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] = fmaf(w[j][c], tap[c], u[c]);
    }
    if constexpr (kNorms) {
      if (part.l2norm) through_norm(u, du);
    }
    if (!p.silu) return;
#pragma unroll
    for (int c = 0; c < kVector; ++c) du[c] *= silu_slope(u[c], sigmoid_for<T>(u[c]));
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
    squares = group_sum(squares, place.lanes) + static_cast<float>(kL2NormEps);
    const float r = 1.0f / sqrtf(squares);
    along = group_sum(along, place.lanes) / squares;
#pragma unroll
    for (int c = 0; c < kVector; ++c) d[c] = r * (d[c] - along * y[c]);
  }

  // dx of the oldest token of d.
  __device__ __forceinline__ void store_dx(int i, const float (&d)[kW][kVector]) const {
    float sum[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      sum[c] = 0.0f;
#pragma unroll
      for (int j = 0; j < kW; ++j) sum[c] = fmaf(w[kW - 1 - j][c], d[j][c], sum[c]);
    }
    if (place.active && dx != nullptr) store_packed(at_token(dx, i, dx_step), pack<T>(sum));
  }

  // All tokens, sequence by sequence.
  __device__ __forceinline__ void all(Ring& ring) {
#pragma unroll
    for (int j = 0; j < kW; ++j) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) dw[j][c] = 0.0f;
    }
    for (int begin = 0; begin < tokens;) {
      const ConvSpan span = span_at(p.sequences, b, first + begin);
      const int64_t left = span.end - first;
      // Gradients of u past the run's end, as far as its tokens were inputs of theirs, are computed once more.
      const int end = static_cast<int>(left < tokens ? left : tokens);
      const int last = static_cast<int>(left < tokens + kW - 1 ? left : tokens + kW - 1);
      // The last inputs and the last gradients of u, newest last. Registers are short: inputs stay packed, which is
      // exact, as states of another dtype go another way.
      Packed<T> v[kW];
      float d[kW][kVector], before[kW][kVector];
      const bool wanted = load_window<T, kW>(p.sequences, part.initial_state, span, first + begin,
                                             at_token(x, begin, x_step), x_step, place.channel, before);
#pragma unroll
      for (int j = 0; j + 1 < kW; ++j) v[j] = pack<T>(before[j]);
#pragma unroll
      for (int j = 0; j < kW; ++j) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) d[j][c] = 0.0f;
      }
      int i = begin;
#pragma unroll kW  // the window is where it was after so many
      for (; i < last; ++i) {
        fetch(ring, i + Ring::kSlots - 1);
        ring.wait();
        v[kW - 1] = ring.take(i, 0);
        unpack(ring.take(i, 1), d[kW - 1]);
        gradient(v, d[kW - 1]);
        if (!wanted) {
#pragma unroll
          for (int c = 0; c < kVector; ++c) d[kW - 1][c] = 0.0f;
        } else if (i < end) {
          if (has_dbias) dbias.add(d[kW - 1]);
#pragma unroll
          for (int j = 0; j < kW; ++j) {
            float tap[kVector];
            unpack(v[j], tap);
#pragma unroll
            for (int c = 0; c < kVector; ++c) dw[j][c] = fmaf(d[kW - 1][c], tap[c], dw[j][c]);
          }
        }
        if (i - (kW - 1) >= begin) store_dx(i - (kW - 1), d);
#pragma unroll
        for (int j = 0; j + 1 < kW; ++j) v[j] = v[j + 1];
        move_on(d);
      }
      // The sequence's last tokens get nothing from behind its end.
#pragma unroll 1
      for (; i < end + kW - 1; ++i) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) d[kW - 1][c] = 0.0f;
        if (i - (kW - 1) >= begin) store_dx(i - (kW - 1), d);
        move_on(d);
      }
      begin = end;
    }
  }
};

// Blocks of a multiprocessor, which give a thread 168 registers or 255. In fp16 an A100's kernel would spill with 168.
template <class T, bool kNorms>
constexpr int kBackwardBlocks = std::is_same_v<T, __nv_bfloat16> && !kNorms ? 3 : 2;

// A kernel of its own with norms: what the other does not execute would still take its registers.
template <class T, int kW, bool kNorms>
__global__ void __launch_bounds__(kConvThreads, kBackwardBlocks<T, kNorms>)
    conv_backward_kernel(const __grid_constant__ ConvBackwardParams p, const __grid_constant__ ConvGrid grid) {
  const int columns = grid.first_column[FLASH_QLA_MAX_CONV_PARTS];
  const int run = static_cast<int>(blockIdx.x) / columns, b = run / grid.runs_of_row;  // at most 2^31 - 1 tokens
  const ConvPlace place = conv_place(p.parts, grid, static_cast<int>(blockIdx.x) - run * columns);
  const ConvBackwardPart& part = p.parts[place.part];
  const int first = (run - b * grid.runs_of_row) * grid.run_tokens, rest = static_cast<int>(p.sequences.T) - first;
  const int tokens = min(rest, grid.run_tokens);
  const int beyond = min(rest, tokens + kW - 1);
  const auto at = [&](const DeviceTensor& t) {
    return b * t.stride[0] + first * t.stride[1] + place.head * t.stride[2] + place.dim;
  };
  __shared__ SharedBias s_bias, s_dbias;
  const bool has_bias = part.bias.data != nullptr, has_dbias = part.dbias.data != nullptr;
  ConvBackwardRun<T, kW, kNorms> of_run = {p,         part, place, s_bias, s_dbias, has_bias,
                                           has_dbias, b,    first, tokens, beyond};
  of_run.x_step = token_step<T>(part.x);
  of_run.dy_step = token_step<T>(part.dy);
  of_run.dx_step = token_step<T>(part.dx);
  of_run.x = static_cast<const T*>(part.x.data) + at(part.x);
  of_run.dy = static_cast<const T*>(part.dy.data) + at(part.dy);
  of_run.dx = part.dx.data == nullptr ? nullptr : static_cast<T*>(part.dx.data) + at(part.dx);
  TokenRing<T, 2>& ring = *dynamic_shared<TokenRing<T, 2>>();
  for (int i = 0; i + 1 < ring.kSlots; ++i) of_run.fetch(ring, i);
  load_weights<T, kW>(part.weight, place.channel, grid.vector_weights >> place.part & 1, of_run.w);
  if (has_bias) s_bias.fill(part.bias, place.channel);
  if (has_dbias) s_dbias.clear();
  of_run.all(ring);
  if (!place.active) return;
  float* out = p.sums + static_cast<int64_t>(run) * (kW + 1) * p.channels + part.channel + place.channel;
#pragma unroll
  for (int j = 0; j < kW; ++j) store_packed(out + j * p.channels, pack<float>(of_run.dw[j]));
  if (!has_dbias) return;
  float dbias[kVector];
  s_dbias.read(dbias);
  store_packed(out + kW * p.channels, pack<float>(dbias));
}

}  // namespace flash_qla::cuda
