// The load warp: K, Q and V into their stages, O out of V's.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"

namespace flash_qla::cuda::sm90::fwd {

// One warp: K, Q and V into their stages, O out of V's.
template <typename Traits>
struct LoadWarp : WarpRole<Traits> {
  using Base = WarpRole<Traits>;
  using Element = typename Traits::Element;
  using Base::descriptor;
  using Base::p;

  // Of a chunk's descriptor: what its loads take. Read ahead, so that a load goes as soon as its stage is free.
  struct Rows {
    int row, valid, head, key_head;
  };
  __device__ Rows rows(uint32_t m) const {
    const ChunkDescriptor& c = descriptor(m);
    return {c.row, c.valid, c.head, c.key_head};
  }
  __device__ void load_k(uint32_t m, const Rows& c) const {
    if (c.valid < 0) return;
    const uint32_t barrier = Traits::FullK::barrier(m);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(this->stage_k(m), &p.k, barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_q(uint32_t m, const Rows& c) const {
    if (c.valid < 0) return;
    const uint32_t barrier = Traits::FullQ::barrier(m);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(this->stage_q(m), &p.q, barrier, 0, c.row, 0, c.key_head);
  }
  // At a sequence's end V comes through a barrier of its own: its tail is cleared before it is passed on. The
  // arrival also says that the warp has read O of the stage: for racecheck all lanes make it.
  static constexpr bool kAllLanesArriveForV = kWarpArrivals == 32;
  __device__ void load_v(uint32_t m, const Rows& c) const {
    if (c.valid < 0) return;
    const uint32_t barrier = c.valid == kChunk ? this->full_p(m) : Traits::TailV::barrier(m);
    if (kAllLanesArriveForV && this->lane() != 0) return mbarrier_arrive(barrier);
    mbarrier_arrive_expect(barrier, Traits::kBytesV);
    tma_load_4d(this->stage_v(m), &p.v, barrier, 0, c.row, 0, c.head);
  }

  // O of chunk m from its V stage to global memory; at a sequence's end: rows by hand. Where a chunk ends earlier, at a
  // listed token, the rows after it are those of the next chunks, whose O is not sent before this one is in memory.
  __device__ void store_o(uint32_t m) const {
    // Also where nothing is sent: the state groups have written to the stage, which the copy engine fills next.
    fence_proxy_async();
    const ChunkDescriptor& c = descriptor(m);
    const auto wait_for_rows_before = [&] {
      if (Traits::kEndsAtCheckpoints && ((c.flags | descriptor(m - 1).flags) & kStartsInsideChunk))
        tma_store_wait_all();
    };
    if (c.valid < kChunk && (!Traits::kEndsAtCheckpoints || !(c.flags & kRowsFollow))) {
      constexpr int kPieces = Traits::kDv / 8;
      Element* out =
          static_cast<Element*>(p.args.o) + c.row * p.args.o_token_stride + c.head * p.args.o_head_stride + c.half * 64;
      if constexpr (Traits::kEndsAtCheckpoints) {
        if (this->lane() == 0) wait_for_rows_before();
        __syncwarp();
      }
      for (int i = this->lane(); i < c.valid * kPieces; i += 32) {
        const int row = i / kPieces, piece = i % kPieces;
        const uint4 value = load_shared_u4(this->stage_v(m) + (piece >> 3) * Traits::kHalf + row * 128 +
                                           (((piece & 7) ^ (row & 7)) << 4));
        *reinterpret_cast<uint4*>(out + row * p.args.o_token_stride + piece * 8) = value;
      }
      __syncwarp();
    } else if (this->lane() == 0 && !(c.flags & kWarmupChunk)) {
      wait_for_rows_before();
      tma_store_4d(&p.o, this->stage_v(m), 0, c.row, c.half, c.head);
      tma_store_commit();
    }
  }

  // A of chunk m from the tile that the state groups read it in; at a sequence's end: rows by hand. Where decay is not
  // mild the tile holds A_g, and the inverse's warp stores A. Blocks right of the diagonal that nobody reads hold what
  // A was made from.
  __device__ void send_a(uint32_t m) const {
    Traits::FullA::wait(m);
    if (!__any_sync(0xffffffffu, load_shared_f1(this->stage_gate(m) + Traits::kGateMild) != 0.0f)) return;
    const int lane = this->lane();
    const uint32_t tile = this->tile_a(m);
    const uint32_t rows = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 2; j < 4; ++j) store_matrix_x4((rows ^ (j << 5)) + i * 2048, 0u, 0u, 0u, 0u);
    }
    fence_proxy_async();
    __syncwarp();
    const ChunkDescriptor& c = descriptor(m);
    if (c.valid == kChunk) {
      if (lane == 0) {
        tma_store_4d(&p.a, tile, 0, c.row, 0, c.head);
        tma_store_commit();
      }
      return;
    }
    const int64_t row_bytes = int64_t{p.args.num_value_heads} * (kChunk * 2);
    char* out = static_cast<char*>(p.args.a) + c.row * row_bytes + c.head * (kChunk * 2) + 16 * (lane & 7);
#pragma unroll 1
    for (int i = lane >> 3; i < c.valid; i += 4) {
      *reinterpret_cast<uint4*>(out + i * row_bytes) = load_shared_u4(tile + i * 128 + (((lane & 7) ^ (i & 7)) << 4));
    }
    __syncwarp();
  }

