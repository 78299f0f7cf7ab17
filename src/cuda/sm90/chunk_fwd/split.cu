#include "split.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "chunk_stream.cuh"
#include "clear.cuh"
#include "launch_kernel.h"
#include "lengths.cuh"
#include "split_even.h"

namespace flash_qla::cuda::sm90 {
namespace {

constexpr int kPlanThreads = kClearThreads;
constexpr int kPlanWarps = kPlanThreads / 32;

__device__ SplitGrid choose_grid(const SplitKernelParams& p, const LengthSummary& lengths) {
  if (lengths.sequences == 0) return {};
  if (p.least_longest != 0) return even_grid(lengths, p.args.num_value_heads, p.sms, kMinSpacing);
  if (lengths == p.expected_lengths) return p.expected_grid;
  return choose_grid(p.args.split, p.args.force_split != 0, lengths, p.args.num_value_heads, p.sms, p.costs);
}

// --- which boundaries are light ---

// A round looks at eight chunks of four value heads that share a key head: a warp each.
constexpr int kRoundChunks = 8;
constexpr int kRoundHeads = 4;
static_assert(kRoundChunks * kRoundHeads == kPlanWarps);
// A token's key by four threads.
constexpr int kThreadsPerKey = 4;
// Bounds the blocks: a unit takes a few microseconds, and the card's SMs share them.
constexpr int kClassifyBlocksPerSm = 2;
constexpr int kMostUnitBlocks = 512;  // of 256 SMs; the planner looks at one with each thread

template <typename Element>
__device__ float sum_of_squares(uint4 x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Element low, high;
    const uint16_t bits[2] = {static_cast<uint16_t>(words[i] & 0xffff), static_cast<uint16_t>(words[i] >> 16)};
    memcpy(&low, &bits[0], 2);
    memcpy(&high, &bits[1], 2);
    const float a = static_cast<float>(low), b = static_cast<float>(high);
    sum = fmaf(a, a, fmaf(b, b, sum));
  }
  return sum;
}

__device__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// The sequence that holds a token, by a whole warp, which looks at 32 offsets at a time; its length is 0 where none
// does, as it may be where offsets are out of order. own: see summarise_lengths().
__device__ PlannedSequence find_sequence(const ChunkForwardArgs& args, int64_t token, const PlannedSequence& own,
                                         int lane) {
  PlannedSequence none{0, 0, 0, 0};
  if (token < 0) return none;
  if (args.cu_seqlens != nullptr && args.num_sequences <= 32) {
    const bool holds = own.start <= token && token < static_cast<int64_t>(own.start) + own.length;
    const uint32_t found = __ballot_sync(0xffffffffu, holds);
    if (found == 0) return none;
    const int holder = __ffs(static_cast<int>(found)) - 1;
    return {__shfl_sync(0xffffffffu, own.start, holder), __shfl_sync(0xffffffffu, own.length, holder), holder, 0};
  }
  if (args.cu_seqlens == nullptr) {
    if (args.dense_length <= 0 || token / args.dense_length >= args.num_sequences) return none;
    return sequence_at(args, static_cast<int32_t>(token / args.dense_length));
  }
  // Offsets before `low` are at or before the token, those from `high` on are past it.
  int32_t low = 0, high = args.num_sequences + 1;
  while (low < high) {
    const int32_t step = (high - low + 31) / 32, i = low + lane * step;
    const bool before = i < high && load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, i) <= token;
    const int32_t count = __popc(__ballot_sync(0xffffffffu, before));
    high = min(high, low + count * step);
    low = count == 0 ? high : low + (count - 1) * step + 1;
  }
  if (low < 1 || low > args.num_sequences) return none;
  const PlannedSequence s = sequence_at(args, low - 1);
  return s.start <= token && token < static_cast<int64_t>(s.start) + s.length ? s : none;
}

// Sums over the chunks of a round up to the lane's own; lane c * kRoundHeads + h looks at chunk c of head h.
__device__ float sum_of_chunks_before(float x, int lane) {
#pragma unroll
  for (int step = kRoundHeads; step < 32; step *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += below;
  }
  return x;
}
// Of lanes that look at the lane's head, which hold `x`: the first chunk, kRoundChunks if none.
__device__ int first_chunk_where(bool x, int lane) {
  constexpr uint32_t kOneHead = 0x11111111u;
  static_assert(kRoundHeads == 4);
  const uint32_t found = __ballot_sync(0xffffffffu, x) >> (lane % kRoundHeads) & kOneHead;
  return found == 0 ? kRoundChunks : (__ffs(static_cast<int>(found)) - 1) / kRoundHeads;
}

