// The items of one sequence and head.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/sm90/context_parallel/cuts.h"

namespace flash_qla::cuda::sm90::cp {

// --- items ---

// How many neighbouring pieces make one item, roughly, where the boundaries between them are decaying or exact.
struct Join {
  int32_t decaying = 1;
  int32_t exact = 1;
};
inline constexpr int32_t kNoCut = 1 << 20;  // as a join: one item

// How many items come of `pieces` of which about `join` are joined.
FLASH_QLA_HOST_DEVICE constexpr int32_t joined_pieces(int32_t pieces, int32_t join) {
  return join >= pieces ? 1 : (pieces + join - 1) / join;
}
// State items of a head that is cut into so many, at exact boundaries: the first segment's end is reached from the
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
  uint32_t exact = 0;  // ... and the next one cannot do without this one's last state
};

// What a round needs of those before it.
struct SegmentCarry {
  int32_t from = 0;        // boundary that the open segment starts at; 0: the sequence's start
  int32_t from_exact = 0;  // whether it is exact
  int32_t exact_run = 0;   // exact boundaries in a row up to it
  int32_t slots = 0;       // exact boundaries so far, of those that stay
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

// One sequence and head, and how it is cut. warmups(number): chunks of warm-up of that boundary, 0: exact.
template <typename Warmups>
struct HeadPlan {
  CutSequence cuts;
  int32_t head;
  CutSpacing cut_spacing;
  int32_t joined_decaying, joined_exact;  // items, were all boundaries of one kind
  int32_t capacity;                       // boundaries
  Warmups warmups;

  FLASH_QLA_HOST_DEVICE HeadPlan(const CutSequence& cuts, int32_t head, const CutSpacing& cut_spacing, const Join& join,
                                 int32_t capacity, const Warmups& warmups)
      : cuts(cuts),
        head(head),
        cut_spacing(cut_spacing),
        joined_decaying(joined_pieces(cuts.pieces, join.decaying)),
        joined_exact(joined_pieces(cuts.pieces, join.exact)),
        capacity(capacity),
        warmups(warmups) {}

  FLASH_QLA_HOST_DEVICE int32_t chunk_at(int32_t i) const { return i >= cuts.pieces ? cuts.chunks : cuts.at(i); }
  FLASH_QLA_HOST_DEVICE int32_t warmup_at(int32_t i) const {
    const int32_t number = cuts.number(i, cut_spacing);
    return number < capacity ? warmups(number) : 0;
  }

  // Whether boundary i, 1 .. pieces, ends a segment, and is exact.
  FLASH_QLA_HOST_DEVICE void classify(int32_t i, bool* ends, bool* exact) const {
    *ends = i == cuts.pieces;
    *exact = false;
    if (i >= cuts.pieces) return;
    const int32_t number = cuts.number(i, cut_spacing);
    if (number >= capacity) return;
    const bool decaying = warmups(number) > 0;
    *ends = boundary_stays(cuts.by_pieces, i, decaying ? joined_decaying : joined_exact);
    *exact = *ends && !decaying;
  }

  // The slot of the first exact boundary; the others' follow it. A head has a slot for each boundary number, and a
  // sequence's boundaries have numbers from its first one's on: its slots are its own, whatever is exact.
  FLASH_QLA_HOST_DEVICE int32_t first_slot() const { return head * capacity + cuts.number(1, cut_spacing); }

