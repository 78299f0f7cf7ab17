// The forward of half heads, for cards with more SMs than tiles: a cluster of two blocks works on a tile, each holds
// 64 rows of S^T, one for each entry of half of V, and prepares every second chunk for both (names as in docs/math.md
// and kernel.cuh).
//
// Each block has a state warpgroup, two auxiliary ones, and four warps with a duty each: the list of chunks (of the
// first block, for both), K and Q (each block fetches those of its own chunks into both), V and O, and the gates.
// docs/design/sm90_forward_pairs.md has the hand-overs.
#pragma once

#include <cstddef>
#include <cstring>

#include "cuda/common/cluster.cuh"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/chunk_fwd/zero_fill.cuh"
#include "cuda/sm90/chunk_fwd_2cta/gate_warp.cuh"
#include "cuda/sm90/chunk_fwd_2cta/output_rows.cuh"
#include "cuda/sm90/chunk_fwd_2cta/places.cuh"
#include "cuda/sm90/chunk_fwd_2cta/producer_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd_2cta/state_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd_2cta/traits.h"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::ChunkForwardKernel, fwd::ChunkForwardKernelParams, fwd::ChunkRecord, fwd::ChunkWalker;
using fwd::finish_tiles, fwd::kSilentChunk, fwd::open_list, fwd::prefetch_first_chunk, fwd::produce_chunk;

inline constexpr uint16_t kBothBlocks = 3;

// An auxiliary warpgroup: A_g and P of every second chunk of its block, for both blocks.
template <typename Traits>
struct PairAuxRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  PairPlaces<Traits> at_pair;
  int group, thread;

  __device__ void sync() const { named_barrier_sync(1 + group, 128); }

  // For prepare_chunk().
  __device__ static const ChunkRecord& record(uint32_t m) { return PairPlaces<Traits>::record(m); }
  __device__ static uint32_t stage_k(uint32_t m) { return PairPlaces<Traits>::stage_k(m); }
  __device__ static uint32_t tile_a(uint32_t m) { return PairPlaces<Traits>::tile_a(m); }
  __device__ static uint32_t factors(uint32_t m) { return PairPlaces<Traits>::factors(m); }
  __device__ static uint32_t gate(uint32_t m) { return PairPlaces<Traits>::own_gate(m); }
  __device__ static void wait_k(uint32_t m) { PairPlaces<Traits>::wait_k(m); }
  __device__ static void wait_factors(uint32_t m) { PairPlaces<Traits>::wait_gate(m); }
  // From here on this chunk's tiles and gates may be written, here and in the other block.
  __device__ static void wait_tile(uint32_t m) { PairPlaces<Traits>::wait_done(m, Traits::kStagesP); }

  // The warp's 16 rows of a tile, once all its lanes have written them, to the other block.
  __device__ void send_rows(uint32_t tile, uint32_t m, int warp) const {
    const uint32_t rows = tile + warp * Traits::kBytesRows;
    bulk_copy_cluster(at_pair.in_other_block(rows), rows, Traits::kBytesRows,
                      at_pair.in_other_block(at_pair.full_p(m)));
  }

  // A_g's rows on their way; P.
  template <bool kMild>
  __device__ __forceinline__ void finish(uint32_t m, uint32_t tile, uint32_t factors, float mild,
                                         const LanePlace& at) const {
    fence_proxy_async();
    __syncwarp();
    if (at.lane == 0) send_rows(tile, m, at.warp);

    at_pair.wait_q(m);
    float qkt[32];
    start_product<Element>(qkt, uniform_descriptor(at_pair.stage_q(m)), uniform_descriptor(at_pair.stage_k(m)));
    wgmma_wait<0>();
    pin(qkt);
    float2 diagonal[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int first = i == 2 ? 6 : 2 * i;
      diagonal[i] = make_float2(diagonal_block(qkt, first, at.warp), diagonal_block(qkt, first + 1, at.warp));
    }
    if constexpr (kMild) {
      store_mild<Traits, false>(qkt, diagonal, make_float4(mild, mild, mild, mild), at_pair.tile_p(m), factors, at);
    } else {
      store_gated<Traits, false>(qkt, diagonal, at_pair.tile_p(m), factors, at);
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_warp(at_pair.full_p(m), at.lane);
    if (at.lane == 0) {
      // A_g's rows are announced here too; they may have come already.
      const uint32_t gate_bytes = at.warp == 0 ? Traits::kBytesGate : 0;
      const uint32_t barrier = at_pair.in_other_block(at_pair.full_p(m));
      mbarrier_arrive_expect_cluster(barrier, 2 * Traits::kBytesRows + gate_bytes);
      send_rows(at_pair.tile_p(m), m, at.warp);
      if (gate_bytes != 0) {
        bulk_copy_cluster(at_pair.in_other_block(at_pair.received_gate(m)), at_pair.own_gate(m), gate_bytes, barrier);
      }
    }
    __syncwarp();
  }

  __device__ void run() const {
#pragma unroll 1
    for (uint32_t m = at_pair.rank + 2 * group;; m += 4) {
      at_pair.wait_record(m);
      if (at_pair.record(m).valid < 0) return;
      prepare_chunk<Traits>(*this, m);
    }
  }
};

