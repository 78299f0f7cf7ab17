// The UT transform of a chunk, and A_g from it, by one warp with few instructions.
#pragma once

#include <cstdint>

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/sm90/common/compiler.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/packed_half.cuh"
#include "cuda/sm90/common/sizes.h"
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
template <typename Traits>
struct UtTransform {
  using Element = typename Traits::Element;

  // What mild chunks execute in one piece, and little code for others. The kernels that save h are faster without.
  static constexpr bool kCompact = kPrefetchesState<Traits>;

  using Left = HalfLeft;
  using Right = HalfRight;
  using Sum = HalfSum;

  // One half of D += A B: eight columns.
  static __device__ void multiply_add_half(uint32_t& low, uint32_t& high, const Left& a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                 : "+r"(low), "+r"(high)
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
  }
  // ... by eight rows of B: a0 and a1 are the columns of A that meet them.
  static __device__ void multiply_add_eight(uint32_t& low, uint32_t& high, uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
                 : "+r"(low), "+r"(high)
                 : "r"(a0), "r"(a1), "r"(b));
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
    multiply_add_eight(d.x[0], d.x[1], a.x[0], a.x[1], b.x[0]);
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
    float* x = d.x;
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(b.x[0]));
    mma_m16n8k16<__half>(x + 4, a.x[0], a.x[1], a.x[2], a.x[3], b.x[2], b.x[3]);
    return d;
  }

  // (I + M)^-1 of the eight 8x8 blocks on the diagonal in the place of -M, by substitution in pairs of fp16: a lane
  // owns one column of four blocks' 32, then of the other four's. Column k of -M is row k of the tile: 16 bytes of it.
  static __device__ void solve(uint32_t tile, int lane) {
    const int column = lane & 7, block = lane >> 3;
    const uint32_t base = tile + block * (1024 + 16);
    uint32_t x[2][4];
    const uint32_t one = column & 1 ? 0x3c000000u : 0x3c00u;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[0][i] = x[1][i] = i == column >> 1 ? one : 0u;
#pragma unroll
    for (int k = 0; k < 7; ++k) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
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
    for (int r = 0; r < 2; ++r) {
      store_shared_u4((place ^ (r * 64)) + r * 4096, make_uint4(x[r][0], x[r][1], x[r][2], x[r][3]));
    }
    __syncwarp();
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

  // By one whole warp; `number`: the lane, out of a shuffle, so that the assembler cannot ask for it anew. gate: the
  // stage with kGateColumnA, kGatePair, kGateRow and kGateSum; betas: beta_t in natural order; mild_factor: the address
  // of kGateMild. wait_gates() returns when these are there. The caller fences and arrives. About 60 registers.
  // With kSavesA the tile takes A itself where decay is mild; elsewhere save_block(i, j, x0, x1, x2, x3) gets its
  // 16x16 blocks in row i and column j as 8x8 matrices: rows 0..7, then 8..15, columns 0..7 first.
  template <typename WaitGates, typename SaveBlock = NoBlocks>
  static __device__ __forceinline__ void run(uint32_t tile, uint32_t gate, uint32_t betas, uint32_t mild_factor,
                                             int number, WaitGates wait_gates, SaveBlock save_block = {}) {
    solve(tile, number);

    // Where the lane's eight elements of block (0, 0) lie when the four 8x8 matrices come by columns, and by rows; the
    // column of another block is an exclusive or.
    int lane;
    uint32_t by_columns, by_rows;
    uint32_t column_factors;  // by columns of A_g: rows of what the fragments hold
    auto find_place = [&] {
      // Out of a shuffle: the assembler would keep, and spill, what it made of the number before.
      lane = thread_from_shuffle(number, number);
      by_columns = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
      by_rows = tile + ((lane & 7) + 8 * (lane >> 4)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
      column_factors = gate + Traits::kGateColumnA + ((lane >> 3) * 20 + ((lane >> 2) & 1)) * 4;
    };
    find_place();
    auto left = [&](int j, int i) {
      Left a;
      load_matrix_x4((by_columns ^ (i << 5)) + j * 2048, a.x);
      return a;
    };
    auto right = [&](int j, int i) {
      Right b;
      load_matrix_x4_trans((by_columns ^ (i << 5)) + j * 2048, b.x[0], b.x[1], b.x[2], b.x[3]);
      return b;
    };
    // E of the 16x16 blocks on the diagonal: what was solved are the two 8x8 blocks of each; right of the first comes
    // E' U E'', as below.
    Left e[4];
    Right e_right[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      e[j] = left(j, j);
      e_right[j] = right(j, j);
      e[j].x[1] = 0u;
    }
    wait_gates();
    const float factor = load_shared_f1(mild_factor);
    // ptxas puts the other branch, for mild chunks, next to what is before it in the first form, after this one in the
    // second.
    const bool strong = kCompact ? __all_sync(0xffffffffu, factor == 0.0f) : !__any_sync(0xffffffffu, factor != 0.0f);
    const Right u01 = right(0, 1), u23 = right(2, 3);
    uint32_t corner[4];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      multiply_eights(corner[j], corner[j + 1], e[j].x[0], e[j + 1].x[0], e_right[j].x[2], e_right[j + 1].x[2]);
    }
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      multiply_eights(e[j].x[2], e[j + 1].x[2], corner[j], corner[j + 1], e_right[j].x[3], e_right[j + 1].x[3]);
    }
    const Left y01 = multiply(e[0], u01), y23 = multiply(e[2], u23);
    Left x12, x13, x02, x03;
    {
      const Right u12 = right(1, 2), u13 = right(1, 3);
      x12 = multiply(e[1], u12);
      x13 = multiply(e[1], u13);
      x02 = multiply(e[0], right(0, 2));
      x03 = multiply(e[0], right(0, 3));
#pragma unroll
      for (int j = 1; j < 4; ++j) e_right[j].x[2] = transpose_8x8(e[j].x[2]);
    }
    __syncwarp();
    // For later, so that no registers are kept for it.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_shared_f1(tile + (16 * j + (lane >> 2)) * 128 + (((2 * j + 1) ^ (lane >> 2)) << 4) + 4 * (lane & 3),
                      __uint_as_float(e[j].x[2]));
    }
    const Left a01 = multiply_triangular(y01, e_right[1]), a23 = multiply_triangular(y23, e_right[3]);
    Sum a12 = triangular_product(x12, e_right[2]), a13 = triangular_product(x13, e_right[3]);
    multiply_add(x02, a01, right(1, 2));
    multiply_add(x03, a01, right(1, 3));
    const Right a23_right = as_right(a23);
    add_half_product(a13, x12, a23_right);
    Sum a02 = triangular_product(x02, e_right[2]), a03 = triangular_product(x03, e_right[3]);
    add_half_product(a03, x02, a23_right);
    __syncwarp();  // A_g takes the place of what other lanes have been reading
    find_place();
    // Blocks right of the diagonal: store(block, j, i).
    auto store_all = [&](auto store) {
      store(unpacked(a01), 0, 1);
      store(a02, 0, 2);
      store(a03, 0, 3);
      store(a12, 1, 2);
      store(a13, 1, 3);
      store(unpacked(a23), 2, 3);
    };
    if (strong) {
      const int q = lane & 3, g = lane >> 2;
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
          Left a = left(j, j);
          a.x[1] = 0u;
          keep(unpacked(a), j, j);
#pragma unroll
          for (int i = 0; i < j; ++i) save_block(i, j, 0u, 0u, 0u, 0u);
        }
      }
      auto store_diagonal = [&](int j) {
        const Left a = left(j, j);
        const uint32_t rows = gate + 64 * j + 8 * q, columns = gate + 64 * j + 4 * g;
        const uint32_t beta = betas + 64 * j + 4 * g;
        const float2 sum0 = load_shared_f2(rows + Traits::kGateSum),
                     sum1 = load_shared_f2(rows + Traits::kGateSum + 32);
        const float low = load_shared_f1(columns + Traits::kGateSum),
                    high = load_shared_f1(columns + Traits::kGateSum + 32);
        const float beta_low = load_shared_f1(beta);
        const float beta_high = load_shared_f1(beta + 32);
        // Above the diagonal by a mask, not by a factor: the exponentials may have overflowed.
        const uint32_t mask = (2 * q >= g ? 0xffffu : 0u) | (2 * q + 1 >= g ? 0xffff0000u : 0u);
        store_matrix_x4_trans(
            (by_rows ^ (j << 5)) + j * 2048,
            mask & scaled(a.x[0], exp2_approx(sum0.x - low) * beta_low, exp2_approx(sum0.y - low) * beta_low), 0u,
            scaled(a.x[2], exp2_approx(sum1.x - low) * beta_low, exp2_approx(sum1.y - low) * beta_low),
            mask & scaled(a.x[3], exp2_approx(sum1.x - high) * beta_high, exp2_approx(sum1.y - high) * beta_high));
      };
      auto store = [&](const Sum& a, int j, int i) {
        if constexpr (kSavesA<Traits>) keep(a, j, i);
        const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * i + 4 * j);
        const float low = load_shared_f1(column_factors + 16 * j) * pair;
        const float high = load_shared_f1(column_factors + 16 * j + 8) * pair;
        const float2 row0 = load_shared_f2(gate + Traits::kGateRow + 64 * i + 8 * q);
        const float2 row1 = load_shared_f2(gate + Traits::kGateRow + 64 * i + 8 * q + 32);
        store_matrix_x4_trans((by_rows ^ (j << 5)) + i * 2048,
                              pack2<Element>(a.x[0] * (row0.x * low), a.x[1] * (row0.y * low)),
                              pack2<Element>(a.x[2] * (row0.x * high), a.x[3] * (row0.y * high)),
                              pack2<Element>(a.x[4] * (row1.x * low), a.x[5] * (row1.y * low)),
                              pack2<Element>(a.x[6] * (row1.x * high), a.x[7] * (row1.y * high)));
      };
      store_all(store);
      // A loop, as the cache of instructions, which another SM shares, has little room beside what mild chunks execute.
