// What the gated norm's kernels are given, and what they share.
#pragma once

#include "core/norm.h"
#include "cuda/common/divisor.cuh"
#include "cuda/layer/sums.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

constexpr int kNormThreads = 128;

// One tensor by row, as RowView.
struct NormRows {
  void* data;  // NULL: absent
  int64_t outer, middle, inner, column;
};

struct NormParams {
  NormRows x, z, y, dy, dx, dz;  // forward: x, z, y; backward: x, z, dy, dx, dz
  DeviceTensor weight, bias;     // [V]
  DeviceTensor inverse_rms;      // [rows]
  DeviceTensor dweight, dbias;   // [V]
  float* sums;                   // [parts, sum_columns] parts of the sums over rows; NULL: not wanted
  int64_t rows, parts;
  Divisor middle, inner;                   // extents of the dimensions in front of V, apart from the outermost
  float eps, per_value;                    // 1 / V
  int32_t V, lane_bits, gate_first, silu;  // a row has 2^lane_bits lanes
  int32_t sum_columns;                     // V of dweight, and V more where there is dbias
};
static_assert(std::is_trivially_copyable_v<NormParams> && sizeof(NormParams) <= 4000);

// A row by its dimensions.
struct NormRow {
  int64_t outer, middle, inner;

  __device__ __forceinline__ int64_t offset(const NormRows& t) const {
    return outer * t.outer + middle * t.middle + inner * t.inner;
  }
};

// act(z) and its derivative; without z: one, and nothing.
struct NormGate {
  float value, slope;
};
template <class T>
__device__ __forceinline__ NormGate gate_of(bool gated, bool silu, float z) {
  if (!gated) return {1.0f, 0.0f};
  const float s = sigmoid_for<T>(z);
  if (!silu) return {s, s * (1.0f - s)};
  const float value = z * s;
  return {value, fmaf(-value, s, value + s)};
}

// Gradients of weight and bias from the parts of their sums.
constexpr int kNormSumColumns = 8;  // there are few columns, and up to 1,024 parts

__global__ void __launch_bounds__(kSumThreads) norm_add_sums_kernel(const __grid_constant__ NormParams p) {
  add_parts<kNormSumColumns>(p.sums, p.parts, p.sum_columns, [&](int64_t column, double sum) {
    const DeviceTensor& out = column < p.V ? p.dweight : p.dbias;
    if (out.data != nullptr) store<double>(out, offset_of(out, column < p.V ? column : column - p.V), sum);
  });
}

}  // namespace flash_qla::cuda
