// The order in which links are applied, one (part, stream, head) at a time: the same on every device.
#pragma once

#include <cstdint>

#include "core/context_parallel.h"

namespace flash_qla {

// The links between the nearest constant one and a place in the stream, in the order in which a state goes through
// them. Going backward the stream is read from its other end.
struct LinkChain {
  int64_t first;  // place of the constant link, or the first link of all if there is none
  int64_t steps;  // links from there on, the constant one included
};

// Whether a state can be wanted at a place: at one of the L parts, or beyond the last in the direction of the state.
constexpr bool is_place(int64_t place, int64_t L, bool backward) {
  return backward ? place >= -1 && place < L : place >= 0 && place <= L;
}

// `kind_at(i)`: kind of the link at place i of the stream. `place`: where the state is wanted.
template <class KindAt>
constexpr LinkChain chain_to(int64_t place, int64_t L, bool backward, KindAt&& kind_at) {
  const int64_t step = backward ? 1 : -1, end = backward ? L : -1;
  int64_t first = place;
  while (first + step != end) {
    first += step;
    if (is_constant(kind_at(first))) break;
  }
  return {first, backward ? first - place : place - first};
}

}  // namespace flash_qla
