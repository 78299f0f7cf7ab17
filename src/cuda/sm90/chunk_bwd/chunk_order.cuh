// In which order chunks are made ready for the passes, which go through several pieces (whole sequences, or segments)
// at the same time, each from both ends at once.
#pragma once

#include <cstdint>

#include "cuda/sm90/chunk_bwd/traits.h"

namespace flash_qla::cuda::sm90::bwd {

// How many of `total` things that follow one another a piece has, of `units` pieces; the last one may have fewer.
__device__ __forceinline__ uint32_t piece_length(uint32_t units, uint32_t total) { return (total + units - 1) / units; }

// The turn-th thing of units * piece_length(units, total): of every piece in turns, its ends first and its middle last.
// `total` or more: there is no such thing in the last piece.
__device__ __forceinline__ uint32_t outer_first(uint32_t turn, uint32_t units, uint32_t total) {
  const uint32_t length = piece_length(units, total), step = turn / units, piece = turn - step * units;
  return piece * length + (step % 2 == 0 ? step / 2 : length - 1 - step / 2);
}

// The turn-th chunk of a sequence that forward passes go through in runs of `length`, the last run first, or as a whole
// (segments.cuh). First what reverse passes begin with, then the windows before the runs, which tell which of the two.
// Then by threes two of what the passes meet in, the last two thirds of the runs, the last one first, each from both
// ends, and one of what forward passes over the whole begin with.
__device__ __forceinline__ uint32_t runs_first(uint32_t turn, uint32_t length, uint32_t total) {
  constexpr uint32_t kWindow = kMostWarmup;  // and so many for reverse passes
  const uint32_t edges = (total - 1) / length, core = length - kWindow;
  uint32_t first = edges * length, count = total - first;
  const uint32_t start = min(count, kWindow);
  if (turn < start) return total - 1 - turn;
  turn -= start;
  count -= start;
  if (turn < kWindow * edges) {
    const uint32_t before = turn / edges;
    return (turn - before * edges + 1) * length - 1 - before;
  }
  turn -= kWindow * edges;
  const uint32_t third = turn / 3, part = turn - third * 3, low = edges / 3 * core;
  if (third < low && part == 2) return third / core * length + third % core;
  uint32_t place = third < low ? 2 * third + part : turn - low;
  if (place >= count) {
    place -= count;
    count = core;
    const uint32_t run = place / core;
    place -= run * core;
    first -= (run + 1) * length;
  }
  return first + (place % 2 == 0 ? count - 1 - place / 2 : place / 2);
}

}  // namespace flash_qla::cuda::sm90::bwd
