// The auxiliary warps with one duty each: copies; gates and the chunk list; the inverse, every second chunk a warp; the
// products K K^T and Q K^T.
#pragma once

#include <cstddef>

#include "../../common/bulk.cuh"
#include "../../common/fragment.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/mma.cuh"
#include "../../common/tma.cuh"
#include "../../common/wgmma.cuh"
#include "aux_role.cuh"
#include "chunk_stream.cuh"
#include "clear.cuh"
#include "fast_inverse.cuh"
#include "lane_place.cuh"

namespace flash_qla::cuda::sm90 {

template <typename Traits>
struct DutyRole : ChunkPlaces<Traits> {
  using Element = typename Traits::Element;
  using Places = ChunkPlaces<Traits>;
  using Places::opaque, Places::record, Places::stage_k, Places::stage_q, Places::stage_v;
  const ChunkForwardKernelParams& p;
  int thread;  // of those that share the duty

  __device__ int lane() const { return opaque(thread); }  // of a duty of one warp
  __device__ uint32_t stage_gate(uint32_t m) const {
    return smem() + Traits::kSmemGate + m % Traits::kStagesGate * Traits::kBytesGate;
  }
  __device__ uint32_t stage_raw(uint32_t m) const {
    return smem() + Traits::kSmemRaw + m % Traits::kStagesRaw * Traits::kBytesRaw;
  }
  __device__ uint32_t tile_a(uint32_t m) const {
    return smem() + Traits::kSmemA + m % Traits::kStagesA * Traits::kBytesMatrix;
  }
  __device__ uint32_t full_p(uint32_t m) const { return smem() + Traits::kFullP + 8 * (m & 1); }
  __device__ void wait_done(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kDone + 8 * (m % Traits::kBarriersDone), m / Traits::kBarriersDone & 1);
  }
  __device__ void wait_gates(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullGate + 8 * (m % Traits::kStagesGate), m / Traits::kStagesGate & 1);
  }
  __device__ void wait_raw(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullRaw + 8 * (m % Traits::kStagesRaw), m / Traits::kStagesRaw & 1);
  }
};

// One warp: K, Q and V into their stages, O out of V's.
template <typename Traits>
struct CopyRole : DutyRole<Traits> {
  using Base = DutyRole<Traits>;
  using Element = typename Traits::Element;
  using Base::p;
  using Base::record;

