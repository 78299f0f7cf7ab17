// Counterpart of src/cuda/layer/approx.cuh: exact up to the rounding of the host's functions.
#pragma once

#include <cmath>

#include "cuda_runtime.h"

namespace flash_qla::cuda {

inline float approx_exp2(float x) {
  const float y = std::exp2(x);
  return std::fabs(y) < 1.17549435e-38f ? 0.0f : y;
}

inline float approx_rsqrt(float x) { return 1.0f / std::sqrt(x); }

inline float approx_reciprocal(float x) {
  const float y = 1.0f / x;
  return std::fabs(y) < 1.17549435e-38f ? 0.0f : y;
}

}  // namespace flash_qla::cuda
