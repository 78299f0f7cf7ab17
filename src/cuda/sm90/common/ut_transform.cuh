// The UT transform of a chunk, and A_g from it: by one warp, or by the four of a warpgroup, with the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/compiler.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/half_blocks.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/sm90/common/packed_half.cuh"
#include "cuda/sm90/common/trait_queries.h"

namespace flash_qla::cuda::sm90 {

struct NoBlocks {
  __device__ void operator()(int, int, uint32_t, uint32_t, uint32_t, uint32_t) const {}
};

// From -M in fp16, which the tile holds transposed, tile[column][row], to A_g in its place. What the tile holds is
// U = -M^T: blocks U_ji, j < i, right of the diagonal, and on it what D is solved from. With E = D^T:
//   A_jj = E_j,  A_ji = (sum over j <= k < i of A_jk U_ki) E_i,
// rows j, columns i, so nothing but E is needed in two forms. Sums are fp16 but for what only leaves. mma.sync waits
// for the wgmma of other warps, so their number counts more than how many follow one another.
//
// Both versions make each element by the same operations in the same order: whoever changes one changes the other, and
// tests/emulation/ut_transform_test.cpp compares their bits.
template <typename Traits>
struct UtTransform {
  using Element = typename Traits::Element;

  // What mild chunks execute in one piece, and little code for others. The kernels that save h are faster without.
  static constexpr bool kCompact = kCompactCode<Traits>;

  using Left = HalfLeft;
  using Right = HalfRight;
  using Sum = HalfSum;

  // ---- products

  // One half of D += A B: eight columns.
  static __device__ void multiply_add_half(uint32_t& low, uint32_t& high, const Left& a, uint32_t b0, uint32_t b1) {
    mma_m16n8k16_half_sum(low, high, a.x[0], a.x[1], a.x[2], a.x[3], b0, b1);
  }
  static __device__ void multiply_add(Left& d, const Left& a, const Right& b) {
    multiply_add_half(d.x[0], d.x[1], a, b.x[0], b.x[1]);
    multiply_add_half(d.x[2], d.x[3], a, b.x[2], b.x[3]);
  }
  static __device__ Left multiply(const Left& a, const Right& b) {
    Left d{{0u, 0u, 0u, 0u}};
    multiply_add(d, a, b);
    return d;
  }
  // ... with an upper triangular right operand.
  static __device__ Left multiply_triangular(const Left& a, const Right& b) {
    Left d{{0u, 0u, 0u, 0u}};
    mma_m16n8k8_half_sum(d.x[0], d.x[1], a.x[0], a.x[1], b.x[0]);
    multiply_add_half(d.x[2], d.x[3], a, b.x[2], b.x[3]);
    return d;
  }
  static __device__ Right as_right(const Left& a) {
    Right b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b.x[i] = transpose_8x8(a.x[i]);
    return b;
  }
  // A B with an upper triangular B, in fp32.
  static __device__ Sum triangular_product(const Left& a, const Right& b) {
    Sum d;
    mma_m16n8k8_half(d.x, a.x[0], a.x[1], b.x[0]);
    mma_m16n8k16<__half>(d.x + 4, a.x[0], a.x[1], a.x[2], a.x[3], b.x[2], b.x[3]);
    return d;
  }
  // Two products of 8x8 matrices at once.
  static __device__ void multiply_eights(uint32_t& d0, uint32_t& d1, uint32_t a0, uint32_t a1, uint32_t b0,
                                         uint32_t b1) {
    d0 = d1 = 0u;
    multiply_add_half(d0, d1, Left{{a0, 0u, 0u, a1}}, b0, b1);
  }

  static __device__ Sum unpacked(const Left& a) {
    Sum sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack2<__half>(a.x[i]);
      sum.x[2 * i] = pair.x, sum.x[2 * i + 1] = pair.y;
    }
    return sum;
  }
  static __device__ uint32_t scaled(uint32_t pair, float x, float y) {
    const float2 values = unpack2<__half>(pair);
    return pack2<Element>(values.x * x, values.y * y);
  }

