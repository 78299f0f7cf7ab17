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

// All gate vectors of one chunk by one warp, from g and beta in the stage itself; lane l holds tokens 2l and 2l + 1.
// Every exponent is a difference, at most 0 for g <= 0. A lane sums its block of 16 tokens by itself: with the copy
// engine and wgmma on the same memory a shuffle takes about 100 clocks, and a scan by shuffles six of them in a row.
template <typename Traits>
__device__ __forceinline__ void make_gates(const ChunkForwardArgs& args, const ChunkRecord& chunk, uint32_t gate,
                                           int lane) {
  const int block = lane >> 3;
  float4 g[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) g[i] = load_shared_f4(gate + Traits::kGateSum + 64 * block + 16 * i);
  float2 beta = load_shared_f2(gate + Traits::kGateBeta + 8 * lane);
  if (args.beta == nullptr) {
    beta = make_float2(2 * lane < chunk.valid ? 1.0f : 0.0f, 2 * lane + 1 < chunk.valid ? 1.0f : 0.0f);
    store_shared_f2(gate + Traits::kGateBeta + 8 * lane, beta.x, beta.y);
  }
  float run = 0.0f, cx = 0.0f, cy = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float values[4] = {g[i].x, g[i].y, g[i].z, g[i].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      run += values[e] < kGateFloor ? kGateFloor : values[e];  // keeps NaN
      const bool mine = (lane & 7) == 2 * i + e / 2;
      if (e & 1) {
        cy = mine ? run : cy;
      } else {
        cx = mine ? run : cx;
      }
    }
  }
  // Sums up to the end of each block.
  const float end0 = __shfl_sync(0xffffffffu, run, 0);
  const float end1 = end0 + __shfl_sync(0xffffffffu, run, 8);
  const float end2 = end1 + __shfl_sync(0xffffffffu, run, 16);
  const float end3 = end2 + __shfl_sync(0xffffffffu, run, 24);
  const float before = block == 0 ? 0.0f : block == 1 ? end0 : block == 2 ? end1 : end2;
  const float end = before + run;
  cx += before;
  cy += before;
  if constexpr (Traits::kSave) {
    if (args.g_cumsum != nullptr && chunk.half == 0 && !(chunk.flags & kSilentChunk)) {
      float* out = args.g_cumsum + (static_cast<int64_t>(chunk.row) + 2 * lane) * args.num_value_heads + chunk.head;
      if (2 * lane < chunk.valid) out[0] = cx;
      if (2 * lane + 1 < chunk.valid) out[args.num_value_heads] = cy;
    }
  }
  const uint32_t permuted = gate + ((lane & 3) * 20 + (lane >> 2) * 2) * 4;
  const uint32_t natural = gate + 8 * lane;
  const float gamma_x = exp2_approx(cx * kLog2e), gamma_y = exp2_approx(cy * kLog2e);
  store_shared_f2(permuted + Traits::kGateDecay, gamma_x, gamma_y);
  store_shared_f2(permuted + Traits::kGateScaled, gamma_x * args.scale, gamma_y * args.scale);
  store_shared_f2(permuted + Traits::kGateRest, exp2_approx((end3 - cx) * kLog2e), exp2_approx((end3 - cy) * kLog2e));
  __syncwarp();  // every lane has its g: the sums take their place
  store_shared_f2(natural + Traits::kGateSum, cx * kLog2e, cy * kLog2e);
  const float column_x = exp2_approx((end - cx) * kLog2e), column_y = exp2_approx((end - cy) * kLog2e);
  store_shared_f2(permuted + Traits::kGateColumnA, column_x * beta.x, column_y * beta.y);
  store_shared_f2(permuted + Traits::kGateColumnP, column_x * args.scale, column_y * args.scale);
  store_shared_f2(natural + Traits::kGateRow, exp2_approx((cx - before) * kLog2e), exp2_approx((cy - before) * kLog2e));
  const int i = (lane >> 2) & 3, j = lane & 3;
  const float row_end = i == 1 ? end0 : i == 2 ? end1 : end2;
  const float column_end = j == 0 ? end0 : j == 1 ? end1 : end2;
  if (lane < 16)
    store_shared_f1(gate + Traits::kGatePair + 4 * lane, i > j ? exp2_approx((row_end - column_end) * kLog2e) : 0.0f);
}

