// From K, Q and the gates to A_g and P: the product warpgroup, and the inverse warps.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/tile.cuh"
#include "cuda/sm90/common/trait_queries.h"
#include "cuda/sm90/common/ut_transform.cuh"

namespace flash_qla::cuda::sm90::fwd {

// One warpgroup: K K^T, -M in fp16, transposed, for the inverse; Q K^T and P.
template <typename Traits>
struct ProductWarpgroup : WarpRole<Traits> {
  using Base = WarpRole<Traits>;
  using Element = typename Traits::Element;
  using Base::descriptor;
  using Base::p;
  using Base::thread;
  static constexpr int kBarrier = 1;
  static constexpr bool kCompact = kCompactCode<Traits>;  // as in UtTransform

  __device__ FragmentPosition place() const { return fragment_position(recompute(thread)); }
  __device__ void sync() const { named_barrier_sync(kBarrier, 128); }

  // K of chunk m, if there is one, with its tail cleared.
  __device__ void wait_key(uint32_t m, int valid) const {
    if (valid < 0) return;
    Traits::FullK::wait(m);
    if (valid < kChunk) {
      zero_tail_rows(this->stage_k(m), 2, valid, thread);
      sync();
    }
  }

  // beta of the thread's rows in chunk m, if there is one.
  __device__ float2 load_beta(uint32_t m, int valid) const {
    if (valid >= 0) this->wait_input(m);
    const uint32_t beta = this->stage_input(m) + Traits::kInputBeta + 4 * place().row;
    return make_float2(load_shared_f1(beta), load_shared_f1(beta + 32));
  }

  // -M, M = lower(diag(beta) K K^T), in fp16.
  static __device__ void pack_m(const float (&x)[32], float2 beta, uint32_t (&packed)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float factor = i & 1 ? -beta.y : -beta.x;
      packed[i] = pack2<__half>(factor * x[2 * i], factor * x[2 * i + 1]);
    }
    pin(packed);
  }
  __device__ void store_m(const uint32_t (&packed)[16], uint32_t m) const {
    const FragmentPosition at = place();
    const uint32_t address = this->tile_a(m) + at.trans_row + at.trans_chunk;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t* x = packed + 4 * b;
      if (b <= at.warp) store_matrix_x4_trans(address + b * 2048, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    Traits::FullM::arrive(m, at.lane);
  }

  // P where the decay is not mild, with the factors of store_gated() in decay_products.cuh.
  __device__ void pack_gated(const float (&x)[32], uint32_t gate, uint32_t (&packed)[16]) const {
    const FragmentPosition at = place();
    const float row0 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row);
    const float row1 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row + 32);
    const float sum0 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row);
    const float sum1 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row + 32);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* z = x + 8 * b;
      if (b == at.warp) {
        const float2 c0 = load_shared_f2(gate + Traits::kGateSum + 64 * b + 8 * at.q);
        const float2 c1 = load_shared_f2(gate + Traits::kGateSum + 64 * b + 8 * at.q + 32);
        const float2 f0 = load_shared_f2(gate + Traits::kGateScaleP + 64 * b + 8 * at.q);
        const float2 f1 = load_shared_f2(gate + Traits::kGateScaleP + 64 * b + 8 * at.q + 32);
        packed[4 * b] =
            pack2<Element>(z[0] * (exp2_approx(sum0 - c0.x) * f0.x), z[1] * (exp2_approx(sum0 - c0.y) * f0.y));
        packed[4 * b + 1] =
            pack2<Element>(z[2] * (exp2_approx(sum1 - c0.x) * f0.x), z[3] * (exp2_approx(sum1 - c0.y) * f0.y));
        packed[4 * b + 2] = 0u;
        packed[4 * b + 3] =
            pack2<Element>(z[6] * (exp2_approx(sum1 - c1.x) * f1.x), z[7] * (exp2_approx(sum1 - c1.y) * f1.y));
      } else if (kCompact && b > at.warp) {
        packed[4 * b] = packed[4 * b + 1] = packed[4 * b + 2] = packed[4 * b + 3] = 0u;  // right of the diagonal
      } else {
        const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * at.warp + 4 * b);
        const float4 column = load_shared_f4(gate + Traits::kGateColumnP + 80 * at.q + 16 * b);
        const float f0 = row0 * pair, f1 = row1 * pair;
        packed[4 * b] = pack2<Element>(z[0] * (f0 * column.x), z[1] * (f0 * column.y));
        packed[4 * b + 1] = pack2<Element>(z[2] * (f1 * column.x), z[3] * (f1 * column.y));
        packed[4 * b + 2] = pack2<Element>(z[4] * (f0 * column.z), z[5] * (f0 * column.w));
        packed[4 * b + 3] = pack2<Element>(z[6] * (f1 * column.z), z[7] * (f1 * column.w));
      }
    }
  }
  __device__ void store_p(const uint32_t (&packed)[16], uint32_t m) const {
    const FragmentPosition at = place();
    const uint32_t row = Traits::TilesP::tile(m) + (16 * at.warp + (at.lane & 15)) * 128;
    // Above the diagonal by a mask, not by a factor: there an exponential may have overflowed.
    const int above = (at.lane >> 2) - 2 * at.q;
    const uint32_t mask = (above >= 0 ? 0xffffu : 0u) | (above > 0 ? 0xffff0000u : 0u);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b <= at.warp) {
        const uint32_t keep = b == at.warp ? mask : 0xffffffffu;
        const uint32_t* x = packed + 4 * b;
        store_matrix_x4(row + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4), x[0] & keep, x[1],
                        b == at.warp ? 0u : x[2], x[3] & keep);
      }
    }
    fence_proxy_async();
  }

  // At a sequence's end: V comes through a barrier of its own, and is passed on once its tail is cleared.
  __device__ void zero_tail_v(uint32_t m, int valid) const {
    uint32_t& tails = reinterpret_cast<uint32_t*>(shared_memory() + Traits::kTailCount)[m & 1];
    mbarrier_wait(Traits::TailV::barrier(m), tails & 1);
    zero_tail_rows(this->stage_v(m), Traits::kStateGroups, valid, thread);
    sync();
    if (thread == 0) {
      ++tails;
      mbarrier_arrive(this->full_p(m));
    } else if (kWarpArrivals == 32 && thread < 32) {
      mbarrier_arrive(this->full_p(m));
    }
  }

  // K K^T is made so many chunks ahead of P: as many as there are stages of K but for two, that of the state groups'
  // chunk and one that is on its way.
  static constexpr int kLead = Traits::kStagesK - 2;
  static_assert(kLead == 2 || kLead == 3);

  __device__ void run() const {
    int valid = descriptor(0).valid, valid1 = descriptor(1).valid, valid2 = valid1 < 0 ? -1 : descriptor(2).valid;
    if (valid < 0) return;
    float x[32];
    uint32_t packed[16];
    // M is stored, once its tile is free, a chunk later: those of the first chunks first.
    float2 beta;
#pragma unroll 1
    for (uint32_t m = 0; m < kLead - 1; ++m) {
      const int now = m == 0 ? valid : valid1;
      wait_key(m, now);
      start_product<Element>(x, wgmma_descriptor(this->stage_k(m)), wgmma_descriptor(this->stage_k(m)));
      beta = load_beta(m, now);
      wgmma_wait<0>();
      pin(x);
      pack_m(x, beta, packed);
      store_m(packed, m);
    }
    {
      constexpr uint32_t kNext = kLead - 1;
      const int next = kLead == 3 ? valid2 : valid1;
      wait_key(kNext, next);
      start_product<Element>(x, wgmma_descriptor(this->stage_k(kNext)), wgmma_descriptor(this->stage_k(kNext)));
      beta = load_beta(kNext, next);
      wgmma_wait<0>();
      pin(x);
    }
    // x is K K^T of chunk m + kLead - 1.
#pragma unroll 1
    for (uint32_t m = 0; valid >= 0; ++m) {
      pack_m(x, beta, packed);
      Traits::FullQ::wait(m);
      const bool makes_output =
          !Traits::kSkipsWarmup || __any_sync(0xffffffffu, (descriptor(m).flags & kWarmupChunk) == 0);
      if (makes_output)
        start_product<Element>(x, wgmma_descriptor(this->stage_q(m)), wgmma_descriptor(this->stage_k(m)));
      if (m >= 2) this->wait_done(m - 2);
      store_m(packed, m + kLead - 1);
      const int valid3 = descriptor(m + 3).valid;
      this->wait_gates(m);
      const float mild = load_shared_f1(this->stage_gate(m) + Traits::kGateMild);
      wgmma_wait<0>();
      pin(x);
      Traits::FreeQ::arrive(m, thread & 31);
      if (makes_output) {
        if (kCompact ? __all_sync(0xffffffffu, mild == 0.0f) : !__any_sync(0xffffffffu, mild != 0.0f)) {
          pack_gated(x, this->stage_gate(m), packed);
        } else {
#pragma unroll
          for (int i = 0; i < 16; ++i) packed[i] = pack2<Element>(x[2 * i] * mild, x[2 * i + 1] * mild);
        }
        pin(packed);
        store_p(packed, m);
      }
      if (valid < kChunk) zero_tail_v(m, valid);
      __syncwarp();
      mbarrier_arrive_warp(this->full_p(m), thread & 31);
      const int next = kLead == 3 ? valid3 : valid2;
      wait_key(m + kLead, next);
      start_product<Element>(x, wgmma_descriptor(this->stage_k(m + kLead)), wgmma_descriptor(this->stage_k(m + kLead)));
      beta = load_beta(m + kLead, next);
      wgmma_wait<0>();
      pin(x);
      valid = valid1;
      valid1 = valid2;
      valid2 = valid3;
    }
  }
};

