// What sequence_cut says of one part: found by bisection of the stream's offsets, on the host and on devices alike.
#pragma once

#include <cstdint>

namespace flash_qla {

// Sequences [first, behind) of the stream are in the part: those with tokens there, and empty ones at offsets in
// [begin, end), with those at the end where the stream ends.
struct PartCut {
  int64_t begin, end;     // its tokens
  int64_t first, behind;  // its sequences
  int64_t left, right;    // those of its first token and of its last; -1 without tokens
  int64_t halo;           // tokens of `left` before the part
  bool enters, leaves, through;

  constexpr int64_t inside(int64_t offset) const {
    const int64_t below = offset < end ? offset : end;
    return below > begin ? below : begin;
  }
};

// The first n in [0, N] with offset(n) >= x, or above x with `above`; N + 1 where there is none.
template <class Offset>
constexpr int64_t first_offset(int64_t N, int64_t x, bool above, Offset&& offset) {
  int64_t low = 0, high = N + 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    const int64_t found = offset(middle);
    if (above ? found > x : found >= x) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// `offset(n)`: element n of cu_seqlens [N + 1]. Offsets in any order lead nowhere else.
template <class Offset>
constexpr PartCut cut_part(int64_t begin, int64_t end, bool is_last, int64_t N, Offset&& offset) {
  PartCut part{begin, end, 0, 0, -1, -1, 0, false, false, false};
  const auto at_most_N = [N](int64_t n) { return n < N ? n : N; };
  part.first = at_most_N(first_offset(N, begin, false, offset));
  if (begin < end && part.first > 0 && offset(part.first) > begin) --part.first;
  part.behind = part.first;
  if (is_last) {
    part.behind = N;
  } else if (begin < end) {
    const int64_t behind = at_most_N(first_offset(N, end, false, offset));
    if (behind > part.first) part.behind = behind;
  }
  const int64_t last_offset = offset(N), last_token = (end < last_offset ? end : last_offset) - 1;
  if (begin < offset(0) || begin > last_token) return part;
  // An offset above each token is there, and the first one is not: the numbers found are from 1 to N.
  part.left = first_offset(N, begin, true, offset) - 1;
  part.right = first_offset(N, last_token, true, offset) - 1;
  part.enters = offset(part.left) < begin;
  part.leaves = offset(part.right + 1) > end;
  part.through = part.enters && part.leaves && part.left == part.right;
  if (part.enters) part.halo = begin - offset(part.left);
  return part;
}

}  // namespace flash_qla
