// How long the items of a choice take.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/sm90/context_parallel/segments.h"

namespace flash_qla::cuda::sm90::cp {

// --- the choice of joins ---

// What the choice sees of one sequence and head.
struct HeadSummary {
  int32_t chunks = 0, pieces = 1;
  // 1: it is exact; 0: it decays; below zero: the links have carried its states (carry.h), of so many segments.
  int32_t exact = 0;
  int32_t warmups = 0;  // chunks, of all boundaries together; of a decaying head
};

// Items that are nearly alike.
struct ItemClass {
  int32_t items = 0;
  float work = 0.0f, longest = 0.0f;  // microseconds: of all together, of the longest one
  FLASH_QLA_HOST_DEVICE void add(int32_t count, float each) { add(count, each, each); }
  // each: on average.
  FLASH_QLA_HOST_DEVICE void add(int32_t count, float each, float longest_of_them) {
    items += count;
    work += static_cast<float>(count) * each;
    if (count > 0 && longest_of_them > longest) longest = longest_of_them;
  }
  FLASH_QLA_HOST_DEVICE void add(const ItemClass& other, int32_t times = 1) {
    items += times * other.items;
    work += static_cast<float>(times) * other.work;
    if (other.longest > longest) longest = other.longest;
  }
  FLASH_QLA_HOST_DEVICE float average() const { return items > 0 ? quotient(work, static_cast<float>(items)) : 0.0f; }
};

// What one choice costs for a part of the heads. Free items depend on nothing; dependent ones wait for states at cuts.
// Of both the long ones are kept apart from the others: pieces that were joined unevenly, or shorter sequences.
struct ItemEstimate {
  ItemClass states, free[2], dependent[2];
  int32_t transitions = 0, longest_scan = 0;

