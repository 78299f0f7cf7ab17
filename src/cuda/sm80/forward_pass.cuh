// The serial pass of the forward: carries the states of a few strips through a sequence and makes O. A block has a warp
// for each strip and one that loads (docs/kernels/sm80.md).
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/sm80/block.cuh"
#include "cuda/sm80/strip.cuh"

namespace flash_qla::cuda::sm80 {

__device__ __forceinline__ StripPlace strip_place(const ForwardParams& p, const BlockPlace& block) {
  return {block.head, block.column + static_cast<int>(threadIdx.x / 32) * kStrip, static_cast<int>(threadIdx.x % 32),
          p.K, p.V};
}

// Whether states are kept on the way.
__device__ __forceinline__ bool keeps_states(const ForwardParams& p) {
  return p.h.data != nullptr || p.checkpoint_every > 0 || p.listed.first != nullptr;
}

// What is kept of the state after the first `tokens` tokens of a sequence: a multiple of 64 before its end, or all.
template <class State>
__device__ __forceinline__ void keep_state(const ForwardParams& p, uint32_t shared_place, bool at_end, int tokens,
                                           const State& state) {
  const BlockPlace block = load_place(shared_place);
  const StripPlace place = strip_place(p, block);
  const int64_t chunk = block.first_chunk + tokens / kChunkSize;
  int32_t entry = !at_end && p.listed.first != nullptr ? p.listed.first[chunk] : -1;
  // In one loop: the code that stores is long.
#pragma unroll 1
  for (int kind = 0; kind < 4 || entry >= 0; ++kind) {
    DeviceStates to{};
    int64_t row = -1;
    if (kind == 0 && !at_end) {
      to = p.h;
      row = chunk;
    } else if (kind == 1 && p.checkpoint_every > 0 && tokens > 0 && tokens % p.checkpoint_every == 0) {
      to = p.checkpoints;
      row = load_index(p.checkpoint_starts, block.n) + tokens / p.checkpoint_every - 1;
    } else if (kind == 2 && at_end) {
      to = p.final_state;
      row = block.n;
    } else if (kind == 3 && at_end) {
      to = p.pool;
      row = write_slot(p.pool_indices, block.n, 0);
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
  using ThisStep = Step<T, kKeys>;
  constexpr int kStep = Tr::kStep, kPairs = Tr::kTokenTiles / 2;
  // Q S0 in two parts, each behind a chain of products that waits for itself. With 256 keys there are no registers for
  // it before E is packed.
  constexpr bool kEarly = kOutputs && kKeys <= 192;
  int lane = threadIdx.x % 32;
  const uint32_t values_at = Tr::kValuesAt + threadIdx.x / 32 * Tr::kValueBytes;

  typename ThisStep::State state;
  state.clear();
  OutputRows<T> o;
  {
    const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
    const StripPlace place = strip_place(p, block);
    const DeviceStates from = slot >= 0 ? p.pool : p.initial_state;
    if (from.data != nullptr) load_state(state, from, slot >= 0 ? slot : block.n, place);
    if (kOutputs) o = OutputRows<T>(row_at(p.o, part.b, part.begin, place.head), p.o.token, p.o_columns, place);
  }
  int left = part.length;
  for (int number = 0;; ++number, ring.next()) {
    const bool at_end = left <= 0;
    if (at_end || (number % Tr::kStepsPerChunk == 0 && keeps_states(p))) {
      keep_state(p, barriers + Tr::kPlaceAt, at_end, at_end ? number * kStep + left : number * kStep, state);
    }
    if (at_end) break;

    make_opaque(lane);
    Packed<Tr::kKeyTiles> packed_state;
    pack<T>(state, packed_state);
    ring.wait_full();
    const uint32_t stage = ring.stage(barriers + Tr::kStagesAt);
    const ThisStep step(stage, stage + values_at, lane);

    // W = V - diag(gamma) K S0, E = W + strict(G o T) W
    typename ThisStep::Tokens errors, outputs;
    errors.clear();
    outputs.clear();
    step.multiply_rows(errors, packed_state, Tr::kKeysAt, 0, kPairs);
    if (kEarly) step.multiply_rows(outputs, packed_state, Tr::kQueriesAt, 0, kPairs / 2);
    step.subtract_from_values(errors);
    {
      Packed<Tr::kTokenTiles> w;
      pack<T>(errors, w);
      step.multiply_triangle(errors, w, offsetof(typename Tr::Record, transform));
    }
    if (kEarly) step.multiply_rows(outputs, packed_state, Tr::kQueriesAt, kPairs / 2, kPairs);

    Packed<Tr::kTokenTiles> plain, scaled;
    step.pack_errors(errors, plain, scaled);

    // O = scale diag(gamma) Q S0 + (P B) E
    if (kOutputs) {
      if (!kEarly) step.multiply_rows(outputs, packed_state, Tr::kQueriesAt, 0, kPairs);
      step.scale_outputs(outputs);
      step.multiply_triangle(outputs, plain, offsetof(typename Tr::Record, outputs));
    }

    // S1 = gamma_C S0 + K^T diag(beta gamma_C / gamma) E
    step.update(state, scaled);
    ring.release(lane);
    if (kOutputs) o.store(outputs, left);
    left -= kStep;
  }
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

template <class T, int kKeys, bool kOutputs>
__global__ void __launch_bounds__(Traits<kKeys>::kMostThreads, 1)
    sm80_forward_kernel(const __grid_constant__ ForwardParams p) {
  using Tr = Traits<kKeys>;
  const unsigned rest = blockIdx.x / p.blocks_per_head;
  const int n = static_cast<int>(rest / p.Hv);
  const int head = static_cast<int>(rest % p.Hv),
            column = static_cast<int>(blockIdx.x % p.blocks_per_head) * p.strips * kStrip;
  const Part part = part_at(p, n);
  const int64_t slot = p.pool_indices.initial.data == nullptr ? kNoSlot : read_slot(p.pool_indices, n);
  if (slot == kSkipRow) {
    if (kOutputs) write_zero_rows(p, part, head, column, p.strips * kStrip);
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int strips = min(p.strips, (p.V - column + kStrip - 1) / kStrip);  // of this block
  const uint32_t barriers = smem_address(dynamic_shared<char>());
  if (threadIdx.x == 0) {
    Ring::init(barriers, p.stages, strips);
    store_place(barriers + Tr::kPlaceAt, {n, head, column, part.first_chunk});
  }
  __syncthreads();
  const Ring ring(barriers, p.stages, p.stage_bytes);
  if (warp == p.strips) {
    load_steps<kKeys, kOutputs>(p, part, head, column, lane, barriers + Tr::kStagesAt, ring);
  } else if (warp < strips) {
    carry_strip<T, kKeys, kOutputs>(p, part, slot, barriers, ring);
  }
}

}  // namespace flash_qla::cuda::sm80
