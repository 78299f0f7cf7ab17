// Where things are in the blocks of a relay, and what their roles wait for.
#pragma once

#include <cstdint>

#include "../../common/cluster.cuh"
#include "../../common/mbarrier.cuh"
#include "chunk_stream.cuh"
#include "cluster_places.cuh"

namespace flash_qla::cuda::sm90 {

// rank: of the block in its cluster; that of the chunks that it prepares, modulo the blocks.
template <typename Traits>
struct RelayPlaces : ClusterPlaces<Traits> {
  using ClusterPlaces<Traits>::rank, ClusterPlaces<Traits>::full_p;

  __device__ bool leads() const { return rank < Traits::kLeaders; }
  __device__ uint32_t follower() const { return rank + Traits::kLeaders; }
  __device__ uint32_t leader() const { return rank - Traits::kLeaders; }
  // Which auxiliary group prepares chunk m, in the block that does.
  __device__ static uint32_t group_of(uint32_t m) { return m / Traits::kBlocks % Traits::kAuxGroups; }

  __device__ static uint32_t stage_own_k(uint32_t m) {
    return smem() + Traits::kSmemOwnK + group_of(m) * Traits::kBytesK;
  }
  __device__ static uint32_t stage_own_q() { return smem() + Traits::kSmemOwnQ; }
  __device__ static uint32_t own_a(uint32_t m) {
    return smem() + Traits::kSmemOwnA + group_of(m) * Traits::kBytesMatrix;
  }
  __device__ static uint32_t own_p() { return smem() + Traits::kSmemOwnP; }
  __device__ static uint32_t lead_gate(uint32_t m) {
    return smem() + Traits::kSmemGateLead + m % Traits::kStagesA * Traits::kBytesGate;
  }
  __device__ static uint32_t follow_gate(uint32_t m) {
    return smem() + Traits::kSmemGateFollow + m % Traits::kStagesP * Traits::kBytesGate;
  }
  __device__ static uint32_t stage_c(uint32_t m) {
    return smem() + Traits::kSmemC + m % Traits::kStagesC * Traits::kBytesMatrix;
  }

  __device__ static uint32_t full_own_k(uint32_t m) { return smem() + Traits::kFullOwnK + 8 * group_of(m); }
  __device__ static uint32_t full_own_q(uint32_t m) { return smem() + Traits::kFullOwnQ + 8 * group_of(m); }
  __device__ static uint32_t full_k(uint32_t m) { return smem() + Traits::kFullK + 8 * (m % Traits::kStagesK); }
  __device__ static uint32_t full_a(uint32_t m) { return smem() + Traits::kFullA + 8 * (m % Traits::kStagesA); }
  __device__ static uint32_t full_q(uint32_t m) { return smem() + Traits::kFullQ + 8 * (m % Traits::kStagesQ); }
  __device__ static uint32_t free_q(uint32_t m) { return smem() + Traits::kFreeQ + 8 * (m % Traits::kStagesQ); }
  __device__ static uint32_t full_c(uint32_t m) { return smem() + Traits::kFullC + 8 * (m % Traits::kStagesC); }
  __device__ static uint32_t free_c(uint32_t m) { return smem() + Traits::kFreeC + 8 * (m % Traits::kStagesC); }
  __device__ static uint32_t full_o(uint32_t m) { return smem() + Traits::kFullO + 8 * (m % Traits::kStagesC); }

  __device__ static void wait_c(uint32_t m) { mbarrier_wait(full_c(m), m / Traits::kStagesC & 1); }
  // Until O of chunk m - back has left its stage, if there is one.
  __device__ static void wait_free_c(uint32_t m, uint32_t back) {
    if (m >= back) mbarrier_wait(free_c(m - back), (m - back) / Traits::kStagesC & 1);
  }
  // Whether all is there that the state group of a leader or a follower waits for, or until it is.
  template <bool kLeads>
  __device__ static bool ready(uint32_t m) {
    const bool k = mbarrier_test(full_k(m), m / Traits::kStagesK & 1);
    if constexpr (kLeads) return k & mbarrier_test(full_a(m), m / Traits::kStagesA & 1);
    const bool q = mbarrier_test(full_q(m), m / Traits::kStagesQ & 1);
    const bool p = mbarrier_test(full_p(m), m / Traits::kStagesP & 1);
    return k & q & p;
  }
  template <bool kLeads>
  __device__ static void wait_ready(uint32_t m) {
    mbarrier_wait(full_k(m), m / Traits::kStagesK & 1);
    if constexpr (kLeads) {
      mbarrier_wait(full_a(m), m / Traits::kStagesA & 1);
    } else {
      mbarrier_wait(full_q(m), m / Traits::kStagesQ & 1);
      mbarrier_wait(full_p(m), m / Traits::kStagesP & 1);
    }
  }

  // Until the state groups of all leaders, or followers, are through with chunk m - back, or the followers with P of
  // it, if there is one.
  __device__ static void wait_done(uint32_t ring, uint32_t m, uint32_t back) {
    if (m < back) return;
    mbarrier_wait(smem() + ring + 8 * ((m - back) % Traits::kBarriersDone), (m - back) / Traits::kBarriersDone & 1);
  }
  __device__ static void wait_leaders(uint32_t m, uint32_t back) { wait_done(Traits::kLeadDone, m, back); }
  __device__ static void wait_followers(uint32_t m, uint32_t back) { wait_done(Traits::kFollowDone, m, back); }
  __device__ static void wait_outputs(uint32_t m, uint32_t back) { wait_done(Traits::kOutputDone, m, back); }
  // Until the gates of an own chunk may be written.
  __device__ static void wait_own_gate(uint32_t m) { wait_outputs(m, Traits::kOwnGates * Traits::kBlocks); }
  // A state warp is through with chunk m: in all blocks.
  __device__ static void arrive_done(uint32_t ring, uint32_t m, int lane) {
    jitter();
    const uint32_t barrier = smem() + ring + 8 * (m % Traits::kBarriersDone);
    if constexpr (kWarpArrivals == 32) {
#pragma unroll 1
      for (uint32_t block = 0; block < Traits::kBlocks; ++block)
        mbarrier_arrive_cluster(cluster_address(barrier, block));
    } else if (lane < Traits::kBlocks) {
      mbarrier_arrive_cluster(cluster_address(barrier, lane));
    }
  }
};

}  // namespace flash_qla::cuda::sm90
