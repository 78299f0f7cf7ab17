// The gated norm of rows of at most 256 values: a group of lanes has a row, eight values a lane. Several rows of a
// group are on their way at once.
#pragma once

#include "cuda/layer/norm_params.cuh"

namespace flash_qla::cuda {

constexpr int kLongestRow = 32 * kVector;  // a warp's

// How much of a call is known when its kernel is compiled. kVectors: values lie side by side on 16-byte boundaries, and
// their number is a multiple of eight; kAny: they lie anywhere. kPlain, forward alone: vectors, SiLU of z behind the
// norm, the weight in T, no bias: a third less instructions, for which the kernel waited as long as for memory. Bits
// are the same.
enum class NormForm { kPlain, kVectors, kAny };

// The same as seen by a kernel.
template <NormForm kForm>
struct NormRules {
  bool gated, silu, gate_first, biased;

  __device__ __forceinline__ explicit NormRules(const NormParams& p)
      : gated(kForm == NormForm::kPlain || p.z.data != nullptr),
        silu(kForm == NormForm::kPlain || p.silu),
        gate_first(kForm != NormForm::kPlain && p.gate_first),
        biased(kForm != NormForm::kPlain && p.bias.data != nullptr) {}
};

// Rows of a group whose loads are under way together. Forward: blocks that come and go, as many as plain 16-bit rows
// leave registers for (48 of a thread): 80 KB of a multiprocessor. A kernel of two reads and a write that does nothing
// else needs that form to reach the speed of a copy; blocks that stay are 5 % slower. Backward: 48 KB beside the rows
// that are computed, of 256 threads, which leave half as many parts of the sums as 128.
constexpr int kForwardThreads = 256, kBackwardThreads = 256;
constexpr int kForwardRows = 2;
template <class T, NormForm kForm>
constexpr int kForwardBlocks = kForm != NormForm::kPlain ? 2
                               : sizeof(T) == 4          ? 3
                                                         : 5;
template <class T>
constexpr int kBackwardRows = sizeof(T) == 4 ? 1 : 2;
constexpr int kBackwardBlocks = 2;  // of a multiprocessor

// Below this a group has one row: a decode step of up to 512 sequences waits for one group's instructions, and four
// rows of a group took twice as long as one.
constexpr int64_t kFewRows = 16384;

__device__ __forceinline__ NormRow row_at(const NormParams& p, uint32_t row) {
  const uint32_t rest = p.inner.quotient(row), outer = p.middle.quotient(rest);
  return {outer, rest - outer * p.middle.divisor, row - rest * p.inner.divisor};
}

// A thread's values of a row of V, from v on; zero where there are none.
template <class T, NormForm kForm>
__device__ __forceinline__ Packed<T> load_values(const NormRows& t, const NormRow& row, int v, int V, bool wanted) {
  if (!wanted || t.data == nullptr) return Packed<T>{};
  const T* const from = static_cast<const T*>(t.data) + row.offset(t);
  if constexpr (kForm != NormForm::kAny) {
    return load_packed(from + v);
  } else {
    float x[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) x[c] = v + c < V ? static_cast<float>(from[(v + c) * t.column]) : 0.0f;
    return pack<T>(x);
  }
}
template <class T, NormForm kForm>
__device__ __forceinline__ void store_values(const NormRows& t, const NormRow& row, int v, int V, bool wanted,
                                             const float (&x)[kVector]) {
  if (!wanted || t.data == nullptr) return;
  T* const to = static_cast<T*>(t.data) + row.offset(t);
  if constexpr (kForm != NormForm::kAny) {
    store_packed(to + v, pack<T>(x));
  } else {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      if (v + c < V) to[(v + c) * t.column] = static_cast<T>(x[c]);
    }
  }
}

