// The auxiliary warpgroups: the gates, A_g and P of a chunk, and the copy engine.
#pragma once

#include "../../common/fragment.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "../../common/wgmma.cuh"
#include "chunk_stream.cuh"
#include "lane_place.cuh"

namespace flash_qla::cuda::sm90 {

inline constexpr float kLog2e = 1.4426950408889634f;

struct NoSums {
  __device__ void operator()(float, float) const {}
};

// beta over what A_g's diagonal has of it. 1 where that is nothing, too large or no number.
__device__ __forceinline__ float exactness(float beta, float rounded) {
  const float ratio = __fdividef(beta, rounded);
  return fabsf(ratio - 1.0f) < 0.5f ? ratio : 1.0f;
}

// The gate vectors of one chunk by one warp; lane l holds tokens 2l and 2l + 1, their g, and their beta as load_beta()
// gets it. Every exponent is a difference, at most 0 for g <= 0, but for the bounded ones of a mild chunk. Vectors that
// the state groups read go to `state_gate`, the others to `gate`. keep_sums() gets the sums of g up to both tokens.
// `few`: has_few_tokens().
// Where the chunk is not mild most of V' is the token's own beta_t W_t, for which A_g's diagonal has beta_t rounded.
// The factors that V' meets next, of rows in the state's update and of columns of P, are free to undo it.
template <typename Traits, typename LoadBeta, typename KeepSums = NoSums>
__device__ __forceinline__ void make_gates(const ChunkForwardArgs& args, float2 g, LoadBeta load_beta, bool few,
                                           uint32_t gate, uint32_t state_gate, int lane, KeepSums keep_sums = {}) {
  const int block = lane >> 3;
  // Sums within the lane's block of 16 tokens.
  float cx = g.x < kGateFloor ? kGateFloor : g.x;  // keeps NaN
  float cy = cx + (g.y < kGateFloor ? kGateFloor : g.y);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, cy, step, 8);
    if ((lane & 7) >= step) {
      cx += below;
      cy += below;
    }
  }
  // Sums up to the end of each block.
  const float end0 = __shfl_sync(0xffffffffu, cy, 7);
  const float end1 = end0 + __shfl_sync(0xffffffffu, cy, 15);
  const float end2 = end1 + __shfl_sync(0xffffffffu, cy, 23);
  const float end3 = end2 + __shfl_sync(0xffffffffu, cy, 31);
  const float before = block == 0 ? 0.0f : block == 1 ? end0 : block == 2 ? end1 : end2;
  const float end = block == 0 ? end0 : block == 1 ? end1 : block == 2 ? end2 : end3;
  cx += before;
  cy += before;
  keep_sums(cx, cy);
  using Element = typename Traits::Element;
  const bool mild =
      __all_sync(0xffffffffu, fabsf(end3 - cx) <= kMildDecay<Element> && fabsf(end3 - cy) <= kMildDecay<Element> &&
                                  (!kWideExponents<Element> || fabsf(end3) <= kMildDecay<Element>) && !few);
  const uint32_t place = ((lane & 3) * 20 + (lane >> 2) * 2) * 4;
  const uint32_t permuted = gate + place, state_permuted = state_gate + place;
  const uint32_t natural = gate + 8 * lane;
  const float2 beta = load_beta();
  const float gamma_x = exp2_approx(cx * kLog2e), gamma_y = exp2_approx(cy * kLog2e);
  const float rest_x = exp2_approx((end3 - cx) * kLog2e), rest_y = exp2_approx((end3 - cy) * kLog2e);
  store_shared_f2(state_permuted + Traits::kGateDecay, gamma_x, gamma_y);
  const float factor_p = kWideExponents<Element> ? exp2_approx(-end3 * kLog2e) : 1.0f;
  if (lane == 0) store_shared_f1(state_gate + Traits::kGateMild, mild ? factor_p : 0.0f);
  if (mild) {
    const float out_x = kWideExponents<Element> ? gamma_x : exp2_approx((cx - end3) * kLog2e);
    const float out_y = kWideExponents<Element> ? gamma_y : exp2_approx((cy - end3) * kLog2e);
    store_shared_f2(state_permuted + Traits::kGateScaled, out_x * args.scale, out_y * args.scale);
    if constexpr (kKeepsA<Traits>) {
      store_shared_f2(permuted + Traits::kGateFactor, rest_x * beta.x, rest_y * beta.y);
    } else {
      store_shared_f2(permuted + Traits::kGateColumnA, rest_x * beta.x, rest_y * beta.y);
    }
    return;
  }
  if constexpr (kKeepsA<Traits>) store_shared_f2(permuted + Traits::kGateFactor, 1.0f, 1.0f);
  store_shared_f2(state_permuted + Traits::kGateScaled, 1.0f, 1.0f);
  const float2 rounded = unpack2<Element>(pack2<Element>(beta.x, beta.y));
  const float exact_x = exactness(beta.x, rounded.x), exact_y = exactness(beta.y, rounded.y);
  const float scale_x = args.scale * exact_x, scale_y = args.scale * exact_y;
  store_shared_f2(state_permuted + Traits::kGateRest, rest_x * exact_x, rest_y * exact_y);
  store_shared_f2(natural + Traits::kGateSum, cx * kLog2e, cy * kLog2e);
  store_shared_f2(natural + Traits::kGateScaleP, scale_x, scale_y);
  const float column_x = exp2_approx((end - cx) * kLog2e), column_y = exp2_approx((end - cy) * kLog2e);
  store_shared_f2(permuted + Traits::kGateColumnA, column_x * beta.x, column_y * beta.y);
  store_shared_f2(permuted + Traits::kGateColumnP, column_x * scale_x, column_y * scale_y);
  store_shared_f2(natural + Traits::kGateRow, exp2_approx((cx - before) * kLog2e), exp2_approx((cy - before) * kLog2e));
  const int i = (lane >> 2) & 3, j = lane & 3;
  const float row_end = i == 1 ? end0 : i == 2 ? end1 : end2;
  const float column_end = j == 0 ? end0 : j == 1 ? end1 : end2;
  if (lane < 16)
    store_shared_f1(gate + Traits::kGatePair + 4 * lane, i > j ? exp2_approx((row_end - column_end) * kLog2e) : 0.0f);
}

