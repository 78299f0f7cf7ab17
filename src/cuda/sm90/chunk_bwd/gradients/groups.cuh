// What a group of the gradients' kernel (gradients/kernel.cuh) does for one value head.
#pragma once

#include "cuda/sm90/chunk_bwd/gradients/layout.cuh"

namespace flash_qla::cuda::sm90::bwd {

// One warpgroup through one value head, both halves of V. Its sums go to `sums` and `last`.
template <typename T>
struct HeadWork {
  const Args& p;
  const GradientsBarriers bars;
  uint32_t smem;
  uint32_t index, turn;  // items and heads before this one
  uint32_t rank;
  int warp, lane;

  __device__ GradientsItem item() const { return GradientsItem(smem, index); }
  __device__ uint32_t sQ() const { return smem + rank * GradientsTraits::kKeys + GradientsTraits::kQ; }
  __device__ uint32_t sK() const { return smem + rank * GradientsTraits::kKeys + GradientsTraits::kK; }
  __device__ uint32_t sums() const { return smem + GradientsTraits::kSums + turn % 2 * GradientsTraits::kSumsBytes; }
  __device__ void open_sums() const { mbarrier_wait(bars.sums_empty(turn % 2), (turn / 2 % 2) ^ 1); }
  __device__ int row(int h) const { return 16 * warp + (lane >> 2) + 8 * h; }
  __device__ uint32_t open(uint32_t half) const {
    mbarrier_wait(bars.full(half), turn % 2);
    return smem + GradientsTraits::kStageRing + half * GradientsTraits::kStage;
  }
  // Of the early chunk, then of the late one.
  __device__ uint32_t both_gates() const {
    return smem + GradientsTraits::kGates + turn % 2 * GradientsTraits::kHeadGates;
  }
  __device__ uint32_t own_gates() const { return both_gates() + rank * kGateBytes; }
  // In both blocks: both load to it.
  __device__ void release(int half) const {
    __syncwarp();
    arrive_both(bars.empty(half), lane);
  }
  // The rows' sums after the head, of minus after its first and after its second part, as they run on over the heads of
  // an item (who makes dg takes the differences); dot: the lane's of row_dots().
  __device__ void keep_sums(int group, bool second, float dot) const {
    const uint32_t to =
        group != kMinus || second ? static_cast<uint32_t>(group) * kChunk * 4 : GradientsTraits::kStateSums;
    if ((lane & 2) == 0) store_shared_f1(sums() + to + row(lane & 1) * 4, dot);
  }

