// The inverse warps: A_g, a warp to every second chunk.
#pragma once

#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/warp_role.cuh"
#include "cuda/sm90/common/ut_transform.cuh"

namespace flash_qla::cuda::sm90::fwd {

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
