// The gated norm. A group of lanes has a row, eight values a lane at a time; rows of more than 256 values take several
// rounds of a warp. Any strides and dtypes: where rows lie side by side on 16-byte boundaries they are read as vectors.
#pragma once

#include "core/norm.h"
#include "cuda/common/device_tensor.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

constexpr int kNormThreads = 128;

// One tensor by row, as RowView.
struct NormRows {
  void* data;  // NULL: absent
  int64_t outer, middle, inner, column;
  int64_t step;     // from row to row, where that is the same everywhere
  int32_t is_even;  // it is
  int32_t vectors;  // rows are read and written eight values at a time
};

struct NormParams {
  NormRows x, z, y, dy, dx, dz;  // forward: x, z, y; backward: x, z, dy, dx, dz
  DeviceTensor weight, bias;     // [V]
  DeviceTensor inverse_rms;      // [rows]
  DeviceTensor dweight, dbias;   // [V]
  float* sums;                   // [blocks, 2, V] parts of the sums over rows
  int64_t rows, extent_middle, extent_inner, blocks;
  float eps;
  int32_t V, lanes, gate_first, silu;  // lanes: of a row, a power of two
};
static_assert(std::is_trivially_copyable_v<NormParams> && sizeof(NormParams) <= 4000);

__device__ __forceinline__ int64_t row_offset(const NormParams& p, const NormRows& t, int64_t row) {
  if (t.is_even) return row * t.step;  // divisions of 64 bits take longer than all else of a row
  const int64_t i = row % p.extent_inner, rest = row / p.extent_inner;
  return rest / p.extent_middle * t.outer + rest % p.extent_middle * t.middle + i * t.inner;
}

template <class T>
__device__ __forceinline__ float element_to_float(const T& x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __half2float(x);
  else
    return __bfloat162float(x);
}
template <class T>
__device__ __forceinline__ T element_from_float(float x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

// Values [v, v + 8) of a row; zero past its end and where the tensor is absent.
template <class T>
__device__ __forceinline__ void load_values(const NormRows& t, int64_t offset, int v, int V, float (&x)[kVector]) {
  const T* row = static_cast<const T*>(t.data) + offset;
  if (t.data != nullptr && t.vectors && v < V) return unpack(load_packed(row + v), x);
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    x[c] = t.data != nullptr && v + c < V ? element_to_float(row[(v + c) * t.column]) : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void store_values(const NormRows& t, int64_t offset, int v, int V,
                                             const float (&x)[kVector]) {
  if (t.data == nullptr) return;
  T* row = static_cast<T*>(t.data) + offset;
  if (t.vectors && v < V) return store_packed(row + v, pack<T>(x));
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    if (v + c < V) row[(v + c) * t.column] = element_from_float<T>(x[c]);
  }
}

__device__ __forceinline__ void load_of_columns(const DeviceTensor& t, int v, int V, float absent,
                                                float (&x)[kVector]) {
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    x[c] = t.data != nullptr && v + c < V ? load<float>(t, offset_of(t, v + c)) : absent;
  }
}

// act(z), and its derivative.
template <class T>
__device__ __forceinline__ float gate_of(const NormParams& p, float z) {
  const float s = sigmoid_for<T>(z);
  return p.silu ? z * s : s;
}
template <class T>
__device__ __forceinline__ float gate_slope(const NormParams& p, float z) {
  const float s = sigmoid_for<T>(z);
  return p.silu ? silu_slope(z, s) : s * (1.0f - s);
}

// Sums over the lanes of a row. `lanes` is the same in all threads.
__device__ __forceinline__ float row_sum(float x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Rows of at most 256 values: what a lane has stays in registers.
template <class T>
__global__ void __launch_bounds__(kNormThreads) norm_gated_kernel(const __grid_constant__ NormParams p) {
  const int lane = static_cast<int>(threadIdx.x) % p.lanes, v = lane * kVector;
  const int rows_at_once = kNormThreads / p.lanes;
  float w[kVector], b[kVector];
  load_of_columns(p.weight, v, p.V, 1.0f, w);
  load_of_columns(p.bias, v, p.V, 0.0f, b);
  const int64_t step = static_cast<int64_t>(gridDim.x) * rows_at_once;
  // Every thread goes through as many rounds: the sums are the warp's.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < p.rows; first += step) {
    const int64_t own = first + threadIdx.x / p.lanes, row = own < p.rows ? own : p.rows - 1;
    float x[kVector], z[kVector], sum = 0.0f;
    load_values<T>(p.x, row_offset(p, p.x, row), v, p.V, x);
    load_values<T>(p.z, row_offset(p, p.z, row), v, p.V, z);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      z[c] = p.z.data == nullptr ? 1.0f : gate_of<T>(p, z[c]);
      if (p.gate_first) x[c] *= z[c];
      sum = fmaf(x[c], x[c], sum);
    }
    const float r = 1.0f / sqrtf(row_sum(sum, p.lanes) / p.V + p.eps);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      x[c] = fmaf(x[c] * r, w[c], b[c]);
      if (!p.gate_first) x[c] *= z[c];
    }
    if (own >= p.rows) continue;
    store_values<T>(p.y, row_offset(p, p.y, row), v, p.V, x);
    if (p.inverse_rms.data != nullptr && lane == 0) store<float>(p.inverse_rms, offset_of(p.inverse_rms, row), r);
  }
}

