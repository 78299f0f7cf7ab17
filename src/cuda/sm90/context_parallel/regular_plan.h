// The items of an regular plan of a context parallelism: sequences of as many pieces each, heads that are decaying at
// every boundary or exact at every one. Where each item goes in its list is then known without counting the others.
#pragma once

#include "cuda/sm90/context_parallel/plan.h"

namespace flash_qla::cuda::sm90::cp {

// A head's pieces, joined as HeadPlan joins them: some segments have a piece more than the others.
struct JoinedPieces {
  int32_t pieces, joined;  // joined: segments
  int32_t least;           // pieces of each segment, or one more
  int32_t large;           // segments of the larger size; all where there is one size
  Divisor by_joined;

  FLASH_QLA_HOST_DEVICE JoinedPieces(int32_t pieces, int32_t joined)
      : pieces(pieces), joined(joined), by_joined(joined) {
    least = by_joined.divide(pieces);
    large = pieces == least * joined ? joined : pieces - least * joined;
  }
  // The boundary that segment k starts at: the first one of boundary_stays() that makes it k.
  FLASH_QLA_HOST_DEVICE int32_t boundary(int32_t k) const { return by_joined.divide(k * pieces + joined - 1); }
  FLASH_QLA_HOST_DEVICE int32_t small() const { return joined - large; }

  // A segment among those of its size.
  struct Place {
    bool is_large;
    int32_t number;
  };
  FLASH_QLA_HOST_DEVICE Place place(int32_t k, int32_t from, int32_t to) const {
    if (large == joined) return {true, k};
    const int32_t large_before = from - k * least;
    return to - from > least ? Place{true, large_before} : Place{false, k - large_before};
  }
};

// What is known of a segment before any gate: of all heads of a kind the same.
struct RegularSegment {
  int32_t first, end;   // chunks, without a warm-up
  int32_t order;        // of segments like it
  int32_t after_exact;  // 1: of what writes O, exact heads' first segments come before it
};

struct RegularCounts {
  int32_t decaying, exact;  // sequences times heads of either kind
};

// Lists are in the order of segments' sizes, large ones first, as far as pieces of one length and the usual warm-up
// tell them; of each segment all heads.
struct RegularPlan {
  JoinedPieces decaying, exact;

  FLASH_QLA_HOST_DEVICE RegularPlan(int32_t pieces, const Join& join)
      : decaying(pieces, joined_pieces(pieces, join.decaying)), exact(pieces, joined_pieces(pieces, join.exact)) {}

  FLASH_QLA_HOST_DEVICE int32_t state_items(const RegularCounts& heads) const {
    return heads.exact * states_of_pieces(exact.joined);
  }
  FLASH_QLA_HOST_DEVICE int32_t independent_items(const RegularCounts& heads) const {
    return heads.decaying * decaying.joined + heads.exact;
  }
  FLASH_QLA_HOST_DEVICE int32_t dependent_items(const RegularCounts& heads) const {
    return heads.exact * (exact.joined - 1);
  }
  FLASH_QLA_HOST_DEVICE int32_t scans(const RegularCounts& heads) const { return exact.joined > 2 ? heads.exact : 0; }
  FLASH_QLA_HOST_DEVICE int32_t most_segments() const {
    return decaying.joined > exact.joined ? decaying.joined : exact.joined;
  }

  // Segment k of a head of either kind.
  FLASH_QLA_HOST_DEVICE RegularSegment segment(const CutSequence& cuts, bool is_exact, int32_t k) const {
    JoinedPieces parts = decaying;  // not a reference to one of the two: they stay in registers
    if (is_exact) parts = exact;
    const int32_t from = parts.boundary(k), to = parts.boundary(k + 1);
    const JoinedPieces::Place place = parts.place(k, from, to);
    RegularSegment s;
    s.first = cuts.at(from);
    s.end = k == parts.joined - 1 ? cuts.chunks : cuts.at(to);
    s.after_exact = 0;
    if (is_exact && k > 0) {
      s.order = place.is_large ? place.number : parts.large + place.number;
      return s;
    }
    // What depends on nothing, in four groups, longest first: of decaying heads large and small segments with a
    // warm-up, and the first ones; the first ones of exact heads.
    const int32_t own = is_exact ? 3 : k == 0 ? 2 : place.is_large ? 0 : 1;
    const int32_t warm = decaying.least * cuts.piece + kUsualWarmup;
    const int32_t lengths[4] = {decaying.small() > 0 ? warm + cuts.piece : warm, warm,
                                decaying.boundary(1) * cuts.piece, exact.boundary(1) * cuts.piece};
    const int32_t counts[4] = {decaying.large - 1, decaying.small(), 1, 0};  // of each decaying head
    const int32_t length = own == 0 ? lengths[0] : own == 1 ? lengths[1] : own == 2 ? lengths[2] : lengths[3];
    s.order = own == 0 ? place.number - 1 : own == 1 ? place.number : 0;
    FLASH_QLA_UNROLL
    for (int32_t i = 0; i < 4; ++i) {
      if (i == own || lengths[i] < length || (lengths[i] == length && i > own)) continue;
      s.order += counts[i];
      s.after_exact += i == 3 ? 1 : 0;
    }
    return s;
  }

