// The serial passes of the backward in one launch: blocks of the reverse pass, which has the longer way, and behind
// them blocks of the forward pass, which makes the states again (forward_pass.cuh). Neither needs the other.
#pragma once

#include "cuda/sm80/forward_pass.cuh"
#include "cuda/sm80/reverse_step.cuh"

namespace flash_qla::cuda::sm80 {

// A strip's matrices in the workspace: the first block of the warp's strip in a matrix of a chunk, `row` blocks side by
// side.
__device__ __forceinline__ char* strip_blocks(char* matrices, const ForwardParams& p, int chunk, int row) {
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

// A warp that carries a strip's state from a sequence's start to its end.
template <class T, int kKeys>
__device__ void carry_on(const PassesParams& p, const Part& part, uint32_t barriers, Ring ring) {
  using Tr = Traits<kKeys>;
  int thread = threadIdx.x;
  Sums<Tr::kKeyTiles> state;
  state.clear();
  if (p.forward.initial_state.data != nullptr) {
    load_state(state, p.forward.initial_state, part.n, strip_place(p.forward, place_of_block()));
  }
  Packed<Tr::kKeyTiles> packed;
  pack<T>(state, packed);
  Step<T, kKeys, false> step;
  ErrorBlocks errors{};
  for (int number = 0; number * kStep < part.length; ++number) {
    if (number % kStepsPerChunk == 0) {
      const int chunk = number / kStepsPerChunk;
      store_blocks(packed, strip_blocks(p.states, p.forward, chunk, Tr::kKeyTiles), Tr::kKeyTiles * kBlockBytes);
      errors.at = strip_blocks(p.errors, p.forward, chunk, kChunkBlocks);
    }
    if (kKeys == 256) make_opaque(thread);
    ring.wait_full();
    const uint32_t stage = ring.stage(barriers + Tr::kStagesAt);
    step.begin(stage, stage + Tr::kValuesAt + static_cast<uint32_t>(thread / 32 * kValueBytes), thread % 32, packed);
    step.run(state, packed, errors, number * kStep);
    ring.release(thread % 32);
    ring.next();
  }
}

// A warp that carries the gradient of a strip's state from a sequence's end to its start.
template <class T, int kKeys>
__device__ void carry_back(const PassesParams& p, const Part& part, uint32_t barriers, Ring ring) {
  using Tr = Traits<kKeys>;
  using ThisStep = ReverseStep<T, kKeys>;
  int lane = threadIdx.x % 32;
  const uint32_t values_at = ReverseTraits<kKeys>::kValuesAt + threadIdx.x / 32 * kValueBytes;

  typename ThisStep::State state;
  state.clear();
  if (p.dht.data != nullptr) {
    load_state(state, p.dht, part.n, strip_place(p.forward, place_of_block()));
  }
  bool at_end = true;  // of a chunk
  for (int number = static_cast<int>(ceil_div(part.length, kStep)) - 1; number >= 0; --number) {
    const int chunk = number / kStepsPerChunk;
    make_opaque(lane);
    Packed<Tr::kKeyTiles> packed;
    if (at_end && p.gradients != nullptr) {
      pack<T>(state, packed);
      store_blocks(packed, strip_blocks(p.gradients, p.forward, chunk, Tr::kKeyTiles), Tr::kKeyTiles * kBlockBytes);
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
      char* to = strip_blocks(p.d_errors, p.forward, chunk, kChunkBlocks);
      store_blocks(rows, to + number % kStepsPerChunk * Tr::kTokenTiles * kBlockBytes, kChunkBlocks * kBlockBytes);
    }
    step.finish(state, sums, rows, of_d_o);
    ring.release(lane);
    ring.next();
    if (p.dv.data != nullptr) {
      const Place& block = place_of_block();
      const uint16_t* first = row_at(p.dv, block.part.b, block.part.begin + number * kStep, block.head);
      const int count = block.part.length - number * kStep;
      OutputRows<T>(first, p.dv.token, p.dv_columns, count, 0, strip_place(p.forward, block)).store(rows, 0);
    }
  }
  if (p.dh0.data != nullptr) {
    const Place& block = place_of_block();
    store_state(state, p.dh0, block.part.n, strip_place(p.forward, block));
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
    place_of_block() = {part, head, column};
  }
  __syncthreads();
  const Ring ring(barriers, f.stages, f.stage_bytes);
  if (warp == f.strips) {
    if (back) {
      load_steps<kKeys, true, true, sizeof(ReverseRecord)>(f, part, p.reverse_records, p.d_o, head, column, lane,
                                                           barriers + Tr::kStagesAt, ring);
    } else {
      load_steps<kKeys, false, false, kStateRecordBytes>(f, part, f.records, f.v, head, column, lane,
                                                         barriers + Tr::kStagesAt, ring);
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
