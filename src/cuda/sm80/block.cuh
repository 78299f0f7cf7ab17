// What the blocks of the serial passes have in common: the ring of stages, and the warp that loads into it.
#pragma once

#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/tile.cuh"

namespace flash_qla::cuda::sm80 {

// Tokens of one sequence that a block works on. No call has more than 2^31 of them.
struct Part {
  int b, begin, length, first_chunk;
};

__device__ __forceinline__ Part part_at(const ForwardParams& p, int64_t n) {
  const DeviceSequence s = p.parts != nullptr ? p.parts[n] : sequence_at(p.sequences, n);
  return {static_cast<int>(s.b), static_cast<int>(s.begin), static_cast<int>(s.length),
          static_cast<int>(s.first_chunk)};
}

// What a block works on, in shared memory between the barriers and the stages: a warp reads it where it needs it, which
// costs no registers in between.
struct BlockPlace {
  int n, head, column, first_chunk;  // sequence (or part), value head, first value column, number of the first chunk
};

__device__ __forceinline__ void store_place(uint32_t shared, const BlockPlace& place) {
  store_shared_u4(shared, make_uint4(static_cast<uint32_t>(place.n), static_cast<uint32_t>(place.head),
                                     static_cast<uint32_t>(place.column), static_cast<uint32_t>(place.first_chunk)));
}
__device__ __forceinline__ BlockPlace load_place(uint32_t shared) {
  const uint4 raw = load_shared_u4(shared);
  return {static_cast<int>(raw.x), static_cast<int>(raw.y), static_cast<int>(raw.z), static_cast<int>(raw.w)};
}

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
__device__ void load_steps(const ForwardParams& p, const Part& part, int head, int column, int lane,
                           uint32_t first_stage, Ring ring) {
  using Tr = Traits<kKeys>;
  constexpr int kStep = Tr::kStep;
  const int key_head = head / p.group;
  const uint16_t* k = row_at(p.k, part.b, part.begin, key_head);
  const uint16_t* q = row_at(p.q, part.b, part.begin, key_head);
  const uint16_t* v = row_at(p.v, part.b, part.begin, head) + column;
  const int values = p.V - column;  // from here on
  const int pieces = 2 * p.strips;  // of 16 bytes in a row of V; a power of two
  const int piece_bits = 31 - __clz(pieces);
  const int steps = static_cast<int>(ceil_div(part.length, kStep));
  for (int step = 0; step < steps; ++step, ring.next()) {
    const int count = min(kStep, part.length - step * kStep);
    const uint32_t stage = ring.stage(first_stage);
    ring.wait_free();
    copy_rows<kKeys, kStep, 32>(stage + Tr::kKeysAt, k, p.k.token, p.K, count, lane);
    const char* record = reinterpret_cast<const char*>(record_at<kKeys>(p, part.first_chunk, head, step));
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

}  // namespace flash_qla::cuda::sm80