// One warp to each chunk in turn: from -M, which the tile holds transposed, to A_g in its place.
template <typename Traits>
struct InverseWarp : WarpRole<Traits> {
  using Base = WarpRole<Traits>;
  using Base::descriptor;

  __device__ void run(uint32_t first) const {
#pragma unroll 1
    for (uint32_t m = first; descriptor(m).valid >= 0; m += 2) {
      Traits::FullM::wait(m);
      const uint32_t gate = this->stage_gate(m);
      const auto save_block = [&](int i, int j, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
        const ChunkDescriptor& c = descriptor(m);
        // Out of a shuffle, so that the rows are not kept from block to block, and spilled.
        const int lane = thread_from_shuffle(this->lane(), this->lane()), row = 16 * i + (lane >> 2);
        const int row_words = this->p.args.num_value_heads * (kChunk / 2);
        uint32_t* out = static_cast<uint32_t*>(this->p.args.a) + int64_t{c.row + row} * row_words +
                        c.head * (kChunk / 2) + 8 * j + (lane & 3);
        if (row < c.valid) out[0] = x0, out[4] = x1;
        if (row + 8 < c.valid) out[8 * row_words] = x2, out[8 * row_words + 4] = x3;
        __syncwarp();
      };
      UtTransform<Traits>::run(
          this->tile_a(m), gate, this->stage_input(m) + Traits::kInputBeta, gate + Traits::kGateMild, this->lane(),
          [&] { this->wait_gates(m); }, save_block);
      fence_proxy_async();
      __syncwarp();
      Traits::FullA::arrive(m, this->lane());
    }
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
