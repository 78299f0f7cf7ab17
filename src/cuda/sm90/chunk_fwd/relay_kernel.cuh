// The forward in relays, for cards with four times as many SMs as tiles: of two blocks that hold the same 64 rows of
// S^T the leader goes from state to state, the follower, a step behind, makes O (names as in docs/math.md and
// kernel.cuh). A cluster has those of both halves of V, which share the preparation of their chunks.
//
// Each block has a state warpgroup, two auxiliary ones, and four warps with a duty each: the list of chunks (of the
// first block, for all) or a follower's Q; K; V of a leader or O of a follower; the gates.
// docs/design/sm90_forward_pairs.md has the hand-overs.
#pragma once

#include <cstddef>
#include <cstring>

#include "../../common/cluster.cuh"
#include "aux_role.cuh"
#include "chunk_stream.cuh"
#include "clear.cuh"
#include "cluster_aux.cuh"
#include "kernel_params.h"
#include "output_rows.cuh"
#include "own_gates.cuh"
#include "relay_places.cuh"
#include "relay_state.cuh"
#include "relay_traits.h"

namespace flash_qla::cuda::sm90 {

// An auxiliary warpgroup: A_g of its chunks for the leaders, P for the followers.
template <typename Traits>
struct RelayAuxRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  RelayPlaces<Traits> places;
  int group, thread;

  __device__ void sync() const { named_barrier_sync(1 + group, 128); }

  // For prepare_chunk().
  __device__ static const ChunkRecord& record(uint32_t m) { return RelayPlaces<Traits>::record(m); }
  __device__ static uint32_t stage_k(uint32_t m) { return RelayPlaces<Traits>::stage_own_k(m); }
  __device__ static uint32_t tile_a(uint32_t m) { return RelayPlaces<Traits>::own_a(m); }
  __device__ static uint32_t factors(uint32_t m) { return RelayPlaces<Traits>::factors(m); }
  __device__ static uint32_t gate(uint32_t m) { return RelayPlaces<Traits>::own_gate(m); }
  __device__ void wait_k(uint32_t m) const { mbarrier_wait(places.full_own_k(m), m / Traits::kGroupStep & 1); }
  __device__ static void wait_factors(uint32_t m) { RelayPlaces<Traits>::wait_gate(m); }
  // The group's A_g before this one has left.
  __device__ static void wait_tile(uint32_t m) { RelayPlaces<Traits>::wait_leaders(m, Traits::kGroupStep); }

  // The warp's 16 rows of a tile, once all its lanes have written them, and by one warp the gates, to a leader or
  // follower of each half. `first`: the first of these blocks. To other blocks a lane each sends them; what the block
  // itself needs the warp copies, as the copy engine's instruction for a cluster is for other blocks alone in the eyes
  // of compute-sanitizer's memcheck.
  __device__ void send_rows(uint32_t from, uint32_t to, uint32_t gate_from, uint32_t gate_to, uint32_t barrier,
                            uint32_t first, const LanePlace& at) const {
    fence_proxy_async();
    __syncwarp();
    jitter();
    const uint32_t rows = at.warp * Traits::kBytesRows, gate_bytes = at.warp == 0 ? Traits::kBytesGate : 0;
    if (at.lane < Traits::kLeaders) {
      const uint32_t block = first + at.lane;
      if (block != places.rank) {
        const uint32_t there = cluster_address(barrier, block);
        mbarrier_arrive_expect_cluster(there, Traits::kBytesRows + gate_bytes);
        bulk_copy_cluster(cluster_address(to + rows, block), from + rows, Traits::kBytesRows, there);
        if (gate_bytes != 0) bulk_copy_cluster(cluster_address(gate_to, block), gate_from, gate_bytes, there);
      }
    }
    if constexpr (kWarpArrivals == 32) {
#pragma unroll 1
      for (uint32_t block = first; block < first + Traits::kLeaders; ++block) {
        if (block != places.rank && at.lane != static_cast<int>(block - first)) {
          mbarrier_arrive_cluster(cluster_address(barrier, block));
        }
      }
    }
    if (places.rank - first < Traits::kLeaders) {
      copy_rows(from + rows, to + rows, Traits::kBytesRows, at.lane);
      copy_rows(gate_from, gate_to, gate_bytes, at.lane);
      fence_proxy_async();  // wgmma reads the rows
      __syncwarp();
      mbarrier_arrive_warp(barrier, at.lane);
    }
    __syncwarp();
  }
  // `bytes` of shared memory, a multiple of 16, by a warp.
  static __device__ void copy_rows(uint32_t from, uint32_t to, uint32_t bytes, int lane) {
    for (uint32_t i = 16 * lane; i < bytes; i += 16 * 32) store_shared_u4(to + i, load_shared_u4(from + i));
  }

