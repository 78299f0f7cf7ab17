// The segments of sequences, their items, and where each item goes in its list. A head is of one kind in all of a
// sequence, decaying or exact, so that heads of a kind are cut alike and a place is known without sorting or counting
// items: sequence by sequence, of each segment by segment, of each segment head by head.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/sm90/context_parallel/cuts.h"

namespace flash_qla::cuda::sm90::cp {

// A head is exact if two boundaries in a row of so many are, or the only one of its sequence: fewer are joined away
// (HeadItems::emit()), as long as segments are not many times longer than they were to be.
inline constexpr int32_t kBoundariesInRow = 8;
FLASH_QLA_HOST_DEVICE constexpr int32_t boundaries_of_exact_head(int32_t pieces) { return pieces > 2 ? 2 : 1; }

// How many neighbouring pieces make one segment, roughly, of heads of either kind.
struct Join {
  int32_t decaying = 1;
  int32_t exact = 1;
};
inline constexpr int32_t kNoCut = 1 << 20;  // as a join: one segment

// How many segments come of `pieces` of which about `join` are joined.
FLASH_QLA_HOST_DEVICE constexpr int32_t joined_pieces(int32_t pieces, int32_t join) {
  return join >= pieces ? 1 : (pieces + join - 1) / join;
}
// State items of an exact head that is cut into so many segments: the first one's end is reached from the start; of
// those after it but the last a state and a transition each.
FLASH_QLA_HOST_DEVICE constexpr int32_t states_of_pieces(int32_t pieces) { return pieces == 1 ? 0 : 2 * pieces - 3; }

// How the heads of one kind of a sequence are cut.
struct Segmentation {
  int32_t count;   // segments
  int32_t pieces;  // that make them up
  int32_t least;   // pieces of each segment, or one more
  int32_t large;   // segments of the larger size; all where there is one size, or sizes do not count
  Divisor by_count;

  // Pieces joined as evenly as may be.
  FLASH_QLA_HOST_DEVICE Segmentation(int32_t pieces, int32_t join, bool in_order)
      : count(joined_pieces(pieces, join)), pieces(pieces), by_count(count) {
    least = by_count.divide(pieces);
    large = in_order || pieces == least * count ? count : pieces - least * count;
  }

  // The piece that segment k starts with; of `count` the number of pieces.
  FLASH_QLA_HOST_DEVICE int32_t first_piece(int32_t k) const {
    return k * least + by_count.divide(k * (pieces - least * count) + count - 1);
  }
  // ... and the chunk.
  FLASH_QLA_HOST_DEVICE int32_t start(const CutSequence& cuts, int32_t k) const { return cuts.at(first_piece(k)); }
  // The place of segment k when large ones come first. The first one is large, the last one comes last.
  FLASH_QLA_HOST_DEVICE int32_t order(int32_t k) const {
    if (large == count) return k;
    const int32_t from = first_piece(k), large_before = from - k * least;
    return first_piece(k + 1) - from > least ? large_before : large + k - large_before;
  }
};

// How all heads of a batch are cut.
struct CutChoice {
  Join join;
  bool in_order = false;  // items of a head go to their list by their numbers, not by their sizes

  FLASH_QLA_HOST_DEVICE Segmentation segments(const CutSequence& cuts, bool is_exact) const {
    return Segmentation(cuts.pieces, is_exact ? join.exact : join.decaying, in_order);
  }
};

// Numbers of items of some sequences.
struct ItemCounts {
  static constexpr int kNumbers = 9;
  // The items that write O and depend on nothing, in groups: first segments of exact heads and of decaying ones, whole
  // sequences that are too short to be cut, later segments of decaying heads, large and small ones.
  enum Group : int32_t { kFirstExact, kFirst, kWhole, kLarge, kSmall, kGroups };
  int32_t free[kGroups];
  int32_t dependent;  // later segments of exact heads
  int32_t states, scans;
  int32_t may_cut;  // sequences that are not too short