  // The query group's part (rows dO, factor scale, the diagonal included) and the plus group's (rows dv, factor -rho,
  // strictly lower) are one code: two groups running the same instructions fetch them once.
  __device__ __forceinline__ void lower(bool plus, uint32_t own_rows, float (&acc)[64], uint32_t (&dot_rows)[32]) {
    using Traits = GradientsTraits;
    // Products with the own chunk's V', and of the late block with the early chunk's.
    float product[32], border[32];
    const uint32_t rows_at = plus ? Traits::kDv : Traits::kDo;
    const uint32_t gates = own_gates(), group_barrier = kTailBarrier + static_cast<uint32_t>(plus);
#pragma unroll
    for (int i = 0; i < 32; ++i) product[i] = border[i] = 0.0f;
    pin(product);  // zeroed before the wait, not after it
    pin(border);
    open(0);  // the gates have come with it; ahead of the products, beside which a load takes 100 clocks
    const float gamma_early = rank == kLate ? load_shared_f1(both_gates() + kGammaOffset + (kChunk - 1) * 4) : 1.0f;
    const auto row_factor = [&](int h) {
      return RowFactor<T>(factor_of(plus, gates, h) * gamma_early * load_shared_f1(gates + kGammaOffset + row(h) * 4));
    };
    const RowFactor<T> row_factors[2] = {row_factor(0), row_factor(1)};
#pragma unroll 1
    for (uint32_t half = 0; half < 2; ++half) {
      const int valid = item().valid();
      const uint32_t stage = open(half);
      static_assert(Traits::kVLate == Traits::kVEarly + kTileBytes);
      if (valid < kChunk) {  // a neighbour's rows, NaN perhaps
        zero_tail(stage + rows_at, valid, 32 * warp + lane, 128);
        fence_proxy_async();
        named_barrier_sync(group_barrier, 128);
      }
      uint32_t x[16];
      load_rows(x, stage + rows_at, warp, lane);
      wgmma_fence();
      add_rows_times_rows<T>(product, x, stage + Traits::kVEarly + rank * kTileBytes);
      wgmma_commit();
      if (rank == kLate) {  // from the tile: the rows in registers are scaled meanwhile
        wgmma_fence();
        add_tile_times_rows<T>(border, stage + rows_at, stage + Traits::kVEarly);
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      pin(x);
      pin(product);
      scale_rows<T>(x, row_factors);
      wgmma_fence();
      add_product<T>(acc, x, stage + Traits::kState);
      wgmma_commit();
      wgmma_wait<0>();
      pin(x);
      pin(border);
      pin(acc);
      release(half);
    }
    // What follows from these is made again: few registers in the loop.
    recompute_from(warp, lane);
    open_sums();
    const float factor[2] = {factor_of(plus, gates, 0), factor_of(plus, gates, 1)};
    if (plus) keep_diagonal(product, gates);

    // dP = scale G o (dO V'^T) or D = -beta_row G o strict_lower(Z V'^T).
    mbarrier_wait(bars.keys_full(), index % 2);
    if (rank == kLate) {
      uint32_t across[16];
      // From an early token to the chunks' border and on to the row's: neither factor grows where decays do not.
      const float row_factor[2] = {factor[0] * load_shared_f1(gates + kGammaOffset + row(0) * 4),
                                   factor[1] * load_shared_f1(gates + kGammaOffset + row(1) * 4)};
      const uint32_t ratios = both_gates() + kRatioOffset + 2 * (lane & 3) * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 ratio = load_shared_f2(ratios + 8 * j * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          across[2 * j + h] = pack2<T>(row_factor[h] * ratio.x * border[4 * j + 2 * h],
                                       row_factor[h] * ratio.y * border[4 * j + 2 * h + 1]);
        }
      }
      wgmma_fence();
      add_product<T>(acc, across, smem + Traits::kK);
      wgmma_commit();
      mbarrier_wait(bars.late_rows_empty(), (turn % 2) ^ 1);
      const uint32_t tile = smem + Traits::kStaging + (plus ? kTileBytes : 0);
      store_rows_of(tile, across);
      fence_proxy_async();
      __syncwarp();
      if (elect_one()) {  // each warp its own rows: nobody waits for the other warps
        const uint32_t rows = static_cast<uint32_t>(warp) * (kTileBytes / 4);
        bulk_copy_cluster(cluster_address(smem + (plus ? Traits::kLateRowsD : Traits::kLateRowsP) + rows, kEarly),
                          tile + rows, kTileBytes / 4, cluster_address(bars.late_rows_full(), kEarly));
      }
      wgmma_wait<0>();
      pin(across);
      pin(acc);
    }
    uint32_t packed[16];
    {
      const int below = (lane >> 2) - 2 * (lane & 3) - static_cast<int>(plus);
      const uint32_t triangle = (below >= 0 ? 0xffffu : 0u) | (below >= 1 ? 0xffff0000u : 0u);
      // Of 8 x 8 blocks those below the diagonal count whole, those on it by `triangle`: masked as packed words, for
      // what lies above may be NaN. The blocks of rows of this warp are 2 warp + h. Column block j counts whole if it
      // is before that, and at all if the one before it is; from 0 to 3 warps there are, so that some are known.
      const auto masked = [&](int j, int h, uint32_t pair) {
        const int at = j - h, before_it = at - 1;
        const uint32_t whole = (at < 0) ? ~0u : (at >= 6) ? 0u : (warp > at / 2) ? ~0u : 0u;
        const uint32_t part = (at < 1) ? ~0u : (at >= 7) ? 0u : (warp > before_it / 2) ? ~0u : 0u;
        return pair & ((triangle | whole) & part);
      };
      const uint32_t columns = gates + 2 * (lane & 3) * 4;
      const float c_last = load_shared_f1(gates + (kChunk - 1) * 4);
      if (spans_little(gates, c_last)) {
        // From the row's token to the chunk's end and back to the column's, both of them within what fp32 can hold.
        float row_factor[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
          row_factor[h] = factor[h] * exp2_approx(load_shared_f1(gates + row(h) * 4) - c_last);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 ratio = load_shared_f2(columns + kRatioOffset + 8 * j * 4);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* x = product + 4 * j + 2 * h;
            packed[2 * j + h] = masked(j, h, pack2<T>(row_factor[h] * ratio.x * x[0], row_factor[h] * ratio.y * x[1]));
          }
        }
      } else {
        // The factor's logarithm goes with the row's gate, its sign with the mask.
        float c_row[2];
        uint32_t sign[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          c_row[h] = load_shared_f1(gates + row(h) * 4) + log2_approx(fabsf(factor[h]));
          sign[h] = factor[h] < 0.0f ? 0x80008000u : 0u;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 c = load_shared_f2(columns + 8 * j * 4);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float* x = product + 4 * j + 2 * h;
            packed[2 * j + h] =
                masked(j, h, pack2<T>(exp2_approx(c_row[h] - c.x) * x[0], exp2_approx(c_row[h] - c.y) * x[1])) ^
                sign[h];
          }
        }
      }
    }
    wgmma_fence();
    add_product<T>(acc, packed, sK());
    wgmma_commit();
    mbarrier_wait(bars.products_empty(), (turn % 2) ^ 1);
    store_rows_of(smem + (plus ? Traits::kD : Traits::kP), packed);
    __syncwarp();
    mbarrier_arrive_warp(bars.products_full(), lane);
    load_dot_rows(dot_rows, own_rows, warp, lane);
    wgmma_wait<0>();
    pin(packed);
    pin(acc);
  }

  // Whether every token's decay to the chunk's end, and its inverse, are far within fp32: 2^-100 to 2^100.
  __device__ __forceinline__ bool spans_little(uint32_t gates, float c_last) const {
    constexpr float kMost = 100.0f;
    const bool first = fabsf(load_shared_f1(gates + lane * 4) - c_last) < kMost;
    const bool second = fabsf(load_shared_f1(gates + (32 + lane) * 4) - c_last) < kMost;
    return __all_sync(0xffffffffu, first && second);  // not if one is NaN
  }

  // Of row(h): scale, or -rho. dv of a small beta is Z, and rho = beta what is missing; else rho = 1.
  __device__ __forceinline__ float factor_of(bool plus, uint32_t gates, int h) const {
    const float beta = load_shared_f1(gates + kBetaOffset + row(h) * 4);
    return !plus ? p.scale : fabsf(beta) < p.small_beta ? -beta : -1.0f;
  }

  // A operand registers as the warp's rows of a tile.
  __device__ __forceinline__ void store_rows_of(uint32_t tile, const uint32_t (&x)[16]) const {
    const uint32_t first = tile_piece(tile, 16 * warp + (lane & 15), lane >> 4);  // as in load_rows
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_matrix_x4(first ^ (2 * j << 4), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
  }

  // The decay of the late chunk.
  __device__ __forceinline__ float late_decay() const {
    return item().late_valid() > 0 ? load_shared_f1(both_gates() + kGateBytes + kGammaOffset + (kChunk - 1) * 4) : 1.0f;
  }

  // <dv, V'> from the diagonal of the product, and beta, for dbeta.
  __device__ __forceinline__ void keep_diagonal(const float* product, uint32_t gates) const {
    float dot[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (j == warp) dot[h] = (lane >> 2 & 1) == 0 ? product[8 * j + 6 * h] : product[8 * j + 6 * h + 1];
      }
    }
    if ((lane >> 3) != (lane & 3)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t to = sums() + 3 * kChunk * 4 + row(h) * 4;
      store_shared_f1(to, dot[h]);
      store_shared_f1(to + kChunk * 4, load_shared_f1(gates + kBetaOffset + row(h) * 4));
    }
  }

  // X^T as A operand, X a tile [64][64].
  __device__ __forceinline__ void load_transposed(uint32_t (&x)[16], uint32_t sX) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at_row = 16 * j + 8 * (lane >> 4) + (lane & 7), piece = 2 * warp + (lane >> 3 & 1);
      load_matrix_x4_trans(tile_piece(sX, at_row, piece), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
  }

  // The minus group's first part, diag(gP / gamma) V' dS^T. V' is multiplied as it is, for rows with their factor would
  // be rounded again: the sums of the heads before are divided by it instead, and with the product multiplied, in fp32.
  // Returns the thread's part of gP <dS, S> over half of K, made while the products are on their way.
  __device__ __forceinline__ float minus_of_state(float (&acc)[64]) const {
    using Traits = GradientsTraits;
    // What decays further than this is nothing beside V' and dS; division by it leaves fp32 another 60 binary orders.
    constexpr float kLeastFactor = 0x1p-64f;
    const uint32_t ratios = own_gates() + kRatioOffset;
    open(0);
    const float decay = rank == kLate ? 1.0f : late_decay();
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float f = decay * load_shared_f1(ratios + row(h) * 4);
      factor[h] = f < kLeastFactor ? kLeastFactor : f;  // NaN stays
      const float inverse = __fdividef(1.0f, factor[h]);
#pragma unroll
      for (int j = 0; j < 32; ++j) acc[4 * (j / 2) + 2 * h + j % 2] *= inverse;
    }
    float inner = 0.0f;
