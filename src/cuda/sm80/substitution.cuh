// The inverse of a chunk's unit lower triangular matrix, in fp32, by forward substitution: keys of any length are safe,
// and nothing is divided by.
#pragma once

#include <cuda_runtime.h>

namespace flash_qla::cuda::sm80 {

// A lower triangular [64 x 64] matrix in shared memory, by blocks of 16x16, those above the diagonal left out. A block
// takes 16 floats more than it has: rows of neighbouring blocks lie in different banks.
inline constexpr int kSide = 16, kSides = 4, kSideBlock = kSide * kSide + kSide;
// Blocks within the two steps come first; without those between them a matrix is shorter. Two matrices one behind the
// other, too, lie half of the banks apart.
inline constexpr int kStepBlocks = 3;
constexpr int lower_floats(bool whole) { return (whole ? 10 : 2 * kStepBlocks) * kSideBlock + kSide; }

__device__ __forceinline__ int lower_block(int i, int j) {
  return (i / 2 == j / 2 ? i / 2 * kStepBlocks + i % 2 + j % 2 : 2 * kStepBlocks + (i - 2) * 2 + j) * kSideBlock;
}
// Element (row, column), row >= column.
__device__ __forceinline__ int lower_index(int row, int column) {
  return lower_block(row / kSide, column / kSide) + row % kSide * kSide + column % kSide;
}

// Columns of block `block` of the inverse of I + L B (kBetaFirst: of I + B L), down to the rows of block last - 1, with
// L = strict_lower(lower) and B = diag(beta). By 16 lanes, each a column, of which it reads back what it has written;
// the other 16 lanes of the warp do it for another B. `beta`: of 64 rows, in shared memory on a 16-byte boundary.
template <bool kBetaFirst>
__device__ void substitute(const float* lower, const float* beta, float* x, int block, int last, int column) {
  struct alignas(16) Four {
    float x[4];
  };
  const auto four = [](const float* at) { return *reinterpret_cast<const Four*>(at); };
#pragma unroll 1
  for (int I = block; I < last; ++I) {
    float sum[kSide];  // rows of L B X (of L X), as far as X is known
#pragma unroll
    for (int i = 0; i < kSide; ++i) sum[i] = 0.f;
    float y[kSide];  // rows of B X (of X)
#pragma unroll 1
    for (int J = block; J < I; ++J) {
      const float* known = x + lower_block(J, block) + column;
#pragma unroll
      for (int j = 0; j < kSide; j += 4) {
        const Four b = kBetaFirst ? Four{1.f, 1.f, 1.f, 1.f} : four(beta + J * kSide + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[j + e] = b.x[e] * known[(j + e) * kSide];
      }
      const float* rows = lower + lower_block(I, J);
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
#pragma unroll
        for (int j = 0; j < kSide; j += 4) {
          const Four l = four(rows + i * kSide + j);
#pragma unroll
          for (int e = 3; e >= 0; --e) sum[i] = fmaf(l.x[e], y[j + e], sum[i]);
        }
      }
    }
    const float* rows = lower + lower_block(I, I);
    float* to = x + lower_block(I, block) + column;
#pragma unroll
    for (int i = 0; i < kSide; ++i) {
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const Four l = four(rows + i * kSide + j);
#pragma unroll
        for (int e = 0; e < 4 && j + e < i; ++e) sum[i] = fmaf(l.x[e], y[j + e], sum[i]);
      }
      const float one = I == block && i == column ? 1.f : 0.f, b = beta[I * kSide + i];
      const float value = kBetaFirst ? fmaf(-b, sum[i], one) : one - sum[i];
      y[i] = kBetaFirst ? value : b * value;
      to[i * kSide] = value;
    }
  }
}

}  // namespace flash_qla::cuda::sm80
