// What the roles of a kernel need to know of a chunk, where the producer of such descriptors stands, and what the
// producer warps have in common.
#pragma once

#include <cstdint>

#include "cuda/common/compiler.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/trait_queries.h"

namespace flash_qla::cuda::sm90::fwd {

inline constexpr int kFirstChunk = 1;
inline constexpr int kLastChunk = 2;
// Where chunks end at checkpoints (ForwardTraits::kEndsAtCheckpoints):
inline constexpr int kCheckpointChunk = 256;     // the state after it is kept, or may be
inline constexpr int kEndsWholeChunk = 512;      // set beside kCheckpointChunk: it ends a whole chunk of its sequence
inline constexpr int kStartsInsideChunk = 1024;  // it starts inside of a chunk of its sequence
inline constexpr int kRowsFollow = 16384;        // all 64 rows from its first on are of its item
// Of a plan:
inline constexpr int kWarmupChunk = 4;    // nothing of it is stored
inline constexpr int kNoValues = 8;       // V counts as zero
inline constexpr int kFromCutState = 16;  // slot_in is a state at a cut
inline constexpr int kFromIdentity = 32;
inline constexpr int kToTransition = 64;    // slot_out is a transition's, else (kStateOnly) a state at a cut
inline constexpr int kCountedReader = 128;  // its item starts from an initial state that is counted in `readers`

// What the roles need to know of one chunk.
struct alignas(16) ChunkDescriptor {
  int32_t row;    // first token
  int32_t valid;  // tokens in it, 0 for an empty sequence; -1 after the last chunk
  int32_t flags;  // kFirstChunk, kLastChunk of its item, and those of a plan
  int32_t head;   // value head
  int32_t sequence;
  int16_t half;  // of V: the block's, in a cluster of two; else 0
  int16_t key_head;
  int32_t chunk;     // counted over all sequences
  int32_t position;  // counted in its sequence
  int64_t slot_in;   // initial and final state slots, -1: none
  int64_t slot_out;
};
static_assert(sizeof(ChunkDescriptor) == 48);

// By the chunk alone, so that a sequence in parts has the bits of the whole; but where chunks end at checkpoints
// one that ends early is no sequence's end.
template <typename Traits>
__device__ __forceinline__ bool is_short_last_chunk(const ChunkDescriptor& c) {
  if constexpr (!kWideExponents<typename Traits::Element>) return false;
  return c.valid <= kShortChunk && (!Traits::kEndsAtCheckpoints || (c.flags & kLastChunk) != 0);
}

// Where chunks end at checkpoints: how the next one lies in its sequence.
struct ChunkEnd {
  int32_t inside;  // tokens of the sequence's own chunk, one of every 64 tokens, that are before it
  int32_t kept;    // tokens to the next state that is kept, from the chunk's first on; kNoCheckpoint: there is none
};
inline constexpr int32_t kNoCheckpoint = INT32_MAX;

// The producer thread's place in the item list.
struct alignas(16) QueueProducer {
  ChunkDescriptor next;
  int32_t remaining;  // tokens of the item not yet produced; -1: the item is done
  int32_t item;       // item opened last, or to open first; of a list a ticket taken before the plan is there, -1: none
  int32_t items;      // how many there are; of a list which parts of it still have some
  int32_t warmup;     // chunks of the item not yet produced that leave nothing behind
  int32_t opened;     // items so far, also such as had nothing to do where there is no list
  int32_t waits;      // of a list: the last item was taken before the states at cuts that it waits for were there
  ChunkEnd end;
};
static_assert(sizeof(QueueProducer) == 80);

// What the producer warps share: a chunk's descriptor and stages, and what they wait for.
template <typename Traits>
struct WarpRole {
  const KernelArgs& p;
  int thread;  // of those that share the role

  __device__ const ChunkDescriptor& descriptor(uint32_t m) const {
    return reinterpret_cast<const ChunkDescriptor*>(shared_memory() +
                                                    Traits::kSmemDescriptors)[m % Traits::kDescriptorRing];
  }
  __device__ int lane() const { return recompute(thread); }  // of a role of one warp
  __device__ uint32_t stage_k(uint32_t m) const { return Traits::TilesK::tile(m); }
  __device__ uint32_t stage_q(uint32_t m) const { return Traits::TilesQ::tile(m); }
  __device__ uint32_t stage_v(uint32_t m) const { return Traits::TilesV::tile(m); }
  __device__ uint32_t stage_gate(uint32_t m) const { return Traits::Gates::tile(m); }
  __device__ uint32_t stage_input(uint32_t m) const { return Traits::Input::tile(m); }
  __device__ uint32_t tile_a(uint32_t m) const { return Traits::TilesA::tile(m); }
  __device__ uint32_t full_p(uint32_t m) const { return Traits::FullP::barrier(m); }
  __device__ void wait_done(uint32_t m) const { Traits::Done::wait(m); }
  __device__ void wait_gates(uint32_t m) const { Traits::FullGate::wait(m); }
  __device__ void wait_input(uint32_t m) const { Traits::FullInput::wait(m); }
};

}  // namespace flash_qla::cuda::sm90::fwd
