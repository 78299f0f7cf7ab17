// The sequence split of the fused Hopper forward, as plain functions: where sequences may be cut, which cuts are taken,
// and the tiles that follow. They run on the device (plan.cu) and, in a test, on the host.
// docs/design/sequence_split.md explains the scheme.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "split_types.h"

#ifdef __CUDACC__
#define FLASH_QLA_HOST_DEVICE __host__ __device__
#else
#define FLASH_QLA_HOST_DEVICE
#endif
// Loops over arrays that are to stay in registers.
#ifdef __CUDA_ARCH__
#define FLASH_QLA_UNROLL _Pragma("unroll")
#else
#define FLASH_QLA_UNROLL
#endif

namespace flash_qla::cuda::sm90 {

// Costs, in microseconds on an H200: what fits best to the times of up to 150 choices each of 26 calls, in rows of
// calls, and of calls without a cut (docs/design/sequence_split.md): near what was measured of each alone, but for what
// they stand for besides.
struct SplitCosts {
  // Where sequences are cut. A chunk takes longer the fewer value heads share a key head: more is read from memory.
  float step = 1.74f;          // a chunk of one head in the kernel that writes O
  float warm_step = 0.84f;     // ... of a warm-up, without Q, P and O
  float state_step = 1.48f;    // ... in the kernel that makes states alone
  float key_share = 0.044f;    // more of all, of a key head to each value head beside one to none
  float tile_edge = 4.05f;     // a tile's first and last state, and filling the pipeline
  float state_edge = 2.9f;     // ... of a state tile, which starts from zero
  float state_crowd = 0.2f;    // more of a state tile where others are before it: tiles that write O run beside it
  float first_edge = 4.5f;     // a block's start, before its first tile that writes O
  float combine = 2.4f;        // before the first transition of a chain
  float combine_step = 0.36f;  // one transition applied to a boundary state
  float load = 0.215f;         // of all work, evenly shared: SMs at work hold up each other
  float plan = 15.5f;          // planning
  // ... and more of it for each place where a sequence may be cut: of a key head and up to four value heads, until the
  // constructor has counted them.
  float boundary = 0.045f;
  // Where nothing is cut: by two SMs to a head, by one.
  float half_step = 1.11f, half_edge = 10.0f;
  float half_crowd = 0.19f;  // more of a step, times the square of the share of SMs that are at work, on average
  float whole_step = 1.925f, whole_edge = 5.3f;
  float whole_crowd = 0.236f;  // likewise
  // An unsplit kernel behind a plan that turns out to cut nothing: it starts unevenly, which takes so much of its time.
  float late = 3.0f, late_share = 0.055f;
  float behind = 2.5f;  // a kernel behind a plan that gives it no tile
  // Where pairs of SMs make what waits for boundary states: they start late; and how much shorter a first segment is
  // that ends when these are there, made by one SM beside the state tiles of others.
  float paired_edge = 8.0f, first_share = 0.92f;
  // Lengths looked at first that turn out to ask for no cut: several SMs to a head find their tiles meanwhile.
  float asking = 8.0f, asking_whole = 14.0f;

  SplitCosts() = default;
  SplitCosts(int32_t key_heads, int32_t heads) {
    // The measured calls' fit is at four value heads to a key head.
    const float scale = 1.0f + key_share * (static_cast<float>(key_heads) / static_cast<float>(heads) - 0.25f);
    step *= scale;
    warm_step *= scale;
    state_step *= scale;
    boundary *= static_cast<float>(key_heads * ((heads / key_heads + 3) / 4));
  }

