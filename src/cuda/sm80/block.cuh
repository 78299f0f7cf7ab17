// What the blocks of the serial passes have in common: the ring of stages, and the warp that loads into it.
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/tile.cuh"

namespace flash_qla::cuda::sm80 {

// What a block works on, the same for all of its threads: a sequence, or a segment of one. No call has more than 2^31
// tokens.
struct Part {
  int b, begin, length, first_chunk;
  int n;             // the sequence, or the number of the part
  int offset;        // tokens of the sequence before it
  int start_row;     // of `starts`, or -1: from the sequence's initial state where it is the first, else from zero
  int copy_row;      // of `starts`: where its start is left, or -1
  int end_row;       // of `starts` (`transitions`): where its end is left, or -1
  bool first, last;  // of its sequence
  bool transition;   // from the identity, without values
};

// Part `number` of a pass; false: there is none. kLocal: segments for their ends alone, which the last one of a
// sequence does not need, and (transition) their transitions, which the first one does not need either.
template <bool kLocal>
__device__ __forceinline__ bool find_part(const PassParams& p, int64_t number, bool transition, Part* part) {
  const SequenceTable& table = p.sequences;
  *part = {0, 0, 0, 0, static_cast<int>(number), 0, -1, -1, -1, true, true, transition};
  DeviceSequence s;
  if (kLocal && p.parts != nullptr) {
    s = p.parts[number];
    part->start_row = static_cast<int>(number);
  } else if (p.rule.least_chunks == 0) {
    s = sequence_at(table, number);
  } else {
    const int64_t at_least = segment_chunks(p.rule, total_chunks(table));
    const auto first = [&](int64_t n) { return first_segment(n, sequence_at(table, n).first_chunk, at_least); };
    const int64_t n = last_not_above(table.N, number, first);
    s = sequence_at(table, n);
    const int64_t chunks = ceil_div(s.length, kChunkSize), segments = segments_of(p.rule, chunks, at_least);
    const int64_t segment = number - first(n);
    if (segment >= segments || (kLocal && segments == 1)) return false;
    part->n = static_cast<int>(n);
    part->first = segment == 0;
    part->last = segment == segments - 1;
    if (segments > 1) {
      const int row = static_cast<int>(s.first_chunk / at_least + segment);
      if (kLocal) {
        if (part->last || (transition && part->first)) return false;
        part->copy_row = part->first ? row : -1;
        part->end_row = transition ? row : row + 1;
      } else {
        part->start_row = row;
      }
    }
    const int64_t begin = segment * chunks / segments, end = (segment + 1) * chunks / segments;
    part->offset = static_cast<int>(begin * kChunkSize);
    s.begin += begin * kChunkSize;
    s.first_chunk += begin;
    s.length = (part->last ? s.length : end * kChunkSize) - begin * kChunkSize;
  }
  part->b = static_cast<int>(s.b);
  part->begin = static_cast<int>(s.begin);
  part->length = static_cast<int>(s.length);
  part->first_chunk = static_cast<int>(s.first_chunk);
  return true;
}

// Whether a part leaves nothing of the state before it. The same in all warps that ask.
__device__ __forceinline__ bool forgets(const PassParams& p, int first_chunk, int length, int head) {
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < static_cast<int>(ceil_div(length, kChunkSize)); i += 32) {
    sum += p.decays[static_cast<int64_t>(first_chunk + i) * p.Hv + head];
  }
  return warp_sum(sum) <= p.decay_threshold;
}

// What the warps of a block want to know at times only lies in shared memory, between the barriers and the stages, and
// is read where it is needed: in between it costs no registers.
struct Place {
  Part part;
  int head, column;  // value head, first value column of the block
};
static_assert(sizeof(Place) <= kPlaceBytes);

__device__ __forceinline__ Place& place_of_block() {
  return *reinterpret_cast<Place*>(dynamic_shared<char>() + Traits<64>::kPlaceAt);
}

// What a block of a pass works on, and its strips.
struct BlockStrips {
  int64_t part;  // its number
  int head, column, strips;
};
__device__ __forceinline__ BlockStrips strips_of_block(const PassParams& p, unsigned block, int blocks_per_head,
                                                       int columns) {
  const unsigned rest = block / blocks_per_head;
  const int column = static_cast<int>(block % blocks_per_head) * p.strips * kStrip;
  const int strips = min(p.strips, (columns - column + kStrip - 1) / kStrip);
  return {rest / p.Hv, static_cast<int>(rest % p.Hv), column, strips};
}

