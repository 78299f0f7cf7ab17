// What the roles of the gradients' kernel (gradients/kernel.cuh) share: its places and barriers, its items, and rows of
// tokens in registers and on their way.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90::bwd {

enum GradientsGroup : int { kQuery, kPlus, kMinus };

struct GradientsTraits {
  static constexpr int kGroups = 3;
  static constexpr int kThreads = kGroups * 128 + 128;
  // In all what 4 * 128 threads start with, 128 each.
  static constexpr int kLoadRegisters = 32, kLowerRegisters = 176, kMinusRegisters = 128;
  static constexpr int kConsumerWarps = kGroups * 4;

  // A stage is one half of V of one value head: dO, V' of the early chunk and (late block) of the late one, dv (8 KB
  // each), S and dS (16 KB each). Halves, because two of them fit where one head would.
  static constexpr int kStages = 2;
  static constexpr uint32_t kDo = 0;
  static constexpr uint32_t kVEarly = kDo + kTileBytes;
  static constexpr uint32_t kVLate = kVEarly + kTileBytes;
  static constexpr uint32_t kDv = kVLate + kTileBytes;
  static constexpr uint32_t kState = kDv + kTileBytes;  // [2 halves of K][64 of V][64 of K]
  static constexpr uint32_t kGrad = kState + 2 * kTileBytes;
  static constexpr uint32_t kStage = kGrad + 2 * kTileBytes;
  static constexpr uint32_t kLateLoads = kStage, kEarlyLoads = kStage - kTileBytes;  // bytes that arrive in a stage

  // q and k of the early and of the late chunk (the early q in the early block alone).
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kTokensBytes;
  static constexpr uint32_t kKeys = kK + kTokensBytes;  // of one chunk
  static constexpr uint32_t kP = 2 * kKeys;             // dP and D of the head in hand
  static constexpr uint32_t kD = kP + kTileBytes;
  static constexpr uint32_t kStaging = kQ;  // the late block has no early q: dP and D for the other block
  static constexpr uint32_t kStageRing = kD + kTileBytes;
  // The early block's stages have no V' of the late chunk: dP and D of late rows and early columns arrive there.
  static constexpr uint32_t kLateRowsP = kStageRing + kVLate;
  static constexpr uint32_t kLateRowsD = kLateRowsP + kStage;
  static_assert(kStages >= 2);
  // Both chunks' gates, of two heads: they are needed after the stages.
  static constexpr uint32_t kGates = kStageRing + kStages * kStage;
  static constexpr uint32_t kHeadGates = 2 * kGateBytes;
  // Row sums of the three groups, <dv, V'>, beta, the row sums of the minus group after diag(gP / gamma) V' dS^T alone
  // with its parts of gP <dS, S>, two heads deep; the other block's sum.
  static constexpr uint32_t kSums = kGates + 2 * kHeadGates;
  static constexpr uint32_t kStateSums = 5 * kChunk * 4;  // in a head's sums
  static constexpr uint32_t kSumsBytes = 6 * kChunk * 4;
  // What the three groups' were before the head, for who makes dg.
  static constexpr uint32_t kBefore = kSums + 2 * kSumsBytes;
  static constexpr uint32_t kReceived = kBefore + 3 * kChunk * 4;
  // What the groups know of an item. Who loads is at most three heads ahead of them, and they two of who makes dg.
  static constexpr uint32_t kItems = kReceived + 16;
  static constexpr int kItemSlots = 8;
  // Which items the cluster has taken: one more than it works on.
  static constexpr uint32_t kTaken = kItems + kItemSlots * 32;
  static constexpr int kTakenSlots = 2;
  // Rows on their way out, of the query and the plus group: 16 rows of 32 columns a warp.
  static constexpr uint32_t kRows = (kTaken + kTakenSlots * 4 + 127) / 128 * 128;
  static constexpr uint32_t kBarriers = kRows + kTileBytes;
  static constexpr uint32_t kBarrierCount = 2 * (kStages + 3) + 1 + 3 * 2 + kTakenSlots;
  static constexpr uint32_t kBytes = 1024 + kBarriers + 8 * kBarrierCount;
  static_assert(kBarriers % 8 == 0 && kBytes <= 232448, "shared memory of one block on sm_90");
};