  // Of a chunk's record: what its loads take. Read ahead, so that a load goes as soon as its stage is free.
  struct Rows {
    int row, valid, head, key_head;
  };
  __device__ Rows rows(uint32_t m) const {
    const ChunkRecord& c = record(m);
    return {c.row, c.valid, c.head, c.key_head};
  }
  __device__ void load_k(uint32_t m, const Rows& c) const {
    if (c.valid < 0) return;
    const uint32_t barrier = smem() + Traits::kFullK + 8 * (m % Traits::kStagesK);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(this->stage_k(m), &p.k, barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_q(uint32_t m, const Rows& c) const {
    if (c.valid < 0) return;
    const uint32_t barrier = smem() + Traits::kFullQ + 8 * (m % Traits::kBarriersQ);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(this->stage_q(m), &p.q, barrier, 0, c.row, 0, c.key_head);
  }
  // At a sequence's end V comes through a barrier of its own: its tail is cleared before it is passed on. The
  // announcement also says that the warp has read O of the stage: for racecheck all lanes make it.
  static constexpr bool kAllAnnounceV = kWarpArrivals == 32;
  __device__ void load_v(uint32_t m, const Rows& c) const {
    if (c.valid < 0) return;
    const uint32_t barrier = c.valid == kChunk ? this->full_p(m) : smem() + Traits::kTailV + 8 * (m & 1);
    if (kAllAnnounceV && this->lane() != 0) return mbarrier_arrive(barrier);
    mbarrier_arrive_expect(barrier, Traits::kBytesV);
    tma_load_4d(this->stage_v(m), &p.v, barrier, 0, c.row, 0, c.head);
  }

  // A quarter of the initial state of the tile that chunk m begins, into the stage that is lent for it.
  using Staged = StagedState<Traits>;
  __device__ void load_quarter(uint32_t m, int quarter) const {
    const ChunkRecord& c = record(m);
    const Staged state(c.flags);
    if (quarter == 0) mbarrier_arrive_expect(state.full(), Staged::kQuarters * Staged::kBytesQuarter);
    const bool v_first = p.args.state_v_first;  // then its rows are V, and blocks of 32 floats K
    tma_load_5d(Staged::stage(quarter, m), &p.initial, state.full(), 0, v_first ? 0 : 32 * quarter,
                v_first ? quarter : 0, c.head, static_cast<int32_t>(c.slot_in));
  }
  // What the stages were to hold, once the state groups have the state.
  __device__ void load_late(uint32_t m) const {
    const Staged state(record(m).flags);
    mbarrier_wait(state.free(), state.parity());
    const Rows next = rows(m + Staged::kLateV);
    if (this->lane() == 0) {
      load_k(m + Staged::kLateK, rows(m + Staged::kLateK));
      load_q(m + Staged::kLateQ, next);
    }
    if (kAllAnnounceV || this->lane() == 0) load_v(m + Staged::kLateV, next);
  }

  // O of chunk m from its V stage to global memory; at a sequence's end: rows by hand. Where a chunk ends earlier, at a
  // listed token, the rows behind it are those of the next chunks, whose O is not sent before this one is in memory.
  __device__ void store_o(uint32_t m) const {
    // Also where nothing is sent: the state groups have written to the stage, which the copy engine fills next.
    fence_proxy_async();
    const ChunkRecord& c = record(m);
    const auto wait_for_rows_before = [&] {
      if (Traits::kEndsWhereKept && ((c.flags | record(m - 1).flags) & kInsideOnGrid)) tma_store_wait_all();
    };
    if (c.valid < kChunk && (!Traits::kEndsWhereKept || !(c.flags & kRowsFollow))) {
      constexpr int kPieces = Traits::kDv / 8;
      Element* out =
          static_cast<Element*>(p.args.o) + c.row * p.args.o_token_stride + c.head * p.args.o_head_stride + c.half * 64;
      if constexpr (Traits::kEndsWhereKept) {
        if (this->lane() == 0) wait_for_rows_before();
        __syncwarp();
      }
      for (int i = this->lane(); i < c.valid * kPieces; i += 32) {
        const int row = i / kPieces, piece = i % kPieces;
        const uint4 value = load_shared_u4(this->stage_v(m) + (piece >> 3) * Traits::kHalf + row * 128 +
                                           (((piece & 7) ^ (row & 7)) << 4));
        *reinterpret_cast<uint4*>(out + row * p.args.o_token_stride + piece * 8) = value;
      }
      __syncwarp();
    } else if (this->lane() == 0 && !(c.flags & kSilentChunk)) {
      wait_for_rows_before();
      tma_store_4d(&p.o, this->stage_v(m), 0, c.row, c.half, c.head);
      tma_store_commit();
    }
  }

  // A of chunk m from the tile that the state groups read it in; at a sequence's end: rows by hand. Where decay is not
  // mild the tile holds A_g, and the inverse's warp stores A. Blocks right of the diagonal that nobody reads hold what
  // A was made from.
  __device__ void send_a(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullA + 8 * (m % Traits::kStagesA), m / Traits::kStagesA & 1);
    if (!__any_sync(0xffffffffu, load_shared_f1(this->stage_gate(m) + Traits::kGateMild) != 0.0f)) return;
    const int lane = this->lane();
    const uint32_t tile = this->tile_a(m);
    const uint32_t rows = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 2; j < 4; ++j) store_matrix_x4((rows ^ (j << 5)) + i * 2048, 0u, 0u, 0u, 0u);
    }
    fence_proxy_async();
    __syncwarp();
    const ChunkRecord& c = record(m);
    if (c.valid == kChunk) {
      if (lane == 0) {
        tma_store_4d(&p.a, tile, 0, c.row, 0, c.head);
        tma_store_commit();
      }
      return;
    }
    const int64_t row_bytes = int64_t{p.args.num_value_heads} * (kChunk * 2);
    char* out = static_cast<char*>(p.args.a) + c.row * row_bytes + c.head * (kChunk * 2) + 16 * (lane & 7);
#pragma unroll 1
    for (int i = lane >> 3; i < c.valid; i += 4) {
      *reinterpret_cast<uint4*>(out + i * row_bytes) = load_shared_u4(tile + i * 128 + (((lane & 7) ^ (i & 7)) << 4));
    }
    __syncwarp();
  }

  // Whether a chunk begins a tile with kStagedState.
  __device__ bool staged(uint32_t m) const {
    if constexpr (!kStagesStates<Traits>) return false;
    const ChunkRecord& c = record(m);
    return c.valid >= 0 && (c.flags & kStagedState) != 0;
  }
  // The chunks ahead of the one at hand.
  struct Ahead {
    Rows next2, next3, next4;  // of chunks m + 2, m + 3 and m + 4
    uint32_t staged;           // the first one from m + 1 on, as far as is known, that begins a tile with kStagedState
  };
  static constexpr uint32_t kNone = 0xffffffffu;

  // kEdge: such a tile begins with one of the next two chunks, whose state takes the place of other loads.
  template <bool kEdge>
  __device__ __forceinline__ void step(uint32_t m, Ahead& ahead) const {
    const bool staged1 = kEdge && staged(m + 1), staged2 = kEdge && ahead.next2.valid >= 0 && staged(m + 2);
    mbarrier_wait(smem() + Traits::kFreeQ + 8 * (m % Traits::kStagesQ), m / Traits::kStagesQ & 1);
    if (this->lane() == 0) {
      if (staged1) {
        load_quarter(m + 1, 2);
      } else {
        load_q(m + 2, ahead.next2);
      }
    }
    if constexpr (Traits::kKeepsA) send_a(m);
    // What is asked for next is read while there is time.
    Rows next5{0, -1, 0, 0};
    if (ahead.next3.valid >= 0) {
      mbarrier_wait(this->full_p(m + 1), (m + 1) >> 1 & 1);
      if (ahead.next4.valid >= 0) {
        next5 = rows(m + 5);
        if (staged(m + 5)) ahead.staged = min(ahead.staged, m + 5);
      }
    }
    if constexpr (Traits::kKeepsA) {
      // The chunk's end gives A's tile back, too.
      if (this->lane() == 0) tma_store_wait_read();
      mbarrier_arrive_warp(smem() + Traits::kDone + 8 * (m % Traits::kBarriersDone), this->lane());
    }
    // K before O and V: the products wait for it first, and V, which O's way out of its stage is waited for, has a step
    // more.
    this->wait_done(m);
    static_assert(Traits::kStagesK == 5 || (Traits::kStagesK == 4 && !kStagesStates<Traits>));
    if (this->lane() == 0) {
      if (staged2) {
        load_quarter(m + 2, 1);
      } else {
        load_k(m + Traits::kStagesK, Traits::kStagesK == 5 ? next5 : ahead.next4);
      }
    }
    store_o(m);
    if (staged2 && this->lane() == 0) {
      tma_store_wait_read();
      load_quarter(m + 2, 0);
    }
    if (ahead.next3.valid >= 0 && !staged2 && (kAllAnnounceV || this->lane() == 0)) {
      tma_store_wait_read();
      load_v(m + 3, ahead.next3);
    }
    if (staged1) load_late(m + 1);
    ahead.next2 = ahead.next3;
    ahead.next3 = ahead.next4;
    ahead.next4 = next5;
    __syncwarp();
  }

  __device__ void run() const {
    if (record(0).valid < 0) return;
    const bool staged0 = staged(0), staged1 = staged(1);
    if (this->lane() == 0) {
#pragma unroll 1
      for (uint32_t m = 0; m < Traits::kStagesK; ++m) {
        const Rows c = rows(m);
        if (c.valid < 0) break;
        if (!(staged0 && m == Staged::kLateK) && !(staged1 && m == 1 + Staged::kLateK)) load_k(m, c);
        if (m == 0 || (m == 1 && !staged0)) load_q(m, c), load_v(m, c);
      }
      if (staged0) {
#pragma unroll 1
        for (int quarter = 0; quarter < Staged::kQuarters; ++quarter) load_quarter(0, quarter);
      }
      // Its stages are free as well: V of chunk 2 has not been asked for.
      if (staged1) load_quarter(1, 0), load_quarter(1, 1);
    } else if (kAllAnnounceV) {
      load_v(0, rows(0));
      if (!staged0) load_v(1, rows(1));
    }
    if (staged0) load_late(0);
    // V announces itself on P's barrier, which it shares with the next chunk but one.
    mbarrier_wait(this->full_p(0), 0);
    if (!staged1 && (kAllAnnounceV || this->lane() == 0)) load_v(2, rows(2));
    Ahead ahead{rows(2), rows(3), rows(4), kNone};
    if (ahead.next2.valid < 0) ahead.next3.valid = -1;
    if (ahead.next3.valid < 0) ahead.next4.valid = -1;
    // What is done at the edges of such tiles alone lies outside of the loop over the other chunks, whose code so lies
    // in one piece.
    uint32_t m = 0;
    if constexpr (!kStagesStates<Traits>) {
#pragma unroll 1
      for (; record(m).valid >= 0; ++m) step<false>(m, ahead);
    }
#pragma unroll 1
    while (kStagesStates<Traits> && record(m).valid >= 0) {
      ahead.staged = kNone;
#pragma unroll 1
      for (uint32_t n = m + 1; n <= m + 4 && record(n).valid >= 0 && ahead.staged == kNone; ++n) {
        if (staged(n)) ahead.staged = n;
      }
#pragma unroll 1
      for (; ahead.staged - m > 2 && record(m).valid >= 0; ++m) step<false>(m, ahead);
      if (record(m).valid < 0) break;
      step<true>(m, ahead);
      ++m;
    }
    if (this->lane() == 0) tma_store_wait_all();
  }
};

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
          p.args, load_shared_f2(raw + Traits::kRawG), [&] { return load_shared_f2(raw + Traits::kRawBeta); },
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

