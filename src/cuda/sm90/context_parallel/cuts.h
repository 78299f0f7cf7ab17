// Where sequences may be cut, warm-ups, and how much a plan can hold.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/sm90/context_parallel/costs.h"
#include "cuda/sm90/context_parallel/work_items.h"

namespace flash_qla::cuda::sm90::cp {

// --- where sequences may be cut ---

// Division of numbers below 2^31 by the same one again and again: the planning kernels are short, and a division would
// be most of what they do.
struct Divisor {
  uint32_t by, inverse;
  Divisor() = default;
  FLASH_QLA_HOST_DEVICE explicit Divisor(int32_t by)
      : by(static_cast<uint32_t>(by)), inverse(0xffffffffu / static_cast<uint32_t>(by)) {}
  FLASH_QLA_HOST_DEVICE int32_t divide(int32_t x) const {
    const uint32_t n = static_cast<uint32_t>(x);
    // Exact, or one too small: 1 / by - inverse / 2^32 is less than 1.5 / 2^32.
#ifdef __CUDA_ARCH__
    const uint32_t quotient = __umulhi(n, inverse);
#else
    const uint32_t quotient = static_cast<uint32_t>(static_cast<uint64_t>(n) * inverse >> 32);
#endif
    return static_cast<int32_t>(n - quotient * by >= by ? quotient + 1 : quotient);
  }
};

struct CutSpacing {
  int32_t spacing = 0;    // chunks between boundaries of a sequence, at least; 0: no sequence may be cut
  int32_t by_length = 0;  // pieces by Mode::kInvariant's rule
  Divisor windows{};      // by the spacing
  FLASH_QLA_HOST_DEVICE void set_spacing(int32_t chunks) {
    spacing = chunks;
    windows = Divisor(chunks);
  }
};

// What the choice of a spacing sees of the lengths.
struct LengthSummary {
  int64_t chunks = 0;
  int32_t sequences = 0;  // that are not empty
  int32_t longest = 0;    // chunks
  bool operator==(const LengthSummary&) const = default;
};

FLASH_QLA_HOST_DEVICE constexpr int32_t chunks_in(int32_t tokens) { return (tokens + kChunk - 1) / kChunk; }
FLASH_QLA_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of `sequences` equal ones of `tokens` tokens each, or all together.
FLASH_QLA_HOST_DEVICE constexpr LengthSummary equal_lengths(int64_t tokens, int32_t sequences, bool tokens_of_each) {
  const int64_t all = divide_up(tokens, kChunk), each = tokens_of_each ? all : divide_up(all, sequences);
  return {each * sequences, sequences, static_cast<int32_t>(each)};
}

// A quotient of the estimates below: on the device without the last bits, and without the many instructions that they
// take there.
FLASH_QLA_HOST_DEVICE inline float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

// Whether two SMs work on an item where nothing is cut: all items are then one wave.
FLASH_QLA_HOST_DEVICE constexpr bool shares_pay(int64_t items, int32_t sms) { return 2 * items <= sms; }

// Where nothing is cut, an estimate: exact for equal lengths.
FLASH_QLA_HOST_DEVICE inline float uncut_time(const LengthSummary& lengths, int32_t heads, int32_t sms,
                                              const Costs& costs) {
  if (lengths.sequences == 0) return 0.0f;
  const int32_t items = lengths.sequences * heads;
  const int32_t blocks = shares_pay(items, sms) ? 2 : 1;
  const float cards = static_cast<float>(sms), longest = static_cast<float>(lengths.longest);
  // The share of SMs at work on average over the longest item's time.
  const float average = quotient(static_cast<float>(lengths.chunks), static_cast<float>(lengths.sequences));
  float share = quotient(average * static_cast<float>(blocks * items), longest * cards);
  share = share < 1.0f ? share : 1.0f;
  if (blocks == 2) return longest * (costs.two_cta_step + costs.crowd * share * share) + costs.two_cta_edge;
  const float step = costs.one_cta_step + costs.crowd * share * share;
  const float whole = longest * step + costs.one_cta_edge;
  if (longest <= average * 1.02f) return static_cast<float>((items + sms - 1) / sms) * whole;
  // Longest first: the last items to start are short ones, and about a third of an average item is lost at the end.
  const float even = quotient(static_cast<float>(items) * (average * step + costs.one_cta_edge), cards);
  const float spread = items > sms ? even + average * step / 3 : even;
  return whole > spread ? whole : spread;
}

// Of so many pieces of all chunks of all heads.
FLASH_QLA_HOST_DEVICE inline int32_t spacing_of(int64_t work, int32_t items) {
  // 64-bit divisions take long on the device, and are seldom needed.
  return work < INT32_MAX - items ? (static_cast<int32_t>(work) + items - 1) / items
                                  : static_cast<int32_t>(divide_up(work, items));
}

// kItemsPerSm pieces to an SM.
FLASH_QLA_HOST_DEVICE inline CutSpacing even_cut_spacing(const LengthSummary& lengths, int32_t heads, int32_t sms,
                                                         int32_t least) {
  const int32_t spacing = spacing_of(lengths.chunks * heads, kItemsPerSm * sms);
  CutSpacing cut_spacing;
  cut_spacing.set_spacing(spacing > least ? spacing : least);
  return cut_spacing;
}

FLASH_QLA_HOST_DEVICE inline CutSpacing choose_cut_spacing(Mode mode, bool forced, const LengthSummary& lengths,
                                                           int32_t heads, int32_t sms, const Costs& costs,
                                                           float least_possible = kLeastPossible) {
  CutSpacing cut_spacing;
  if (mode == Mode::kOff || lengths.sequences == 0) return cut_spacing;
  if (mode == Mode::kInvariant) {
    cut_spacing.set_spacing(forced ? kForcedSpacing : kInvariantSpacing);
    cut_spacing.by_length = 1;
    return cut_spacing;
  }
  const int64_t work = lengths.chunks * heads;
  if (!forced) {
    // The best that a cut can do: even work on all SMs, where a quarter of the heads do not decay and stay whole, or
    // are cut in four, whose states and transitions are another 1.25 of their work.
    const float items = static_cast<float>(lengths.sequences) * static_cast<float>(heads);
    const float even =
        quotient(static_cast<float>(work) * (costs.one_cta_step + costs.crowd) + items * costs.one_cta_edge,
                 static_cast<float>(sms));
    const float whole = static_cast<float>(lengths.longest) * costs.step + costs.item_edge;
    const float uncut = even > whole ? even : whole;
    const float cut = even * (1.0f + 0.25f * 1.25f * quotient(costs.state_step, costs.step));
    const float best = (cut < uncut ? cut : uncut) + costs.plan;
    if (uncut_time(lengths, heads, sms, costs) <= least_possible * best) return cut_spacing;
  }
  return even_cut_spacing(lengths, heads, sms, forced ? kForcedSpacing : kMinSpacing);
}

// Lengths first: the least length, in chunks, of the longest of so many sequences for which the device goes on to the
// gates, where all tokens are used and equal ones ask for no cut; 0: none. Where fewer tokens are used, that sequence
// is the more of the work.
inline int32_t least_longest(int64_t chunks, int32_t sequences, int32_t heads, int32_t sms, const Costs& costs) {
  const auto cuts = [&](int32_t longest) {
    return choose_cut_spacing(Mode::kAuto, false, {chunks, sequences, longest}, heads, sms, costs, kLeastUnequal)
               .spacing > 0;
  };
  int32_t low = static_cast<int32_t>(divide_up(chunks, sequences)), high = static_cast<int32_t>(chunks);
  if (!cuts(high)) return 0;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (cuts(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

FLASH_QLA_HOST_DEVICE inline int32_t pieces_of(int32_t chunks, const CutSpacing& cut_spacing) {
  if (cut_spacing.spacing == 0 || chunks < 2 * cut_spacing.spacing) return 1;
  const int32_t pieces = cut_spacing.windows.divide(chunks),
                most = cut_spacing.by_length != 0 ? kInvariantPieces : kMostPieces;
  return pieces < most ? pieces : most;
}

// One sequence and where it may be cut: boundary i of 1 .. pieces - 1 is before chunk at(i).
struct CutSequence {
  SequenceSpan sequence;
  int32_t chunks, pieces;
  int32_t piece, longer;  // chunks of a piece; so many pieces have one more
  Divisor by_pieces;

  CutSequence() = default;
  FLASH_QLA_HOST_DEVICE CutSequence(const SequenceSpan& sequence, const CutSpacing& cut_spacing)
      : sequence(sequence),
        chunks(chunks_in(sequence.length)),
        pieces(pieces_of(chunks, cut_spacing)),
        by_pieces(pieces) {
    piece = by_pieces.divide(chunks);
    longer = chunks - piece * pieces;
  }
  FLASH_QLA_HOST_DEVICE int32_t at(int32_t i) const { return piece * i + by_pieces.divide(longer * i); }

  // Boundaries have numbers: no two of a batch are nearer than the spacing (a sequence's first lies that far inside
  // it), so the number of the spacing-wide window they fall in is theirs alone. Tokens are 31-bit numbers.
  FLASH_QLA_HOST_DEVICE int32_t number(int32_t i, const CutSpacing& cut_spacing) const {
    return cut_spacing.windows.divide(sequence.start / kChunk + at(i));
  }
  // Whether all numbers are within the capacity: else the sequence is not cut. Where many tokens are before the first
  // sequence they need not be.
  FLASH_QLA_HOST_DEVICE bool fits(int32_t capacity, const CutSpacing& cut_spacing) const {
    return pieces == 1 || number(pieces - 1, cut_spacing) < capacity;
  }

  // The boundary that has this number, 1 .. pieces - 1; 0: none.
  FLASH_QLA_HOST_DEVICE int32_t find(int32_t wanted, const CutSpacing& cut_spacing) const {
    const int64_t window = static_cast<int64_t>(wanted) * cut_spacing.spacing * kChunk;
    if (pieces <= 1 || window <= sequence.start || window - sequence.start >= sequence.length) return 0;
    // The first boundary at or after the window's start: a guess, and the one or two steps that it is off.
    const int32_t least = chunks_in(static_cast<int32_t>(window - sequence.start));
    int32_t i =
        static_cast<int32_t>(static_cast<float>(least) * static_cast<float>(pieces) / static_cast<float>(chunks));
    i = i < 1 ? 1 : i < pieces ? i : pieces - 1;
    while (i > 1 && at(i - 1) >= least) --i;
    while (i < pieces && at(i) < least) ++i;
    return i < pieces && number(i, cut_spacing) == wanted ? i : 0;
  }
};

// Boundaries that a call can have for each head. Depends on shapes alone: it sizes the workspace.
FLASH_QLA_HOST_DEVICE inline int32_t boundary_capacity(Mode mode, bool forced, int64_t tokens, int32_t heads,
                                                       int32_t sms) {
  if (mode == Mode::kOff) return 0;
  const int64_t least = forced ? kForcedSpacing : mode == Mode::kInvariant ? kInvariantSpacing : kMinSpacing;
  const int64_t by_length = divide_up(tokens, least * kChunk);
  if (mode == Mode::kInvariant) return static_cast<int32_t>(by_length);
  const int64_t by_card = divide_up(static_cast<int64_t>(kMostItemsPerSm) * sms, heads) + 1;
  return static_cast<int32_t>(by_length < by_card ? by_length : by_card);
}

// --- decaying and exact ---

// Whether a warm-up that does not come to the threshold is one from the sequence's start, which leaves nothing out:
// where that is near, and the head decays as one that does not need transitions.
FLASH_QLA_HOST_DEVICE constexpr bool reaches_start(int32_t position, int32_t limit, float threshold, float sum) {
  return position <= limit && static_cast<float>(limit) * sum <= static_cast<float>(position) * threshold;
}

// Chunks of warm-up that a start at `position` needs to leave the state before them out; 0: no warm-up of up to `limit`
// chunks does. decay(c): sum over the tokens of chunk c of g + log max(1, |1 - beta |k|^2|). NaN is exact.
template <typename Decay>
FLASH_QLA_HOST_DEVICE int32_t warmup_chunks(int32_t position, int32_t limit, float threshold, const Decay& decay) {
  float sum = 0.0f;
  for (int32_t w = 1; w <= limit && w <= position; ++w) {
    sum += decay(position - w);
    if (sum <= threshold) return w;
  }
  return reaches_start(position, limit, threshold, sum) ? position : 0;
}

FLASH_QLA_HOST_DEVICE constexpr int32_t warmup_limit(const CutSpacing& cut_spacing) {
  // A longer warm-up would cost more than the two state items that it saves.
  const int32_t limit = 2 * cut_spacing.spacing < 8 ? 8 : 2 * cut_spacing.spacing;
  return limit < kMaxWarmup ? limit : kMaxWarmup;
}

// --- workspace ---

// What a call's plan can hold at most; by shapes alone.
struct Capacity {
  int32_t boundaries = 0;    // for each head
  int64_t slots = 0;         // states at cuts, and as many transitions
  int64_t state_items = 0;   // an exact boundary takes one, or one and a transition
  int64_t output_items = 0;  // one a sequence and head, one more a boundary
  int64_t scans = 0;
  int64_t carried = 0;  // states at cuts of carried heads, and as many more items that write O
};

FLASH_QLA_HOST_DEVICE inline Capacity plan_capacity(Mode mode, bool forced, int64_t tokens, int32_t sequences,
                                                    int32_t heads, int32_t sms) {
  Capacity c;
  c.boundaries = boundary_capacity(mode, forced, tokens, heads, sms);
  c.slots = static_cast<int64_t>(c.boundaries) * heads;
  c.state_items = 2 * c.slots;
  c.output_items = static_cast<int64_t>(sequences) * heads + c.slots;
  c.scans = (c.slots + 1) / 2;
  return c;
}

}  // namespace flash_qla::cuda::sm90::cp
