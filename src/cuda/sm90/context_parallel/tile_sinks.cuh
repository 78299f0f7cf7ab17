// Where the planner puts tiles, and the tiles of one head by the lanes of a warp.
#pragma once

#include "cuda/sm90/context_parallel/plan_args.h"
#include "cuda/sm90/context_parallel/regular_plan.h"

namespace flash_qla::cuda::sm90::cp {

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

}  // namespace flash_qla::cuda::sm90::cp
