// Pair-parallel gradients from S, dS, V' and dv: dq, dk, dg and dbeta. One work item is a pair of chunks of a key head,
// and the value heads of its group follow one another, so that dq and dk are summed in fp32 accumulators and rounded
// once. An item belongs to a cluster of two blocks, a chunk each ("early" and "late"): what both need is loaded once.
//
// Three warpgroups of a block share the operands:
//   query   dq      = scale diag(gamma) dO S^T + dP K
//   plus    the part of dk whose gate enters with +:  dU S^T + D K
//   minus   the part whose gate enters with -:        diag(gP / gamma) V' dS^T + dP^T Q + D^T K
// with dP = scale G o (dO V'^T) and D = -beta_row G o strict_lower(Z V'^T) over the pair: S is the state at its start,
// dS its gradient at its end, gP the decay of all of it. Of the blocks of dP and D, [late rows, early columns] is made
// by the late block, which needs it for dq and plus, and handed to the early one: its part of minus is made there by
// the plus group, which has more time. Then the gradient of the gate's cumsum at token i is
//   <q_i, dq_i> + <k_i, plus_i> - <k_i, minus_i>, and at the pair's last token + gP <dS, S> + sum_i <k_i, (diag(gP /
//   gamma) V' dS^T)_i>.
// Both members of each pair of tokens (+ at i, - at j) come from the same rounded operands, so what cancels in the
// later sum cancels as it would in exact arithmetic. The minus group takes dP and D, transposed, from the tiles that
// the others leave; two warps make <dS, S>, and one the gate's gradient, for which the blocks exchange one sum a head.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/sm90/chunk_bwd/device.cuh"
#include "cuda/sm90/chunk_bwd/order.cuh"

namespace flash_qla::cuda::sm90 {

struct GradientsTraits {
  static constexpr int kGroups = 3;
  static constexpr int kThreads = kGroups * 128 + 128;
  // In all what 4 * 128 threads start with, 128 each.
  static constexpr int kLoadRegisters = 32, kLowerRegisters = 176, kMinusRegisters = 128;
  static constexpr int kConsumerWarps = kGroups * 4;
  static constexpr int kInnerWarps = 2;  // for <dS, S>: what the load warps' group has left

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
  // Row sums of the three groups, <dv, V'>, beta and the row sums of diag(gP / gamma) V' dS^T, and the two parts of
  // gP <dS, S>, two heads deep; the other block's sum.
  static constexpr uint32_t kSums = kGates + 2 * kHeadGates;
  static constexpr uint32_t kStateSums = 5 * kChunk * 4;  // in a head's sums
  static constexpr uint32_t kSumsBytes = 6 * kChunk * 4;
  // The three groups' row sums as they run on over the heads of an item.
  static constexpr uint32_t kRunning = kSums + 2 * kSumsBytes;
  static constexpr uint32_t kLast = kRunning + 3 * kChunk * 4;
  static constexpr uint32_t kLastBytes = kInnerWarps * 4;
  static constexpr uint32_t kReceived = kLast + 2 * kLastBytes;
  // What the groups know of an item. Who loads is at most three heads ahead of them, and they two of who makes dg.
  static constexpr uint32_t kItems = kReceived + 16;
  static constexpr int kItemSlots = 8;
  // Which items the cluster has taken: one more than it works on.
  static constexpr uint32_t kTaken = kItems + kItemSlots * 32;
  static constexpr int kTakenSlots = 2;
  static constexpr uint32_t kBarriers = kTaken + kTakenSlots * 4;
  static constexpr uint32_t kBarrierCount = 2 * (kStages + 3) + 1 + 3 * 2 + kTakenSlots;
  static constexpr uint32_t kBytes = 1024 + kBarriers + 8 * kBarrierCount;
  static_assert(kBarriers % 8 == 0 && kBytes <= 232448, "shared memory of one block on sm_90");
};

// Named barriers: all are done with q and k (plus waits, to take their place); plus has put its part where minus takes
// it (minus waits); what a group sends to the other block is there (one for query, one for plus).
constexpr uint32_t kKeysBarrier = 1, kMeetBarrier = 2, kStagingBarrier = 3;

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
  __device__ ChunkInfo chunk(const ChunkBackwardParams& p) const {
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

// acc [64 rows, 128 tokens] += X Y^T; X a tile [64 rows][64], Y two.
template <typename T>
__device__ __forceinline__ void add_rows_times_rows(float (&acc)[64], uint32_t sX, uint32_t sY) {
  const uint64_t x = wgmma_descriptor(sX), y = wgmma_descriptor(sY);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma_ss_n128<T>(acc, wgmma_advance(x, step * 32), wgmma_advance(y, step * 32));
  }
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

// acc [64 rows, 128] += X [64 rows, 64] Y, X packed, Y tiles [2 halves of its columns][64][64]: 64 of V of a state, or
// tokens.
template <typename T>
__device__ __forceinline__ void add_product(float (&acc)[64], const uint32_t (&x)[16], uint32_t sY) {
  const uint64_t y = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) mma_rs_n128_trans<T>(acc, x + 4 * j, wgmma_advance(y, j * 2048));
}

// <acc_i, X_i> of the thread's two rows, for X [2 halves][64 rows][64].
template <typename T>
__device__ __forceinline__ void row_dots(float (&dots)[2], const float (&acc)[64], uint32_t sX, int warp, int lane) {
  const uint32_t first = tile_piece(sX, 16 * warp + (lane & 15), lane >> 4);  // as in load_rows
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};                                    // two chains a row
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t x[4];
    load_matrix_x4((first ^ (2 * (j % 4) << 4)) + (j / 4) * kTileBytes, x[0], x[1], x[2], x[3]);
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
      const float2 pair = unpack2<T>(x[part]);
      const int i = 8 * j + 4 * (part / 2) + 2 * (part % 2);
      sum[part] = fmaf(acc[i], pair.x, fmaf(acc[i + 1], pair.y, sum[part]));
    }
  }
  dots[0] = quad_sum(sum[0] + sum[2]);
  dots[1] = quad_sum(sum[1] + sum[3]);
}

