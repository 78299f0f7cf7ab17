// A of every chunk and value head where the caller has none, with the bits that the forward's kernels save. One block
// a (chunk, key head), its value heads one after another; of links (kLinks) a (chunk, value head) that they want.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"
#include "cuda/sm90/common/decay_products.cuh"
#include "cuda/sm90/common/ut_transform.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kMakeAThreads = 128;  // one warpgroup: it owns K K^T

struct MakeASmem {
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kTile = kK + kTokensBytes;  // -M, then A: rows of 128 bytes, swizzled
  static constexpr uint32_t kBeta = kTile + kTileBytes;
  static constexpr uint32_t kGate = kBeta + kChunk * 4;
  static constexpr uint32_t kBarrier = kGate + kPlainGateBytes;
  static constexpr uint32_t kBytes = 1024 + kBarrier + 16;  // 1024: the tiles' alignment, made up by hand
};

template <typename T, bool kLinks = false>
__global__ __launch_bounds__(kMakeAThreads) void sm90_chunk_bwd_make_a_kernel(const Args p,
                                                                              const __grid_constant__ Maps maps) {
  using Transform = UtTransform<PlainInverseTraits<T>>;
  launch_dependents();
  wait_for_predecessors();
  ChunkInfo chunk{};
  int first_head = 0, key_head = 0;
  if constexpr (kLinks) {
    if (static_cast<int>(blockIdx.x) >= *p.link_tile_count) return;
    const LinkTile link = p.link_tiles[blockIdx.x];
    chunk = {link.token, link.valid, 0, 0};
    first_head = link.tile % p.Hv;
    key_head = first_head / p.group;
  } else {
    const int slot = blockIdx.x / p.Hq;
    key_head = blockIdx.x % p.Hq;
    if (slot >= total_chunks(p)) return;
    chunk = chunk_info(p, slot);
    first_head = key_head * p.group;
  }
  if (chunk.valid <= 0) return;

  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const uint32_t keys = smem + MakeASmem::kK, tile = smem + MakeASmem::kTile, betas = smem + MakeASmem::kBeta;
  const uint32_t gate = smem + MakeASmem::kGate, barrier = smem + MakeASmem::kBarrier;
  const int thread = threadIdx.x, warp = static_cast<int>(uniform(static_cast<uint32_t>(thread) / 32));
  const FragmentPosition at = fragment_position(thread);

  if (thread < static_cast<int>(kPlainGateBytes / 4)) store_shared_f1(gate + 4 * thread, 1.0f);
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, kTokensBytes);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(keys + half * kTileBytes, &maps.k, barrier, 0, chunk.token, half, key_head, chunk.batch);
    }
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  if (chunk.valid < kChunk) {
    zero_tail_rows(keys, 2, chunk.valid, thread);
    __syncthreads();
  }
  float kkt[32];
  start_product<T>(kkt, uniform_descriptor(keys), uniform_descriptor(keys));
  wgmma_wait<0>();
  pin(kkt);

  const int members = kLinks ? 1 : p.group;
  for (int head = first_head; head < first_head + members; ++head) {
    if (thread < kChunk) {
      const bool inside = thread < chunk.valid;
      store_shared_f1(betas + thread * 4,
                      !inside ? 0.0f
                      : p.beta.data == nullptr
                          ? 1.0f
                          : load_element(p.beta, row_offset(p.beta, chunk.batch, chunk.token + thread, head)));
    }
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
        named_barrier_sync(1, kMakeAThreads);
      } else {
        named_barrier_arrive(1, kMakeAThreads);
      }
    };
    Transform::finish_by_four(tile, gate, gate, gate + PlainInverseTraits<T>::kGateMild, warp, at.lane, meet,
                              [](auto, float) {});
    __syncthreads();
    for (int piece = thread; piece < chunk.valid * 8; piece += kMakeAThreads) {
      const int row = piece / 8, column = piece % 8;  // of 8 elements
      uint16_t* to =
          static_cast<uint16_t*>(p.A.data) + row_offset(p.A, chunk.batch, chunk.token + row, head) + column * 8;
      // Right of the diagonal blocks of 32 the tile holds what A was made from.
      *reinterpret_cast<uint4*>(to) = row < 32 && column >= 4
                                          ? make_uint4(0, 0, 0, 0)
                                          : load_shared_u4(tile + row * 128 + ((column ^ (row & 7)) << 4));
    }
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
