// Rows of the gated norm in scratch.
#pragma once

#include <algorithm>

#include "core/host_tensor.h"
#include "core/norm.h"
#include "cpu/layer/kernels.h"
#include "cpu/scratch.h"
#include "cpu/tensors.h"

namespace flash_qla::cpu {

// Rows of a task. It follows from V alone, so that sums over rows have the same bits whatever the number of threads;
// four arrays of 8192 values in float32 stay in the second-level cache.
inline int64_t norm_rows(int64_t V) { return std::max<int64_t>(1, 8192 / V); }

// Floating-point operations of an element, by which threads are counted.
constexpr double kNormOperations = 40.0;

// Rows [begin, end) of a tensor, to and from scratch whose rows are `stride` apart.
template <class T>
void load_norm_rows(const Tensor& t, int64_t begin, int64_t end, int64_t V, int64_t stride, T* to) {
  const RowView view = row_view(t);
  while (begin < end) {  // rows of one innermost dimension at a time
    const int64_t n = std::min(end - begin, view.shape.inner - begin % view.shape.inner);
    View rows = view_at(t, view.offset(begin), view.inner, view.column);
    const int64_t together = stride == V ? n : 1;
    for (int64_t i = 0; i < n; i += together) {
      kernels<T>().load(rows, together, V, to);
      std::fill(to + V, to + stride, T(0));
      rows.data = static_cast<char*>(rows.data) + view.inner * size_of(view.type);
      to += together * stride;
    }
    begin += n;
  }
}

template <class T>
void store_norm_rows(const T* from, int64_t begin, int64_t end, int64_t V, int64_t stride, const Tensor& t) {
  const RowView view = row_view(t);
  while (begin < end) {
    const int64_t n = std::min(end - begin, view.shape.inner - begin % view.shape.inner);
    View rows = view_at(t, view.offset(begin), view.inner, view.column);
    const int64_t together = stride == V ? n : 1;
    for (int64_t i = 0; i < n; i += together) {
      kernels<T>().store(from, together, V, rows);
      rows.data = static_cast<char*>(rows.data) + view.inner * size_of(view.type);
      from += together * stride;
    }
    begin += n;
  }
}

// A [V] tensor as a row, or null where it is absent.
template <class T>
T* load_norm_vector(const Tensor& t, int64_t V, Arena* arena, bool fill) {
  if (!present(t)) return nullptr;
  T* row = arena->take<T>(padded(V));
  if (!fill) return row;
  kernels<T>().load(view_at(t, 0, 0, t.stride[0]), 1, V, row);
  std::fill(row + V, row + padded(V), T(0));
  return row;
}

template <class T>
void activate(int32_t activation, const T* u, int64_t count, T* y) {
  activation == FLASH_QLA_ACTIVATION_SILU ? layer_kernels<T>().silu(u, count, y)
                                          : layer_kernels<T>().sigmoid(u, count, y);
}

template <class T>
void activate_backward(int32_t activation, const T* u, int64_t count, T* d) {
  activation == FLASH_QLA_ACTIVATION_SILU ? layer_kernels<T>().silu_backward(u, count, d)
                                          : layer_kernels<T>().sigmoid_backward(u, count, d);
}

}  // namespace flash_qla::cpu