// One warp to each chunk in turn: from -M, which the tile holds transposed, tile[column][row], to A_g in its place. The
// bits are those of invert() in aux_role.cuh: the same products of the same numbers in the same order, here by
// mma.sync.
template <typename Traits>
struct InverseRole : DutyRole<Traits> {
  using Base = DutyRole<Traits>;
  using Element = typename Traits::Element;
  using Base::p;
  using Base::record;

  using Left = HalfLeft;
  using Right = HalfRight;
  using Sum = HalfSum;
  static __device__ Sum multiply(const Left& a, const Right& b) {
    Sum d;
    add_half_product(d, a, b);
    return d;
  }
  static __device__ Left rounded(const Sum& d) {
    Left a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.x[i] = pack2<__half>(d.x[2 * i], d.x[2 * i + 1]);
    return a;
  }
  static __device__ Right as_right(const Left& a) {
    Right b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b.x[i] = transpose_8x8(a.x[i]);
    return b;
  }

  // D of all four diagonal blocks in the place of -M.
  static __device__ void solve(uint32_t tile, int lane) {
    static_assert(kSolveInPairs<Element>);
    // As solve_diagonal_blocks<true>(), two chains side by side.
    const int column = lane & 15, block = lane >> 4;
    const uint32_t rows = tile + 16 * block * 128;
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = rows + ((block ^ i) << 5);
    uint32_t x[2][8];
    const uint32_t one = column & 1 ? 0x3c000000u : 0x3c00u;
#pragma unroll
    for (int i = 0; i < 8; ++i) x[0][i] = x[1][i] = i == column >> 1 ? one : 0u;
#pragma unroll
    for (int k = 0; k < 15; ++k) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t row = pairs[((k & 7) >> 1) ^ (2 * r)] + k * 128 + r * 4096;
        uint4 m[2];
        if (k < 7) m[0] = load_shared_u4(row + 16 * (k & 1));
        m[1] = load_shared_u4(row + 16 * (~k & 1));
        const uint32_t values[8] = {m[0].x, m[0].y, m[0].z, m[0].w, m[1].x, m[1].y, m[1].z, m[1].w};
        const uint32_t known = __byte_perm(x[r][k >> 1], 0u, k & 1 ? 0x3232 : 0x1010);
#pragma unroll
        for (int i = (k >> 1) + (k & 1); i < 8; ++i) {
          x[r][i] = fma2(k == 2 * i ? values[i] & 0xffff0000u : values[i], known, x[r][i]);
        }
      }
    }
    __syncwarp();  // D takes the place of what the other lanes have been reading
    const uint32_t address = rows + column * 128 + (((2 * block) ^ (lane & 7)) << 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t place = (address ^ (r * 64)) + r * 4096;
      store_shared_u4(place, make_uint4(x[r][0], x[r][1], x[r][2], x[r][3]));
      store_shared_u4(place ^ 16, make_uint4(x[r][4], x[r][5], x[r][6], x[r][7]));
    }
    __syncwarp();
  }

  __device__ void invert(uint32_t m) const {
    mbarrier_wait(smem() + Traits::kFullM + 8 * (m % Traits::kStagesA), m / Traits::kStagesA & 1);
    solve(this->tile_a(m), this->lane());

    m = this->opaque(m);
    const uint32_t tile = this->tile_a(m), gate = this->stage_gate(m);
    // Where the lane's eight elements of block (0, 0) of the tile lie when the four 8x8 matrices come by rows; the
    // column of another block is an exclusive or. by_columns: of A_g, which is not transposed.
    int lane;
    uint32_t by_rows, by_columns;
    auto find_place = [&] {
      // Out of a shuffle: the assembler would keep, and spill, what it made of the number before.
      lane = __shfl_sync(0xffffffffu, this->lane(), this->lane());
      by_rows = tile + ((lane & 7) + 8 * (lane >> 4)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
      by_columns = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    };
    find_place();
    // Block (i, j) of -M below the diagonal, of D on it.
    auto left = [&](int i, int j) {
      Left a;
      load_matrix_x4_trans((by_rows ^ (i << 5)) + j * 2048, a.x[0], a.x[1], a.x[2], a.x[3]);
      return a;
    };
    auto right = [&](int i, int j) {
      Right b;
      load_matrix_x4((by_rows ^ (i << 5)) + j * 2048, b.x);
      return b;
    };
    // X = -D M, I + X + X^2 + X^3 without its diagonal.
    Left x10, x20, x21, x30, x31, x32;
    {
      const Left d1 = left(1, 1);
      x10 = rounded(multiply(d1, right(1, 0)));
    }
    {
      const Left d2 = left(2, 2);
      x20 = rounded(multiply(d2, right(2, 0)));
      x21 = rounded(multiply(d2, right(2, 1)));
    }
    {
      const Right r10 = as_right(x10);
      const Sum square20 = multiply(x21, r10);
      const Left d3 = left(3, 3);
      x32 = rounded(multiply(d3, right(3, 2)));
      x31 = rounded(multiply(d3, right(3, 1)));
      const Left y31 = rounded(multiply(x32, as_right(x21)));
      // Zero, though the assembler cannot know it before y31 is there: it would begin with all that follows at once,
      // and spill.
      const uint32_t late = __funnelshift_rc(y31.x[0], 0u, blockDim.x / (Traits::kThreads / 32));
      x31.x[0] |= late;
      Sum square30 = multiply(x31, r10);
      add_half_product(square30, x32, as_right(x20));
      const Sum cube = multiply(y31, r10);
      Right r30;
      load_matrix_x4((by_rows ^ (3 << 5)) + late, r30.x);
      x30 = rounded(multiply(d3, r30));
      const Left y20 = rounded(square20);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x20.x[i] = add2(y20.x[i], x20.x[i]);
        x31.x[i] = add2(y31.x[i], x31.x[i]);
        x30.x[i] =
            add2(pack2<__half>(square30.x[2 * i] + cube.x[2 * i], square30.x[2 * i + 1] + cube.x[2 * i + 1]), x30.x[i]);
      }
    }

    // A = (I + ..) D, block by block, with the factors of store_mild() and store_gated() in aux_role.cuh.
    this->wait_gates(m);
    find_place();
    auto store = [&](int i, int j, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
      store_matrix_x4((by_columns ^ (j << 5)) + i * 2048, a0, a1, a2, a3);
    };
    if (__any_sync(0xffffffffu, load_shared_f1(gate + Traits::kGateMild) != 0.0f)) {
      const uint32_t columns = gate + Traits::kGateColumnA + 80 * (lane & 3);
      auto finish = [&](const Left& y, int i, int j) {
        const Sum a = multiply(y, right(j, j));
        const float4 f = load_shared_f4(columns + 16 * j);
        store(i, j, pack2<Element>(a.x[0] * f.x, a.x[1] * f.y), pack2<Element>(a.x[2] * f.x, a.x[3] * f.y),
              pack2<Element>(a.x[4] * f.z, a.x[5] * f.w), pack2<Element>(a.x[6] * f.z, a.x[7] * f.w));
      };
      finish(x10, 1, 0);
      finish(x20, 2, 0);
      finish(x30, 3, 0);
      finish(x21, 2, 1);
      finish(x31, 3, 1);
      finish(x32, 3, 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Left d = left(i, i);
        const float4 f = load_shared_f4(columns + 16 * i);
        const float2 d0 = unpack2<__half>(d.x[0]), d1 = unpack2<__half>(d.x[1]), d3 = unpack2<__half>(d.x[3]);
        __syncwarp();  // A_g takes the place of what other lanes have been reading
        store(i, i, pack2<Element>(d0.x * f.x, d0.y * f.y), pack2<Element>(d1.x * f.x, d1.y * f.y), 0u,
              pack2<Element>(d3.x * f.z, d3.y * f.w));
      }
    } else {
      const int q = lane & 3, g = lane >> 2;
      auto finish = [&](const Left& y, int i, int j) {
        const Sum a = multiply(y, right(j, j));
        const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * i + 4 * j);
        const float f0 = load_shared_f1(gate + Traits::kGateRow + 64 * i + 4 * g) * pair;
        const float f1 = load_shared_f1(gate + Traits::kGateRow + 64 * i + 4 * g + 32) * pair;
        const float4 f = load_shared_f4(gate + Traits::kGateColumnA + 80 * q + 16 * j);
        store(i, j, pack2<Element>(a.x[0] * (f0 * f.x), a.x[1] * (f0 * f.y)),
              pack2<Element>(a.x[2] * (f1 * f.x), a.x[3] * (f1 * f.y)),
              pack2<Element>(a.x[4] * (f0 * f.z), a.x[5] * (f0 * f.w)),
              pack2<Element>(a.x[6] * (f1 * f.z), a.x[7] * (f1 * f.w)));
      };
      finish(x10, 1, 0);
      finish(x20, 2, 0);
      finish(x30, 3, 0);
      finish(x21, 2, 1);
      finish(x31, 3, 1);
      finish(x32, 3, 2);
      // Above the diagonal by a mask, not by a factor: the exponentials may have overflowed.
      const uint32_t mask = (g >= 2 * q ? 0xffffu : 0u) | (g > 2 * q ? 0xffff0000u : 0u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Left d = left(i, i);
        uint32_t diagonal[3];
#pragma unroll
        for (int k = 0; k < 3; ++k) {
          const float2 y = unpack2<__half>(d.x[k == 2 ? 3 : k]);
          const float sum = load_shared_f1(gate + Traits::kGateSum + 64 * i + 4 * g + (k > 0 ? 32 : 0));
          const uint32_t place = 64 * i + 8 * q + (k > 1 ? 32 : 0);
          const float2 column = load_shared_f2(gate + Traits::kGateSum + place);
          const float2 beta = load_shared_f2(this->stage_raw(m) + Traits::kRawBeta + place);
          diagonal[k] = pack2<Element>(y.x * (exp2_approx(sum - column.x) * beta.x),
                                       y.y * (exp2_approx(sum - column.y) * beta.y));
        }
        __syncwarp();
        store(i, i, diagonal[0] & mask, diagonal[1], 0u, diagonal[2] & mask);
      }
    }
    // The two blocks right of the diagonal that the state groups read.
    store(0, 1, 0u, 0u, 0u, 0u);
    store(2, 3, 0u, 0u, 0u, 0u);
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_warp(smem() + Traits::kFullA + 8 * (m % Traits::kStagesA), this->lane());
  }

  __device__ void run(uint32_t first) const {
#pragma unroll 1
    for (uint32_t m = first; record(m).valid >= 0; m += 2) invert(m);
  }
};

