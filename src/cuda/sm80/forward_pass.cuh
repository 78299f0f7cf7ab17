// The serial pass of the forward: carries the states of a few strips through a sequence and makes O. A block has a warp
// for each strip and one that loads (docs/kernels/sm80.md).
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/sm80/block.cuh"
#include "cuda/sm80/strip.cuh"

namespace flash_qla::cuda::sm80 {

// With 256 keys a strip needs every register. What is made from a thread's number anew in each step takes none; but for
// compute capability 10.0 ptxas 13.0 spills two with it, and from there on none without.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
template <int kKeys>
inline constexpr bool kNumbersAnew = false;
#else
template <int kKeys>
inline constexpr bool kNumbersAnew = kKeys == 256;
#endif

__device__ __forceinline__ StripPlace strip_place(const ForwardParams& p, const Place& block) {
  return {block.head, block.column + static_cast<int>(threadIdx.x / 32) * kStrip, static_cast<int>(threadIdx.x % 32),
          p.K, p.V};
}

// What is kept of the state after the first `tokens` tokens of a part: a multiple of 64 before its end, or all.
template <bool kOutputs, class State>
__device__ __forceinline__ void keep_state(const ForwardParams& p, bool at_end, int tokens, State& state) {
  const StripPlace place = strip_place(p, place_of_block());
  const Part& part = place_of_block().part;
  const int64_t chunk = part.first_chunk + tokens / kChunkSize;
  const int of_sequence = part.offset + tokens;
  const bool ends = at_end && part.last;
  if constexpr (!kOutputs) {  // of segments
    const DeviceStates& to = at_end && part.transition ? p.transitions : p.starts;
    const int row = at_end ? part.end_row : tokens == 0 ? part.copy_row : -1;
    if (row >= 0 && row < to.rows) {
      visit_padded(state, to, row, place,
                   [](float2& to, float first, float second) { to = make_float2(first, second); });
    }
  }
  int32_t entry = !at_end && p.listed.first != nullptr ? p.listed.first[chunk] : -1;
  // In one loop: the code that stores is long.
#pragma unroll 1
  for (int kind = 0; kind < 4 || entry >= 0; ++kind) {
    DeviceStates to{};
    int64_t row = -1;
    if (kind == 0 && !at_end) {
      to = p.h;
      row = chunk;
    } else if (kind == 1 && p.checkpoint_every > 0 && of_sequence > 0 && of_sequence % p.checkpoint_every == 0 &&
               (ends || !at_end)) {  // at a cut the next part keeps it
      to = p.checkpoints;
      row = load_index(p.checkpoint_starts, part.n) + of_sequence / p.checkpoint_every - 1;
    } else if (kind == 2 && ends) {
      to = p.final_state;
      row = part.n;
    } else if (kind == 3 && ends) {
      to = p.pool;
      row = write_slot(p.pool_indices, part.n, 0);
    } else if (kind > 3) {
      to = p.listed_states;
      row = entry;
      entry = p.listed.next[entry];
    }
    if (to.data != nullptr && row >= 0 && row < to.rows) store_state(state, to, row, place);
  }
}

// A warp that carries a strip.
template <class T, int kKeys, bool kOutputs>
__device__ void carry_strip(const ForwardParams& p, const Part& part, int64_t slot, uint32_t barriers, Ring ring) {
  using Tr = Traits<kKeys>;
  constexpr bool kTwoStages = Tr::stages(1) == 2;  // one register less, where there are none
  int thread = threadIdx.x;

  Sums<Tr::kKeyTiles> state;
  state.clear();
  OutputRows<T> o;
  {
    const StripPlace place = strip_place(p, place_of_block());
    DeviceStates from{};
    int64_t row = part.n;
    if (kOutputs && part.start_row >= 0) {
      visit_padded(state, p.starts, part.start_row, place, [](const float2& from, float& first, float& second) {
        first = from.x;
        second = from.y;
      });
    } else if (part.start_row >= 0) {
      from = p.starts;
      row = part.start_row;
    } else if (slot >= 0) {
      from = p.pool;
      row = slot;
    } else if (part.first && !part.transition) {
      from = p.initial_state;
    }
    if (from.data != nullptr) load_state(state, from, row, place);
    if (!kOutputs && part.transition && part.length > 0) set_identity(state, place);
    if (kOutputs) {
      const uint16_t* rows = row_at(p.o, part.b, part.begin, place.head);
      o = OutputRows<T>(rows, p.o.token, p.o_columns, part.length, -Step<T, kKeys, kOutputs>::kRowsLater, place);
    }
  }
  Packed<Tr::kKeyTiles> packed;
  pack<T>(state, packed);
  Step<T, kKeys, kOutputs> step;
  for (int number = 0;; ++number) {
    const int done = number * kStep;
    const bool at_end = done >= part.length;
    // A segment's initial state is kept at its start alone.
    if (at_end || (number % kStepsPerChunk == 0 && (p.keeps_states != 0 || (!kOutputs && number == 0)))) {
      keep_state<kOutputs>(p, at_end, at_end ? part.length : done, state);
      pack<T>(state, packed);  // as it was: without registers for it meanwhile
    }
    if (at_end) break;
    if (kNumbersAnew<kKeys>) make_opaque(thread);
    if (kTwoStages) ring.set_of_two(number);
    const int lane = thread % 32;
    ring.wait_full();
    const uint32_t stage = ring.stage(barriers + Tr::kStagesAt);
    step.begin(stage, stage + Tr::kValuesAt + static_cast<uint32_t>(thread / 32 * kValueBytes), lane, packed);
    step.finish(o, done);  // before the first step there is nothing to store
    step.run(state, packed, o, done);
    ring.release(lane);
    if (!kTwoStages) ring.next();
  }
  step.finish(o, static_cast<int>(ceil_div(part.length, kStep)) * kStep);
}

// Rows of a skipped sequence's outputs, values [column, column + size).
__device__ inline void write_zero_rows(const ForwardParams& p, const Part& part, int head, int column, int size) {
  const int pieces = size / 4;
  uint16_t* o = const_cast<uint16_t*>(row_at(p.o, part.b, part.begin, head)) + column;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(part.length) * pieces; i += blockDim.x) {
    const int piece = static_cast<int>(i % pieces);
    if (column + 4 * piece < p.o_columns)
      *reinterpret_cast<uint2*>(o + i / pieces * p.o.token + 4 * piece) = make_uint2(0, 0);
  }
}