  FLASH_QLA_HOST_DEVICE float planning(int32_t boundaries) const {
    return plan + boundary * static_cast<float>(boundaries);
  }
};

// No segment is shorter: below it edges and warm-up cost more than the segment.
inline constexpr int32_t kMinSpacing = 4;
inline constexpr int32_t kForcedSpacing = 2;  // under force_intra_cp: two whole chunks, so that everything is met
// A sequence may be cut into pieces of about (all chunks of all heads) / (this * SMs): three items to an SM let the
// planner merge them into nearly full waves. Where lengths are known beforehand, up to four are tried: they bound the
// boundary states to 70 MB on a card of 132 SMs.
inline constexpr int32_t kItemsPerSm = 3;
inline constexpr int32_t kMostItemsPerSm = 4;
// SplitMode::kInvariant: as many pieces as whole spacings fit, up to a number that keeps chains of transitions short.
inline constexpr int32_t kInvariantSpacing = 32;
inline constexpr int32_t kInvariantPieces = 16;
inline constexpr int32_t kMostPieces =
    1 << 15;  // its square is a 32-bit number: 64-bit divisions take long on the device
// Longest warm-up, in chunks; kept in a byte.
inline constexpr int32_t kMaxWarmup = 64;
// A call is planned if the estimate promises this gain where a quarter of the heads do not decay and the others do by 3
// a chunk (a warm-up of five), and no more than kMostLossOfHeavy is lost where half of them do not: the gates are not
// known before, and on the device no cut is among the choices.
inline constexpr float kLeastGain = 0.08f;
inline constexpr float kMostLossOfHeavy = 0.15f;
// ... and a plan without a cut, which takes a kernel more in every call, where a cut would take so much more than it if
// no head decays.
inline constexpr float kMostLossOfAll = 0.08f;
// Spacings that are tried beside that of kItemsPerSm, where lengths are known beforehand: kFinerGrids of them from that
// of kMostItemsPerSm on, and kCoarserGrids up to twice as far apart. Coarser ones have fewer boundaries to look at, and
// fewer ways to join pieces: what half of the heads without decay would take, or none, counts kWeightOfOthers each
// beside a quarter of them. A grid must promise kLeastOfGrid more than that of kItemsPerSm, for with many pieces some
// choice always looks well.
inline constexpr int32_t kFinerGrids = 3, kCoarserGrids = 8;
inline constexpr float kLeastOfGrid = 0.015f, kWeightOfOthers = 0.1f;
// What a plan of its own must promise where no head decays (UndecayedSplit).
inline constexpr float kLeastOfUndecayed = 0.02f;
// What is lost if no head decays counts so much beside what a quarter of such heads promises, where lengths are known.
inline constexpr float kWeightOfAll = 0.1f;
// ... and this of equal lengths, where only the device knows the lengths and unequal ones promise kLeastGain: the
// estimate's own error, for equal ones must not lose. Measured, they gain up to 2 % then.
inline constexpr float kLeastOfEqual = 0.03f;
// Several sequences of lengths that only the device knows are asked for where that costs no more than this of what
// equal lengths take; a cut must promise kLeastUnequal of what it takes at best before the device goes on to the gates.
inline constexpr float kMostLoss = 0.03f;
// ... and where there are no more of them: one that holds most of many sequences' tokens is rare, and all others pay.
inline constexpr int32_t kMostAsked = 3;
inline constexpr float kLeastUnequal = 1.2f;
inline constexpr float kLeastPossible = 1.05f;  // ... of lengths that are known: the choice has the last word
inline constexpr int32_t kUsualWarmup = 5;
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

// Whether two SMs work on a tile where nothing is cut: all tiles are then one wave.
FLASH_QLA_HOST_DEVICE constexpr bool shares_pay(int64_t tiles, int32_t sms) { return 2 * tiles <= sms; }

// Where nothing is cut, an estimate: exact for equal lengths.
FLASH_QLA_HOST_DEVICE inline float unsplit_time(const LengthSummary& lengths, int32_t heads, int32_t sms,
                                                const SplitCosts& costs) {
  if (lengths.sequences == 0) return 0.0f;
  const int32_t tiles = lengths.sequences * heads;
  const int32_t blocks = shares_pay(tiles, sms) ? 2 : 1;
  const float cards = static_cast<float>(sms), longest = static_cast<float>(lengths.longest);
  // The share of SMs at work on average over the longest tile's time.
  const float average = quotient(static_cast<float>(lengths.chunks), static_cast<float>(lengths.sequences));
  float share = quotient(average * static_cast<float>(blocks * tiles), longest * cards);
  share = share < 1.0f ? share : 1.0f;
  if (blocks == 2) return longest * (costs.half_step + costs.half_crowd * share * share) + costs.half_edge;
  const float step = costs.whole_step + costs.whole_crowd * share * share;
  const float whole = longest * step + costs.whole_edge;
  if (longest <= average * 1.02f) return static_cast<float>((tiles + sms - 1) / sms) * whole;
  // Longest first: the last tiles to start are short ones, and about a third of an average tile is lost at the end.
  const float even = quotient(static_cast<float>(tiles) * (average * step + costs.whole_edge), cards);
  const float spread = tiles > sms ? even + average * step / 3 : even;
  return whole > spread ? whole : spread;
}

// Of so many pieces of all chunks of all heads.
FLASH_QLA_HOST_DEVICE inline int32_t spacing_of(int64_t work, int32_t items) {
  // 64-bit divisions take long on the device, and are seldom needed.
  return work < INT32_MAX - items ? (static_cast<int32_t>(work) + items - 1) / items
                                  : static_cast<int32_t>(divide_up(work, items));
}

// kItemsPerSm pieces to an SM.
FLASH_QLA_HOST_DEVICE inline SplitGrid even_grid(const LengthSummary& lengths, int32_t heads, int32_t sms,
                                                 int32_t least) {
  const int32_t spacing = spacing_of(lengths.chunks * heads, kItemsPerSm * sms);
  SplitGrid grid;
  grid.set_spacing(spacing > least ? spacing : least);
  return grid;
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
    // The best that a split can do: even work on all SMs, where a quarter of the heads do not decay and stay whole, or
    // are cut in four, whose states and transitions are another 1.25 of their work.
    const float tiles = static_cast<float>(lengths.sequences) * static_cast<float>(heads);
    const float even =
        quotient(static_cast<float>(work) * (costs.whole_step + costs.whole_crowd) + tiles * costs.whole_edge,
                 static_cast<float>(sms));
    const float whole = static_cast<float>(lengths.longest) * costs.step + costs.tile_edge;
    const float uncut = even > whole ? even : whole;
    const float cut = even * (1.0f + 0.25f * 1.25f * quotient(costs.state_step, costs.step));
    const float best = (cut < uncut ? cut : uncut) + costs.plan;
    if (unsplit_time(lengths, heads, sms, costs) <= least_possible * best) return grid;
  }
  return even_grid(lengths, heads, sms, forced ? kForcedSpacing : kMinSpacing);
}

