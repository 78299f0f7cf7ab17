// In which order things of a sequence are made for the passes and taken from them: the passes go through several pieces
// (whole sequences, or segments) at the same time, each from both ends at once.
#pragma once

#include <cstdint>

namespace flash_qla::cuda::sm90 {

// How many of `total` things that follow one another a piece has, of `units` pieces; the last one may have fewer.
__device__ __forceinline__ uint32_t piece_length(uint32_t units, uint32_t total) { return (total + units - 1) / units; }

// The turn-th thing of units * piece_length(units, total): of every piece in turns, its ends first and its middle last.
// `total` or more: there is no such thing in the last piece.
__device__ __forceinline__ uint32_t outer_first(uint32_t turn, uint32_t units, uint32_t total) {
  const uint32_t length = piece_length(units, total), step = turn / units, piece = turn - step * units;
  return piece * length + (step % 2 == 0 ? step / 2 : length - 1 - step / 2);
}

// The other way round: the middles first.
__device__ __forceinline__ uint32_t inner_first(uint32_t turn, uint32_t units, uint32_t total) {
  return outer_first(units * piece_length(units, total) - 1 - turn, units, total);
}

}  // namespace flash_qla::cuda::sm90
