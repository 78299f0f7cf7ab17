// The serial pass of the forward: carries the states of a few strips through a sequence and makes O. A block has a warp
// for each strip and one that loads (docs/kernels/sm80.md).
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/sm80/strip.cuh"

namespace flash_qla::cuda::sm80 {

// The stages of a block's ring, and where a warp is in it.
class Ring {
 public:
  __device__ __forceinline__ Ring(uint32_t barriers, int stages, int stage_bytes)
      : barriers_(barriers), stages_(stages), stage_bytes_(stage_bytes) {}
  static __device__ void init(uint32_t barriers, int stages, int readers) {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(barriers + 16 * i, 32);  // every lane that loads
      mbarrier_init(barriers + 16 * i + 8, static_cast<uint32_t>(readers) * kWarpArrivals);
    }
  }
  __device__ __forceinline__ uint32_t full() const { return barriers_ + 16 * stage_; }
  __device__ __forceinline__ uint32_t free() const { return full() + 8; }
  // Since init() nobody has to wait for a free stage: the phase before the first counts as over.
  __device__ __forceinline__ void wait_free() const { mbarrier_wait(free(), parity_ ^ 1); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), parity_); }
  __device__ __forceinline__ void release(int lane) const {
    __syncwarp();  // all lanes have read
    mbarrier_arrive_warp(free(), lane);
  }
  __device__ __forceinline__ uint32_t stage(uint32_t first_stage) const {
    return first_stage + static_cast<uint32_t>(stage_) * static_cast<uint32_t>(stage_bytes_);
  }
  __device__ __forceinline__ void next() {
    if (++stage_ < stages_) return;
    stage_ = 0;
    parity_ ^= 1;
  }

 private:
  uint32_t barriers_;
  int stages_, stage_bytes_, stage_ = 0;
  uint32_t parity_ = 0;
};

template <int kKeys>
__device__ __forceinline__ const typename Traits<kKeys>::Record* record_at(const ForwardParams& p, int64_t first_chunk,
                                                                           int head, int step) {
  using Tr = Traits<kKeys>;
  const int64_t chunk = first_chunk + step / Tr::kStepsPerChunk;
  return reinterpret_cast<const typename Tr::Record*>(p.records) + (chunk * p.Hv + head) * Tr::kStepsPerChunk +
         step % Tr::kStepsPerChunk;
}

// The warp that loads: steps of a sequence into the ring.
template <int kKeys, bool kOutputs>
__device__ void load_steps(const ForwardParams& p, const DeviceSequence& sequence, int head, int column, int lane,
                           uint32_t first_stage, Ring ring) {
  using Tr = Traits<kKeys>;
  constexpr int kStep = Tr::kStep;
  const int key_head = head / p.group;
  const uint16_t* k = row_at(p.k, sequence.b, sequence.begin, key_head);
  const uint16_t* q = row_at(p.q, sequence.b, sequence.begin, key_head);
  const uint16_t* v = row_at(p.v, sequence.b, sequence.begin, head) + column;
  const int values = p.V - column;  // from here on
  const int pieces = 2 * p.strips;  // of 16 bytes in a row of V; a power of two
  const int piece_bits = 31 - __clz(pieces);
  const int steps = static_cast<int>(ceil_div(sequence.length, kStep));
  for (int step = 0; step < steps; ++step, ring.next()) {
    const int64_t left = sequence.length - static_cast<int64_t>(step) * kStep;
    const int count = static_cast<int>(left < kStep ? left : kStep);
    const uint32_t stage = ring.stage(first_stage);
    ring.wait_free();
    copy_rows<kKeys, kStep, 32>(stage + Tr::kKeysAt, k, p.k.token, p.K, count, lane);
    const char* record = reinterpret_cast<const char*>(record_at<kKeys>(p, sequence.first_chunk, head, step));
    constexpr int kRecordPieces = (kOutputs ? Tr::kRecordBytes : Tr::kStateRecordBytes) / 16;
#pragma unroll 4
    for (int i = lane; i < kRecordPieces; i += 32) {
      cp_async_16(stage + Tr::kRecordAt + static_cast<uint32_t>(i) * 16, record + i * 16, 16);
    }
#pragma unroll 2
    for (int i = lane; i < kStep * pieces; i += 32) {
      const int row = i >> piece_bits, piece = i & (pieces - 1), room = 2 * (values - 8 * piece);
      const int bytes = row >= count || room <= 0 ? 0 : room < 16 ? room : 16;
      cp_async_16(
          stage + Tr::kValuesAt + static_cast<uint32_t>(piece / 2 * Tr::kValueBytes) + value_offset(row, piece % 2),
          bytes > 0 ? v + row * p.v.token + 8 * piece : v, bytes);
    }
    if (kOutputs) copy_rows<kKeys, kStep, 32>(stage + Tr::kQueriesAt, q, p.q.token, p.K, count, lane);
    cp_async_arrive(ring.full());
    k += kStep * p.k.token;
    q += kStep * p.q.token;
    v += kStep * p.v.token;
  }
}