// A pass over sequences or segments with outputs; without, over what is computed for its states alone.
template <class T, int kKeys, bool kOutputs>
__global__ void __launch_bounds__(kMostPassThreads, 1) sm80_forward_kernel(const __grid_constant__ ForwardParams p) {
  using Tr = Traits<kKeys>;
  const bool transition = !kOutputs && blockIdx.x >= p.first_transition;
  const unsigned block = transition ? blockIdx.x - static_cast<unsigned>(p.first_transition) : blockIdx.x;
  const int blocks_per_head = transition ? p.transition_blocks_per_head : p.blocks_per_head;
  const int columns = transition ? kKeys : p.V;
  const unsigned rest = block / blocks_per_head;
  const int head = static_cast<int>(rest % p.Hv),
            column = static_cast<int>(block % blocks_per_head) * p.strips * kStrip;
  Part part;
  if (!find_part<!kOutputs>(p, rest / p.Hv, transition, &part)) return;
  if (transition && forgets(p, part.first_chunk, part.length, head)) part.length = 0;  // of which zeros are left
  // Parts that start from `starts` are of sequences that are not skipped, but for segments.
  int64_t slot = p.parts != nullptr ? kNoSlot : read_slot(p.pool_indices, part.n);
  if (slot == kSkipRow) {
    if (kOutputs) write_zero_rows(p, part, head, column, p.strips * kStrip);
    return;
  }
  if (!part.first || transition) slot = kNoSlot;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int strips = min(p.strips, (columns - column + kStrip - 1) / kStrip);  // of this block
  const uint32_t barriers = smem_address(dynamic_shared<char>());
  if (threadIdx.x == 0) {
    Ring::init(barriers, p.stages, strips);
    place_of_block() = {part, head, column};
  }
  __syncthreads();
  const Ring ring(barriers, p.stages, p.stage_bytes);
  if (warp == p.strips) {
    constexpr int kRecordBytes = kOutputs ? Tr::kRecordBytes : kStateRecordBytes;
    load_steps<kKeys, kOutputs, false, kRecordBytes>(p, part, p.records, p.v, head, column, lane,
                                                     barriers + Tr::kStagesAt, ring);
  } else if (warp < strips) {
    carry_strip<T, kKeys, kOutputs>(p, part, slot, barriers, ring);
  }
}

}  // namespace flash_qla::cuda::sm80
