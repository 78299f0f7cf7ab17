// From the accumulators of K K^T and Q K^T of a chunk to what the UT transform starts from, and to P.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/tile.cuh"

namespace flash_qla::cuda::sm90 {

// -M, M = lower(diag(beta) K K^T), from the accumulator of K K^T into the tile of the UT transform: 16x16 blocks of
// fp16, transposed, tile[column][row]; rounded all alike, so that the inverse is that of one matrix close to M. What
// lies above the diagonal of a diagonal block is not for use. First the blocks that UtTransform::solve_pair() reads,
// and all of warps 0 and 1, which do that next; the rest of warps 2 and 3 meanwhile.
template <bool kFirst>
__device__ __forceinline__ void store_kkt(const float (&kkt)[32], float beta0, float beta1, uint32_t tile,
                                          const FragmentPosition& at) {
#pragma unroll
  for (int b = 0; b < (kFirst ? 4 : 2); ++b) {
    if (kFirst ? b == at.warp || (b == at.warp - 1 && (b == 0 || b == 2)) : at.warp > 1) {
      const float* x = kkt + 8 * b;
      store_matrix_x4_trans(tile + b * 2048 + at.trans_row + at.trans_chunk,
                            pack2<__half>(-beta0 * x[0], -beta0 * x[1]), pack2<__half>(-beta1 * x[2], -beta1 * x[3]),
                            pack2<__half>(-beta0 * x[4], -beta0 * x[5]), pack2<__half>(-beta1 * x[6], -beta1 * x[7]));
    }
  }
}

// The warp's block on the diagonal of P. Above the diagonal by a mask, not by a factor: exponentials may have
// overflowed.
__device__ __forceinline__ void store_diagonal(const uint32_t (&diagonal)[3], uint32_t row_address,
                                               const FragmentPosition& at) {
  const int place = (at.lane >> 2) - 2 * at.q;
  const uint32_t mask = (place >= 0 ? 0xffffu : 0u) | (place > 0 ? 0xffff0000u : 0u);
  store_matrix_x4(row_address + (((2 * at.warp + (at.lane >> 4)) ^ at.swizzle) << 4), diagonal[0] & mask, diagonal[1],
                  0u, diagonal[2] & mask);
}

// Multiplies the lower triangle of a 64x64 accumulator by G and kGateScaleP and stores it as P. x: the three left
// column blocks; y: the warp's block on the diagonal, of which rows 0..7 have nothing in columns 8..15.
// G_ij = row_i * pair_IJ * column_j below the diagonal blocks; in them, the exponential of the difference itself.
template <typename Traits>
__device__ __forceinline__ void store_strong_p(const float* x, const float2 (&y)[3], uint32_t tile, uint32_t gate,
                                               const FragmentPosition& at) {
  using Element = typename Traits::Element;
  const uint32_t row_address = tile + (16 * at.warp + (at.lane & 15)) * 128;
  uint32_t diagonal[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const float sum = load_shared_f1(gate + Traits::kGateSum + 4 * at.row + (i > 0 ? 32 : 0));
    const uint32_t columns = gate + 64 * at.warp + 8 * at.q + (i > 1 ? 32 : 0);
    const float2 column = load_shared_f2(columns + Traits::kGateSum);
    const float2 factor = load_shared_f2(columns + Traits::kGateScaleP);
    diagonal[i] = pack2<Element>(y[i].x * (exp2_approx(sum - column.x) * factor.x),
                                 y[i].y * (exp2_approx(sum - column.y) * factor.y));
  }
  store_diagonal(diagonal, row_address, at);
  const float row0 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row);
  const float row1 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row + 32);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * at.warp + 4 * b);
      const float4 column = load_shared_f4(gate + Traits::kGateColumnP + 80 * at.q + 16 * b);
      const float f0 = row0 * pair, f1 = row1 * pair;
      const float* z = x + 8 * b;
      store_matrix_x4(row_address + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4),
                      pack2<Element>(z[0] * (f0 * column.x), z[1] * (f0 * column.y)),
                      pack2<Element>(z[2] * (f1 * column.x), z[3] * (f1 * column.y)),
                      pack2<Element>(z[4] * (f0 * column.z), z[5] * (f0 * column.w)),
                      pack2<Element>(z[6] * (f1 * column.z), z[7] * (f1 * column.w)));
    }
  }
}

// The same where the decay is mild, with one factor for all.
template <typename Traits>
__device__ __forceinline__ void store_mild_p(const float* x, const float2 (&y)[3], float factor, uint32_t tile,
                                             const FragmentPosition& at) {
  using Element = typename Traits::Element;
  const uint32_t row_address = tile + (16 * at.warp + (at.lane & 15)) * 128;
  uint32_t diagonal[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) diagonal[i] = pack2<Element>(y[i].x * factor, y[i].y * factor);
  store_diagonal(diagonal, row_address, at);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float* z = x + 8 * b;
      store_matrix_x4(row_address + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4),
                      pack2<Element>(z[0] * factor, z[1] * factor), pack2<Element>(z[2] * factor, z[3] * factor),
                      pack2<Element>(z[4] * factor, z[5] * factor), pack2<Element>(z[6] * factor, z[7] * factor));
    }
  }
}

// The warp's block on the diagonal of a 64x64 accumulator.
__device__ __forceinline__ float diagonal_block(const float (&x)[32], int i, int warp) {
  return warp == 0 ? x[i] : warp == 1 ? x[8 + i] : warp == 2 ? x[16 + i] : x[24 + i];
}

}  // namespace flash_qla::cuda::sm90
