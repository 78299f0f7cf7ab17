// The serial passes of the backward in one launch: blocks of the reverse pass, which has the longer way, and behind
// them blocks of the forward pass, which makes the states again (forward_pass.cuh). Neither needs the other.
#pragma once

#include "cuda/sm80/forward_pass.cuh"
#include "cuda/sm80/reverse_step.cuh"

namespace flash_qla::cuda::sm80 {

// A strip's matrices in the workspace: the first block of the warp's strip in a matrix of a chunk, `row` blocks side by
// side.
__device__ __forceinline__ char* strip_blocks(char* matrices, const ForwardParams& p, const BlockPlace& block,
                                              int chunk, int row) {
  const int value_blocks = (p.V + kStrip - 1) / kStrip * 2, strip = static_cast<int>(threadIdx.x / 32);
  const int64_t matrix = static_cast<int64_t>(block.first_chunk + chunk) * p.Hv + block.head;
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

// A warp that carries a strip's state from a sequence's start to its end.
template <class T, int kKeys>
__device__ void carry_on(const PassesParams& p, const Part& part, uint32_t barriers, Ring ring) {
  using Tr = Traits<kKeys>;
  int thread = threadIdx.x;
  Sums<Tr::kKeyTiles> state;
  state.clear();
  if (p.forward.initial_state.data != nullptr) {
    const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
    load_state(state, p.forward.initial_state, block.n, strip_place(p.forward, block));
  }
  Packed<Tr::kKeyTiles> packed;
  pack<T>(state, packed);
  Step<T, kKeys, false> step;
  ErrorBlocks errors{};
  for (int number = 0; number * kStep < part.length; ++number) {
    if (number % kStepsPerChunk == 0) {
      const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
      const int chunk = number / kStepsPerChunk;
      store_blocks(packed, strip_blocks(p.states, p.forward, block, chunk, Tr::kKeyTiles), Tr::kKeyTiles * kBlockBytes);
      errors.at = strip_blocks(p.errors, p.forward, block, chunk, kChunkBlocks);
    }
    if (kKeys == 256) make_opaque(thread);
    ring.wait_full();
    const uint32_t stage = ring.stage(barriers + Tr::kStagesAt);
    step.begin(stage, stage + Tr::kValuesAt + static_cast<uint32_t>(thread / 32 * Tr::kValueBytes), thread % 32,
               packed);
    step.run(state, packed, errors, number * kStep);
    ring.release(thread % 32);
    ring.next();
  }
}

// The warp that loads for the reverse pass: steps from the last one to the first.
template <int kKeys>
__device__ void load_steps_back(const PassesParams& p, const Part& part, int head, int column, int lane,
                                uint32_t first_stage, Ring ring) {
  using Tr = Traits<kKeys>;
  const ForwardParams& f = p.forward;
  const int key_head = head / f.group;
  const TileCopier<kKeys, kStep, 32> copy_keys(f.k.pieces, lane), copy_queries(f.q.pieces, lane);
  const ValueCopier<kKeys> copy_values(p.d_o, column, f.strips, lane, p.d_o.data != nullptr);
  for (int step = static_cast<int>(ceil_div(part.length, kStep)) - 1; step >= 0; --step, ring.next()) {
    const int token = part.begin + step * kStep, count = min(kStep, part.length - step * kStep);
    const uint32_t stage = ring.stage(first_stage);
    const uint16_t* k = row_at(f.k, part.b, token, key_head);
    ring.wait_free();
    copy_keys.copy(stage + Tr::kKeysAt, k, f.k.token, count);
    const int64_t chunk = part.first_chunk + step / kStepsPerChunk;
    const char* record = reinterpret_cast<const char*>(p.reverse_records + (chunk * f.Hv + head) * kStepsPerChunk +
                                                       step % kStepsPerChunk);
    constexpr int kRecordPieces = sizeof(ReverseRecord) / 16;
#pragma unroll
    for (int i = 0; i < kRecordPieces; i += 32) {
      if (i + 32 > kRecordPieces && i + lane >= kRecordPieces) continue;
      cp_async_16(stage + Tr::kRecordAt + static_cast<uint32_t>((i + lane) * 16), record + (i + lane) * 16);
    }
    // A copy of nothing wants a legal address, too.
    copy_values.copy(stage + ReverseTraits<kKeys>::kValuesAt,
                     p.d_o.data != nullptr ? row_at(p.d_o, part.b, token, head) + column : k, p.d_o.token, count);
    copy_queries.copy(stage + Tr::kQueriesAt, row_at(f.q, part.b, token, key_head), f.q.token, count);
    cp_async_arrive(ring.full());
  }
}

// A warp that carries the gradient of a strip's state from a sequence's end to its start.
template <class T, int kKeys>
__device__ void carry_back(const PassesParams& p, const Part& part, uint32_t barriers, Ring ring) {
  using Tr = Traits<kKeys>;
  using ThisStep = ReverseStep<T, kKeys>;
  int lane = threadIdx.x % 32;
  const uint32_t values_at = ReverseTraits<kKeys>::kValuesAt + threadIdx.x / 32 * Tr::kValueBytes;

  typename ThisStep::State state;
  state.clear();
  if (p.dht.data != nullptr) {
    const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
    load_state(state, p.dht, block.n, strip_place(p.forward, block));
  }
  bool at_end = true;  // of a chunk
  for (int number = static_cast<int>(ceil_div(part.length, kStep)) - 1; number >= 0; --number) {
    const int chunk = number / kStepsPerChunk;
    make_opaque(lane);
    Packed<Tr::kKeyTiles> packed;
    if (at_end && p.gradients != nullptr) {
      pack<T>(state, packed);
      const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
      store_blocks(packed, strip_blocks(p.gradients, p.forward, block, chunk, Tr::kKeyTiles),
                   Tr::kKeyTiles * kBlockBytes);
    }
    at_end = number % kStepsPerChunk == 0;
    const Range<T> of_state = ThisStep::pack_in_range(state, packed);
    ring.wait_full();
    const uint32_t stage = ring.stage(barriers + Tr::kStagesAt);
    const ThisStep step(stage, stage + values_at, lane);

    typename ThisStep::Tokens sums;
    typename ThisStep::PackedTokens rows;
    Range<T> of_d_o, of_sums;
    step.begin(state, packed, of_state, sums, rows, of_d_o, of_sums);
    step.solve(sums, rows, of_sums);
    if (p.d_errors != nullptr) {
      pack<T>(sums, rows);
      const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
      char* to = strip_blocks(p.d_errors, p.forward, block, chunk, kChunkBlocks);
      store_blocks(rows, to + number % kStepsPerChunk * Tr::kTokenTiles * kBlockBytes, kChunkBlocks * kBlockBytes);
    }
    step.finish(state, sums, rows, of_d_o);
    ring.release(lane);
    ring.next();
    if (p.dv.data != nullptr) {
      const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
      const TokenPlace tokens = load_token_place(barriers + Tr::kPlaceAt);
      const uint16_t* first = row_at(p.dv, tokens.b, tokens.begin + number * kStep, block.head);
      OutputRows<T>(first, p.dv.token, p.dv_columns, tokens.length - number * kStep, 0, strip_place(p.forward, block))
          .store(rows, 0);
    }
  }
  if (p.dh0.data != nullptr) {
    const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
    store_state(state, p.dh0, block.n, strip_place(p.forward, block));
  }
}

template <class T, int kKeys>
__global__ void __launch_bounds__(kMostPassThreads, 1) sm80_passes_kernel(const __grid_constant__ PassesParams p) {
  using Tr = Traits<kKeys>;
  const ForwardParams& f = p.forward;
  const bool back = blockIdx.x < p.reverse_blocks;
  const unsigned block = back ? blockIdx.x : blockIdx.x - p.reverse_blocks, rest = block / f.blocks_per_head;
  const int head = static_cast<int>(rest % f.Hv),
            column = static_cast<int>(block % f.blocks_per_head) * f.strips * kStrip;
  Part part;
  find_part<false>(f, rest / f.Hv, false, &part);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int strips = min(f.strips, (f.V - column + kStrip - 1) / kStrip);  // of this block
  const uint32_t barriers = smem_address(dynamic_shared<char>());
  if (threadIdx.x == 0) {
    Ring::init(barriers, f.stages, strips);
    store_place(barriers + Tr::kPlaceAt, {part.n, head, column, part.first_chunk, 0, -1, -1, true, false});
    store_token_place(barriers + Tr::kPlaceAt, {part.b, part.begin, part.length});
  }
  __syncthreads();
  const Ring ring(barriers, f.stages, f.stage_bytes);
  if (warp == f.strips) {
    if (back) {
      load_steps_back<kKeys>(p, part, head, column, lane, barriers + Tr::kStagesAt, ring);
    } else {
      load_steps<kKeys, false>(f, part, head, column, lane, barriers + Tr::kStagesAt, ring);
    }
  } else if (warp < strips) {
    if (back) {
      carry_back<T, kKeys>(p, part, barriers, ring);
    } else {
      carry_on<T, kKeys>(p, part, barriers, ring);
    }
  }
}

}  // namespace flash_qla::cuda::sm80
