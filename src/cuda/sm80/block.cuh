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
  __device__ __forceinline__ uint32_t full() const { return barriers_ + 16 * (place_ >> 1); }
  __device__ __forceinline__ uint32_t free() const { return full() + 8; }
  // Since init() nobody has to wait for a free stage: the phase before the first counts as over.
  __device__ __forceinline__ void wait_free() const { mbarrier_wait(free(), (place_ & 1) ^ 1); }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), place_ & 1); }
  __device__ __forceinline__ void release(int lane) const {
    __syncwarp();  // all lanes have read
    mbarrier_arrive_warp(free(), lane);
  }
  __device__ __forceinline__ uint32_t stage(uint32_t first_stage) const {
    return first_stage + (place_ >> 1) * static_cast<uint32_t>(stage_bytes_);
  }
  __device__ __forceinline__ void next() {
    place_ += 2;
    if (place_ >= 2 * static_cast<uint32_t>(stages_)) place_ = (place_ & 1) ^ 1;
  }

 private:
  uint32_t barriers_;
  int stages_, stage_bytes_;
  uint32_t place_ = 0;  // twice the stage's number, and the parity of the phases that have been waited for
};

__device__ __forceinline__ const StepRecord* record_at(const ForwardParams& p, int64_t first_chunk, int head,
                                                       int step) {
  return p.records + ((first_chunk + step / kStepsPerChunk) * p.Hv + head) * kStepsPerChunk + step % kStepsPerChunk;
}

// The warp that loads: steps of a sequence into the ring.
template <int kKeys, bool kOutputs>
__device__ void load_steps(const ForwardParams& p, const Part& part, int head, int column, int lane,
                           uint32_t first_stage, Ring ring) {
  using Tr = Traits<kKeys>;
  const int key_head = head / p.group;
  const uint16_t* k = row_at(p.k, part.b, part.begin, key_head);
  const uint16_t* q = row_at(p.q, part.b, part.begin, key_head);
  const uint16_t* v = row_at(p.v, part.b, part.begin, head) + column;
  const TileCopier<kKeys, kStep, 32> copy_keys(p.k.pieces, lane), copy_queries(p.q.pieces, lane);
  // V: a lane's column is the same in every row.
  const int pieces = 2 * p.strips, piece_bits = 31 - __clz(pieces);  // of 16 bytes in a row; a power of two
  const int piece = lane & (pieces - 1), first_row = lane >> piece_bits, rows_on = 32 >> piece_bits;
  const bool has_values = column / 8 + piece < p.v.pieces;
  const uint32_t values_at = Tr::kValuesAt + static_cast<uint32_t>(piece / 2 * Tr::kValueBytes);

  const int steps = static_cast<int>(ceil_div(part.length, kStep));
  for (int step = 0; step < steps; ++step, ring.next()) {
    const int count = min(kStep, part.length - step * kStep);
    const uint32_t stage = ring.stage(first_stage);
    ring.wait_free();
    copy_keys.copy(stage + Tr::kKeysAt, k, p.k.token, count);
    const char* record = reinterpret_cast<const char*>(record_at(p, part.first_chunk, head, step)) + lane * 16;
    constexpr int kRecordPieces = (kOutputs ? Tr::kRecordBytes : Tr::kStateRecordBytes) / 16;
#pragma unroll
    for (int i = 0; i < kRecordPieces; i += 32) {
      if (i + 32 > kRecordPieces && i + lane >= kRecordPieces) continue;
      cp_async_16(stage + Tr::kRecordAt + static_cast<uint32_t>((i + lane) * 16), record + i * 16);
    }
    const uint16_t* from = v + first_row * p.v.token + 8 * piece;
#pragma unroll 2
    for (int row = first_row; row < kStep; row += rows_on, from += rows_on * p.v.token) {
      const bool inside = has_values && row < count;
      cp_async_16_or_zero(stage + values_at + value_offset(row, piece % 2), inside ? from : v, inside);
    }
    if (kOutputs) copy_queries.copy(stage + Tr::kQueriesAt, q, p.q.token, count);
    cp_async_arrive(ring.full());
    k += kStep * p.k.token;
    q += kStep * p.q.token;
    v += kStep * p.v.token;
  }
}

}  // namespace flash_qla::cuda::sm80