// The rows' gradient through their normalisation y = r x: r (acc - <acc, y> y), where dots is <acc, y>, sX holds y, and
// inverse_norms r. For the parts of a sum too: it is linear.
template <typename T>
__device__ __forceinline__ void through_norm(float (&acc)[64], const float (&dots)[2], uint32_t sX,
                                             const float* inverse_norms, const ChunkBackwardParams& p,
                                             const ChunkInfo& chunk, int key_head, int warp, int lane) {
  const uint32_t first = tile_piece(sX, 16 * warp + lane / 4, 0) + (lane % 4) * 4;  // as in load_rows
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = max(0, min(16 * warp + lane / 4 + 8 * h, chunk.valid - 1));  // past the end: stored nowhere
    const float r = inverse_norms[(static_cast<int64_t>(chunk.batch) * p.T + chunk.token + row) * p.Hq + key_head];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 y = unpack2<T>(load_shared_u1((first ^ ((j % 8) << 4)) + (j / 8) * kTileBytes + h * 8 * 128));
      acc[4 * j + 2 * h] = r * (acc[4 * j + 2 * h] - dots[h] * y.x);
      acc[4 * j + 2 * h + 1] = r * (acc[4 * j + 2 * h + 1] - dots[h] * y.y);
    }
  }
}

// The accumulator's rows, rounded, to the warp's 4 KB of shared memory (two halves of 16 rows).
template <typename T>
__device__ __forceinline__ void gather_rows(const float (&acc)[64], uint32_t place, int lane) {
  const uint32_t first = tile_piece(place, lane & 15, lane >> 4);  // as in load_rows
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float* x = acc + 8 * j;
    store_matrix_x4((first ^ (2 * (j % 4) << 4)) + j / 4 * (16 * 128), pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]),
                    pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  }
}

// From there to [b, token + row, head, :]: by a loop, which the accumulator's registers do not allow, and whole rows.
__device__ __forceinline__ void store_rows(const StridedTensor& t, const ChunkInfo& chunk, int head, uint32_t place,
                                           int warp, int lane) {
  if (t.data == nullptr) return;
  place += (lane >> 3 & 1) * (16 * 128);
  int row = lane >> 4;
  auto* to = static_cast<uint16_t*>(t.data) + row_offset(t, chunk.batch, chunk.token + 16 * warp + row, head) +
             8 * (lane & 15);
#pragma unroll 1
  for (; row < min(16, chunk.valid - 16 * warp); row += 2, to += 2 * t.stride[1]) {
    const uint4 piece = load_shared_u4(tile_piece(place, row, lane & 7));
    *reinterpret_cast<uint4*>(to) = piece;
  }
}

// <dS, S> over a tile, the part of this one of `threads` threads. Loops stay loops in this kernel: two programs run
// side by side, and together they should fit the instruction cache (about 2000 instructions).
template <typename T>
__device__ __forceinline__ float state_product(uint32_t sS, uint32_t sDS, uint32_t thread, uint32_t threads) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (uint32_t at = thread * 16; at < kTileBytes; at += threads * 16) {
    const uint4 a = load_shared_u4(sS + at), b = load_shared_u4(sDS + at);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 s = unpack2<T>(x[w]), d = unpack2<T>(y[w]);
      sum[w % 2] = fmaf(s.x, d.x, fmaf(s.y, d.y, sum[w % 2]));
    }
  }
  return sum[0] + sum[1];
}

// Whether a token's gate gets no gradient: g of the lane's row is clamped, or it is a sequence's first token without a
// state before it, which has nothing to forget (exactly 0, which as a sum of terms that cancel it would be but for
// their rounding; NaN stays).
__device__ __forceinline__ bool has_no_gate_gradient(const ChunkBackwardParams& p, const ChunkInfo& chunk, int head,
                                                     int row, float d_g) {
  if (row == 0 && p.initial_state.data == nullptr && d_g == d_g &&
      sequence_info(p, chunk.sequence).token == chunk.token) {
    return true;
  }
  constexpr float kMinLogDecay = -80.0f;  // below it the decay is clamped: no gradient
  return !p.g_is_cumsum && p.g.data != nullptr && row < chunk.valid &&
         load_element(p.g, row_offset(p.g, chunk.batch, chunk.token + row, head)) < kMinLogDecay;
}

// One thread of a cluster: takes the next item that is left. In the order in which the passes leave the pairs
// (order.cuh), the key heads of a pair side by side.
__device__ __forceinline__ uint32_t take_item(const ChunkBackwardParams& p, uint32_t units) {
  const uint32_t total = static_cast<uint32_t>(total_pairs(p)), heads = static_cast<uint32_t>(p.Hq);
  const uint32_t places = units * piece_length(units, total);
  while (true) {
    const uint32_t ticket = atomicAdd(p.next_item, 1u), turn = ticket / heads;
    if (turn >= places) return kNoItem;
    const uint32_t pair = inner_first(turn, units, total);
    if (pair < total) return pair * heads + ticket - turn * heads;
  }
}

// The same thread: the cluster's index-th item, told to both blocks.
__device__ __forceinline__ void hand_out(const ChunkBackwardParams& p, uint32_t units, uint32_t smem,
                                         const GradientsBarriers& bars, uint32_t index) {
  using Traits = GradientsTraits;
  const uint32_t item = take_item(p, units);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    store_cluster_u1(cluster_address(smem + Traits::kTaken + index % Traits::kTakenSlots * 4, rank), item,
                     cluster_address(bars.taken(index), rank));
  }
}

