// The inverse of a chunk's unit lower triangular matrix, in fp32, by forward substitution: keys of any length are safe,
// and nothing is divided by.
#pragma once

#include <cuda_runtime.h>

namespace flash_qla::cuda::sm80 {

// A lower triangular [64 x 64] matrix in shared memory, by blocks of 16x16, those above the diagonal left out. A block
// takes 16 floats more than it has: rows of neighbouring blocks lie in different banks.
inline constexpr int kSide = 16, kSides = 4, kSideBlock = kSide * kSide + kSide;
inline constexpr int kLowerFloats = kSides * (kSides + 1) / 2 * kSideBlock;

__device__ __forceinline__ int lower_block(int i, int j) { return (i * (i + 1) / 2 + j) * kSideBlock; }
// Element (row, column), row >= column.
__device__ __forceinline__ int lower_index(int row, int column) {
  return lower_block(row / kSide, column / kSide) + row % kSide * kSide + column % kSide;
}

// Columns 16 first to 16 first + 31 of X = (I + diag(left) strict_lower(L) diag(right))^-1, rows of blocks [first,
// last). By one warp, a lane a column. left, right: of 64 rows, in shared memory on 16-byte boundaries.
__device__ inline void substitute(const float* lower, const float* left, const float* right, float* x, int first,
                                  int last, int lane) {
  const int block = first + lane / kSide, column = lane % kSide;  // the lane's block of columns
  for (int I = first; I < last; ++I) {
    float sum[kSide];  // rows of L diag(right) X, as far as X is known
#pragma unroll
    for (int i = 0; i < kSide; ++i) sum[i] = 0.f;
    for (int J = first; J < I; ++J) {
      float y[kSide];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        y[j] = J < block ? 0.f : right[J * kSide + j] * x[lower_block(J, block) + j * kSide + column];
      }
      const float* rows = lower + lower_block(I, J);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; j += 4) {
          const float4 l = *reinterpret_cast<const float4*>(rows + i * kSide + j);
          sum[i] = fmaf(l.x, y[j], fmaf(l.y, y[j + 1], fmaf(l.z, y[j + 2], fmaf(l.w, y[j + 3], sum[i]))));
        }
      }
    }
    const float* rows = lower + lower_block(I, I);
    float y[kSide];
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < i; ++j) sum[i] = fmaf(rows[i * kSide + j], y[j], sum[i]);
      const float one = I == block && i == column ? 1.f : 0.f;
      const float value = fmaf(-left[I * kSide + i], sum[i], one);
      y[i] = right[I * kSide + i] * value;
      if (I >= block) x[lower_block(I, block) + i * kSide + column] = value;
    }
    __syncwarp();
  }
}

}  // namespace flash_qla::cuda::sm80
