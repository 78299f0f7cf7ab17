// Where the tiles of a block come from: its number, tickets, a share that it works out itself, or a plan.
#pragma once

#include <cstdint>

#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

using cp::kTileFromSlot, cp::kTileFromStart, cp::kTileToEnd, cp::kTileTransition, cp::SplitProgress;

// What kernels whose chunks end where states are kept have in shared memory, lest the warp that opens tiles, and the
// state groups at a listed token, wait for memory: of each listed token place and slot, and of each sequence of kSorted
// the slots.
struct ListedToken {
  int32_t token, slot;  // the state after the tokens before `token`; 0: none. kNoSlot: it is not wanted
};
struct FoundSlots {
  int32_t in, out;  // initial_slot(), resolve_slot() of the final states
};
static_assert(sizeof(ListedToken) == 8 && sizeof(FoundSlots) == 8);
template <typename Traits>
__device__ __forceinline__ ListedToken* listed_tokens() {
  return reinterpret_cast<ListedToken*>(shared_memory() + Traits::kSmemListed);
}
template <typename Traits>
__device__ __forceinline__ FoundSlots* found_slots() {
  return reinterpret_cast<FoundSlots*>(shared_memory() + Traits::kSmemSlots);
}
__device__ __forceinline__ ListedToken read_listed(const ChunkForwardArgs& args, int32_t i) {
  const int64_t token =
      load_index<true>(args.listed_offsets, args.listed_offsets_are_64_bit, i * args.listed_offsets_stride);
  const int64_t slot = load_index<true>(args.listed_slots, args.listed_slots_are_64_bit, i * args.listed_slots_stride);
  return {token > 0 && token <= args.num_tokens ? static_cast<int32_t>(token) : 0,
          static_cast<int32_t>(usable_slot(args.final_state, slot))};
}
__device__ __forceinline__ FoundSlots read_slots(const ChunkForwardArgs& args, int32_t sequence) {
  return {static_cast<int32_t>(initial_slot<true>(args, sequence)),
          static_cast<int32_t>(resolve_slot<true>(args.final_state, sequence))};
}
// By one warp.
template <typename Traits>
__device__ __forceinline__ void fetch_listed_and_slots(const ChunkForwardKernelParams& p, int lane) {
  const ChunkForwardArgs& args = p.args;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) listed_tokens<Traits>()[i] = read_listed(args, i);
  if (p.order == BlockOrder::kSorted && lane < args.num_sequences) found_slots<Traits>()[lane] = read_slots(args, lane);
  __syncwarp();
}
// Whether they are still what fetch_listed_and_slots() has found.
template <typename Traits>
__device__ __forceinline__ bool listed_and_slots_stay(const ChunkForwardKernelParams& p, int lane) {
  const ChunkForwardArgs& args = p.args;
  bool same = true;
#pragma unroll 1
  for (int32_t i = lane; i < args.num_listed; i += 32) {
    const ListedToken now = read_listed(args, i), then = listed_tokens<Traits>()[i];
    same &= now.token == then.token && now.slot == then.slot;
  }
  if (p.order == BlockOrder::kSorted && lane < args.num_sequences) {
    const FoundSlots now = read_slots(args, lane), then = found_slots<Traits>()[lane];
    same &= now.in == then.in && now.out == then.out;
  }
  return __all_sync(0xffffffffu, same);
}

template <typename Traits>
__device__ __forceinline__ int64_t final_slot_of(const ChunkForwardKernelParams& p, int32_t sequence) {
  if constexpr (Traits::kEndsWhereKept) {
    if (p.order == BlockOrder::kSorted) return found_slots<Traits>()[sequence].out;
  }
  return resolve_slot(p.args.final_state, sequence);
}
template <typename Traits>
__device__ __forceinline__ int64_t initial_slot_of(const ChunkForwardKernelParams& p, int32_t sequence) {
  if constexpr (Traits::kEndsWhereKept) {
    if (p.order == BlockOrder::kSorted) return found_slots<Traits>()[sequence].in;
  }
  return initial_slot(p.args, sequence);
}

// Whether blocks may sort their sequences by themselves.
template <typename Traits>
inline constexpr bool kMaySort = Traits::kBlocks == 1 && !Traits::kStateOnly;

// Of up to kMostSorted sequences, one to a lane, the lane's place: longest first, by chunks, equal ones in their order.
__device__ __forceinline__ int32_t sorted_rank(const PlannedSequence& s, int32_t sequences, int lane) {
  const int32_t chunks = (s.length + kChunk - 1) / kChunk;
  int32_t rank = 0;
#pragma unroll 1
  for (int32_t i = 0; i < sequences; ++i) {
    const int32_t other = __shfl_sync(0xffffffffu, chunks, i);
    rank += other > chunks || (other == chunks && i < lane);
  }
  return rank;
}