// Who loads: which item that is.
__device__ __forceinline__ uint32_t taken_item(uint32_t smem, const GradientsBarriers& bars, uint32_t index) {
  using Traits = GradientsTraits;
  mbarrier_wait(bars.taken(index), index / Traits::kTakenSlots % 2);
  return load_shared_u1(smem + Traits::kTaken + index % Traits::kTakenSlots * 4);
}

// One thread: until the passes have left all that the copy engine is to load of an item.
__device__ __forceinline__ void wait_until_left(const ChunkBackwardParams& p, uint32_t item) {
  const uint32_t all = kPairCount * static_cast<uint32_t>(p.group);
  while (load_acquire(p.progress + item) < all) __nanosleep(200);
  fence_proxy_async_all();
}

__device__ __forceinline__ bool has_late_chunk(const PairInfo& pair) { return pair.valid > kChunk; }

// A block's chunk of a pair. A late chunk that is not there: no token, and the early one's in place of its operands.
__device__ __forceinline__ ChunkInfo chunk_of(const ChunkBackwardParams& p, const PairInfo& pair, uint32_t rank) {
  const bool late = rank == kLate && has_late_chunk(pair);
  return {pair.token + (late ? kChunk : 0),
          rank == kEarly ? min(pair.valid, kChunk)
          : late         ? pair.valid - kChunk
                         : 0,
          pair.sequence, p.cu_seqlens == nullptr ? pair.sequence : 0};
}

// q and k of an item's chunk.
__device__ __forceinline__ void load_keys(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, uint32_t smem,
                                          const GradientsBarriers& bars, uint32_t rank, uint32_t index) {
  using Traits = GradientsTraits;
  const GradientsItem item(smem, index);
  const ChunkInfo chunk = item.chunk(p);
  const int key_head = item.key_head();
  mbarrier_wait(bars.keys_empty(), (index % 2) ^ 1);
  const uint32_t bar = bars.keys_full(), to = smem + rank * Traits::kKeys;
  mbarrier_arrive_expect(bar, rank == kEarly ? 4 * kTokensBytes : 3 * kTokensBytes);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const uint32_t at = to + half * kTileBytes;
    if (rank == kEarly) {
      tma_load_5d(at + Traits::kQ, &maps.q, bar, 0, chunk.token, half, key_head, chunk.batch);
    } else {
      tma_load_5d_cluster(at + Traits::kQ, &maps.q, bar, 0, chunk.token, half, key_head, chunk.batch, kBothBlocks);
    }
    tma_load_5d_cluster(at + Traits::kK, &maps.k, bar, 0, chunk.token, half, key_head, chunk.batch, kBothBlocks);
  }
}

// One thread: the stages of every item, in the order the groups use them, and its q and k after the first head's: those
// are free when all is done with the item before, which is before the second head's stages are. Of what both blocks
// need each brings half.
__device__ __forceinline__ void load_stages(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, uint32_t smem,
                                            const GradientsBarriers& bars, uint32_t rank) {
  using Traits = GradientsTraits;
  uint32_t turn = 0;
  for (uint32_t index = 0;; ++index) {
    mbarrier_arrive_expect(bars.taken(index), 4);
    const uint32_t taken = taken_item(smem, bars, index);
    if (taken == kNoItem) {
      mbarrier_wait(bars.empty(0), (turn % 2) ^ 1);
      GradientsItem(smem, index).store_end();
      mbarrier_arrive(bars.full(0));
      return;
    }
    wait_until_left(p, taken);
    const uint32_t heads = static_cast<uint32_t>(p.Hq);
    const int pair_index = static_cast<int>(taken / heads), key_head = static_cast<int>(taken % heads);
    const PairInfo pair = pair_info(p, pair_index);
    const ChunkInfo chunk = chunk_of(p, pair, rank);
    const int slot = pair.slot + (rank == kLate && has_late_chunk(pair) ? 1 : 0);
    const GradientsItem before(smem, index - 1);
    const uint32_t tails = index == 0 ? 0 : before.tails() + (before.late_valid() < kChunk ? 1 : 0);
    const GradientsItem item(smem, index);
    item.store(chunk, key_head, max(0, pair.valid - kChunk), tails, slot, pair_index);
    for (const uint32_t end = turn + p.group; turn < end; ++turn) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        // What is known of the item is read again each time, and what follows from the rank is made again: few
        // registers.
        asm volatile("" : "+r"(rank));
        const ChunkInfo chunk = item.chunk(p);
        const int head = item.key_head() * p.group + static_cast<int>(turn - index * p.group);
        const int64_t tile = static_cast<int64_t>(item.slot()) * p.Hv + head;
        const uint32_t bar = bars.full(half), to = smem + Traits::kStageRing + half * Traits::kStage;
        mbarrier_wait(bars.empty(half), (turn % 2) ^ 1);  // the first round finds everything empty
        mbarrier_arrive_expect(
            bar, (rank == kEarly ? Traits::kEarlyLoads : Traits::kLateLoads) + (half == 0 ? Traits::kHeadGates : 0));
        tma_load_5d(to + Traits::kDo, &maps.d_o, bar, 0, p.has_d_o ? chunk.token : -kChunk, half, head, chunk.batch);
        const uint8_t* v_new = p.v_new + tile * kTokensBytes + half * kTileBytes;
        if (rank == kEarly) {
          bulk_load_cluster(to + Traits::kVEarly, v_new, kTileBytes, bar, kBothBlocks);
        } else {
          bulk_load(to + Traits::kVLate, v_new, kTileBytes, bar);
        }
        tma_load_5d(to + Traits::kDv, &maps.dv, bar, 0, chunk.token, half, head, chunk.batch);
        const int64_t from = (static_cast<int64_t>(item.pair()) * p.Hv + head) * kStateBytes + rank * kStateHalfBytes +
                             half * kTileBytes;
        bulk_load_cluster(to + Traits::kState + rank * kTileBytes, p.states + from, kTileBytes, bar, kBothBlocks);
        bulk_load_cluster(to + Traits::kGrad + rank * kTileBytes, p.state_grads + from, kTileBytes, bar, kBothBlocks);
        if (half == 0) {
          bulk_load_cluster(smem + Traits::kGates + turn % 2 * Traits::kHeadGates + rank * kGateBytes,
                            p.gates + tile * p.gate_stride, kGateBytes, bar, kBothBlocks);
        }
      }
      if (turn == index * p.group) load_keys(p, maps, smem, bars, rank, index);
    }
  }
}

