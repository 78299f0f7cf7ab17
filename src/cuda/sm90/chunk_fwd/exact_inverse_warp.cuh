// The inverse warps of the kernels with the bits of invert().
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/half_blocks.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/warp_role.cuh"
#include "cuda/sm90/common/packed_half.cuh"
#include "cuda/sm90/common/ut_transform_wgmma.cuh"

namespace flash_qla::cuda::sm90::fwd {

// One warp to each chunk in turn: from -M, which the tile holds transposed, tile[column][row], to A_g in its place. The
// bits are those of invert() in ut_transform_wgmma.cuh: the same products of the same numbers in the same order, here
// by mma.sync.
template <typename Traits>
struct ExactInverseWarp : WarpRole<Traits> {
  using Base = WarpRole<Traits>;
  using Element = typename Traits::Element;
  using Base::descriptor;
  using Base::p;

  using Left = HalfLeft;
  using Right = HalfRight;
  using Sum = HalfSum;
  static __device__ Sum multiply(const Left& a, const Right& b) {
    Sum d;
    add_half_product(d, a, b);
    return d;
  }
  static __device__ Left rounded(const Sum& d) {
    Left a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.x[i] = pack2<__half>(d.x[2 * i], d.x[2 * i + 1]);
    return a;
  }
  static __device__ Right as_right(const Left& a) {
    Right b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b.x[i] = transpose_8x8(a.x[i]);
    return b;
  }