// Zeros rows valid..63 of `halves` 64x64 swizzled half tiles, so that what follows the sequence in memory, Inf and NaN
// included, meets no product. By `threads` threads; the caller synchronises.
__device__ __forceinline__ void clear_tail_rows(uint32_t tile, int halves, int valid, int thread, int threads = 128) {
  const int per_half = (kChunk - valid) * 8;
#pragma unroll 1
  for (int i = thread; i < per_half * halves; i += threads) {
    const int half = i >= per_half;
    store_shared_u4(tile + half * kChunk * 128 + valid * 128 + (i - half * per_half) * 16, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
}

// Of the blocks of A_g right of the diagonal the state groups read two; the inverse's transposed operands were there.
__device__ __forceinline__ void clear_right_of_diagonal(uint32_t row_address, const LanePlace& at) {
  if (!(at.warp & 1)) {
    store_matrix_x4(row_address + (((2 * at.warp + 2 + (at.lane >> 4)) ^ at.swizzle) << 4), 0u, 0u, 0u, 0u);
  }
}

// Multiplies the lower triangle of a 64x64 accumulator by G and beta (A_g) or kGateScaleP (P) and stores it as a wgmma
// operand. x: the three left column blocks; y: the warp's block on the diagonal, of which rows 0..7 have nothing in
// columns 8..15. G_ij = row_i * pair_IJ * column_j below the diagonal blocks; in them, the exponential of the
// difference itself.
template <typename Traits, bool kIsA>
__device__ __forceinline__ void store_gated(const float* x, const float2 (&y)[3], uint32_t tile, uint32_t gate,
                                            const LanePlace& at) {
  using Element = typename Traits::Element;
  const uint32_t row_address = tile + (16 * at.warp + (at.lane & 15)) * 128;
  uint32_t diagonal[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const float sum = load_shared_f1(gate + Traits::kGateSum + 4 * at.row + (i > 0 ? 32 : 0));
    const uint32_t columns = gate + 64 * at.warp + 8 * at.q + (i > 1 ? 32 : 0);
    const float2 column = load_shared_f2(columns + Traits::kGateSum);
    const float2 factor = load_shared_f2(columns + (kIsA ? Traits::kGateBeta : Traits::kGateScaleP));
    diagonal[i] = pack2<Element>(y[i].x * (exp2_approx(sum - column.x) * factor.x),
                                 y[i].y * (exp2_approx(sum - column.y) * factor.y));
  }
  // Above the diagonal by a mask, not by a factor: the exponentials may have overflowed.
  const int place = (at.lane >> 2) - 2 * at.q;
  const uint32_t mask = (place >= 0 ? 0xffffu : 0u) | (place > 0 ? 0xffff0000u : 0u);
  store_matrix_x4(row_address + (((2 * at.warp + (at.lane >> 4)) ^ at.swizzle) << 4), diagonal[0] & mask, diagonal[1],
                  0u, diagonal[2] & mask);
  if constexpr (kIsA) clear_right_of_diagonal(row_address, at);
  const float row0 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row);
  const float row1 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row + 32);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * at.warp + 4 * b);
      const float4 column =
          load_shared_f4(gate + (kIsA ? Traits::kGateColumnA : Traits::kGateColumnP) + 80 * at.q + 16 * b);
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