// One warp: dg and dbeta of the block's chunk, a head at a time, from what the groups leave; lane l has tokens 2l and
// 2l + 1. Little code, for what it takes of the cache: loops stay loops, and both leave by the same stores.
__device__ __forceinline__ void finish_gates(const ChunkBackwardParams& p, uint32_t smem, const GradientsBarriers& bars,
                                             uint32_t rank, int lane) {
  using Traits = GradientsTraits;
  uint32_t turn = 0;
  for (uint32_t index = 0;; ++index) {
    for (; turn < (index + 1) * p.group; ++turn) {
      // What follows from these is made again for each head: few registers.
      asm volatile("" : "+r"(index), "+r"(rank), "+r"(lane));
      const uint32_t parity = turn % 2, phase = turn / 2 % 2;
      const uint32_t sums = smem + Traits::kSums + parity * Traits::kSumsBytes + lane * 8;
      mbarrier_wait(bars.sums_full(parity), phase);
      if (GradientsItem(smem, index).is_end()) return;
      const float2 query = load_shared_f2(sums), plus = load_shared_f2(sums + kChunk * 4),
                   minus = load_shared_f2(sums + 2 * kChunk * 4), of_state = load_shared_f2(sums + Traits::kStateSums);
      const int valid = GradientsItem(smem, index).valid(), row = 2 * lane;
      const float first = row < valid ? query.x + plus.x - minus.x : 0.0f;
      // Sum over this lane's tokens and all later ones; lane 0's is that of the chunk, as its `last` is.
      float suffix = first + (row + 1 < valid ? query.y + plus.y - minus.y : 0.0f), last = of_state.x + of_state.y;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const float later = __shfl_down_sync(0xffffffffu, suffix, step);
        last += __shfl_down_sync(0xffffffffu, last, step);
        if (lane + step < 32) suffix += later;
      }
      const float2 inner = load_shared_f2(smem + Traits::kLast + parity * Traits::kLastBytes);
      last = __shfl_sync(0xffffffffu, last, 0) + (inner.x + inner.y);
      if (lane == 0) {
        mbarrier_arrive_expect(bars.received(parity), 4);
        store_cluster_u1(cluster_address(smem + Traits::kReceived + parity * 4, rank ^ 1),
                         __float_as_uint(rank == kEarly ? last : last + suffix),
                         cluster_address(bars.received(parity), rank ^ 1));
      }
      mbarrier_wait(bars.received(parity), phase);
      suffix += last + load_shared_f1(smem + Traits::kReceived + parity * 4);

#pragma unroll 1
      for (int i = 0; i < 4; ++i) {  // dbeta and dg of the first token, dbeta and dg of the second one
        asm volatile("" : "+r"(index), "+r"(rank), "+r"(lane));
        const GradientsItem item(smem, index);
        const ChunkInfo chunk = item.chunk(p);
        const int head = item.key_head() * p.group + static_cast<int>(turn - index * p.group);
        const int token = row + i / 2;
        const bool is_gate = i % 2 != 0;
        const float b = load_shared_f1(sums + 4 * kChunk * 4 + i / 2 * 4);
        // dbeta = <Z, V'> / beta = <dv, V'> / beta^2; small betas come later (small_betas.cuh).
        float value = is_gate ? suffix : __fdividef(load_shared_f1(sums + 3 * kChunk * 4 + i / 2 * 4), b * b);
        if (i == 1) suffix -= first;
        const StridedTensor& t = is_gate ? p.dg : p.dbeta;
        if (t.data == nullptr || token >= valid || (!is_gate && fabsf(b) < p.small_beta)) continue;
        if (is_gate && has_no_gate_gradient(p, chunk, head, token, value)) value = 0.0f;
        store_element(t, row_offset(t, chunk.batch, chunk.token + token, head), value);
      }
      __syncwarp();
      mbarrier_arrive_warp(bars.sums_empty(parity), lane);
    }
  }
}

enum GradientsGroup : int { kQuery, kPlus, kMinus };

// One warpgroup through one value head, both halves of V. Its sums go to `sums` and `last`.
template <typename T>
struct HeadWork {
  const ChunkBackwardParams& p;
  const GradientsBarriers bars;
  uint32_t smem;
  uint32_t index, turn;  // items and heads before this one
  uint32_t rank;
  int warp, lane;