  // ---- blocks of the tile

  // Where the lane's eight elements of block (0, 0) lie when the four 8x8 matrices come by columns, and by rows; the
  // column of another block is an exclusive or.
  struct Places {
    int lane;
    uint32_t by_columns, by_rows;
    uint32_t column_factors;  // by columns of A_g: rows of what the fragments hold
  };
  static __device__ Places find_places(uint32_t tile, uint32_t gate, int number) {
    Places at;
    // Out of a shuffle: the assembler would keep, and spill, what it made of the number before.
    at.lane = thread_from_shuffle(number, number);
    at.by_columns = tile + (at.lane & 15) * 128 + (((at.lane >> 4) ^ (at.lane & 7)) << 4);
    at.by_rows = tile + ((at.lane & 7) + 8 * (at.lane >> 4)) * 128 + ((((at.lane >> 3) & 1) ^ (at.lane & 7)) << 4);
    at.column_factors = gate + Traits::kGateColumnA + ((at.lane >> 3) * 20 + ((at.lane >> 2) & 1)) * 4;
    return at;
  }
  // The same place of the blocks `pair` pairs of blocks further down the diagonal.
  static __device__ uint32_t in_pair(uint32_t place, int pair) { return (place ^ (pair * 64)) + pair * 4096; }

  static __device__ Left left(uint32_t by_columns, int j, int i) {
    Left a;
    load_matrix_x4((by_columns ^ (i << 5)) + j * 2048, a.x);
    return a;
  }
  static __device__ Right right(uint32_t by_columns, int j, int i) {
    Right b;
    load_matrix_x4_trans((by_columns ^ (i << 5)) + j * 2048, b.x[0], b.x[1], b.x[2], b.x[3]);
    return b;
  }

  // (I + M)^-1 of 8x8 blocks on the diagonal in the place of -M, by substitution in pairs of fp16: a lane owns one
  // column of four blocks' 32, and with kSets = 2 then of the next four's. first: the first block's place. Column k of
  // -M is row k of the tile: 16 bytes of it.
  template <int kSets>
  static __device__ void solve(uint32_t first, int lane) {
    const int column = lane & 7, block = lane >> 3;
    const uint32_t base = first + block * (1024 + 16);
    uint32_t x[kSets][4];
    const uint32_t one = column & 1 ? 0x3c000000u : 0x3c00u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int r = 0; r < kSets; ++r) x[r][i] = i == column >> 1 ? one : 0u;
    }
#pragma unroll
    for (int k = 0; k < 7; ++k) {
#pragma unroll
      for (int r = 0; r < kSets; ++r) {
        const uint4 m = load_shared_u4((base ^ ((k ^ (4 * r)) << 4)) + k * 128 + r * 4096);
        const uint32_t values[4] = {m.x, m.y, m.z, m.w};
        const uint32_t known = __byte_perm(x[r][k >> 1], 0u, k & 1 ? 0x3232 : 0x1010);
#pragma unroll
        for (int i = (k >> 1) + (k & 1); i < 4; ++i) {
          x[r][i] = fma2(k == 2 * i ? values[i] & 0xffff0000u : values[i], known, x[r][i]);
        }
      }
    }
    __syncwarp();  // the solution takes the place of what the other lanes have been reading
    const uint32_t place = (base ^ (column << 4)) + column * 128;
#pragma unroll
    for (int r = 0; r < kSets; ++r) {
      store_shared_u4((place ^ (r * 64)) + r * 4096, make_uint4(x[r][0], x[r][1], x[r][2], x[r][3]));
    }
    __syncwarp();
  }

  // E of 16x16 blocks on the diagonal, of which what was solved are the two 8x8 blocks: right of the first comes
  // E' U E''. In pairs of blocks.
  template <int kBlocks>
  static __device__ void add_corners(Left (&e)[kBlocks], const Right (&e_right)[kBlocks]) {
    uint32_t corner[kBlocks];
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      multiply_eights(corner[j], corner[j + 1], e[j].x[0], e[j + 1].x[0], e_right[j].x[2], e_right[j + 1].x[2]);
    }
