// A of every chunk and value head where the caller has none, with the bits that the forward's kernels save. One block
// a (chunk, key head), its value heads one after another; of links (kLinks) a (chunk, value head) that they want.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"
#include "cuda/sm90/common/chunk_inverse.cuh"

namespace flash_qla::cuda::sm90::bwd {

template <typename T, bool kLinks = false>
__global__ __launch_bounds__(kInverseThreads) void sm90_chunk_bwd_make_a_kernel(const Args p,
                                                                                const __grid_constant__ Maps maps) {
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
  const ChunkInverse<T> inverse(raw);
  inverse.start();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(inverse.keys_there(), kTokensBytes);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(inverse.keys(half), &maps.k, inverse.keys_there(), 0, chunk.token, half, key_head, chunk.batch);
    }
  }
  const auto beta = [&](int token, int head) {
    return p.beta.data == nullptr ? 1.0f
                                  : load_element(p.beta, row_offset(p.beta, chunk.batch, chunk.token + token, head));
  };
  const auto row = [&](int token, int head) {
    return static_cast<uint16_t*>(p.A.data) + row_offset(p.A, chunk.batch, chunk.token + token, head);
  };
  inverse.make(0, chunk.valid, first_head, kLinks ? 1 : p.group, beta, row);
}

}  // namespace flash_qla::cuda::sm90::bwd