// The same where the decay is mild. A_g'': columns times those of kGateColumnA, of which `own` has the diagonal
// block's. P'': rows times own.x and own.y.
template <typename Traits, bool kIsA>
__device__ __forceinline__ void store_mild(const float* x, const float2 (&y)[3], float4 own, uint32_t tile,
                                           uint32_t gate, const LanePlace& at) {
  using Element = typename Traits::Element;
  const uint32_t row_address = tile + (16 * at.warp + (at.lane & 15)) * 128;
  const float2 f0 = kIsA ? make_float2(own.x, own.y) : make_float2(own.x, own.x);
  const float2 f1 = kIsA ? f0 : make_float2(own.y, own.y);
  const float2 f2 = kIsA ? make_float2(own.z, own.w) : f1;
  uint32_t diagonal[3] = {pack2<Element>(y[0].x * f0.x, y[0].y * f0.y), pack2<Element>(y[1].x * f1.x, y[1].y * f1.y),
                          pack2<Element>(y[2].x * f2.x, y[2].y * f2.y)};
  if constexpr (kIsA) {
    clear_right_of_diagonal(row_address, at);  // in the block itself D has zeros above its diagonal
  } else {
    const int place = (at.lane >> 2) - 2 * at.q;
    const uint32_t mask = (place >= 0 ? 0xffffu : 0u) | (place > 0 ? 0xffff0000u : 0u);
    diagonal[0] &= mask;
    diagonal[2] &= mask;
  }
  store_matrix_x4(row_address + (((2 * at.warp + (at.lane >> 4)) ^ at.swizzle) << 4), diagonal[0], diagonal[1], 0u,
                  diagonal[2]);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float4 column = kIsA ? load_shared_f4(gate + Traits::kGateColumnA + 80 * at.q + 16 * b) : own;
      const float2 g0 = kIsA ? make_float2(column.x, column.y) : f0, g1 = kIsA ? g0 : f1;
      const float2 g2 = kIsA ? make_float2(column.z, column.w) : f0, g3 = kIsA ? g2 : f1;
      const float* z = x + 8 * b;
      store_matrix_x4(row_address + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4),
                      pack2<Element>(z[0] * g0.x, z[1] * g0.y), pack2<Element>(z[2] * g1.x, z[3] * g1.y),
                      pack2<Element>(z[4] * g2.x, z[5] * g2.y), pack2<Element>(z[6] * g3.x, z[7] * g3.y));
    }
  }
}

// The warp's block on the diagonal of a 64x64 accumulator.
__device__ __forceinline__ float diagonal_block(const float (&x)[32], int i, int warp) {
  return warp == 0 ? x[i] : warp == 1 ? x[8 + i] : warp == 2 ? x[16 + i] : x[24 + i];
}

