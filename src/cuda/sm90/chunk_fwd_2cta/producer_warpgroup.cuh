// What a producer warpgroup of a pair does: from K of a chunk of its own to A_g.
#pragma once

#include "cuda/sm90/common/decay_products.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/tile.cuh"
#include "cuda/sm90/common/ut_transform_wgmma.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

// Of chunk m, by all threads of a group. Of `role`, by name: its thread and its group's sync(); where the chunk's
// descriptor, K, tile (of the inverse, then of A_g), factors and gates are; what must be there before K is read, before
// its factors are, and before its tile is written; finish<kMild>(), which passes A_g on and goes on with P.
template <typename Traits, typename Role>
__device__ __forceinline__ void prepare_chunk(const Role& role, uint32_t m) {
  using Element = typename Traits::Element;
  const FragmentPosition at = fragment_position(role.thread);
  const ChunkDescriptor& chunk = role.descriptor(m);
  const uint32_t tile = role.tile_a(m), factors = role.factors(m);
  role.wait_k(m);
  if (chunk.valid < kChunk) {
    zero_tail_rows(role.stage_k(m), 2, chunk.valid, role.thread);
    role.sync();
  }
  {
    float kkt[32];
    const uint64_t k_rows = uniform_descriptor(role.stage_k(m));
    start_product<Element>(kkt, k_rows, k_rows);
    role.wait_factors(m);
    const float beta0 = load_shared_f1(factors + Traits::kGateBeta + 4 * at.row);
    const float beta1 = load_shared_f1(factors + Traits::kGateBeta + 4 * at.row + 32);
    role.wait_tile(m);
    wgmma_wait<0>();
    pin(kkt);
    store_kkt<true>(kkt, beta0, beta1, tile, at);
    role.sync();  // the diagonal blocks of M are there
    if (role.thread < 64) {
      solve_diagonal_blocks<kSolveInPairs<Element>>(tile, role.thread >> 4 & 2, at.lane);
    } else {
      store_kkt<false>(kkt, beta0, beta1, tile, at);
    }
  }
  __syncwarp();
  fence_proxy_async();
  role.sync();  // D is there
  float mild;
  {
    float a[3][8];
    uint32_t d[4];
    float4 own;
    invert(
        a, d, tile, at, [&] { role.sync(); },
        [&] {
          mild = load_shared_f1(role.gate(m) + Traits::kGateMild);
          own = load_shared_f4(factors + Traits::kGateColumnA + 80 * at.q + 16 * at.warp);
        });
    role.sync();  // the inverse has been read: A_g takes its tile
    const float2 diagonal[3] = {unpack2<__half>(d[0]), unpack2<__half>(d[1]), unpack2<__half>(d[3])};
    // Both kinds of decay to the chunk's end, so that the instructions of one do not lie between those of the other.
    if (__any_sync(0xffffffffu, mild != 0.0f)) {
      store_mild<Traits, true>(a[0], diagonal, own, tile, factors, at);
      role.template finish<true>(m, tile, factors, mild, at);
    } else {
      store_gated<Traits, true>(a[0], diagonal, tile, factors, at);
      role.template finish<false>(m, tile, factors, mild, at);
    }
  }
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