// The same with FastInverse.
template <typename Traits>
struct FastInverseRole : DutyRole<Traits> {
  using Base = DutyRole<Traits>;
  using Base::record;

  __device__ void run(uint32_t first) const {
#pragma unroll 1
    for (uint32_t m = first; record(m).valid >= 0; m += 2) {
      mbarrier_wait(smem() + Traits::kFullM + 8 * (m % Traits::kStagesA), m / Traits::kStagesA & 1);
      const uint32_t gate = this->stage_gate(m);
      const auto keep_block = [&](int i, int j, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
        const ChunkRecord& c = record(m);
        // Out of a shuffle, lest the rows be kept from block to block, and spilled.
        const int lane = __shfl_sync(0xffffffffu, this->lane(), this->lane()), row = 16 * i + (lane >> 2);
        const int row_words = this->p.args.num_value_heads * (kChunk / 2);
        uint32_t* out = static_cast<uint32_t*>(this->p.args.a) + int64_t{c.row + row} * row_words +
                        c.head * (kChunk / 2) + 8 * j + (lane & 3);
        if (row < c.valid) out[0] = x0, out[4] = x1;
        if (row + 8 < c.valid) out[8 * row_words] = x2, out[8 * row_words + 4] = x3;
        __syncwarp();
      };
      FastInverse<Traits>::run(
          this->tile_a(m), gate, this->stage_raw(m) + Traits::kRawBeta, gate + Traits::kGateMild, this->lane(),
          [&] { this->wait_gates(m); }, keep_block);
      fence_proxy_async();
      __syncwarp();
      mbarrier_arrive_warp(smem() + Traits::kFullA + 8 * (m % Traits::kStagesA), this->lane());
    }
  }
};