// Named barriers: minus has put the columns of dk that plus adds where it takes them (plus waits), and the other way
// round (minus waits); a group's rows past the end are zeros (one for query, one for plus); minus has taken an item's
// last dP and D.
constexpr uint32_t kMinusBarrier = 1, kPlusBarrier = 2, kTailBarrier = 3, kTakenBarrier = 5;

constexpr uint32_t kEarly = 0, kLate = 1;  // ranks in the cluster
constexpr uint16_t kBothBlocks = 3;

// "empty" barriers count both blocks' warps where the other block loads too.
struct GradientsBarriers {
  uint32_t base;
  __device__ uint32_t full(int stage) const { return base + 16 * stage; }
  __device__ uint32_t empty(int stage) const { return base + 16 * stage + 8; }
  __device__ uint32_t keys_full() const { return full(GradientsTraits::kStages); }
  __device__ uint32_t keys_empty() const { return empty(GradientsTraits::kStages); }
  // dP and D: two groups write, one reads.
  __device__ uint32_t products_full() const { return full(GradientsTraits::kStages + 1); }
  __device__ uint32_t products_empty() const { return empty(GradientsTraits::kStages + 1); }
  // Those of late rows and early columns: full in the early block, empty in the late one.
  __device__ uint32_t late_rows_full() const { return full(GradientsTraits::kStages + 2); }
  __device__ uint32_t late_rows_empty() const { return empty(GradientsTraits::kStages + 2); }
  // The tail of an item's q and k was zeroed by all groups.
  __device__ uint32_t tail() const { return full(GradientsTraits::kStages + 3); }
  // A head's sums, in turns: a group may be a head ahead of the warp that takes them.
  __device__ uint32_t sums_full(uint32_t parity) const { return tail() + 8 + 8 * parity; }
  __device__ uint32_t sums_empty(uint32_t parity) const { return tail() + 24 + 8 * parity; }
  __device__ uint32_t received(uint32_t parity) const { return tail() + 40 + 8 * parity; }
  // The cluster has taken its index-th item.
  __device__ uint32_t taken(uint32_t index) const { return tail() + 56 + 8 * (index % GradientsTraits::kTakenSlots); }
};

// A warp's arrival on a barrier of both blocks (mbarrier_arrive_warp).
__device__ __forceinline__ void arrive_both(uint32_t barrier, int lane) {
  if constexpr (kWarpArrivals == 32) {
    mbarrier_arrive_cluster(cluster_address(barrier, kEarly));
    mbarrier_arrive_cluster(cluster_address(barrier, kLate));
  } else if (lane < 2) {
    mbarrier_arrive_cluster(cluster_address(barrier, lane));
  }
}

constexpr uint32_t kNoItem = 0xffffffffu;  // in place of pair * Hq + key head: there are no more
constexpr uint32_t kPlace = 0x80000000u;   // with a place in the list of items, not yet listed there

// An item in shared memory, written by the thread that loads before the first stage of the item is full.
struct GradientsItem {
  uint32_t base;
  __device__ GradientsItem(uint32_t smem, uint32_t index)
      : base(smem + GradientsTraits::kItems + index % GradientsTraits::kItemSlots * 32) {}
  __device__ void store(const ChunkInfo& chunk, int key_head, int late_valid, uint32_t tails, int slot,
                        int pair) const {
    store_shared_u4(base, make_uint4(chunk.token, chunk.valid, chunk.sequence, key_head));
    store_shared_u4(base + 16, make_uint4(late_valid, tails, slot, pair));
  }
  __device__ void store_end() const { store_shared_u4(base, make_uint4(0, 0, 0, kNoItem)); }
  __device__ bool is_end() const { return load_shared_u1(base + 12) == kNoItem; }
  __device__ ChunkInfo chunk(const Args& p) const {
    const uint4 x = load_shared_u4(base);
    const int32_t sequence = static_cast<int32_t>(x.z);
    return {static_cast<int32_t>(x.x), static_cast<int32_t>(x.y), sequence, p.cu_seqlens == nullptr ? sequence : 0};
  }
  __device__ int valid() const { return static_cast<int>(load_shared_u1(base + 4)); }
  __device__ int key_head() const { return static_cast<int>(load_shared_u1(base + 12)); }
  __device__ int late_valid() const { return static_cast<int>(load_shared_u1(base + 16)); }  // tokens of the late chunk
  __device__ uint32_t tails() const { return load_shared_u1(base + 20); }  // items with a tail before this one
  __device__ int slot() const { return static_cast<int>(load_shared_u1(base + 24)); }  // of the block's chunk
  __device__ int pair() const { return static_cast<int>(load_shared_u1(base + 28)); }
};