// g and beta of a chunk into its gate stage, zeros past the end, by one warp; `barrier` counts its 32 lanes.
template <typename Traits>
__device__ __forceinline__ void load_gates(const ChunkForwardArgs& args, const ChunkRecord& chunk, uint32_t gate,
                                           uint32_t barrier, int lane) {
  // A loop, not twice the code: the kernel's hot instructions must fit the instruction cache.
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const float* data = i == 0 ? args.g : args.beta;
    const int64_t token_stride = i == 0 ? args.g_token_stride : args.beta_token_stride;
    const int64_t head_stride = i == 0 ? args.g_head_stride : args.beta_head_stride;
    const uint32_t to = gate + (i == 0 ? Traits::kGateSum : Traits::kGateBeta) + 4 * lane;
    const int valid = data == nullptr ? 0 : chunk.valid;
    // With nothing to read, any mapped address does: zero bytes are taken from it.
    const float* first = data == nullptr ? static_cast<const float*>(args.q)
                                         : data + chunk.row * token_stride + chunk.head * head_stride;
    copy_async_4(to, first + (lane < valid ? lane * token_stride : 0), lane < valid);
    copy_async_4(to + 128, first + (lane + 32 < valid ? (lane + 32) * token_stride : 0), lane + 32 < valid);
  }
  copy_async_arrive(barrier);
}

// Zeros rows valid..63 of `halves` 64x64 swizzled half tiles, so that what follows the sequence in memory, Inf and NaN
// included, meets no product. By one whole warpgroup; the caller synchronises.
__device__ __forceinline__ void clear_tail_rows(uint32_t tile, int halves, int valid, int thread) {
  const int per_half = (kChunk - valid) * 8;
  for (int i = thread; i < per_half * halves; i += 128) {
    const int half = i >= per_half;
    store_shared_u4(tile + half * kChunk * 128 + valid * 128 + (i - half * per_half) * 16, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
}

// A thread's gate factors for its block on the diagonal, and of its two rows. Loaded while the product they belong to
// still runs.
template <typename Traits, bool kIsA>
struct GateFactors {
  float sum0, sum1, row0, row1;
  float2 sum[2], beta[2];

  __device__ __forceinline__ GateFactors(uint32_t gate, const LanePlace& at) {
    sum0 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row);
    sum1 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row + 32);
    row0 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row);
    row1 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row + 32);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t columns = gate + (16 * at.warp + 8 * b + 2 * at.q) * 4;
      sum[b] = load_shared_f2(columns + Traits::kGateSum);
      if constexpr (kIsA) beta[b] = load_shared_f2(columns + Traits::kGateBeta);
    }
  }
};