#pragma unroll 1
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t stage = open(half);
      const uint64_t x = wgmma_descriptor(stage + Traits::kVEarly + rank * kTileBytes);
      const uint64_t y = wgmma_descriptor(stage + Traits::kGrad, kTileBytes);
      pin(acc);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_ss_n128_trans<T>(acc, wgmma_advance(x, j * 32), wgmma_advance(y, j * 2048));
      wgmma_commit();
      const uint32_t part = stage + rank * kTileBytes;
      inner += state_product<T>(part + Traits::kState, part + Traits::kGrad, 32 * warp + lane, 128);
      wgmma_wait<0>();
      pin(acc);
      release(half);
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] *= factor[i / 2 % 2];
    return inner * late_decay() * load_shared_f1(both_gates() + kGammaOffset + (kChunk - 1) * 4);
  }

  // The minus group's second part: dP^T Q + D^T K of the chunk's own rows, and in the early block of the late chunk's.
  // Of an item's last head the place of dP and D is needed once more.
  __device__ __forceinline__ void add_transposed(bool is_last, float (&acc)[64]) const {
    using Traits = GradientsTraits;
    mbarrier_wait(bars.products_full(), turn % 2);
    uint32_t dP[16], D[16];
    load_transposed(dP, smem + Traits::kP);
    load_transposed(D, smem + Traits::kD);
    __syncwarp();
    if (!is_last) mbarrier_arrive_warp(bars.products_empty(), lane);
    wgmma_fence();
    add_product<T>(acc, dP, sQ());
    add_product<T>(acc, D, sK());
    wgmma_commit();
    wgmma_wait<0>();
    pin(dP);
    pin(D);
    pin(acc);
    if (rank == kEarly) {
      if (warp == 0 && lane == 0) mbarrier_arrive_expect(bars.late_rows_full(), 2 * kTileBytes);
      mbarrier_wait(bars.late_rows_full(), turn % 2);
      load_transposed(dP, smem + Traits::kLateRowsP);
      load_transposed(D, smem + Traits::kLateRowsD);
      wgmma_fence();
      add_product<T>(acc, dP, smem + kLate * Traits::kKeys + Traits::kQ);
      add_product<T>(acc, D, smem + kLate * Traits::kKeys + Traits::kK);
      wgmma_commit();
      // Behind the products: what they take has come back from the place that the other block's engine fills next.
      __syncwarp();
      if (kWarpArrivals == 32 || lane == 0) mbarrier_arrive_cluster(cluster_address(bars.late_rows_empty(), kLate));
      wgmma_wait<0>();
      pin(dP);
      pin(D);
      pin(acc);
    }
  }
};

}  // namespace flash_qla::cuda::sm90::bwd