// One warpgroup: K K^T, -M in fp16, transposed, for the inverse; Q K^T and P.
template <typename Traits>
struct ProductRole : DutyRole<Traits> {
  using Base = DutyRole<Traits>;
  using Element = typename Traits::Element;
  using Base::p;
  using Base::record;
  using Base::thread;
  static constexpr int kBarrier = 1;
  static constexpr bool kCompact = kStagesStates<Traits>;  // as in FastInverse

  using Base::opaque;
  __device__ LanePlace place() const { return lane_place(opaque(thread)); }
  __device__ void sync() const { named_barrier_sync(kBarrier, 128); }

  // K of chunk m, if there is one, with its tail cleared.
  __device__ void wait_key(uint32_t m, int valid) const {
    if (valid < 0) return;
    mbarrier_wait(smem() + Traits::kFullK + 8 * (m % Traits::kStagesK), m / Traits::kStagesK & 1);
    if (valid < kChunk) {
      clear_tail_rows(this->stage_k(m), 2, valid, thread);
      sync();
    }
  }

  // beta of the thread's rows in chunk m, if there is one.
  __device__ float2 load_beta(uint32_t m, int valid) const {
    if (valid >= 0) this->wait_raw(m);
    const uint32_t beta = this->stage_raw(m) + Traits::kRawBeta + 4 * place().row;
    return make_float2(load_shared_f1(beta), load_shared_f1(beta + 32));
  }