  ItemCounts() = default;
  // Of one sequence, with so many heads of either kind.
  FLASH_QLA_HOST_DEVICE ItemCounts(const CutSequence& cuts, const CutChoice& choice, int32_t decaying, int32_t exact) {
    const Segmentation of_decaying = choice.segments(cuts, false), of_exact = choice.segments(cuts, true);
    may_cut = cuts.pieces > 1 ? 1 : 0;
    free[kFirstExact] = exact;
    free[kFirst] = may_cut * decaying;
    free[kWhole] = decaying - free[kFirst];
    free[kLarge] = decaying * (of_decaying.large - 1);
    free[kSmall] = decaying * (of_decaying.count - of_decaying.large);
    dependent = exact * (of_exact.count - 1);
    states = exact * states_of_pieces(of_exact.count);
    scans = of_exact.count > 2 ? exact : 0;
  }
  FLASH_QLA_HOST_DEVICE explicit ItemCounts(const int32_t (&x)[kNumbers])
      : free{x[0], x[1], x[2], x[3], x[4]}, dependent(x[5]), states(x[6]), scans(x[7]), may_cut(x[8]) {}
  FLASH_QLA_HOST_DEVICE void store(int32_t (&x)[kNumbers]) const {
    for (int32_t i = 0; i < kGroups; ++i) x[i] = free[i];
    x[5] = dependent, x[6] = states, x[7] = scans, x[8] = may_cut;
  }
  FLASH_QLA_HOST_DEVICE ItemCounts& operator+=(const ItemCounts& other) {
    for (int32_t i = 0; i < kGroups; ++i) free[i] += other.free[i];
    dependent += other.dependent, states += other.states, scans += other.scans, may_cut += other.may_cut;
    return *this;
  }
  FLASH_QLA_HOST_DEVICE int32_t independent() const {
    int32_t sum = 0;
    for (const int32_t count : free) sum += count;
    return sum;
  }
};

// Sequences of a batch of up to so many, a thread of the listing kernel each, come in lists in this order, larger ones
// first: those that may be cut by the lengths of their decaying
// heads' segments, then the others by their own.
inline constexpr int32_t kMostOrdered = 512;
FLASH_QLA_HOST_DEVICE inline int32_t length_of_items(const CutSequence& cuts, const CutChoice& choice) {
  constexpr int32_t kMostChunks = 1 << 26;
  return cuts.pieces > 1 ? kMostChunks + choice.segments(cuts, false).start(cuts, 1) : cuts.chunks;
}

// One sequence of a batch: where it may be cut, and how many items those before it have.
struct PlannedSequence {
  CutSequence cuts;
  int32_t decaying, exact;  // of its value heads; the others' states are carried (carry.h)
  ItemCounts before;
};

// Items that write O of carried heads (carry.h), whose states at cuts are there: first segments, and later ones of so
// many chunks at most.
struct CarriedItems {
  int32_t first, later, longest;
};

// Where the groups of the items that write O begin in their list.
struct OutputOrder {
  int32_t free[ItemCounts::kGroups];
  int32_t carried;  // later segments of carried heads
  int32_t dependent;