// Multiplies the lower triangle of a 64x64 accumulator by G and beta (A_g) or by scale G (P) and stores it as a wgmma
// operand. Blocks below the diagonal: G_ij = row_i * pair_IJ * column_j; diagonal blocks: the exponential of the
// difference itself. x: the three left column blocks; y: the warp's block on the diagonal.
template <typename Traits, bool kIsA>
__device__ __forceinline__ void store_gated(const float* x, float (&y)[8], const GateFactors<Traits, kIsA>& factors,
                                            uint32_t tile, uint32_t gate, float scale, const LanePlace& at) {
  using Element = typename Traits::Element;
  const uint32_t row_address = tile + (16 * at.warp + (at.lane & 15)) * 128;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    float2 factor = make_float2(scale, scale);
    if constexpr (kIsA) factor = factors.beta[b];
    const int i = at.lane >> 2, j = 8 * b + 2 * at.q;
    y[4 * b + 0] = j <= i ? y[4 * b + 0] * exp2_approx(factors.sum0 - factors.sum[b].x) * factor.x : 0.0f;
    y[4 * b + 1] = j + 1 <= i ? y[4 * b + 1] * exp2_approx(factors.sum0 - factors.sum[b].y) * factor.y : 0.0f;
    y[4 * b + 2] = j <= i + 8 ? y[4 * b + 2] * exp2_approx(factors.sum1 - factors.sum[b].x) * factor.x : 0.0f;
    y[4 * b + 3] = j + 1 <= i + 8 ? y[4 * b + 3] * exp2_approx(factors.sum1 - factors.sum[b].y) * factor.y : 0.0f;
  }
  store_matrix_x4(row_address + (((2 * at.warp + (at.lane >> 4)) ^ at.swizzle) << 4), pack2<Element>(y[0], y[1]),
                  pack2<Element>(y[2], y[3]), pack2<Element>(y[4], y[5]), pack2<Element>(y[6], y[7]));
  // Of the blocks right of the diagonal the state groups read these two; the inverse's transposed operands were there.
  if (kIsA && !(at.warp & 1)) {
    store_matrix_x4(row_address + (((2 * at.warp + 2 + (at.lane >> 4)) ^ at.swizzle) << 4), 0u, 0u, 0u, 0u);
  }
  constexpr uint32_t kColumn = kIsA ? Traits::kGateColumnA : Traits::kGateColumnP;
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * at.warp + 4 * b);
      const float4 column = load_shared_f4(gate + kColumn + 80 * at.q + 16 * b);
      const float f0 = factors.row0 * pair, f1 = factors.row1 * pair;
      const float* z = x + 8 * b;
      store_matrix_x4(row_address + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4),
                      pack2<Element>(z[0] * (f0 * column.x), z[1] * (f0 * column.y)),
                      pack2<Element>(z[2] * (f1 * column.x), z[3] * (f1 * column.y)),
                      pack2<Element>(z[4] * (f0 * column.z), z[5] * (f0 * column.w)),
                      pack2<Element>(z[6] * (f1 * column.z), z[7] * (f1 * column.w)));
    }
  }
}

// The warp's block on the diagonal of a 64x64 accumulator.
__device__ __forceinline__ float diagonal_block(const float (&x)[32], int i, int warp) {
  return warp == 0 ? x[i] : warp == 1 ? x[8 + i] : warp == 2 ? x[16 + i] : x[24 + i];
}

// M = strict_lower(diag(beta) K K^T) from the accumulator of K K^T into the inverse's workspace: diagonal 16x16 blocks
// in fp32, column-major; the blocks below as fp16, transposed: tile[column][row]. The diagonal blocks are rounded to
// fp16 as well: the inverse is then that of one matrix close to M. Where keys lie along each other and beta is near 2
// two differently rounded parts of one triple the error.
__device__ __forceinline__ void store_kkt(const float (&kkt)[32], float beta0, float beta1, uint32_t tile,
                                          uint32_t diagonal, const LanePlace& at) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float beta = (i >> 1) & 1 ? beta1 : beta0;
    const float2 x = unpack2<__half>(
        pack2<__half>(beta * diagonal_block(kkt, i, at.warp), beta * diagonal_block(kkt, i + 1, at.warp)));
    // Element (r, c) of the block is float c * 16 + ((r / 4) ^ (c / 2 % 4)) * 4 + r % 4: no worse than two-way bank
    // conflicts.
    const int r = (at.lane >> 2) + 8 * ((i >> 1) & 1);
    const int c = 2 * at.q + 8 * (i >> 2);
    const uint32_t address = diagonal + (c * 16 + (((r >> 2) ^ at.q) << 2) + (r & 3)) * 4;
    store_shared_f1(address, x.x);
    store_shared_f1(address + 16 * 4, x.y);
  }
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float* x = kkt + 8 * b;
      store_matrix_x4_trans(tile + b * 2048 + at.trans_row + at.trans_chunk, pack2<__half>(beta0 * x[0], beta0 * x[1]),
                            pack2<__half>(beta1 * x[2], beta1 * x[3]), pack2<__half>(beta0 * x[4], beta0 * x[5]),
                            pack2<__half>(beta1 * x[6], beta1 * x[7]));
    }
  }
}