  __device__ GradientsItem item() const { return GradientsItem(smem, index); }
  __device__ uint32_t sQ() const { return smem + rank * GradientsTraits::kKeys + GradientsTraits::kQ; }
  __device__ uint32_t sK() const { return smem + rank * GradientsTraits::kKeys + GradientsTraits::kK; }
  __device__ uint32_t sums() const { return smem + GradientsTraits::kSums + turn % 2 * GradientsTraits::kSumsBytes; }
  __device__ uint32_t last() const { return smem + GradientsTraits::kLast + turn % 2 * GradientsTraits::kLastBytes; }
  __device__ void open_sums() const { mbarrier_wait(bars.sums_empty(turn % 2), (turn / 2 % 2) ^ 1); }
  __device__ int row(int h) const { return 16 * warp + (lane >> 2) + 8 * h; }
  __device__ uint32_t open(uint32_t half) const {
    mbarrier_wait(bars.full(half), turn % 2);
    return smem + GradientsTraits::kStageRing + half * GradientsTraits::kStage;
  }
  // Of the early chunk, then of the late one.
  __device__ uint32_t both_gates() const {
    return smem + GradientsTraits::kGates + turn % 2 * GradientsTraits::kHeadGates;
  }
  __device__ uint32_t own_gates() const { return both_gates() + rank * kGateBytes; }
  // In both blocks: both load to it.
  __device__ void release(int half) const {
    __syncwarp();
    arrive_both(bars.empty(half), lane);
  }
  // What the group's accumulator had for row(h) before this head: it runs on over the heads of an item. For the lanes
  // that keep sums (lane % 4 == 0), from shared memory: there are no registers to keep it in.
  __device__ uint32_t running(int group, int h) const {
    return smem + GradientsTraits::kRunning + static_cast<uint32_t>(group * kChunk + row(h)) * 4;
  }
  __device__ float before(int group, int h) const {
    return turn == index * p.group ? 0.0f : load_shared_f1(running(group, h));
  }
  // The rows' sums over this head alone, after its first and after its second part. The minus group's first ones go to
  // a place of their own; the plus group's second part counts with minus.
  __device__ void keep_sums(int group, bool second, const float (&dots)[2]) const {
    if ((lane & 3) != 0) return;
    const bool of_state = group == kMinus && !second, others = group == kPlus && second;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t to =
          sums() + (of_state ? GradientsTraits::kStateSums : static_cast<uint32_t>(group) * kChunk * 4) + row(h) * 4;
      const float sum = dots[h] - (others ? load_shared_f1(running(group, h)) : before(group, h));
      store_shared_f1(to, others ? load_shared_f1(to) - sum : sum);
      if (!of_state) store_shared_f1(running(group, h), dots[h]);
    }
  }

  // The query group's part (rows dO, factor scale, the diagonal included) and the plus group's (rows dv, factor -rho,
  // strictly lower) are one code: two groups running the same instructions fetch them once.
  __device__ __forceinline__ void lower(bool plus, float (&acc)[64]) {
    using Traits = GradientsTraits;
    // Products with the own chunk's V', in the late block after those with the early chunk's (in the early one after
    // what nobody uses: one code for both blocks).
    constexpr int kOwn = 32;
    float product[kOwn + 32];
    const uint32_t rows_at = plus ? Traits::kDv : Traits::kDo;
    if (plus && rank == kEarly && warp == 0 && lane == 0) {
      mbarrier_arrive_expect(bars.late_rows_full(), 2 * kTileBytes);
    }
    const uint32_t gates = own_gates(), group_barrier = kStagingBarrier + static_cast<uint32_t>(plus);
#pragma unroll
    for (int i = 0; i < kOwn + 32; ++i) product[i] = 0.0f;
    open(0);  // the gates have come with it; ahead of the products, beside which a load takes 100 clocks
    const float gamma_early = rank == kLate ? load_shared_f1(both_gates() + kGammaOffset + (kChunk - 1) * 4) : 1.0f;
    const auto row_factor = [&](int h) {
      return RowFactor<T>(factor_of(plus, gates, h) * gamma_early * load_shared_f1(gates + kGammaOffset + row(h) * 4));
    };
    const RowFactor<T> row_factors[2] = {row_factor(0), row_factor(1)};
#pragma unroll 1
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t stage = open(half);
      static_assert(Traits::kVLate == Traits::kVEarly + kTileBytes && Traits::kVEarly == Traits::kDo + kTileBytes);
      if (const int valid = item().valid(); valid < kChunk) {  // a neighbour's rows, NaN perhaps
        zero_tail(stage + rows_at, valid, 32 * warp + lane, 128);
        fence_proxy_async();
        named_barrier_sync(group_barrier, 128);
      }
      uint32_t x[16];
      load_rows(x, stage + rows_at, warp, lane);
      wgmma_fence();
      add_rows_times_rows<T>(product, stage + rows_at, stage + Traits::kDo + rank * kTileBytes);
      wgmma_commit();
      scale_rows<T>(x, row_factors);
      wgmma_fence();
      add_product<T>(acc, x, stage + Traits::kState);
      wgmma_commit();
      wgmma_wait<0>();
      pin(x);
      pin(product);
      pin(acc);
      release(half);
    }
    // What follows from these is made again: few registers in the loop.
    asm volatile("" : "+r"(warp), "+r"(lane));
    open_sums();
    const float factor[2] = {factor_of(plus, gates, 0), factor_of(plus, gates, 1)};
    if (plus) keep_diagonal(product + kOwn, gates);

    // dP = scale G o (dO V'^T) or D = -beta_row G o strict_lower(Z V'^T).
    mbarrier_wait(bars.keys_full(), index % 2);
    if (rank == kLate) {
      uint32_t across[16];
      // From an early token to the chunks' border and on to the row's: neither factor grows where decays do not.
      const float row_factor[2] = {factor[0] * load_shared_f1(gates + kGammaOffset + row(0) * 4),
                                   factor[1] * load_shared_f1(gates + kGammaOffset + row(1) * 4)};
      const uint32_t ratios = both_gates() + kRatioOffset + 2 * (lane & 3) * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 ratio = load_shared_f2(ratios + 8 * j * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          across[2 * j + h] = pack2<T>(row_factor[h] * ratio.x * product[4 * j + 2 * h],
                                       row_factor[h] * ratio.y * product[4 * j + 2 * h + 1]);
        }
      }
      wgmma_fence();
      add_product<T>(acc, across, smem + Traits::kK);
      wgmma_commit();
      mbarrier_wait(bars.late_rows_empty(), (turn % 2) ^ 1);
      const uint32_t tile = smem + Traits::kStaging + (plus ? kTileBytes : 0);
      store_rows_of(tile, across);
      fence_proxy_async();
      named_barrier_sync(group_barrier, 128);
      if (warp == 0 && elect_one()) {
        bulk_copy_cluster(cluster_address(smem + (plus ? Traits::kLateRowsD : Traits::kLateRowsP), kEarly), tile,
                          kTileBytes, cluster_address(bars.late_rows_full(), kEarly));
      }
      wgmma_wait<0>();
      pin(across);
      pin(acc);
    }
    uint32_t packed[16];
    {
      // The factor's logarithm goes with the row's gate, its sign with the mask.
      float c_row[2];
      uint32_t sign[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        c_row[h] = load_shared_f1(gates + row(h) * 4) + log2_approx(fabsf(factor[h]));
        sign[h] = factor[h] < 0.0f ? 0x80008000u : 0u;
      }
      // Of 8 x 8 blocks those below the diagonal count whole, those on it by `triangle`: masked as packed words, for
      // what lies above may be NaN.
      const int below = (lane >> 2) - 2 * (lane & 3) - static_cast<int>(plus);
      const uint32_t triangle = (below >= 0 ? 0xffffu : 0u) | (below >= 1 ? 0xffff0000u : 0u);
      const uint32_t columns = gates + 2 * (lane & 3) * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 c = load_shared_f2(columns + 8 * j * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          // The blocks of rows of this warp are 2 warp + h. Column block j counts whole if it is before that, and at
          // all if the one before it is; from 0 to 3 warps there are, so that some are known.
          const int at = j - h, before_it = at - 1;
          const uint32_t whole = (at < 0) ? ~0u : (at >= 6) ? 0u : (warp > at / 2) ? ~0u : 0u;
          const uint32_t part = (at < 1) ? ~0u : (at >= 7) ? 0u : (warp > before_it / 2) ? ~0u : 0u;
          const float* x = product + kOwn + 4 * j + 2 * h;
          packed[2 * j + h] = (pack2<T>(exp2_approx(c_row[h] - c.x) * x[0], exp2_approx(c_row[h] - c.y) * x[1]) &
                               ((triangle | whole) & part)) ^
                              sign[h];
        }
      }
    }
    wgmma_fence();
    add_product<T>(acc, packed, sK());
    wgmma_commit();
    mbarrier_wait(bars.products_empty(), (turn % 2) ^ 1);
    store_rows_of(smem + (plus ? Traits::kD : Traits::kP), packed);
    __syncwarp();
    mbarrier_arrive_warp(bars.products_full(), lane);
    wgmma_wait<0>();
    pin(packed);
    pin(acc);
  }

  // Of row(h): scale, or -rho. dv of a small beta is Z, and rho = beta what is missing; else rho = 1.
  __device__ __forceinline__ float factor_of(bool plus, uint32_t gates, int h) const {
    const float beta = load_shared_f1(gates + kBetaOffset + row(h) * 4);
    return !plus ? p.scale : fabsf(beta) < p.small_beta ? -beta : -1.0f;
  }

  // A operand registers as the warp's rows of a tile.
  __device__ __forceinline__ void store_rows_of(uint32_t tile, const uint32_t (&x)[16]) const {
    const uint32_t first = tile_piece(tile, 16 * warp + (lane & 15), lane >> 4);  // as in load_rows
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_matrix_x4(first ^ (2 * j << 4), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
  }

  // The decay of the late chunk.
  __device__ __forceinline__ float late_decay() const {
    return item().late_valid() > 0 ? load_shared_f1(both_gates() + kGateBytes + kGammaOffset + (kChunk - 1) * 4) : 1.0f;
  }

  // <dv, V'> from the diagonal of the product, and beta, for dbeta.
  __device__ __forceinline__ void keep_diagonal(const float* product, uint32_t gates) const {
    float dot[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (j == warp) dot[h] = (lane >> 2 & 1) == 0 ? product[8 * j + 6 * h] : product[8 * j + 6 * h + 1];
      }
    }
    if ((lane >> 3) != (lane & 3)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t to = sums() + 3 * kChunk * 4 + row(h) * 4;
      store_shared_f1(to, dot[h]);
      store_shared_f1(to + kChunk * 4, load_shared_f1(gates + kBetaOffset + row(h) * 4));
    }
  }

  // X^T as A operand, X a tile [64][64].
  __device__ __forceinline__ void load_transposed(uint32_t (&x)[16], uint32_t sX) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at_row = 16 * j + 8 * (lane >> 4) + (lane & 7), piece = 2 * warp + (lane >> 3 & 1);
      load_matrix_x4_trans(tile_piece(sX, at_row, piece), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    }
  }

  // The minus group's first part, diag(gP / gamma) V' dS^T. V' is multiplied as it is, for rows with their factor would
  // be rounded again: the sums of the heads before are divided by it instead, and with the product multiplied, in fp32.
  __device__ __forceinline__ void minus_of_state(float (&acc)[64]) const {
    using Traits = GradientsTraits;
    // What decays further than this is nothing beside V' and dS; division by it leaves fp32 another 60 binary orders.
    constexpr float kLeastFactor = 0x1p-64f;
    const uint32_t ratios = own_gates() + kRatioOffset;
    open(0);
    const float decay = rank == kLate ? 1.0f : late_decay();
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float f = decay * load_shared_f1(ratios + row(h) * 4);
      factor[h] = f < kLeastFactor ? kLeastFactor : f;  // NaN stays
      const float inverse = __fdividef(1.0f, factor[h]);
#pragma unroll
      for (int j = 0; j < 32; ++j) acc[4 * (j / 2) + 2 * h + j % 2] *= inverse;
    }