// Warm-ups of the boundaries, a block for each boundary and up to four value heads of a key head. What a round decides
// every warp works out for itself, from sums in shared memory: few barriers.
template <typename Element>
__global__ void __launch_bounds__(kPlanThreads)
    classify_boundaries_kernel(const __grid_constant__ SplitKernelParams p) {
  if (p.least_longest != 0) {
    // What the kernels before the call wrote, and the answer, were there before the unsplit kernel's blocks let this
    // one start. Its end is waited for by the first block alone, as kernels must not end before those they depend on.
    asm volatile("griddepcontrol.launch_dependents;");
    const bool cut = load_now(p.workspace.cut) != 0;
    if (blockIdx.x == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (!cut) return;
  } else {
    // For what the kernels before this one write, which the one after it reads as well.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (threadIdx.x == 0 && static_cast<int>(blockIdx.x) < p.unit_blocks) {
      p.workspace.classifiers[blockIdx.x] = pair_of_sms();
    }
    if (blockIdx.x == 0) {
      if (threadIdx.x == 0) {
        reset_split_start(p.workspace, true);
        __threadfence();
      }
      __syncthreads();  // whoever asks for it starts after this block has said that it may
    }
    asm volatile("griddepcontrol.launch_dependents;");
  }
  const ChunkForwardArgs& args = p.args;
  if (p.in_place != 0) {
    const int64_t counts = 2 * static_cast<int64_t>(args.num_sequences) * args.num_value_heads;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kPlanThreads + threadIdx.x; i < counts;
         i += static_cast<int64_t>(gridDim.x) * kPlanThreads) {
      p.workspace.readers[i] = 0;
    }
  }
  const int units_blocks = static_cast<int>(gridDim.x) - p.clear_blocks;
  if (static_cast<int>(blockIdx.x) >= units_blocks) {
    clear_outside(args, static_cast<int>(blockIdx.x) - units_blocks, p.clear_blocks);
    return;
  }
  PlannedSequence own{0, 0, 0, 0};
  const SplitGrid grid = choose_grid(p, summarise_lengths<kPlanThreads>(args, &own));
  if (grid.spacing == 0) return;

  __shared__ float key_squares[kRoundChunks * kChunk];
  __shared__ float decay[kRoundChunks][kRoundHeads], total[kRoundChunks][kRoundHeads];
  // Of gates that come first: in decay's place they would overtake a warp that still reads those of the round before.
  __shared__ float early_decay[kRoundChunks][kRoundHeads];

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t limit = warmup_limit(grid);
#pragma unroll 1
  for (int32_t unit = static_cast<int32_t>(blockIdx.x); unit < p.units; unit += units_blocks) {
    const int32_t number = p.by_boundary_units.divide(unit);
    const int32_t rest = unit - number * static_cast<int32_t>(p.by_boundary_units.by);
    const int32_t key_head = p.by_parts.divide(rest);
    const int32_t first_head = key_head * p.group + (rest - key_head * p.parts) * kRoundHeads;
    const int32_t heads = min(kRoundHeads, (key_head + 1) * p.group - first_head);
    // The one sequence that can have this boundary began before the boundary's window: it holds the token before it.
    const PlannedSequence s = find_sequence(args, static_cast<int64_t>(number) * grid.spacing * kChunk - 1, own, lane);
    const CutSequence cuts(s, grid);
    const int32_t boundary = cuts.find(number, grid);
    if (boundary == 0) continue;
    const int32_t at = cuts.at(boundary);

    // Of the head that this lane looks at, the same in all warps: the sum so far, and the warm-up once it is known.
    float sum = 0.0f;
    int32_t warmup = lane % kRoundHeads < heads ? -1 : 0;
#pragma unroll 1
    for (int32_t round = 0; round * kRoundChunks < limit; ++round) {
      const int32_t last_chunk = at - 1 - round * kRoundChunks;
      const int32_t seen = (round + 1) * kRoundChunks, most = min(limit, at);
      const int c = lane / kRoundHeads;
      // Keys and gates are asked for at once: of heads that decay too slowly the keys are not needed, but what is read
      // here is read soon by the tiles. Not so where that is more than the memory brings in a few microseconds.
      const int32_t row = last_chunk * kChunk + kChunk - kRoundChunks * kChunk + thread;
      if (p.gates_first == 0 && thread < kRoundChunks * kChunk && row >= 0) {
        l2_prefetch(static_cast<const Element*>(args.k) + (static_cast<int64_t>(s.start) + row) * args.k_token_stride +
                        key_head * args.k_head_stride,
                    kHeadDim * sizeof(Element));
      }
      // A warp adds up a chunk of a head.
      const int j = warp / kRoundHeads, h = warp % kRoundHeads;
      const bool used = h < heads && last_chunk >= j;
      float beta[2] = {1.0f, 1.0f};
      float gate = 0.0f;
      if (used) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int64_t row = s.start + static_cast<int64_t>(last_chunk - j) * kChunk + lane + 32 * i;
          if (args.g != nullptr) {
            const float g = args.g[row * args.g_token_stride + (first_head + h) * args.g_head_stride];
            gate += g < kGateFloor ? kGateFloor : g;
          }
          if (args.beta != nullptr) {
            beta[i] = args.beta[row * args.beta_token_stride + (first_head + h) * args.beta_head_stride];
          }
        }
      }
      // That the rate of a head's gates is too low, whatever the keys are.
      const auto too_slow = [&](float gates_of_round) {
        return static_cast<float>(limit) * gates_of_round > static_cast<float>(min(seen, at)) * args.decay_threshold;
      };
      constexpr int kLastChunk = 32 - kRoundHeads;  // the lanes that look at the last chunk of a round
      // Chunks whose keys are read: where gates come first, those that the gates alone would do with.
      int32_t asked = kRoundChunks;
      if (p.gates_first != 0) {
        gate = warp_sum(gate);
        if (lane == 0) early_decay[j][h] = gate;
        __syncthreads();
        const float gates = sum + sum_of_chunks_before(early_decay[c][lane % kRoundHeads], lane);
        const int enough = first_chunk_where(round * kRoundChunks + c < most && gates <= args.decay_threshold, lane);
        const bool slow = too_slow(__shfl_sync(0xffffffffu, gates, kLastChunk + lane % kRoundHeads));
        asked = warmup >= 0 ? 0 : enough < kRoundChunks ? enough + 1 : slow ? 0 : kRoundChunks;
        asked = __reduce_max_sync(0xffffffffu, asked);
      }
#pragma unroll 1
      for (;; asked = kRoundChunks) {
#pragma unroll 1
        for (int t = thread / kThreadsPerKey; t < asked * kChunk; t += kPlanThreads / kThreadsPerKey) {
          const int32_t chunk = last_chunk - t / kChunk;
          float squares = 0.0f;
          if (chunk >= 0) {
            const int64_t token = s.start + static_cast<int64_t>(chunk) * kChunk + t % kChunk;
            const uint4* key = reinterpret_cast<const uint4*>(
                static_cast<const Element*>(args.k) + token * args.k_token_stride + key_head * args.k_head_stride);
#pragma unroll
            for (int i = 0; i < kHeadDim / 8 / kThreadsPerKey; ++i) {
              squares += sum_of_squares<Element>(key[i * kThreadsPerKey + thread % kThreadsPerKey]);
            }
          }
          squares += __shfl_xor_sync(0xffffffffu, squares, 1);
          squares += __shfl_xor_sync(0xffffffffu, squares, 2);
          if (thread % kThreadsPerKey == 0) key_squares[t] = squares;
        }
        __syncthreads();
        float growth = 0.0f;
        if (used && j < asked) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float factor = fabsf(1.0f - beta[i] * key_squares[j * kChunk + lane + 32 * i]);
            // Not fmaxf: NaN must stay, and make the boundary heavy.
            growth += factor <= 1.0f ? 0.0f : __logf(factor);
          }
        }
        if (p.gates_first == 0) gate = warp_sum(gate);  // not before: the keys would be asked for when it is there
        growth = warp_sum(growth);
        if (lane == 0) {
          decay[j][h] = gate;
          total[j][h] = gate + growth;
        }
        __syncthreads();
        const float gates = sum + sum_of_chunks_before(decay[c][lane % kRoundHeads], lane);
        const float sums = sum + sum_of_chunks_before(total[c][lane % kRoundHeads], lane);
        const int found =
            first_chunk_where(c < asked && round * kRoundChunks + c < most && sums <= args.decay_threshold, lane);
        const float gates_of_round = __shfl_sync(0xffffffffu, gates, kLastChunk + lane % kRoundHeads);
        const float sum_of_round = __shfl_sync(0xffffffffu, sums, kLastChunk + lane % kRoundHeads);
        if (warmup < 0) {
          if (found < kRoundChunks) {
            warmup = round * kRoundChunks + found + 1;
          } else if (too_slow(gates_of_round)) {
            warmup = 0;
          } else if (asked == kRoundChunks && seen >= most) {
            warmup = reaches_start(at, limit, args.decay_threshold, sum_of_round) ? at : 0;
          }
        }
        // All keys of the round, should those have been too few.
        if (asked == kRoundChunks || __all_sync(0xffffffffu, warmup >= 0)) {
          sum = sum_of_round;
          break;
        }
      }
      if (__all_sync(0xffffffffu, warmup >= 0)) break;
    }
    if (thread < heads) {
      p.workspace.warmups[number * args.num_value_heads + first_head + thread] = static_cast<uint8_t>(max(warmup, 0));
    }
    if (unit + units_blocks < p.units) __syncthreads();  // the sums of this unit have been read
  }
}

