// A producer warpgroup of the kernels with the exact inverse and without a role to each warp: the gates, A_g and P of a
// chunk, and the copy engine.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/input_gates.cuh"
#include "cuda/sm90/chunk_fwd/warp_role.cuh"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/common/decay_products.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/ut_transform_wgmma.cuh"

namespace flash_qla::cuda::sm90::fwd {

template <typename Traits>
struct ProducerWarpgroup : ChunkStages<Traits> {
  using Element = typename Traits::Element;
  using Places = ChunkStages<Traits>;
  using Places::descriptor, Places::stage_k, Places::stage_q, Places::stage_v;
  const KernelArgs& p;
  int group;   // 0 or 1: the parity of its chunks
  int thread;  // 0..127

  __device__ int number() const { return recompute(thread); }

  __device__ uint32_t stage_gate(uint32_t m) const {
    return smem() + Traits::kSmemGate + recompute(m) % Traits::kStagesGate * Traits::kBytesGate;
  }
  __device__ uint32_t tile_a(uint32_t m) const {
    return smem() + Traits::kSmemA + recompute(m) % Traits::kStagesA * Traits::kBytesMatrix;
  }
  __device__ uint32_t full_p(uint32_t m) const { return smem() + Traits::kFullP + 8 * (recompute(m) & 1); }
  __device__ void sync(uint32_t m) const { named_barrier_sync(1 + (recompute(m) & 1), 128); }

  // The tensor map of Q, K, V or O. Where the parameters lie is asked of shared memory: the compiler would keep, and
  // spill, the address.
  __device__ const CUtensorMap* map(int i) const {
    uint64_t maps;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(maps) : "r"(smem() + Traits::kMaps));
    return reinterpret_cast<const CUtensorMap*>(maps) + i;
  }