#pragma unroll 1
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t stage = open(half);
      const uint64_t x = wgmma_descriptor(stage + Traits::kVEarly + rank * kTileBytes);
      const uint64_t y = wgmma_descriptor(stage + Traits::kGrad, kTileBytes);
      pin(acc);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_ss_n128_trans<T>(acc, wgmma_advance(x, j * 32), wgmma_advance(y, j * 2048));
      wgmma_commit();
      wgmma_wait<0>();
      pin(acc);
      release(half);
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] *= factor[i / 2 % 2];
  }

  // dP^T Q + D^T K, of the chunk's own rows (the minus group) or, in the early block, of the late chunk's (the plus
  // group, which has more time there).
  __device__ __forceinline__ void add_transposed(bool own, float (&acc)[64]) const {
    using Traits = GradientsTraits;
    mbarrier_wait(own ? bars.products_full() : bars.late_rows_full(), turn % 2);
    uint32_t dP[16], D[16];
    load_transposed(dP, smem + (own ? Traits::kP : Traits::kLateRowsP));
    load_transposed(D, smem + (own ? Traits::kD : Traits::kLateRowsD));
    __syncwarp();
    if (kWarpArrivals == 32 || lane == 0) {
      mbarrier_arrive_cluster(own ? cluster_address(bars.products_empty(), rank)
                                  : cluster_address(bars.late_rows_empty(), kLate));
    }
    const uint32_t keys = smem + (own ? rank : kLate) * Traits::kKeys;
    wgmma_fence();
    add_product<T>(acc, dP, keys + Traits::kQ);
    add_product<T>(acc, D, keys + Traits::kK);
    wgmma_commit();
    wgmma_wait<0>();
    pin(dP);
    pin(D);
    pin(acc);
  }

  // gP <dS, S>, by kInnerWarps warps; half of K a block.
  __device__ __forceinline__ void inner_product() const {
    using Traits = GradientsTraits;
    float inner = 0.0f;
#pragma unroll 1
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t tile = open(half) + rank * kTileBytes;
      inner +=
          state_product<T>(tile + Traits::kState, tile + Traits::kGrad, 32 * warp + lane, 32 * Traits::kInnerWarps);
      release(half);
    }
    inner = warp_sum(inner) * late_decay() * load_shared_f1(both_gates() + kGammaOffset + (kChunk - 1) * 4);
    open_sums();
    if (lane == 0) store_shared_f1(last() + warp * 4, inner);
    __syncwarp();
    mbarrier_arrive_warp(bars.sums_full(turn % 2), lane);
  }
};