  // all: counts of all sequences. Groups go by the lengths of their longest items. longest: the first of the sequences
  // in their order; longest_whole: the first that is too short to be cut, if there is one. First segments of
  // carried heads come before all others, their later ones too if they are the longest and no other states are to come
  // (who reads a state waits for all of them), else after them. in_place:
  // final states overwrite initial ones, so that who reads one must be given out before who overwrites it: first
  // segments first, then a head's others in their order (CutChoice::in_order).
  FLASH_QLA_HOST_DEVICE OutputOrder(const ItemCounts& all, const CutSequence& longest, const CutSequence& longest_whole,
                                    const CutChoice& choice, bool in_place, const CarriedItems& carried_items) {
    const Segmentation decaying = choice.segments(longest, false), exact = choice.segments(longest, true);
    const int32_t first = decaying.start(longest, 1), small = decaying.least * longest.piece + kUsualWarmup;
    const int32_t whole = longest_whole.chunks;
    const int32_t lengths[] = {exact.start(longest, 1), first, whole, first + kUsualWarmup, small};
    bool are_longest = !in_place && all.states == 0;
    FLASH_QLA_UNROLL
    for (int32_t group = 0; group < ItemCounts::kGroups; ++group) {
      are_longest = are_longest && (all.free[group] == 0 || carried_items.longest > lengths[group]);
    }
    const int32_t before_others = carried_items.first + (are_longest ? carried_items.later : 0);
    FLASH_QLA_UNROLL
    for (int32_t group = 0; group < ItemCounts::kGroups; ++group) {
      free[group] = before_others;
      FLASH_QLA_UNROLL
      for (int32_t other = 0; other < ItemCounts::kGroups; ++other) {
        const bool before =
            in_place || lengths[other] == lengths[group] ? other < group : lengths[other] > lengths[group];
        if (before) free[group] += all.free[other];
      }
    }
    carried = carried_items.first + (are_longest ? 0 : all.independent());
    dependent = carried_items.first + carried_items.later + all.independent();
  }
  // free[group], of a group that the compiler does not know: by comparisons, so that it stays in registers.
  FLASH_QLA_HOST_DEVICE int32_t start(int32_t group) const {
    int32_t found = 0;
    FLASH_QLA_UNROLL
    for (int32_t i = 0; i < ItemCounts::kGroups; ++i) found = i == group ? free[i] : found;
    return found;
  }
};

// Of chunks `from` .. `end` - 1 of a sequence.
FLASH_QLA_HOST_DEVICE inline WorkItem work_item(const SequenceSpan& sequence, int32_t head, int32_t from, int32_t end,
                                                int32_t warmup, int32_t slot, int32_t flags) {
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

// One head of a sequence.
struct HeadItems {
  const PlannedSequence& sequence;
  const OutputOrder& order;
  Segmentation segments;
  int32_t head;
  bool is_exact;
  int32_t rank, alike;  // its number among the sequence's heads of its kind, and how many these are
  // The slot of its first state at a cut; the others' follow it. A head has a slot for each boundary number, and a
  // sequence's boundaries have numbers from its first one's on: its slots are its own, whatever is exact.
  int32_t first_slot;

  // capacity: of boundaries.
  FLASH_QLA_HOST_DEVICE HeadItems(const PlannedSequence& sequence, const OutputOrder& order, const CutChoice& choice,
                                  int32_t head, bool is_exact, int32_t rank, int32_t capacity,
                                  const CutSpacing& cut_spacing)
      : sequence(sequence),
        order(order),
        segments(choice.segments(sequence.cuts, is_exact)),
        head(head),
        is_exact(is_exact),
        rank(rank),
        alike(is_exact ? sequence.exact : sequence.decaying),
        first_slot(is_exact ? head * capacity + sequence.cuts.number(1, cut_spacing) : 0) {}

  // The items of segment k: to sink.state(), sink.output() and sink.scan(), each with its place. warmups(number): of
  // that boundary, of a decaying head.
  template <typename Warmups, typename Sink>
  FLASH_QLA_HOST_DEVICE void emit(int32_t k, const CutSpacing& cut_spacing, const Warmups& warmups,
                                  const Sink& sink) const {
    const CutSequence& cuts = sequence.cuts;
    const ItemCounts& before = sequence.before;
    const bool waits = is_exact && k > 0;
    const int32_t first = segments.start(cuts, k), place = segments.order(k);
    // Offsets out of order may leave a boundary unclassified: whatever is read for it, nothing outside the sequence is.
    const auto warmup_of = [&](int32_t segment) {
      const int32_t at = segments.start(cuts, segment);
      const int32_t found = warmups(cut_spacing.windows.divide(cuts.sequence.start / kChunk + at));
      return found < at ? found : at;
    };
    // A boundary at which a decaying head is exact all the same starts no segment: what comes after it belongs to the
    // segment before, and its item has no tokens.
    int32_t next = k + 1;
    while (!is_exact && next < segments.count && warmup_of(next) == 0) ++next;
    const int32_t warmup = !is_exact && k > 0 ? warmup_of(k) : 0;
    const bool is_joined = !is_exact && k > 0 && warmup == 0, last = next == segments.count;
    const int32_t start = first - warmup, end = is_joined ? first : segments.start(cuts, next);
    if (is_exact && !last) {
      const int32_t at = before.states + (k == 0 ? rank : (2 * place - 1) * alike + 2 * rank);
      sink.state(at, item(first, end, 0, first_slot + k, kItemToCutState | (k == 0 ? kItemFromStart : 0)));
      if (k > 0) sink.state(at + 1, item(first, end, 0, first_slot + k, kItemToCutState | kItemTransition));
    }
    int32_t flags = (waits ? kItemFromCutState : start == 0 ? kItemFromStart : 0) | (last ? kItemToEnd : 0);
    if (is_joined) flags = 0;
    const WorkItem output = item(start, end, warmup, waits ? first_slot + k - 1 : -1, flags);
    if (waits) {
      sink.output(order.dependent + before.dependent + (place - 1) * alike + rank, output);
    } else {
      const bool is_large = place < segments.large;
      const int32_t group = is_exact           ? ItemCounts::kFirstExact
                            : cuts.pieces == 1 ? ItemCounts::kWhole
                            : k == 0           ? ItemCounts::kFirst
                            : is_large         ? ItemCounts::kLarge
                                               : ItemCounts::kSmall;
      const int32_t in_group = k == 0 ? 0 : is_large ? place - 1 : place - segments.large;
      sink.output(order.start(group) + before.free[group] + in_group * alike + rank, output);
    }
    if (is_exact && last && segments.count > 2) {
      sink.scan(before.scans + rank, Scan{first_slot, segments.count - 2});
    }
  }

  FLASH_QLA_HOST_DEVICE WorkItem item(int32_t from, int32_t end, int32_t warmup, int32_t slot, int32_t flags) const {
    return work_item(sequence.cuts.sequence, head, from, end, warmup, slot, flags);
  }
};

}  // namespace flash_qla::cuda::sm90::cp