// acc [64 rows, 64 tokens] += X Y^T, X and Y tiles [64][64].
template <typename T>
__device__ __forceinline__ void add_tile_times_rows(float (&acc)[32], uint32_t sX, uint32_t sY) {
  const uint64_t x = wgmma_descriptor(sX), y = wgmma_descriptor(sY);
#pragma unroll
  for (int step = 0; step < 4; ++step) mma_ss_n64<T>(acc, wgmma_advance(x, step * 32), wgmma_advance(y, step * 32));
}

// The same of packed rows (load_rows): the tensor cores read half as many bytes of shared memory, of which this kernel
// has none to spare.
template <typename T>
__device__ __forceinline__ void add_rows_times_rows(float (&acc)[32], const uint32_t (&x)[16], uint32_t sY) {
  const uint64_t y = wgmma_descriptor(sY);
#pragma unroll
  for (int step = 0; step < 4; ++step) mma_rs_n64<T>(acc, x + 4 * step, wgmma_advance(y, step * 32));
}

// Rows of a tile times a factor, rounded once (but for 2^-17 of it).
template <typename T>
struct RowFactor {
  float factor;
  __device__ explicit RowFactor(float f) : factor(f) {}
  __device__ uint32_t times(uint32_t packed) const { return scale2<T>(packed, factor); }
};

template <>
struct RowFactor<__nv_bfloat16> {
  uint32_t high, low;
  __device__ explicit RowFactor(float f) {
    const SplitFactor split(f);
    high = __byte_perm(__float_as_uint(split.high), 0, 0x3232);
    low = pack2<__nv_bfloat16>(split.rest, split.rest);
  }
  __device__ uint32_t times(uint32_t packed) const { return scale2_split(packed, high, low); }
};

// The warp's rows of a tile [64 rows][64] as A operand.
__device__ __forceinline__ void load_rows(uint32_t (&x)[16], uint32_t sX, int warp, int lane) {
  const uint32_t first = tile_piece(sX, 16 * warp + (lane & 15), lane >> 4);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t* a = x + 4 * step;
    // The swizzle in one exclusive or: the row's part of it is the lane's, and a piece's is a constant.
    load_matrix_x4(first ^ (2 * step << 4), a[0], a[1], a[2], a[3]);
  }
}

// diag(factor) of it; rows[0], [1]: the factors of the thread's two rows.
template <typename T>
__device__ __forceinline__ void scale_rows(uint32_t (&x)[16], const RowFactor<T> (&rows)[2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = rows[i % 2].times(x[i]);
}

// The warp's rows of X [2 halves][64 rows][64], for row_dots().
__device__ __forceinline__ void load_dot_rows(uint32_t (&x)[32], uint32_t sX, int warp, int lane) {
  const uint32_t first = tile_piece(sX, 16 * warp + (lane & 15), lane >> 4);  // as in load_rows
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    load_matrix_x4((first ^ (2 * (j % 4) << 4)) + (j / 4) * kTileBytes, x[4 * j], x[4 * j + 1], x[4 * j + 2],
                   x[4 * j + 3]);
  }
}

