// 16x16 matrices of fp16 in the registers of one warp, and their product with fp32 sums.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace flash_qla::cuda {

// A 16x16 matrix of fp16: as a left operand, which is a result's form as well; as a right operand (the upper and lower
// eight rows of the left, then of the right eight columns); as fp32 sums.
struct HalfLeft {
  uint32_t x[4];
};
struct HalfRight {
  uint32_t x[4];
};
struct HalfSum {
  float x[8] = {};
};

__device__ __forceinline__ void add_half_product(HalfSum& d, const HalfLeft& a, const HalfRight& b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mma_m16n8k16<__half>(d.x + 4 * half, a.x[0], a.x[1], a.x[2], a.x[3], b.x[2 * half], b.x[2 * half + 1]);
  }
}

}  // namespace flash_qla::cuda