// --- the lists ---

// A warp for each part of a choice; more threads would have too few registers.
constexpr int kListThreads = 64 * kMerges;
constexpr int kListWarps = kListThreads / 32;

// Visits the segments of one sequence and head by `width` neighbouring lanes of a warp, 1 .. 32 and a power of two. All
// of the warp's groups of lanes go through `most_pieces` boundaries together; those whose plan is not `wanted` come
// along.
template <typename Warmups, typename Sink>
__device__ void emit_head(const HeadPlan<Warmups>& plan, bool wanted, Sink& sink, int lane, int width,
                          int32_t most_pieces) {
  const int first_lane = lane / width * width;
  const uint32_t mask = width == 32 ? ~0u : (1u << width) - 1;
  SegmentCarry carry;
#pragma unroll 1
  for (int32_t base = 1; base <= most_pieces; base += width) {
    const int32_t i = base + lane - first_lane;
    bool ends = false, heavy = false;
    if (wanted && i <= plan.cuts.pieces) plan.classify(i, &ends, &heavy);
    SegmentRound round;
    round.base = base;
    round.ends = __ballot_sync(0xffffffffu, ends) >> first_lane & mask;
    round.heavy = __ballot_sync(0xffffffffu, heavy) >> first_lane & mask;
    if (ends) plan.emit(round, carry, lane - first_lane, sink);
    plan.advance(round, &carry);
  }
}

// Warps that hold the state's rows of half of V.
constexpr uint32_t kWarpsOfHalf = 4;

// Tiles that are kept from counting to placing; of a larger plan they are worked out again. A call that is not forced
// has at most kMostItemsPerSm boundaries to an SM, and seldom more than two tiles for each.
constexpr int32_t kKeptTiles = 1024;
struct KeptTiles {
  Tile tile[kKeptTiles];
  uint16_t rank[kKeptTiles];  // in its bucket
};

// Counts the tiles of each bucket, then places them.
struct TileSink {
  bool placing, in_place;
  int32_t heads;
  int32_t* next;  // [kTileBuckets] shared: tiles of the bucket; where the bucket's next one goes in its list
  int32_t *chains_used, *tiles_used;
  KeptTiles* kept;
  SplitWorkspace workspace;
  __device__ void tile(const Tile& t) const {
    const int32_t n = atomicAdd(&next[tile_bucket(t, in_place)], 1);
    if (placing) {
      put(t, n);
      return;
    }
    const int32_t i = atomicAdd(tiles_used, 1);
    if (i < kKeptTiles) {
      kept->tile[i] = t;
      kept->rank[i] = static_cast<uint16_t>(n);
    }
    count_reader(t);
  }
  __device__ void count_reader(const Tile& t) const {
    if (!in_place || !(t.flags & kTileFromStart)) return;
    uint32_t* readers = workspace.readers + 2 * (static_cast<int64_t>(t.sequence) * heads + t.head);
    for (int half = 0; half < 2; ++half) atomicAdd(readers + half, kWarpsOfHalf);
  }
  __device__ void put(const Tile& t, int32_t n) const {
    (t.flags & kTileToSlot ? workspace.state_tiles : workspace.output_tiles)[n] = t;
  }
  __device__ void chain(const TransitionChain& c) const {
    if (!placing) workspace.chains[atomicAdd(chains_used, 1)] = c;
  }
};

// Places the tiles of an even plan.
struct EvenSink {
  SplitWorkspace workspace;
  __device__ void state(int32_t at, const Tile& t) const { put(workspace.state_tiles + at, t); }
  __device__ void output(int32_t at, const Tile& t) const { put(workspace.output_tiles + at, t); }
  __device__ void chain(int32_t at, const TransitionChain& c) const { workspace.chains[at] = c; }

 private:
  static __device__ void put(Tile* to, const Tile& t) {
    int4 words[2];
    memcpy(words, &t, sizeof(words));
    static_assert(sizeof(words) == sizeof(t));
    reinterpret_cast<int4*>(to)[0] = words[0];
    reinterpret_cast<int4*>(to)[1] = words[1];
  }
};
// Of a plan that may be even: sequences times heads, two to a lane, and pieces of each, which bound its segments.
constexpr int32_t kEvenWords = 2;
constexpr int32_t kMostEvenHeads = 32 * kEvenWords;
constexpr int32_t kMostEvenPieces = 128;

// Sums over a warp, of numbers that are not negative.
__device__ void sum_over_warp(TileClass& tiles) {
  tiles.work = warp_sum(tiles.work);
  tiles.tiles = __reduce_add_sync(0xffffffffu, tiles.tiles);
  tiles.longest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(tiles.longest)));
}
__device__ void sum_over_warp(SplitEstimate& estimate) {
  sum_over_warp(estimate.states);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum_over_warp(estimate.free[i]);
    sum_over_warp(estimate.dependent[i]);
  }
  estimate.transitions = __reduce_add_sync(0xffffffffu, estimate.transitions);
  estimate.longest_chain = __reduce_max_sync(0xffffffffu, estimate.longest_chain);
}