  // One sequence and head of which `step` neighbouring pieces are joined. long_item: chunks that make an item a long
  // one.
  FLASH_QLA_HOST_DEVICE void add(const HeadSummary& head, int32_t step, float long_item, const Costs& costs) {
    if (head.exact < 0) {  // its states at cuts come soon, and its segments are not joined
      const int32_t count = -head.exact;
      const float chunks = quotient(static_cast<float>(head.chunks), static_cast<float>(count));
      const float each = chunks * costs.step + costs.item_edge,
                  most = each + (ceilf(chunks - 0.01f) - chunks) * costs.step;
      const bool is_long = chunks >= long_item;
      free[0].add(is_long ? count : 0, each, most);
      free[1].add(is_long ? 0 : count, each, most);
      return;
    }
    const int32_t items = joined_pieces(head.pieces, step);
    const float piece = quotient(static_cast<float>(head.chunks), static_cast<float>(head.pieces));
    const int32_t shorter = head.pieces / items, longer = head.pieces - shorter * items;  // pieces, items
    const bool decays = head.exact == 0, warms_up = decays && items > 1;
    const float warmup =
        warms_up ? quotient(static_cast<float>(head.warmups), static_cast<float>(head.pieces - 1)) : 0.0f;
    for (int32_t more = 0; more < 2; ++more) {
      const int32_t count = more != 0 ? longer : items - longer;
      const float chunks = piece * static_cast<float>(shorter + more);
      // Pieces that are no whole number of chunks on average differ by one, and the longer ones end last.
      const float rest = ceilf(chunks - 0.01f) - chunks;
      const float output = chunks * costs.step + warmup * costs.warm_step + costs.item_edge;
      const float most = output + rest * costs.step;
      const bool is_long = chunks >= long_item;
      if (decays) {
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
      const int32_t all = states_of_pieces(items), of_longer = 2 * longer < all ? 2 * longer : all;
      const float state = chunks * costs.state_step + costs.state_edge;
      states.add(more != 0 ? of_longer : all - of_longer, state, state + rest * costs.state_step);
    }
    if (decays || items <= 2) return;
    transitions += items - 2;
    longest_scan = items - 2 > longest_scan ? items - 2 : longest_scan;
  }
  FLASH_QLA_HOST_DEVICE void add(const ItemEstimate& other, int32_t times = 1) {
    states.add(other.states, times);
    for (int32_t i = 0; i < 2; ++i) {
      free[i].add(other.free[i], times);
      dependent[i].add(other.dependent[i], times);
    }
    transitions += times * other.transitions;
    longest_scan = other.longest_scan > longest_scan ? other.longest_scan : longest_scan;
  }
};

// Chunks from which on an item of such a join counts as a long one: nearly those of the longest sequence's.
FLASH_QLA_HOST_DEVICE inline float long_item(int32_t longest, const CutSpacing& cut_spacing, int32_t step) {
  const int32_t pieces = pieces_of(longest, cut_spacing), items = joined_pieces(pieces, step);
  return 0.72f * quotient(static_cast<float>(longest), static_cast<float>(pieces)) *
         static_cast<float>((pieces + items - 1) / items);
}

// SMs by the time when they have nothing more to do, those at about the same time together: kTogether, in microseconds,
// is less than items differ by. On the device eight lanes have a group each.
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

// Microseconds until the last item ends, of decaying and of exact heads: the items as blocks take them, by groups of
// SMs and of items that are nearly alike.
template <typename Groups>
FLASH_QLA_HOST_DEVICE float play_through(const ItemEstimate& decaying, const ItemEstimate& exact, int32_t sms,
                                         const Costs& costs, Groups free) {
  // State items in waves, on all SMs but the planner's; blocks that had one of the last stay for the scans, as long as
  // these are.
  const ItemClass& states = exact.states;
  const int32_t at_once = sms > 1 ? sms - 1 : 1;
  const int32_t waves = states.items > at_once ? (states.items + at_once - 1) / at_once : 1;
  const int32_t last = states.items - (waves - 1) * at_once, others = sms - last;
  const float before = static_cast<float>(waves - 1) * states.average();
  const float made = before + states.longest;
  float ready = made;
  int32_t pieces = 0;
  if (exact.longest_scan > 0) {
    const float longest = static_cast<float>(exact.longest_scan);
    ready += costs.scan_start + costs.scan_step * longest;
    pieces = static_cast<int32_t>(quotient(static_cast<float>(kScanSlices * exact.transitions), longest));
  }
  const int32_t stay = pieces < last ? pieces : last;
  const int32_t beyond = waves > 1 ? pieces - stay : 0, more = beyond < others ? beyond : others;
  free.put(ready + costs.item_edge, stay + more);
  free.put(made + costs.item_edge, last - stay);
  free.put(before + costs.item_edge, others - more);
  // Free items longest first; once the states at cuts are there, the dependent ones before what is left of them.
  constexpr int32_t kFree = 3, kClasses = 5;
  ItemClass left[kClasses] = {decaying.free[0], decaying.free[1], exact.free[0], exact.dependent[0],
                              exact.dependent[1]};
  left[2].add(exact.free[1]);
  float each[kClasses];
  int32_t frees = 0, dependents = left[3].items + left[4].items;
  float work = states.work;
  FLASH_QLA_UNROLL
  for (int32_t i = 0; i < kClasses; ++i) {
    each[i] = left[i].average();
    work += left[i].work;
    if (i < kFree) frees += left[i].items;
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
      if ((i >= kFree) == dependent && left[i].items > 0 && (kind < 0 || each[i] > length)) {
        kind = i;
        length = each[i];
      }
    }
    if (kind < 0) count = 0;  // where other lanes have more to do
    FLASH_QLA_UNROLL
    for (int32_t i = 0; i < kClasses; ++i) {
      if (i != kind) continue;
      count = left[i].items < count ? left[i].items : count;
      left[i].items -= count;
      end = start + left[i].longest > end ? start + left[i].longest : end;
    }
    (dependent ? dependents : frees) -= count;
    free.take(count);
    free.put(start + length, count);
  }
  return end + costs.load * quotient(work, static_cast<float>(sms));
}

// No more than play_through(), but for groups' times that are taken for equal.
inline float least_time(const ItemEstimate& decaying, const ItemEstimate& exact, int32_t sms, const Costs& costs) {
  float work = exact.states.work, longest = 0.0f, dependent = 0.0f;
  for (int32_t i = 0; i < 2; ++i) {
    work += decaying.free[i].work + exact.free[i].work + exact.dependent[i].work;
    longest = std::max({longest, decaying.free[i].longest, exact.free[i].longest});
    dependent = std::max(dependent, exact.dependent[i].longest);
  }
  float least = std::max(longest + costs.item_edge, work / static_cast<float>(sms));
  if (const ItemClass& states = exact.states; states.items > 0) {
    const float waves = static_cast<float>((states.items - 1) / std::max(sms - 1, 1));
    least = std::max(least, waves * states.average() + states.longest + dependent +
                                costs.scan_step * static_cast<float>(exact.longest_scan));
  }
  return least;
}

// The joins that are tried: every pair of a decaying and an exact one. The last pair is no cut at all.
inline constexpr int32_t kJoins = 8;
inline constexpr int32_t kJoinChoices = kJoins * kJoins;
FLASH_QLA_HOST_DEVICE constexpr int32_t join_step(int32_t i) {
  return i < 4 ? i + 1 : i == 4 ? 6 : i == 5 ? 8 : i == 6 ? 16 : kNoCut;
}
FLASH_QLA_HOST_DEVICE constexpr Join join_choice(int32_t i) { return {join_step(i % kJoins), join_step(i / kJoins)}; }

}  // namespace flash_qla::cuda::sm90::cp
