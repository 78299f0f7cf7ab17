// What a state warpgroup saves of its state on the way: h, checkpoints, states at listed tokens.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/work_sources.cuh"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/common/state_io.cuh"
#include "cuda/sm90/common/tile.cuh"

namespace flash_qla::cuda::sm90::fwd {

template <typename Traits>
struct StateStores {
  using Element = typename Traits::Element;
  const KernelArgs& p;
  int group;  // which 64 rows of V
  FragmentPosition at;

  __device__ int first_row(const ChunkDescriptor& c) const { return first_row(c, at); }
  __device__ int first_row(const ChunkDescriptor& c, const FragmentPosition& at) const {
    return 64 * (group + c.half) + at.row;
  }

  // The state at the chunk's start, as the products below see it.
  __device__ void save_h(const uint32_t (&packed)[32], const ChunkDescriptor& c) const {
    // An empty sequence has no chunk, though its work item has one. A chunk number below zero, which only offsets out
    // of order can give, is past the rows as well.
    if (p.args.h == nullptr || c.valid == 0 || (c.flags & kWarmupChunk) ||
        static_cast<uint32_t>(c.chunk) >= p.args.h_rows) {
      return;
    }
    Element* base = static_cast<Element*>(p.args.h) +
                    (static_cast<int64_t>(c.chunk) * p.args.num_value_heads + c.head) * (kHeadDim * kHeadDim);
    uint32_t* words = reinterpret_cast<uint32_t*>(base) + paired_word(at.q);
    const int dv = first_row(c);
    if (p.args.state_v_first) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int block = 2 * (i >> 1), row = dv + 8 * (i & 1);
        *reinterpret_cast<uint2*>(words + (row * kHeadDim + 8 * block) / 2) =
            pair_words(packed[2 * block + (i & 1)], packed[2 * block + 2 + (i & 1)], at.q);
      }
    } else {
      const int key = at.lane >> 2;
      words += (key * kHeadDim + dv - key) / 2;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        *reinterpret_cast<uint2*>(words + 8 * i * kHeadDim / 2) =
            pair_words(transpose_8x8(packed[2 * i]), transpose_8x8(packed[2 * i + 1]), at.q);
      }
    }
  }

  // The same by the copy engine, where save_h() would store; whether it has been sent. The groups take turns in the
  // tile: the second waits for the first's half of this chunk, the first for the second's of the one before.
  __device__ bool send_h(const uint32_t (&packed)[32], const ChunkDescriptor& c) const {
    if (c.valid == 0 || (c.flags & (kWarmupChunk | kStartsInsideChunk)) ||
        static_cast<uint32_t>(c.chunk) >= p.args.h_rows) {
      return false;
    }
    mbarrier_wait(smem() + Traits::kFreeH, group ^ 1);
    const uint32_t tile = smem() + Traits::kSmemH;
    if (p.args.state_v_first) {
      const uint32_t row = tile + (16 * at.warp + (at.lane & 15)) * 128 + (((at.lane >> 4) ^ at.swizzle) << 4);
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        store_matrix_x4((row ^ ((b & 3) << 5)) + (b >> 2) * Traits::kHalf, packed[4 * b], packed[4 * b + 1],
                        packed[4 * b + 2], packed[4 * b + 3]);
      }
    } else {
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        store_matrix_x4_trans(tile + at.trans_row + at.trans_chunk + b * 2048, packed[4 * b], packed[4 * b + 1],
                              packed[4 * b + 2], packed[4 * b + 3]);
      }
    }
    fence_proxy_async();
    named_barrier_sync(4 + group, 128);
    if (sends_h()) {
      const int matrix = c.chunk * p.args.num_value_heads + c.head;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = p.args.state_v_first ? group : i, half = p.args.state_v_first ? i : group;
        tma_store_4d(&p.h, tile + i * Traits::kHalf, 0, 64 * row, half, matrix);
      }
      tma_store_commit();
    }
    return true;
  }
  __device__ bool sends_h() const { return at.warp == 0 && at.lane == 0; }

  // The state at the chunk's start in full, for every entry of its list.
  __device__ void save_listed(float (&s)[64], const ChunkDescriptor& c, const FragmentPosition& at) const {
    const Args& args = p.args;
    if (args.start_lists == nullptr || c.valid == 0 || (c.flags & kWarmupChunk)) return;
    for (int32_t entry = args.start_lists[c.row]; entry >= 0; entry = args.start_next[entry]) {
      float* matrix =
          args.start_states + (static_cast<int64_t>(entry) * args.num_value_heads + c.head) * (kHeadDim * kHeadDim);
      move_state<true>(matrix, DType::kFloat32, args.state_v_first, s, first_row(c, at), at.q);
    }
  }

  // The state after a chunk that ends at listed tokens, into their slots of the pool.
  __device__ void save_at_listed(float (&s)[64], const ChunkDescriptor& c, const FragmentPosition& at) const {
    const Args& args = p.args;
    if (c.flags & kWarmupChunk) return;
#pragma unroll 1
    for (int32_t first = 0; first < args.num_listed; first += 32) {
      const int32_t entry = first + at.lane;
      ListedToken listed{0, kNoSlot};
      if (entry < args.num_listed) listed = listed_tokens<Traits>()[entry];
      const int32_t slot = listed.token == c.row + c.valid ? listed.slot : kNoSlot;
#pragma unroll 1
      for (uint32_t found = __ballot_sync(0xffffffffu, slot >= 0); found != 0; found &= found - 1) {
        const int32_t to = __shfl_sync(0xffffffffu, slot, __ffs(found) - 1);
        move_state<true>(state_matrix(args.final_state, to, c.head), args.final_state.type, args.state_v_first, s,
                         first_row(c, at), at.q);
      }
    }
  }

  // The state after every n-th full chunk of a sequence.
  __device__ void save_checkpoint(float (&s)[64], const ChunkDescriptor& c) const {
    const Args& args = p.args;
    const bool whole = Traits::kEndsAtCheckpoints ? (c.flags & kEndsWholeChunk) != 0 : c.valid == kChunk;
    if (args.checkpoints == nullptr || !whole || (c.flags & kWarmupChunk) ||
        (c.position + 1) % args.checkpoint_every_chunks != 0) {
      return;
    }
    const int64_t first = load_index(args.checkpoint_cu_starts, args.checkpoint_starts_are_64_bit,
                                     c.sequence * args.checkpoint_starts_stride);
    const int64_t row = first + (c.position + 1) / args.checkpoint_every_chunks - 1;
    if (row < 0 || row >= args.checkpoint_rows) return;
    char* matrix = static_cast<char*>(args.checkpoints) +
                   (row * args.num_value_heads + c.head) * (kHeadDim * kHeadDim) * element_size(args.checkpoint_type);
    move_state<true>(matrix, args.checkpoint_type, args.state_v_first, s, first_row(c), at.q);
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
