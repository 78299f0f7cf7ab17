// The sequence that a token belongs to, found on the device, and where its states lie.
#pragma once

#include "cuda/common/pool.cuh"
#include "cuda/layer/conv_params.h"

namespace flash_qla::cuda {

__device__ inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : (x > high ? high : x);
}

// The largest n in [0, N] whose offset is at most t, or -1. A warp looks at 32 offsets at a time: four loads behind
// each other for 65,536 sequences. Offsets that fall give some n of this range.
__device__ inline int64_t last_offset(const DeviceTensor& cu_seqlens, int64_t N, int64_t t) {
  int64_t low = -1, high = N + 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  while (high - low > 1) {
    const int64_t step = (high - low - 1 + 31) / 32, probe = low + (lane + 1) * step;
    const bool below = probe < high && load_index(cu_seqlens, probe) <= t;
    const int count = __popc(__ballot_sync(0xffffffffu, below));
    const int64_t next = low + (count + 1) * step;
    low += count * step;
    high = next < high ? next : high;
  }
  return low;
}

// A sequence's tokens [begin, end) of batch row b.
struct ConvSpan {
  int64_t n = -1, b = 0, begin = 0, end = 0;
};

__device__ inline ConvSpan span_of(const ConvSequences& s, int64_t n) {
  ConvSpan span;
  span.n = n;
  if (s.cu_seqlens.data == nullptr) {
    span.b = n;
    span.end = s.T;
    return span;
  }
  span.begin = clamp_to(load_index(s.cu_seqlens, n), 0, s.T);
  span.end = clamp_to(load_index(s.cu_seqlens, n + 1), span.begin, s.T);
  return span;
}

// Of token t of batch row b; n = -1 where it belongs to none, and then [begin, end) are tokens that belong to none
// either. All lanes of a warp ask for the same token.
__device__ inline ConvSpan span_at(const ConvSequences& s, int64_t b, int64_t t) {
  if (s.cu_seqlens.data == nullptr) return span_of(s, b);
  const int64_t n = last_offset(s.cu_seqlens, s.N, t);
  ConvSpan outside;
  outside.begin = t;
  if (n < 0) outside.end = clamp_to(load_index(s.cu_seqlens, 0), t + 1, s.T);
  if (n >= s.N) outside.end = s.T;
  if (n < 0 || n >= s.N) return outside;
  const ConvSpan span = span_of(s, n);
  if (t < span.end) return span;
  outside.end = t + 1;  // offsets that fall
  return outside;
}

// A sequence's states.
struct ConvSlots {
  int64_t read = kNoSlot;   // row of initial_state, kNoSlot (zeros) or kSkipRow
  int64_t write = kNoSlot;  // row of final_state, or kNoSlot
};

__device__ inline int64_t conv_slot(const ConvSequences& s, const DeviceTensor& indices, int64_t n) {
  if (indices.data == nullptr) return n;
  const int64_t index = load_index(indices, n);
  return index > s.null_index && index >= 0 && index < s.slots ? index : kNoSlot;
}

__device__ inline int64_t conv_read_slot(const ConvSequences& s, int64_t n) {
  if (n < 0) return kSkipRow;
  if (!s.has_states) return kNoSlot;
  if (s.has.data != nullptr && static_cast<const uint8_t*>(s.has.data)[n * s.has.stride[0]] == 0) return kNoSlot;
  const int64_t slot = conv_slot(s, s.initial, n);
  return slot == kNoSlot ? kSkipRow : slot;
}

__device__ inline ConvSlots conv_slots(const ConvSequences& s, int64_t n) {
  ConvSlots slots;
  slots.read = conv_read_slot(s, n);
  if (s.writes_states && slots.read != kSkipRow) slots.write = conv_slot(s, s.final, n);
  return slots;
}

// Which entry of the state is the input `steps` places before the first token.
__device__ inline int64_t entry_before(const ConvSequences& s, int64_t n, int64_t steps, int width) {
  if (s.ring.data != nullptr) {
    const int64_t at = (load_index(s.ring, n) - steps) % s.L;
    return at < 0 ? at + s.L : at;
  }
  if (s.accepted.data != nullptr) {
    return clamp_to(load_index(s.accepted, n) - 1 + width - 1 - steps, 0, s.L - 1);
  }
  return s.L - steps;
}

}  // namespace flash_qla::cuda