// SmGroups, a group to each of eight neighbouring lanes, which go through the same estimate. All lanes of a warp go
// along: with masks of eight lanes the parts of a warp would take turns.
class LaneGroups {
 public:
  __device__ explicit LaneGroups(int lane) : lane_(lane % kSmGroups), first_(lane - lane_) {}
  __device__ void put(float time, int32_t count) {
    const uint32_t together = lanes_where(sms_ > 0 && fabsf(time - at_) < kTogether), room = lanes_where(sms_ == 0);
    const uint32_t places = together != 0 ? together : room != 0 ? room : 1;
    if (lane_ != __ffs(static_cast<int>(places)) - 1) return;
    if (sms_ == 0) at_ = time;
    sms_ += count;
  }
  __device__ float next(int32_t* count) {
    constexpr float kNever = 1e30f;
    const float own = sms_ > 0 ? at_ : kNever;
    float first = own;
#pragma unroll
    for (int step = kSmGroups / 2; step > 0; step /= 2) {
      first = fminf(first, __shfl_xor_sync(0xffffffffu, first, step));
    }
    next_ = __ffs(static_cast<int>(lanes_where(own == first))) - 1;
    *count = __shfl_sync(0xffffffffu, sms_, next_, kSmGroups);
    return first;
  }
  __device__ void take(int32_t count) {
    if (lane_ == next_) sms_ -= count;
  }
  __device__ static bool any(bool more) { return __any_sync(0xffffffffu, more); }

 private:
  __device__ uint32_t lanes_where(bool x) const {
    return __ballot_sync(0xffffffffu, x) >> first_ & ((1u << kSmGroups) - 1);
  }
  int lane_, first_, next_ = 0;
  float at_ = 0.0f;
  int32_t sms_ = 0;
};
static_assert(kSmGroups == 8);

// kTilesPerSmUnsplit to an SM of a card of up to 144.
constexpr int32_t kMostSummaries = 2304;
// What is kept in shared memory; a larger batch's is read again where it is needed. Of a call that is not forced there
// are at most kMostItemsPerSm boundaries to an SM and one more for each head.
constexpr int32_t kKeptSequences = 128;
constexpr int32_t kKeptWarmups = 2048;

// The best of all choices, by all threads of a block, from what is known of each head; and its state tiles.
struct ChosenMerges {
  int32_t choice, state_tiles;
};
// Not inlined: what it takes a second time in a kernel is in the caches. Arguments by value: the caller's would else be
// in memory.
__device__ __noinline__ ChosenMerges choose_merges(const SplitKernelParams& p, const HeadSummary* summaries,
                                                   int32_t count, LengthSummary lengths, SplitGrid grid) {
  __shared__ SplitEstimate estimates[2][kMerges];
  __shared__ float choice_times[kMergeChoices];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // A warp for each part of a choice, then eight threads for each choice.
  const bool with_heavy = warp >= kMerges;
  const int32_t step = merge_step(warp % kMerges);
  const float limit = long_tile(lengths.longest, grid, step);
  SplitEstimate estimate;
  for (int32_t i = lane; i < count; i += 32) {
    const HeadSummary head = summaries[i];
    if ((head.heavy > 0) == with_heavy) estimate.add(head, step, limit, p.costs);
  }
  sum_over_warp(estimate);
  if (lane == 0) estimates[with_heavy][warp % kMerges] = estimate;
  __syncthreads();
  static_assert(kListThreads == kMergeChoices * kSmGroups);
  const int choice = thread / kSmGroups;
  const float uncut = p.uncut_shared != 0 ? time_of_shared(lengths, p.args.num_value_heads, p.sms, p.costs) : 0.0f;
  const float own_time = time_of_choice(estimates[0][choice % kMerges], estimates[1][choice / kMerges], choice, uncut,
                                        p.sms, p.costs, LaneGroups(lane));
  if (thread % kSmGroups == 0) choice_times[choice] = own_time;
  __syncthreads();
  // Every warp looks for the best one, of equals the first.
  int best = lane;
#pragma unroll
  for (int i = lane + 32; i < kMergeChoices; i += 32) best = choice_times[i] < choice_times[best] ? i : best;
  float time = choice_times[best];
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, time, i);
    const int other_best = __shfl_xor_sync(0xffffffffu, best, i);
    if (other < time || (other == time && other_best < best)) {
      time = other;
      best = other_best;
    }
  }
  return {best, estimates[1][best / kMerges].states.tiles};
}

// The kernels that go by the plan do not wait for this one's end.
__device__ void publish_plan(const SplitWorkspace& ws) {
  __threadfence();
  *static_cast<volatile uint32_t*>(&ws.counters->made) = 1;
}

// The lists where no head decays and heads are not cut by whole pieces. Not inlined: it would lie between what other
// gates ask for.
__device__ __noinline__ void list_undecayed_tiles(const SplitKernelParams& p, const CutSequence* cuts, SplitGrid grid) {
  const int32_t heads = p.args.num_value_heads, thread = static_cast<int32_t>(threadIdx.x);
  const UndecayedPlan plan{p.usual_choices.undecayed, p.args.num_sequences * heads};
  const SplitWorkspace& ws = p.workspace;
  if (thread == 0) {
    *static_cast<volatile uint32_t*>(&ws.start->announced) =
        (pair_of_sms() << 16 | static_cast<uint32_t>(plan.state_tiles())) + 1;
  }
  const auto none = [](int32_t) { return 0; };
  const int32_t all = plan.heads * plan.split.segments;
#pragma unroll 1
  for (int32_t i = thread; i < 3 * all; i += kListThreads) {
    const int32_t tile = i / all, k = (i - tile * all) / plan.heads, pair = i - tile * all - k * plan.heads;
    const int32_t sequence = p.by_heads.divide(pair);
    const HeadPlan head(cuts[sequence], pair - sequence * heads, grid, SplitMerge{}, p.capacity.boundaries, none);
    plan.emit(head, pair, k, tile, EvenSink{ws});
  }
  if (thread == kListThreads - 1) {
    SplitCounters counters{};
    counters.states.tiles = plan.state_tiles();
    counters.outputs.tiles = plan.free_tiles();
    counters.halves.tiles = plan.free_tiles();
    counters.halves.dependent_tiles = plan.dependent_tiles();
    // The free ones are the other kernel's. Pairs take tickets behind the plan.
    ws.start->halves.ticket = static_cast<uint32_t>(plan.free_tiles());
    counters.progress.states_left = static_cast<uint32_t>(plan.states_left());
    counters.progress.pieces_left = counters.progress.pieces = static_cast<uint32_t>(plan.chains() * kCombineSlices);
    counters.planner_pair = pair_of_sms();
    counters.spacing = grid.spacing;
    counters.even = 1;
    *ws.counters = counters;
  }
  __syncthreads();  // the lists are there
  if (thread == 0) publish_plan(ws);
}