// What is kept of the state after the first `tokens` tokens of a sequence, a multiple of 64 or all of them.
template <class State>
__device__ __forceinline__ void keep_state(const ForwardParams& p, int64_t n, const DeviceSequence& sequence,
                                           int64_t tokens, const State& state, const StripPlace& place) {
  const bool at_end = tokens == sequence.length, at_chunk = tokens % kChunkSize == 0;
  // In one loop: the code that stores is long.
#pragma unroll 1
  for (int kind = 0; kind < 4; ++kind) {
    const DeviceStates* to = nullptr;
    int64_t row = -1;
    if (kind == 0 && p.h.data != nullptr && at_chunk && !at_end) {
      to = &p.h;
      row = sequence.first_chunk + tokens / kChunkSize;
    } else if (kind == 1 && p.checkpoint_every > 0 && tokens > 0 && tokens % p.checkpoint_every == 0) {
      to = &p.checkpoints;
      row = load_index(p.checkpoint_starts, n) + tokens / p.checkpoint_every - 1;
    } else if (kind == 2 && at_end && p.final_state.data != nullptr) {
      to = &p.final_state;
      row = n;
    } else if (kind == 3 && at_end && p.pool_indices.used) {
      to = &p.pool;
      row = write_slot(p.pool_indices, n, 0);
    }
    if (to != nullptr && row >= 0 && row < to->rows) store_state(state, *to, row, place);
  }
}

// States after listed tokens of a step, which begins at token `first` of B * T.
template <class T, int kKeys>
__device__ void keep_listed(const ForwardParams& p, const Step<T, kKeys>& step,
                            const typename Traits<kKeys>::Record& record, int64_t first, int count,
                            const typename Step<T, kKeys>::State& state, const typename Step<T, kKeys>::Tokens& errors,
                            const StripPlace& place) {
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int t = base + place.lane;
    uint32_t listed = __ballot_sync(0xffffffffu, t < count && p.lists.first[first + t] >= 0);
#pragma unroll 1
    for (; listed != 0; listed &= listed - 1) {
      const int token = base + __ffs(static_cast<int>(listed)) - 1;
#pragma unroll 1
      for (int32_t m = p.lists.first[first + token]; m >= 0; m = p.lists.next[m]) {
        const int64_t slot = slot_or_none(p.pool_indices, load_index(p.lists.indices, m));
        if (slot < 0) continue;
        const StateView view(p.pool, slot, place);
        step.state_after(state, errors, record, token, [&](int tile, const Sums<2>& sums) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            view.for_each(tile + i, [&](int e, char* at) { view.store(at, sums.x[i][e]); });
          }
        });
      }
    }
  }
}