  // K, or Q, of a chunk; by one thread each.
  __device__ void load_key_or_query(uint32_t m, bool query) const {
    const ChunkDescriptor& c = descriptor(m);
    if (c.valid < 0) return;
    const uint32_t barrier =
        smem() + (query ? Traits::kFullQ + 8 * (m % Traits::kBarriersQ) : Traits::kFullK + 8 * (m % Traits::kStagesK));
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(query ? stage_q(m) : stage_k(m), map(query ? 0 : 1), barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_v(uint32_t m, uint32_t barrier) const {
    const ChunkDescriptor& c = descriptor(m);
    mbarrier_arrive_expect(barrier, Traits::kBytesV);
    tma_load_4d(stage_v(m), map(2), barrier, 0, c.row, c.half, c.head);
  }

  // V into the stage that O of chunk m - 3 has left, by the thread that sent it, ahead of A_g: V comes late otherwise.
  __device__ void fetch_v(uint32_t m) const {
    if (number() != kCopyThread) return;
    m = recompute(m);
    if (m == 2) wait_o(m);  // the state groups' first O, which is none, goes to this stage
    tma_store_wait_read();
    load_v(m, descriptor(m).valid == kChunk ? full_p(m) : smem() + Traits::kTailV + 8 * (recompute(m) & 1));
  }

  // O of chunk m from its V stage to global memory, by the group of chunk m + 3; at a sequence's end: rows by hand.
  __device__ void store_o_rows(uint32_t m) const {
    const ChunkDescriptor& c = descriptor(m);
    constexpr int kPieces = Traits::kDv / 8;
    Element* out =
        static_cast<Element*>(p.args.o) + c.row * p.args.o_token_stride + c.head * p.args.o_head_stride + c.half * 64;
    for (int i = number(); i < c.valid * kPieces; i += 128) {
      const int row = i / kPieces, piece = i % kPieces;
      const uint4 value =
          load_shared_u4(stage_v(m) + (piece >> 3) * Traits::kHalf + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
      *reinterpret_cast<uint4*>(out + row * p.args.o_token_stride + piece * 8) = value;
    }
    sync(m + 3);
  }
  // ... and of a full chunk, by one thread.
  __device__ void store_o(uint32_t m) const {
    const ChunkDescriptor& c = descriptor(m);
    if (c.valid != kChunk || (c.flags & kWarmupChunk)) return;
    fence_proxy_async();
    tma_store_4d(map(3), stage_v(m), 0, c.row, c.half, c.head);
    tma_store_commit();
  }

  // Until O of chunk m - 3 is in its stage.
  __device__ void wait_o(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullO + 8 * (recompute(m) & 1), (recompute(m) - 2) >> 1 & 1);
  }
  // The thread that sends O and then fetches V into the same stage.
  static constexpr int kCopyThread = 64;
  static constexpr int kListThread = 0;  // of group 0: writes the descriptors, once its warp has solved its blocks

  // Under the substitution: O of chunk m - 3, which has `valid` rows, on its way.
  __device__ void send_o(uint32_t m, int valid) const {
    if (m < 3) return;
    if (valid < kChunk) {
      wait_o(m);
      store_o_rows(m - 3);
    } else if (number() == kCopyThread) {
      wait_o(m);
      store_o(m - 3);
    }
  }

  // Until chunk m - 2 is done, if there is one.
  __device__ void wait_done(uint32_t m) const {
    if (m >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (recompute(m) & 1), (m - 2) >> 1 & 1);
  }
  // K and Q into the stages of chunk m - 2, by the warps that have the least to do with A_g.
  __device__ void reload_stages(uint32_t m) const {
    const int own = number();
    if (own == 0 || own == 32) {
      wait_done(m);
      load_key_or_query(own == 0 ? m + 2 : m + 1, own != 0);
    }
  }

  // g and beta of one of the first chunks on their way; those of the others a state group fetches.
  __device__ void fetch_gates(uint32_t m) const {
    if (descriptor(m).valid >= 0)
      load_gates<Traits>(p.args, descriptor(m), stage_gate(m), smem() + Traits::kFullInput + 8 * m, number());
  }

  // Everything the state groups need for chunk m. Waits for the end of chunk m - 2 in the middle: until then only
  // memory of its own.
  __device__ void prepare(uint32_t m) {
    // K K^T, and the gates while it runs; its blocks into the inverse's workspace; the inverse.
    mbarrier_wait(smem() + Traits::kFullK + 8 * (m % Traits::kStagesK), m / Traits::kStagesK & 1);
    if (descriptor(m).valid < kChunk) {
      zero_tail_rows(stage_k(m), 2, descriptor(m).valid, number());
      sync(m);
    }
    {
      float kkt[32];
      const uint64_t k_rows = uniform_descriptor(stage_k(m));
      start_product<Element>(kkt, k_rows, k_rows);
      mbarrier_wait(smem() + Traits::kFullInput + 8 * (recompute(m) % Traits::kStagesGate),
                    m / Traits::kStagesGate & 1);
      const float beta0 = load_shared_f1(stage_gate(m) + Traits::kGateBeta + 4 * fragment_position(number()).row);
      const float beta1 = load_shared_f1(stage_gate(m) + Traits::kGateBeta + 4 * fragment_position(number()).row + 32);
      const int valid_o = descriptor(m - 3).valid;  // for m < 3 of no chunk, and not used
      wgmma_wait<0>();
      pin(kkt);
      store_kkt_for_wgmma<true>(kkt, beta0, beta1, tile_a(m), fragment_position(number()));
      sync(m);  // the diagonal blocks of M are there
      // Two warps solve them, then one of these writes the chunk list; of the others, which store the rest of M, one
      // sends O, one makes the gates.
      if (number() < 64) {
        solve_diagonal_blocks<kSolveInPairs<Element>>(tile_a(m), number() >> 4 & 2, number() & 31);
      } else {
        store_kkt_for_wgmma<false>(kkt, beta0, beta1, tile_a(m), fragment_position(number()));
        if (number() >= 96) {
          const uint32_t gate = stage_gate(m), place = 8 * (number() & 31);
          make_gates<Traits>(
              p.args.scale, load_shared_f2(gate + Traits::kGateInput + place),
              [&] { return load_shared_f2(gate + Traits::kGateBeta + place); },
              is_short_last_chunk<Traits>(descriptor(m)), gate, gate, number() & 31);
        }
      }
      send_o(m, valid_o);
      if (number() == kListThread && recompute(m) % 2 == 0) {
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
        m = __shfl_sync(0xffffffffu, m,
                        0);  // so that the tile's address is not kept, and spilled, all through the inverse
        mild = load_shared_f1(stage_gate(m) + Traits::kGateMild);
        const FragmentPosition at = fragment_position(number());
        own = load_shared_f4(stage_gate(m) + Traits::kGateColumnA + 80 * at.q + 16 * at.warp);
      };
      invert(a, d, tile_a(m), fragment_position(number()), [&] { sync(m); }, load_factors);
      m = recompute(m);
      sync(m);  // the inverse has been read: A_g takes its tile
      fetch_v(m);
      if (__any_sync(0xffffffffu, mild != 0.0f)) {
        const float2 diagonal[3] = {unpack2<__half>(d[0]), unpack2<__half>(d[1]), unpack2<__half>(d[3])};
        store_mild<Traits, true>(a[0], diagonal, own, tile_a(m), stage_gate(m), fragment_position(number()));
      } else {
        const float2 diagonal[3] = {unpack2<__half>(d[0]), unpack2<__half>(d[1]), unpack2<__half>(d[3])};
        store_gated<Traits, true>(a[0], diagonal, tile_a(m), stage_gate(m), fragment_position(number()));
      }
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_warp(smem() + Traits::kFullA + 8 * (m % Traits::kStagesA), number() & 31);
    m = recompute(m);
    reload_stages(m);

    // Q K^T and P.
    mbarrier_wait(smem() + Traits::kFullQ + 8 * (m % Traits::kBarriersQ), m / Traits::kBarriersQ & 1);
    float qkt[32];
    start_product<Element>(qkt, uniform_descriptor(stage_q(m)), uniform_descriptor(stage_k(m)));
    m = recompute(m);
    // Up to here memory of this group's own. With chunk m - 2 done its stages and P's tile are free.
    wait_done(m);
    const float mild = load_shared_f1(stage_gate(m) + Traits::kGateMild);
    wgmma_wait<0>();
    pin(qkt);
    {
      const FragmentPosition at = fragment_position(number());
      float2 diagonal[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int first = i == 2 ? 6 : 2 * i;
        diagonal[i] = make_float2(diagonal_block(qkt, first, at.warp), diagonal_block(qkt, first + 1, at.warp));
      }
      const uint32_t tile = smem() + Traits::kSmemP + (recompute(m) & 1) * Traits::kBytesMatrix;
      if (__any_sync(0xffffffffu, mild != 0.0f)) {
        store_mild<Traits, false>(qkt, diagonal, make_float4(mild, mild, mild, mild), tile, stage_gate(m), at);
      } else {
        store_gated<Traits, false>(qkt, diagonal, tile, stage_gate(m), at);
      }
    }
    fence_proxy_async();
    if (descriptor(m).valid < kChunk) zero_tail_v(m, descriptor(m).valid);
    __syncwarp();
    mbarrier_arrive_warp(full_p(m), number() & 31);
  }

  // At a sequence's end V comes through a barrier of this group's own, and is passed on once its tail is cleared.
  __device__ void zero_tail_v(uint32_t m, int valid) {
    uint32_t& tails = reinterpret_cast<uint32_t*>(shared_memory() + Traits::kTailCount)[recompute(m) & 1];
    mbarrier_wait(smem() + Traits::kTailV + 8 * (recompute(m) & 1), tails & 1);
    zero_tail_rows(stage_v(m), Traits::kStateGroups, valid, number());
    sync(m);
    if (number() == 0) {
      ++tails;
      mbarrier_arrive(full_p(m));
    }
  }

  __device__ void run() {
    if (number() == 0) {
      load_key_or_query(group, false);
      if (group == 0) load_key_or_query(0, true);
    }
    fetch_gates(group);
    if (group == 0) fetch_gates(2);
    uint32_t m = group;
#pragma unroll 1
    for (; descriptor(m).valid >= 0; m += 2) prepare(m);
    // The last chunks' O.
    const bool follows_end = m > 0 && descriptor(m - 1).valid < 0;
#pragma unroll 1
    for (uint32_t i = m; i <= (follows_end ? m : m + 2); i += 2) {
      if (i < 2) continue;
      // All threads: a wait left out would make the next one's parity ambiguous.
      const bool last = i == m + 2;
      mbarrier_wait(smem() + (last ? Traits::kFullLast : Traits::kFullO + 8 * (i & 1)), last ? 0 : (i - 2) >> 1 & 1);
      if (i < 3) continue;
      if (descriptor(i - 3).valid < kChunk) store_o_rows(i - 3);
      if (number() == kCopyThread) store_o(i - 3);
    }
    if (number() == kCopyThread) tma_store_wait_all();
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