// One block. The order of tiles within a bucket varies from run to run; what is computed does not depend on it.
__global__ void __launch_bounds__(kListThreads, 1) list_tiles_kernel(const __grid_constant__ SplitKernelParams p) {
  asm volatile("griddepcontrol.launch_dependents;");
  const ChunkForwardArgs& args = p.args;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t heads = args.num_value_heads, n = args.num_sequences;
  const SplitWorkspace& ws = p.workspace;
  if (p.least_longest != 0 && load_now(ws.cut) == 0) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    return;
  }
  PlannedSequence own{0, 0, 0, 0};
  const LengthSummary lengths = summarise_lengths<kListThreads>(args, &own);
  const SplitGrid grid = choose_grid(p, lengths);
  const int32_t most_pieces = pieces_of(lengths.longest, grid);
  // Lanes that a sequence and head get.
  int width = 1;
  while (width < 32 && width < most_pieces) width *= 2;

  __shared__ int32_t buckets[kTileBuckets];
  __shared__ int32_t state_tiles, first_tiles, free_tiles, chains_used, tiles_used, chunks_before;
  __shared__ int32_t kinds;  // heads with a heavy boundary, and kUnusual for each whose warm-ups are not the usual ones
  __shared__ int32_t guessed_heavy;  // of those that the choice was made for beforehand
  constexpr int32_t kUnusual = 1 << 16;
  __shared__ EvenSegment segments[2][kMostEvenPieces];
  __shared__ int32_t boundary_sums[kMostEvenHeads];  // of a head: kHeavyBoundary for each heavy one, and warm-ups
  constexpr int32_t kHeavyBoundary = 1 << 16;
  constexpr int32_t kOutOfPlace = 1 << 25;  // ... and this by each warp: the head is not one of an even plan
  static_assert(kMostEvenPieces * kMaxWarmup < kHeavyBoundary && kMostEvenPieces * kHeavyBoundary < kOutOfPlace &&
                kListWarps * int64_t{kOutOfPlace} < INT32_MAX);
  __shared__ int32_t warp_sums[kListWarps];
  __shared__ CutSequence kept_sequences[kKeptSequences];
  __shared__ uint4 kept_warmups[kKeptWarmups / 16];
  // The summaries have been used when the first tile is kept.
  __shared__ union Kept {
    HeadSummary summaries[kMostSummaries];
    KeptTiles tiles;
    __device__ Kept() {}
  } kept;
  // Pairs of SMs on which boundaries are classified, by bits: the state kernel's blocks come late there.
  constexpr uint32_t kLateWords = SplitStart::kPairs / 32;
  __shared__ uint32_t late_pairs[kLateWords];
  static_assert(kMostUnitBlocks <= kListThreads);
  const uint32_t classifier = thread < p.unit_blocks ? load_now(ws.classifiers + thread) : ~0u;
  if (thread < static_cast<int>(kLateWords)) late_pairs[thread] = 0;
  buckets[thread] = 0;
  if (thread == 0) chains_used = tiles_used = chunks_before = kinds = guessed_heavy = 0;
  __syncthreads();

  if (classifier < SplitStart::kPairs) atomicOr(&late_pairs[classifier / 32], 1u << classifier % 32);
  const int32_t pairs = n * heads;
  bool cut = grid.spacing > 0;
  const bool chosen = args.split == SplitMode::kAuto && args.force_split == 0 && cut;
  // Heads beyond the room for their summaries do not take part in the choice; there is always room for as many as a
  // call may have that is planned without being forced to.
  const int32_t summarised = min(pairs, kMostSummaries);
  const bool expected = p.least_longest == 0 && lengths == p.expected_lengths;
  const bool kept_here = p.capacity.slots <= kKeptWarmups;
  const auto tell = [&](uint32_t* to, const ChosenMerges& best) {
    if (thread != 0 || summarised != pairs || best.state_tiles > UINT16_MAX) return;
    *static_cast<volatile uint32_t*>(to) = (pair_of_sms() << 16 | static_cast<uint32_t>(best.state_tiles)) + 1;
  };
  // Until there is a plan nothing can begin. Of the expected lengths it is made in few steps, if it is even: what
  // depends on no gate is there before, for the choice that a quarter of the heads heavy would ask for.
  const bool may_be_even = chosen && expected && kept_here && p.in_place == 0 && pairs <= kMostEvenHeads &&
                           most_pieces > 1 && most_pieces <= kMostEvenPieces;
  if (p.unit_blocks != 0) __syncthreads();
  // The order in which pairs of SMs get state tiles: from the planner's on, those first on which no boundaries are
  // classified.
  if (thread < SplitStart::kPairs) {
    const uint32_t all = static_cast<uint32_t>(p.sms + 1) / 2, own = pair_of_sms(),
                   pair = static_cast<uint32_t>(thread);
    const uint32_t behind = pair > own ? pair - own : all + pair - own;  // of its place without those
    uint32_t place = pair == own || pair >= all ? all : behind;
    if (p.unit_blocks != 0 && place != all) {
      uint32_t late = 0, all_late = 0;  // of the pairs up to there, and of all
#pragma unroll
      for (uint32_t i = 0; i < kLateWords; ++i) {
        const auto below = [&](uint32_t n) {
          return n <= 32 * i ? 0u : n >= 32 * i + 32 ? ~0u : (1u << (n - 32 * i)) - 1;
        };
        const uint32_t before = below(own), up_to_own = below(own + 1), up_to = below(pair + 1);
        const uint32_t others = late_pairs[i] & ~(up_to_own & ~before);
        late += __popc(others & (pair > own ? up_to & ~up_to_own : up_to | ~up_to_own));
        all_late += __popc(others);
      }
      const bool is_late = (late_pairs[pair / 32] >> pair % 32 & 1) != 0;
      place = is_late ? all - 1 - all_late + late : behind - late;
    }
    *static_cast<volatile uint32_t*>(&ws.start->place[pair]) = place;
  }
  // Before blocks come that have waited for an SM where boundaries are classified.
  ChosenMerges likely{0, 0};
  if (may_be_even) {
    likely.choice = max(p.usual_choices.choice(pairs / 4, pairs, &likely.state_tiles), 0);
    tell(&ws.start->likely, likely);
  }
  // Where sequences are cut; a larger batch's are kept in memory.
  CutSequence* const cuts = n <= kKeptSequences ? kept_sequences : ws.cuts;
  const bool number_chunks = args.h != nullptr && args.cu_seqlens != nullptr;