#pragma unroll
    for (int j = 0; j < kBlocks; j += 2) {
      multiply_eights(e[j].x[2], e[j + 1].x[2], corner[j], corner[j + 1], e_right[j].x[3], e_right[j + 1].x[3]);
    }
  }
  // The corner of block (j, j) to the tile.
  static __device__ void store_corner(uint32_t tile, int j, uint32_t corner, int lane) {
    store_shared_f1(tile + (16 * j + (lane >> 2)) * 128 + (((2 * j + 1) ^ (lane >> 2)) << 4) + 4 * (lane & 3),
                    __uint_as_float(corner));
  }

  // ---- A_g

  // Block (j, i) of A^T, right of the diagonal, with the factors of mild decay, of A_g's columns: low of the first
  // eight, high of the others.
  static __device__ Left pack_mild(const Sum& a, float low, float high) {
    return {{pack2<Element>(a.x[0] * low, a.x[1] * low), pack2<Element>(a.x[2] * high, a.x[3] * high),
             pack2<Element>(a.x[4] * low, a.x[5] * low), pack2<Element>(a.x[6] * high, a.x[7] * high)}};
  }
  static __device__ Left pack_mild_diagonal(const Left& e, float low, float high) {
    return {{scaled(e.x[0], low, low), 0u, scaled(e.x[2], low, low), scaled(e.x[3], high, high)}};
  }
  static __device__ void store(const Left& block, uint32_t place) {
    store_matrix_x4_trans(place, block.x[0], block.x[1], block.x[2], block.x[3]);
  }
  // ... with those of strong decay.
  static __device__ void store_strong(const Sum& a, int j, int i, uint32_t gate, const Places& at) {
    const int q = at.lane & 3;
    const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * i + 4 * j);
    const float low = load_shared_f1(at.column_factors + 16 * j) * pair;
    const float high = load_shared_f1(at.column_factors + 16 * j + 8) * pair;
    const float2 row0 = load_shared_f2(gate + Traits::kGateRow + 64 * i + 8 * q);
    const float2 row1 = load_shared_f2(gate + Traits::kGateRow + 64 * i + 8 * q + 32);
    store_matrix_x4_trans((at.by_rows ^ (j << 5)) + i * 2048,
                          pack2<Element>(a.x[0] * (row0.x * low), a.x[1] * (row0.y * low)),
                          pack2<Element>(a.x[2] * (row0.x * high), a.x[3] * (row0.y * high)),
                          pack2<Element>(a.x[4] * (row1.x * low), a.x[5] * (row1.y * low)),
                          pack2<Element>(a.x[6] * (row1.x * high), a.x[7] * (row1.y * high)));
  }
  static __device__ void store_strong_diagonal(int j, uint32_t gate, uint32_t betas, const Places& at) {
    const int q = at.lane & 3, g = at.lane >> 2;
    const Left a = left(at.by_columns, j, j);
    const uint32_t rows = gate + 64 * j + 8 * q, columns = gate + 64 * j + 4 * g;
    const uint32_t beta = betas + 64 * j + 4 * g;
    const float2 sum0 = load_shared_f2(rows + Traits::kGateSum), sum1 = load_shared_f2(rows + Traits::kGateSum + 32);
    const float low = load_shared_f1(columns + Traits::kGateSum),
                high = load_shared_f1(columns + Traits::kGateSum + 32);
    const float beta_low = load_shared_f1(beta);
    const float beta_high = load_shared_f1(beta + 32);
    // Above the diagonal by a mask, not by a factor: the exponentials may have overflowed.
    const uint32_t mask = (2 * q >= g ? 0xffffu : 0u) | (2 * q + 1 >= g ? 0xffff0000u : 0u);
    store_matrix_x4_trans(
        (at.by_rows ^ (j << 5)) + j * 2048,
        mask & scaled(a.x[0], exp2_approx(sum0.x - low) * beta_low, exp2_approx(sum0.y - low) * beta_low), 0u,
        scaled(a.x[2], exp2_approx(sum1.x - low) * beta_low, exp2_approx(sum1.y - low) * beta_low),
        mask & scaled(a.x[3], exp2_approx(sum1.x - high) * beta_high, exp2_approx(sum1.y - high) * beta_high));
  }
  // The two blocks right of the diagonal that the state groups read.
  static __device__ void clear_right_of_diagonal(uint32_t by_rows) {
    store_matrix_x4_trans(by_rows ^ (1 << 5), 0u, 0u, 0u, 0u);
    store_matrix_x4_trans((by_rows ^ (3 << 5)) + 2 * 2048, 0u, 0u, 0u, 0u);
  }

  // ---- by one warp

  // `number`: the lane, out of a shuffle, so that the assembler cannot ask for it anew. gate: the stage with
  // kGateColumnA, kGatePair, kGateRow and kGateSum; betas: beta_t in natural order; mild_factor: the address of
  // kGateMild. wait_gates() returns when these are there. The caller fences and arrives. About 60 registers.
  // With kSavesA the tile takes A itself where decay is mild; elsewhere save_block(i, j, x0, x1, x2, x3) gets its
  // 16x16 blocks in row i and column j as 8x8 matrices: rows 0..7, then 8..15, columns 0..7 first.
  template <typename WaitGates, typename SaveBlock = NoBlocks>
  static __device__ __forceinline__ void run(uint32_t tile, uint32_t gate, uint32_t betas, uint32_t mild_factor,
                                             int number, WaitGates wait_gates, SaveBlock save_block = {}) {
    solve<2>(tile, number);

    Places at = find_places(tile, gate, number);
    Left e[4];
    Right e_right[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      e[j] = left(at.by_columns, j, j);
      e_right[j] = right(at.by_columns, j, j);
      e[j].x[1] = 0u;
    }
    wait_gates();
    const float factor = load_shared_f1(mild_factor);
    // ptxas puts the other branch, for mild chunks, next to what is before it in the first form, after this one in the
    // second.
    const bool strong = kCompact ? __all_sync(0xffffffffu, factor == 0.0f) : !__any_sync(0xffffffffu, factor != 0.0f);
    const Right u01 = right(at.by_columns, 0, 1), u23 = right(at.by_columns, 2, 3);
    add_corners(e, e_right);
    const Left y01 = multiply(e[0], u01), y23 = multiply(e[2], u23);
    Left x12, x13, x02, x03;
    {
      const Right u12 = right(at.by_columns, 1, 2), u13 = right(at.by_columns, 1, 3);
      x12 = multiply(e[1], u12);
      x13 = multiply(e[1], u13);
      x02 = multiply(e[0], right(at.by_columns, 0, 2));
      x03 = multiply(e[0], right(at.by_columns, 0, 3));
#pragma unroll
      for (int j = 1; j < 4; ++j) e_right[j].x[2] = transpose_8x8(e[j].x[2]);
    }
    __syncwarp();
    // For later, so that no registers are kept for it.
#pragma unroll
    for (int j = 0; j < 4; ++j) store_corner(tile, j, e[j].x[2], at.lane);
    const Left a01 = multiply_triangular(y01, e_right[1]), a23 = multiply_triangular(y23, e_right[3]);
    Sum a12 = triangular_product(x12, e_right[2]), a13 = triangular_product(x13, e_right[3]);
    multiply_add(x02, a01, right(at.by_columns, 1, 2));
    multiply_add(x03, a01, right(at.by_columns, 1, 3));
    const Right a23_right = as_right(a23);
    add_half_product(a13, x12, a23_right);
    Sum a02 = triangular_product(x02, e_right[2]), a03 = triangular_product(x03, e_right[3]);
    add_half_product(a03, x02, a23_right);
    __syncwarp();  // A_g takes the place of what other lanes have been reading
    at = find_places(tile, gate, number);
    // Blocks right of the diagonal: take(block, j, i).
    auto for_all = [&](auto take) {
      take(unpacked(a01), 0, 1);
      take(a02, 0, 2);
      take(a03, 0, 3);
      take(a12, 1, 2);
      take(a13, 1, 3);
      take(unpacked(a23), 2, 3);
    };
    if (strong) {
      // What the fragments hold are columns of A.
      auto keep = [&](const Sum& a, int j, int i) {
        uint32_t x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = transpose_8x8(pack2<Element>(a.x[2 * k], a.x[2 * k + 1]));
        save_block(i, j, x[0], x[1], x[2], x[3]);
      };
      if constexpr (kSavesA<Traits>) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          Left a = left(at.by_columns, j, j);
          a.x[1] = 0u;
          keep(unpacked(a), j, j);
#pragma unroll
          for (int i = 0; i < j; ++i) save_block(i, j, 0u, 0u, 0u, 0u);
        }
      }
      for_all([&](const Sum& a, int j, int i) {
        if constexpr (kSavesA<Traits>) keep(a, j, i);
        store_strong(a, j, i, gate, at);
      });
      // A loop, as the cache of instructions, which another SM shares, has little room beside what mild chunks execute.