__device__ __forceinline__ void load_of_columns(const DeviceTensor& t, int v, int V, float absent,
                                                float (&x)[kVector]) {
  if (t.data != nullptr && t.quads) {
#pragma unroll
    for (int c = 0; c < kVector; c += 4) {
      const float4 four = unpack(t, load_raw_quad(t, 0, v + c, V));
      x[c] = four.x, x[c + 1] = four.y, x[c + 2] = four.z, x[c + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    x[c] = t.data != nullptr && v + c < V ? unpack(t, load_raw(t, offset_of(t, v + c))) : absent;
  }
}

// A thread's values of the weight.
template <class T, NormForm kForm>
__device__ __forceinline__ void load_weight(const NormParams& p, int v, float (&w)[kVector]) {
  if constexpr (kForm == NormForm::kPlain) {
    unpack(v < p.V ? load_packed(static_cast<const T*>(p.weight.data) + v) : Packed<T>{}, w);
  } else {
    load_of_columns(p.weight, v, p.V, 1.0f, w);
  }
}

// What is normalised is a row or, gate_first, its product with the gate; either way the gate is a factor of the result.
template <class T, NormForm kForm, int kRows>
__global__ void __launch_bounds__(kForwardThreads, kForwardBlocks<T, kForm>)
    norm_gated_kernel(const __grid_constant__ NormParams p) {
  const NormRules<kForm> rules(p);
  const int lanes = 1 << p.lane_bits;
  const uint32_t lane = threadIdx.x & (lanes - 1), groups = kForwardThreads >> p.lane_bits;
  const uint32_t first = blockIdx.x * groups * kRows + (threadIdx.x >> p.lane_bits);
  const int v = static_cast<int>(lane) * kVector;
  const bool active = v < p.V;
  begin_after_predecessors();
  Packed<T> raw_x[kRows], raw_z[kRows];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const uint32_t number = first + k * groups;
    const NormRow row = row_at(p, number);
    raw_x[k] = load_values<T, kForm>(p.x, row, v, p.V, active && number < p.rows);
    raw_z[k] = load_values<T, kForm>(p.z, row, v, p.V, active && number < p.rows);
  }
  float w[kVector], b[kVector];
  load_weight<T, kForm>(p, v, w);
  if (rules.biased) load_of_columns(p.bias, v, p.V, 0.0f, b);
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    float x[kVector], z[kVector], sum = 0.0f;
    unpack(raw_x[k], x);
    unpack(raw_z[k], z);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      z[c] = gate_of<T>(rules.gated, rules.silu, z[c]).value;
      const float gated = x[c] * z[c], normalised = rules.gate_first ? gated : x[c];
      sum = fmaf(normalised, normalised, sum);
      x[c] = gated;
    }
    const float r = rsqrtf(fmaf(group_sum(sum, lanes), p.per_value, p.eps));
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      const float factor = r * w[c];
      x[c] = rules.biased ? fmaf(x[c], factor, rules.gate_first ? b[c] : b[c] * z[c]) : x[c] * factor;
    }
    const uint32_t number = first + k * groups;
    const bool wanted = number < p.rows;
    store_values<T, kForm>(p.y, row_at(p, number), v, p.V, active && wanted, x);
    if (p.inverse_rms.data != nullptr && lane == 0 && wanted) {
      store<float>(p.inverse_rms, offset_of(p.inverse_rms, number), r);
    }
  }
}