// D = (I + M)^-1 of two diagonal 16x16 blocks by substitution in fp32, into the tile's diagonal blocks: by one warp, a
// lane owns one column. first: the first of the two blocks.
__device__ __forceinline__ void solve_diagonal_blocks(uint32_t tile, uint32_t diagonal, int first, int lane) {
  const int column = lane & 15, block = first + (lane >> 4);
  diagonal += block * 1024;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int k = 0; k < 15; ++k) {
#pragma unroll
    for (int c = (k + 1) / 4; c < 4; ++c) {
      const float4 m = load_shared_f4(diagonal + k * 64 + ((c ^ ((k >> 1) & 3)) << 4));
      const float below[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (4 * c + i > k) x[4 * c + i] = fmaf(-below[i], x[k], x[4 * c + i]);
      }
    }
  }
  uint32_t packed[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) packed[i] = pack2<__half>(x[2 * i], x[2 * i + 1]);
  const uint32_t address = tile + (16 * block + column) * 128 + (((2 * block) ^ (lane & 7)) << 4);
  store_shared_u4(address, make_uint4(packed[0], packed[1], packed[2], packed[3]));
  store_shared_u4(address ^ 16, make_uint4(packed[4], packed[5], packed[6], packed[7]));
}

// The descriptor of a tile whose address all lanes of the warp have, in a form that the compiler knows to be uniform:
// what is computed from it needs no vector registers, and no moves to uniform ones before each wgmma.
__device__ __forceinline__ uint64_t uniform_descriptor(uint32_t tile) {
  const uint64_t descriptor = wgmma_descriptor(tile);
  const uint32_t low = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(descriptor));
  return (descriptor & 0xffffffff00000000u) | low;
}

// A = (I + X)^-1 D = (I - X + X^2 - X^3) D with X = D M, M being what the tile holds below its diagonal blocks, which
// hold D. X^4 = 0, and of X^3 only block (3, 0) is not zero. fp16 operands, fp32 accumulators; the left operands stay
// in registers, X goes back to the tile as a right operand. a: the blocks of columns 0..47 left of the diagonal
// (elsewhere zero); diagonal: the warp's block of D, which is A's. `sync`: a barrier of the warpgroup.
template <typename Sync>
__device__ __forceinline__ void invert(float (&a)[3][8], float (&diagonal)[8], uint32_t tile, const LanePlace& at,
                                       Sync sync) {
  const uint64_t base = uniform_descriptor(tile);
  auto block = [&](int k, int n) { return wgmma_advance(base, n * 2048 + k * 32); };
  const uint32_t fragment = tile + at.trans_row + at.trans_chunk;
  uint32_t d[4], x[3][4];
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
    // Without a branch, which would serialise the wgmma around it: D again in the diagonal block, zeros to its right.
    const bool own = b == at.warp;
    store_matrix_x4_trans(fragment + b * 2048, own ? d[0] : x[b][0], own ? d[1] : x[b][1], own ? d[2] : x[b][2],
                          own ? d[3] : x[b][3]);
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
  // The identity of I - X + .. meets D_w only, in the diagonal block: left out here.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x0 = unpack2<__half>(x[0][i]);
    y[0][i] = pack2<__half>(square0[2 * i] - cube[2 * i] - x0.x, square0[2 * i + 1] - cube[2 * i + 1] - x0.y);
    const float2 x1 = unpack2<__half>(x[1][i]);
    y[1][i] = pack2<__half>(square1[2 * i] - x1.x, square1[2 * i + 1] - x1.y);
    y[2][i] = x[2][i] ^ 0x80008000u;
  }
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < 3; ++b) mma_rs_n16_init<__half>(a[b], y[b], block(b, b));
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    pin(a[b]);
    pin(y[b]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<__half>(d[i]);
    diagonal[2 * i] = pair.x;
    diagonal[2 * i + 1] = pair.y;
  }
}

