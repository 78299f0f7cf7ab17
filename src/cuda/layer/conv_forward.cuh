// The convolution over whole sequences, channels side by side. A thread has eight channels and goes through a run of
// tokens; weights and the last inputs stay in registers. Runs in which no sequence begins take a loop that asks
// nothing.
#pragma once

#include "cuda/layer/conv_gates.cuh"
#include "cuda/layer/conv_sequences.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

constexpr int kConvThreads = 128;

// Tokens that a thread loads at once: as many as leave its registers unspilled.
template <class T>
constexpr int kAhead = sizeof(T) == 4 ? 2 : 4;

// Most tokens of a run: a bit each says where sequences begin.
constexpr int kMostRunTokens = 64;

// How the blocks of a launch are dealt out: columns of channels first, then runs, then gates.
struct ConvGrid {
  int32_t first_column[FLASH_QLA_MAX_CONV_PARTS + 1];  // of each part; the last: columns of all
  int32_t vector_weights;                              // bits: parts whose weights are read as vectors
  int32_t run_tokens;
  int64_t runs_of_row, blocks;  // blocks of the convolution
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

// The input `steps` places before a sequence that starts from state `slot`, or zero.
__device__ __forceinline__ void load_history(const DeviceTensor& state, const ConvSequences& s, int64_t slot,
                                             int64_t steps, int channel, float (&x)[kVector]) {
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    x[c] = slot < 0 ? 0.0f : load<float>(state, offset_of(state, slot, channel + c, s.L - steps));
  }
}

// A bit for each token of [first, first + 64) after the first that an offset names: another sequence begins there, or
// none. Every thread of the block takes part.
__device__ inline uint64_t starts_in_run(const DeviceTensor& cu_seqlens, int64_t N, int64_t first, int tokens) {
  __shared__ uint32_t s_starts[kMostRunTokens / 32];
  if (threadIdx.x < kMostRunTokens) {
    const int64_t t = first + threadIdx.x;
    int64_t low = -1, high = N;  // the first n whose offset is at least t, if any: (low, high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (load_index(cu_seqlens, middle) < t) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const bool starts = threadIdx.x > 0 && static_cast<int>(threadIdx.x) < tokens && load_index(cu_seqlens, high) == t;
    const uint32_t bits = __ballot_sync(0xffffffffu, starts);
    if (threadIdx.x % 32 == 0) s_starts[threadIdx.x / 32] = bits;
  }
  __syncthreads();
  return static_cast<uint64_t>(s_starts[1]) << 32 | s_starts[0];
}

// group_sum() of a number of lanes that the compiler does not know, without a loop.
__device__ __forceinline__ float group_sum_of(float x, int lanes) {
  if (lanes > 16) x += __shfl_xor_sync(0xffffffffu, x, 16);
  if (lanes > 8) x += __shfl_xor_sync(0xffffffffu, x, 8);
  if (lanes > 4) x += __shfl_xor_sync(0xffffffffu, x, 4);
  if (lanes > 2) x += __shfl_xor_sync(0xffffffffu, x, 2);
  if (lanes > 1) x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x;
}

// One thread's run.
template <class T, int kW>
struct ConvRun {
  const ConvParams& p;
  const ConvPart& part;
  const ConvPlace& place;
  const int64_t b, first;
  const int tokens;
  const T* x;  // of the run's first token
  T* y;
  const T* residual;       // or NULL
  float* norms;            // of the run's first token, where this thread stores a head's; else NULL
  const SharedBias* bias;  // or NULL
  float w[kW][kVector];

  // What u begins with.
  __device__ __forceinline__ void open(float (&u)[kVector]) const {
#pragma unroll
    for (int c = 0; c < kVector; ++c) u[c] = 0.0f;
    if (bias != nullptr) bias->read(u);
  }

  __device__ __forceinline__ Packed<T> load_input(int i) const { return load_packed(x + i * part.x.stride[1]); }