  // K, or Q, of chunk m, if there is one, by one thread.
  __device__ void load_key(uint32_t m) const {
    places.wait_record(m);
    const ChunkRecord& c = places.record(m);
    if (c.valid < 0) return;
    mbarrier_arrive_expect(places.full_own_k(m), Traits::kBytesK);
    tma_load_4d(places.stage_own_k(m), &p.k, places.full_own_k(m), 0, c.row, 0, c.key_head);
  }
  __device__ void load_query(uint32_t m) const {
    places.wait_record(m);
    const ChunkRecord& c = places.record(m);
    if (c.valid < 0) return;
    mbarrier_arrive_expect(places.full_own_q(m), Traits::kBytesK);
    tma_load_4d(places.stage_own_q(), &p.q, places.full_own_q(m), 0, c.row, 0, c.key_head);
  }

  // A_g's rows on their way; P.
  template <bool kMild>
  __device__ __forceinline__ void finish(uint32_t m, uint32_t tile, uint32_t factors, float mild,
                                         const LanePlace& at) const {
    places.wait_leaders(m, Traits::kStagesA);
    send_rows(tile, places.tile_a(m), places.own_gate(m), places.lead_gate(m), places.full_a(m), 0, at);

    mbarrier_wait(places.full_own_q(m), m / Traits::kGroupStep & 1);
    float qkt[32];
    start_product<Element>(qkt, uniform_descriptor(places.stage_own_q()), uniform_descriptor(places.stage_own_k(m)));
    wgmma_wait<0>();
    pin(qkt);
    sync();  // K and Q have been read
    if (thread == 0) {
      load_key(m + Traits::kGroupStep);
      load_query(m + Traits::kBlocks);
    }
    __syncwarp();
    float2 diagonal[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int first = i == 2 ? 6 : 2 * i;
      diagonal[i] = make_float2(diagonal_block(qkt, first, at.warp), diagonal_block(qkt, first + 1, at.warp));
    }
    places.wait_outputs(m, Traits::kBlocks);  // P of the block's chunk before has left
    if constexpr (kMild) {
      store_mild<Traits, false>(qkt, diagonal, make_float4(mild, mild, mild, mild), places.own_p(), factors, at);
    } else {
      store_gated<Traits, false>(qkt, diagonal, places.own_p(), factors, at);
    }
    places.wait_outputs(m, Traits::kStagesP);
    send_rows(places.own_p(), places.tile_p(m), places.own_gate(m), places.follow_gate(m), places.full_p(m),
              Traits::kLeaders, at);
  }

  __device__ void run() const {
    uint32_t m = places.rank + Traits::kBlocks * group;
    if (thread == 0) {
      load_key(m);
      if (group == 0) load_query(m);
    }
    __syncwarp();
#pragma unroll 1
    for (;; m += Traits::kGroupStep) {
      places.wait_record(m);
      if (places.record(m).valid < 0) return;
      prepare_chunk<Traits>(*this, m);
    }
  }
};