  // The items of the segment that ends at bit `lane` of the round, which must be set in `ends`: sink.item(WorkItem) for
  // each, and sink.scan(Scan) where a run of transitions ends.
  template <typename Sink>
  FLASH_QLA_HOST_DEVICE void emit(const SegmentRound& round, const SegmentCarry& carry, int32_t lane,
                                  Sink& sink) const {
    const uint32_t bit = 1u << lane, below = bit - 1;
    const int32_t i = round.base + lane, end = chunk_at(i);
    const bool last = i == cuts.pieces, exact = (round.exact & bit) != 0;
    const uint32_t earlier = round.ends & below;
    const int32_t from = earlier != 0 ? round.base + highest_bit(earlier) : carry.from;
    const bool from_exact = earlier != 0 ? (round.exact >> highest_bit(earlier) & 1) != 0 : carry.from_exact != 0;
    // Slot of this segment's last state; the one that it starts from is the slot before.
    const int32_t slot = exact || from_exact ? first_slot() + carry.slots + bits_set(round.exact & below) : -1;
    const int32_t first = from > 0 ? chunk_at(from) : 0, to_end = last ? kItemToEnd : 0;
    // Offsets out of order may leave a boundary unclassified: whatever is read for it, nothing outside the sequence is.
    const int32_t found = from > 0 && !from_exact ? warmup_at(from) : 0, warmup = found < first ? found : first;
    const int32_t start = first - warmup;
    const int32_t from_flag = from_exact ? kItemFromCutState : start == 0 ? kItemFromStart : 0;
    // What writes O, the state, and the transition: a loop, as the code runs once, and most of the time that it takes
    // is that of fetching it.
    const int32_t items = !exact ? 1 : from_exact ? 3 : 2;
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (int32_t n = 0; n < items; ++n) {
      const bool output = n == 0;
      const int32_t flags = output   ? from_flag | to_end
                            : n == 1 ? (from_flag & kItemFromStart) | kItemToCutState
                                     : kItemToCutState | kItemTransition;
      sink.item(item(start, end, output ? warmup : 0, output ? (from_exact ? slot - 1 : -1) : slot, flags));
    }
    if (exact || !from_exact) return;
    const uint32_t decaying = earlier & ~round.exact;
    const uint32_t since = decaying != 0 ? ~((2u << highest_bit(decaying)) - 1) : ~0u;
    const int32_t run = bits_set(round.exact & below & since) + (decaying != 0 ? 0 : carry.exact_run);
    if (run > 1) sink.scan(Scan{slot - run, run - 1});
  }

  // What the next round needs.
  FLASH_QLA_HOST_DEVICE static void advance(const SegmentRound& round, SegmentCarry* carry) {
    carry->slots += bits_set(round.exact);
    if (round.ends == 0) return;
    const int32_t last = highest_bit(round.ends);
    const uint32_t decaying = round.ends & ~round.exact;
    const uint32_t since = decaying != 0 ? ~((2u << highest_bit(decaying)) - 1) : ~0u;
    carry->exact_run = bits_set(round.exact & since) + (decaying != 0 ? 0 : carry->exact_run);
    carry->from = round.base + last;
    carry->from_exact = round.exact >> last & 1;
  }

  // Of chunks `from` .. `end` - 1.
  FLASH_QLA_HOST_DEVICE WorkItem item(int32_t from, int32_t end, int32_t warmup, int32_t slot, int32_t flags) const {
    const SequenceSpan& sequence = cuts.sequence;
    const int32_t last = end * kChunk < sequence.length ? end * kChunk : sequence.length;
    WorkItem t;
    t.row = sequence.start + from * kChunk;
    t.tokens = last - from * kChunk;
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

// Items are sorted by buckets, lowest first: state items are a list of their own; of the items that write O, those that
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
inline constexpr int32_t kItemLists = 4;
inline constexpr int32_t kItemBuckets = kItemLists * kLengthBuckets;
FLASH_QLA_HOST_DEVICE inline int32_t item_bucket(const WorkItem& t, bool in_place) {
  const bool first = in_place && (t.flags & (kItemFromStart | kItemToEnd)) == kItemFromStart;
  const int32_t list = t.flags & kItemToCutState ? 0 : t.flags & kItemFromCutState ? 3 : first ? 1 : 2;
  return list * kLengthBuckets + length_bucket(chunks_in(t.tokens));
}

}  // namespace flash_qla::cuda::sm90::cp