// Lengths first: the least length, in chunks, of the longest of so many sequences for which the device goes on to the
// gates, where all tokens are used and equal ones ask for no cut; 0: none. Where fewer tokens are used, that sequence
// is the more of the work.
inline int32_t least_longest(int64_t chunks, int32_t sequences, int32_t heads, int32_t sms, const SplitCosts& costs) {
  const auto cuts = [&](int32_t longest) {
    return choose_grid(SplitMode::kAuto, false, {chunks, sequences, longest}, heads, sms, costs, kLeastUnequal)
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
  const int64_t by_card = divide_up(static_cast<int64_t>(kMostItemsPerSm) * sms, heads) + 1;
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

// --- the choice of merges ---

// What the choice sees of one sequence and head.
struct HeadSummary {
  int32_t chunks = 0, pieces = 1;
  int32_t heavy = 0;    // boundaries
  int32_t warmups = 0;  // chunks, of all light boundaries together
};

// Tiles that are nearly alike.
struct TileClass {
  int32_t tiles = 0;
  float work = 0.0f, longest = 0.0f;  // microseconds: of all together, of the longest one
  FLASH_QLA_HOST_DEVICE void add(int32_t count, float each) { add(count, each, each); }
  // each: on average.
  FLASH_QLA_HOST_DEVICE void add(int32_t count, float each, float longest_of_them) {
    tiles += count;
    work += static_cast<float>(count) * each;
    if (count > 0 && longest_of_them > longest) longest = longest_of_them;
  }
  FLASH_QLA_HOST_DEVICE void add(const TileClass& other, int32_t times = 1) {
    tiles += times * other.tiles;
    work += static_cast<float>(times) * other.work;
    if (other.longest > longest) longest = other.longest;
  }
  FLASH_QLA_HOST_DEVICE float average() const { return tiles > 0 ? quotient(work, static_cast<float>(tiles)) : 0.0f; }
};

// What one choice costs for a part of the heads. Free tiles depend on nothing; dependent ones wait for boundary states.
// Of both the long ones are kept apart from the others: pieces that were joined unevenly, or shorter sequences.
struct SplitEstimate {
  TileClass states, free[2], dependent[2];
  int32_t transitions = 0, longest_chain = 0;

  // One sequence and head of which `step` neighbouring pieces are joined. A head with a heavy boundary is taken for one
  // that has no other: where both kinds alternate that is a cautious guess. long_tile: chunks that make a tile a long
  // one.
  FLASH_QLA_HOST_DEVICE void add(const HeadSummary& head, int32_t step, float long_tile, const SplitCosts& costs) {
    const int32_t tiles = joined_pieces(head.pieces, step);
    const float piece = quotient(static_cast<float>(head.chunks), static_cast<float>(head.pieces));
    const int32_t shorter = head.pieces / tiles, longer = head.pieces - shorter * tiles;  // pieces, tiles
    const int32_t light = head.pieces - 1 - head.heavy;
    const bool warms_up = head.heavy == 0 && tiles > 1;
    const float warmup = warms_up ? quotient(static_cast<float>(head.warmups), static_cast<float>(light)) : 0.0f;
    for (int32_t more = 0; more < 2; ++more) {
      const int32_t count = more != 0 ? longer : tiles - longer;
      const float chunks = piece * static_cast<float>(shorter + more);
      // Pieces that are no whole number of chunks on average differ by one, and the longer ones end last.
      const float rest = ceilf(chunks - 0.01f) - chunks;
      const float output = chunks * costs.step + warmup * costs.warm_step + costs.tile_edge;
      const float most = output + rest * costs.step;
      const bool is_long = chunks >= long_tile;
      if (head.heavy == 0) {
        free[0].add(is_long ? count : 0, output, most);
        free[1].add(is_long ? 0 : count, output, most);
        continue;
      }
      // The first segment is free, and its end is reached from the start; of those after it but the last a state and a
      // transition each.
      const int32_t first = more == 0 ? 1 : 0;
      free[0].add(is_long ? first : 0, output, most);
      free[1].add(is_long ? 0 : first, output, most);
      dependent[0].add(is_long ? count - first : 0, output, most);
      dependent[1].add(is_long ? 0 : count - first, output, most);
      const int32_t all = states_of_pieces(tiles), of_longer = 2 * longer < all ? 2 * longer : all;
      const float state = chunks * costs.state_step + costs.state_edge;
      states.add(more != 0 ? of_longer : all - of_longer, state, state + rest * costs.state_step);
    }
    if (head.heavy == 0 || tiles <= 2) return;
    transitions += tiles - 2;
    longest_chain = tiles - 2 > longest_chain ? tiles - 2 : longest_chain;
  }
  FLASH_QLA_HOST_DEVICE void add(const SplitEstimate& other, int32_t times = 1) {
    states.add(other.states, times);
    for (int32_t i = 0; i < 2; ++i) {
      free[i].add(other.free[i], times);
      dependent[i].add(other.dependent[i], times);
    }
    transitions += times * other.transitions;
    longest_chain = other.longest_chain > longest_chain ? other.longest_chain : longest_chain;
  }
};

// Chunks from which on a tile of such a merge counts as a long one: nearly those of the longest sequence's.
FLASH_QLA_HOST_DEVICE inline float long_tile(int32_t longest, const SplitGrid& grid, int32_t step) {
  const int32_t pieces = pieces_of(longest, grid), tiles = joined_pieces(pieces, step);
  return 0.72f * quotient(static_cast<float>(longest), static_cast<float>(pieces)) *
         static_cast<float>((pieces + tiles - 1) / tiles);
}

// SMs by the time when they have nothing more to do, those at about the same time together: kTogether, in microseconds,
// is less than tiles differ by. On the device eight lanes have a group each.
inline constexpr int32_t kSmGroups = 8;
inline constexpr float kTogether = 3.0f;
class SmGroups {
 public:
  // count may be 0. With no group left, which is rare, another's time will do.
  FLASH_QLA_HOST_DEVICE void put(float time, int32_t count) {
    int32_t place = -1, room = 0;
    for (int32_t i = kSmGroups - 1; i >= 0; --i) {
      if (sms_[i] == 0) room = i;
      if (sms_[i] > 0 && time - at_[i] < kTogether && at_[i] - time < kTogether) place = i;
    }
    if (place < 0) place = room;
    if (sms_[place] == 0) at_[place] = time;
    sms_[place] += count;
  }
  // The earliest group's time, and its SMs.
  FLASH_QLA_HOST_DEVICE float next(int32_t* count) {
    next_ = -1;
    for (int32_t i = 0; i < kSmGroups; ++i) {
      if (sms_[i] > 0 && (next_ < 0 || at_[i] < at_[next_])) next_ = i;
    }
    *count = sms_[next_];
    return at_[next_];
  }
  FLASH_QLA_HOST_DEVICE void take(int32_t count) { sms_[next_] -= count; }
  // Whether anybody who goes along has more to do.
  FLASH_QLA_HOST_DEVICE static bool any(bool more) { return more; }

 private:
  float at_[kSmGroups] = {};
  int32_t sms_[kSmGroups] = {};
  int32_t next_ = 0;
};

// Microseconds until the last tile ends, of the heads without and of those with a heavy boundary: the tiles as blocks
// take them, by groups of SMs and of tiles that are nearly alike.
template <typename Groups>
FLASH_QLA_HOST_DEVICE float time_of_tiles(const SplitEstimate& light, const SplitEstimate& heavy, int32_t sms,
                                          const SplitCosts& costs, Groups free) {
  // State tiles in waves, on all SMs but the planner's; blocks that had one of the last stay for the chains, as long as
  // these are.
  const TileClass& states = heavy.states;
  const int32_t at_once = sms > 1 ? sms - 1 : 1;
  const int32_t waves = states.tiles > at_once ? (states.tiles + at_once - 1) / at_once : 1;
  const int32_t last = states.tiles - (waves - 1) * at_once, others = sms - last;
  const float before = static_cast<float>(waves - 1) * states.average();
  const float made = before + (waves > 1 ? 1.0f + costs.state_crowd : 1.0f) * states.longest;
  float ready = made;
  int32_t pieces = 0;
  if (heavy.longest_chain > 0) {
    const float longest = static_cast<float>(heavy.longest_chain);
    ready += costs.combine + costs.combine_step * longest;
    pieces = static_cast<int32_t>(quotient(static_cast<float>(kCombineSlices * heavy.transitions), longest));
  }
  const int32_t stay = pieces < last ? pieces : last;
  const int32_t beyond = waves > 1 ? pieces - stay : 0, more = beyond < others ? beyond : others;
  free.put(ready + costs.first_edge, stay + more);
  free.put(made + costs.first_edge, last - stay);
  free.put(before + costs.first_edge, others - more);
  // Free tiles longest first; once the boundary states are there, the dependent ones before what is left of them.
  constexpr int32_t kFree = 3, kClasses = 5;
  TileClass left[kClasses] = {light.free[0], light.free[1], heavy.free[0], heavy.dependent[0], heavy.dependent[1]};
  left[2].add(heavy.free[1]);
  float each[kClasses];
  int32_t frees = 0, dependents = left[3].tiles + left[4].tiles;
  float work = states.work;
  FLASH_QLA_UNROLL
  for (int32_t i = 0; i < kClasses; ++i) {
    each[i] = left[i].average();
    work += left[i].work;
    if (i < kFree) frees += left[i].tiles;
  }
  float end = 0.0f;
  while (free.any(frees + dependents > 0)) {
    int32_t count = 0;
    float start = free.next(&count);
    const bool dependent = dependents > 0 && (frees == 0 || start >= ready);
    if (dependent && start < ready) start = ready;
    int32_t kind = -1;
    float length = 0.0f;
    FLASH_QLA_UNROLL
    for (int32_t i = 0; i < kClasses; ++i) {
      if ((i >= kFree) == dependent && left[i].tiles > 0 && (kind < 0 || each[i] > length)) {
        kind = i;
        length = each[i];
      }
    }
    if (kind < 0) count = 0;  // where other lanes have more to do
    FLASH_QLA_UNROLL
    for (int32_t i = 0; i < kClasses; ++i) {
      if (i != kind) continue;
      count = left[i].tiles < count ? left[i].tiles : count;
      left[i].tiles -= count;
      end = start + left[i].longest > end ? start + left[i].longest : end;
    }
    (dependent ? dependents : frees) -= count;
    free.take(count);
    free.put(start + length, count);
  }
  return end + costs.load * quotient(work, static_cast<float>(sms));
}

// No more than time_of_tiles(), but for groups' times that are taken for equal.
inline float least_time(const SplitEstimate& light, const SplitEstimate& heavy, int32_t sms, const SplitCosts& costs) {
  float work = heavy.states.work, longest = 0.0f, dependent = 0.0f;
  for (int32_t i = 0; i < 2; ++i) {
    work += light.free[i].work + heavy.free[i].work + heavy.dependent[i].work;
    longest = std::max({longest, light.free[i].longest, heavy.free[i].longest});
    dependent = std::max(dependent, heavy.dependent[i].longest);
  }
  float least = std::max(longest + costs.first_edge, work / static_cast<float>(sms));
  if (const TileClass& states = heavy.states; states.tiles > 0) {
    const float waves = static_cast<float>((states.tiles - 1) / std::max(sms - 1, 1));
    least = std::max(least, waves * states.average() + states.longest + dependent +
                                costs.combine_step * static_cast<float>(heavy.longest_chain));
  }
  return least;
}

// The merges that are tried: every pair of a light and a heavy one. The last pair is no cut at all.
inline constexpr int32_t kMerges = 8;
inline constexpr int32_t kMergeChoices = kMerges * kMerges;
FLASH_QLA_HOST_DEVICE constexpr int32_t merge_step(int32_t i) {
  return i < 4 ? i + 1 : i == 4 ? 6 : i == 5 ? 8 : i == 6 ? 16 : kNoCut;
}
FLASH_QLA_HOST_DEVICE constexpr SplitMerge merge_choice(int32_t i) {
  return {merge_step(i % kMerges), merge_step(i / kMerges)};
}

// Microseconds that a choice takes, from its two parts: the heads without and those with a heavy boundary, joined by
// merge_step() of their own. uncut: where a kernel of several SMs to a head writes O if nothing is cut, what that
// takes. (With cuts that was slower for all shapes tried.)
template <typename Groups>
FLASH_QLA_HOST_DEVICE float time_of_choice(const SplitEstimate& light, const SplitEstimate& heavy, int32_t choice,
                                           float uncut, int32_t sms, const SplitCosts& costs, const Groups& free) {
  const float time = time_of_tiles(light, heavy, sms, costs, free);
  return choice == kMergeChoices - 1 && uncut > 0.0f ? uncut : time;
}
// What an uncut call then takes.
FLASH_QLA_HOST_DEVICE inline float time_of_shared(const LengthSummary& lengths, int32_t heads, int32_t sms,
                                                  const SplitCosts& costs) {
  return unsplit_time(lengths, heads, sms, costs) * (1.0f + costs.late_share) + costs.late;
}

// The best choice, and what it takes.
struct BestChoice {
  int32_t choice = 0;
  float time = 0.0f;
};

// Places where sequences may be cut, where all but the longest are equal.
inline int32_t boundaries_of(const LengthSummary& lengths, const SplitGrid& grid) {
  const int32_t others = lengths.sequences - 1;
  const int32_t chunks = others > 0 ? static_cast<int32_t>((lengths.chunks - lengths.longest) / others) : 0;
  return pieces_of(lengths.longest, grid) - 1 + others * (pieces_of(chunks, grid) - 1);
}

// With `heavy` heads that do not decay and the others that do (kUsualWarmup), where all sequences but the longest are
// equal. guess: a choice that may well be the best, which spares most of the others.
inline BestChoice best_choice(const LengthSummary& lengths, const SplitGrid& grid, int32_t heads, int32_t heavy,
                              bool uncut_shared, int32_t sms, const SplitCosts& costs, int32_t guess) {
  SplitEstimate light[kMerges], without_decay[kMerges];
  const int32_t others = lengths.sequences - 1;
  for (int32_t kind = 0; kind < (others > 0 ? 2 : 1); ++kind) {
    const int32_t sequences = kind == 0 ? 1 : others;
    HeadSummary head;
    head.chunks = kind == 0 ? lengths.longest : static_cast<int32_t>((lengths.chunks - lengths.longest) / others);
    head.pieces = pieces_of(head.chunks, grid);
    for (int32_t i = 0; i < kMerges; ++i) {
      const float limit = long_tile(lengths.longest, grid, merge_step(i));
      SplitEstimate part;
      head.warmups = kUsualWarmup * (head.pieces - 1);
      head.heavy = 0;
      part.add(head, merge_step(i), limit, costs);
      light[i].add(part, sequences * (heads - heavy));
      part = SplitEstimate{};
      head.warmups = 0;
      head.heavy = head.pieces - 1;
      part.add(head, merge_step(i), limit, costs);
      without_decay[i].add(part, sequences * heavy);
    }
  }
  const float uncut = uncut_shared ? time_of_shared(lengths, heads, sms, costs) : 0.0f;
  const int32_t pieces = pieces_of(lengths.longest, grid);
  // Not what is the same as the one before, and not what must take longer than the best so far.
  const auto again = [&](int32_t i) {
    return i > 0 && joined_pieces(pieces, merge_step(i)) == joined_pieces(pieces, merge_step(i - 1));
  };
  const auto time_of = [&](int32_t i) {
    return time_of_choice(light[i % kMerges], without_decay[i / kMerges], i, uncut, sms, costs, SmGroups{});
  };
  BestChoice best{guess, time_of(guess)};
  for (int32_t i = 0; i < kMergeChoices; ++i) {
    const bool last = i == kMergeChoices - 1;
    if (!last && (again(i % kMerges) || again(i / kMerges) ||
                  least_time(light[i % kMerges], without_decay[i / kMerges], sms, costs) >= best.time)) {
      continue;
    }
    if (const float time = time_of(i); time < best.time) best = {i, time};
  }
  return best;
}

// No head decays: how heads are cut where that is not by whole pieces, and pairs of SMs make what waits for boundary
// states. A head that keeps all of its state may be cut at any chunk, not only where boundaries were looked at.
struct UndecayedSplit {
  int32_t segments = 0;  // of a head; 0: it is by whole pieces
  int32_t first = 0;     // chunks of the first one; the others are equal, or differ by a chunk
};

// The choices of lengths that are known beforehand, by how many eighths of the heads do not decay: one that some gates
// ask for is then looked up, not worked out. They are those of kUsualWarmup, and serve warm-ups near it.
struct UsualChoices {
  static constexpr int32_t kShares = 8;
  static constexpr int32_t kLeastWarmup = 4, kMostWarmup = 6;  // chunks, on average over a head's boundaries
  uint8_t of_share[kShares + 1] = {};
  uint16_t states[kShares + 1] = {};  // state tiles of each of the heads that do not decay
  UndecayedSplit undecayed;           // where no head decays and that is faster

  // Of `heavy` heads among `heads`, and all their state tiles; -1: these are no whole eighths.
  FLASH_QLA_HOST_DEVICE int32_t choice(int32_t heavy, int32_t heads, int32_t* state_tiles) const {
    const int32_t share = kShares * heavy / heads;
    *state_tiles = heavy * states[share];
    return share * heads == kShares * heavy ? of_share[share] : -1;
  }
};

// No head decays, equal lengths: the fastest way to have pairs of SMs, which are faster for few tiles, make what waits
// for boundary states, all of it at once, and the microseconds that it takes without the planning. They start where SMs
// are through with state tiles, or with first segments, which one SM makes each: these are as much shorter that they
// end when the boundary states are there, if their SMs are wanted.
struct BestUndecayed {
  UndecayedSplit split;
  float time = 0.0f;  // 0: there are too many such tiles
};
inline BestUndecayed best_paired(const LengthSummary& lengths, int32_t most, int32_t heads, int32_t sms,
                                 const SplitCosts& costs) {
  BestUndecayed best;
  const int32_t all = lengths.sequences * heads, chunks = lengths.longest, at_once = std::max(sms - 1, 1);
  for (int32_t segments = 3; segments <= most && 2 * all * (segments - 1) <= sms; ++segments) {
    const int32_t dependent = all * (segments - 1), states = all * states_of_pieces(segments);
    const int32_t waves = (states + at_once - 1) / at_once, idle = sms - (states - (waves - 1) * at_once);
    const bool wanted = all > idle || 2 * dependent > sms - all;
    const float chain = costs.combine + costs.combine_step * static_cast<float>(segments - 2);
    const float ratio = wanted ? costs.first_share : 1.0f, others = static_cast<float>(segments - 1);
    const float even = static_cast<float>(chunks) / (others + ratio);
    const int32_t first = std::clamp(chunks - static_cast<int32_t>(even * others + 0.5f), 1, chunks - segments + 1);
    const int32_t longest = (chunks - first + segments - 2) / (segments - 1);
    const float state = static_cast<float>(std::max(first, longest)) * costs.state_step + costs.state_edge;
    const float before = static_cast<float>(waves - 1) * state, ready = before + state + chain;
    const float free = static_cast<float>(first) * costs.step + costs.tile_edge + costs.first_edge;
    const float share = static_cast<float>(2 * dependent) / static_cast<float>(sms);
    const float step = costs.half_step + costs.half_crowd * share * share;
    const float edge = costs.half_edge + costs.paired_edge;
    const float work = static_cast<float>(states) * state + static_cast<float>(all) * free;
    const float late = all > idle ? ready + free : before + free;
    const float end = std::max((all > idle ? late : ready) + static_cast<float>(longest) * step + edge, late);
    const float time = end + costs.load * work / static_cast<float>(sms);
    if (best.time == 0.0f || time < best.time) best = {{segments, first}, time};
  }
  return best;
}

// What a plan promises for sequences of these lengths, and how they would be cut: the time with it, as a share of that
// without, where a quarter, half or all of the heads do not decay.
struct SplitPromise {
  SplitGrid grid;  // none: a plan is not possible
  float quarter = 0.0f, half = 0.0f;
  // Of known lengths alone, and with a cut; and what the plan then takes that leaves all heads to several SMs each.
  float all = 0.0f, all_uncut = 0.0f;
  // Whatever the gates are, or nearly so: no plan without a cut need be allowed for. When the gates are known the time
  // of planning is gone, cut or not.
  bool surely() const { return grid.spacing > 0 && all <= (1.0f + kMostLossOfAll) * all_uncut; }
  bool pays(float least_gain = kLeastGain) const {
    const float without_decay = surely() ? all : std::min(all, all_uncut);
    const float loss_of_all = kWeightOfAll * std::max(without_decay - 1.0f, 0.0f);
    return grid.spacing > 0 && quarter + loss_of_all <= 1.0f - least_gain && half <= 1.0f + kMostLossOfHeavy;
  }
};
// known: the plan may take finer pieces, if they give more where a quarter of the heads do not decay; else the device
// chooses the grid by itself.
inline SplitPromise promise_of_plan(const LengthSummary& lengths, int32_t heads, int32_t sms, const SplitCosts& costs,
                                    bool known) {
  SplitPromise promise;
  promise.grid = choose_grid(SplitMode::kAuto, false, lengths, heads, sms, costs);
  if (promise.grid.spacing == 0) return promise;
  const float unsplit = unsplit_time(lengths, heads, sms, costs);
  const bool shared = shares_pay(static_cast<int64_t>(lengths.sequences) * heads, sms);
  int32_t guess = 0;
  const auto share = [&](const SplitGrid& grid, int32_t heavy, bool uncut_shared) {
    const BestChoice best = best_choice(lengths, grid, heads, heavy, uncut_shared, sms, costs, guess);
    guess = best.choice;
    return (costs.planning(boundaries_of(lengths, grid)) + best.time) / unsplit;
  };
  promise.quarter = share(promise.grid, heads / 4, shared);
  if (known) {
    // What a grid takes, as a share of what the usual one takes where a quarter of the heads do not decay; with the
    // other gates beside it, as far as they weigh.
    const float usual_quarter = promise.quarter;
    const float usual_half = share(promise.grid, heads / 2, shared), usual_none = share(promise.grid, 0, shared);
    const auto others = [&](const SplitGrid& grid, float half) {
      const float none = share(grid, 0, shared), loss_of_all = std::max(share(grid, heads, shared) - 1.0f, 0.0f);
      return kWeightOfOthers * (half / usual_half + none / usual_none) + kWeightOfAll * loss_of_all / usual_quarter;
    };
    const int32_t usual = promise.grid.spacing;
    const int32_t finest = std::max(spacing_of(lengths.chunks * heads, kMostItemsPerSm * sms), kMinSpacing);
    const float usual_others = others(promise.grid, usual_half);
    float best = 1.0f - kLeastOfGrid;
    const auto consider = [&](int32_t spacing) {
      if (spacing == usual) return;
      SplitGrid grid;
      grid.set_spacing(spacing);
      const float quarter = share(grid, heads / 4, shared), value = quarter / usual_quarter;
      if (value >= best) return;
      const float half = share(grid, heads / 2, shared);
      if (half > 1.0f + kMostLossOfHeavy) return;  // the call would not be planned
      if (const float all = value + others(grid, half) - usual_others; all < best) {
        promise.grid = grid;
        promise.quarter = quarter;
        best = all;
      }
    };
    for (int32_t i = kFinerGrids; i > 0; --i) consider(usual - (usual - finest) * i / kFinerGrids);
    const int32_t step = std::max(usual / kCoarserGrids, 1);
    for (int32_t spacing = usual + step; spacing <= 2 * usual + 1; spacing += step) consider(spacing);
  }
  promise.half = share(promise.grid, heads / 2, shared);
  if (known) {
    promise.all = share(promise.grid, heads, false);
    const float planning = costs.planning(boundaries_of(lengths, promise.grid));
    promise.all_uncut = (planning + time_of_shared(lengths, heads, sms, costs)) / unsplit;
  }
  return promise;
}

// Whether a kernel of pairs of SMs goes behind a plan: it makes what waits for boundary states if no head decays.
// uncut_shared: a kernel of several SMs to a head goes there anyway. Else it is one that every call pays for, and must
// be worth it: a cut would lose to a call without a split, and so much of that is made good.
inline bool pairs_pay(const LengthSummary& lengths, const SplitPromise& promise, int32_t heads, bool uncut_shared,
                      int32_t sms, const SplitCosts& costs) {
  const int32_t pieces = pieces_of(lengths.longest, promise.grid);
  const BestUndecayed best = best_paired(lengths, pieces, heads, sms, costs);
  if (best.time == 0.0f) return false;
  const float planning = costs.planning(boundaries_of(lengths, promise.grid));
  const float cut = promise.all * unsplit_time(lengths, heads, sms, costs) - planning;
  if (uncut_shared) return best.time < std::min(cut, time_of_shared(lengths, heads, sms, costs));
  return promise.all > 1.0f && kWeightOfAll * (cut - best.time) > costs.behind;
}

// paired: pairs of SMs may make what waits for boundary states.
inline UsualChoices usual_choices(const LengthSummary& lengths, const SplitGrid& grid, int32_t heads, bool uncut_shared,
                                  int32_t sms, const SplitCosts& costs, bool paired = false) {
  UsualChoices choices;
  BestChoice best;
  for (int32_t share = 0; share <= UsualChoices::kShares; ++share) {
    const int32_t heavy = share * heads / UsualChoices::kShares;
    best = best_choice(lengths, grid, heads, heavy, uncut_shared, sms, costs, best.choice);
    const int32_t guess = best.choice;
    const int32_t pieces = joined_pieces(pieces_of(lengths.longest, grid), merge_choice(guess).heavy);
    choices.of_share[share] = static_cast<uint8_t>(guess);
    choices.states[share] = static_cast<uint16_t>(states_of_pieces(pieces));
  }
  if (!paired) return choices;
  const BestUndecayed by_pairs = best_paired(lengths, pieces_of(lengths.longest, grid), heads, sms, costs);
  if (by_pairs.time > 0.0f && by_pairs.time < best.time * (1.0f - kLeastOfUndecayed)) {
    choices.undecayed = by_pairs.split;
  }
  return choices;
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
