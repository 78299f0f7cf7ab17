// The serial passes of the backward in one launch: blocks of the reverse pass, which has the longer way, and behind
// them blocks of the forward pass, which makes the states again (forward_pass.cuh). Neither needs the other.
#pragma once

#include "cuda/sm80/forward_pass.cuh"
#include "cuda/sm80/reverse_step.cuh"

namespace flash_qla::cuda::sm80 {

// The warp that loads for the reverse pass: steps from the last one to the first.
template <int kKeys>
__device__ void load_steps_back(const PassesParams& p, const Part& part, int head, int column, int lane,
                                uint32_t first_stage, Ring ring) {
  using Tr = Traits<kKeys>;
  using Reverse = ReverseTraits<kKeys>;
  constexpr int kStep = Tr::kStep;
  const ForwardParams& f = p.forward;
  const int key_head = head / f.group;
  for (int step = static_cast<int>(ceil_div(part.length, kStep)) - 1; step >= 0; --step, ring.next()) {
    const int token = part.begin + step * kStep, count = min(kStep, part.length - step * kStep);
    const uint32_t stage = ring.stage(first_stage);
    const uint16_t* k = row_at(f.k, part.b, token, key_head);
    ring.wait_free();
    copy_rows<kKeys, kStep, 32>(stage + Tr::kKeysAt, k, f.k.token, f.K, count, lane);
    copy_rows<kKeys, kStep, 32>(stage + Tr::kQueriesAt, row_at(f.q, part.b, token, key_head), f.q.token, f.K, count,
                                lane);
    const int64_t chunk = part.first_chunk + step / Tr::kStepsPerChunk;
    const char* record = p.reverse_records + ((chunk * f.Hv + head) * Tr::kStepsPerChunk + step % Tr::kStepsPerChunk) *
                                                 static_cast<int64_t>(sizeof(typename Reverse::Record));
#pragma unroll 4
    for (int i = lane; i < static_cast<int>(sizeof(typename Reverse::Record) / 16); i += 32) {
      cp_async_16(stage + Tr::kRecordAt + static_cast<uint32_t>(i) * 16, record + i * 16, 16);
    }
    const bool given = p.d_o.data != nullptr;
    copy_values<kStep>(stage + Reverse::kValuesAt, given ? row_at(p.d_o, part.b, token, head) + column : k, p.d_o.token,
                       f.V - column, given ? count : 0, f.strips, lane);
    cp_async_arrive(ring.full());
  }
}

// A warp that carries the gradient of a strip's state from a sequence's end to its start.
template <class T, int kKeys>
__device__ void carry_back(const PassesParams& p, const Part& part, uint32_t barriers, Ring ring) {
  using Tr = Traits<kKeys>;
  using ThisStep = ReverseStep<T, kKeys>;
  using Record = typename ThisStep::Record;
  constexpr int kStep = Tr::kStep;
  int lane = threadIdx.x % 32;
  const uint32_t values_at = ReverseTraits<kKeys>::kValuesAt + threadIdx.x / 32 * Tr::kValueBytes;
  int number = static_cast<int>(ceil_div(part.length, kStep)) - 1;

  typename ThisStep::State state;
  state.clear();
  OutputRows<T> dv;
  {
    const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
    const StripPlace place = strip_place(p.forward, block);
    if (p.dht.data != nullptr) load_state(state, p.dht, block.n, place);
    dv = OutputRows<T>(row_at(p.dv, part.b, part.begin + number * kStep, place.head), p.dv.token, p.dv_columns, place);
  }
  bool at_end = true;  // of a chunk
  for (; number >= 0; --number, ring.next()) {
    make_opaque(lane);
    if (at_end && p.gradients != nullptr) {
      const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
      store_blocks<T>(state, strip_blocks(p.gradients, p.forward, block, number / Tr::kStepsPerChunk, Tr::kKeyTiles),
                      Tr::kKeyTiles * kBlockBytes);
    }
    at_end = number % Tr::kStepsPerChunk == 0;

    // dV' = diag(gamma_C / gamma) K dS1 + P^T dO; and dS0 begins with gamma_C dS1 + Q^T diag(scale gamma) dO
    typename ThisStep::Tokens sums;
    sums.clear();
    Packed<Tr::kKeyTiles> packed_state;
    const Range<T> of_state = ThisStep::pack_in_range(state, packed_state);
    ring.wait_full();
    const uint32_t stage = ring.stage(barriers + Tr::kStagesAt);
    const ThisStep step(stage, stage + values_at, lane);
    step.multiply_rows(sums, packed_state, Tr::kKeysAt, 0, Tr::kTokenTiles / 2);
    typename ThisStep::PackedTokens left;
    step.load_d_o(left);
    const Range<T> of_d_o = step.scale_d_o(left);
    const float decay = load_shared_f1(step.vector_at(offsetof(Record, decay)));
    multiply_all(state, decay * of_state.down * of_d_o.up);
    step.add_rows(state, left, Tr::kQueriesAt);
    step.multiply_tokens(sums, offsetof(Record, to_end), of_state.down);
    step.load_d_o(left);  // once more: there are no registers to keep it in
    step.multiply_transposed(sums, left, offsetof(Record, scores));

    // Z = dV' + strict(G o A)^T dV'
    const Range<T> of_sums = ThisStep::pack_in_range(sums, left);
    step.multiply_transposed(sums, left, offsetof(Record, inverse));
    if (Range<T>::kNarrow) multiply_all(sums, of_sums.down);
    if (p.d_errors != nullptr) {
      const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
      char* to = strip_blocks(p.d_errors, p.forward, block, number / Tr::kStepsPerChunk, kChunkBlocks);
      store_blocks<T>(sums, to + number % Tr::kStepsPerChunk * Tr::kTokenTiles * kBlockBytes,
                      kChunkBlocks * kBlockBytes);
    }

    // dV = B Z; dS0 -= K^T diag(gamma) B Z
    step.multiply_tokens(sums, offsetof(Record, beta));
    typename ThisStep::PackedTokens rows;
    pack<T>(sums, rows);
    step.multiply_tokens(sums, offsetof(Record, minus_gamma));
    const Range<T> of_scaled = ThisStep::pack_in_range(sums, left);
    if (Range<T>::kNarrow) multiply_all(state, of_d_o.down * of_scaled.up);
    step.add_rows(state, left, Tr::kKeysAt);
    if (Range<T>::kNarrow) multiply_all(state, of_scaled.down);
    ring.release(lane);
    if (p.dv.data != nullptr) {
      dv.store(rows, part.length - number * kStep);
      dv.skip(-2 * kStep);
    }
  }
  if (p.dh0.data != nullptr) {
    const BlockPlace block = load_place(barriers + Tr::kPlaceAt);
    store_state(state, p.dh0, block.n, strip_place(p.forward, block));
  }
}

template <class T, int kKeys>
__global__ void __launch_bounds__(Traits<kKeys>::kMostThreads, 1)
    sm80_passes_kernel(const __grid_constant__ PassesParams p) {
  using Tr = Traits<kKeys>;
  const ForwardParams& f = p.forward;
  const bool back = blockIdx.x < p.reverse_blocks;
  const unsigned block = back ? blockIdx.x : blockIdx.x - p.reverse_blocks, rest = block / f.blocks_per_head;
  const int n = static_cast<int>(rest / f.Hv), head = static_cast<int>(rest % f.Hv),
            column = static_cast<int>(block % f.blocks_per_head) * f.strips * kStrip;
  const Part part = part_at(f, n);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int strips = min(f.strips, (f.V - column + kStrip - 1) / kStrip);  // of this block
  const uint32_t barriers = smem_address(dynamic_shared<char>());
  if (threadIdx.x == 0) {
    Ring::init(barriers, f.stages, strips);
    store_place(barriers + Tr::kPlaceAt, {n, head, column, part.first_chunk});
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
      carry_strip<T, kKeys, false>(f, part, kNoSlot, barriers, ring);
    }
  }
}

}  // namespace flash_qla::cuda::sm80