// -M, M = lower(diag(beta) K K^T), from the accumulator of K K^T into the inverse's tile: 16x16 blocks of fp16,
// transposed, tile[column][row]; rounded all alike, so that the inverse is that of one matrix close to M. What lies
// above the diagonal of a diagonal block is not for use. First what warps 0 and 1 have, and all diagonal blocks, which
// are solved next; the rest of warps 2 and 3, which solve none, meanwhile.
template <bool kFirst>
__device__ __forceinline__ void store_kkt(const float (&kkt)[32], float beta0, float beta1, uint32_t tile,
                                          const LanePlace& at) {
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

// a + b and a * b + c of packed fp16 pairs, each rounded once.
__device__ __forceinline__ uint32_t add2(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
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

// The descriptor of a tile whose address all lanes of the warp have, in a form that the compiler knows to be uniform:
// what is computed from it needs no vector registers, and no moves to uniform ones before each wgmma.
__device__ __forceinline__ uint64_t uniform_descriptor(uint32_t tile, uint32_t leading_bytes = 16) {
  const uint64_t descriptor = wgmma_descriptor(tile, leading_bytes);
  const uint32_t low = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(descriptor));
  return (descriptor & 0xffffffff00000000u) | low;
}

// A = (I - X)^-1 D = (I + X + X^2 + X^3) D with X = -D M, -M being what the tile holds below its diagonal blocks, which
// hold D. X^4 = 0, and of X^3 only block (3, 0) is not zero. fp16 operands, fp32 accumulators; the left operands stay
// in registers, X goes back to the tile as a right operand. a: the blocks of columns 0..47 left of the diagonal
// (elsewhere zero); d: the warp's block of D, which is A's, packed. `sync`: a barrier of the warpgroup; `meanwhile` is
// done under the last product.
template <typename Sync, typename Meanwhile>
__device__ __forceinline__ void invert(float (&a)[3][8], uint32_t (&d)[4], uint32_t tile, const LanePlace& at,
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

// Starts D = A B^T of two [64][128] tiles.
template <typename T>
__device__ __forceinline__ void start_product(float (&d)[32], uint64_t a, uint64_t b) {
  wgmma_fence();
  mma_ss_n64_init<T>(d, a, b);
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const uint32_t offset = (i >> 2) * kChunk * 128 + (i & 3) * 32;
    mma_ss_n64<T>(d, wgmma_advance_uniform(a, offset), wgmma_advance_uniform(b, offset));
  }
  wgmma_commit();
}

// Whether bf16's roundings hide those of fp16 pairs (solve_diagonal_blocks()).
template <typename Element>
inline constexpr bool kSolveInPairs = std::is_same_v<Element, __nv_bfloat16>;

// Where the auxiliary roles find a chunk's record and stages.
template <typename Traits>
struct ChunkPlaces {
  // Hides a number from the compiler, so that addresses made from it are recomputed, not kept: registers are short
  // here.
  template <typename Number>
  static __device__ Number opaque(Number value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ const ChunkRecord& record(uint32_t m) const {
    return reinterpret_cast<const ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m % Traits::kChunkRing];
  }
  __device__ uint32_t stage_k(uint32_t m) const {
    return smem() + Traits::kSmemK + m % Traits::kStagesK * Traits::kBytesK;
  }
  __device__ uint32_t stage_q(uint32_t m) const {
    return smem() + Traits::kSmemQ + m % Traits::kStagesQ * Traits::kBytesK;
  }
  __device__ uint32_t stage_v(uint32_t m) const {
    return smem() + Traits::kSmemV + m % Traits::kStagesV * Traits::kBytesV;
  }
};

template <typename Traits>
struct AuxRole : ChunkPlaces<Traits> {
  using Element = typename Traits::Element;
  using Places = ChunkPlaces<Traits>;
  using Places::opaque, Places::record, Places::stage_k, Places::stage_q, Places::stage_v;
  const ChunkForwardKernelParams& p;
  int group;   // 0 or 1: the parity of its chunks
  int thread;  // 0..127

  __device__ int opaque_thread() const { return opaque(thread); }

  __device__ uint32_t stage_gate(uint32_t m) const {
    return smem() + Traits::kSmemGate + opaque(m) % Traits::kStagesGate * Traits::kBytesGate;
  }
  __device__ uint32_t tile_a(uint32_t m) const {
    return smem() + Traits::kSmemA + opaque(m) % Traits::kStagesA * Traits::kBytesMatrix;
  }
  __device__ uint32_t full_p(uint32_t m) const { return smem() + Traits::kFullP + 8 * (opaque(m) & 1); }
  __device__ void sync(uint32_t m) const { named_barrier_sync(1 + (opaque(m) & 1), 128); }

  // The tensor map of Q, K, V or O. Where the parameters lie is asked of shared memory: the compiler would keep, and
  // spill, the address.
  __device__ const CUtensorMap* map(int i) const {
    uint64_t maps;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(maps) : "r"(smem() + Traits::kMaps));
    return reinterpret_cast<const CUtensorMap*>(maps) + i;
  }

  // K, or Q, of a chunk; by one thread each.
  __device__ void load_key_or_query(uint32_t m, bool query) const {
    const ChunkRecord& c = record(m);
    if (c.valid < 0) return;
    const uint32_t barrier =
        smem() + (query ? Traits::kFullQ + 8 * (m % Traits::kBarriersQ) : Traits::kFullK + 8 * (m % Traits::kStagesK));
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(query ? stage_q(m) : stage_k(m), map(query ? 0 : 1), barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_v(uint32_t m, uint32_t barrier) const {
    const ChunkRecord& c = record(m);
    mbarrier_arrive_expect(barrier, Traits::kBytesV);
    tma_load_4d(stage_v(m), map(2), barrier, 0, c.row, c.half, c.head);
  }

  // V into the stage that O of chunk m - 3 has left, by the thread that sent it, ahead of A_g: V comes late otherwise.
  __device__ void fetch_v(uint32_t m) const {
    if (opaque_thread() != kCopyThread) return;
    m = opaque(m);
    if (m == 2) wait_o(m);  // the state groups' first O, which is none, goes to this stage
    tma_store_wait_read();
    load_v(m, record(m).valid == kChunk ? full_p(m) : smem() + Traits::kTailV + 8 * (opaque(m) & 1));
  }

  // O of chunk m from its V stage to global memory, by the group of chunk m + 3; at a sequence's end: rows by hand.
  __device__ void store_o_rows(uint32_t m) const {
    const ChunkRecord& c = record(m);
    constexpr int kPieces = Traits::kDv / 8;
    Element* out =
        static_cast<Element*>(p.args.o) + c.row * p.args.o_token_stride + c.head * p.args.o_head_stride + c.half * 64;
    for (int i = opaque_thread(); i < c.valid * kPieces; i += 128) {
      const int row = i / kPieces, piece = i % kPieces;
      const uint4 value =
          load_shared_u4(stage_v(m) + (piece >> 3) * Traits::kHalf + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
      *reinterpret_cast<uint4*>(out + row * p.args.o_token_stride + piece * 8) = value;
    }
    sync(m + 3);
  }
  // ... and of a full chunk, by one thread.
  __device__ void store_o(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid != kChunk || (c.flags & kSilentChunk)) return;
    fence_proxy_async();
    tma_store_4d(map(3), stage_v(m), 0, c.row, c.half, c.head);
    tma_store_commit();
  }

  // Until O of chunk m - 3 is in its stage.
  __device__ void wait_o(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullO + 8 * (opaque(m) & 1), (opaque(m) - 2) >> 1 & 1);
  }
  // The thread that sends O and then fetches V into the same stage.
  static constexpr int kCopyThread = 64;
  static constexpr int kListThread = 0;  // of group 0: writes the records, once its warp has solved its blocks

  // Under the substitution: O of chunk m - 3, which has `valid` rows, on its way.
  __device__ void send_o(uint32_t m, int valid) const {
    if (m < 3) return;
    if (valid < kChunk) {
      wait_o(m);
      store_o_rows(m - 3);
    } else if (opaque_thread() == kCopyThread) {
      wait_o(m);
      store_o(m - 3);
    }
  }

  // Until chunk m - 2 is done, if there is one.
  __device__ void wait_done(uint32_t m) const {
    if (m >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (opaque(m) & 1), (m - 2) >> 1 & 1);
  }
  // K and Q into the stages of chunk m - 2, by the warps that have the least to do with A_g.
  __device__ void pass_stages_on(uint32_t m) const {
    const int number = opaque_thread();
    if (number == 0 || number == 32) {
      wait_done(m);
      load_key_or_query(number == 0 ? m + 2 : m + 1, number != 0);
    }
  }

  // g and beta of one of the first chunks on their way; those of the others a state group fetches.
  __device__ void fetch_gates(uint32_t m) const {
    if (record(m).valid >= 0)
      load_gates<Traits>(p.args, record(m), stage_gate(m), smem() + Traits::kFullRaw + 8 * m, opaque_thread());
  }

  // Everything the state groups need for chunk m. Waits for the end of chunk m - 2 in the middle: until then only
  // memory of its own.
  __device__ void prepare(uint32_t m) {
    // K K^T, and the gates while it runs; its blocks into the inverse's workspace; the inverse.
    mbarrier_wait(smem() + Traits::kFullK + 8 * (m % Traits::kStagesK), m / Traits::kStagesK & 1);
    if (record(m).valid < kChunk) {
      clear_tail_rows(stage_k(m), 2, record(m).valid, opaque_thread());
      sync(m);
    }
    {
      float kkt[32];
      const uint64_t k_rows = uniform_descriptor(stage_k(m));
      start_product<Element>(kkt, k_rows, k_rows);
      mbarrier_wait(smem() + Traits::kFullRaw + 8 * (opaque(m) % Traits::kStagesGate), m / Traits::kStagesGate & 1);
      const float beta0 = load_shared_f1(stage_gate(m) + Traits::kGateBeta + 4 * lane_place(opaque_thread()).row);
      const float beta1 = load_shared_f1(stage_gate(m) + Traits::kGateBeta + 4 * lane_place(opaque_thread()).row + 32);
      const int valid_o = record(m - 3).valid;  // for m < 3 of no chunk, and not used
      wgmma_wait<0>();
      pin(kkt);
      store_kkt<true>(kkt, beta0, beta1, tile_a(m), lane_place(opaque_thread()));
      sync(m);  // the diagonal blocks of M are there
      // Two warps solve them, then one of these writes the chunk list; of the others, which store the rest of M, one
      // sends O, one makes the gates.
      if (opaque_thread() < 64) {
        solve_diagonal_blocks<kSolveInPairs<Element>>(tile_a(m), opaque_thread() >> 4 & 2, opaque_thread() & 31);
      } else {
        store_kkt<false>(kkt, beta0, beta1, tile_a(m), lane_place(opaque_thread()));
        if (opaque_thread() >= 96) {
          const uint32_t gate = stage_gate(m), place = 8 * (opaque_thread() & 31);
          make_gates<Traits>(
              p.args, load_shared_f2(gate + Traits::kGateRaw + place),
              [&] { return load_shared_f2(gate + Traits::kGateBeta + place); }, has_few_tokens<Traits>(record(m)), gate,
              gate, opaque_thread() & 31);
        }
      }
      send_o(m, valid_o);
      if (opaque_thread() == kListThread && opaque(m) % 2 == 0) {
#pragma unroll 1
        for (uint32_t ahead = 4; ahead < 6; ++ahead) produce_chunk<Traits>(p, m + ahead);
      }
    }
    __syncwarp();
    fence_proxy_async();
    sync(m);  // D is there, and the gates
    {
      float a[3][8];
      uint32_t d[4];
      float4 own;
      float mild;
      auto load_factors = [&] {
        m = __shfl_sync(0xffffffffu, m, 0);  // lest the tile's address be kept, and spilled, all through the inverse
        mild = load_shared_f1(stage_gate(m) + Traits::kGateMild);
        const LanePlace at = lane_place(opaque_thread());
        own = load_shared_f4(stage_gate(m) + Traits::kGateColumnA + 80 * at.q + 16 * at.warp);
      };
      invert(a, d, tile_a(m), lane_place(opaque_thread()), [&] { sync(m); }, load_factors);
      m = opaque(m);
      sync(m);  // the inverse has been read: A_g takes its tile
      fetch_v(m);
      if (__any_sync(0xffffffffu, mild != 0.0f)) {
        const float2 diagonal[3] = {unpack2<__half>(d[0]), unpack2<__half>(d[1]), unpack2<__half>(d[3])};
        store_mild<Traits, true>(a[0], diagonal, own, tile_a(m), stage_gate(m), lane_place(opaque_thread()));
      } else {
        const float2 diagonal[3] = {unpack2<__half>(d[0]), unpack2<__half>(d[1]), unpack2<__half>(d[3])};
        store_gated<Traits, true>(a[0], diagonal, tile_a(m), stage_gate(m), lane_place(opaque_thread()));
      }
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_warp(smem() + Traits::kFullA + 8 * (m % Traits::kStagesA), opaque_thread() & 31);
    m = opaque(m);
    pass_stages_on(m);

    // Q K^T and P.
    mbarrier_wait(smem() + Traits::kFullQ + 8 * (m % Traits::kBarriersQ), m / Traits::kBarriersQ & 1);
    float qkt[32];
    start_product<Element>(qkt, uniform_descriptor(stage_q(m)), uniform_descriptor(stage_k(m)));
    m = opaque(m);
    // Up to here memory of this group's own. With chunk m - 2 done its stages and P's tile are free.
    wait_done(m);
    const float mild = load_shared_f1(stage_gate(m) + Traits::kGateMild);
    wgmma_wait<0>();
    pin(qkt);
    {
      const LanePlace at = lane_place(opaque_thread());
      float2 diagonal[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int first = i == 2 ? 6 : 2 * i;
        diagonal[i] = make_float2(diagonal_block(qkt, first, at.warp), diagonal_block(qkt, first + 1, at.warp));
      }
      const uint32_t tile = smem() + Traits::kSmemP + (opaque(m) & 1) * Traits::kBytesMatrix;
      if (__any_sync(0xffffffffu, mild != 0.0f)) {
        store_mild<Traits, false>(qkt, diagonal, make_float4(mild, mild, mild, mild), tile, stage_gate(m), at);
      } else {
        store_gated<Traits, false>(qkt, diagonal, tile, stage_gate(m), at);
      }
    }
    fence_proxy_async();
    if (record(m).valid < kChunk) clear_tail_v(m, record(m).valid);
    __syncwarp();
    mbarrier_arrive_warp(full_p(m), opaque_thread() & 31);
  }

  // At a sequence's end V comes through a barrier of this group's own, and is passed on once its tail is cleared.
  __device__ void clear_tail_v(uint32_t m, int valid) {
    uint32_t& tails = reinterpret_cast<uint32_t*>(shared_memory() + Traits::kTailCount)[opaque(m) & 1];
    mbarrier_wait(smem() + Traits::kTailV + 8 * (opaque(m) & 1), tails & 1);
    clear_tail_rows(stage_v(m), Traits::kStateGroups, valid, opaque_thread());
    sync(m);
    if (opaque_thread() == 0) {
      ++tails;
      mbarrier_arrive(full_p(m));
    }
  }

  __device__ void run() {
    if (opaque_thread() == 0) {
      load_key_or_query(group, false);
      if (group == 0) load_key_or_query(0, true);
    }
    fetch_gates(group);
    if (group == 0) fetch_gates(2);
    uint32_t m = group;
#pragma unroll 1
    for (; record(m).valid >= 0; m += 2) prepare(m);
    // The last chunks' O.
    const bool follows_end = m > 0 && record(m - 1).valid < 0;
#pragma unroll 1
    for (uint32_t i = m; i <= (follows_end ? m : m + 2); i += 2) {
      if (i < 2) continue;
      // All threads: a wait left out would make the next one's parity ambiguous.
      const bool last = i == m + 2;
      mbarrier_wait(smem() + (last ? Traits::kFullLast : Traits::kFullO + 8 * (i & 1)), last ? 0 : (i - 2) >> 1 & 1);
      if (i < 3) continue;
      if (record(i - 3).valid < kChunk) store_o_rows(i - 3);
      if (opaque_thread() == kCopyThread) store_o(i - 3);
    }
    if (opaque_thread() == kCopyThread) tma_store_wait_all();
  }
};

}  // namespace flash_qla::cuda::sm90