// Warps with a duty each.
template <typename Traits>
struct PairServiceRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  PairPlaces<Traits> at_pair;
  int lane;

  // The records of all chunks, by one thread of the first block for both; that of the second sees to it that the last
  // have come before its block ends.
  __device__ void list_chunks() const {
    if (at_pair.rank != 0) {
#pragma unroll 1
      for (uint32_t m = 0;; m += Traits::kBurst) {
        at_pair.wait_record(m);
        if (at_pair.record(m).valid < 0) return;
      }
    }
    ChunkWalker walker;
    open_list<Traits>(p, walker);
    // In bursts: instructions are short of room, and these would push the other roles' out in every chunk.
    bool more = true;
#pragma unroll 1
    for (uint32_t m = 0; more; m += Traits::kBurst) {
      at_pair.wait_done(m, Traits::kRecordsAhead);
      const uint32_t barrier = at_pair.full_record(m), other_barrier = at_pair.in_other_block(barrier);
      mbarrier_arrive_expect_cluster(other_barrier, Traits::kBurst * sizeof(ChunkRecord));
#pragma unroll 1
      for (uint32_t n = m; n < m + Traits::kBurst; ++n) {
        ChunkRecord c;
        produce_chunk<Traits>(p, walker, c);
        uint4 words[sizeof(ChunkRecord) / 16];
        memcpy(words, &c, sizeof(c));
        // The last burst has no chunk at all: as many ends as there are groups that wait for one of their own.
        if (n == m) more = c.valid >= 0;
        const uint32_t record = smem_address(&at_pair.record(n)), other = at_pair.in_other_block(record);
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          store_shared_u4(record + 16 * i, words[i]);
          if (16 * i == offsetof(ChunkRecord, sequence)) words[i].y |= 1;  // the other half of V
          store_cluster_u4(other + 16 * i, words[i], other_barrier);
        }
      }
      jitter();
      mbarrier_arrive(barrier);
    }
  }

  // K and Q of the block's own chunks into both blocks, in the order in which their stages become free: those of K and
  // Q of the own chunk before at the same time.
  __device__ void load_keys_and_queries() const {
    static_assert(Traits::kStagesK == Traits::kStagesQ + 2);
    int row_before = 0, head_before = 0;
    bool more = true;
#pragma unroll 1
    for (uint32_t m = at_pair.rank; more; m += 2) {
      at_pair.wait_record(m);
      const ChunkRecord& c = at_pair.record(m);
      more = __any_sync(0xffffffffu, c.valid >= 0);
      // Out of a reduction, so that the compiler knows them to be the same in all lanes.
      const int row = static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<uint32_t>(c.row)));
      const int head = static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<uint32_t>(c.key_head)));
      if constexpr (Traits::kLoaderArrivals != 0) {
        // Of both chunks of the pair: the list's thread waits for one of them, which may be the other block's.
        mbarrier_arrive(at_pair.done(m - at_pair.rank));
        mbarrier_arrive(at_pair.done(m - at_pair.rank + 1));
      }
      at_pair.wait_done(m, Traits::kStagesK);
      if (lane == 0) {
        if (m >= 2) load(&p.q, at_pair.stage_q(m - 2), at_pair.full_q(m - 2), row_before, head_before);
        if (more) load(&p.k, at_pair.stage_k(m), at_pair.full_k(m), row, head);
      }
      row_before = row;
      head_before = head;
    }
  }
  __device__ void load(const CUtensorMap* map, uint32_t stage, uint32_t barrier, int row, int head) const {
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    mbarrier_arrive_expect_cluster(at_pair.in_other_block(barrier), Traits::kBytesK);
    tma_load_4d_cluster(stage, map, barrier, 0, row, 0, head, kBothBlocks);
  }

  // O of chunk m to global memory; at a sequence's end row by row.
  __device__ void store_o(uint32_t m) const {
    mbarrier_wait(at_pair.full_o(m), m / Traits::kBarriersO & 1);
    fence_proxy_async();  // also where nothing is sent: the copy engine fills the stage next
    const ChunkRecord& c = at_pair.record(m);
    if (c.valid < kChunk) {
      store_output_rows<Element>(p.args, c, [&] { return at_pair.stage_v(m); }, lane);
    } else if (!(c.flags & kSilentChunk) && lane == 0) {
      tma_store_4d(&p.o, at_pair.stage_v(m), 0, c.row, c.half, c.head);
      tma_store_commit();
      tma_store_wait_read();
    }
    __syncwarp();
  }

  // V of chunk m. At a sequence's end it is passed on once what follows in memory is cleared, and so is that behind a K
  // of the other block's.
  __device__ void load_v(uint32_t m, uint32_t& tails) const {
    const ChunkRecord& c = at_pair.record(m);
    const bool tail = c.valid < kChunk;
    const uint32_t barrier = tail ? smem() + Traits::kTailV : at_pair.full_p(m);
    if (lane == 0) {
      mbarrier_arrive_expect(barrier, Traits::kBytesV);
      tma_load_4d(at_pair.stage_v(m), &p.v, barrier, 0, c.row, c.half, c.head);
    } else if (kWarpArrivals == 32) {
      mbarrier_arrive(barrier);
    }
    if (!tail) return;
    mbarrier_wait(barrier, tails & 1);
    ++tails;
    clear_tail_rows(at_pair.stage_v(m), 1, c.valid, lane, 32);
    if (!at_pair.own(m)) {
      at_pair.wait_k(m);
      clear_tail_rows(at_pair.stage_k(m), 2, c.valid, lane, 32);
    }
    __syncwarp();
    mbarrier_arrive_warp(at_pair.full_p(m), lane);
  }

  // V into the stage that O of three chunks before has left.
  __device__ void move_values() const {
    uint32_t tails = 0, after_last = 0;
#pragma unroll 1
    for (uint32_t m = 0; after_last < Traits::kStagesV; ++m) {
      if (after_last == 0) at_pair.wait_record(m);
      if (after_last > 0 || at_pair.record(m).valid < 0) ++after_last;
      if (m >= Traits::kStagesV) store_o(m - Traits::kStagesV);
      if (after_last == 0) load_v(m, tails);
    }
    if (lane == 0) tma_store_wait_all();
  }
};

