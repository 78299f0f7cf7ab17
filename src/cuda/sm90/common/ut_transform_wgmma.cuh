// The UT transform A = (I + M)^-1 of a chunk, M = lower(diag(beta) K K^T), by the four warps of a warpgroup.
#pragma once

#include <cuda_bf16.h>
#include <cstdint>
#include <type_traits>

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/common/packed_half.cuh"
#include "cuda/sm90/common/tile.cuh"

namespace flash_qla::cuda::sm90 {

// -M, M = lower(diag(beta) K K^T), from the accumulator of K K^T into the inverse's tile: 16x16 blocks of fp16,
// transposed, tile[column][row]; rounded all alike, so that the inverse is that of one matrix close to M. What lies
// above the diagonal of a diagonal block is not for use. First what warps 0 and 1 have, and all diagonal blocks, which
// are solved next; the rest of warps 2 and 3, which solve none, meanwhile.
template <bool kFirst>
__device__ __forceinline__ void store_kkt_for_wgmma(const float (&kkt)[32], float beta0, float beta1, uint32_t tile,
                                                    const FragmentPosition& at) {
#pragma unroll
  for (int b = 0; b < (kFirst ? 4 : 3); ++b) {
    if (kFirst ? b == at.warp || (b == 0 && at.warp == 1) : b < at.warp && at.warp > 1) {
      const float* x = kkt + 8 * b;
      store_matrix_x4_trans(tile + b * 2048 + at.trans_row + at.trans_chunk,
                            pack2<__half>(-beta0 * x[0], -beta0 * x[1]), pack2<__half>(-beta1 * x[2], -beta1 * x[3]),
                            pack2<__half>(-beta0 * x[4], -beta0 * x[5]), pack2<__half>(-beta1 * x[6], -beta1 * x[7]));
    }
  }
}

// D = (I + M)^-1 of two diagonal 16x16 blocks by substitution, in the place of -M in the tile: by one warp, a lane owns
// one column. first: the first of the two blocks. In fp32, rounded once at the end, or in pairs of fp16, two rows to an
// instruction: less than half of the instructions, and an error that shows only beside fp16's own roundings.
template <bool kInPairs>
__device__ __forceinline__ void solve_diagonal_blocks(uint32_t tile, int first, int lane) {
  const int column = lane & 15, block = first + (lane >> 4);
  // Row k of the tile is column k of -M: 16-byte pieces 2 block and the next, swizzled by k % 8. The swizzle of all but
  // the lowest bit of that goes into four addresses, the rest into the offsets.
  const uint32_t rows = tile + 16 * block * 128;
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = rows + ((block ^ i) << 5);
  uint32_t x[8];
  float y[16];
  if constexpr (kInPairs) {
    const uint32_t one = column & 1 ? 0x3c000000u : 0x3c00u;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = i == column >> 1 ? one : 0u;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) y[i] = i == column ? 1.0f : 0.0f;
  }
#pragma unroll
  for (int k = 0; k < 15; ++k) {
    const uint32_t row = pairs[(k & 7) >> 1] + k * 128;
    uint4 m[2];
    if (k < 7) m[0] = load_shared_u4(row + 16 * (k & 1));
    m[1] = load_shared_u4(row + 16 * (~k & 1));
    const uint32_t values[8] = {m[0].x, m[0].y, m[0].z, m[0].w, m[1].x, m[1].y, m[1].z, m[1].w};
    if constexpr (kInPairs) {
      const uint32_t known = __byte_perm(x[k >> 1], 0u, k & 1 ? 0x3232 : 0x1010);
#pragma unroll
      for (int i = (k >> 1) + (k & 1); i < 8; ++i) {
        x[i] = fma2(k == 2 * i ? values[i] & 0xffff0000u : values[i], known, x[i]);
      }
    } else {
#pragma unroll
      for (int i = k + 1; i < 16; ++i) {
        const float2 pair = unpack2<__half>(values[i >> 1]);
        y[i] = fmaf(i & 1 ? pair.y : pair.x, y[k], y[i]);
      }
    }
  }
  if constexpr (!kInPairs) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = pack2<__half>(y[2 * i], y[2 * i + 1]);
  }
  __syncwarp();  // D takes the place of what the other lanes have been reading
  const uint32_t address = rows + column * 128 + (((2 * block) ^ (lane & 7)) << 4);
  store_shared_u4(address, make_uint4(x[0], x[1], x[2], x[3]));
  store_shared_u4(address ^ 16, make_uint4(x[4], x[5], x[6], x[7]));
}