// The sequences that the block has found itself: kSorted: all, in their order; kOneTile: that of its tile.
template <typename Traits>
__device__ __forceinline__ PlannedSequence* found_sequences() {
  return reinterpret_cast<PlannedSequence*>(shared_memory() + Traits::kSmemSequences);
}
template <typename Traits>
__device__ __forceinline__ PlannedSequence sequence_of_rank(const ChunkForwardKernelParams& p, int32_t rank) {
  if constexpr (kMaySort<Traits>) {
    if (p.order != BlockOrder::kGiven) return found_sequences<Traits>()[p.order == BlockOrder::kSorted ? rank : 0];
  }
  return p.plan != nullptr ? p.plan[rank] : sequence_at(p.args, rank);
}

// The tiles of a block that deals, after its first.
struct DealtTiles {
  int32_t count;
  uint16_t tiles[kMostDealt];
};
static_assert(sizeof(DealtTiles) == 4 + 2 * kMostDealt);
template <typename Traits>
__device__ __forceinline__ DealtTiles& dealt_tiles() {
  return *reinterpret_cast<DealtTiles*>(shared_memory() + Traits::kSmemDealt);
}

// Not inlined: in fp16 with eight auxiliary warps of the same code (aux_role.cuh) a register would be spilled.
static __device__ __noinline__ int32_t take_ticket(uint32_t* ticket) {
  return static_cast<int32_t>(atomicAdd(ticket, 1u));
}

// Which tile a block takes after `tile`, of which it has opened `opened` after its first. A ticket is taken when its
// tile is opened, not before: a block would hold a tile back that others have time for.
template <typename Traits>
__device__ __forceinline__ int32_t next_tile(const ChunkForwardKernelParams& p, int32_t tile, int32_t opened,
                                             int32_t streams) {
  if (p.ticket != nullptr) return streams + take_ticket(p.ticket);
  if constexpr (kMaySort<Traits>) {
    if (p.order == BlockOrder::kSorted) {
      const DealtTiles& dealt = dealt_tiles<Traits>();
      return opened < dealt.count ? dealt.tiles[opened] : p.tiles;
    }
  }
  return tile + streams;
}

// What a tile of a sequence takes, in chunks: its first and last state take about as long as two. Sums of kMostDealt,
// and five bits beside them, fit 32 bits; longer sequences than this are dealt as if they were as long.
__device__ __forceinline__ uint32_t tile_cost(const PlannedSequence& s) {
  return static_cast<uint32_t>(min((s.length + kChunk - 1) / kChunk, 1 << 19)) + 2;
}

// Deals the tiles of sorted sequences by one warp, the same in every block: each to the block that has least to do so
// far, longest first, as tickets would do it; they need a kernel before this one. Blocks that have as much to do are a
// group, whose first, number, load and tiles a lane keeps: in the beginning those of a sequence, and a sequence's end
// splits one.
template <typename Traits>
__device__ __forceinline__ void deal_tiles(const ChunkForwardKernelParams& p, int lane) {
  const PlannedSequence* sequences = found_sequences<Traits>();
  DealtTiles& dealt = dealt_tiles<Traits>();
  const int32_t heads = p.args.num_value_heads, streams = static_cast<int32_t>(gridDim.x);
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  int32_t begin = lane * heads, blocks = 0, tiles = 0, count = 0;
  uint32_t load = 0;
  if (lane < p.args.num_sequences) {
    blocks = min(max(streams - begin, 0), heads);
    load = tile_cost(sequences[lane]);
  }
#pragma unroll 1
  for (int32_t tile = streams; tile < p.tiles;) {
    const int32_t rank = tile / heads, end = min((rank + 1) * heads, p.tiles);
    const uint32_t cost = tile_cost(sequences[rank]);
#pragma unroll 1
    while (tile < end) {
      const uint32_t place = blocks > 0 && tiles < kMostDealt ? load << 5 | static_cast<uint32_t>(lane) : ~0u;
      const int least = static_cast<int>(__reduce_min_sync(0xffffffffu, place) & 31);
      const int32_t first = __shfl_sync(0xffffffffu, begin, least), have = __shfl_sync(0xffffffffu, blocks, least);
      const int32_t taken = min(have, end - tile);
      if (block >= first && block < first + taken) {
        if (lane == 0) dealt.tiles[count] = static_cast<uint16_t>(tile + block - first);
        ++count;
      }
      if (taken < have) {
        const int rest = __ffs(__ballot_sync(0xffffffffu, blocks == 0)) - 1;
        const uint32_t their_load = __shfl_sync(0xffffffffu, load, least);
        const int32_t their_tiles = __shfl_sync(0xffffffffu, tiles, least);
        if (lane == rest) begin = first + taken, blocks = have - taken, load = their_load, tiles = their_tiles;
        if (lane == least) blocks = taken;
      }
      if (lane == least) load += cost, ++tiles;
      tile += taken;
    }
  }
  if (lane == 0) dealt.count = count;
}

