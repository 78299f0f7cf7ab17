// What a producer warpgroup of a cluster does: from K of a chunk of its own to A_g.
#pragma once

#include "cuda/common/compiler.cuh"
#include "cuda/sm90/common/decay_products.cuh"
#include "cuda/sm90/common/tile.cuh"
#include "cuda/sm90/common/ut_transform.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

// Of chunk m, by all threads of a group. Of `role`, by name: its thread; its group's sync() and meet(), the barrier
// before A_g's diagonal; where the chunk's descriptor, K, tile (of the inverse, then of A_g), factors and gates are;
// what must be there before K is read, before its factors are, and before its tile is written; finish<kMild>(), which
// passes A_g on and goes on with P.
template <typename Traits, typename Role>
__device__ __forceinline__ void prepare_chunk(const Role& role, uint32_t m) {
  using Element = typename Traits::Element;
  using Transform = UtTransform<Traits>;
  const FragmentPosition at = fragment_position(role.thread);
  const int warp = static_cast<int>(uniform(static_cast<uint32_t>(at.warp)));
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
    role.sync();  // what solve_pair() reads of -M is there
    if (warp < 2) {
      Transform::solve_pair(tile, warp, at.lane);
    } else {
      store_kkt<false>(kkt, beta0, beta1, tile, at);
    }
  }
  role.sync();  // its results are there, and all of -M
  // Both kinds of decay to the chunk's end, so that the instructions of one do not lie between those of the other.
  Transform::finish_by_four(
      tile, factors, factors + Traits::kGateBeta, role.gate(m) + Traits::kGateMild, warp, at.lane,
      [&](bool waits) { role.meet(waits); },
      [&](auto mild, float factor) { role.template finish<decltype(mild)::value>(m, tile, factors, factor, at); });
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