// The stages of a block's ring, and where a warp is in it.
class Ring {
 public:
  __device__ __forceinline__ Ring(uint32_t barriers, int stages, int stage_bytes)
      : barriers_(barriers), stages_(stages), stage_bytes_(stage_bytes) {}
  // By all threads of a block: its ring and its place are ready behind this.
  static __device__ __forceinline__ Ring start(const PassParams& p, const Part& part, const BlockStrips& block) {
    const uint32_t barriers = smem_address(dynamic_shared<char>());
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.stages; ++i) {
        mbarrier_init(barriers + 16 * i, 32);  // every lane that loads
        mbarrier_init(barriers + 16 * i + 8, static_cast<uint32_t>(block.strips) * kWarpArrivals);
      }
      place_of_block() = {part, block.head, block.column};
    }
    __syncthreads();
    return Ring(barriers, p.stages, p.stage_bytes);
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
  __device__ __forceinline__ uint32_t stage() const {
    return barriers_ + Traits<64>::kStagesAt + (place_ >> 1) * static_cast<uint32_t>(stage_bytes_);
  }
  // Of as many steps ago, up to the number of stages.
  __device__ __forceinline__ uint32_t stage_before(int steps) const {
    const int place = static_cast<int>(place_ >> 1) - steps;
    return barriers_ +
           static_cast<uint32_t>(Traits<64>::kStagesAt + (place < 0 ? place + stages_ : place) * stage_bytes_);
  }
  // Where step `number` is in a ring of two stages.
  __device__ __forceinline__ void set_of_two(int number) {
    place_ = static_cast<uint32_t>((number & 1) * 2 + (number >> 1 & 1));
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

// The warp that loads: steps of a part into the ring, kBack from its last to its first. kRecordBytes: what is copied of
// a record. `values`: V or dO, null: zero. Those of a transition are zero, too.
template <int kKeys, bool kQueries, bool kBack, int kRecordBytes, class Record>
__device__ void load_steps(const PassParams& p, const Part& part, const Record* records, const Rows& values,
                           const BlockStrips& block, Ring ring) {
  using Tr = Traits<kKeys, Record>;
  const int lane = threadIdx.x % 32, head = block.head, key_head = head / p.group;
  const int steps = static_cast<int>(ceil_div(part.length, kStep));
  const bool has_values = values.data != nullptr && !part.transition;
  const TileCopier<kKeys, kStep, 32> copy_keys(p.k.pieces, lane), copy_queries(p.q.pieces, lane);
  // Of 16-byte pieces of V's rows, a power of two, a lane has one column; without values all become zero.
  const int pieces = 2 * p.strips, piece_bits = 31 - __clz(pieces), piece = lane & (pieces - 1);
  const int first_row = lane >> piece_bits, rows_on = 32 >> piece_bits;
  const bool inside_row = has_values && block.column / 8 + piece < values.pieces;
  const auto copy_values = [&](uint32_t to, const uint16_t* from, int count) {
    to += static_cast<uint32_t>(piece / 2 * kValueBytes);
    const uint16_t* at = from + first_row * values.token + 8 * piece;
#pragma unroll 2
    for (int row = first_row; row < kStep; row += rows_on, at += rows_on * values.token) {
      const bool inside = inside_row && row < count;  // a copy of nothing wants a legal address, too
      cp_async_16_or_zero(to + value_offset(row, piece % 2), inside ? at : from, inside);
    }
  };
  const int64_t direction = kBack ? -kStep : kStep, first_token = part.begin + (kBack ? (steps - 1) * kStep : 0);
  const uint16_t* k = row_at(p.k, part.b, first_token, key_head);
  const uint16_t* q = row_at(p.q, part.b, first_token, key_head);
  const uint16_t* v = row_at(values, part.b, first_token, head) + block.column;
  for (int i = 0; i < steps; ++i, ring.next()) {
    const int step = kBack ? steps - 1 - i : i, count = min(kStep, part.length - step * kStep);
    const uint32_t stage = ring.stage();
    ring.wait_free();
    copy_keys.copy(stage + Tr::kKeysAt, k, p.k.token, count);
    const int64_t chunk = part.first_chunk + step / kStepsPerChunk;
    const char* record =
        reinterpret_cast<const char*>(records + (chunk * p.Hv + head) * kStepsPerChunk + step % kStepsPerChunk);
    constexpr int kPieces = kRecordBytes / 16;
#pragma unroll
    for (int first = 0; first < kPieces; first += 32) {
      if (first + 32 > kPieces && first + lane >= kPieces) continue;
      cp_async_16(stage + Tr::kRecordAt + static_cast<uint32_t>((first + lane) * 16), record + (first + lane) * 16);
    }
    copy_values(stage + Tr::kValuesAt, has_values ? v : k, count);
    if (kQueries) copy_queries.copy(stage + Tr::kQueriesAt, q, p.q.token, count);
    cp_async_arrive(ring.full());
    k += direction * p.k.token;
    q += direction * p.q.token;
    v += direction * values.token;
  }
}

}  // namespace flash_qla::cuda::sm80
