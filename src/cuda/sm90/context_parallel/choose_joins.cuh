// The best of all choices, by all threads of the listing kernel.
#pragma once

#include "cuda/sm90/context_parallel/plan_args.h"
#include "cuda/sm90/context_parallel/plan_device.cuh"

namespace flash_qla::cuda::sm90::cp {

// Sums over a warp, of numbers that are not negative.
__device__ void sum_over_warp(ItemClass& items) {
  items.work = warp_sum(items.work);
  items.items = __reduce_add_sync(0xffffffffu, items.items);
  items.longest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(items.longest)));
}
__device__ void sum_over_warp(ItemEstimate& estimate) {
  sum_over_warp(estimate.states);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum_over_warp(estimate.free[i]);
    sum_over_warp(estimate.dependent[i]);
  }
  estimate.transitions = __reduce_add_sync(0xffffffffu, estimate.transitions);
  estimate.longest_scan = __reduce_max_sync(0xffffffffu, estimate.longest_scan);
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

// Kinds of heads, one number a sequence and head: of a decaying one the chunks of all warm-ups together, else one of
// these.
inline constexpr int32_t kExactHead = -1;
FLASH_QLA_HOST_DEVICE constexpr int32_t carried_head(int32_t segments) { return kExactHead - segments; }

__device__ HeadSummary summary_of(int32_t kind, const CutSequence& cuts) {
  const int32_t exact = kind >= 0 ? 0 : kind == kExactHead ? 1 : kind - kExactHead;
  return {cuts.chunks, cuts.pieces, exact, kind};
}

// The best of all choices, by all threads of a block, for `count` heads.
// Not inlined: what it takes a second time in a kernel is in the caches. Arguments by value: the caller's would else be
// in memory.
static __device__ __noinline__ int32_t choose_joins(const PlanArgs& p, const PlannedSequence* sequences,
                                                    const int32_t* kinds, int32_t count, LengthSummary lengths,
                                                    CutSpacing cut_spacing) {
  __shared__ ItemEstimate estimates[2][kJoins];
  __shared__ float choice_times[kJoinChoices];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  // A warp for each part of a choice, then eight threads for each choice.
  const bool with_exact = warp >= kJoins;
  const int32_t step = join_step(warp % kJoins);
  const float limit = long_item(lengths.longest, cut_spacing, step);
  ItemEstimate estimate;
  for (int32_t i = lane; i < count; i += 32) {
    const CutSequence& cuts = sequences[p.by_heads.divide(i)].cuts;
    const HeadSummary head = summary_of(kinds[i], cuts);
    if ((head.exact != 0) == with_exact) estimate.add(head, step, limit, p.costs);
  }
  sum_over_warp(estimate);
  if (lane == 0) estimates[with_exact][warp % kJoins] = estimate;
  __syncthreads();
  static_assert(kListThreads == kJoinChoices * kSmGroups);
  const int choice = thread / kSmGroups;
  const float own_time =
      play_through(estimates[0][choice % kJoins], estimates[1][choice / kJoins], p.sms, p.costs, LaneGroups(lane));
  if (thread % kSmGroups == 0) choice_times[choice] = own_time;
  __syncthreads();
  // Every warp looks for the best one, of equals the first.
  int best = lane;
#pragma unroll
  for (int i = lane + 32; i < kJoinChoices; i += 32) best = choice_times[i] < choice_times[best] ? i : best;
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
  return best;
}

}  // namespace flash_qla::cuda::sm90::cp
