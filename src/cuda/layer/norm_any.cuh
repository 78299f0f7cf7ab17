// The gated norm of rows of any length and strides, for those that norm.cuh does not take. Correct first.
#pragma once

#include "cuda/layer/norm_params.cuh"

namespace flash_qla::cuda {

// A row as one kernel's thread sees it.
template <class T>
struct AnyRow {
  const NormParams& p;
  NormRow row;

  __device__ AnyRow(const NormParams& params, int64_t number) : p(params) {
    const int64_t rest = number / p.inner.divisor, outer = rest / p.middle.divisor;
    row = {outer, rest - outer * p.middle.divisor, number - rest * p.inner.divisor};
  }
  __device__ float at(const NormRows& t, int v) const {
    return static_cast<float>(static_cast<const T*>(t.data)[row.offset(t) + v * t.column]);
  }
  __device__ void put(const NormRows& t, int v, float x) const {
    if (t.data != nullptr) static_cast<T*>(t.data)[row.offset(t) + v * t.column] = static_cast<T>(x);
  }
  __device__ NormGate gate(int v) const {
    const bool gated = p.z.data != nullptr;
    return gate_of<T>(gated, p.silu, gated ? at(p.z, v) : 0.0f);
  }
  // What is normalised, and the gradient of what the weight multiplied.
  __device__ float before(int v) const { return at(p.x, v) * (p.gate_first ? gate(v).value : 1.0f); }
  __device__ float after(int v) const { return at(p.dy, v) * (p.gate_first ? 1.0f : gate(v).value); }
};

// A warp has a row, and goes through it as often as it needs.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    norm_gated_any_kernel(const __grid_constant__ NormParams p, bool backward) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * (kNormThreads / 32) + threadIdx.x / 32;
  if (number >= p.rows) return;
  const AnyRow<T> row(p, number);
  const auto of_columns = [&](const DeviceTensor& t, int v, float absent) {
    return t.data != nullptr ? load<float>(t, offset_of(t, v)) : absent;
  };
  float sum = 0.0f;
  for (int v = lane; v < p.V; v += 32) {
    const float x = row.before(v);
    sum = fmaf(x, x, sum);
  }
  const float r = rsqrtf(fmaf(group_sum(sum, 32), p.per_value, p.eps));
  if (p.inverse_rms.data != nullptr && lane == 0) store<float>(p.inverse_rms, offset_of(p.inverse_rms, number), r);
  float along = 0.0f;
  for (int v = lane; backward && v < p.V; v += 32) {
    along = fmaf(row.after(v) * of_columns(p.weight, v, 1.0f), row.before(v) * r, along);
  }
  along = group_sum(along, 32) * p.per_value;
  for (int v = lane; v < p.V; v += 32) {
    const NormGate gate = row.gate(v);
    const float n = row.before(v) * r, w = of_columns(p.weight, v, 1.0f);
    const float y = fmaf(n, w, of_columns(p.bias, v, 0.0f));
    if (!backward) {
      row.put(p.y, v, p.gate_first ? y : y * gate.value);
      continue;
    }
    const float d = r * (row.after(v) * w - along * n), x = row.at(p.x, v), dy = row.at(p.dy, v);
    row.put(p.dz, v, (p.gate_first ? d * x : dy * y) * gate.slope);
    row.put(p.dx, v, p.gate_first ? d * gate.value : d);
  }
}

// The terms of some rows in the gradients of weight and bias: a thread has a column.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    norm_gated_any_sums_kernel(const __grid_constant__ NormParams p, int64_t columns, int64_t step) {
  const int v = static_cast<int>(blockIdx.x % columns) * kNormThreads + static_cast<int>(threadIdx.x);
  const int64_t part = blockIdx.x / columns;
  if (v >= p.V) return;
  float dw = 0.0f, db = 0.0f;
  for (int64_t number = part * step; number < p.rows && number < (part + 1) * step; ++number) {
    const AnyRow<T> row(p, number);
    const float d = row.after(v);
    dw = fmaf(d, row.before(v) * load<float>(p.inverse_rms, offset_of(p.inverse_rms, number)), dw);
    db += d;
  }
  p.sums[part * p.sum_columns + v] = dw;
  if (p.sum_columns > p.V) p.sums[part * p.sum_columns + p.V + v] = db;
}

}  // namespace flash_qla::cuda