#pragma unroll(kCompact ? 1 : 4)
      for (int j = 0; j < 4; ++j) store_strong_diagonal(j, gate, betas, at);
    } else {
      float low[4], high[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low[j] = kSavesA<Traits> ? 1.0f : load_shared_f1(at.column_factors + 16 * j);
        high[j] = kSavesA<Traits> ? 1.0f : load_shared_f1(at.column_factors + 16 * j + 8);
      }
      for_all([&](const Sum& a, int j, int i) {
        store(pack_mild(a, low[j], high[j]), (at.by_rows ^ (j << 5)) + i * 2048);
      });
#pragma unroll
      for (int j = 0; j < 4; ++j) e[j] = left(at.by_columns, j, j);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store(pack_mild_diagonal(e[j], low[j], high[j]), (at.by_rows ^ (j << 5)) + j * 2048);
      }
    }
    __syncwarp();
    clear_right_of_diagonal(at.by_rows);
  }

  // ---- by four warps, between barriers of all four

  // After the first barrier, which says that -M's blocks (0, 0) to (3, 3), (1, 0) and (3, 2) are there, by warps 0 and
  // 1: E of two blocks on the diagonal, and the block of A between them in the place of U. Warps 2 and 3 store the rest
  // of -M meanwhile. `number`: the lane.
  static __device__ __forceinline__ void solve_pair(uint32_t tile, int warp, int number) {
    solve<1>(in_pair(tile, warp), number);
    const int lane = thread_from_shuffle(number, number);
    const uint32_t by_columns = in_pair(tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4), warp);
    Left e[2];
    Right e_right[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      e[j] = left(by_columns, j, j);
      e_right[j] = right(by_columns, j, j);
      e[j].x[1] = 0u;
    }
    const Right u = right(by_columns, 0, 1);
    add_corners(e, e_right);
    const Left y = multiply(e[0], u);
    e_right[1].x[2] = transpose_8x8(e[1].x[2]);
    __syncwarp();  // what follows takes the place of what other lanes have been reading
