// The serial passes of the backward in one launch: blocks of the reverse pass, which has the longer way, and behind
// them blocks of the forward pass, which makes the states again (forward_pass.cuh). Neither needs the other.
#pragma once

#include "cuda/sm80/forward_pass.cuh"
#include "cuda/sm80/reverse_step.cuh"

namespace flash_qla::cuda::sm80 {

// A warp that carries the gradient of a strip's state from a sequence's end to its start.
template <class T, int kKeys>
__device__ void carry_back(const PassParams& p, const Part& part, Ring ring) {
  using Tr = ReverseTraits<kKeys>;
  using ThisStep = ReverseStep<T, kKeys>;
  int lane = threadIdx.x % 32;
  const uint32_t values_at = Tr::kValuesAt + threadIdx.x / 32 * kValueBytes;

  typename ThisStep::State state{};
  const auto place = [&] { return strip_place(p.K, p.V); };
  if (p.dht.data != nullptr) load_state(state, p.dht, part.n, place());
  bool at_end = true;  // of a chunk
  for (int number = static_cast<int>(ceil_div(part.length, kStep)) - 1; number >= 0; --number) {
    const int chunk = number / kStepsPerChunk;
    recompute_from(lane);
    Packed<Tr::kKeyTiles> packed;
    if (at_end && p.matrices.gradients != nullptr) {
      packed = pack<T>(state);
      store_blocks(packed, strip_blocks(p.matrices.gradients, p, chunk, Tr::kKeyTiles), Tr::kKeyTiles * kBlockBytes);
    }
    at_end = number % kStepsPerChunk == 0;
    const Range<T> of_state = ThisStep::pack_in_range(state, packed);
    ring.wait_full();
    const uint32_t stage = ring.stage();
    ThisStep step({stage, stage + values_at, lane});
    typename ThisStep::Tokens sums;
    step.begin(state, packed, of_state, sums);
    if (p.matrices.d_errors != nullptr) {
      char* to = strip_blocks(p.matrices.d_errors, p, chunk, kChunkBlocks);
      store_blocks(pack<T>(sums), to + number % kStepsPerChunk * Tr::kTokenTiles * kBlockBytes,
                   kChunkBlocks * kBlockBytes);
    }
    const auto d_v = step.finish(state, sums);
    ring.release(lane);
    ring.next();
    if (p.dv.data != nullptr) {
      const Place& block = place_of_block();
      const uint16_t* first = row_at(p.dv, block.part.b, block.part.begin + number * kStep, block.head);
      const int count = block.part.length - number * kStep;
      OutputRows(first, p.dv.token, p.dv_columns, count, 0, place()).store(d_v, 0);
    }
  }
  if (p.dh0.data != nullptr) {
    const Place& block = place_of_block();
    if constexpr (!Range<T>::kNarrow) {  // fp16 rounds no more than a product in TF32
      // The stages of the first chunk's steps hold what they held: nothing is loaded any more.
      float since_start = 1.f;
#pragma unroll 1
      for (int i = 0; i < kStepsPerChunk && i * kStep < block.part.length; ++i) {
        const uint32_t stage = ring.stage_before(i + 1);
        const ThisStep step({stage, stage + values_at, lane});
        step.add_rest(state, since_start);
        since_start *= step.decay();
      }
    }
    store_state(state, p.dh0, block.part.n, place());
  }
}

template <class T, int kKeys>
__global__ void __launch_bounds__(kMostPassThreads, 1) sm80_passes_kernel(const __grid_constant__ PassParams p) {
  const bool back = blockIdx.x < p.reverse_blocks;
  const BlockStrips block =
      strips_of_block(p, back ? blockIdx.x : blockIdx.x - p.reverse_blocks, p.blocks_per_head, p.V);
  Part part;
  find_part<false>(p, block.part, false, &part);
  const Ring ring = Ring::start(p, part, block);
  const int warp = threadIdx.x / 32;
  if (warp == p.strips) {
    if (back) {
      load_steps<kKeys, true, true, sizeof(ReverseRecord)>(p, part, p.reverse_records, p.d_o, block, ring);
    } else {
      load_steps<kKeys, false, false, kStateRecordBytes>(p, part, p.records, p.v, block, ring);
    }
  } else if (warp < block.strips) {
    if (back) {
      carry_back<T, kKeys>(p, part, ring);
    } else {
      carry_strip<T, kKeys, Pass::kBackward>(p, part, kNoSlot, ring);
    }
  }
}

}  // namespace flash_qla::cuda::sm80
