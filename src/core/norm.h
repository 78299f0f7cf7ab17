// The gated norm's calls, validated.
#pragma once

#include "core/problem.h"
#include "core/registry.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

// Sizes of one call, forward or backward.
struct NormProblem {
  int64_t rows = 0, V = 0;
  DType dtype = DType::kFloat32;  // of x
};

using NormPath = Path<flash_qla_norm_gated_arguments, NormProblem>;
using NormBackwardPath = Path<flash_qla_norm_gated_backward_arguments, NormProblem>;

const std::vector<const NormPath*>& norm_gated_paths();
const std::vector<const NormBackwardPath*>& norm_gated_backward_paths();

// The rows of x, z, y and their like: extents of the up to three dimensions in front of V, the outer ones 1 where there
// are fewer.
struct RowShape {
  int64_t outer = 1, middle = 1, inner = 1;
};
RowShape row_shape(const Tensor& x);

// One of these tensors by row: element 0 of row i lies at offset(i), the next ones `column` apart.
struct RowView {
  void* data;
  DType type;
  int64_t outer, middle, inner, column;
  RowShape shape;
  int64_t offset(int64_t row) const {
    const int64_t i = row % shape.inner, rest = row / shape.inner;
    return rest / shape.middle * outer + rest % shape.middle * middle + i * inner;
  }
};
RowView row_view(const Tensor& t);

}  // namespace flash_qla
