// The tiles of one sequence and head.
#pragma once

#include <cstdint>

#include "cuda/sm90/common/host_device.h"
#include "cuda/sm90/context_parallel/cuts.h"

namespace flash_qla::cuda::sm90::cp {

// --- tiles ---

// How many neighbouring pieces make one tile, roughly, where the boundaries between them are light or heavy.
struct SplitMerge {
  int32_t light = 1;
  int32_t heavy = 1;
};
inline constexpr int32_t kNoCut = 1 << 20;  // as a merge: one tile

// How many tiles come of `pieces` of which about `merge` are joined.
FLASH_QLA_HOST_DEVICE constexpr int32_t joined_pieces(int32_t pieces, int32_t merge) {
  return merge >= pieces ? 1 : (pieces + merge - 1) / merge;
}
// State tiles of a head that is cut into so many, at heavy boundaries: the first segment's end is reached from the
// start; of those after it but the last a state and a transition each.
FLASH_QLA_HOST_DEVICE constexpr int32_t states_of_pieces(int32_t pieces) { return pieces == 1 ? 0 : 2 * pieces - 3; }
// Whether boundary i stays when pieces are joined to so many, as evenly as may be.
FLASH_QLA_HOST_DEVICE inline bool boundary_stays(const Divisor& by_pieces, int32_t i, int32_t joined) {
  return by_pieces.divide(joined * i) != by_pieces.divide(joined * (i - 1));
}

// The segments of one sequence and head, which end at the boundaries that stay and at the sequence's end, are worked
// out in rounds of 32 boundaries: on the device a lane looks at one, on the host a loop does. Bit j of a round's masks
// is boundary base + j; the end counts as boundary `pieces`.
struct SegmentRound {
  int32_t base = 1;
  uint32_t ends = 0;   // segments end there
  uint32_t heavy = 0;  // ... and the next one cannot do without this one's last state
};

// What a round needs of those before it.
struct SegmentCarry {
  int32_t from = 0;        // boundary that the open segment starts at; 0: the sequence's start
  int32_t from_heavy = 0;  // whether it is heavy
  int32_t heavy_run = 0;   // heavy boundaries in a row up to it
  int32_t slots = 0;       // heavy boundaries so far, of those that stay
};

FLASH_QLA_HOST_DEVICE inline int32_t bits_set(uint32_t x) {
#ifdef __CUDA_ARCH__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}
// Of a number that is not zero.
FLASH_QLA_HOST_DEVICE inline int32_t highest_bit(uint32_t x) {
#ifdef __CUDA_ARCH__
  return 31 - __clz(static_cast<int>(x));
#else
  return 31 - __builtin_clz(x);
#endif
}

// One sequence and head, and how it is cut. warmups(number): chunks of warm-up of that boundary, 0: heavy.
template <typename Warmups>
struct HeadPlan {
  CutSequence cuts;
  int32_t head;
  SplitGrid grid;
  int32_t joined_light, joined_heavy;  // tiles, were all boundaries of one kind
  int32_t capacity;                    // boundaries
  Warmups warmups;

  FLASH_QLA_HOST_DEVICE HeadPlan(const CutSequence& cuts, int32_t head, const SplitGrid& grid, const SplitMerge& merge,
                                 int32_t capacity, const Warmups& warmups)
      : cuts(cuts),
        head(head),
        grid(grid),
        joined_light(joined_pieces(cuts.pieces, merge.light)),
        joined_heavy(joined_pieces(cuts.pieces, merge.heavy)),
        capacity(capacity),
        warmups(warmups) {}

  FLASH_QLA_HOST_DEVICE int32_t chunk_at(int32_t i) const { return i >= cuts.pieces ? cuts.chunks : cuts.at(i); }
  FLASH_QLA_HOST_DEVICE int32_t warmup_at(int32_t i) const {
    const int32_t number = cuts.number(i, grid);
    return number < capacity ? warmups(number) : 0;
  }

  // Whether boundary i, 1 .. pieces, ends a segment, and is heavy.
  FLASH_QLA_HOST_DEVICE void classify(int32_t i, bool* ends, bool* heavy) const {
    *ends = i == cuts.pieces;
    *heavy = false;
    if (i >= cuts.pieces) return;
    const int32_t number = cuts.number(i, grid);
    if (number >= capacity) return;
    const bool light = warmups(number) > 0;
    *ends = boundary_stays(cuts.by_pieces, i, light ? joined_light : joined_heavy);
    *heavy = *ends && !light;
  }

  // The slot of the first heavy boundary; the others' follow it. A head has a slot for each boundary number, and a
  // sequence's boundaries have numbers from its first one's on: its slots are its own, whatever is heavy.
  FLASH_QLA_HOST_DEVICE int32_t first_slot() const { return head * capacity + cuts.number(1, grid); }

  // The tiles of the segment that ends at bit `lane` of the round, which must be set in `ends`: sink.tile(Tile) for
  // each, and sink.chain(TransitionChain) where a run of transitions ends.
  template <typename Sink>
  FLASH_QLA_HOST_DEVICE void emit(const SegmentRound& round, const SegmentCarry& carry, int32_t lane,
                                  Sink& sink) const {
    const uint32_t bit = 1u << lane, below = bit - 1;
    const int32_t i = round.base + lane, end = chunk_at(i);
    const bool last = i == cuts.pieces, heavy = (round.heavy & bit) != 0;
    const uint32_t earlier = round.ends & below;
    const int32_t from = earlier != 0 ? round.base + highest_bit(earlier) : carry.from;
    const bool from_heavy = earlier != 0 ? (round.heavy >> highest_bit(earlier) & 1) != 0 : carry.from_heavy != 0;
    // Slot of this segment's last state; the one that it starts from is the slot before.
    const int32_t slot = heavy || from_heavy ? first_slot() + carry.slots + bits_set(round.heavy & below) : -1;
    const int32_t first = from > 0 ? chunk_at(from) : 0, to_end = last ? kTileToEnd : 0;
    // Offsets out of order may leave a boundary unclassified: whatever is read for it, nothing outside the sequence is.
    const int32_t found = from > 0 && !from_heavy ? warmup_at(from) : 0, warmup = found < first ? found : first;
    const int32_t start = first - warmup;
    const int32_t from_flag = from_heavy ? kTileFromSlot : start == 0 ? kTileFromStart : 0;
    // What writes O, the state, and the transition: a loop, as the code runs once, and most of the time that it takes
    // is that of fetching it.
    const int32_t tiles = !heavy ? 1 : from_heavy ? 3 : 2;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int32_t n = 0; n < tiles; ++n) {
      const bool output = n == 0;
      const int32_t flags = output   ? from_flag | to_end
                            : n == 1 ? (from_flag & kTileFromStart) | kTileToSlot
                                     : kTileToSlot | kTileTransition;
      sink.tile(tile(start, end, output ? warmup : 0, output ? (from_heavy ? slot - 1 : -1) : slot, flags));
    }
    if (heavy || !from_heavy) return;
    const uint32_t light = earlier & ~round.heavy;
    const uint32_t since = light != 0 ? ~((2u << highest_bit(light)) - 1) : ~0u;
    const int32_t run = bits_set(round.heavy & below & since) + (light != 0 ? 0 : carry.heavy_run);
    if (run > 1) sink.chain(TransitionChain{slot - run, run - 1});
  }

  // What the next round needs.
  FLASH_QLA_HOST_DEVICE static void advance(const SegmentRound& round, SegmentCarry* carry) {
    carry->slots += bits_set(round.heavy);
    if (round.ends == 0) return;
    const int32_t last = highest_bit(round.ends);
    const uint32_t light = round.ends & ~round.heavy;
    const uint32_t since = light != 0 ? ~((2u << highest_bit(light)) - 1) : ~0u;
    carry->heavy_run = bits_set(round.heavy & since) + (light != 0 ? 0 : carry->heavy_run);
    carry->from = round.base + last;
    carry->from_heavy = round.heavy >> last & 1;
  }

  // Of chunks `from` .. `end` - 1.
  FLASH_QLA_HOST_DEVICE Tile tile(int32_t from, int32_t end, int32_t warmup, int32_t slot, int32_t flags) const {
    const PlannedSequence& sequence = cuts.sequence;
    const int32_t last = end * kSplitChunk < sequence.length ? end * kSplitChunk : sequence.length;
    Tile t;
    t.row = sequence.start + from * kSplitChunk;
    t.tokens = last - from * kSplitChunk;
    t.sequence = sequence.index;
    t.chunk = sequence.first_chunk + from;
    t.position = from;
    t.slot = slot;
    t.head = static_cast<int16_t>(head);
    t.warmup = static_cast<int16_t>(warmup);
    t.flags = flags;
    return t;
  }
};

// --- order ---

// Tiles are sorted by buckets, lowest first: state tiles are a list of their own; of the tiles that write O, those that
// go first because a final state will overwrite the initial one that they read (`in_place`), free and dependent ones;
// within each the longest first.
inline constexpr int32_t kLengthBuckets = 128;  // of chunk counts: exact below 8, then eight to each doubling
FLASH_QLA_HOST_DEVICE inline int32_t length_bucket(int32_t chunks) {
  int32_t bucket = chunks;
  if (chunks >= 8) {
    const int32_t magnitude = highest_bit(static_cast<uint32_t>(chunks));
    bucket = 8 * (magnitude - 2) + ((chunks >> (magnitude - 3)) & 7);
  }
  return bucket < kLengthBuckets ? kLengthBuckets - 1 - bucket : 0;
}
inline constexpr int32_t kTileLists = 4;
inline constexpr int32_t kTileBuckets = kTileLists * kLengthBuckets;
FLASH_QLA_HOST_DEVICE inline int32_t tile_bucket(const Tile& t, bool in_place) {
  const bool first = in_place && (t.flags & (kTileFromStart | kTileToEnd)) == kTileFromStart;
  const int32_t list = t.flags & kTileToSlot ? 0 : t.flags & kTileFromSlot ? 3 : first ? 1 : 2;
  return list * kLengthBuckets + length_bucket(chunks_in(t.tokens));
}

}  // namespace flash_qla::cuda::sm90::cp