  // -M, M = lower(diag(beta) K K^T), in fp16.
  static __device__ void pack_m(const float (&x)[32], float2 beta, uint32_t (&packed)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float factor = i & 1 ? -beta.y : -beta.x;
      packed[i] = pack2<__half>(factor * x[2 * i], factor * x[2 * i + 1]);
    }
    pin(packed);
  }
  __device__ void store_m(const uint32_t (&packed)[16], uint32_t m) const {
    const LanePlace at = place();
    const uint32_t address = this->tile_a(m) + at.trans_row + at.trans_chunk;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const uint32_t* x = packed + 4 * b;
      if (b <= at.warp) store_matrix_x4_trans(address + b * 2048, x[0], x[1], x[2], x[3]);
    }
    __syncwarp();
    mbarrier_arrive_warp(smem() + Traits::kFullM + 8 * (m % Traits::kStagesA), at.lane);
  }

  // P where the decay is not mild, with the factors of store_gated() in aux_role.cuh.
  __device__ void pack_gated(const float (&x)[32], uint32_t gate, uint32_t (&packed)[16]) const {
    const LanePlace at = place();
    const float row0 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row);
    const float row1 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row + 32);
    const float sum0 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row);
    const float sum1 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row + 32);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* z = x + 8 * b;
      if (b == at.warp) {
        const float2 c0 = load_shared_f2(gate + Traits::kGateSum + 64 * b + 8 * at.q);
        const float2 c1 = load_shared_f2(gate + Traits::kGateSum + 64 * b + 8 * at.q + 32);
        const float2 f0 = load_shared_f2(gate + Traits::kGateScaleP + 64 * b + 8 * at.q);
        const float2 f1 = load_shared_f2(gate + Traits::kGateScaleP + 64 * b + 8 * at.q + 32);
        packed[4 * b] =
            pack2<Element>(z[0] * (exp2_approx(sum0 - c0.x) * f0.x), z[1] * (exp2_approx(sum0 - c0.y) * f0.y));
        packed[4 * b + 1] =
            pack2<Element>(z[2] * (exp2_approx(sum1 - c0.x) * f0.x), z[3] * (exp2_approx(sum1 - c0.y) * f0.y));
        packed[4 * b + 2] = 0u;
        packed[4 * b + 3] =
            pack2<Element>(z[6] * (exp2_approx(sum1 - c1.x) * f1.x), z[7] * (exp2_approx(sum1 - c1.y) * f1.y));
      } else if (kCompact && b > at.warp) {
        packed[4 * b] = packed[4 * b + 1] = packed[4 * b + 2] = packed[4 * b + 3] = 0u;  // right of the diagonal
      } else {
        const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * at.warp + 4 * b);
        const float4 column = load_shared_f4(gate + Traits::kGateColumnP + 80 * at.q + 16 * b);
        const float f0 = row0 * pair, f1 = row1 * pair;
        packed[4 * b] = pack2<Element>(z[0] * (f0 * column.x), z[1] * (f0 * column.y));
        packed[4 * b + 1] = pack2<Element>(z[2] * (f1 * column.x), z[3] * (f1 * column.y));
        packed[4 * b + 2] = pack2<Element>(z[4] * (f0 * column.z), z[5] * (f0 * column.w));
        packed[4 * b + 3] = pack2<Element>(z[6] * (f1 * column.z), z[7] * (f1 * column.w));
      }
    }
  }
  __device__ void store_p(const uint32_t (&packed)[16], uint32_t m) const {
    const LanePlace at = place();
    const uint32_t row =
        smem() + Traits::kSmemP + (m & 1) * Traits::kBytesMatrix + (16 * at.warp + (at.lane & 15)) * 128;
    // Above the diagonal by a mask, not by a factor: there an exponential may have overflowed.
    const int above = (at.lane >> 2) - 2 * at.q;
    const uint32_t mask = (above >= 0 ? 0xffffu : 0u) | (above > 0 ? 0xffff0000u : 0u);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b <= at.warp) {
        const uint32_t keep = b == at.warp ? mask : 0xffffffffu;
        const uint32_t* x = packed + 4 * b;
        store_matrix_x4(row + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4), x[0] & keep, x[1],
                        b == at.warp ? 0u : x[2], x[3] & keep);
      }
    }
    fence_proxy_async();
  }

  // At a sequence's end: V comes through a barrier of its own, and is passed on once its tail is cleared.
  __device__ void clear_tail_v(uint32_t m, int valid) const {
    uint32_t& tails = reinterpret_cast<uint32_t*>(shared_memory() + Traits::kTailCount)[m & 1];
    mbarrier_wait(smem() + Traits::kTailV + 8 * (m & 1), tails & 1);
    clear_tail_rows(this->stage_v(m), Traits::kStateGroups, valid, thread);
    sync();
    if (thread == 0) {
      ++tails;
      mbarrier_arrive(this->full_p(m));
    } else if (kWarpArrivals == 32 && thread < 32) {
      mbarrier_arrive(this->full_p(m));
    }
  }

  // K K^T is made so many chunks ahead of P: as many as there are stages of K but for two, that of the state groups'
  // chunk and one that is on its way.
  static constexpr int kLead = Traits::kStagesK - 2;
  static_assert(kLead == 2 || kLead == 3);

  __device__ void run() const {
    int valid = record(0).valid, valid1 = record(1).valid, valid2 = valid1 < 0 ? -1 : record(2).valid;
    if (valid < 0) return;
    float x[32];
    uint32_t packed[16];
    // M is stored, once its tile is free, a chunk later: those of the first chunks first.
    float2 beta;
#pragma unroll 1
    for (uint32_t m = 0; m < kLead - 1; ++m) {
      const int now = m == 0 ? valid : valid1;
      wait_key(m, now);
      start_product<Element>(x, wgmma_descriptor(this->stage_k(m)), wgmma_descriptor(this->stage_k(m)));
      beta = load_beta(m, now);
      wgmma_wait<0>();
      pin(x);
      pack_m(x, beta, packed);
      store_m(packed, m);
    }
    {
      constexpr uint32_t kNext = kLead - 1;
      const int next = kLead == 3 ? valid2 : valid1;
      wait_key(kNext, next);
      start_product<Element>(x, wgmma_descriptor(this->stage_k(kNext)), wgmma_descriptor(this->stage_k(kNext)));
      beta = load_beta(kNext, next);
      wgmma_wait<0>();
      pin(x);
    }
    // x is K K^T of chunk m + kLead - 1.
#pragma unroll 1
    for (uint32_t m = 0; valid >= 0; ++m) {
      pack_m(x, beta, packed);
      mbarrier_wait(smem() + Traits::kFullQ + 8 * (m % Traits::kBarriersQ), m / Traits::kBarriersQ & 1);
      const bool speaks = !Traits::kSkipsSilent || __any_sync(0xffffffffu, (record(m).flags & kSilentChunk) == 0);
      if (speaks) start_product<Element>(x, wgmma_descriptor(this->stage_q(m)), wgmma_descriptor(this->stage_k(m)));
      if (m >= 2) this->wait_done(m - 2);
      store_m(packed, m + kLead - 1);
      const int valid3 = record(m + 3).valid;
      this->wait_gates(m);
      const float mild = load_shared_f1(this->stage_gate(m) + Traits::kGateMild);
      wgmma_wait<0>();
      pin(x);
      mbarrier_arrive_warp(smem() + Traits::kFreeQ + 8 * (m % Traits::kStagesQ), thread & 31);
      if (speaks) {
        if (kCompact ? __all_sync(0xffffffffu, mild == 0.0f) : !__any_sync(0xffffffffu, mild != 0.0f)) {
          pack_gated(x, this->stage_gate(m), packed);
        } else {
#pragma unroll
          for (int i = 0; i < 16; ++i) packed[i] = pack2<Element>(x[2 * i] * mild, x[2 * i + 1] * mild);
        }
        pin(packed);
        store_p(packed, m);
      }
      if (valid < kChunk) clear_tail_v(m, valid);
      __syncwarp();
      mbarrier_arrive_warp(this->full_p(m), thread & 31);
      const int next = kLead == 3 ? valid3 : valid2;
      wait_key(m + kLead, next);
      start_product<Element>(x, wgmma_descriptor(this->stage_k(m + kLead)), wgmma_descriptor(this->stage_k(m + kLead)));
      beta = load_beta(m + kLead, next);
      wgmma_wait<0>();
      pin(x);
      valid = valid1;
      valid1 = valid2;
      valid2 = valid3;
    }
  }
};