#pragma unroll 1
  for (int32_t first = 0; first < n; first += kListThreads) {
    const int32_t i = first + thread;
    PlannedSequence s{0, 0, i, 0};
    if (i < n) s = sequence_at(args, i);
    if (number_chunks) {
      const int32_t chunks = chunks_in(s.length);
      int32_t inclusive = chunks;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += below;
      }
      if (lane == 31) warp_sums[warp] = inclusive;
      __syncthreads();
      int32_t before = chunks_before;
#pragma unroll 1
      for (int w = 0; w < warp; ++w) before += warp_sums[w];
      s.first_chunk = before + inclusive - chunks;
      __syncthreads();
      if (thread == kListThreads - 1) chunks_before = before + inclusive;
      __syncthreads();
    }
    if (i >= n) continue;
    // A skipped sequence has no state tiles: the chains wait for all that are listed.
    if (initial_slot(args, i) == kSkipSequence) s.length = 0;
    cuts[i] = CutSequence(s, grid);
  }
  // Of other lengths than the expected ones the choice is made for a quarter of the heads without decay while the
  // boundaries are classified. If it is not that, its instructions are in the caches.
  ChosenMerges guess{-1, 0};
  if (chosen && !expected) {
    __syncthreads();
#pragma unroll 1
    for (int32_t pair = thread; pair < summarised; pair += kListThreads) {
      const int32_t i = p.by_heads.divide(pair), boundaries = cuts[i].pieces - 1;
      const bool heavy = (pair - i * heads) % 4 == 3;
      kept.summaries[pair] = {cuts[i].chunks, boundaries + 1, heavy ? boundaries : 0,
                              heavy ? 0 : kUsualWarmup * boundaries};
      if (heavy && boundaries > 0) atomicAdd(&guessed_heavy, 1);
    }
    __syncthreads();
    guess = choose_merges(p, kept.summaries, summarised, lengths, grid);
  }
  const uint8_t* warmups = ws.warmups;
  if (kept_here) warmups = reinterpret_cast<const uint8_t*>(kept_warmups);
  auto warmups_of = [warmups, heads](int32_t head) {
    return [warmups, heads, head](int32_t number) {
      return static_cast<int32_t>(warmups[static_cast<int64_t>(number) * heads + head]);
    };
  };
  auto head_plan = [&](int32_t pair, const SplitMerge& merge) {
    const int32_t i = min(p.by_heads.divide(pair), n - 1), head = pair - i * heads;
    return HeadPlan(cuts[i], head, grid, merge, p.capacity.boundaries, warmups_of(head));
  };
  // By one thread.
  const auto write_counters = [&](int32_t states, int32_t first, int32_t free, int32_t dependent, int32_t chains,
                                  const SplitMerge& merge, bool even) {
    const bool halves = !cut && p.uncut_shared != 0;
    SplitCounters counters{};
    counters.states.tiles = states;
    counters.outputs.tiles = halves ? 0 : free;
    counters.outputs.dependent_tiles = dependent;  // none where nothing is cut
    counters.halves.tiles = halves ? free : 0;
    counters.progress.states_left = static_cast<uint32_t>(states * kStateWarps);
    counters.progress.pieces_left = counters.progress.pieces = static_cast<uint32_t>(chains * kCombineSlices);
    counters.progress.first_tiles = static_cast<uint32_t>(first);
    counters.planner_pair = pair_of_sms();
    counters.spacing = grid.spacing;
    counters.light_merge = merge.light;
    counters.heavy_merge = merge.heavy;
    counters.even = even;
    *ws.counters = counters;
  };

  const auto wait_for_warmups = [&] {
    // The boundaries' kernel is waited for here.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // Whole vectors: the workspace has room for them.
    if (kept_here && 16 * thread < p.capacity.slots) {
      kept_warmups[thread] = reinterpret_cast<const uint4*>(ws.warmups)[thread];
    }
  };
  if (may_be_even) {
    ChosenMerges best = likely;
    EvenPlan even(most_pieces, merge_choice(best.choice));
    const auto make_segments = [&] {
      for (int32_t i = thread; i < 2 * kMostEvenPieces; i += kListThreads) {
        const bool is_heavy = i >= kMostEvenPieces;
        const int32_t k = i % kMostEvenPieces;
        if (k < (is_heavy ? even.heavy : even.light).joined) segments[is_heavy][k] = even.segment(cuts[0], is_heavy, k);
      }
    };
    __syncthreads();  // segments read where the first sequence is cut, which one thread has written
    make_segments();
    if (thread < kMostEvenHeads) boundary_sums[thread] = 0;
    wait_for_warmups();
    __syncthreads();
    // A lane to each head, and the boundaries to the warps.
#pragma unroll
    for (int32_t word = 0; word < kEvenWords; ++word) {
      const int32_t pair = 32 * word + lane;
      if (pair >= pairs) continue;
      const int32_t i = p.by_heads.divide(pair), head = pair - i * heads;
      const CutSequence& sequence = cuts[i];
      int32_t sum = sequence.pieces == most_pieces ? 0 : kOutOfPlace;
#pragma unroll 1
      for (int32_t boundary = 1 + warp; boundary < most_pieces; boundary += kListWarps) {
        const int32_t number = sequence.number(boundary, grid);
        if (number >= p.capacity.boundaries) {
          sum = kOutOfPlace;
          break;
        }
        const int32_t warmup = warmups[number * heads + head];
        sum += warmup == 0 ? kHeavyBoundary : warmup;
      }
      if (warp < most_pieces) atomicAdd(&boundary_sums[pair], sum);
    }
    __syncthreads();
    uint32_t heavy_heads[kEvenWords];  // by bits; the same in all warps
    bool usual = true, is_even = true;
    int32_t heavy = 0;
#pragma unroll
    for (int32_t word = 0; word < kEvenWords; ++word) {
      const int32_t pair = 32 * word + lane, sum = pair < pairs ? boundary_sums[pair] : 0;
      const int32_t boundaries = most_pieces - 1, heavies = sum / kHeavyBoundary, total = sum % kHeavyBoundary;
      heavy_heads[word] = __ballot_sync(0xffffffffu, heavies > 0);
      heavy += __popc(heavy_heads[word]);
      is_even = is_even && !__any_sync(0xffffffffu, heavies != 0 && heavies != boundaries);
      usual = usual && !__any_sync(0xffffffffu, pair < pairs && heavies == 0 &&
                                                    (total < UsualChoices::kLeastWarmup * boundaries ||
                                                     total > UsualChoices::kMostWarmup * boundaries));
      if (warp == 0 && pair < pairs) {
        kept.summaries[pair] = {cuts[p.by_heads.divide(pair)].chunks, most_pieces, heavies, total};
      }
    }
    if (is_even) {
      if (heavy == pairs && p.usual_choices.undecayed.segments != 0) {
        list_undecayed_tiles(p, cuts, grid);
        return;
      }
      const int32_t before = best.choice;
      if (usual) best.choice = p.usual_choices.choice(heavy, pairs, &best.state_tiles);
      if (!usual || best.choice < 0) {
        __syncthreads();  // the summaries are there
        best = choose_merges(p, kept.summaries, summarised, lengths, grid);
      }
      tell(&ws.start->announced, best);
      const SplitMerge merge = merge_choice(best.choice);
      if (best.choice != before) {
        even = EvenPlan(most_pieces, merge);
        __syncthreads();
        make_segments();
        __syncthreads();
      }
      cut = best.choice != kMergeChoices - 1;
      const EvenCounts counts{pairs - heavy, heavy};
      const EvenSink sink{ws};
      const int32_t most = even.most_segments(), all = pairs * most;
      const Divisor by_segments(most);
#pragma unroll 1
      for (int32_t i = thread; i < 3 * all; i += kListThreads) {
        const int32_t tile = i < all ? 0 : i < 2 * all ? 1 : 2;
        const int32_t pair = by_segments.divide(i - tile * all), k = i - tile * all - pair * most;
        int32_t rank = 0;
        bool is_heavy = false;
#pragma unroll
        for (int32_t word = 0; word < kEvenWords; ++word) {
          const int32_t place = pair - 32 * word;
          if (place >= 32) rank += __popc(heavy_heads[word]);
          if (place < 0 || place >= 32) continue;
          rank += __popc(heavy_heads[word] & ((1u << place) - 1));
          is_heavy = (heavy_heads[word] >> place & 1) != 0;
        }
        if (k >= (is_heavy ? even.heavy : even.light).joined) continue;
        even.emit(segments[is_heavy][k], head_plan(pair, merge), counts, is_heavy, is_heavy ? rank : pair - rank, k,
                  tile, sink);
      }
      if (thread == kListThreads - 1) {
        write_counters(even.state_tiles(counts), 0, even.free_tiles(counts), even.dependent_tiles(counts),
                       even.chains(counts), merge, true);
      }
      __syncthreads();  // the lists are there
      if (thread == 0) publish_plan(ws);
      return;
    }
  }

  if (!may_be_even) wait_for_warmups();
  __syncthreads();
  const int32_t first_pair = thread / width, pairs_at_once = kListThreads / width;
  SplitMerge merge;
  if (chosen) {
    int32_t own_kinds = 0;
#pragma unroll 1
    for (int32_t pair = first_pair; pair - lane / width < summarised; pair += pairs_at_once) {
      const auto plan = head_plan(pair, merge);
      const int first_lane = lane / width * width;
      const uint32_t group = (width == 32 ? ~0u : (1u << width) - 1) << first_lane;
      int32_t heavy = 0, total = 0;
      for (int32_t i = 1 + lane - first_lane; i < plan.cuts.pieces; i += width) {
        const int32_t warmup = plan.warmup_at(i);
        heavy += warmup == 0;
        total += warmup;
      }
      heavy = __reduce_add_sync(group, heavy);
      total = __reduce_add_sync(group, total);
      if (lane == first_lane && pair < summarised) {
        kept.summaries[pair] = {plan.cuts.chunks, plan.cuts.pieces, heavy, total};
        const int32_t boundaries = plan.cuts.pieces - 1;
        own_kinds += heavy > 0 ? 1
                     : total < UsualChoices::kLeastWarmup * boundaries || total > UsualChoices::kMostWarmup * boundaries
                         ? kUnusual
                         : 0;
      }
    }
    own_kinds = __reduce_add_sync(0xffffffffu, own_kinds);
    if (lane == 0 && own_kinds != 0) atomicAdd(&kinds, own_kinds);
    __syncthreads();
    ChosenMerges best = guess;
    const bool usual = kinds < kUnusual;
    if (usual && expected) best.choice = p.usual_choices.choice(kinds, pairs, &best.state_tiles);
    if (!usual || (!expected && kinds != guessed_heavy) || best.choice < 0) {
      best = choose_merges(p, kept.summaries, summarised, lengths, grid);
    }
    tell(&ws.start->announced, best);
    merge = merge_choice(best.choice);
    cut = best.choice != kMergeChoices - 1;
  }

  TileSink sink{false, p.in_place != 0, heads, buckets, &chains_used, &tiles_used, &kept.tiles, ws};
