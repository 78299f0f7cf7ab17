// What the roles of a kernel need to know of a chunk, and where the producer of such descriptors stands.
#pragma once

#include <cstdint>

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/trait_queries.h"

namespace flash_qla::cuda::sm90::fwd {

inline constexpr int kFirstChunk = 1;
inline constexpr int kLastChunk = 2;
// Where chunks end where states are kept (ChunkForwardTraits::kEndsWhereKept):
inline constexpr int kKeptChunk = 256;      // the state after it is kept
inline constexpr int kEndsOnGrid = 512;     // set beside kKeptChunk: it ends a whole chunk of its sequence
inline constexpr int kInsideOnGrid = 1024;  // it starts inside of a chunk of its sequence
inline constexpr int kRowsFollow = 16384;   // all 64 rows from its first on are of its tile
// Of a sequence split:
inline constexpr int kSilentChunk = 4;    // nothing of it is stored
inline constexpr int kNoValues = 8;       // V counts as zero
inline constexpr int kFromBoundary = 16;  // slot_in is a boundary state's
inline constexpr int kFromIdentity = 32;
inline constexpr int kToTransition = 64;    // slot_out is a transition's, else (kStateOnly) a boundary state's
inline constexpr int kCountedReader = 128;  // its tile starts from an initial state that is counted in `readers`
// The tile's initial state comes through stages of later chunks (StagedState); two bits more count such tiles.
inline constexpr int kStagedState = 2048;
inline constexpr int kStagedCountShift = 12;

// What the roles need to know of one chunk.
struct alignas(16) ChunkRecord {
  int32_t row;    // first token
  int32_t valid;  // tokens in it, 0 for an empty sequence; -1 after the last chunk
  int32_t flags;  // kFirstChunk, kLastChunk of its tile, and those of a split
  int32_t head;   // value head
  int32_t sequence;
  int16_t half;  // of V: the block's, in a pair of blocks; else 0
  int16_t key_head;
  int32_t chunk;     // counted over all sequences
  int32_t position;  // counted in its sequence
  int64_t slot_in;   // initial and final state slots, -1: none
  int64_t slot_out;
};
static_assert(sizeof(ChunkRecord) == 48);

// By the chunk alone, so that a sequence in parts has the bits of the whole; but where chunks end where states are kept
// one that ends early is no sequence's end.
template <typename Traits>
__device__ __forceinline__ bool has_few_tokens(const ChunkRecord& c) {
  if constexpr (!kWideExponents<typename Traits::Element>) return false;
  return c.valid <= kFewTokens && (!Traits::kEndsWhereKept || (c.flags & kLastChunk) != 0);
}

// Where chunks end where states are kept: how the next one lies in its sequence.
struct ChunkEnd {
  int32_t inside;  // tokens of the sequence's own chunk, one of every 64 tokens, that are before it
  int32_t kept;    // tokens to the next state that is kept, from the chunk's first on; kNeverKept: there is none
};
inline constexpr int32_t kNeverKept = INT32_MAX;

// The producer thread's place in the tile list.
struct alignas(16) ChunkWalker {
  ChunkRecord next;
  int32_t remaining;  // tokens of the tile not yet produced; -1: the tile is done
  int32_t tile;       // tile opened last, or to open first; of a list a ticket taken before the plan is there, -1: none
  int32_t tiles;      // how many there are; of a list which parts of it still have some
  int32_t silent;     // chunks of the tile not yet produced that leave nothing behind
  int32_t opened;     // tiles so far, also such as had nothing to do where there is no list
  union {
    int32_t waits;   // of a list: the last tile was taken before the boundary states that it waits for were there
    int32_t staged;  // else: tiles with kStagedState so far
  };
  ChunkEnd end;
};
static_assert(sizeof(ChunkWalker) == 80);

// Three quarters of the initial state of the tile that starts with chunk m, K by K, come by the copy engine into stages
// that later chunks are lent out of, which are loaded when the state has been read. All are free a step before the tile
// starts: what they will hold is needed a step after that, or later. By single words from memory the same would keep
// the paths of the state groups' loads busy for the time of a step, of all SMs at once where lengths are equal.
template <typename Traits>
struct StagedState {
  static constexpr int kQuarters = 3;
  static constexpr uint32_t kBytesQuarter = kHeadDim * kHeadDim;  // of floats

  uint32_t number;  // of such tiles in the stream, modulo 4
  explicit __device__ StagedState(int32_t flags) : number(static_cast<uint32_t>(flags) >> kStagedCountShift & 3) {}

  // The chunks, ahead of m, whose V and Q, and K, are late.
  static constexpr uint32_t kLateV = 1, kLateQ = 1, kLateK = 3;
  static __device__ uint32_t stage(int quarter, uint32_t m) {
    return quarter == 0   ? smem() + Traits::kSmemV + (m + kLateV) % Traits::kStagesV * Traits::kBytesV
           : quarter == 1 ? smem() + Traits::kSmemK + (m + kLateK) % Traits::kStagesK * Traits::kBytesK
                          : smem() + Traits::kSmemQ + (m + kLateQ) % Traits::kStagesQ * Traits::kBytesK;
  }
  // Two of each: of tiles of a chunk the next one's quarters are under way before this one's are there.
  __device__ uint32_t full() const { return smem() + Traits::kFullState + 8 * (number & 1); }
  __device__ uint32_t free() const { return smem() + Traits::kFreeState + 8 * (number & 1); }
  __device__ uint32_t parity() const { return number >> 1; }
};

}  // namespace flash_qla::cuda::sm90::fwd