  // Of segment k of a head, the rank-th of its kind: n = 0: the item that writes O, and the scan that ends there; 1:
  // the state item; 2: the transition. To sink.state(), sink.output() and sink.scan(), each with its place.
  template <typename Warmups, typename Sink>
  FLASH_QLA_HOST_DEVICE void emit(const RegularSegment& s, const HeadPlan<Warmups>& plan, const RegularCounts& heads,
                                  bool is_exact, int32_t rank, int32_t k, int32_t n, const Sink& sink) const {
    const bool last = k == (is_exact ? exact.joined : decaying.joined) - 1;
    if (n > 0 && (!is_exact || last || (n == 2 && k == 0))) return;
    const bool waits = is_exact && k > 0;
    int32_t warmup = 0, flags = 0, slot = -1;
    if (is_exact) slot = plan.first_slot() + k;  // of the segment's last state
    if (!is_exact && k > 0) {
      const int32_t number = plan.cut_spacing.windows.divide(plan.cuts.sequence.start / kChunk + s.first);
      const int32_t found = plan.warmups(number);
      warmup = found < s.first ? found : s.first;
    }
    int32_t at = rank + (waits ? (s.order - 1) * heads.exact + independent_items(heads)
                               : s.order * heads.decaying + s.after_exact * heads.exact);
    if (n > 0) {
      at = k == 0 ? rank : (2 * s.order - 1) * heads.exact + 2 * rank + n - 1;
      flags = kItemToCutState | (n == 2 ? kItemTransition : k == 0 ? kItemFromStart : 0);
      sink.state(at, plan.item(s.first, s.end, 0, slot, flags));
      return;
    }
    const int32_t start = s.first - warmup;
    flags = (waits ? kItemFromCutState : start == 0 ? kItemFromStart : 0) | (last ? kItemToEnd : 0);
    sink.output(at, plan.item(start, s.end, warmup, waits ? slot - 1 : -1, flags));
    if (is_exact && last && exact.joined > 2) {
      sink.scan(rank, Scan{plan.first_slot(), exact.joined - 2});
    }
  }
};

// No head decays: TPCs make what waits for states at cuts. Lists are in the order of segments, of each all
// heads.
struct AllExactPlan {
  AllExactSplit split;
  int32_t heads;  // sequences times heads

  FLASH_QLA_HOST_DEVICE int32_t state_items() const { return heads * states_of_pieces(split.segments); }
  // Last states and transitions that are waited for, by warps.
  FLASH_QLA_HOST_DEVICE int32_t states_left() const { return state_items() * kStateWarps; }
  FLASH_QLA_HOST_DEVICE int32_t independent_items() const { return heads; }
  FLASH_QLA_HOST_DEVICE int32_t dependent_items() const { return heads * (split.segments - 1); }
  FLASH_QLA_HOST_DEVICE int32_t scans() const { return heads; }
  // The chunk that segment k starts with; of `segments` the end.
  FLASH_QLA_HOST_DEVICE int32_t start(int32_t k, int32_t chunks) const {
    return k == 0 ? 0 : split.first + (k - 1) * (chunks - split.first) / (split.segments - 1);
  }

  // As RegularPlan::emit(), of the rank-th head.
  template <typename Warmups, typename Sink>
  FLASH_QLA_HOST_DEVICE void emit(const HeadPlan<Warmups>& plan, int32_t rank, int32_t k, int32_t n,
                                  const Sink& sink) const {
    const bool last = k == split.segments - 1;
    if (n > 0 && (last || (n == 2 && k == 0))) return;
    const int32_t slot = plan.first_slot() + k;  // of the segment's last state
    const int32_t first = start(k, plan.cuts.chunks), end = start(k + 1, plan.cuts.chunks);
    if (n > 0) {
      const int32_t kind = k == 0 ? kItemFromStart : n == 2 ? kItemTransition : 0;
      const int32_t at = k == 0 ? rank : (2 * k - 1) * heads + 2 * rank + n - 1;
      sink.state(at, plan.item(first, end, 0, slot, kItemToCutState | kind));
      return;
    }
    const int32_t flags = (k == 0 ? kItemFromStart : kItemFromCutState) | (last ? kItemToEnd : 0);
    sink.output(k * heads + rank, plan.item(first, end, 0, k == 0 ? -1 : slot - 1, flags));
    if (last) sink.scan(rank, Scan{plan.first_slot(), split.segments - 2});
  }
};

}  // namespace flash_qla::cuda::sm90::cp