#pragma unroll(kCompact ? 1 : 4)
      for (int j = 0; j < 4; ++j) store_diagonal(j);
    } else {
      float low[4], high[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low[j] = kSavesA<Traits> ? 1.0f : load_shared_f1(column_factors + 16 * j);
        high[j] = kSavesA<Traits> ? 1.0f : load_shared_f1(column_factors + 16 * j + 8);
      }
      store_all([&](const Sum& a, int j, int i) {
        store_matrix_x4_trans((by_rows ^ (j << 5)) + i * 2048, pack2<Element>(a.x[0] * low[j], a.x[1] * low[j]),
                              pack2<Element>(a.x[2] * high[j], a.x[3] * high[j]),
                              pack2<Element>(a.x[4] * low[j], a.x[5] * low[j]),
                              pack2<Element>(a.x[6] * high[j], a.x[7] * high[j]));
      });
#pragma unroll
      for (int j = 0; j < 4; ++j) e[j] = left(j, j);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store_matrix_x4_trans((by_rows ^ (j << 5)) + j * 2048, scaled(e[j].x[0], low[j], low[j]), 0u,
                              scaled(e[j].x[2], low[j], low[j]), scaled(e[j].x[3], high[j], high[j]));
      }
    }
    __syncwarp();
    // The two blocks right of the diagonal that the state groups read.
    store_matrix_x4_trans(by_rows ^ (1 << 5), 0u, 0u, 0u, 0u);
    store_matrix_x4_trans((by_rows ^ (3 << 5)) + 2 * 2048, 0u, 0u, 0u, 0u);
  }
};

}  // namespace flash_qla::cuda::sm90