// kBehindPlan: after a kernel that takes what the plan of a split gives it, with a list that may be empty. A kernel of
// its own, lest what it begins with move the code of the roles (moved by fifteen instructions they took 2.4 to 3.5 %
// more).
template <typename Traits, bool kBehindPlan>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_pair_forward_kernel(const __grid_constant__ ChunkForwardKernelParams p) {
  if constexpr (kBehindPlan) {
    // One cluster waits: a kernel must not end before those it depends on. The others do not keep the SMs on which they
    // come until then.
    if (load_now(&p.sizes->tiles) + load_now(&p.sizes->dependent_tiles) == 0) {
      if (blockIdx.x == 0 && threadIdx.x == 0) {
        asm volatile("griddepcontrol.launch_dependents;");
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
      return;
    }
  }
  // By votes, so that the compiler knows them to be the same in all lanes.
  const int group =
      (__any_sync(0xffffffffu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xffffffffu, threadIdx.x & 256) ? 2 : 0);
  const int thread = threadIdx.x % 128;
  const uint32_t rank = __reduce_or_sync(0xffffffffu, cluster_rank());
  const PairPlaces<Traits> at_pair{rank};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Traits::kBarriers; ++i) {
      mbarrier_init(at_pair.full_k(i), 1);
      mbarrier_init(at_pair.full_q(i), 1);
    }
    for (uint32_t i = 0; i < Traits::kBarriersDone; ++i) {
      mbarrier_init(smem() + Traits::kDone + 8 * i, 2 * 4 * kWarpArrivals + Traits::kLoaderArrivals);
    }
    for (uint32_t i = 0; i < Traits::kStagesP; ++i) {
      // The warps that made A_g and P, of this block or the other, and V.
      mbarrier_init(at_pair.full_p(i), (at_pair.own(i) ? 4 * kWarpArrivals : 4) + kWarpArrivals);
    }
    for (uint32_t i = 0; i < Traits::kBarriersGate; ++i) mbarrier_init(at_pair.full_gate(2 * i), kWarpArrivals);
    for (uint32_t i = 0; i < Traits::kBarriersO; ++i) mbarrier_init(at_pair.full_o(i), 4 * kWarpArrivals);
    mbarrier_init(smem() + Traits::kTailV, kWarpArrivals);
    for (uint32_t i = 0; i < Traits::kChunkRing; i += Traits::kBurst) mbarrier_init(at_pair.full_record(i), 1);
    mbarrier_init_fence();
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.o);
    // As in kernel.cuh.
    if (p.list == nullptr) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (p.list != nullptr || p.followed != 0) asm volatile("griddepcontrol.launch_dependents;");
  }
  if (threadIdx.x / 32 == 4) prefetch_first_chunk<Traits>(p, threadIdx.x % 32);
  // Blocks of P right of the diagonal are never written: zero once.
  for (uint32_t i = threadIdx.x * 16; i < Traits::kStagesP * Traits::kBytesMatrix; i += Traits::kThreads * 16) {
    store_shared_u4(smem() + Traits::kSmemP + i, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  cluster_sync();

  if (group < Traits::kAuxGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kAuxRegisters));
    PairAuxRole<Traits>{p, at_pair, group, thread}.run();
    if (group == 0) finish_tiles(p, thread, 128);
  } else if (group == Traits::kAuxGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kStateRegisters));
    PairStateRole<Traits>{{p, 0, lane_place(thread)}, at_pair}.run();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kServiceRegisters));
    const int duty = __shfl_sync(0xffffffffu, thread / 32, 0);
    const PairServiceRole<Traits> role{p, at_pair, thread & 31};
    if (duty == 0) {
      if (role.lane == 0) role.list_chunks();
    } else if (duty == 1) {
      role.load_keys_and_queries();
    } else if (duty == 2) {
      role.move_values();
    } else {
      make_own_gates<Traits>(p, at_pair, role.lane);
    }
    // Also without a tile that starts from a boundary state: a kernel must not end before those it depends on.
    if (thread == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  // Neither block ends while the other may still write to it or count in it.
  __syncwarp();
  cluster_sync();
}

template <typename Traits>
ChunkForwardKernel describe_pair_kernel() {
  ChunkForwardKernel kernel{reinterpret_cast<const void*>(&sm90_pair_forward_kernel<Traits, false>), Traits::kThreads,
                            Traits::kSmemBytes, Traits::kStateGroups, Traits::kBlocks};
  kernel.behind_plan = reinterpret_cast<const void*>(&sm90_pair_forward_kernel<Traits, true>);
  return kernel;
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