// <acc_i, X_i>, of the thread's first row in even lanes and of its second one in odd lanes; `more` counts with the
// first.
template <typename T>
__device__ __forceinline__ float row_dots(const float (&acc)[64], const uint32_t (&x)[32], float more, int lane) {
  float sum[4] = {more, 0.0f, 0.0f, 0.0f};  // two chains a row
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
      const float2 pair = unpack2<T>(x[4 * j + part]);
      const int i = 8 * j + 4 * (part / 2) + 2 * (part % 2);
      sum[part] = fmaf(acc[i], pair.x, fmaf(acc[i + 1], pair.y, sum[part]));
    }
  }
  // Over the four lanes that share the rows: each half of them goes on with one.
  const float first_row = sum[0] + sum[2], second_row = sum[1] + sum[3];
  const bool odd = lane % 2 != 0;
  const float both = (odd ? second_row : first_row) + __shfl_xor_sync(0xffffffffu, odd ? first_row : second_row, 1);
  return both + __shfl_xor_sync(0xffffffffu, both, 2);
}

// The rows' gradient through their normalisation y = r x: r (acc - <acc, y> y), where dot is <acc, y> as row_dots()
// leaves it, sX holds y, and inverse_norms r. For the parts of a sum too: it is linear.
template <typename T>
__device__ __forceinline__ void through_norm(float (&acc)[64], float dot, uint32_t sX, const float* inverse_norms,
                                             const Args& p, const ChunkInfo& chunk, int key_head, int warp, int lane) {
  const uint32_t first = tile_piece(sX, 16 * warp + lane / 4, 0) + (lane % 4) * 4;  // as in load_rows
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = max(0, min(16 * warp + lane / 4 + 8 * h, chunk.valid - 1));  // past the end: stored nowhere
    const float row_dot = __shfl_sync(0xffffffffu, dot, (lane & ~3) | h);
    const float r = inverse_norms[(static_cast<int64_t>(chunk.batch) * p.T + chunk.token + row) * p.Hq + key_head];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 y = unpack2<T>(load_shared_u1((first ^ ((j % 8) << 4)) + (j / 8) * kTileBytes + h * 8 * 128));
      acc[4 * j + 2 * h] = r * (acc[4 * j + 2 * h] - row_dot * y.x);
      acc[4 * j + 2 * h + 1] = r * (acc[4 * j + 2 * h + 1] - row_dot * y.y);
    }
  }
}

// A quarter of the accumulator's columns, rounded, to 1 KB of shared memory: 16 rows of 4 pieces of 16 bytes, permuted
// by (piece ^ row / 2 % 4).
template <typename T>
__device__ __forceinline__ void gather_quarter_rows(const float* quarter, uint32_t place, int lane) {
  const uint32_t first = place + (lane & 15) * 64 + (((lane >> 4) ^ (lane >> 1 & 3)) << 4);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float* x = quarter + 8 * j;
    store_matrix_x4(first ^ (2 * j << 4), pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                    pack2<T>(x[6], x[7]));
  }
}

// From there to memory, four lanes a row; to: where the lane's first piece goes, the second one 8 rows on. rows: that
// there are from the lane's first one on.
__device__ __forceinline__ void store_quarter_rows(uint16_t* to, int64_t stride, int rows, uint32_t place, int lane) {
  const uint32_t from = place + (lane >> 2) * 64 + (((lane & 3) ^ (lane >> 3 & 3)) << 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (8 * h < rows) store_global_u4(to + 8 * h * stride, load_shared_u4(from + 8 * h * 64));
  }
}

// <dS, S> over a tile, the part of this one of `threads` threads. Loops stay loops in this kernel: two programs run
// side by side, and together they should fit the instruction cache (about 2000 instructions).
template <typename T>
__device__ __forceinline__ float state_product(uint32_t sS, uint32_t sDS, uint32_t thread, uint32_t threads) {
  float sum[2] = {0.0f, 0.0f};
  // Two pieces at a time: a load takes longer than what is done with it.
#pragma unroll 1
  for (uint32_t at = thread * 16; at < kTileBytes; at += 2 * threads * 16) {
    uint4 a[2], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[i] = load_shared_u4(sS + at + i * threads * 16);
      b[i] = load_shared_u4(sDS + at + i * threads * 16);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t x[4] = {a[i].x, a[i].y, a[i].z, a[i].w}, y[4] = {b[i].x, b[i].y, b[i].z, b[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 s = unpack2<T>(x[w]), d = unpack2<T>(y[w]);
        sum[w % 2] = fmaf(s.x, d.x, fmaf(s.y, d.y, sum[w % 2]));
      }
    }
  }
  return sum[0] + sum[1];
}