// With n the normalised row and h its gradient, that of what was normalised is r (h - n mean(h n)). A block leaves its
// part of the sums over rows.
template <class T>
__global__ void __launch_bounds__(kNormThreads) norm_gated_backward_kernel(const __grid_constant__ NormParams p) {
  const int lane = static_cast<int>(threadIdx.x) % p.lanes, v = lane * kVector;
  const int rows_at_once = kNormThreads / p.lanes;
  float w[kVector], b[kVector], dw[kVector], db[kVector];
  load_of_columns(p.weight, v, p.V, 1.0f, w);
  load_of_columns(p.bias, v, p.V, 0.0f, b);
#pragma unroll
  for (int c = 0; c < kVector; ++c) dw[c] = db[c] = 0.0f;
  const int64_t step = static_cast<int64_t>(gridDim.x) * rows_at_once;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * rows_at_once; first < p.rows; first += step) {
    const int64_t own = first + threadIdx.x / p.lanes, row = own < p.rows ? own : p.rows - 1;
    float x[kVector], z[kVector], d[kVector], n[kVector], sum = 0.0f;
    load_values<T>(p.x, row_offset(p, p.x, row), v, p.V, x);
    load_values<T>(p.z, row_offset(p, p.z, row), v, p.V, z);
    load_values<T>(p.dy, row_offset(p, p.dy, row), v, p.V, d);
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      n[c] = p.gate_first && p.z.data != nullptr ? x[c] * gate_of<T>(p, z[c]) : x[c];
      sum = fmaf(n[c], n[c], sum);
    }
    const float r = 1.0f / sqrtf(row_sum(sum, p.lanes) / p.V + p.eps);
    float along = 0.0f, dz[kVector];
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      n[c] *= r;
      const bool through = !p.gate_first && p.z.data != nullptr;
      dz[c] = through ? d[c] * fmaf(n[c], w[c], b[c]) * gate_slope<T>(p, z[c]) : 0.0f;
      if (through) d[c] *= gate_of<T>(p, z[c]);
      if (own < p.rows) {
        dw[c] = fmaf(d[c], n[c], dw[c]);
        db[c] += d[c];
      }
      d[c] *= w[c];
      along = fmaf(d[c], n[c], along);
    }
    along = row_sum(along, p.lanes) / p.V;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      d[c] = r * (d[c] - along * n[c]);
      if (p.gate_first && p.z.data != nullptr) {
        dz[c] = d[c] * x[c] * gate_slope<T>(p, z[c]);
        d[c] *= gate_of<T>(p, z[c]);
      }
    }
    if (own >= p.rows) continue;
    store_values<T>(p.dx, row_offset(p, p.dx, row), v, p.V, d);
    store_values<T>(p.dz, row_offset(p, p.dz, row), v, p.V, dz);
  }
  if (p.sums == nullptr) return;
  // The block's rows, in the order of their groups of lanes.
  __shared__ float s_sums[2][kNormThreads][kVector];
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    s_sums[0][threadIdx.x][c] = dw[c];
    s_sums[1][threadIdx.x][c] = db[c];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 2 * p.V; i += kNormThreads) {
    const int which = i / p.V, column = i % p.V;
    float sum = 0.0f;
    for (int group = 0; group < rows_at_once; ++group) {
      sum += s_sums[which][group * p.lanes + column / kVector][column % kVector];
    }
    p.sums[blockIdx.x * 2 * p.V + i] = sum;
  }
}