// A warp that carries a strip.
template <class T, int kKeys, bool kOutputs>
__device__ void carry_strip(const ForwardParams& p, int64_t n, const DeviceSequence& sequence, int64_t slot,
                            const StripPlace& place, uint32_t first_stage, uint32_t values_at, Ring ring) {
  using Tr = Traits<kKeys>;
  using ThisStep = Step<T, kKeys>;
  constexpr int kStep = Tr::kStep, kPairs = Tr::kTokenTiles / 2;
  // Q S0 in two parts, each behind a chain of products that waits for itself. With 256 keys there are no registers for
  // it before E is packed.
  constexpr bool kEarly = kOutputs && kKeys <= 192;

  typename ThisStep::State state;
  state.clear();
  if (slot >= 0) load_state(state, p.pool, slot, place);
  if (p.initial_state.data != nullptr) load_state(state, p.initial_state, n, place);

  const int64_t first_token = sequence.b * p.sequences.T + sequence.begin;  // of B * T
  const int steps = static_cast<int>(ceil_div(sequence.length, kStep));
  uint16_t* o = const_cast<uint16_t*>(row_at(p.o, sequence.b, sequence.begin, place.head));
  for (int number = 0;; ++number, ring.next()) {
    const int64_t done = number < steps ? static_cast<int64_t>(number) * kStep : sequence.length;
    if (number == steps || number % Tr::kStepsPerChunk == 0) keep_state(p, n, sequence, done, state, place);
    if (number == steps) break;
    const int count = static_cast<int>(sequence.length - done < kStep ? sequence.length - done : kStep);

    Packed<Tr::kKeyTiles> packed_state;
    pack<T>(state, packed_state);
    ring.wait_full();
    const uint32_t stage = ring.stage(first_stage);
    const ThisStep step(stage, stage + values_at, place.lane);

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
    if (p.lists.first != nullptr) {
      const auto& record = *record_at<kKeys>(p, sequence.first_chunk, place.head, number);
      keep_listed(p, step, record, first_token + done, count, state, errors, place);
    }

    // O = scale diag(gamma) Q S0 + (P B) E
    if (kOutputs) {
      if (!kEarly) step.multiply_rows(outputs, packed_state, Tr::kQueriesAt, 0, kPairs);
      step.scale_outputs(outputs);
      step.multiply_triangle(outputs, plain, offsetof(typename Tr::Record, outputs));
    }

    // S1 = gamma_C S0 + K^T diag(beta gamma_C / gamma) E
    step.update(state, scaled);
    ring.release(place.lane);
    if (kOutputs) {
      store_outputs<T>(outputs, o, p.o.token, p.o_columns, count, place);
      o += kStep * p.o.token;
    }
  }
}

// Rows of a skipped sequence's outputs, values [column, column + size).
__device__ inline void write_zero_rows(const ForwardParams& p, const DeviceSequence& sequence, int head, int column,
                                       int size) {
  const int pieces = size / 4;
  uint16_t* o = const_cast<uint16_t*>(row_at(p.o, sequence.b, sequence.begin, head)) + column;
  for (int64_t i = threadIdx.x; i < sequence.length * pieces; i += blockDim.x) {
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
  const int64_t n = rest / p.Hv;
  const int head = static_cast<int>(rest % p.Hv),
            column = static_cast<int>(blockIdx.x % p.blocks_per_head) * p.strips * kStrip;
  const DeviceSequence sequence = sequence_at(p.sequences, n);
  const int64_t slot = read_slot(p.pool_indices, n);
  if (slot == kSkipRow) {
    if (kOutputs) write_zero_rows(p, sequence, head, column, p.strips * kStrip);
    return;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int strips = min(p.strips, (p.V - column + kStrip - 1) / kStrip);  // of this block
  const uint32_t barriers = smem_address(dynamic_shared<char>()), first_stage = barriers + Tr::kBarrierBytes;
  if (threadIdx.x == 0) Ring::init(barriers, p.stages, strips);
  __syncthreads();
  const Ring ring(barriers, p.stages, p.stage_bytes);
  if (warp == p.strips) {
    load_steps<kKeys, kOutputs>(p, sequence, head, column, lane, first_stage, ring);
  } else if (warp < strips) {
    const StripPlace place{head, column + warp * kStrip, lane, p.K, p.V};
    const uint32_t values_at = Tr::kValuesAt + static_cast<uint32_t>(warp * Tr::kValueBytes);
    carry_strip<T, kKeys, kOutputs>(p, n, sequence, slot, place, first_stage, values_at, ring);
  }
}

}  // namespace flash_qla::cuda::sm80
