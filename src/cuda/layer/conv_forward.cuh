// The convolution over whole sequences, channels side by side. A thread has eight channels and goes through a run of
// tokens; weights and the last inputs stay in registers, the next ones are on their way. The loop goes from one
// sequence's begin or end to the next, and asks nothing in between.
#pragma once

#include "cuda/common/prefetch.cuh"
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
  int32_t gate_blocks;  // forward: in front of the others, for the gates alone
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

  __device__ __forceinline__ void fill(const DeviceTensor& bias, int channel, float scale = 1.0f) {
    float b[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) b[c] = scale * load<float>(bias, offset_of(bias, channel + c));
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

// What a run has to do beside the convolution, known when it is compiled: SiLU alone, SiLU and the norm of heads, or
// whatever the call says. No bias and no residual in the first two.
enum class ConvForm { kSilu, kSiluNorm, kAny };

// One thread's run. Four tokens at a time, so that what they wait for overlaps; the next four are on their way.
template <class T, int kW>
struct ConvRun {
  static constexpr int kStep = 4, kHalf = 2;  // kHalf: of which so many are computed together, as registers allow

  const ConvParams& p;
  const ConvPart& part;
  const ConvPlace& place;
  const SharedBias& bias;
  const int b, first;
  const int tokens, x_step, y_step, residual_step, norm_step;
  const T* x;  // of the run's first token
  T* y;
  const T* residual;     // or NULL
  float* norms;          // where this thread stores a head's; else NULL
  float w[kW][kVector];  // times silu_scale() where there is SiLU
  Packed<T> next[kStep];

  // Brings the inputs before the run, most of which begin within a sequence, to L2 while the first ones are waited for.
  __device__ __forceinline__ void prefetch_before() const {
#pragma unroll
    for (int k = 1; k < kW; ++k) l2_prefetch_line(at_token(x, -min(k, first), x_step));
  }

  __device__ __forceinline__ void load_next(int i) {
#pragma unroll
    for (int k = 0; k < kStep; ++k) next[k] = load_packed(at_token(x, min(i + k, tokens - 1), x_step));
  }

  // From u of tokens i and following to what is stored; those from `end` on are not.
  template <ConvForm kForm>
  __device__ __forceinline__ void finish(int i, int end, float (&u)[kHalf][kVector]) {
    if (kForm != ConvForm::kAny || p.silu) {
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) u[k][c] = scaled_silu<T>(u[k][c]);
      }
    }
    if (kForm == ConvForm::kSiluNorm || (kForm == ConvForm::kAny && part.l2norm)) normalise(i, end, u);
    if (kForm == ConvForm::kAny && residual != nullptr) {
#pragma unroll
      for (int k = 0; k < kHalf; ++k) {
        float add[kVector];
        unpack(load_packed(at_token(residual, min(i + k, end - 1), residual_step)), add);
#pragma unroll
        for (int c = 0; c < kVector; ++c) u[k][c] += add[c];
      }
    }
    const int stored = place.active ? end : 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      if (i + k < stored) store_packed(at_token(y, i + k, y_step), pack<T>(u[k]));
    }
  }

  __device__ __forceinline__ void normalise(int i, int end, float (&u)[kHalf][kVector]) {
    float r[kHalf];
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      r[k] = 0.0f;
#pragma unroll
      for (int c = 0; c < kVector; ++c) r[k] = fmaf(u[k][c], u[k][c], r[k]);
      if (!place.active) r[k] = 0.0f;
    }
    group_sums(r, place.lanes);
    const int stored = norms != nullptr ? end : 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const float sum = r[k] + static_cast<float>(kL2NormEps);
      r[k] = sizeof(T) == 4 ? 1.0f / sqrtf(sum) : approx_rsqrt(sum);
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[k][c] *= r[k];
      if (i + k < stored) *at_token(norms, i + k, norm_step) = r[k];
    }
  }

  // Tokens that belong to no sequence, or to one that is skipped.
  __device__ __forceinline__ void clear(int i, int end) {
    for (; i < end; ++i) {
      if (place.active) store_packed(at_token(y, i, y_step), Packed<T>{});
      if (norms != nullptr) *at_token(norms, i, norm_step) = 1.0f / sqrtf(static_cast<float>(kL2NormEps));
    }
  }

  // All tokens, sequence by sequence. The first ones are under way.
  template <ConvForm kForm>
  __device__ __forceinline__ void all() {
    for (int i = 0; i < tokens;) {
      const ConvSpan span = span_at(p.sequences, b, first + i);
      const int end = static_cast<int>(span.end - first < tokens ? span.end - first : tokens);
      // The last inputs, in a circle of four: v[k] has those of tokens i + k, i + k - 4 ..
      float before[kW][kVector], v[kStep][kVector];
      const bool wanted = load_window<T, kW>(p.sequences, part.initial_state, span, first + i, at_token(x, i, x_step),
                                             x_step, place.channel, before);
#pragma unroll
      for (int k = 1; k < kW; ++k) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) v[kStep - k][c] = before[kW - 1 - k][c];
      }
      if (!wanted) clear(i, end);
