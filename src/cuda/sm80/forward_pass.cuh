// The serial pass of the forward: carries the states of a few strips through a sequence and makes O. A block has a warp
// for each strip and one that loads (docs/kernels/sm80.md).
#pragma once

#include <climits>

#include "cuda/sm80/block.cuh"
#include "cuda/sm80/strip.cuh"

namespace flash_qla::cuda::sm80 {

// With 256 keys a strip needs every register. What is made from a thread's number anew in each step takes none; but for
// compute capability 10.0 ptxas 13.0 spills two with it, and from there on none without.
template <int kKeys>
inline constexpr bool kNumbersAnew = kKeys == 256 && kArchitecture < 1000;

// K and V: those of the tensor; states that kernels leave for each other have all of the keys and any number of values.
__device__ __forceinline__ StripPlace strip_place(int K, int V) {
  const Place& block = place_of_block();
  return {block.head, block.column + static_cast<int>(threadIdx.x / 32) * kStrip, static_cast<int>(threadIdx.x % 32), K,
          V};
}

// A strip's matrices in the workspace: the first block of the warp's strip in a matrix of a chunk, `row` blocks side by
// side.
__device__ __forceinline__ char* strip_blocks(char* matrices, const PassParams& p, int chunk, int row) {
  const Place& block = place_of_block();
  const int value_blocks = (p.V + kStrip - 1) / kStrip * 2, strip = static_cast<int>(threadIdx.x / 32);
  const int64_t matrix = static_cast<int64_t>(block.part.first_chunk + chunk) * p.Hv + block.head;
  return matrices + ((matrix * value_blocks + block.column / 8 + 2 * strip) * row) * kBlockBytes;
}

// A strip's E of one step after another.
struct ErrorBlocks {
  char* at;
  template <int kTiles>
  __device__ __forceinline__ void keep(const Packed<kTiles>& errors) {
    store_blocks(errors, at, kChunkBlocks * kBlockBytes);
    at += kTiles * kBlockBytes;
  }
};

// What a pass leaves: O and states where they are wanted; states alone, of segments or up to listed tokens; or for the
// gradients S at the starts of chunks, and E.
enum class Pass { kOutputs, kStates, kBackward };

// What is kept of the state after the first `tokens` tokens of a part: a multiple of 64 before its end, or all.
template <int kKeys, Pass kPass, class State>
__device__ __forceinline__ void keep_state(const PassParams& p, bool at_end, int tokens, State& state) {
  const Part& part = place_of_block().part;
  const int64_t chunk = part.first_chunk + tokens / kChunkSize;
  const int of_sequence = part.offset + tokens;
  const bool ends = at_end && part.last;
  int32_t entry = !at_end && p.listed.first != nullptr ? p.listed.first[chunk] : -1;
  // In one loop: the code that stores is long.
#pragma unroll 1
  for (int kind = kPass == Pass::kStates ? -1 : 0; kind < 4 || entry >= 0; ++kind) {
    DeviceStates to{};
    int64_t row = -1;
    const bool padded = kind < 0 || kind > 3;
    if (kind < 0) {  // of segments
      to = at_end && part.transition ? p.transitions : p.starts;
      row = at_end ? part.end_row : tokens == 0 ? part.copy_row : -1;
    } else if (kind == 0 && !at_end) {
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
    if (to.data == nullptr || row < 0 || row >= to.rows) continue;
    store_state(state, to, row, padded ? strip_place(kKeys, INT_MAX) : strip_place(p.K, p.V));
  }
}

// The state that a part starts from. `slot`: of the pool.
template <int kKeys, Pass kPass, class State>
__device__ __forceinline__ void load_start(const PassParams& p, const Part& part, int64_t slot, State& state) {
  StripPlace place = strip_place(p.K, p.V);
  DeviceStates from{};
  int64_t row = part.n;
  state.clear();
  if (kPass == Pass::kBackward) {
    from = p.initial_state;
  } else if (part.start_row >= 0) {
    from = p.starts;
    row = part.start_row;
    place = strip_place(kKeys, INT_MAX);
  } else if (slot >= 0) {
    from = p.pool;
    row = slot;
  } else if (part.first && !part.transition) {
    from = p.initial_state;
  }
  if (from.data != nullptr) load_state(state, from, row, place);
  if (kPass == Pass::kStates && part.transition && part.length > 0) set_identity(state, place);
}

// A warp that carries a strip from a part's start to its end.
template <class T, int kKeys, Pass kPass>
__device__ void carry_strip(const PassParams& p, const Part& part, int64_t slot, Ring ring) {
  using Tr = Traits<kKeys>;
  constexpr bool kOutputs = kPass == Pass::kOutputs;
  constexpr bool kTwoStages = Tr::stages(1) == 2;  // one register less, where there are none
  int thread = threadIdx.x;

  Sums<Tr::kKeyTiles> state;
  load_start<kKeys, kPass>(p, part, slot, state);
  std::conditional_t<kPass == Pass::kBackward, ErrorBlocks, OutputRows> rows;
  if constexpr (kOutputs) {
    const StripPlace place = strip_place(p.K, p.V);
    const uint16_t* o = row_at(p.o, part.b, part.begin, place.head);
    rows = OutputRows(o, p.o.token, p.o_columns, part.length, -Step<T, kKeys, kOutputs>::kRowsLater, place);
  }
  auto packed = pack<T>(state);
  Step<T, kKeys, kOutputs> step;
  for (int number = 0;; ++number) {
    const int done = number * kStep, length = place_of_block().part.length;  // which takes no register in between
    const bool at_end = done >= length;
    if constexpr (kPass == Pass::kBackward) {
      if (!at_end && number % kStepsPerChunk == 0) {
        const int chunk = number / kStepsPerChunk;
        store_blocks(packed, strip_blocks(p.matrices.states, p, chunk, Tr::kKeyTiles), Tr::kKeyTiles * kBlockBytes);
        rows.at = strip_blocks(p.matrices.errors, p, chunk, kChunkBlocks);
      }
    } else if (at_end || (number % kStepsPerChunk == 0 && (p.keeps_states != 0 || (!kOutputs && number == 0)))) {
      // A segment's initial state is kept at its start alone.
      keep_state<kKeys, kPass>(p, at_end, at_end ? length : done, state);
      packed = pack<T>(state);  // as it was: without registers for it meanwhile
    }
    if (at_end) break;
    if (kNumbersAnew<kKeys>) recompute_from(thread);
    if (kTwoStages) ring.set_of_two(number);
    const int lane = thread % 32;
    ring.wait_full();
    const uint32_t stage = ring.stage();
    step.begin({stage, stage + Tr::kValuesAt + static_cast<uint32_t>(thread / 32 * kValueBytes), lane}, packed);
    step.finish(rows, done);  // before the first step there is nothing to store
    step.run(state, packed, rows, done);
    ring.release(lane);
    if (!kTwoStages) ring.next();
  }
  step.finish(rows, static_cast<int>(ceil_div(part.length, kStep)) * kStep);
}

// Rows of a skipped sequence's outputs, of a block's columns.
__device__ inline void write_zero_rows(const PassParams& p, const Part& part, int head, int column) {
  const int pieces = p.strips * kStrip / 4;
  uint16_t* o = const_cast<uint16_t*>(row_at(p.o, part.b, part.begin, head)) + column;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(part.length) * pieces; i += blockDim.x) {
    const int piece = static_cast<int>(i % pieces);
    if (column + 4 * piece < p.o_columns)
      *reinterpret_cast<uint2*>(o + i / pieces * p.o.token + 4 * piece) = make_uint2(0, 0);
  }
}

// A pass over sequences or segments with outputs; without, over what is computed for its states alone.
template <class T, int kKeys, bool kOutputs>
__global__ void __launch_bounds__(kMostPassThreads, 1) sm80_forward_kernel(const __grid_constant__ PassParams p) {
  using Tr = Traits<kKeys>;
  const bool transition = !kOutputs && blockIdx.x >= p.first_transition;
  const BlockStrips block = transition ? strips_of_block(p, blockIdx.x - static_cast<unsigned>(p.first_transition),
                                                         p.transition_blocks_per_head, kKeys)
                                       : strips_of_block(p, blockIdx.x, p.blocks_per_head, p.V);
  Part part;
  if (!find_part<!kOutputs>(p, block.part, transition, &part)) return;
  if (transition && forgets(p, part.first_chunk, part.length, block.head)) part.length = 0;  // of which zeros are left
  // Parts that start from `starts` are of sequences that are not skipped, but for segments.
  int64_t slot = p.parts != nullptr ? kNoSlot : read_slot(p.pool_indices, part.n);
  if (slot == kSkipRow) {
    if (kOutputs) write_zero_rows(p, part, block.head, block.column);
    return;
  }
  if (!part.first || transition) slot = kNoSlot;
  const Ring ring = Ring::start(p, part, block);
  const int warp = threadIdx.x / 32;
  if (warp == p.strips) {
    constexpr int kRecordBytes = kOutputs ? Tr::kRecordBytes : kStateRecordBytes;
    load_steps<kKeys, kOutputs, false, kRecordBytes>(p, part, p.records, p.v, block, ring);
  } else if (warp < block.strips) {
    carry_strip<T, kKeys, kOutputs ? Pass::kOutputs : Pass::kStates>(p, part, slot, ring);
  }
}

}  // namespace flash_qla::cuda::sm80