// Whether a token's gate gets no gradient: g of the lane's row is clamped, or it is a sequence's first token without a
// state before it, which has nothing to forget (exactly 0, which as a sum of terms that cancel it would be but for
// their rounding; NaN stays).
__device__ __forceinline__ bool has_no_gate_gradient(const Args& p, const ChunkInfo& chunk, int head, int row,
                                                     float d_g) {
  if (row == 0 && p.initial_state.data == nullptr && d_g == d_g &&
      sequence_info(p, chunk.sequence).token == chunk.token) {
    return true;
  }
  return !p.g_is_cumsum && p.g.data != nullptr && row < chunk.valid &&
         load_element(p.g, row_offset(p.g, chunk.batch, chunk.token + row, head)) < kGateFloor;
}

// One thread of a cluster: takes the place of its index-th item in the list of those that the passes leave, and tells
// both blocks: the item where it is listed already, else its place (kPlace).
__device__ __forceinline__ void hand_out(const Args& p, uint32_t smem, const GradientsBarriers& bars, uint32_t index) {
  using Traits = GradientsTraits;
  const uint32_t place = atomicAdd(p.next_item, 1u);
  uint32_t taken = kNoItem;
  if (place < static_cast<uint32_t>(total_pairs(p)) * static_cast<uint32_t>(p.Hq)) {
    const uint32_t listed = load_relaxed(p.ready + place);
    taken = listed != 0 ? listed - 1 : place | kPlace;
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    store_cluster_u1(cluster_address(smem + Traits::kTaken + index % Traits::kTakenSlots * 4, rank), taken,
                     cluster_address(bars.taken(index), rank));
  }
}

// Who loads: what has been taken.
__device__ __forceinline__ uint32_t taken_item(uint32_t smem, const GradientsBarriers& bars, uint32_t index) {
  using Traits = GradientsTraits;
  mbarrier_wait(bars.taken(index), index / Traits::kTakenSlots % 2);
  return load_shared_u1(smem + Traits::kTaken + index % Traits::kTakenSlots * 4);
}

// One thread: the item, when the passes have left all that the copy engine is to load of it. Its counter is asked for
// what they have released; that it is complete the list has said.
__device__ __forceinline__ uint32_t wait_for_item(const Args& p, uint32_t taken) {
  if ((taken & kPlace) != 0) {
    uint32_t listed;
    while ((listed = load_relaxed(p.ready + (taken & ~kPlace))) == 0) __nanosleep(200);
    taken = listed - 1;
  }
  uint32_t all = static_cast<uint32_t>(p.group);
  recompute_from(all);  // what follows from it is made again for each item: few registers
  all *= kPairCount;
  while (load_acquire(p.progress + taken) < all) {
  }
  fence_proxy_async_all();
  return taken;
}

__device__ __forceinline__ bool has_late_chunk(const PairInfo& pair) { return pair.valid > kChunk; }

// A block's chunk of a pair. A late chunk that is not there: no token, and the early one's in place of its operands.
__device__ __forceinline__ ChunkInfo chunk_of(const Args& p, const PairInfo& pair, uint32_t rank) {
  const bool late = rank == kLate && has_late_chunk(pair);
  return {pair.token + (late ? kChunk : 0),
          rank == kEarly ? min(pair.valid, kChunk)
          : late         ? pair.valid - kChunk
                         : 0,
          pair.sequence, p.cu_seqlens == nullptr ? pair.sequence : 0};
}

}  // namespace flash_qla::cuda::sm90::bwd
