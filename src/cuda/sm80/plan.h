// How the work of a call is cut into blocks: by shapes and the number of multiprocessors alone, on the host.
#pragma once

#include <cstdint>

#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

struct Plan {
  int strips;               // of a block of the pass
  int64_t blocks_per_head;  // of a (sequence, value head)
  int64_t strips_per_head;
};

// Strips of a block share what it loads, but all of them are on one multiprocessor: the most of them with which the
// fullest multiprocessor has no more strips than it would have with one a block.
inline Plan plan_pass(int64_t heads, int64_t V, int most_strips, int multiprocessors) {
  Plan plan{1, 0, ceil_div(V, kStrip)};
  const int64_t sms = multiprocessors > 0 ? multiprocessors : 1;
  const int64_t fullest = ceil_div(heads * plan.strips_per_head, sms);
  for (int strips = 2; strips <= most_strips && strips < 2 * plan.strips_per_head; strips *= 2) {
    const int64_t blocks = heads * ceil_div(plan.strips_per_head, strips);
    if (ceil_div(blocks, sms) * strips <= fullest) plan.strips = strips;
  }
  plan.blocks_per_head = ceil_div(plan.strips_per_head, plan.strips);
  return plan;
}

// Value heads of a group that one block of `prepare` takes: all of them, which then share the products of keys and
// queries, or two where that would leave multiprocessors without a block.
inline int64_t prepared_heads(int64_t chunks, int64_t key_heads, int64_t group, int multiprocessors) {
  constexpr int64_t kPair = 2;
  return group > kPair && chunks * key_heads < 2 * static_cast<int64_t>(multiprocessors) ? kPair : group;
}

}  // namespace flash_qla::cuda::sm80
