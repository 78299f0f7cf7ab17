// The gate warp: the gates of every chunk, and the chunk list.
#pragma once

#include <cstddef>

#include "cuda/common/bulk.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm90/chunk_fwd/raw_gates.cuh"
#include "cuda/sm90/chunk_fwd/warp_role.cuh"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"

namespace flash_qla::cuda::sm90::fwd {

// One warp: the gates of every chunk, and the chunk list.
template <typename Traits>
struct GateRole : DutyRole<Traits> {
  using Base = DutyRole<Traits>;
  using Base::p;
  using Base::record;

  // g and beta of a chunk, if there is one, on their way, as load_gates() does it, with fewer instructions: half of the
  // lanes fetch g, the others beta.
  __device__ void fetch(uint32_t m) const {
    const int4 place = *reinterpret_cast<const int4*>(&record(m));  // row, valid, flags, head
    if (place.y < 0) return;
    const int number = this->lane();
    const bool is_beta = number >= 16;
    const float* data = is_beta ? p.args.beta : p.args.g;
    const bool given = data != nullptr;
    // With nothing to read, any mapped address does: zero bytes are taken from it.
    const void* base = given ? static_cast<const void*>(data) : is_beta ? static_cast<const void*>(&kOne) : p.args.q;
    // Strides below 2^29 elements: the launcher has looked.
    const int token_bytes =
        given ? 4 * static_cast<int>(is_beta ? p.args.beta_token_stride : p.args.g_token_stride) : 0;
    const int head_bytes = given ? 4 * static_cast<int>(is_beta ? p.args.beta_head_stride : p.args.g_head_stride) : 0;
    const void* from = advance(advance(base, place.w, head_bytes), place.x, token_bytes);
    const uint32_t to = this->stage_raw(m) + (is_beta ? Traits::kRawBeta : Traits::kRawG);
    const int valid = given || is_beta ? place.y : 0;
#pragma unroll
    for (int token = number & 15; token < kChunk; token += 16) {
      const bool have = token < valid;
      copy_async_4(to + 4 * token, have ? advance(from, token, token_bytes) : base, have);
    }
    copy_async_arrive(smem() + Traits::kFullRaw + 8 * (m % Traits::kStagesRaw));
  }

  // The sums of g up to the lane's two tokens, for the backward.
  __device__ void keep_sums(uint32_t m, float x, float y) const {
    if (p.args.g_cumsum == nullptr) return;
    const ChunkRecord& c = record(m);
    const int token = 2 * this->lane(), heads = p.args.num_value_heads;
    float* out = p.args.g_cumsum + int64_t{c.row + token} * heads + c.head;
    if (token < c.valid) out[0] = x;
    if (token + 1 < c.valid) out[heads] = y;
  }