  // The chunks ahead of the one at hand.
  struct Ahead {
    Rows next2, next3, next4;  // of chunks m + 2, m + 3 and m + 4
  };

  __device__ __forceinline__ void step(uint32_t m, Ahead& ahead) const {
    Traits::FreeQ::wait(m);
    if (this->lane() == 0) load_q(m + 2, ahead.next2);
    if constexpr (Traits::kSavesA) send_a(m);
    // What is asked for next is read while there is time.
    Rows next5{0, -1, 0, 0};
    if (ahead.next3.valid >= 0) {
      mbarrier_wait(this->full_p(m + 1), (m + 1) >> 1 & 1);
      if (ahead.next4.valid >= 0) next5 = rows(m + 5);
    }
    if constexpr (Traits::kSavesA) {
      // The chunk's end gives A's tile back, too.
      if (this->lane() == 0) tma_store_wait_read();
      Traits::Done::arrive(m, this->lane());
    }
    // K before O and V: the products wait for it first, and V, which O's way out of its stage is waited for, has a step
    // more.
    this->wait_done(m);
    static_assert(Traits::kStagesK == 5 || Traits::kStagesK == 4);
    if (this->lane() == 0) load_k(m + Traits::kStagesK, Traits::kStagesK == 5 ? next5 : ahead.next4);
    store_o(m);
    if (ahead.next3.valid >= 0 && (kAllLanesArriveForV || this->lane() == 0)) {
      tma_store_wait_read();
      load_v(m + 3, ahead.next3);
    }
    ahead.next2 = ahead.next3;
    ahead.next3 = ahead.next4;
    ahead.next4 = next5;
    __syncwarp();
  }

  __device__ void run() const {
    if (descriptor(0).valid < 0) return;
    if (this->lane() == 0) {
#pragma unroll 1
      for (uint32_t m = 0; m < Traits::kStagesK; ++m) {
        const Rows c = rows(m);
        if (c.valid < 0) break;
        load_k(m, c);
        if (m < 2) load_q(m, c), load_v(m, c);
      }
    } else if (kAllLanesArriveForV) {
      load_v(0, rows(0));
      load_v(1, rows(1));
    }
    // V arrives on P's barrier, which it shares with the next chunk but one.
    mbarrier_wait(this->full_p(0), 0);
    if (kAllLanesArriveForV || this->lane() == 0) load_v(2, rows(2));
    Ahead ahead{rows(2), rows(3), rows(4)};
    if (ahead.next2.valid < 0) ahead.next3.valid = -1;
    if (ahead.next3.valid < 0) ahead.next4.valid = -1;
#pragma unroll 1
    for (uint32_t m = 0; descriptor(m).valid >= 0; ++m) step(m, ahead);
    if (this->lane() == 0) tma_store_wait_all();
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
