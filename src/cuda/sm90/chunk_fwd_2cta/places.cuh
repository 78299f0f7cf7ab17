// Where things are in the blocks of a pair, and what their roles wait for.
#pragma once

#include <cstdint>

#include "cuda/common/cluster.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::ChunkDescriptor;

// rank: of the block in its pair; the parity of the chunks that it prepares.
template <typename Traits>
struct Places {
  uint32_t rank;

  __device__ static ChunkDescriptor& descriptor(uint32_t m) {
    return reinterpret_cast<ChunkDescriptor*>(shared_memory() + Traits::kSmemDescriptors)[m % Traits::kDescriptorRing];
  }
  __device__ static uint32_t stage_k(uint32_t m) { return Traits::TilesK::tile(m); }
  __device__ static uint32_t stage_q(uint32_t m) { return Traits::TilesQ::tile(m); }
  __device__ static uint32_t stage_v(uint32_t m) { return Traits::TilesV::tile(m); }
  __device__ static uint32_t tile_a(uint32_t m) { return Traits::TilesA::tile(m); }
  __device__ static uint32_t tile_p(uint32_t m) { return Traits::TilesP::tile(m); }
  // Of the block's own chunks, every kClusterCtas-th.
  __device__ static uint32_t local_gate(uint32_t m) { return Traits::LocalGates::tile(m / Traits::kClusterCtas); }
  __device__ static uint32_t factors(uint32_t m) { return Traits::Factors::tile(m / Traits::kClusterCtas); }

  __device__ static uint32_t full_p(uint32_t m) { return Traits::FullP::barrier(m); }
  __device__ static uint32_t full_gate(uint32_t m) { return Traits::FullGate::barrier(m / Traits::kClusterCtas); }
  __device__ static void wait_gate(uint32_t m) { Traits::FullGate::wait(m / Traits::kClusterCtas); }
  __device__ static uint32_t full_descriptor(uint32_t m) {
    return smem() + Traits::kFullDescriptor + 8 * (m % Traits::kDescriptorRing / Traits::kBatch);
  }
  __device__ static void wait_descriptor(uint32_t m) {
    mbarrier_wait(full_descriptor(m), m / Traits::kDescriptorRing & 1);
  }
  __device__ static bool test_descriptor(uint32_t m) {
    return mbarrier_test(full_descriptor(m), m / Traits::kDescriptorRing & 1);
  }

  __device__ bool own(uint32_t m) const { return (m & 1) == rank; }
  __device__ uint32_t in_other_cta(uint32_t address) const { return cluster_address(address, rank ^ 1); }

  __device__ static uint32_t remote_gate(uint32_t m) {
    return smem() + Traits::kSmemGate + (Traits::kLocalGates + (m >> 1) % Traits::kRemoteGates) * Traits::kBytesGate;
  }
  __device__ uint32_t state_gate(uint32_t m) const { return own(m) ? local_gate(m) : remote_gate(m); }

  __device__ static uint32_t full_k(uint32_t m) { return Traits::FullK::barrier(m); }
  __device__ static uint32_t full_q(uint32_t m) { return Traits::FullQ::barrier(m); }
  __device__ static uint32_t full_o(uint32_t m) { return Traits::FullO::barrier(m); }
  __device__ static void wait_k(uint32_t m) { Traits::FullK::wait(m); }
  __device__ static void wait_q(uint32_t m) { Traits::FullQ::wait(m); }
  __device__ static void wait_p(uint32_t m) { Traits::FullP::wait(m); }
  // Whether all that a state warp waits for is there.
  __device__ static bool ready(uint32_t m) {
    const bool k = Traits::FullK::test(m);
    const bool q = Traits::FullQ::test(m);
    const bool p = Traits::FullP::test(m);
    return k & q & p;
  }
  __device__ static uint32_t done(uint32_t m) { return Traits::Done::barrier(m); }
  // Until both blocks' state groups are through with chunk m - back, if there is one.
  __device__ static void wait_done(uint32_t m, uint32_t back) {
    if (m >= back) mbarrier_wait(done(m - back), (m - back) / Traits::kBarriersDone & 1);
  }
  // Until the gates of an own chunk may be written.
  __device__ static void wait_local_gate(uint32_t m) { wait_done(m, 2 * Traits::kLocalGates); }
  // A state warp is through with chunk m: in both blocks.
  __device__ static void arrive_done(uint32_t m, int lane) {
    jitter();
    const uint32_t barrier = done(m);
    if constexpr (kWarpArrivals == 32) {
      mbarrier_arrive_cluster(cluster_address(barrier, 0));
      mbarrier_arrive_cluster(cluster_address(barrier, 1));
    } else if (lane < 2) {
      mbarrier_arrive_cluster(cluster_address(barrier, lane));
    }
  }
};

}  // namespace flash_qla::cuda::sm90::fwd_2cta