// Before a block's first tile. The plan must be there.
template <typename Traits>
__device__ __forceinline__ void open_list(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  walker.remaining = -1;
  walker.opened = walker.waits = 0;
  if (p.list != nullptr) {
    walker.tile = -1;
    walker.tiles = Traits::kStateOnly ? 1 : 3;  // see take_listed_tile()
  } else {
    walker.tile = static_cast<int32_t>(blockIdx.x) / Traits::kBlocks;
    walker.tiles = p.cut != nullptr && *p.cut != 0 ? 0 : p.tiles;
  }
}

// The next tile of a split's list, or -1 after the last. walker.tiles: which of its two parts are not given out, 1
// and 2.
template <typename Traits>
__device__ __forceinline__ int32_t take_listed_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  // By ticket from the first on, and none in advance: blocks start when others leave them room, and tiles are few.
  if constexpr (Traits::kStateOnly || (Traits::kSave && !Traits::kEndsWhereKept)) {
    // In the order of the list (with kSave there are no registers left to ask what is ready). Its size is read beside
    // the ticket: one latency, not two.
    const int32_t tiles = p.sizes->tiles + p.sizes->dependent_tiles;
    int32_t tile = walker.tile;
    walker.tile = -1;
    if (tile < 0) tile = static_cast<int32_t>(atomicAdd(&p.tickets->ticket, 1u));
    if (tile < tiles) return tile;
    walker.tiles = 0;
  } else {
    if (walker.tile >= 0) {
      const int32_t tile = walker.tile;
      walker.tile = -1;
      if (tile < p.sizes->tiles) return tile;
      walker.tiles = 2;
    }
    while (walker.tiles != 0) {
      // Whether the boundary states are there is asked for the order alone: who reads them waits for them.
      const SplitProgress& progress = p.counters->progress;
      const bool there = load_now(&progress.states_left) + load_now(&progress.pieces_left) == 0;
      const uint32_t tiles = load_now(&p.sizes->tiles), dependent_tiles = load_now(&p.sizes->dependent_tiles);
      const bool dependent =
          walker.tiles == 2 || (walker.tiles == 3 && there &&
                                (p.readers == nullptr || load_now(&p.tickets->ticket) >= progress.first_tiles));
      // Tiles are taken chunks ahead of their time. A block that waits leaves the other tiles that do to blocks that
      // are still to come: where there are as many blocks as such tiles, none is left over.
      if (walker.waits != 0 && !there && dependent_tiles <= gridDim.x) {
        walker.tiles = 0;
        break;
      }
      walker.waits = dependent && !there;
      const uint32_t tile = atomicAdd(&p.tickets->ticket + (dependent ? 1 : 0), 1u);
      if (tile < (dependent ? dependent_tiles : tiles)) return static_cast<int32_t>(dependent ? tile + tiles : tile);
      walker.tiles &= dependent ? ~2 : ~1;
    }
  }
  return -1;
}

// Opens a tile of a sequence split.
template <typename Traits>
__device__ __forceinline__ void open_listed_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  const ChunkForwardArgs& args = p.args;
  while (walker.tiles != 0) {
    const int32_t tile = take_listed_tile<Traits>(p, walker);
    if (tile < 0) return;
    // By parts, not as a copy: registers are short where this is called.
    const Tile& t = p.list[tile];
    ChunkRecord& r = walker.next;
    r.row = t.row;
    r.sequence = t.sequence;
    r.half = 0;
    r.chunk = t.chunk;
    r.position = t.position;
    r.head = t.head;
    r.key_head = static_cast<int16_t>(r.head / (args.num_value_heads / args.num_key_heads));
    r.slot_in = kNoSlot;
    r.slot_out = -1;
    r.flags = kFirstChunk;
    const int64_t initial = initial_slot(args, r.sequence);
    if (initial == kSkipSequence) continue;
    if (t.flags & kTileFromStart) {
      if (p.readers != nullptr) r.flags |= kCountedReader;
      r.slot_in = initial;
      if (r.slot_in >= 0) {
        l2_prefetch(state_matrix(args.initial, r.slot_in, r.head),
                    kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
      }
    }
    if constexpr (Traits::kStateOnly) {
      r.slot_out = t.slot;
      if (t.flags & kTileTransition) r.flags |= kFromIdentity | kNoValues | kToTransition;
    } else {
      if (t.flags & kTileToEnd) r.slot_out = resolve_slot(args.final_state, r.sequence);
      if (t.tokens <= 0 && r.slot_out < 0) continue;
      if (t.flags & kTileFromSlot) {
        r.slot_in = t.slot;
        r.flags |= kFromBoundary;
      }
    }
    walker.remaining = t.tokens;
    walker.silent = t.warmup;
    if (Traits::kStateOnly && walker.opened == 0) atomicAdd(&p.counters->blocks_running, 1u);
    ++walker.opened;
    return;
  }
}

}  // namespace flash_qla::cuda::sm90::fwd
