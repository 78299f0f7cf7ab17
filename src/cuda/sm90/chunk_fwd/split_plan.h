// The sequence split of the fused Hopper forward, as plain functions: where sequences may be cut, which cuts are taken,
// and the tiles that follow. They run on the device (plan.cu) and, in a test, on the host.
// docs/design/sequence_split.md explains the scheme.
#pragma once

#include <cstdint>

#include "split_types.h"

#ifdef __CUDACC__
#define FLASH_QLA_HOST_DEVICE __host__ __device__
#else
#define FLASH_QLA_HOST_DEVICE
#endif

namespace flash_qla::cuda::sm90 {

// Costs, in steps: one step is one chunk of one value head in the kernel that writes O, where sequences are cut: 2.07
// us on an H200. They are what fits best to the times of all choices of 28 calls (docs/design/sequence_split.md): near
// what was measured of each alone, but for what they stand for besides.
struct SplitCosts {
  float state_step = 0.99f;    // a chunk in the kernel that makes states alone
  float relay_step = 0.47f;    // a chunk of a head by four SMs, as an unsplit call with very few tiles computes it
  float half_step = 0.60f;     // ... by two SMs, with few tiles
  float half_crowd = 0.042f;   // ... and this times the square of the share of SMs that are at work, on average
  float whole_step = 0.93f;    // a chunk of a head by one SM, where nothing is cut
  float whole_crowd = 0.114f;  // ... likewise
  float tile_edge = 2.56f;     // a tile's first and last state, and filling the pipeline
  float state_edge = 0.99f;    // ... of a state tile, which starts from zero
  float combine_step = 0.40f;  // one transition applied to a boundary state
  float plan = 11.8f;          // what a call with a plan takes beyond the estimate, less what one without does
  float asking = 3.0f;         // ... where lengths are looked at first and turn out to ask for no cut
};

// No segment is shorter: below it edges and warm-up cost more than the segment.
inline constexpr int32_t kMinSpacing = 4;
inline constexpr int32_t kForcedSpacing = 2;  // under force_intra_cp: two whole chunks, so that everything is met
// A sequence may be cut into pieces of about (all chunks of all heads) / (this * SMs): three items to an SM let the
// planner merge them into nearly full waves, and bound the boundary states to 50 MB on a card of 132 SMs.
inline constexpr int32_t kItemsPerSm = 3;
// SplitMode::kInvariant: as many pieces as whole spacings fit, up to a number that keeps chains of transitions short.
inline constexpr int32_t kInvariantSpacing = 32;
inline constexpr int32_t kInvariantPieces = 16;
inline constexpr int32_t kMostPieces =
    1 << 15;  // its square is a 32-bit number: 64-bit divisions take long on the device
// Longest warm-up, in chunks; kept in a byte.
inline constexpr int32_t kMaxWarmup = 64;
// A call is planned if the estimate promises this gain where a quarter of the heads do not decay and the others do by 3
// a chunk (a warm-up of six), and no more than kMostLossOfHeavy is lost where half of them do not: the gates are not
// known before, and on the device no cut is among the choices.
inline constexpr float kLeastGain = 0.06f;
inline constexpr float kMostLossOfHeavy = 0.1f;
// ... and this of equal lengths, where only the device knows the lengths and unequal ones promise kLeastGain.
inline constexpr float kLeastOfEqual = 0.02f;
// Several sequences of lengths that only the device knows are asked for where that costs no more than this of what
// equal lengths take; a cut must promise kLeastUnequal of what it takes at best before the device goes on to the gates.
inline constexpr float kMostLoss = 0.02f;
// ... and where there are no more of them: one that holds most of many sequences' tokens is rare, and all others pay.
inline constexpr int32_t kMostAsked = 3;
inline constexpr float kLeastUnequal = 1.25f;
inline constexpr float kLeastPossible = 1.05f;  // ... of lengths that are known: the choice has the last word
inline constexpr int32_t kUsualWarmup = 6;
// With this many tiles to an SM and no cut the waves are even enough for any lengths that matter: no planning.
inline constexpr int64_t kTilesPerSmUnsplit = 16;

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

struct SplitGrid {
  int32_t spacing = 0;    // chunks between boundaries of a sequence, at least; 0: no sequence may be cut
  int32_t by_length = 0;  // pieces by SplitMode::kInvariant's rule
  Divisor windows{};      // by the spacing
  FLASH_QLA_HOST_DEVICE void set_spacing(int32_t chunks) {
    spacing = chunks;
    windows = Divisor(chunks);
  }
};

// What the choice of a grid sees of the lengths.
struct LengthSummary {
  int64_t chunks = 0;
  int32_t sequences = 0;  // that are not empty
  int32_t longest = 0;    // chunks
  bool operator==(const LengthSummary&) const = default;
};

FLASH_QLA_HOST_DEVICE constexpr int32_t chunks_in(int32_t tokens) { return (tokens + kSplitChunk - 1) / kSplitChunk; }
FLASH_QLA_HOST_DEVICE constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of `sequences` equal ones of `tokens` tokens each, or all together.
FLASH_QLA_HOST_DEVICE constexpr LengthSummary equal_lengths(int64_t tokens, int32_t sequences, bool tokens_of_each) {
  const int64_t all = divide_up(tokens, kSplitChunk), each = tokens_of_each ? all : divide_up(all, sequences);
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

// SMs to a tile where nothing is cut: as many as leave all tiles one wave. Clusters of four do not fill the card, whose
// parts have SMs left over: of 132 SMs an H200 takes 30.
FLASH_QLA_HOST_DEVICE constexpr int32_t uncut_blocks(int64_t tiles, int32_t sms) {
  return 44 * tiles <= 10 * int64_t{sms} ? 4 : 2 * tiles <= sms ? 2 : 1;
}
// Whether that is more than one.
FLASH_QLA_HOST_DEVICE constexpr bool shares_pay(int64_t tiles, int32_t sms) { return uncut_blocks(tiles, sms) > 1; }

// A chunk's share of a step where nothing is cut, by `share` of the SMs on average over the longest tile's time.
FLASH_QLA_HOST_DEVICE inline float uncut_step(int32_t blocks, float share, const SplitCosts& costs) {
  share = share < 1.0f ? share : 1.0f;
  return blocks == 4   ? costs.relay_step
         : blocks == 2 ? costs.half_step + costs.half_crowd * share * share
                       : costs.whole_step + costs.whole_crowd * share * share;
}

// Steps that the card needs without a cut, an estimate: exact for equal lengths.
FLASH_QLA_HOST_DEVICE inline float unsplit_steps(const LengthSummary& lengths, int32_t heads, int32_t sms,
                                                 const SplitCosts& costs) {
  if (lengths.sequences == 0) return 0.0f;
  const int32_t tiles = lengths.sequences * heads;
  const int32_t blocks = uncut_blocks(tiles, sms);
  const float cards = static_cast<float>(sms), longest = static_cast<float>(lengths.longest);
  const float average = quotient(static_cast<float>(lengths.chunks), static_cast<float>(lengths.sequences));
  const float edged = longest + costs.tile_edge;
  const float share = quotient(average * static_cast<float>(blocks * tiles), longest * cards);
  const float step = uncut_step(blocks, share, costs);
  if (blocks > 1) return edged * step;
  if (longest <= average * 1.02f) return static_cast<float>((tiles + sms - 1) / sms) * edged * step;
  // Longest first: the last tiles to start are short ones, and about a third of an average tile is lost at the end.
  const float even = quotient(static_cast<float>(tiles) * (average + costs.tile_edge), cards);
  const float spread = tiles > sms ? even + average / 3 : even;
  return (edged > spread ? edged : spread) * step;
}

FLASH_QLA_HOST_DEVICE inline SplitGrid choose_grid(SplitMode mode, bool forced, const LengthSummary& lengths,
                                                   int32_t heads, int32_t sms, const SplitCosts& costs,
                                                   float least_possible = kLeastPossible) {
  SplitGrid grid;
  if (mode == SplitMode::kOff || lengths.sequences == 0) return grid;
  if (mode == SplitMode::kInvariant) {
    grid.set_spacing(forced ? kForcedSpacing : kInvariantSpacing);
    grid.by_length = 1;
    return grid;
  }
  const int64_t work = lengths.chunks * heads;
  if (!forced) {
    // The best that a split can do: even work, where a quarter of the heads do not decay and stay whole, or are cut in
    // four, whose states and transitions are another 1.25 of their work.
    const float tiles = static_cast<float>(lengths.sequences) * static_cast<float>(heads);
    const float even = (static_cast<float>(work) + tiles * costs.tile_edge) / static_cast<float>(sms);
    const float whole = static_cast<float>(lengths.longest) + costs.tile_edge;
    const float uncut = even > whole ? even : whole, cut = even * (1.0f + 0.25f * 1.25f * costs.state_step);
    const float best = (cut < uncut ? cut : uncut) + costs.plan;
    if (unsplit_steps(lengths, heads, sms, costs) <= least_possible * best) return grid;
  }
  // 64-bit divisions take long on the device, and are seldom needed.
  const int32_t items = kItemsPerSm * sms, least = forced ? kForcedSpacing : kMinSpacing;
  const int32_t spacing = work < INT32_MAX - items ? (static_cast<int32_t>(work) + items - 1) / items
                                                   : static_cast<int32_t>(divide_up(work, items));
  grid.set_spacing(spacing > least ? spacing : least);
  return grid;
}

FLASH_QLA_HOST_DEVICE inline int32_t pieces_of(int32_t chunks, const SplitGrid& grid) {
  if (grid.spacing == 0 || chunks < 2 * grid.spacing) return 1;
  const int32_t pieces = grid.windows.divide(chunks), most = grid.by_length != 0 ? kInvariantPieces : kMostPieces;
  return pieces < most ? pieces : most;
}

// One sequence and where it may be cut: boundary i of 1 .. pieces - 1 is before chunk at(i).
struct CutSequence {
  PlannedSequence sequence;
  int32_t chunks, pieces;
  int32_t piece, longer;  // chunks of a piece; so many pieces have one more
  Divisor by_pieces;

  CutSequence() = default;
  FLASH_QLA_HOST_DEVICE CutSequence(const PlannedSequence& sequence, const SplitGrid& grid)
      : sequence(sequence), chunks(chunks_in(sequence.length)), pieces(pieces_of(chunks, grid)), by_pieces(pieces) {
    piece = by_pieces.divide(chunks);
    longer = chunks - piece * pieces;
  }
  FLASH_QLA_HOST_DEVICE int32_t at(int32_t i) const { return piece * i + by_pieces.divide(longer * i); }

  // Boundaries have numbers: no two of a batch are nearer than the spacing (a sequence's first lies that far inside
  // it), so the number of the spacing-wide window they fall in is theirs alone. A boundary whose number is past the
  // capacity is not used. Tokens are 31-bit numbers.
  FLASH_QLA_HOST_DEVICE int32_t number(int32_t i, const SplitGrid& grid) const {
    return grid.windows.divide(sequence.start / kSplitChunk + at(i));
  }

  // The boundary that has this number, 1 .. pieces - 1; 0: none.
  FLASH_QLA_HOST_DEVICE int32_t find(int32_t wanted, const SplitGrid& grid) const {
    const int64_t window = static_cast<int64_t>(wanted) * grid.spacing * kSplitChunk;
    if (pieces <= 1 || window <= sequence.start || window - sequence.start >= sequence.length) return 0;
    // The first boundary at or after the window's start: a guess, and the one or two steps that it is off.
    const int32_t least = chunks_in(static_cast<int32_t>(window - sequence.start));
    int32_t i =
        static_cast<int32_t>(static_cast<float>(least) * static_cast<float>(pieces) / static_cast<float>(chunks));
    i = i < 1 ? 1 : i < pieces ? i : pieces - 1;
    while (i > 1 && at(i - 1) >= least) --i;
    while (i < pieces && at(i) < least) ++i;
    return i < pieces && number(i, grid) == wanted ? i : 0;
  }
};

// Boundaries that a call can have for each head. Depends on shapes alone: it sizes the workspace.
FLASH_QLA_HOST_DEVICE inline int32_t boundary_capacity(SplitMode mode, bool forced, int64_t tokens, int32_t heads,
                                                       int32_t sms) {
  if (mode == SplitMode::kOff) return 0;
  const int64_t least = forced ? kForcedSpacing : mode == SplitMode::kInvariant ? kInvariantSpacing : kMinSpacing;
  const int64_t by_length = divide_up(tokens, least * kSplitChunk);
  if (mode == SplitMode::kInvariant) return static_cast<int32_t>(by_length);
  const int64_t by_card = divide_up(static_cast<int64_t>(kItemsPerSm) * sms, heads) + 1;
  return static_cast<int32_t>(by_length < by_card ? by_length : by_card);
}

// --- light and heavy ---

// Whether a warm-up that does not come to the threshold is one from the sequence's start, which leaves nothing out:
// where that is near, and the head decays as one that does not need transitions.
FLASH_QLA_HOST_DEVICE constexpr bool reaches_start(int32_t position, int32_t limit, float threshold, float sum) {
  return position <= limit && static_cast<float>(limit) * sum <= static_cast<float>(position) * threshold;
}

// Chunks of warm-up that a start at `position` needs to leave the state before them out; 0: no warm-up of up to `limit`
// chunks does. decay(c): sum over the tokens of chunk c of g + log max(1, |1 - beta |k|^2|). NaN is heavy.
template <typename Decay>
FLASH_QLA_HOST_DEVICE int32_t warmup_chunks(int32_t position, int32_t limit, float threshold, const Decay& decay) {
  float sum = 0.0f;
  for (int32_t w = 1; w <= limit && w <= position; ++w) {
    sum += decay(position - w);
    if (sum <= threshold) return w;
  }
  return reaches_start(position, limit, threshold, sum) ? position : 0;
}

FLASH_QLA_HOST_DEVICE constexpr int32_t warmup_limit(const SplitGrid& grid) {
  // A longer warm-up would cost more than the two state tiles that it saves.
  const int32_t limit = 2 * grid.spacing < 8 ? 8 : 2 * grid.spacing;
  return limit < kMaxWarmup ? limit : kMaxWarmup;
}

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
FLASH_QLA_HOST_DEVICE constexpr int32_t states_of_pieces(int32_t pieces) { return 1 + 2 * (pieces - 2); }
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
#ifdef __CUDACC__
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

 private:
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

// --- the choice of merges ---

// What the choice sees of one sequence and head.
struct HeadSummary {
  int32_t chunks = 0, pieces = 1;
  int32_t heavy = 0;    // boundaries
  int32_t warmups = 0;  // chunks, of all light boundaries together
};

// What one choice costs. Free tiles depend on nothing; dependent ones wait for boundary states.
struct SplitEstimate {
  SplitCosts costs;
  float state_work = 0.0f, free_work = 0.0f, dependent_work = 0.0f;
  float longest_state = 0.0f, longest_free = 0.0f, longest_dependent = 0.0f;
  int32_t state_tiles = 0, free_tiles = 0, dependent_tiles = 0, chains = 0, longest_chain = 0;

  // One sequence and head of which `step` neighbouring pieces are joined. A head with a heavy boundary is taken for one
  // that has no other: where both kinds alternate that is a cautious guess.
  FLASH_QLA_HOST_DEVICE void add(const HeadSummary& head, int32_t step) {
    const int32_t tiles = joined_pieces(head.pieces, step);
    const float segment = quotient(static_cast<float>(head.chunks), static_cast<float>(tiles));
    const int32_t light = head.pieces - 1 - head.heavy;
    const bool warms_up = head.heavy == 0 && tiles > 1;
    const float warmup = warms_up ? quotient(static_cast<float>(head.warmups), static_cast<float>(light)) : 0.0f;
    const float output = segment + warmup + costs.tile_edge;
    const int32_t dependent = head.heavy > 0 ? tiles - 1 : 0;
    free_tiles += tiles - dependent;
    free_work += output * static_cast<float>(tiles - dependent);
    longest_free = larger(longest_free, output);
    if (dependent == 0) return;
    dependent_tiles += dependent;
    dependent_work += output * static_cast<float>(dependent);
    longest_dependent = larger(longest_dependent, output);
    const float state = segment * costs.state_step + costs.state_edge;
    const int32_t states = states_of_pieces(tiles);
    state_tiles += states;
    state_work += state * static_cast<float>(states);
    longest_state = larger(longest_state, state);
    longest_chain = tiles - 2 > longest_chain ? tiles - 2 : longest_chain;
    chains += tiles > 2;
  }
  FLASH_QLA_HOST_DEVICE void add(const SplitEstimate& other) {
    state_work += other.state_work;
    free_work += other.free_work;
    dependent_work += other.dependent_work;
    state_tiles += other.state_tiles;
    free_tiles += other.free_tiles;
    dependent_tiles += other.dependent_tiles;
    chains += other.chains;
    longest_state = larger(longest_state, other.longest_state);
    longest_free = larger(longest_free, other.longest_free);
    longest_dependent = larger(longest_dependent, other.longest_dependent);
    longest_chain = other.longest_chain > longest_chain ? other.longest_chain : longest_chain;
  }

  // So many heads that are alike.
  FLASH_QLA_HOST_DEVICE void repeat(int32_t heads) {
    const float times = static_cast<float>(heads);
    state_work *= times;
    free_work *= times;
    dependent_work *= times;
    state_tiles *= heads;
    free_tiles *= heads;
    dependent_tiles *= heads;
    chains *= heads;
  }

  // Of tiles without a cut: as the unsplit kernels take them, perhaps by several SMs each.
  FLASH_QLA_HOST_DEVICE void leave_uncut(bool shared, int32_t sms) {
    const int32_t blocks = shared ? uncut_blocks(free_tiles, sms) : 1;
    const float share = quotient(static_cast<float>(blocks) * free_work, longest_free * static_cast<float>(sms));
    const float step = uncut_step(blocks, share, costs);
    free_tiles *= blocks;
    free_work *= static_cast<float>(blocks) * step;
    longest_free *= step;
  }

  // Steps until the last tile ends.
  FLASH_QLA_HOST_DEVICE float steps(const Divisor& sms) const {
    if (free_tiles == 0) return 0.0f;
    if (state_tiles == 0) return whole_waves(free_tiles, free_work, longest_free, sms);
    const int32_t blocks = static_cast<int32_t>(sms.by), pieces = kCombineSlices * chains;
    const float cards = static_cast<float>(sms.by);
    const float combine = costs.combine_step * static_cast<float>(longest_chain);
    // When the boundary states are there, and what is left then: dependent tiles go first.
    const float start = whole_waves(state_tiles, state_work, longest_state, sms) + combine;
    const float room = cards * start - state_work - static_cast<float>(pieces < blocks ? pieces : blocks) * combine;
    const float left = free_work > room ? free_work - room : 0.0f;
    const float free = quotient(free_work, static_cast<float>(free_tiles));
    float end = start + larger(whole_waves(dependent_tiles, dependent_work, longest_dependent, sms),
                               quotient(left + dependent_work, cards) + (left > 0.0f ? kUneven * free : 0.0f));
    // A free tile that finds no SM at first starts when a state tile ends.
    const float late = state_tiles >= blocks               ? quotient(state_work, cards)
                       : state_tiles + free_tiles > blocks ? longest_state
                                                           : 0.0f;
    end = larger(end, (late < longest_free ? late : longest_free) + longest_free);
    // More free tiles than SMs: those beyond go to SMs without a state tile, and so do the dependent ones. Where these
    // SMs are too few some dependent tiles wait for one that has had a state tile and a free one.
    const int32_t idle = blocks - state_tiles, second = free_tiles - blocks;
    if (idle > 0 && second > 0 && dependent_tiles > idle - second) {
      end = larger(end, longest_state + longest_free + longest_dependent);
    }
    return larger(end, longest_free);
  }

 private:
  FLASH_QLA_HOST_DEVICE static float larger(float a, float b) { return a > b ? a : b; }
  // What is lost at the end where tiles are not whole waves: a part of one.
  static constexpr float kUneven = 0.16f;
  // Tiles of one list by themselves: whole waves where they are nearly equal.
  FLASH_QLA_HOST_DEVICE static float whole_waves(int32_t tiles, float work, float longest, const Divisor& sms) {
    const int32_t blocks = static_cast<int32_t>(sms.by);
    const float average = quotient(work, static_cast<float>(tiles));
    const float waves = static_cast<float>(sms.divide(tiles + blocks - 1)) * longest;
    const float spread = larger(longest, quotient(work, static_cast<float>(blocks)) + kUneven * average);
    return longest <= 1.2f * average || waves < spread ? waves : spread;
  }
};

// The merges that are tried: every pair of a light and a heavy one. The last pair is no cut at all.
inline constexpr int32_t kMerges = 8;
inline constexpr int32_t kMergeChoices = kMerges * kMerges;
FLASH_QLA_HOST_DEVICE constexpr int32_t merge_step(int32_t i) {
  return i < 4 ? i + 1 : i == 4 ? 6 : i == 5 ? 8 : i == 6 ? 16 : kNoCut;
}
FLASH_QLA_HOST_DEVICE constexpr SplitMerge merge_choice(int32_t i) {
  return {merge_step(i % kMerges), merge_step(i / kMerges)};
}

// Steps that a choice takes, from its two parts: the heads without and those with a heavy boundary, joined by
// merge_step() of their own. uncut_shared: without a cut a kernel of several SMs to a head writes O. (With cuts that
// was slower for all shapes tried.)
FLASH_QLA_HOST_DEVICE inline float steps_of_choice(const SplitEstimate& light, const SplitEstimate& heavy,
                                                   int32_t choice, bool uncut_shared, const Divisor& sms) {
  SplitEstimate estimate = light;
  estimate.add(heavy);
  if (choice == kMergeChoices - 1) estimate.leave_uncut(uncut_shared, static_cast<int32_t>(sms.by));
  return estimate.steps(sms);
}

// The best choice, and the steps that it takes.
struct BestChoice {
  int32_t choice = 0;
  float steps = 0.0f;
};

// With `heavy` heads that do not decay and the others that do (kUsualWarmup), where all sequences but the longest are
// equal.
inline BestChoice best_choice(const LengthSummary& lengths, const SplitGrid& grid, int32_t heads, int32_t heavy,
                              bool uncut_shared, int32_t sms, const SplitCosts& costs) {
  SplitEstimate light[kMerges], without_decay[kMerges];
  for (int32_t i = 0; i < kMerges; ++i) light[i].costs = without_decay[i].costs = costs;
  const int32_t others = lengths.sequences - 1;
  for (int32_t kind = 0; kind < (others > 0 ? 2 : 1); ++kind) {
    const int32_t sequences = kind == 0 ? 1 : others;
    HeadSummary head;
    head.chunks = kind == 0 ? lengths.longest : static_cast<int32_t>((lengths.chunks - lengths.longest) / others);
    head.pieces = pieces_of(head.chunks, grid);
    for (int32_t i = 0; i < kMerges; ++i) {
      SplitEstimate part;
      part.costs = costs;
      head.warmups = kUsualWarmup * (head.pieces - 1);
      head.heavy = 0;
      part.add(head, merge_step(i));
      part.repeat(sequences * (heads - heavy));
      if (heavy < heads) light[i].add(part);
      part = SplitEstimate{};
      part.costs = costs;
      head.warmups = 0;
      head.heavy = head.pieces - 1;
      part.add(head, merge_step(i));
      part.repeat(sequences * heavy);
      if (heavy > 0) without_decay[i].add(part);
    }
  }
  const Divisor by_sms(sms);
  BestChoice best;
  for (int32_t i = 0; i < kMergeChoices; ++i) {
    const float steps = steps_of_choice(light[i % kMerges], without_decay[i / kMerges], i, uncut_shared, by_sms);
    if (i == 0 || steps < best.steps) best = {i, steps};
  }
  return best;
}

// The choices of lengths that are known beforehand, by how many eighths of the heads do not decay: one that some gates
// ask for is then looked up, not worked out. They are those of kUsualWarmup, and serve warm-ups near it.
struct UsualChoices {
  static constexpr int32_t kShares = 8;
  static constexpr int32_t kLeastWarmup = 5, kMostWarmup = 7;  // chunks, on average over a head's boundaries
  uint8_t of_share[kShares + 1] = {};
  uint16_t states[kShares + 1] = {};  // state tiles of each of the heads that do not decay

  // Of `heavy` heads among `heads`, and all their state tiles; -1: these are no whole eighths.
  FLASH_QLA_HOST_DEVICE int32_t choice(int32_t heavy, int32_t heads, int32_t* state_tiles) const {
    const int32_t share = kShares * heavy / heads;
    *state_tiles = heavy * states[share];
    return share * heads == kShares * heavy ? of_share[share] : -1;
  }
};
inline UsualChoices usual_choices(const LengthSummary& lengths, const SplitGrid& grid, int32_t heads, bool uncut_shared,
                                  int32_t sms, const SplitCosts& costs) {
  UsualChoices choices;
  for (int32_t share = 0; share <= UsualChoices::kShares; ++share) {
    const int32_t heavy = share * heads / UsualChoices::kShares;
    const int32_t choice = best_choice(lengths, grid, heads, heavy, uncut_shared, sms, costs).choice;
    const int32_t pieces = joined_pieces(pieces_of(lengths.longest, grid), merge_choice(choice).heavy);
    choices.of_share[share] = static_cast<uint8_t>(choice);
    choices.states[share] = static_cast<uint16_t>(pieces > 1 ? states_of_pieces(pieces) : 0);
  }
  return choices;
}

// What a plan promises for sequences of these lengths: the time with it, as a share of that without, where a quarter,
// half or all of the heads do not decay.
struct SplitPromise {
  bool possible = false;
  float quarter = 0.0f, half = 0.0f, all = 0.0f;
  bool pays(float least_gain = kLeastGain) const {
    return possible && quarter <= 1.0f - least_gain && half <= 1.0f + kMostLossOfHeavy;
  }
  // Whatever the gates are, so that no plan without a cut need be allowed for.
  bool surely() const { return possible && all <= 1.0f - kLeastGain; }
};
inline SplitPromise promise_of_plan(const LengthSummary& lengths, int32_t heads, int32_t sms, const SplitCosts& costs) {
  const SplitGrid grid = choose_grid(SplitMode::kAuto, false, lengths, heads, sms, costs);
  if (grid.spacing == 0) return {};
  const float unsplit = unsplit_steps(lengths, heads, sms, costs);
  const bool shared = shares_pay(static_cast<int64_t>(lengths.sequences) * heads, sms);
  const auto share = [&](int32_t heavy) {
    return (costs.plan + best_choice(lengths, grid, heads, heavy, shared, sms, costs).steps) / unsplit;
  };
  return {true, share(heads / 4), share(heads / 2), share(heads)};
}

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

// --- workspace ---

// What a call's plan can hold at most; by shapes alone.
struct SplitCapacity {
  int32_t boundaries = 0;    // for each head
  int64_t slots = 0;         // boundary states, and as many transitions
  int64_t state_tiles = 0;   // a heavy boundary takes one, or one and a transition
  int64_t output_tiles = 0;  // one a sequence and head, one more a boundary
  int64_t chains = 0;
};

FLASH_QLA_HOST_DEVICE inline SplitCapacity split_capacity(SplitMode mode, bool forced, int64_t tokens,
                                                          int32_t sequences, int32_t heads, int32_t sms) {
  SplitCapacity c;
  c.boundaries = boundary_capacity(mode, forced, tokens, heads, sms);
  c.slots = static_cast<int64_t>(c.boundaries) * heads;
  c.state_tiles = 2 * c.slots;
  c.output_tiles = static_cast<int64_t>(sequences) * heads + c.slots;
  c.chains = (c.slots + 1) / 2;
  return c;
}

}  // namespace flash_qla::cuda::sm90
