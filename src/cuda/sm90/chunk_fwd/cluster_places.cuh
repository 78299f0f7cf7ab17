// Where the blocks of pairs and relays have the same things, and when records are there.
#pragma once

#include <cstdint>

#include "../../common/mbarrier.cuh"
#include "chunk_stream.cuh"

namespace flash_qla::cuda::sm90 {

template <typename Traits>
struct ClusterPlaces {
  uint32_t rank;  // of the block in its cluster

  __device__ static ChunkRecord& record(uint32_t m) {
    return reinterpret_cast<ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m % Traits::kChunkRing];
  }
  __device__ static uint32_t stage_k(uint32_t m) {
    return smem() + Traits::kSmemK + m % Traits::kStagesK * Traits::kBytesK;
  }
  __device__ static uint32_t stage_q(uint32_t m) {
    return smem() + Traits::kSmemQ + m % Traits::kStagesQ * Traits::kBytesK;
  }
  __device__ static uint32_t stage_v(uint32_t m) {
    return smem() + Traits::kSmemV + m % Traits::kStagesV * Traits::kBytesV;
  }
  __device__ static uint32_t tile_a(uint32_t m) {
    return smem() + Traits::kSmemA + m % Traits::kStagesA * Traits::kBytesMatrix;
  }
  __device__ static uint32_t tile_p(uint32_t m) {
    return smem() + Traits::kSmemP + m % Traits::kStagesP * Traits::kBytesMatrix;
  }
  // Of the block's own chunks, every kBlocks-th.
  __device__ static uint32_t own_gate(uint32_t m) {
    return smem() + Traits::kSmemGate + m / Traits::kBlocks % Traits::kOwnGates * Traits::kBytesGate;
  }
  __device__ static uint32_t factors(uint32_t m) {
    return smem() + Traits::kSmemFactors + m / Traits::kBlocks % Traits::kOwnGates * Traits::kBytesFactors;
  }

  __device__ static uint32_t full_p(uint32_t m) { return smem() + Traits::kFullP + 8 * (m % Traits::kStagesP); }
  __device__ static uint32_t full_gate(uint32_t m) {
    return smem() + Traits::kFullGate + 8 * (m / Traits::kBlocks % Traits::kBarriersGate);
  }
  __device__ static void wait_gate(uint32_t m) {
    mbarrier_wait(full_gate(m), m / Traits::kBlocks / Traits::kBarriersGate & 1);
  }
  __device__ static uint32_t full_record(uint32_t m) {
    return smem() + Traits::kFullRecord + 8 * (m % Traits::kChunkRing / Traits::kBurst);
  }
  __device__ static void wait_record(uint32_t m) { mbarrier_wait(full_record(m), m / Traits::kChunkRing & 1); }
  __device__ static bool test_record(uint32_t m) { return mbarrier_test(full_record(m), m / Traits::kChunkRing & 1); }
};

}  // namespace flash_qla::cuda::sm90