  // From u of token i to what is stored.
  __device__ __forceinline__ void finish(int i, float (&u)[kVector], bool skip) {
    if (p.silu) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] *= sigmoid_for<T>(u[c]);
    }
    if (part.l2norm) normalise(i, u, skip);
    if (residual != nullptr) {
      float add[kVector];
      unpack(load_packed(residual + i * part.residual.stride[1]), add);
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] += add[c];
    }
    if (skip) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) u[c] = 0.0f;
    }
    if (place.active) store_packed(y + i * part.y.stride[1], pack<T>(u));
  }

  __device__ __forceinline__ void normalise(int i, float (&u)[kVector], bool skip) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kVector; ++c) sum = fmaf(u[c], u[c], sum);
    if (!place.active) sum = 0.0f;
    sum = group_sum_of(sum, place.lanes) + static_cast<float>(kL2NormEps);
    const float r = sizeof(T) == 4 ? 1.0f / sqrtf(sum) : rsqrtf(sum);
#pragma unroll
    for (int c = 0; c < kVector; ++c) u[c] *= r;
    if (norms == nullptr) return;
    norms[i * part.inverse_norm.stride[1]] = skip ? 1.0f / sqrtf(static_cast<float>(kL2NormEps)) : r;
  }

  // All tokens of a run in which no sequence begins. window: the inputs before it, oldest first.
  __device__ __forceinline__ void inner(Packed<T> (&window)[kW > 1 ? kW - 1 : 1], Packed<T> (&next)[kAhead<T>]) {
    constexpr int kTokens = kAhead<T>;
    const auto compute = [&](const Packed<T>(&v)[kW - 1 + kTokens], int k, int i) {
      float u[kVector];
      open(u);
#pragma unroll
      for (int j = 0; j < kW; ++j) {
        float tap[kVector];
        unpack(v[k + j], tap);
#pragma unroll
        for (int c = 0; c < kVector; ++c) u[c] = fmaf(w[j][c], tap[c], u[c]);
      }
      finish(i, u, false);
    };
    Packed<T> v[kW - 1 + kTokens];
#pragma unroll
    for (int j = 0; j + 1 < kW; ++j) v[j] = window[j];
    int i = 0;
    for (; i + kTokens <= tokens; i += kTokens) {
#pragma unroll
      for (int k = 0; k < kTokens; ++k) v[kW - 1 + k] = next[k];
#pragma unroll
      for (int k = 0; k < kTokens; ++k) {
        if (i + kTokens + k < tokens) next[k] = load_input(i + kTokens + k);
      }
#pragma unroll
      for (int k = 0; k < kTokens; ++k) compute(v, k, i + k);
#pragma unroll
      for (int j = 0; j + 1 < kW; ++j) v[j] = v[j + kTokens];
    }
#pragma unroll
    for (int k = 0; k < kTokens; ++k) v[kW - 1 + k] = next[k];
#pragma unroll
    for (int k = 0; k + 1 < kTokens; ++k) {
      if (i + k < tokens) compute(v, k, i + k);
    }
  }

  // All tokens of any run, one after the other. `starts`: a bit for each token at which another sequence begins.
  __device__ __forceinline__ void any(uint64_t starts) {
    float v[kW][kVector];  // the last inputs, newest last
    bool skip = begin(0, v);
    for (int i = 0; i < tokens; ++i) {
      if (i > 0 && (starts >> i & 1) != 0) skip = begin(i, v);
      unpack(load_input(i), v[kW - 1]);
      float u[kVector];
      open(u);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
#pragma unroll
        for (int j = 0; j < kW; ++j) u[c] = fmaf(w[j][c], v[j][c], u[c]);
#pragma unroll
        for (int j = 0; j + 1 < kW; ++j) v[j][c] = v[j + 1][c];
      }
      finish(i, u, skip);
    }
  }

  // The inputs before token i; whether its sequence is skipped.
  __device__ __forceinline__ bool begin(int i, float (&v)[kW][kVector]) {
    const ConvSpan span = span_at(p.sequences, b, first + i);
    const int64_t slot = conv_read_slot(p.sequences, span.n);
#pragma unroll
    for (int k = 1; k < kW; ++k) {
      const int64_t steps = span.begin - (first + i - k);  // before the sequence
      if (steps > 0) {
        load_history(part.initial_state, p.sequences, slot, steps, place.channel, v[kW - 1 - k]);
      } else {
        unpack(load_input(i - k), v[kW - 1 - k]);
      }
    }
    return slot == kSkipRow;
  }
};

