// What the layer's operations have compiled once per instruction set: the arithmetic of some rows in scratch. Rows are
// `stride` elements apart, a multiple of kColumns, and begin on 64-byte boundaries; what lies past a row's last column
// is computed along and means nothing.
#pragma once

#include <cstdint>

#include "cpu/kernels.h"

namespace flash_qla::cpu {

// Whole vectors on every instruction set.
inline constexpr int64_t kColumns = 16;

inline int64_t padded(int64_t columns) { return (columns + kColumns - 1) / kColumns * kColumns; }

template <class T>
struct LayerKernels {
  // out_i = bias + sum_j weights_j taps[i * W + j], element by element. weights [W, stride], bias [stride].
  void (*convolve)(const T* const* taps, int64_t rows, int64_t W, const T* weights, const T* bias, int64_t stride,
                   T* out);
  // sums_j += sum_i d_i taps[i * W + j], and sums_W += sum_i d_i. sums [W + 1, stride].
  void (*weight_sums)(const T* const* taps, const T* d, int64_t rows, int64_t W, int64_t stride, T* sums);

  // y = u / (1 + e^-u), and the sigmoid alone; in place or not. count is a multiple of kColumns.
  void (*silu)(const T* u, int64_t count, T* y);
  void (*sigmoid)(const T* u, int64_t count, T* y);
  // Takes d from the gradient of silu(u), or sigmoid(u), to that of u.
  void (*silu_backward)(const T* u, int64_t count, T* d);
  void (*sigmoid_backward)(const T* u, int64_t count, T* d);

  // r_i = (scale |x_i|^2 + eps)^-1/2 and x_i *= r_i, row by row.
  void (*normalise)(T* x, int64_t rows, int64_t columns, int64_t stride, T scale, T eps, T* r);
  // For n = r x: takes d from the gradient of n to that of x, d_i = r_i (d_i - scale <d_i, n_i> n_i). Rows of any
  // stride and alignment.
  void (*normalise_backward)(const T* n, const T* r, int64_t rows, int64_t columns, int64_t stride, T scale, T* d);

  // y = x w + b by columns, in place or not; w and b may be null.
  void (*affine)(const T* x, int64_t rows, int64_t stride, const T* w, const T* b, T* y);
  // y = x z, element by element, in place or not.
  void (*multiply)(const T* x, const T* z, int64_t count, T* y);
  // sums += sum_i x_i y_i (y null: sum_i x_i), by columns.
  void (*column_sums)(const T* x, const T* y, int64_t rows, int64_t stride, T* sums);
};

struct LayerKernelTable {
  LayerKernels<float> f32;
  LayerKernels<double> f64;
};

extern const LayerKernelTable kLayerKernelsPlain;
#if defined(__x86_64__)
extern const LayerKernelTable kLayerKernelsAvx2;
extern const LayerKernelTable kLayerKernelsAvx512;
#endif

// The table of the instruction set that kernel_table() has.
const LayerKernelTable& layer_kernel_table();

template <class T>
const LayerKernels<T>& layer_kernels();
template <>
inline const LayerKernels<float>& layer_kernels<float>() {
  return layer_kernel_table().f32;
}
template <>
inline const LayerKernels<double>& layer_kernels<double>() {
  return layer_kernel_table().f64;
}

}  // namespace flash_qla::cpu