// With n the normalised row and h its gradient, that of what was normalised is r (h - n mean(h n)). Blocks go through
// the rows and leave their parts of the sums over them.
template <class T, NormForm kForm>
__global__ void __launch_bounds__(kBackwardThreads, kBackwardBlocks)
    norm_gated_backward_kernel(const __grid_constant__ NormParams p) {
  constexpr int kRows = kBackwardRows<T>;
  const NormRules<kForm> rules(p);
  begin_after_predecessors();
  const int lanes = 1 << p.lane_bits;
  const uint32_t lane = threadIdx.x & (lanes - 1), groups = kBackwardThreads >> p.lane_bits;
  const uint32_t step = gridDim.x * groups * kRows;
  const int v = static_cast<int>(lane) * kVector;
  const bool active = v < p.V;
  const uint32_t group = threadIdx.x >> p.lane_bits;
  Packed<T> next_x[kRows], next_z[kRows], next_d[kRows];
  const auto load_next = [&](uint32_t round) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const uint32_t number = round + k * groups + group;
      const bool wanted = active && number < p.rows;
      const NormRow row = row_at(p, number);
      next_x[k] = load_values<T, kForm>(p.x, row, v, p.V, wanted);
      next_z[k] = load_values<T, kForm>(p.z, row, v, p.V, wanted);
      next_d[k] = load_values<T, kForm>(p.dy, row, v, p.V, wanted);
    }
  };
  uint32_t round = blockIdx.x * groups * kRows;
  load_next(round);
  float w[kVector], b[kVector], dw[kVector], db[kVector];
  load_weight<T, kForm>(p, v, w);
  load_of_columns(p.bias, v, p.V, 0.0f, b);
#pragma unroll
  for (int c = 0; c < kVector; ++c) dw[c] = db[c] = 0.0f;
  // Every thread of a block goes through as many rounds: the sums are the warp's.
  for (; round < p.rows; round += step) {
    Packed<T> raw_x[kRows], raw_z[kRows], raw_d[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) raw_x[k] = next_x[k], raw_z[k] = next_z[k], raw_d[k] = next_d[k];
    load_next(round + step);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const uint32_t number = round + k * groups + group;
      const bool wanted = number < p.rows;
      // n; what dz is beside a factor; d, then h; and, where the gate comes first, its value.
      float n[kVector], z[kVector], h[kVector], gate[kVector], sum = 0.0f;
      unpack(raw_x[k], n);
      unpack(raw_z[k], z);
      unpack(raw_d[k], h);
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        const NormGate of_z = gate_of<T>(rules.gated, rules.silu, z[c]);
        z[c] = of_z.slope * (rules.gate_first ? n[c] : h[c]);
        (rules.gate_first ? n[c] : h[c]) *= of_z.value;
        gate[c] = of_z.value;
        sum = fmaf(n[c], n[c], sum);
      }
      const float rms = rsqrtf(fmaf(group_sum(sum, lanes), p.per_value, p.eps)), r = wanted ? rms : 0.0f;
      float along = 0.0f;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        n[c] *= r;
        dw[c] = fmaf(h[c], n[c], dw[c]);
        db[c] += h[c];
        h[c] *= w[c];
        along = fmaf(h[c], n[c], along);
      }
      along = group_sum(along, lanes) * p.per_value;
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        h[c] = r * fmaf(-along, n[c], h[c]);
        const float before_gate = rules.biased ? fmaf(n[c], w[c], b[c]) : n[c] * w[c];
        z[c] *= rules.gate_first ? h[c] : before_gate;
        h[c] *= rules.gate_first ? gate[c] : 1.0f;
      }
      const NormRow row = row_at(p, number);
      store_values<T, kForm>(p.dx, row, v, p.V, active && wanted, h);
      store_values<T, kForm>(p.dz, row, v, p.V, active && wanted, z);
    }
  }
  if (p.sums == nullptr) return;
  // The block's rows, in the order of their groups of lanes.
  __shared__ float s_sums[2][kBackwardThreads][kVector];
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    s_sums[0][threadIdx.x][c] = dw[c];
    s_sums[1][threadIdx.x][c] = db[c];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < p.sum_columns; i += kBackwardThreads) {
    const int which = i >= p.V, column = i - which * p.V;
    float sum = 0.0f;
    for (uint32_t group = 0; group < groups; ++group) {
      sum += s_sums[which][group * lanes + column / kVector][column % kVector];
    }
    p.sums[blockIdx.x * p.sum_columns + i] = sum;
  }
}

}  // namespace flash_qla::cuda