// Four blocks a multiprocessor: 16 KB of loads each on their way at once, of the 23 that a Hopper GPU's memory needs.
template <class T, int kW>
__global__ void __launch_bounds__(kConvThreads, sizeof(T) == 4 ? 3 : 4)
    conv_forward_kernel(const __grid_constant__ ConvParams p, const __grid_constant__ ConvGrid grid) {
  if (blockIdx.x >= grid.blocks) return gate_block(p.gates, blockIdx.x - grid.blocks);
  const int columns = grid.first_column[FLASH_QLA_MAX_CONV_PARTS];
  const ConvPlace place = conv_place(p.parts, grid, static_cast<int>(blockIdx.x) % columns);
  const ConvPart& part = p.parts[place.part];
  const int64_t run = blockIdx.x / columns, b = run / grid.runs_of_row;
  const int64_t first = run % grid.runs_of_row * grid.run_tokens, T_all = p.sequences.T;
  const int tokens = static_cast<int>(T_all - first < grid.run_tokens ? T_all - first : grid.run_tokens);
  const auto at = [&](const DeviceTensor& t) {
    return b * t.stride[0] + first * t.stride[1] + place.head * t.stride[2] + place.dim;
  };
  ConvRun<T, kW> run_of = {p, part, place, b, first, tokens};
  run_of.x = static_cast<const T*>(part.x.data) + at(part.x);
  run_of.y = static_cast<T*>(part.y.data) + at(part.y);
  run_of.residual =
      part.residual.data == nullptr ? nullptr : static_cast<const T*>(part.residual.data) + at(part.residual);
  // On their way before anything asks where sequences begin.
  Packed<T> next[kAhead<T>], window[kW > 1 ? kW - 1 : 1];
#pragma unroll
  for (int k = 0; k < kAhead<T>; ++k) next[k] = k < tokens ? run_of.load_input(k) : zero_packed<T>();
#pragma unroll
  for (int k = 1; k < kW; ++k) window[kW - 1 - k] = first >= k ? run_of.load_input(-k) : zero_packed<T>();
  load_weights<T, kW>(part.weight, place.channel, grid.vector_weights >> place.part & 1, run_of.w);
  __shared__ SharedBias s_bias;
  run_of.bias = part.bias.data == nullptr ? nullptr : &s_bias;
  if (run_of.bias != nullptr) s_bias.fill(part.bias, place.channel);
  run_of.norms = nullptr;
  if (part.inverse_norm.data != nullptr && place.active && place.dim == 0) {
    run_of.norms = static_cast<float*>(part.inverse_norm.data) + offset_of(part.inverse_norm, b, first, place.head);
  }

  const ConvSequences& s = p.sequences;
  const ConvSpan span = span_at(s, b, first);
  const bool one_sequence = s.cu_seqlens.data == nullptr || span.end >= first + tokens;
  // What is before the run are inputs, or zeros of which the loads above are right.
  const bool has_window = first - (kW - 1) >= span.begin || (first == 0 && !s.has_states);
  if (one_sequence && has_window && conv_read_slot(s, span.n) != kSkipRow) return run_of.inner(window, next);
  run_of.any(one_sequence ? 0 : starts_in_run(s.cu_seqlens, s.N, first, tokens));
}

}  // namespace flash_qla::cuda
