// The forward by clusters of two CTAs, for cards with more SMs than work items: each CTA holds 64 rows of S^T, which is
// half of V, and prepares every second chunk for both. Read chunk_fwd/kernel.cuh first; names are those of
// docs/math.md. docs/kernels/forward_2cta.md has the drawing in full and a table of the hand-overs.
//
//   service warps  0: chunk descriptors of both CTAs (first CTA alone) -kFullDescriptor-> [descriptors x16]
//                  1: K, Q of local chunks, into both CTAs  -kFullK-> [K x5]  -kFullQ-> [Q x3]
//                  2: V -(on kFullP)-> [V x3];  O out of V's stage after kFullO
//                  3: gates of local chunks -kFullGate-> [local gates x3] [factors x3]
//   producer       two warpgroups, every second local chunk each: K K^T, inverse -> A_g, Q K^T -> P
//   warpgroups     local: [A x4] [P x4] by stores, remote: A_g, P and gates by bulk copies;  -kFullP- in both CTAs
//   state          S K | S Q | A_g W | P V' | update of S for its 64 rows;  O into V's stage -kFullO-
//   warpgroup      end of a chunk -kDone- in both CTAs
#pragma once

#include <cstddef>
#include <cstring>

#include "cuda/common/bulk.cuh"
#include "cuda/common/cluster.cuh"
#include "cuda/common/compiler.cuh"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/chunk_fwd_2cta/gate_warp.cuh"
#include "cuda/sm90/chunk_fwd_2cta/output_rows.cuh"
#include "cuda/sm90/chunk_fwd_2cta/places.cuh"
#include "cuda/sm90/chunk_fwd_2cta/producer_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd_2cta/state_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd_2cta/traits.h"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::finish_items, fwd::kWarmupChunk, fwd::open_queue, fwd::prefetch_first_chunk, fwd::produce_chunk;
using fwd::Kernel, fwd::KernelArgs, fwd::ChunkDescriptor, fwd::QueueProducer;

inline constexpr uint16_t kBothCtas = 3;

// A producer warpgroup: A_g and P of every second chunk of its block, for both blocks.
template <typename Traits>
struct ProducerWarpgroup {
  using Element = typename Traits::Element;
  const KernelArgs& p;
  Places<Traits> places;
  int group, thread;

  __device__ void sync() const { named_barrier_sync(1 + group, 128); }
  // The barrier at which only the warp that sends A_g waits, for the blocks of the others. One of its own: who does not
  // wait may be at the next sync() first.
  __device__ void meet(bool waits) const {
    const uint32_t barrier = 1 + Traits::kProducerGroups + group;
    fence_proxy_async();  // each writer's blocks before the copy engine's
    if (waits) {
      named_barrier_sync(barrier, 128);
    } else {
      named_barrier_arrive(barrier, 128);
    }
  }

  // For prepare_chunk().
  __device__ static const ChunkDescriptor& descriptor(uint32_t m) { return Places<Traits>::descriptor(m); }
  __device__ static uint32_t stage_k(uint32_t m) { return Places<Traits>::stage_k(m); }
  __device__ static uint32_t tile_a(uint32_t m) { return Places<Traits>::tile_a(m); }
  __device__ static uint32_t factors(uint32_t m) { return Places<Traits>::factors(m); }
  __device__ static uint32_t gate(uint32_t m) { return Places<Traits>::local_gate(m); }
  __device__ static void wait_k(uint32_t m) { Places<Traits>::wait_k(m); }
  __device__ static void wait_factors(uint32_t m) { Places<Traits>::wait_gate(m); }
  // From here on this chunk's tiles and gates may be written, here and in the other block.
  __device__ static void wait_tile(uint32_t m) { Places<Traits>::wait_done(m, Traits::kStagesP); }

  // Of a tile, or of a warp's 16 rows of it, to the other block, once all who have written it are known to have.
  __device__ void send(uint32_t tile, uint32_t bytes, uint32_t m) const {
    bulk_copy_cluster(places.in_other_cta(tile), tile, bytes, places.in_other_cta(places.full_p(m)));
  }