// A = (I - X)^-1 D = (I + X + X^2 + X^3) D with X = -D M, -M being what the tile holds below its diagonal blocks, which
// hold D. X^4 = 0, and of X^3 only block (3, 0) is not zero. fp16 operands, fp32 accumulators; the left operands stay
// in registers, X goes back to the tile as a right operand. a: the blocks of columns 0..47 left of the diagonal
// (elsewhere zero); d: the warp's block of D, which is A's, packed. `sync`: a barrier of the warpgroup; `meanwhile` is
// done under the last product.
template <typename Sync, typename Meanwhile>
__device__ __forceinline__ void invert(float (&a)[3][8], uint32_t (&d)[4], uint32_t tile, const FragmentPosition& at,
                                       Sync sync, Meanwhile meanwhile) {
  const uint64_t base = uniform_descriptor(tile);
  auto block = [&](int k, int n) { return wgmma_advance(base, n * 2048 + k * 32); };
  const uint32_t fragment = tile + at.trans_row + at.trans_chunk;
  uint32_t x[3][4];
  load_matrix_x4_trans(fragment + at.warp * 2048, d[0], d[1], d[2], d[3]);
  {
    // X: of the left operand diag(D) a warp holds one block, so the other K steps are zeros to it.
    uint32_t left[3][4];
#pragma unroll
    for (int b = 0; b < 3; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) left[b][i] = b + 1 == at.warp ? d[i] : 0u;
      pin(left[b]);
    }
    wgmma_fence();
    mma_rs_n16_init<__half>(a[0], left[0], block(1, 0));
    mma_rs_n16<__half>(a[0], left[1], block(2, 0));
    mma_rs_n16<__half>(a[0], left[2], block(3, 0));
    mma_rs_n16_init<__half>(a[1], left[1], block(2, 1));
    mma_rs_n16<__half>(a[1], left[2], block(3, 1));
    mma_rs_n16_init<__half>(a[2], left[2], block(3, 2));
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < 3; ++b) {
      pin(a[b]);
      pin(left[b]);
    }
  }
#pragma unroll
  for (int b = 0; b < 3; ++b) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[b][i] = pack2<__half>(a[b][2 * i], a[b][2 * i + 1]);
    pin(x[b]);
  }
  // Other warps may still be reading M here, times zero: of the rows this warp overwrites none but itself has a use.
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) store_matrix_x4_trans(fragment + b * 2048, x[b][0], x[b][1], x[b][2], x[b][3]);
  }
  fence_proxy_async();
  sync();
  float square0[8], square1[8], cube[8];
  wgmma_fence();
  mma_rs_n16_init<__half>(square0, x[1], block(1, 0));
  mma_rs_n16<__half>(square0, x[2], block(2, 0));
  mma_rs_n16_init<__half>(square1, x[2], block(2, 1));
  wgmma_commit();
  wgmma_wait<0>();
  pin(square0);
  pin(square1);
  uint32_t y[3][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[1][i] = pack2<__half>(square1[2 * i], square1[2 * i + 1]);
  pin(y[1]);
  wgmma_fence();
  mma_rs_n16_init<__half>(cube, y[1], block(1, 0));
  wgmma_commit();
  wgmma_wait<0>();
  pin(cube);
  pin(y[1]);
  // The identity of I + X + .. meets D_w only, in the diagonal block: left out here.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[0][i] = add2(pack2<__half>(square0[2 * i] + cube[2 * i], square0[2 * i + 1] + cube[2 * i + 1]), x[0][i]);
    y[1][i] = add2(y[1][i], x[1][i]);
    y[2][i] = x[2][i];
  }
#pragma unroll
  for (int b = 0; b < 3; ++b) pin(y[b]);
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < 3; ++b) mma_rs_n16_init<__half>(a[b], y[b], block(b, b));
  wgmma_commit();
  meanwhile();
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    pin(a[b]);
    pin(y[b]);
  }
}

// Whether bf16's roundings hide those of fp16 pairs (solve_diagonal_blocks()).
template <typename Element>
inline constexpr bool kSolveInPairs = std::is_same_v<Element, __nv_bfloat16>;

}  // namespace flash_qla::cuda::sm90