  // D of all four diagonal blocks in the place of -M.
  static __device__ void solve(uint32_t tile, int lane) {
    static_assert(kSolveInPairs<Element>);
    // As solve_diagonal_blocks<true>(), two chains side by side.
    const int column = lane & 15, block = lane >> 4;
    const uint32_t rows = tile + 16 * block * 128;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rows + ((block ^ i) << 5);
    uint32_t x[2][8];
    const uint32_t one = column & 1 ? 0x3c000000u : 0x3c00u;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[0][i] = x[1][i] = i == column >> 1 ? one : 0u;
#pragma unroll
    for (int k = 0; k < 15; ++k) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t row = pairs[((k & 7) >> 1) ^ (2 * r)] + k * 128 + r * 4096;
        uint4 m[2];
        if (k < 7) m[0] = load_shared_u4(row + 16 * (k & 1));
        m[1] = load_shared_u4(row + 16 * (~k & 1));
        const uint32_t values[8] = {m[0].x, m[0].y, m[0].z, m[0].w, m[1].x, m[1].y, m[1].z, m[1].w};
        const uint32_t known = __byte_perm(x[r][k >> 1], 0u, k & 1 ? 0x3232 : 0x1010);
#pragma unroll
        for (int i = (k >> 1) + (k & 1); i < 8; ++i) {
          x[r][i] = fma2(k == 2 * i ? values[i] & 0xffff0000u : values[i], known, x[r][i]);
        }
      }
    }
    __syncwarp();  // D takes the place of what the other lanes have been reading
    const uint32_t address = rows + column * 128 + (((2 * block) ^ (lane & 7)) << 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t place = (address ^ (r * 64)) + r * 4096;
      store_shared_u4(place, make_uint4(x[r][0], x[r][1], x[r][2], x[r][3]));
      store_shared_u4(place ^ 16, make_uint4(x[r][4], x[r][5], x[r][6], x[r][7]));
    }
    __syncwarp();
  }

  __device__ void invert(uint32_t m) const {
    Traits::FullM::wait(m);
    solve(this->tile_a(m), this->lane());

    m = recompute(m);
    const uint32_t tile = this->tile_a(m), gate = this->stage_gate(m);
    // Where the lane's eight elements of block (0, 0) of the tile lie when the four 8x8 matrices come by rows; the
    // column of another block is an exclusive or. by_columns: of A_g, which is not transposed.
    int lane;
    uint32_t by_rows, by_columns;
    auto find_place = [&] {
      // Out of a shuffle: the assembler would keep, and spill, what it made of the number before.
      lane = thread_from_shuffle(this->lane(), this->lane());
      by_rows = tile + ((lane & 7) + 8 * (lane >> 4)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
      by_columns = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    };
    find_place();
    // Block (i, j) of -M below the diagonal, of D on it.
    auto left = [&](int i, int j) {
      Left a;
      load_matrix_x4_trans((by_rows ^ (i << 5)) + j * 2048, a.x[0], a.x[1], a.x[2], a.x[3]);
      return a;
    };
    auto right = [&](int i, int j) {
      Right b;
      load_matrix_x4((by_rows ^ (i << 5)) + j * 2048, b.x);
      return b;
    };
    // X = -D M, I + X + X^2 + X^3 without its diagonal.
    Left x10, x20, x21, x30, x31, x32;
    {
      const Left d1 = left(1, 1);
      x10 = rounded(multiply(d1, right(1, 0)));
    }
    {
      const Left d2 = left(2, 2);
      x20 = rounded(multiply(d2, right(2, 0)));
      x21 = rounded(multiply(d2, right(2, 1)));
    }
    {
      const Right r10 = as_right(x10);
      const Sum square20 = multiply(x21, r10);
      const Left d3 = left(3, 3);
      x32 = rounded(multiply(d3, right(3, 2)));
      x31 = rounded(multiply(d3, right(3, 1)));
      const Left y31 = rounded(multiply(x32, as_right(x21)));
      // Zero, though the assembler cannot know it before y31 is there: it would begin with all that follows at once,
      // and spill.
      const uint32_t late = __funnelshift_rc(y31.x[0], 0u, blockDim.x / (Traits::kThreads / 32));
      x31.x[0] |= late;
      Sum square30 = multiply(x31, r10);
      add_half_product(square30, x32, as_right(x20));
      const Sum cube = multiply(y31, r10);
      Right r30;
      load_matrix_x4((by_rows ^ (3 << 5)) + late, r30.x);
      x30 = rounded(multiply(d3, r30));
      const Left y20 = rounded(square20);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x20.x[i] = add2(y20.x[i], x20.x[i]);
        x31.x[i] = add2(y31.x[i], x31.x[i]);
        x30.x[i] =
            add2(pack2<__half>(square30.x[2 * i] + cube.x[2 * i], square30.x[2 * i + 1] + cube.x[2 * i + 1]), x30.x[i]);
      }
    }

    // A = (I + ..) D, block by block, with the factors of store_mild() and store_gated() in decay_products.cuh.
    this->wait_gates(m);
    find_place();
    auto store = [&](int i, int j, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
      store_matrix_x4((by_columns ^ (j << 5)) + i * 2048, a0, a1, a2, a3);
    };
    if (__any_sync(0xffffffffu, load_shared_f1(gate + Traits::kGateMild) != 0.0f)) {
      const uint32_t columns = gate + Traits::kGateColumnA + 80 * (lane & 3);
      auto finish = [&](const Left& y, int i, int j) {
        const Sum a = multiply(y, right(j, j));
        const float4 f = load_shared_f4(columns + 16 * j);
        store(i, j, pack2<Element>(a.x[0] * f.x, a.x[1] * f.y), pack2<Element>(a.x[2] * f.x, a.x[3] * f.y),
              pack2<Element>(a.x[4] * f.z, a.x[5] * f.w), pack2<Element>(a.x[6] * f.z, a.x[7] * f.w));
      };
      finish(x10, 1, 0);
      finish(x20, 2, 0);
      finish(x30, 3, 0);
      finish(x21, 2, 1);
      finish(x31, 3, 1);
      finish(x32, 3, 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Left d = left(i, i);
        const float4 f = load_shared_f4(columns + 16 * i);
        const float2 d0 = unpack2<__half>(d.x[0]), d1 = unpack2<__half>(d.x[1]), d3 = unpack2<__half>(d.x[3]);
        __syncwarp();  // A_g takes the place of what other lanes have been reading
        store(i, i, pack2<Element>(d0.x * f.x, d0.y * f.y), pack2<Element>(d1.x * f.x, d1.y * f.y), 0u,
              pack2<Element>(d3.x * f.z, d3.y * f.w));
      }
    } else {
      const int q = lane & 3, g = lane >> 2;
      auto finish = [&](const Left& y, int i, int j) {
        const Sum a = multiply(y, right(j, j));
        const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * i + 4 * j);
        const float f0 = load_shared_f1(gate + Traits::kGateRow + 64 * i + 4 * g) * pair;
        const float f1 = load_shared_f1(gate + Traits::kGateRow + 64 * i + 4 * g + 32) * pair;
        const float4 f = load_shared_f4(gate + Traits::kGateColumnA + 80 * q + 16 * j);
        store(i, j, pack2<Element>(a.x[0] * (f0 * f.x), a.x[1] * (f0 * f.y)),
              pack2<Element>(a.x[2] * (f1 * f.x), a.x[3] * (f1 * f.y)),
              pack2<Element>(a.x[4] * (f0 * f.z), a.x[5] * (f0 * f.w)),
              pack2<Element>(a.x[6] * (f1 * f.z), a.x[7] * (f1 * f.w)));
      };
      finish(x10, 1, 0);
      finish(x20, 2, 0);
      finish(x30, 3, 0);
      finish(x21, 2, 1);
      finish(x31, 3, 1);
      finish(x32, 3, 2);
      // Above the diagonal by a mask, not by a factor: the exponentials may have overflowed.
      const uint32_t mask = (g >= 2 * q ? 0xffffu : 0u) | (g > 2 * q ? 0xffff0000u : 0u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Left d = left(i, i);
        uint32_t diagonal[3];
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          const float2 y = unpack2<__half>(d.x[k == 2 ? 3 : k]);
          const float sum = load_shared_f1(gate + Traits::kGateSum + 64 * i + 4 * g + (k > 0 ? 32 : 0));
          const uint32_t place = 64 * i + 8 * q + (k > 1 ? 32 : 0);
          const float2 column = load_shared_f2(gate + Traits::kGateSum + place);
          const float2 beta = load_shared_f2(this->stage_input(m) + Traits::kInputBeta + place);
          diagonal[k] = pack2<Element>(y.x * (exp2_approx(sum - column.x) * beta.x),
                                       y.y * (exp2_approx(sum - column.y) * beta.y));
        }
        __syncwarp();
        store(i, i, diagonal[0] & mask, diagonal[1], 0u, diagonal[2] & mask);
      }
    }
    // The two blocks right of the diagonal that the state groups read.
    store(0, 1, 0u, 0u, 0u, 0u);
    store(2, 3, 0u, 0u, 0u, 0u);
    fence_proxy_async();
    __syncwarp();
    Traits::FullA::arrive(m, this->lane());
  }

  __device__ void run(uint32_t first) const {
#pragma unroll 1
    for (uint32_t m = first; descriptor(m).valid >= 0; m += 2) invert(m);
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