  static constexpr int kSender = UtTransform<Traits>::kDiagonalWarp;  // of A_g, which is complete to it, and the gates

  // A_g on its way; P.
  template <bool kMild>
  __device__ __forceinline__ void finish(uint32_t m, uint32_t tile, uint32_t factors, float mild,
                                         const FragmentPosition& at) const {
    if (at.warp == kSender) {
      fence_proxy_async();
      __syncwarp();
      if (at.lane == 0) send(tile, Traits::kBytesMatrix, m);
    }

    places.wait_q(m);
    float qkt[32];
    start_product<Element>(qkt, uniform_descriptor(places.stage_q(m)), uniform_descriptor(places.stage_k(m)));
    wgmma_wait<0>();
    pin(qkt);
    float2 diagonal[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int first = i == 2 ? 6 : 2 * i;
      diagonal[i] = make_float2(diagonal_block(qkt, first, at.warp), diagonal_block(qkt, first + 1, at.warp));
    }
    if constexpr (kMild) {
      store_mild_p<Traits>(qkt, diagonal, mild, places.tile_p(m), at);
    } else {
      store_strong_p<Traits>(qkt, diagonal, places.tile_p(m), factors, at);
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_warp(places.full_p(m), at.lane);
    if (at.lane == 0) {
      // The bytes of A_g are expected here too; they may have come already.
      const bool sends_gates = at.warp == kSender;
      const uint32_t barrier = places.in_other_cta(places.full_p(m));
      mbarrier_arrive_expect_cluster(
          barrier, Traits::kBytesRows + (sends_gates ? Traits::kBytesMatrix + Traits::kBytesGate : 0));
      send(places.tile_p(m) + at.warp * Traits::kBytesRows, Traits::kBytesRows, m);
      if (sends_gates) {
        bulk_copy_cluster(places.in_other_cta(places.remote_gate(m)), places.local_gate(m), Traits::kBytesGate,
                          barrier);
      }
    }
    __syncwarp();
  }

  __device__ void run() const {
#pragma unroll 1
    for (uint32_t m = places.rank + 2 * group;; m += 4) {
      places.wait_descriptor(m);
      if (places.descriptor(m).valid < 0) return;
      prepare_chunk<Traits>(*this, m);
    }
  }
};

// Warps with a role each.
template <typename Traits>
struct ServiceWarps {
  using Element = typename Traits::Element;
  const KernelArgs& p;
  Places<Traits> places;
  int lane;