// Rows of any length: a warp has a row, and goes through it as often as it needs.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    norm_gated_long_kernel(const __grid_constant__ NormParams p, bool backward) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kNormThreads / 32) + threadIdx.x / 32;
  if (row >= p.rows) return;
  const auto at = [&](const NormRows& t, int v) {
    return element_to_float(static_cast<const T*>(t.data)[row_offset(p, t, row) + v * t.column]);
  };
  const auto put = [&](const NormRows& t, int v, float x) {
    if (t.data != nullptr) static_cast<T*>(t.data)[row_offset(p, t, row) + v * t.column] = element_from_float<T>(x);
  };
  const bool gated = p.z.data != nullptr;
  const auto of_columns = [&](const DeviceTensor& t, int v, float absent) {
    return t.data != nullptr ? load<float>(t, offset_of(t, v)) : absent;
  };
  const auto before = [&](int v) { return at(p.x, v) * (gated && p.gate_first ? gate_of<T>(p, at(p.z, v)) : 1.0f); };
  float sum = 0.0f;
  for (int v = lane; v < p.V; v += 32) {
    const float x = before(v);
    sum = fmaf(x, x, sum);
  }
  const float r = 1.0f / sqrtf(row_sum(sum, 32) / p.V + p.eps);
  if (!backward) {
    for (int v = lane; v < p.V; v += 32) {
      const float y = fmaf(before(v) * r, of_columns(p.weight, v, 1.0f), of_columns(p.bias, v, 0.0f));
      put(p.y, v, gated && !p.gate_first ? y * gate_of<T>(p, at(p.z, v)) : y);
    }
    if (p.inverse_rms.data != nullptr && lane == 0) store<float>(p.inverse_rms, offset_of(p.inverse_rms, row), r);
    return;
  }
  // The gradient of the normalised row.
  const auto h = [&](int v) {
    const float d = at(p.dy, v) * (gated && !p.gate_first ? gate_of<T>(p, at(p.z, v)) : 1.0f);
    return d * of_columns(p.weight, v, 1.0f);
  };
  float along = 0.0f;
  for (int v = lane; v < p.V; v += 32) along = fmaf(h(v), before(v) * r, along);
  along = row_sum(along, 32) / p.V;
  for (int v = lane; v < p.V; v += 32) {
    const float n = before(v) * r, d = r * (h(v) - along * n);
    if (!gated) {
      put(p.dx, v, d);
      continue;
    }
    const float z = at(p.z, v), slope = gate_slope<T>(p, z);
    if (p.gate_first) {
      put(p.dz, v, d * at(p.x, v) * slope);
      put(p.dx, v, d * gate_of<T>(p, z));
    } else {
      const float y = fmaf(n, of_columns(p.weight, v, 1.0f), of_columns(p.bias, v, 0.0f));
      put(p.dz, v, at(p.dy, v) * y * slope);
      put(p.dx, v, d);
    }
  }
}

// The terms of some rows of any length in the gradients of weight and bias: a thread has a column.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    norm_gated_long_sums_kernel(const __grid_constant__ NormParams p, const float* rms, int64_t columns, int64_t step) {
  const int v = static_cast<int>(blockIdx.x % columns) * kNormThreads + static_cast<int>(threadIdx.x);
  const int64_t part = blockIdx.x / columns;
  if (v >= p.V) return;
  float dw = 0.0f, db = 0.0f;
  for (int64_t row = part * step; row < p.rows && row < (part + 1) * step; ++row) {
    const auto at = [&](const NormRows& t) {
      return element_to_float(static_cast<const T*>(t.data)[row_offset(p, t, row) + v * t.column]);
    };
    const float gate = p.z.data != nullptr ? gate_of<T>(p, at(p.z)) : 1.0f;
    const float n = at(p.x) * (p.gate_first ? gate : 1.0f) * rms[row], d = at(p.dy) * (p.gate_first ? 1.0f : gate);
    dw = fmaf(d, n, dw);
    db += d;
  }
  p.sums[part * 2 * p.V + v] = dw;
  p.sums[part * 2 * p.V + p.V + v] = db;
}

// Gradients of weight and bias from the blocks' parts: added in their order, in double, rounded once.
__global__ void __launch_bounds__(kNormThreads) norm_add_sums_kernel(const __grid_constant__ NormParams p) {
  const int i = static_cast<int>(blockIdx.x) * kNormThreads + static_cast<int>(threadIdx.x);
  if (i >= 2 * p.V) return;
  const DeviceTensor& out = i < p.V ? p.dweight : p.dbias;
  if (out.data == nullptr) return;
  double sum = 0.0;
  for (int64_t block = 0; block < p.blocks; ++block) sum += p.sums[block * 2 * p.V + i];
  store<double>(out, offset_of(out, i % p.V), sum);
}

}  // namespace flash_qla::cuda