#pragma unroll 1
  for (;; sink.placing = true) {
    if (sink.placing && tiles_used <= kKeptTiles) {
      for (int i = thread; i < tiles_used; i += kListThreads) {
        const Tile t = kept.tiles.tile[i];
        sink.put(t, buckets[tile_bucket(t, sink.in_place)] + kept.tiles.rank[i]);
      }
      break;
    }
#pragma unroll 1
    for (int32_t pair = first_pair; pair - lane / width < pairs; pair += pairs_at_once) {
      emit_head(head_plan(pair, merge), pair < pairs, sink, lane, width, most_pieces);
    }
    if (sink.placing) break;
    __syncthreads();
    // Exclusive sums of the buckets, one to a thread: the state tiles' are those of the first warps, and a list of
    // their own.
    static_assert(kTileBuckets == kListThreads && kLengthBuckets % 32 == 0 && kListWarps <= 32);
    constexpr int kStateListWarps = kLengthBuckets / 32;
    const int32_t count = buckets[thread];
    int32_t inclusive = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
      if (lane >= step) inclusive += below;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const bool counts = lane < warp && (lane >= kStateListWarps) == (warp >= kStateListWarps);
    inclusive += __reduce_add_sync(0xffffffffu, counts ? warp_sums[lane] : 0);
    buckets[thread] = inclusive - count;
    if (thread == kLengthBuckets - 1) state_tiles = inclusive;
    if (thread == 2 * kLengthBuckets) first_tiles = inclusive - count;
    if (thread == 3 * kLengthBuckets) free_tiles = inclusive - count;
    __syncthreads();
    // By a thread that seldom has tiles to place.
    if (thread == kTileBuckets - 1) {
      write_counters(state_tiles, first_tiles, free_tiles, inclusive - free_tiles, chains_used, merge, false);
    }
  }
  __syncthreads();  // the lists are there
  if (thread == 0) publish_plan(ws);
}

}  // namespace