#pragma unroll
    for (int j = 0; j < 2; ++j) store_corner(tile, 2 * warp + j, e[j].x[2], lane);
    const Left a = multiply_triangular(y, e_right[1]);
    store_matrix_x4(by_columns ^ (1 << 5), a.x[0], a.x[1], a.x[2], a.x[3]);
  }

  // After the second barrier, which says that solve_pair()'s results and all of -M are there: the rest, each warp the
  // blocks of A that it stores. Warp 0: (1, 0) and (2, 0); warp 1, of which solve_pair() had as many products: (3, 2)
  // and the diagonal; warp 2: (2, 1) and (3, 1); warp 3, with the most products: (3, 0). What they read is right of the
  // tile's diagonal or on it, and there only warp 1 writes: at the third barrier, meet(waits), it alone waits. gate,
  // betas and mild_factor as above. finish(kind, factor) is called with what is at mild_factor, and as kind whether
  // decay is mild as a constant, so that what the caller does with it lies behind each kind's code. When it is called
  // all of A_g is there to warp 1, and to each other warp what it has stored itself.
  static constexpr int kDiagonalWarp = 1;
  template <typename Meet, typename Finish>
  static __device__ __forceinline__ void finish_by_four(uint32_t tile, uint32_t gate, uint32_t betas,
                                                        uint32_t mild_factor, int warp, int number, Meet meet,
                                                        Finish finish) {
    static_assert(!kSavesA<Traits>);
    const Places at = find_places(tile, gate, number);
    const float factor = load_shared_f1(mild_factor);
    const bool mild = __any_sync(0xffffffffu, factor != 0.0f);
    // Two blocks of row j of A^T at most: the one next to the diagonal, and one that is further off.
    const int j = warp == 1 ? 2 : warp == 2 ? 1 : 0, far_column = warp == 0 ? 2 : 3;
    const bool has_near = warp != 3, has_far = warp != 1;
    Sum near, far;
    if (has_far) {
      Left e = left(at.by_columns, j, j);
      e.x[1] = 0u;
      Left x2 = multiply(e, right(at.by_columns, j, 2));
      if (warp == 0) {
        const Left a01 = left(at.by_columns, 0, 1);
        multiply_add(x2, a01, right(at.by_columns, 1, 2));
        far = triangular_product(x2, right(at.by_columns, 2, 2));
        near = unpacked(a01);
      } else {
        Left x3 = multiply(e, right(at.by_columns, j, 3));
        if (warp == 3) {
          const Left a01 = left(at.by_columns, 0, 1);
          multiply_add(x2, a01, right(at.by_columns, 1, 2));
          multiply_add(x3, a01, right(at.by_columns, 1, 3));
        } else {
          near = triangular_product(x2, right(at.by_columns, 2, 2));
        }
        far = triangular_product(x3, right(at.by_columns, 3, 3));
        add_half_product(far, x2, right(at.by_columns, 2, 3));  // by A_23
      }
    } else {
      near = unpacked(left(at.by_columns, 2, 3));
    }
    if (mild) {
      const float low = load_shared_f1(at.column_factors + 16 * j);
      const float high = load_shared_f1(at.column_factors + 16 * j + 8);
      const uint32_t column = at.by_rows ^ (j << 5);
      if (has_near) store(pack_mild(near, low, high), column + (j + 1) * 2048);
      if (has_far) store(pack_mild(far, low, high), column + far_column * 2048);
      if (warp == kDiagonalWarp) {
        Left diagonal[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          diagonal[i] = pack_mild_diagonal(left(at.by_columns, i, i), load_shared_f1(at.column_factors + 16 * i),
                                           load_shared_f1(at.column_factors + 16 * i + 8));
        }
        meet(true);
#pragma unroll
        for (int i = 0; i < 4; ++i) store(diagonal[i], (at.by_rows ^ (i << 5)) + i * 2048);
        clear_right_of_diagonal(at.by_rows);
      } else {
        meet(false);
      }
      finish(std::true_type{}, factor);
    } else {
      if (has_near) store_strong(near, j, j + 1, gate, at);
      if (has_far) store_strong(far, j, far_column, gate, at);
      if (warp == kDiagonalWarp) {
        meet(true);
#pragma unroll 1
        for (int i = 0; i < 4; ++i) store_strong_diagonal(i, gate, betas, at);
        clear_right_of_diagonal(at.by_rows);
      } else {
        meet(false);
      }
      finish(std::false_type{}, factor);
    }
  }
};

// UtTransform makes A diag(x) of a chunk of mild decay. For A alone: x is ones, in kPlainGateBytes of them.
template <typename Element_>
struct PlainInverseTraits {
  using Element = Element_;
  static constexpr uint32_t kGateColumnA = 0;
  static constexpr uint32_t kGateMild = 80 * 4;
  // Of chunks that decay faster: not for use.
  static constexpr uint32_t kGateSum = 0, kGatePair = 0, kGateRow = 0;
};
inline constexpr uint32_t kPlainGateBytes = 84 * 4;

}  // namespace flash_qla::cuda::sm90
