// Exponential, reciprocal and root by one instruction of the special function unit each, about 2^-22 of their value
// off; subnormal numbers count as zero.
#pragma once

#include <cuda_runtime.h>

namespace flash_qla::cuda {

// 2^x
__device__ __forceinline__ float approx_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / sqrt(x)
__device__ __forceinline__ float approx_rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x
__device__ __forceinline__ float approx_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_qla::cuda
