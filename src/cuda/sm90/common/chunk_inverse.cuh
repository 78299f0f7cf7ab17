// A of a chunk's value heads from its keys, by a block of one warpgroup: for the forward of a training step
// (chunk_fwd/save_a.cu), and for a backward, or links, without it (chunk_bwd/make_a.cuh).
#pragma once

#include "cuda/sm90/common/decay_products.cuh"
#include "cuda/sm90/common/ut_transform.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kInverseThreads = 128;  // one warpgroup: it owns K K^T

template <typename T>
struct ChunkInverse {
  using Traits = PlainInverseTraits<T>;
  using Transform = UtTransform<Traits>;
  static constexpr uint32_t kHalf = kChunk * 128;  // bytes of a tile of 64 columns

  // Shared memory of the block.
  static constexpr uint32_t kTile = 2 * kHalf;  // behind K: -M, then A; rows of 128 bytes, swizzled
  static constexpr uint32_t kBeta = kTile + kHalf;
  static constexpr uint32_t kGate = kBeta + kChunk * 4;
  static constexpr uint32_t kBarrier = kGate + kPlainGateBytes;
  static constexpr uint32_t kBytes = 1024 + kBarrier + 16;  // 1024: the tiles' alignment, made up by hand

  uint32_t smem;
  __device__ explicit ChunkInverse(const void* raw) : smem((smem_address(raw) + 1023u) & ~1023u) {}

  // Where K's two halves are to come, and the barrier that it comes through. Before anything else, by all threads.
  __device__ uint32_t keys(int half = 0) const { return smem + half * kHalf; }
  __device__ uint32_t keys_there() const { return smem + kBarrier; }
  __device__ void start() const {
    const int thread = threadIdx.x;
    if (thread < static_cast<int>(kPlainGateBytes / 4)) store_shared_f1(smem + kGate + 4 * thread, 1.0f);
    if (thread == 0) {
      mbarrier_init(keys_there(), 1);
      mbarrier_init_fence();
    }
    __syncthreads();
  }

  // `heads` value heads from first_head on, of K's `valid` tokens, which have been asked for. beta(token, head);
  // row(token, head): where that row of A goes, on a 16-byte boundary. At its end K may be asked for again, in the next
  // phase.
  template <typename Beta, typename Row>
  __device__ void make(uint32_t phase, int valid, int first_head, int heads, const Beta& beta, const Row& row) const {
    const uint32_t tile = smem + kTile, betas = smem + kBeta, gate = smem + kGate;
    const int thread = threadIdx.x, warp = static_cast<int>(uniform(static_cast<uint32_t>(thread) / 32));
    const FragmentPosition at = fragment_position(thread);
    mbarrier_wait(keys_there(), phase);
    if (valid < kChunk) {
      zero_tail_rows(keys(), 2, valid, thread);
      __syncthreads();
    }
    float kkt[32];
    start_product<T>(kkt, uniform_descriptor(keys()), uniform_descriptor(keys()));
    wgmma_wait<0>();
    pin(kkt);

    for (int head = first_head; head < first_head + heads; ++head) {
      if (thread < kChunk) store_shared_f1(betas + thread * 4, thread < valid ? beta(thread, head) : 0.0f);
      __syncthreads();
      const float beta0 = load_shared_f1(betas + 4 * at.row), beta1 = load_shared_f1(betas + 4 * at.row + 32);
      store_kkt<true>(kkt, beta0, beta1, tile, at);
      __syncthreads();
      if (warp < 2) {
        Transform::solve_pair(tile, warp, at.lane);
      } else {
        store_kkt<false>(kkt, beta0, beta1, tile, at);
      }
      __syncthreads();
      const auto meet = [](bool waits) {
        if (waits) {
          named_barrier_sync(1, kInverseThreads);
        } else {
          named_barrier_arrive(1, kInverseThreads);
        }
      };
      Transform::finish_by_four(tile, gate, gate, gate + Traits::kGateMild, warp, at.lane, meet, [](auto, float) {});
      __syncthreads();
      for (int piece = thread; piece < valid * 8; piece += kInverseThreads) {
        const int token = piece / 8, column = piece % 8;  // of 8 elements
        // Right of the diagonal blocks of 32 the tile holds what A was made from.
        *reinterpret_cast<uint4*>(row(token, head) + column * 8) =
            token < 32 && column >= 4 ? make_uint4(0, 0, 0, 0)
                                      : load_shared_u4(tile + token * 128 + ((column ^ (token & 7)) << 4));
      }
      __syncthreads();
    }
  }
};

}  // namespace flash_qla::cuda::sm90