  // The open tile of the chunk list, a word of its next record to a lane, so that the chunks in a tile's middle are
  // listed without reading anything: by the walker in shared memory, which opens the tiles, it took a third of the
  // warp's time.
  struct OpenTile {
    int word, remaining, silent;  // as in ChunkWalker
    ChunkEnd end;                 // likewise; only where chunks end where states are kept
  };
  // Words of a record.
  static constexpr int kRecordWords = sizeof(ChunkRecord) / 4;
  static constexpr int kRow = offsetof(ChunkRecord, row) / 4, kValid = offsetof(ChunkRecord, valid) / 4,
                       kFlags = offsetof(ChunkRecord, flags) / 4, kNumber = offsetof(ChunkRecord, chunk) / 4,
                       kPosition = offsetof(ChunkRecord, position) / 4;
  __device__ ChunkWalker& walker() const {
    return *reinterpret_cast<ChunkWalker*>(shared_memory() + Traits::kSmemWalker);
  }
  __device__ OpenTile read_tile() const {
    const ChunkWalker& from = walker();
    const int word = reinterpret_cast<const int*>(&from.next)[min(this->lane(), kRecordWords - 1)];
    OpenTile tile{word, from.remaining, from.silent, {}};
    if constexpr (Traits::kEndsWhereKept) tile.end = from.end;
    return tile;
  }
  // For the open tile's next chunk, `skipped` tokens after that of tile.word.
  __device__ int32_t find_kept(const OpenTile& tile, int skipped) const {
    const int row = __shfl_sync(0xffffffffu, tile.word, kRow) + skipped;
    const int position = __shfl_sync(0xffffffffu, tile.word, kPosition) + (skipped > 0 && tile.end.inside == 0);
    return static_cast<int32_t>(
        __reduce_min_sync(0xffffffffu, static_cast<uint32_t>(tokens_to_kept<Traits>(
                                           p.args, row, position, tile.end.inside, tile.remaining, this->lane(), 32))));
  }
  __device__ void list_chunk(uint32_t m, OpenTile& tile) const {
    const int number = this->lane();
    int* to =
        reinterpret_cast<int*>(shared_memory() + Traits::kSmemChunks) + m % Traits::kChunkRing * kRecordWords + number;
    if (tile.remaining <= 0) {
      if (number == 0) {
        walker().remaining = -1;
        open_next_tile<Traits>(p, walker());
      }
      __syncwarp();
      tile = read_tile();
      if (tile.remaining < 0) {
        if (number == kValid) *to = -1;
        return;
      }
      if constexpr (Traits::kEndsWhereKept) {
        tile.end.inside = 0;
        tile.end.kept = find_kept(tile, 0);
      }
    }
    int valid = min(tile.remaining, kChunk), end_flags = 0;
    if constexpr (Traits::kEndsWhereKept) valid = min(valid, min(kChunk - tile.end.inside, tile.end.kept));
    const int tokens = tile.remaining;
    tile.remaining -= valid;
    if constexpr (Traits::kEndsWhereKept) {
      end_flags = end_chunk(tile.end, valid, tokens, [&] { return find_kept(tile, valid); });
    }
    int word = number == kValid ? valid : tile.word;
    const bool is_flags = number == kFlags;
    if (is_flags) word |= end_flags | (tile.remaining == 0 ? kLastChunk : 0) | (tile.silent > 0 ? kSilentChunk : 0);
    if (number < kRecordWords) *to = word;
    tile.silent -= tile.silent > 0;
    const int row_step = Traits::kEndsWhereKept ? valid : kChunk;
    const int chunk_step = Traits::kEndsWhereKept && tile.end.inside != 0 ? 0 : 1;
    const int step = number == kRow ? row_step : number == kNumber || number == kPosition ? chunk_step : 0;
    tile.word = is_flags ? tile.word & kFlagsOfTile : tile.word + step;
  }

  __device__ void run() const {
    static_assert(Traits::kStagesRaw == 2 * Traits::kStagesGate);
    OpenTile tile = read_tile();
#pragma unroll 1
    for (uint32_t m = 0; m < Traits::kStagesGate && record(m).valid >= 0; ++m) fetch(m);
#pragma unroll 1
    for (uint32_t m = 0; record(m).valid >= 0; ++m) {
      // The stages of chunk m - 4 are free then: that of its gates for this chunk's, that of its g and beta for chunk
      // m + 4.
      if (m >= Traits::kStagesGate) this->wait_done(m - Traits::kStagesGate);
      this->wait_raw(m);
      const uint32_t gate = this->stage_gate(m), raw = this->stage_raw(m) + 8 * this->lane();
      make_gates<Traits>(
          p.args.scale, load_shared_f2(raw + Traits::kRawG), [&] { return load_shared_f2(raw + Traits::kRawBeta); },
          has_few_tokens<Traits>(record(m)), gate, gate, this->lane(),
          [&](float x, float y) {
            if constexpr (Traits::kKeepsA) keep_sums(m, x, y);
          });
      __syncwarp();
      mbarrier_arrive_warp(smem() + Traits::kFullGate + 8 * (m % Traits::kStagesGate), this->lane());
      fetch(m + Traits::kStagesGate);
      list_chunk(m + kFirstRecords<Traits>, tile);
      __syncwarp();
    }
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