// Two warps: <dS, S> of every head. In the early block a thread of theirs takes the next item, once an item's first
// head is done.
template <typename T>
__device__ __forceinline__ void inner_products(const ChunkBackwardParams& p, uint32_t units, uint32_t smem,
                                               const GradientsBarriers& bars, uint32_t rank, int warp, int lane) {
  uint32_t turn = 0;
  for (uint32_t index = 0;; ++index) {
    if (rank == kEarly && warp == 0 && lane == 0) hand_out(p, units, smem, bars, index);
    __syncwarp();
    // The rest of the item before, and this one's first head.
    for (const uint32_t first = index * p.group; turn <= first; ++turn) {
      mbarrier_wait(bars.full(0), turn % 2);
      if (turn == first && GradientsItem(smem, index).is_end()) {  // as the groups
        mbarrier_wait(bars.sums_empty(turn % 2), (turn / 2 % 2) ^ 1);
        mbarrier_arrive_warp(bars.sums_full(turn % 2), lane);
        return;
      }
      HeadWork<T>{p, bars, smem, turn == first ? index : index - 1, turn, rank, warp, lane}.inner_product();
    }
  }
}

// A group through all items of its block. One code for the three of them as far as they do the same: what two
// multiprocessors run should fit the cache of instructions that they share (about 2000). kNorms: q and k were
// normalised (a kernel of its own: what the other does not execute would still take its registers).
template <typename T, bool kNorms, bool kIsMinus>
__device__ __forceinline__ void group_gradients(const ChunkBackwardParams& p, GradientsGroup group, uint32_t smem,
                                                const GradientsBarriers& bars, uint32_t rank, int warp, int lane) {
  using Traits = GradientsTraits;
  uint32_t turn = 0;
  for (uint32_t index = 0;; index = __shfl_sync(0xffffffffu, index + 1, 0)) {
    // The shuffle says that the index is the warp's: it is kept in a uniform register, others are full as an item ends.
    mbarrier_wait(bars.full(0), turn % 2);
    const uint32_t keys = smem + rank * Traits::kKeys, other_keys = smem + Traits::kKeys;
    const GradientsItem item(smem, index);
    if (item.is_end()) {  // who makes dg is to see it too
      mbarrier_wait(bars.sums_empty(turn % 2), (turn / 2 % 2) ^ 1);
      mbarrier_arrive_warp(bars.sums_full(turn % 2), lane);
      return;
    }
    if (item.late_valid() < kChunk) {
      const int thread = group * 128 + 32 * warp + lane, valid = item.valid(), late_valid = item.late_valid();
      mbarrier_wait(bars.keys_full(), index % 2);
#pragma unroll 1
      for (uint32_t tile = 0; tile < 2 * kTokensBytes; tile += kTileBytes) {
        zero_tail(keys + tile, valid, thread, Traits::kGroups * 128);
        if (rank == kEarly) zero_tail(other_keys + tile, late_valid, thread, Traits::kGroups * 128);
      }
      fence_proxy_async();
      __syncwarp();
      mbarrier_arrive_warp(bars.tail(), lane);
      mbarrier_wait(bars.tail(), item.tails() % 2);
    }
    float acc[64], dots[2];
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.0f;

    do {
      // Addresses made from these are made again for each head, not kept in registers that the accumulators need.
      asm volatile("" : "+r"(warp), "+r"(lane));
      HeadWork<T> work = {p, bars, smem, index, turn, rank, warp, lane};
      const uint32_t own_rows = keys + (group == kQuery ? Traits::kQ : Traits::kK);
      // In the early block the plus group sees to the late rows' part of the minus group's work: after the row sums of
      // its own, which it is not among.
      const bool two_parts = kIsMinus || (group == kPlus && rank == kEarly);
      uint32_t part = 0;
#pragma unroll 1
      do {
        if constexpr (kIsMinus) {
          if (part == 0) {
            work.minus_of_state(acc);
            mbarrier_wait(bars.keys_full(), index % 2);
            work.open_sums();
          } else {
            work.add_transposed(true, acc);
          }
        } else {
          if (part == 0) {
            work.lower(group == kPlus, acc);
          } else {
            work.add_transposed(false, acc);
          }
        }
        row_dots<T>(dots, acc, own_rows, warp, lane);
        work.keep_sums(group, part != 0, dots);
      } while (part++ == 0 && two_parts);
      __syncwarp();
      mbarrier_arrive_warp(bars.sums_full(turn % 2), lane);
    } while (++turn < (index + 1) * p.group);

    if constexpr (kNorms) {
      through_norm<T>(acc, dots, keys + (group == kQuery ? Traits::kQ : Traits::kK),
                      group == kQuery ? p.q_inverse_norms : p.k_inverse_norms, p, item.chunk(p), item.key_head(), warp,
                      lane);
    }
    // dk = plus + minus, met where q and k were: 128 threads x 64 floats are just their 32 KB, 8 of them a warp's.
    static_assert(2 * kTokensBytes == 128 * 64 * sizeof(float));
    const uint32_t warps_place = keys + warp * (kTokensBytes / 2), mine = warps_place + lane * 16;
    // The fence, after which the copy engine may write here, waits for all that is on its way: stores come later. Those
    // that read here are done before the arrival: a store has its value by then.
    const auto leave_keys = [&] {
      __syncwarp();
      arrive_both(bars.keys_empty(), lane);
    };
    const auto leave_rows = [&](const StridedTensor& t, uint32_t place) {
      gather_rows<T>(acc, place, lane);
      fence_proxy_async();
      __syncwarp();
      store_rows(t, item.chunk(p), item.key_head(), place, warp, lane);
      leave_keys();
    };
    if constexpr (kIsMinus) {
      named_barrier_arrive(kKeysBarrier, Traits::kGroups * 128);
      named_barrier_sync(kMeetBarrier, 2 * 128);
      asm volatile("" : "+r"(lane));  // what follows from it is made again
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float4 x = load_shared_f4(mine + i * 32 * 16);
        acc[4 * i] += x.x;
        acc[4 * i + 1] += x.y;
        acc[4 * i + 2] += x.z;
        acc[4 * i + 3] += x.w;
        if (i % 4 == 3) pin(acc);  // else all 64 are on their way at once, in as many registers
      }
      __syncwarp();
      leave_rows(p.dk, warps_place);
    } else {
      named_barrier_sync(kKeysBarrier, Traits::kGroups * 128);
      if (group == kPlus) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          store_shared_u4(mine + i * 32 * 16,
                          make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                     __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
        }
        named_barrier_arrive(kMeetBarrier, 2 * 128);
        fence_proxy_async();
        leave_keys();
      } else {
        const uint32_t others_k = smem + (rank ^ 1) * Traits::kKeys + Traits::kK;
        leave_rows(p.dq, others_k + warp * (kTokensBytes / 4));
      }
    }
  }
}