#pragma unroll 1
      for (; wanted && i < end; i += kStep) {
        Packed<T> now[kStep];
#pragma unroll
        for (int k = 0; k < kStep; ++k) now[k] = next[k];
        load_next(i + kStep);
#pragma unroll
        for (int k0 = 0; k0 < kStep; k0 += kHalf) {
          float u[kHalf][kVector], start[kVector] = {};
          if (kForm == ConvForm::kAny && part.bias.data != nullptr) bias.read(start);
#pragma unroll
          for (int k = 0; k < kHalf; ++k) {
            unpack(now[k0 + k], v[k0 + k]);
#pragma unroll
            for (int c = 0; c < kVector; ++c) {
              u[k][c] = start[c];
#pragma unroll
              for (int j = 0; j < kW; ++j) {
                u[k][c] = fmaf(w[j][c], v[(k0 + k + kStep + 1 - kW + j) % kStep][c], u[k][c]);
              }
            }
          }
          finish<kForm>(i + k0, end, u);
        }
      }
      i = end;
      if (i < tokens) load_next(i);
    }
  }
};

// Tokens whose gates a thread reads at once. With eight a block of gates ends before those of the convolution do.
constexpr int kGatesAtOnce = 8;

// Four blocks a multiprocessor, as registers allow.
template <class T, int kW>
__global__ void __launch_bounds__(kConvThreads, sizeof(T) == 4 ? 3 : 4)
    conv_forward_kernel(const __grid_constant__ ConvParams p, const __grid_constant__ ConvGrid grid) {
  const int block = static_cast<int>(blockIdx.x) - grid.gate_blocks;
  if (block < 0) return finish_gates<kGatesAtOnce>(p.gates, blockIdx.x, grid.gate_blocks);
  const int columns = grid.first_column[FLASH_QLA_MAX_CONV_PARTS];
  const int run = block / columns, b = run / grid.runs_of_row;  // at most 2^31 - 1 tokens
  const ConvPlace place = conv_place(p.parts, grid, block - run * columns);
  const ConvPart& part = p.parts[place.part];
  const int first = (run - b * grid.runs_of_row) * grid.run_tokens, rest = static_cast<int>(p.sequences.T) - first;
  const int tokens = min(rest, grid.run_tokens);
  const auto at = [&](const DeviceTensor& t) {
    return b * t.stride[0] + first * t.stride[1] + place.head * t.stride[2] + place.dim;
  };
  __shared__ SharedBias s_bias;
  ConvRun<T, kW> run_of = {p,
                           part,
                           place,
                           s_bias,
                           b,
                           first,
                           tokens,
                           token_step<T>(part.x),
                           token_step<T>(part.y),
                           token_step<T>(part.residual),
                           token_step<float>(part.inverse_norm)};
  run_of.x = static_cast<const T*>(part.x.data) + at(part.x);
  run_of.y = static_cast<T*>(part.y.data) + at(part.y);
  run_of.residual =
      part.residual.data == nullptr ? nullptr : static_cast<const T*>(part.residual.data) + at(part.residual);
  run_of.norms = nullptr;
  if (part.inverse_norm.data != nullptr && place.active && place.dim == 0) {
    run_of.norms = static_cast<float*>(part.inverse_norm.data) + offset_of(part.inverse_norm, b, first, place.head);
  }
  // All loads before anything is waited for.
  run_of.load_next(0);
  run_of.prefetch_before();
  load_weights<T, kW>(part.weight, place.channel, grid.vector_weights >> place.part & 1, run_of.w);
  const float scale = p.silu ? silu_scale<T>() : 1.0f;
#pragma unroll
  for (int j = 0; j < kW; ++j) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) run_of.w[j][c] *= scale;
  }
  if (part.bias.data != nullptr) s_bias.fill(part.bias, place.channel, scale);
  if (!p.silu || part.bias.data != nullptr || part.residual.data != nullptr) {
    run_of.template all<ConvForm::kAny>();
  } else if (part.l2norm) {
    run_of.template all<ConvForm::kSiluNorm>();
  } else {
    run_of.template all<ConvForm::kSilu>();
  }
}

}  // namespace flash_qla::cuda