// Instructions that no warp executes: they move the code behind them to other places of the instruction cache.
template <int kCount>
__device__ __forceinline__ void move_code(const ChunkForwardKernelParams& p) {
  if constexpr (kCount > 0) {
    if (p.tiles < 0) {  // never, which only the launcher knows
#pragma unroll
      for (int i = 0; i < kCount; ++i) asm volatile("nanosleep.u32 1;");
    }
  }
}

// What an auxiliary warp does. thread: in its warpgroup.
template <typename Traits>
__device__ __forceinline__ void run_duty(const ChunkForwardKernelParams& p, int group, int thread) {
  if (group == 1) {
    move_code<Traits::kMoved.products>(p);
    ProductRole<Traits>{{{}, p, thread}}.run();
    finish_tiles(p, thread, 128);
    if constexpr (Traits::kEndsWhereKept) clear_skipped(p, thread, 128);
    return;
  }
  const int warp = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(thread) >> 5);
  thread &= 31;
  if (warp == 0) {
    move_code<Traits::kMoved.copies>(p);
    CopyRole<Traits>{{{}, p, thread}}.run();
  } else if (warp == 1) {
    move_code<Traits::kMoved.gates>(p);
    GateRole<Traits>{{{}, p, thread}}.run();
  } else {
    move_code<Traits::kMoved.inverse>(p);
    using Inverse = std::conditional_t<Traits::kFastInverse, FastInverseRole<Traits>, InverseRole<Traits>>;
    Inverse{{{}, p, thread}}.run(static_cast<uint32_t>(warp - 2));
  }
}

}  // namespace flash_qla::cuda::sm90