template <typename T, bool kNorms>
__global__ __launch_bounds__(GradientsTraits::kThreads,
                             1) void sm90_chunk_bwd_gradients_kernel(const ChunkBackwardParams p,
                                                                     const __grid_constant__ ChunkBackwardMaps maps,
                                                                     uint32_t units) {
  // Beside the passes: its blocks come when all of theirs have started (states.cuh), and wait for each item.
  launch_dependents();
  using Traits = GradientsTraits;
  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const GradientsBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t rank = __shfl_sync(0xffffffffu, cluster_rank(), 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages + 1; ++i) {
      mbarrier_init(bars.full(i), 1);
      const uint32_t warps = Traits::kConsumerWarps + (i < Traits::kStages ? Traits::kInnerWarps : 0);
      mbarrier_init(bars.empty(i), 2 * warps * kWarpArrivals);
    }
    mbarrier_init(bars.products_full(), 8 * kWarpArrivals);
    mbarrier_init(bars.products_empty(), 4 * kWarpArrivals);
    mbarrier_init(bars.late_rows_full(), 1);
    mbarrier_init(bars.late_rows_empty(), 4 * kWarpArrivals);
    mbarrier_init(bars.tail(), Traits::kConsumerWarps * kWarpArrivals);
    for (uint32_t parity = 0; parity < 2; ++parity) {
      mbarrier_init(bars.sums_full(parity), (Traits::kConsumerWarps + Traits::kInnerWarps) * kWarpArrivals);
      mbarrier_init(bars.sums_empty(parity), kWarpArrivals);
      mbarrier_init(bars.received(parity), 1);
    }
    for (uint32_t slot = 0; slot < Traits::kTakenSlots; ++slot) mbarrier_init(bars.taken(slot), 1);
    mbarrier_init_fence();
  }
  cluster_sync();

  // Each role ends by itself, when neither block writes to the other any more.
  if (warp >= Traits::kConsumerWarps) {
    release_registers<Traits::kLoadRegisters>();
    if (warp == Traits::kConsumerWarps && elect_one()) load_stages(p, maps, smem, bars, rank);
    if (warp == Traits::kConsumerWarps + 1) {
      finish_gates(p, smem, bars, rank, lane);
      // For the kernel after this one, which waits for this one alone. At the end: one warp's wait holds up its block.
      wait_for_predecessors();
    }
    if (warp >= Traits::kConsumerWarps + 2) {
      static_assert(Traits::kInnerWarps == 2);
      inner_products<T>(p, units, smem, bars, rank, warp - Traits::kConsumerWarps - 2, lane);
    }
  } else if (warp < 8) {
    claim_registers<Traits::kLowerRegisters>();
    group_gradients<T, kNorms, false>(p, warp < 4 ? kQuery : kPlus, smem, bars, rank, warp % 4, lane);
  } else {
    claim_registers<Traits::kMinusRegisters>();
    group_gradients<T, kNorms, true>(p, kMinus, smem, bars, rank, warp - 8, lane);
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace flash_qla::cuda::sm90
