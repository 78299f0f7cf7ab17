// The load warp of the kernel that makes states only: the list of chunks, and all that a chunk brings.
#pragma once

#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "aux_role.cuh"
#include "chunk_stream.cuh"

namespace flash_qla::cuda::sm90 {

// The named barrier of the load group; 1 and 2 belong to the auxiliary groups, 3 to the whole block.
inline constexpr uint32_t kLoadBarrier = 4;

// By one warp: chunk m's record, K, V, g and beta into stage m % kStages as soon as the state groups are done with
// chunk m - kStages. All of it arrives on that stage's one barrier.
template <typename Traits>
__device__ __forceinline__ void load_chunks(const ChunkForwardKernelParams& p, int lane) {
  bool first_round = true;
#pragma unroll 1
  for (uint32_t m = 0;; m = next_place<Traits>(m)) {
    const uint32_t stage = m % Traits::kRound;
    if (!first_round) mbarrier_wait(smem() + Traits::kDone + 8 * stage, m / Traits::kRound ^ 1);
    first_round &= m != Traits::kStages - 1;
    if (lane == 0) produce_chunk<Traits>(p, m);
    __syncwarp();
    const ChunkRecord& c = reinterpret_cast<const ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m];
    const uint32_t memory = smem() + stage * Traits::kBytesStage, full = smem() + Traits::kFullK + 8 * stage;
    if (c.valid < 0) {  // the end
      mbarrier_arrive(full);
      if (lane == 0) mbarrier_arrive(full);
      return;
    }
    if (lane == 0) {
      const bool with_v = !(c.flags & kNoValues);
      mbarrier_arrive_expect(full, with_v ? Traits::kBytesK + Traits::kBytesV : Traits::kBytesK);
      tma_load_4d(memory + Traits::kSmemK, &p.k, full, 0, c.row, 0, c.key_head);
      if (with_v) tma_load_4d(memory + Traits::kSmemV, &p.v, full, 0, c.row, c.half, c.head);
    }
    load_gates<Traits>(p.args, c, memory + Traits::kSmemGate, full, lane);
  }
}

}  // namespace flash_qla::cuda::sm90
