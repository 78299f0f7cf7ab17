// How long the tiles of a choice take.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/sm90/common/host_device.h"
#include "cuda/sm90/context_parallel/segments.h"

namespace flash_qla::cuda::sm90::cp {

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

}  // namespace flash_qla::cuda::sm90::cp