size_t lay_out_split(const ChunkForwardArgs& args, const SplitCapacity& capacity, void* base,
                     SplitWorkspace* workspace) {
  size_t used = 0;
  auto take = [&](size_t bytes) {
    char* place = static_cast<char*>(base) + used;
    used += (bytes + 255) / 256 * 256;
    return place;
  };
  const size_t n = static_cast<size_t>(std::max(args.num_sequences, 0));
  const size_t slots = static_cast<size_t>(capacity.slots);
  SplitWorkspace w;
  w.counters = reinterpret_cast<SplitCounters*>(take(sizeof(SplitCounters)));
  w.start = reinterpret_cast<SplitStart*>(take(sizeof(SplitStart)));
  w.classifiers = reinterpret_cast<uint32_t*>(take(sizeof(uint32_t) * kMostUnitBlocks));
  w.warmups = reinterpret_cast<uint8_t*>(take(slots));
  w.cuts = reinterpret_cast<CutSequence*>(take(sizeof(CutSequence) * n));
  w.cut = reinterpret_cast<int32_t*>(take(sizeof(int32_t)));
  w.unsplit = take(chunk_forward_workspace_size(args.num_sequences));
  w.readers = reinterpret_cast<uint32_t*>(take(2 * sizeof(uint32_t) * n * static_cast<size_t>(args.num_value_heads)));
  w.state_tiles = reinterpret_cast<Tile*>(take(sizeof(Tile) * static_cast<size_t>(capacity.state_tiles)));
  w.output_tiles = reinterpret_cast<Tile*>(take(sizeof(Tile) * static_cast<size_t>(capacity.output_tiles)));
  w.chains = reinterpret_cast<TransitionChain*>(take(sizeof(TransitionChain) * static_cast<size_t>(capacity.chains)));
  w.boundary_states = reinterpret_cast<float4*>(take(sizeof(float) * kHeadDim * kHeadDim * slots));
  const size_t rows = args.type == ElementType::kFloat16 ? sizeof(TransitionRows<kTransitionParts<__half>>)
                                                         : sizeof(TransitionRows<kTransitionParts<__nv_bfloat16>>);
  w.transitions = take(rows * kTransitionSteps * slots);
  if (workspace != nullptr) *workspace = w;
  return used;
}

cudaError_t launch_split_plan(SplitKernelParams params, cudaStream_t stream) {
  const ChunkForwardArgs& args = params.args;
  const int64_t longest = args.cu_seqlens != nullptr ? args.num_tokens : args.dense_length;
  params.expected_lengths = equal_lengths(longest, args.num_sequences, args.cu_seqlens == nullptr);
  params.group = args.num_value_heads / args.num_key_heads;
  params.parts = (params.group + kRoundHeads - 1) / kRoundHeads;
  params.by_parts = Divisor(params.parts);
  params.by_boundary_units = Divisor(args.num_key_heads * params.parts);
  params.by_heads = Divisor(args.num_value_heads);
  params.units = params.capacity.boundaries * args.num_key_heads * params.parts;
  // A block to each unit of the expected lengths, and a loop for those of others: the state kernel's blocks wait for
  // SMs where these have nothing to do.
  int64_t units = params.units;
  if (const int64_t spacing = params.expected_grid.spacing; spacing > 0) {
    const int64_t windows = divide_up(args.num_tokens, kChunk * spacing);
    units = std::min(units, windows * args.num_key_heads * params.parts);
  }
  // Behind an unsplit kernel, which leaves hardly any SM idle, no more than find room at once when it ends.
  const int at_once = (params.least_longest != 0 ? 1 : kClassifyBlocksPerSm) * params.sms;
  params.gates_first = params.units > kClassifyBlocksPerSm * params.sms;
  params.unit_blocks = static_cast<int32_t>(std::clamp<int64_t>(units, 1, std::min(at_once, kMostUnitBlocks)));
  // The state kernel's blocks come late where boundaries are classified. State tiles go elsewhere where there is room
  // for those that are likely: to that end these blocks come in twos, on pairs of SMs, as state tiles do. Not where
  // chains are in more pieces than there are state tiles: blocks that come late then help with them.
  int32_t likely_tiles = 0;
  const int32_t pairs = args.num_sequences * args.num_value_heads;
  bool by_pairs = false;
  if (args.split == SplitMode::kAuto && args.force_split == 0 && params.expected_grid.spacing > 0 &&
      params.usual_choices.choice(pairs / 4, pairs, &likely_tiles) >= 0 &&
      kCombineSlices * (pairs / 4) <= likely_tiles) {
    const int64_t room = params.sms - 1 - likely_tiles;
    by_pairs = params.unit_blocks <= room;
  }
  if (by_pairs) params.unit_blocks += params.unit_blocks % 2;
  static_assert(kMostUnitBlocks % 2 == 0 && kClearBlocks % 2 == 0);
  const int blocks = params.unit_blocks + params.clear_blocks;
  if (!by_pairs) params.unit_blocks = 0;  // the planner need not know
  const void* classify = args.type == ElementType::kFloat16
                             ? reinterpret_cast<const void*>(&classify_boundaries_kernel<__half>)
                             : reinterpret_cast<const void*>(&classify_boundaries_kernel<__nv_bfloat16>);
  const cudaError_t error = launch_kernel(classify, blocks, kPlanThreads, 0, params, true, stream, by_pairs ? 2 : 1);
  if (error != cudaSuccess) return error;
  return launch_kernel(reinterpret_cast<const void*>(&list_tiles_kernel), 1, kListThreads, 0, params, true, stream);
}

}  // namespace flash_qla::cuda::sm90
