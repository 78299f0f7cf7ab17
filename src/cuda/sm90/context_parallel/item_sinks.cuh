// Where the planner puts items, and the items of one head by the lanes of a warp.
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
    bool ends = false, exact = false;
    if (wanted && i <= plan.cuts.pieces) plan.classify(i, &ends, &exact);
    SegmentRound round;
    round.base = base;
    round.ends = __ballot_sync(0xffffffffu, ends) >> first_lane & mask;
    round.exact = __ballot_sync(0xffffffffu, exact) >> first_lane & mask;
    if (ends) plan.emit(round, carry, lane - first_lane, sink);
    plan.advance(round, &carry);
  }
}

// Warps that hold the state's rows of half of V.
constexpr uint32_t kWarpsOfHalf = 4;

// Items that are kept from counting to placing; of a larger plan they are worked out again. A call that is not forced
// has at most kMostItemsPerSm boundaries to an SM, and seldom more than two items for each.
constexpr int32_t kKeptItems = 1024;
struct KeptItems {
  WorkItem item[kKeptItems];
  uint16_t rank[kKeptItems];  // in its bucket
};

// Counts the items of each bucket, then places them.
struct ItemSink {
  bool placing, in_place;
  int32_t heads;
  int32_t* next;  // [kItemBuckets] shared: items of the bucket; where the bucket's next one goes in its list
  int32_t *scans_used, *items_used;
  KeptItems* kept;
  PlanWorkspace workspace;
  __device__ void item(const WorkItem& t) const {
    const int32_t n = atomicAdd(&next[item_bucket(t, in_place)], 1);
    if (placing) {
      put(t, n);
      return;
    }
    const int32_t i = atomicAdd(items_used, 1);
    if (i < kKeptItems) {
      kept->item[i] = t;
      kept->rank[i] = static_cast<uint16_t>(n);
    }
    count_reader(t);
  }
  __device__ void count_reader(const WorkItem& t) const {
    if (!in_place || !(t.flags & kItemFromStart)) return;
    uint32_t* readers = workspace.readers + 2 * (static_cast<int64_t>(t.sequence) * heads + t.head);
    for (int half = 0; half < 2; ++half) atomicAdd(readers + half, kWarpsOfHalf);
  }
  __device__ void put(const WorkItem& t, int32_t n) const {
    (t.flags & kItemToCutState ? workspace.state_items : workspace.output_items)[n] = t;
  }
  __device__ void scan(const Scan& c) const {
    if (!placing) workspace.scans[atomicAdd(scans_used, 1)] = c;
  }
};

// Places the items of an regular plan.
struct RegularSink {
  PlanWorkspace workspace;
  __device__ void state(int32_t at, const WorkItem& t) const { put(workspace.state_items + at, t); }
  __device__ void output(int32_t at, const WorkItem& t) const { put(workspace.output_items + at, t); }
  __device__ void scan(int32_t at, const Scan& c) const { workspace.scans[at] = c; }

 private:
  static __device__ void put(WorkItem* to, const WorkItem& t) {
    int4 words[2];
    memcpy(words, &t, sizeof(words));
    static_assert(sizeof(words) == sizeof(t));
    reinterpret_cast<int4*>(to)[0] = words[0];
    reinterpret_cast<int4*>(to)[1] = words[1];
  }
};
// Of a plan that may be regular: sequences times heads, two to a lane, and pieces of each, which bound its segments.
constexpr int32_t kRegularWords = 2;
constexpr int32_t kMostRegularHeads = 32 * kRegularWords;
constexpr int32_t kMostRegularPieces = 128;

}  // namespace flash_qla::cuda::sm90::cp