// Starts D = A B^T of two [64][128] tiles.
template <typename T>
__device__ __forceinline__ void start_product(float (&d)[32], uint32_t a_tile, uint32_t b_tile) {
  const uint64_t a = uniform_descriptor(a_tile), b = uniform_descriptor(b_tile);
  wgmma_fence();
  mma_ss_n64_init<T>(d, a, b);
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const uint32_t offset = (i >> 2) * kChunk * 128 + (i & 3) * 32;
    mma_ss_n64<T>(d, wgmma_advance(a, offset), wgmma_advance(b, offset));
  }
  wgmma_commit();
}

template <typename Traits>
struct AuxRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  int group;   // 0 or 1
  int thread;  // 0..127

  // Hides a number from the compiler, so that addresses made from it are recomputed, not kept: registers are short
  // here.
  template <typename Number>
  static __device__ Number opaque(Number value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ int opaque_thread() const { return opaque(thread); }

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
  __device__ uint32_t stage_gate(uint32_t m) const {
    return smem() + Traits::kSmemGate + m % Traits::kStagesGate * Traits::kBytesGate;
  }
  __device__ uint32_t tile_a(uint32_t m) const {
    return smem() + Traits::kSmemA + m % Traits::kStagesA * Traits::kBytesMatrix;
  }
  __device__ uint32_t diagonal_blocks() const {
    return smem() + Traits::kSmemDiagonal + opaque(group) * Traits::kBytesDiagonal;
  }
  __device__ void sync() const { named_barrier_sync(1 + opaque(group), 128); }

  // By one thread each.
  __device__ void load_k(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid < 0) return;
    const uint32_t barrier = smem() + Traits::kFullK + 8 * (m % Traits::kStagesK);
    const bool with_v = Traits::kStateOnly && !(c.flags & kNoValues);
    mbarrier_arrive_expect(barrier, with_v ? Traits::kBytesK + Traits::kBytesV : Traits::kBytesK);
    tma_load_4d(stage_k(m), &p.k, barrier, 0, c.row, 0, c.key_head);
    if (with_v) tma_load_4d(stage_v(m), &p.v, barrier, 0, c.row, c.half, c.head);
  }
  __device__ void load_q(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid < 0) return;
    const uint32_t barrier = smem() + Traits::kFullQ + 8 * (m % Traits::kStagesQ);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(stage_q(m), &p.q, barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_v(uint32_t m, uint32_t barrier) const {
    const ChunkRecord& c = record(m);
    mbarrier_arrive_expect(barrier, Traits::kBytesV);
    tma_load_4d(stage_v(m), &p.v, barrier, 0, c.row, c.half, c.head);
  }

  // O of chunk m from its V stage to global memory, at a sequence's end: rows by hand.
  __device__ void store_o_rows(uint32_t m) const {
    const ChunkRecord& c = record(m);
    constexpr int kPieces = Traits::kDv / 8;
    Element* out =
        static_cast<Element*>(p.args.o) + c.row * p.args.o_token_stride + c.head * p.args.o_head_stride + c.half * 64;
    for (int i = thread; i < c.valid * kPieces; i += 128) {
      const int row = i / kPieces, piece = i % kPieces;
      const uint4 value =
          load_shared_u4(stage_v(m) + (piece >> 3) * Traits::kHalf + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
      *reinterpret_cast<uint4*>(out + row * p.args.o_token_stride + piece * 8) = value;
    }
    sync();
  }
  // ... and of a full chunk, by one thread.
  __device__ void store_o(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid != kChunk || (c.flags & kSilentChunk)) return;
    fence_proxy_async();
    tma_store_4d(&p.o, stage_v(m), 0, c.row, c.half, c.head);
    tma_store_commit();
  }

  __device__ void pass_stages_on(uint32_t m, uint32_t full_p) const {
    const int warp = opaque_thread() >> 5;
    if (warp == 1) fetch_gates(m + 2);
    if (opaque_thread() % 32 != 0) return;
    if (warp == 0 && !Traits::kStateOnly) {
      tma_store_wait_read();  // O of chunk m - 3 has left the stage that V goes to
      load_v(m, record(m).valid == kChunk ? full_p : smem() + Traits::kTailV + 8 * opaque(group));
    } else if (warp == 2) {
      load_k(m + 2);
      if (!Traits::kStateOnly && record(m + 1).valid >= 0) load_q(m + 1);
    }
  }

  // By one warp: g and beta on their way into a chunk's gate stage.
  __device__ void fetch_gates(uint32_t m) const {
    if (record(m).valid >= 0)
      load_gates<Traits>(p.args, record(m), stage_gate(m), smem() + Traits::kFullRaw + 8 * (m & 1),
                         opaque_thread() & 31);
  }

  __device__ void save_a(const float (&a)[3][8], const float (&diagonal)[8], const ChunkRecord& c,
                         const LanePlace& at) const {
    if (p.args.a == nullptr || c.half != 0 || (c.flags & kSilentChunk)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row + 8 * h;
      uint32_t* out =
          reinterpret_cast<uint32_t*>(static_cast<Element*>(p.args.a) +
                                      ((static_cast<int64_t>(c.row) + row) * p.args.num_value_heads + c.head) * kChunk);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float* x = b < 3 ? a[b] : diagonal;  // zeros right of the diagonal
        const uint32_t low = b < at.warp ? pack2<Element>(x[2 * h], x[2 * h + 1]) : 0u;
        const uint32_t high = b < at.warp ? pack2<Element>(x[4 + 2 * h], x[5 + 2 * h]) : 0u;
        const uint2 words =
            pair_words(b == at.warp ? pack2<Element>(diagonal[2 * h], diagonal[2 * h + 1]) : low,
                       b == at.warp ? pack2<Element>(diagonal[4 + 2 * h], diagonal[5 + 2 * h]) : high, at.q);
        if (row < c.valid) *reinterpret_cast<uint2*>(out + 8 * b + paired_word(at.q)) = words;
      }
    }
  }

  // Everything the state groups need for chunk m. Waits for the end of chunk m - 2 in the middle: until then only
  // memory of its own.
  __device__ void prepare(uint32_t m) {
    // K K^T, and the gates while it runs; its blocks into the inverse's workspace; the inverse.
    mbarrier_wait(smem() + Traits::kFullK + 8 * (m % Traits::kStagesK), m / Traits::kStagesK & 1);
    if (record(m).valid < kChunk) {
      clear_tail_rows(stage_k(m), 2, record(m).valid, thread);
      sync();
    }
    {
      float kkt[32];
      start_product<Element>(kkt, stage_k(m), stage_k(m));
      mbarrier_wait(smem() + Traits::kFullRaw + 8 * (m & 1), m / 2 & 1);
      float beta0 = load_shared_f1(stage_gate(m) + Traits::kGateBeta + 4 * lane_place(opaque_thread()).row);
      float beta1 = load_shared_f1(stage_gate(m) + Traits::kGateBeta + 4 * lane_place(opaque_thread()).row + 32);
      if (p.args.beta == nullptr) beta0 = beta1 = 1.0f;
      wgmma_wait<0>();
      pin(kkt);
      store_kkt(kkt, beta0, beta1, tile_a(m), diagonal_blocks() + (opaque_thread() >> 5) * 1024,
                lane_place(opaque_thread()));
    }
    fence_proxy_async();
    sync();  // M is there
    // Two warps solve the diagonal blocks; the others meanwhile make the gates and go on in the list of chunks.
    const int warp = opaque_thread() >> 5;
    if (warp < 2) {
      solve_diagonal_blocks(tile_a(m), diagonal_blocks(), 2 * warp, opaque_thread() & 31);
    } else if (warp == 3) {
      make_gates<Traits>(p.args, record(m), stage_gate(m), opaque_thread() & 31);
    } else if (group == 0 && opaque_thread() == 64) {
#pragma unroll 1
      for (uint32_t ahead = 4; ahead < 6; ++ahead) produce_chunk<Traits>(p, m + ahead);
    }
    __syncwarp();
    sync();  // D is there, and the gates
    {
      float a[3][8], diagonal[8];
      invert(a, diagonal, tile_a(m), lane_place(opaque_thread()), [this] { sync(); });
      m = opaque(m);
      if constexpr (Traits::kSave) save_a(a, diagonal, record(m), lane_place(opaque_thread()));
      const GateFactors<Traits, true> factors(stage_gate(m), lane_place(opaque_thread()));
      sync();  // the inverse has been read: A_g takes its tile
      store_gated<Traits, true>(a[0], diagonal, factors, tile_a(m), stage_gate(m), 1.0f, lane_place(opaque_thread()));
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_warp(smem() + Traits::kFullA + 8 * (m % Traits::kStagesA), thread & 31);

    m = opaque(m);
    if constexpr (Traits::kStateOnly) {
      // No P: its barrier says that K, V and the gates are there.
      if (m >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (m & 1), (m - 2) >> 1 & 1);
      const uint32_t full_p = smem() + Traits::kFullP + 8 * (m & 1);
      pass_stages_on(m, full_p);
      __syncwarp();
      mbarrier_arrive_warp(full_p, thread & 31);
      return;
    }
    mbarrier_wait(smem() + Traits::kFullQ + 8 * (m % Traits::kStagesQ), m / Traits::kStagesQ & 1);
    float qkt[32];
    start_product<Element>(qkt, stage_q(m), stage_k(m));
    m = opaque(m);
    // Up to here memory of this group's own. With chunk m - 2 done its stages and P's tile are free.
    if (m >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (m & 1), (m - 2) >> 1 & 1);
    const uint32_t full_p = smem() + Traits::kFullP + 8 * (m & 1);
    if (m >= 3) {
      if (record(m - 3).valid < kChunk) store_o_rows(m - 3);
      if (thread == 0) store_o(m - 3);
    }
    pass_stages_on(m, full_p);
    const GateFactors<Traits, false> factors(stage_gate(m), lane_place(opaque_thread()));
    wgmma_wait<0>();
    pin(qkt);
    const LanePlace at = lane_place(opaque_thread());
    float diagonal[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) diagonal[i] = diagonal_block(qkt, i, at.warp);
    store_gated<Traits, false>(qkt, diagonal, factors, smem() + Traits::kSmemP + (m & 1) * Traits::kBytesMatrix,
                               stage_gate(m), p.args.scale, at);
    fence_proxy_async();
    if (record(m).valid < kChunk) clear_tail_v(m, record(m).valid, full_p);
    __syncwarp();
    mbarrier_arrive_warp(full_p, thread & 31);
  }

  // At a sequence's end V comes through a barrier of this group's own, and is passed on once its tail is cleared.
  __device__ void clear_tail_v(uint32_t m, int valid, uint32_t full_p) {
    uint32_t& tails = reinterpret_cast<uint32_t*>(shared_memory() + Traits::kTailCount)[opaque(group)];
    mbarrier_wait(smem() + Traits::kTailV + 8 * opaque(group), tails & 1);
    clear_tail_rows(stage_v(m), Traits::kStateGroups, valid, thread);
    sync();
    if (thread == 0) {
      ++tails;
      mbarrier_arrive(full_p);
    }
  }

  __device__ void run() {
    if (thread == 0) {
      load_k(group);
      if (!Traits::kStateOnly && group == 0) load_q(0);
    }
    if (thread < 32) fetch_gates(group);
    uint32_t m = group;
#pragma unroll 1
    for (; record(m).valid >= 0; m += 2) prepare(m);
    if constexpr (Traits::kStateOnly) return;
    // The last chunks' O: the chunk after the last counts as done once the state groups have written the last O.
    const bool follows_end = m > 0 && record(m - 1).valid < 0;
    for (uint32_t i = m; i <= (follows_end ? m : m + 2); i += 2) {
      if (i >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (i & 1), (i - 2) >> 1 & 1);
      if (i >= 3 && record(i - 3).valid < kChunk) store_o_rows(i - 3);
      if (i >= 3 && thread == 0) store_o(i - 3);
    }
    if (thread == 0) tma_store_wait_all();
  }
};

}  // namespace flash_qla::cuda::sm90