  // The descriptors of all chunks, by one thread of the first block for both; that of the second sees to it that the
  // last have come before its block ends.
  __device__ void queue_chunks() const {
    if (places.rank != 0) {
#pragma unroll 1
      for (uint32_t m = 0;; m += Traits::kBatch) {
        places.wait_descriptor(m);
        if (places.descriptor(m).valid < 0) return;
      }
    }
    QueueProducer producer;
    open_queue<Traits>(p, producer);
    // In bursts: instructions are short of room, and these would push the other roles' out in every chunk.
    bool more = true;
#pragma unroll 1
    for (uint32_t m = 0; more; m += Traits::kBatch) {
      places.wait_done(m, Traits::kDescriptorsAhead);
      const uint32_t barrier = places.full_descriptor(m), other_barrier = places.in_other_cta(barrier);
      mbarrier_arrive_expect_cluster(other_barrier, Traits::kBatch * sizeof(ChunkDescriptor));
#pragma unroll 1
      for (uint32_t n = m; n < m + Traits::kBatch; ++n) {
        ChunkDescriptor c;
        produce_chunk<Traits>(p, producer, c);
        uint4 words[sizeof(ChunkDescriptor) / 16];
        memcpy(words, &c, sizeof(c));
        // The last burst has no chunk at all: as many ends as there are groups that wait for one of their own.
        if (n == m) more = c.valid >= 0;
        const uint32_t descriptor = smem_address(&places.descriptor(n)), other = places.in_other_cta(descriptor);
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          store_shared_u4(descriptor + 16 * i, words[i]);
          if (16 * i == offsetof(ChunkDescriptor, sequence)) words[i].y |= 1;  // the other half of V
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
    for (uint32_t m = places.rank; more; m += 2) {
      places.wait_descriptor(m);
      const ChunkDescriptor& c = places.descriptor(m);
      more = __any_sync(0xffffffffu, c.valid >= 0);
      const int row = static_cast<int>(uniform(static_cast<uint32_t>(c.row)));
      const int head = static_cast<int>(uniform(static_cast<uint32_t>(c.key_head)));
      if constexpr (Traits::kLoaderArrivals != 0) {
        // Of both chunks of the pair: the list's thread waits for one of them, which may be the other block's.
        mbarrier_arrive(places.done(m - places.rank));
        mbarrier_arrive(places.done(m - places.rank + 1));
      }
      places.wait_done(m, Traits::kStagesK);
      if (lane == 0) {
        if (m >= 2) load(&p.q, places.stage_q(m - 2), places.full_q(m - 2), row_before, head_before);
        if (more) load(&p.k, places.stage_k(m), places.full_k(m), row, head);
      }
      row_before = row;
      head_before = head;
    }
  }
  __device__ void load(const CUtensorMap* map, uint32_t stage, uint32_t barrier, int row, int head) const {
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    mbarrier_arrive_expect_cluster(places.in_other_cta(barrier), Traits::kBytesK);
    tma_load_4d_cluster(stage, map, barrier, 0, row, 0, head, kBothCtas);
  }

  // O of chunk m to global memory; at a sequence's end row by row.
  __device__ void store_o(uint32_t m) const {
    Traits::FullO::wait(m);
    fence_proxy_async();  // also where nothing is sent: the copy engine fills the stage next
    const ChunkDescriptor& c = places.descriptor(m);
    if (c.valid < kChunk) {
      store_output_rows<Element>(p.args, c, [&] { return places.stage_v(m); }, lane);
    } else if (!(c.flags & kWarmupChunk) && lane == 0) {
      tma_store_4d(&p.o, places.stage_v(m), 0, c.row, c.half, c.head);
      tma_store_commit();
      tma_store_wait_read();
    }
    __syncwarp();
  }

  // V of chunk m. At a sequence's end it is passed on once what follows in memory is cleared, and so is that after a K
  // of the other block's.
  __device__ void load_v(uint32_t m, uint32_t& tails) const {
    const ChunkDescriptor& c = places.descriptor(m);
    const bool tail = c.valid < kChunk;
    const uint32_t barrier = tail ? smem() + Traits::kTailV : places.full_p(m);
    if (lane == 0) {
      mbarrier_arrive_expect(barrier, Traits::kBytesV);
      tma_load_4d(places.stage_v(m), &p.v, barrier, 0, c.row, c.half, c.head);
    } else if (kWarpArrivals == 32) {
      mbarrier_arrive(barrier);
    }
    if (!tail) return;
    mbarrier_wait(barrier, tails & 1);
    ++tails;
    zero_tail_rows(places.stage_v(m), 1, c.valid, lane, 32);
    if (!places.own(m)) {
      places.wait_k(m);
      zero_tail_rows(places.stage_k(m), 2, c.valid, lane, 32);
    }
    __syncwarp();
    mbarrier_arrive_warp(places.full_p(m), lane);
  }

  // V into the stage that O of three chunks before has left.
  __device__ void move_values() const {
    uint32_t tails = 0, after_last = 0;
#pragma unroll 1
    for (uint32_t m = 0; after_last < Traits::kStagesV; ++m) {
      if (after_last == 0) places.wait_descriptor(m);
      if (after_last > 0 || places.descriptor(m).valid < 0) ++after_last;
      if (m >= Traits::kStagesV) store_o(m - Traits::kStagesV);
      if (after_last == 0) load_v(m, tails);
    }
    if (lane == 0) tma_store_wait_all();
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_chunk_fwd_2cta_kernel(const __grid_constant__ KernelArgs p) {
  // As warpgroup_number(), with which this kernel would have other machine code.
  const int group =
      (__any_sync(0xffffffffu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xffffffffu, threadIdx.x & 256) ? 2 : 0);
  const int thread = threadIdx.x % 128;
  const uint32_t rank = uniform(cluster_rank());
  const Places<Traits> places{rank};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < Traits::kBarriers; ++i) {
      mbarrier_init(places.full_k(i), 1);
      mbarrier_init(places.full_q(i), 1);
    }
    for (uint32_t i = 0; i < Traits::kBarriersDone; ++i) {
      Traits::Done::init(i, 2 * 4 * kWarpArrivals + Traits::kLoaderArrivals);
    }
    for (uint32_t i = 0; i < Traits::kStagesP; ++i) {
      // The warps that made A_g and P, of this block or the other, and V.
      mbarrier_init(places.full_p(i), (places.own(i) ? 4 * kWarpArrivals : 4) + kWarpArrivals);
    }
    for (uint32_t i = 0; i < Traits::kBarriersGate; ++i) mbarrier_init(places.full_gate(2 * i), kWarpArrivals);
    for (uint32_t i = 0; i < Traits::kBarriersO; ++i) mbarrier_init(places.full_o(i), 4 * kWarpArrivals);
    mbarrier_init(smem() + Traits::kTailV, kWarpArrivals);
    for (uint32_t i = 0; i < Traits::kDescriptorRing; i += Traits::kBatch) mbarrier_init(places.full_descriptor(i), 1);
    mbarrier_init_fence();
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.o);
    // As in kernel.cuh.
    if (p.list == nullptr) wait_for_predecessors();
    if (p.list != nullptr || p.followed != 0) launch_dependents();
  }
  if (threadIdx.x / 32 == 4) prefetch_first_chunk<Traits>(p, threadIdx.x % 32);
  // Blocks of P right of the diagonal are never written: zero once.
  for (uint32_t i = threadIdx.x * 16; i < Traits::kStagesP * Traits::kBytesMatrix; i += Traits::kThreads * 16) {
    store_shared_u4(smem() + Traits::kSmemP + i, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  cluster_sync();

  if (group < Traits::kProducerGroups) {
    release_registers<Traits::kProducerRegisters>();
    ProducerWarpgroup<Traits>{p, places, group, thread}.run();
    if (group == 0) finish_items(p, thread, 128);
  } else if (group == Traits::kProducerGroups) {
    claim_registers<Traits::kStateRegisters>();
    StateWarpgroup<Traits>{{p, 0, fragment_position(thread)}, places}.run();
  } else {
    release_registers<Traits::kServiceRegisters>();
    const int role_number = __shfl_sync(0xffffffffu, thread / 32, 0);
    const ServiceWarps<Traits> role{p, places, thread & 31};
    if (role_number == 0) {
      if (role.lane == 0) role.queue_chunks();
    } else if (role_number == 1) {
      role.load_keys_and_queries();
    } else if (role_number == 2) {
      role.move_values();
    } else {
      make_local_gates<Traits>(p, places, role.lane);
    }
    // Also without an item that starts from a state at a cut: a kernel must not end before those it depends on.
    if (thread == 0) wait_for_predecessors();
  }
  // Neither block ends while the other may still write to it or count in it.
  __syncwarp();
  cluster_sync();
}

template <typename Traits>
Kernel describe_kernel() {
  return {reinterpret_cast<const void*>(&sm90_chunk_fwd_2cta_kernel<Traits>), Traits::kThreads, Traits::kSmemBytes,
          Traits::kStateGroups, Traits::kClusterCtas};
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
