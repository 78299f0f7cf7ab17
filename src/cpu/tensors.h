// Views of one head's rows, of one token's states, and zeros for what no sequence covers.
#pragma once

#include <vector>

#include "core/host_tensor.h"
#include "core/problem.h"
#include "cpu/kernels.h"

namespace flash_qla::cpu {

inline View view_at(const Tensor& t, int64_t offset, int64_t row_stride, int64_t col_stride) {
  return {static_cast<char*>(t.data) + offset * size_of(dtype(t)), dtype(t), row_stride, col_stride};
}

// Rows (tokens from `token` on) of head `head` in a [B, T, H, D] tensor.
inline View token_rows(const Tensor& t, int64_t b, int64_t token, int64_t head) {
  return view_at(t, offset_of(t, b, token, head), t.stride[1], t.stride[3]);
}

// State (row, head) of a [rows, H, K, V] or [rows, H, V, K] tensor, seen as [K, V].
inline View state_view(const Tensor& t, bool v_first, int64_t row, int64_t head) {
  const int64_t offset = offset_of(t, row, head);
  return v_first ? view_at(t, offset, t.stride[3], t.stride[2]) : view_at(t, offset, t.stride[2], t.stride[3]);
}

inline View transposed(const View& v) { return {v.data, v.type, v.col_stride, v.row_stride}; }

// Zeroes rows [begin, end) of dimension `dim` of a tensor; absent tensors are left alone.
void fill_zero(const Tensor& t, int dim, int64_t begin, int64_t end);

// Zeroes the tokens of a [B, T, ...] output that belong to no sequence.
void zero_outside(const Tensor& t, const std::vector<Sequence>& sequences, const Problem& p);

// Zeroes one sequence's tokens of one head in a [B, T, H, ...] output; absent tensors are left alone.
void zero_head(const Tensor& t, const Sequence& s, int64_t head);

// The sequences' numbers, longest first, so that the last tasks to start are short. The order has no bearing on
// results.
std::vector<int64_t> longest_first(const std::vector<Sequence>& sequences);

}  // namespace flash_qla::cpu
