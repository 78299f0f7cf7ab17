// The gates of a block's own chunks, one of every kBlocks of a cluster's stream, by a warp.
#pragma once

#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/raw_gates.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::ChunkForwardArgs, fwd::ChunkForwardKernelParams, fwd::ChunkRecord;
using fwd::has_few_tokens, fwd::kFirstChunk, fwd::kOne;

// One of g and beta: where a lane's two tokens of a chunk are, 2 lane and the next.
struct RawPlace {
  const float* base;
  int token_bytes, head_bytes;
  const void* at;
  __device__ void find(const ChunkRecord& c, int lane) {
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
__device__ __forceinline__ void make_own_gates(const ChunkForwardKernelParams& p, const Places& places, int lane) {
  const ChunkForwardArgs& args = p.args;
  // Strides below 2^29 elements: the launcher has looked.
  RawPlace g{args.g, 4 * static_cast<int>(args.g_token_stride), 4 * static_cast<int>(args.g_head_stride), nullptr};
  RawPlace beta{args.beta, 4 * static_cast<int>(args.beta_token_stride), 4 * static_cast<int>(args.beta_head_stride),
                nullptr};
  if (args.beta == nullptr) beta = {&kOne, 0, 0, nullptr};
  float2 next_g, next_beta;
  bool next_few;
  const auto fetch = [&](uint32_t m) {
    places.wait_record(m);
    const ChunkRecord& c = places.record(m);
    if (c.valid < 0) return false;
    // Whether a tile starts since the block's chunk before.
    const auto starts = [&] {
      int32_t flags = c.flags;
#pragma unroll
      for (int i = 1; i < Traits::kBlocks; ++i) flags |= places.record(m - i).flags;
      return (flags & kFirstChunk) != 0;
    };
    if (m < Traits::kBlocks || starts()) {
      g.find(c, lane);
      beta.find(c, lane);
    } else {
      g.move_on<Traits::kBlocks * kChunk>();
      beta.move_on<Traits::kBlocks * kChunk>();
    }
    next_g = g.load(g.base != nullptr ? c.valid : 0, lane);
    next_beta = beta.load(c.valid, lane);
    next_few = has_few_tokens<Traits>(c);
    return true;
  };
  uint32_t m = places.rank;
  bool more = fetch(m);
#pragma unroll 1
  while (more) {
    places.wait_own_gate(m);
    const uint32_t factors = places.factors(m);
    store_shared_f2(factors + Traits::kGateBeta + 8 * lane, next_beta.x, next_beta.y);
    make_gates<Traits>(p.args.scale, next_g, [&] { return next_beta; }, next_few, factors, places.own_gate(m), lane);
    fence_proxy_async();  // the copy engine takes them to the other blocks
    __syncwarp();
    mbarrier_arrive_warp(places.full_gate(m), lane);
    m += Traits::kBlocks;
    more = fetch(m);
  }
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