// Warps with a duty each.
template <typename Traits>
struct RelayServiceRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  RelayPlaces<Traits> places;
  int lane;

  // The records of all chunks, by one thread of the first block for all.
  __device__ void list_chunks() const {
    ChunkWalker walker;
    open_list<Traits>(p, walker);
    int ends = 0;
#pragma unroll 1
    for (uint32_t m = 0; ends < Traits::kEndBursts; m += Traits::kBurst) {
      places.wait_followers(m, Traits::kRecordsAhead);
      const uint32_t barrier = places.full_record(m);
#pragma unroll 1
      for (uint32_t block = 1; block < Traits::kBlocks; ++block) {
        mbarrier_arrive_expect_cluster(cluster_address(barrier, block), Traits::kBurst * sizeof(ChunkRecord));
      }
#pragma unroll 1
      for (uint32_t n = m; n < m + Traits::kBurst; ++n) {
        ChunkRecord c;
        produce_chunk<Traits>(p, walker, c);
        uint4 words[sizeof(ChunkRecord) / 16];
        memcpy(words, &c, sizeof(c));
        if (n == m && c.valid < 0) ++ends;
        const uint32_t record = smem_address(&places.record(n));
#pragma unroll
        for (int i = 0; i < 3; ++i) store_shared_u4(record + 16 * i, words[i]);
#pragma unroll 1
        for (uint32_t block = 1; block < Traits::kBlocks; ++block) {
          const uint32_t other = cluster_address(record, block), other_barrier = cluster_address(barrier, block);
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            uint4 word = words[i];
            // Which half of V, where a cluster has both.
            if (16 * i == offsetof(ChunkRecord, sequence) && block % Traits::kLeaders != 0) word.y |= 1;
            store_cluster_u4(other + 16 * i, word, other_barrier);
          }
        }
      }
      jitter();
      mbarrier_arrive(barrier);
    }
  }
  // The others see to it that the last records have come before their block ends. From the burst of chunk m on.
  __device__ void wait_last_records(uint32_t m) const {
    m -= m % Traits::kBurst;
#pragma unroll 1
    for (int ends = 0; ends < Traits::kEndBursts; m += Traits::kBurst) {
      places.wait_record(m);
      if (places.record(m).valid < 0) ++ends;
    }
  }

  // Q of every chunk, or every second one, into all followers, as soon as all of them have made S Q of the one that its
  // stage had.
  __device__ void load_queries() const {
    constexpr uint16_t kFollowers = ((1 << Traits::kLeaders) - 1) << Traits::kLeaders;
    uint32_t m = places.leader();
#pragma unroll 1
    for (;; m += Traits::kLeaders) {
      places.wait_record(m);
      const ChunkRecord& c = places.record(m);
      if (c.valid < 0) break;
      if (m >= Traits::kStagesQ) mbarrier_wait(places.free_q(m), (m / Traits::kStagesQ - 1) & 1);
      if (lane < Traits::kLeaders) {
        mbarrier_arrive_expect_cluster(cluster_address(places.full_q(m), Traits::kLeaders + lane), Traits::kBytesK);
      }
      if (lane == 0) {
        tma_load_4d_cluster(places.stage_q(m), &p.q, places.full_q(m), 0, c.row, 0, c.key_head, kFollowers);
      }
      __syncwarp();
    }
    wait_last_records(m);
  }

  // K of the block's own chunks into all blocks.
  __device__ void load_keys() const {
    constexpr uint16_t kAll = (1 << Traits::kBlocks) - 1;
#pragma unroll 1
    for (uint32_t m = places.rank;; m += Traits::kBlocks) {
      places.wait_record(m);
      const ChunkRecord& c = places.record(m);
      if (c.valid < 0) return;
      places.wait_leaders(m, Traits::kStagesK);
      places.wait_followers(m, Traits::kStagesK);
      if (lane < Traits::kBlocks) {
        mbarrier_arrive_expect_cluster(cluster_address(places.full_k(m), lane), Traits::kBytesK);
      }
      if (lane == 0) tma_load_4d_cluster(places.stage_k(m), &p.k, places.full_k(m), 0, c.row, 0, c.key_head, kAll);
      __syncwarp();
    }
  }

  // A leader's V.
  __device__ void load_values() const {
#pragma unroll 1
    for (uint32_t m = 0;; ++m) {
      places.wait_record(m);
      const ChunkRecord& c = places.record(m);
      if (c.valid < 0) return;
      places.wait_leaders(m, Traits::kStagesV);
      if (lane == 0) {
        mbarrier_arrive_expect(places.full_a(m), Traits::kBytesV);
        tma_load_4d(places.stage_v(m), &p.v, places.full_a(m), 0, c.row, c.half, c.head);
      }
      __syncwarp();
    }
  }

  // A follower's O to global memory, at a sequence's end row by row; the leader may then fill the stage again.
  __device__ void store_outputs() const {
#pragma unroll 1
    for (uint32_t m = 0;; ++m) {
      places.wait_record(m);
      const ChunkRecord& c = places.record(m);
      if (c.valid < 0) break;
      mbarrier_wait(places.full_o(m), m / Traits::kStagesC & 1);
      if (c.valid < kChunk) {
        store_output_rows<Element>(p.args, c, [&] { return places.stage_c(m); }, lane);
      } else if (!(c.flags & kSilentChunk) && lane == 0) {
        fence_proxy_async();
        tma_store_4d(&p.o, places.stage_c(m), 0, c.row, c.half, c.head);
        tma_store_commit();
        tma_store_wait_read();
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive_cluster(cluster_address(places.free_c(m), places.leader()));
    }
    if (lane == 0) tma_store_wait_all();
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_relay_forward_kernel(const __grid_constant__ ChunkForwardKernelParams p) {
  // By votes, so that the compiler knows them to be the same in all lanes.
  const int group =
      (__any_sync(0xffffffffu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xffffffffu, threadIdx.x & 256) ? 2 : 0);
  const int thread = threadIdx.x % 128;
  const uint32_t rank = __reduce_or_sync(0xffffffffu, cluster_rank());
  const RelayPlaces<Traits> places{rank};
  if (threadIdx.x == 0) {
    const auto init = [](uint32_t first, int count, uint32_t arrivals) {
      for (int i = 0; i < count; ++i) mbarrier_init(smem() + first + 8 * i, arrivals);
    };
    init(Traits::kFullOwnK, Traits::kAuxGroups, 1);
    init(Traits::kFullOwnQ, Traits::kAuxGroups, 1);
    init(Traits::kFullGate, Traits::kBarriersGate, kWarpArrivals);
    init(Traits::kFullK, Traits::kStagesK, 1);
    init(Traits::kFullA, Traits::kStagesA, 4 * kWarpArrivals + 1);  // a group's warps, and V
    init(Traits::kFullP, Traits::kStagesP, 4 * kWarpArrivals);
    init(Traits::kFullQ, Traits::kStagesQ, 1);
    init(Traits::kFreeQ, Traits::kStagesQ, 4 * Traits::kLeaders);
    init(Traits::kFullC, Traits::kStagesC, 4);
    init(Traits::kFreeC, Traits::kStagesC, 1);
    init(Traits::kFreeNext, 1, 4);
    init(Traits::kFullO, Traits::kStagesC, 4 * kWarpArrivals);
    init(Traits::kLeadDone, Traits::kBarriersDone, 4 * Traits::kLeaders * kWarpArrivals);
    init(Traits::kFollowDone, Traits::kBarriersDone, 4 * Traits::kLeaders * kWarpArrivals);
    init(Traits::kOutputDone, Traits::kBarriersDone, 4 * Traits::kLeaders * kWarpArrivals);
    init(Traits::kFullRecord, Traits::kChunkRing / Traits::kBurst, 1);
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
  for (uint32_t i = threadIdx.x * 16; i < Traits::kBytesMatrix; i += Traits::kThreads * 16) {
    store_shared_u4(places.own_p() + i, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  cluster_sync();

  if (group < Traits::kAuxGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kAuxRegisters));
    RelayAuxRole<Traits>{p, places, group, thread}.run();
    if (group == 0) finish_tiles(p, thread, 128);
  } else if (group == Traits::kAuxGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kStateRegisters));
    const RelayStateRole<Traits> role{{p, 0, lane_place(thread)}, places};
    if (places.leads()) {
      role.template run<true>();
    } else {
      role.template run<false>();
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kServiceRegisters));
    const int duty = __shfl_sync(0xffffffffu, thread / 32, 0);
    const RelayServiceRole<Traits> role{p, places, thread & 31};
    if (duty == 0) {
      if (!places.leads()) {
        role.load_queries();
      } else if (rank != 0) {
        role.wait_last_records(0);
      } else if (role.lane == 0) {
        role.list_chunks();
      }
    } else if (duty == 1) {
      role.load_keys();
    } else if (duty == 2) {
      if (places.leads()) {
        role.load_values();
      } else {
        role.store_outputs();
      }
    } else {
      make_own_gates<Traits>(p, places, role.lane);
    }
    // Also without a tile that starts from a boundary state: a kernel must not end before those it depends on.
    if (thread == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
  }
  // No block ends while another may still write to it or count in it.
  __syncwarp();
  cluster_sync();
}

template <typename Traits>
ChunkForwardKernel describe_relay_kernel() {
  return {reinterpret_cast<const void*>(&sm90_relay_forward_kernel<Traits>), Traits::kThreads, Traits::kSmemBytes,
          Traits::kStateGroups, Traits::kBlocks};
}

}  // namespace flash_qla::cuda::sm90
