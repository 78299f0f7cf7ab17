// The gates of a block's own chunks, one of every kClusterCtas of a cluster's queue, by a warp.
#pragma once

#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/gate_warp.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::Args, fwd::KernelArgs, fwd::ChunkDescriptor;
using fwd::is_short_last_chunk, fwd::kFirstChunk, fwd::kOne;

// One of g and beta: where a lane's two tokens of a chunk are, 2 lane and the next.
struct InputPosition {
  const float* base;
  int token_bytes, head_bytes;
  const void* at;
  __device__ void find(const ChunkDescriptor& c, int lane) {
    at = advance(advance(base, c.head, head_bytes), c.row + 2 * lane, token_bytes);
  }
  // To the block's next chunk, `kTokens` on.
  template <int kTokens>
  __device__ void move_on() {
    at = advance(at, kTokens, token_bytes);
  }
  __device__ float2 load(int tokens, int lane) const {
    float2 pair = make_float2(0.0f, 0.0f);
    if (2 * lane < tokens) pair.x = *static_cast<const float*>(at);
    if (2 * lane + 1 < tokens) pair.y = *static_cast<const float*>(advance(at, 1, token_bytes));
    return pair;
  }
};

// What they are made of comes two of the block's chunks ahead. Zeros past a sequence's end. places: of the cluster's
// kind.
template <typename Traits, typename Places>
__device__ __forceinline__ void make_local_gates(const KernelArgs& p, const Places& places, int lane) {
  const Args& args = p.args;
  // Strides below 2^29 elements: the launcher has looked.
  InputPosition g{args.g, 4 * static_cast<int>(args.g_token_stride), 4 * static_cast<int>(args.g_head_stride), nullptr};
  InputPosition beta{args.beta, 4 * static_cast<int>(args.beta_token_stride),
                     4 * static_cast<int>(args.beta_head_stride), nullptr};
  if (args.beta == nullptr) beta = {&kOne, 0, 0, nullptr};
  float2 next_g, next_beta;
  bool next_short;
  const auto fetch = [&](uint32_t m) {
    places.wait_descriptor(m);
    const ChunkDescriptor& c = places.descriptor(m);
    if (c.valid < 0) return false;
    // Whether a tile starts since the block's chunk before.
    const auto starts = [&] {
      int32_t flags = c.flags;
#pragma unroll
      for (int i = 1; i < Traits::kClusterCtas; ++i) flags |= places.descriptor(m - i).flags;
      return (flags & kFirstChunk) != 0;
    };
    if (m < Traits::kClusterCtas || starts()) {
      g.find(c, lane);
      beta.find(c, lane);
    } else {
      g.move_on<Traits::kClusterCtas * kChunk>();
      beta.move_on<Traits::kClusterCtas * kChunk>();
    }
    next_g = g.load(g.base != nullptr ? c.valid : 0, lane);
    next_beta = beta.load(c.valid, lane);
    next_short = is_short_last_chunk<Traits>(c);
    return true;
  };
  uint32_t m = places.rank;
  bool more = fetch(m);
#pragma unroll 1
  while (more) {
    places.wait_local_gate(m);
    const uint32_t factors = places.factors(m);
    store_shared_f2(factors + Traits::kGateBeta + 8 * lane, next_beta.x, next_beta.y);
    make_gates<Traits>(
        p.args.scale, next_g, [&] { return next_beta; }, next_short, factors, places.local_gate(m), lane);
    fence_proxy_async();  // the copy engine takes them to the other blocks
    __syncwarp();
    mbarrier_arrive_warp(places.full_gate(m), lane);
    m += Traits::kClusterCtas;
    more = fetch(m);
  }
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
