// Chunk-parallel gradients from S, dS, V' and dv: dq, dk, dg and dbeta. One work item is a chunk of a key head, and the
// value heads of its group follow one another, so that dq and dk are summed in fp32 accumulators and rounded once.
//
// Three warpgroups share the operands and exchange nothing but row sums:
//   query   dq      = scale diag(gamma) dO S^T + dP K
//   plus    the part of dk whose gate enters with +:  dU S^T + D K
//   minus   the part whose gate enters with -:        diag(gC / gamma) V' dS^T + dP^T Q + D^T K
// with dP = scale G o (dO V'^T) and D = -beta_row G o strict_lower(Z V'^T). Then the gradient of the gate's cumsum at
// token i is
//   <q_i, dq_i> + <k_i, plus_i> - <k_i, minus_i>, and at the last token + gC <dS, S> + sum_i <k_i, (diag(gC / gamma) V'
//   dS^T)_i>.
// Both members of each pair (+ at i, - at j) come from the same rounded operands, so pairs inside the later sum cancel
// as they would in exact arithmetic. The minus group takes dP and D, transposed, from the tiles that the others leave.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

struct GradientsTraits {
  static constexpr int kGroups = 3;
  static constexpr int kThreads = kGroups * 128 + 128;
  // In all what 4 * 128 threads start with, 128 each.
  static constexpr int kLoadRegisters = 24, kLowerRegisters = 160, kMinusRegisters = 168;
  static constexpr int kConsumerWarps = kGroups * 4;

  // A stage is one half of V of one value head: dO, V', dv (8 KB each), S and dS (16 KB each), gates. Halves, because
  // three of them fit where one and a half heads would: two are on their way (114 KB; 32 KB cover the latency at full
  // bandwidth) while one is worked on.
  static constexpr int kStages = 3;
  static constexpr uint32_t kDo = 0;
  static constexpr uint32_t kVNew = kDo + kTileBytes;
  static constexpr uint32_t kDv = kVNew + kTileBytes;
  static constexpr uint32_t kState = kDv + kTileBytes;  // [2 halves of K][64 of V][64 of K]
  static constexpr uint32_t kGrad = kState + 2 * kTileBytes;
  static constexpr uint32_t kGates = kGrad + 2 * kTileBytes;
  static constexpr uint32_t kStage = kGates + kGateBytes;

  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kTokensBytes;
  static constexpr uint32_t kP = kK + kTokensBytes;  // dP and D of the head in hand
  static constexpr uint32_t kD = kP + kTileBytes;
  static constexpr uint32_t kStageRing = kD + kTileBytes;
  // Row sums of the three groups and the 12 warps' parts of the last token's term, two heads deep.
  static constexpr uint32_t kSums = kStageRing + kStages * kStage;
  static constexpr uint32_t kSumsBytes = 3 * kChunk * 4;
  static constexpr uint32_t kLast = kSums + 2 * kSumsBytes;
  static constexpr uint32_t kLastBytes = 12 * 4;
  static constexpr uint32_t kBarriers = kLast + 2 * kLastBytes;
  static constexpr uint32_t kBytes = 1024 + kBarriers + 8 * (2 * (kStages + 2) + 1);
  static_assert(kBytes <= 232448, "shared memory of one block on sm_90");
};

// Named barriers: all are done with q and k (plus waits, to take their place); plus has put its part where minus takes
// it (minus waits); the row sums of a head are there (query waits; two, in turns: a group may arrive for the next head
// before the query group has waited for this one).
constexpr uint32_t kKeysBarrier = 1, kMeetBarrier = 2, kSumsBarrier = 3;

struct GradientsBarriers {
  uint32_t base;
  __device__ uint32_t full(int stage) const { return base + 16 * stage; }
  __device__ uint32_t empty(int stage) const { return base + 16 * stage + 8; }
  __device__ uint32_t keys_full() const { return full(GradientsTraits::kStages); }
  __device__ uint32_t keys_empty() const { return empty(GradientsTraits::kStages); }
  // dP and D: two groups write, one reads.
  __device__ uint32_t products_full() const { return full(GradientsTraits::kStages + 1); }
  __device__ uint32_t products_empty() const { return empty(GradientsTraits::kStages + 1); }
  // The tail of an item's q and k was zeroed by all groups.
  __device__ uint32_t tail() const { return full(GradientsTraits::kStages + 2); }
};

// A place in the ring of stages.
struct StageCursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == GradientsTraits::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// acc [64 rows, 64 tokens] += X Y^T, both tiles [64 rows][64].
template <typename T>
__device__ __forceinline__ void add_rows_times_rows(float (&acc)[32], uint32_t sX, uint32_t sY) {
  const uint64_t x = wgmma_descriptor(sX), y = wgmma_descriptor(sY);
#pragma unroll
  for (int step = 0; step < 4; ++step) mma_ss_n64<T>(acc, wgmma_advance(x, step * 32), wgmma_advance(y, step * 32));
}

// diag(factor) X as A operand, X a tile [64 rows][64]; factor[0], [1]: of the thread's two rows.
template <typename T>
__device__ __forceinline__ void load_rows(uint32_t (&x)[16], uint32_t sX, const float (&factor)[2], int warp,
                                          int lane) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    uint32_t* a = x + 4 * step;
    load_matrix_x4(tile_piece(sX, 16 * warp + (lane & 15), 2 * step + (lane >> 4)), a[0], a[1], a[2], a[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = scale2<T>(a[i], factor[i % 2]);
  }
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
  const uint32_t first = tile_piece(sX, 16 * warp + (lane & 15), lane >> 4);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // two chains a row
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    uint32_t x[4];
    // The swizzle in one exclusive or: the row's part of it is the lane's, and a piece's is a constant.
    load_matrix_x4((first ^ (2 * (j % 4) << 4)) + (j / 4) * kTileBytes, x[0], x[1], x[2], x[3]);
#pragma unroll
    for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
      const float2 pair = unpack2<T>(x[part]);
      const int i = 8 * j + 4 * (part / 2) + 2 * (part % 2);
      sum[part] += acc[i] * pair.x + acc[i + 1] * pair.y;
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
  const uint32_t first = tile_piece(sX, 16 * warp + lane / 4, 0) + (lane % 4) * 4;  // as in row_dots
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

// The accumulator's rows to [b, token + i, head, :], rounded.
template <typename T>
__device__ __forceinline__ void store_rows(const StridedTensor& t, const ChunkInfo& chunk, int head,
                                           const float (&acc)[64], int warp, int lane) {
  if (t.data == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * warp + lane / 4 + 8 * h;
    if (row >= chunk.valid) continue;
    uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(t.data) +
                                               row_offset(t, chunk.batch, chunk.token + row, head) + 2 * (lane % 4));
#pragma unroll
    for (int j = 0; j < 16; ++j) to[4 * j] = pack2<T>(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
  }
}

// <dS, S> over `count` eighths of a stage's half from `first` on, this thread's part. Loops stay loops in this kernel:
// two programs run side by side, and together they should fit the instruction cache (about 2000 instructions).
template <typename T>
__device__ __forceinline__ float state_product(uint32_t sS, uint32_t sDS, int first, int count, int thread) {
  static_assert(2 * kTileBytes == 8 * 128 * 16);
  float sum[2] = {0.0f, 0.0f};
  const uint32_t begin = (thread + 128 * first) * 16, end = begin + count * (128 * 16);
#pragma unroll 1
  for (uint32_t at = begin; at < end; at += 128 * 16) {
    const uint4 a = load_shared_u4(sS + at), b = load_shared_u4(sDS + at);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 s = unpack2<T>(x[w]), d = unpack2<T>(y[w]);
      sum[w % 2] += s.x * d.x + s.y * d.y;
    }
  }
  return sum[0] + sum[1];
}

// dg of a chunk from the row sums, by one warp: lane l has tokens 2l and 2l + 1. gamma_end: gC.
__device__ __forceinline__ void store_gate_gradient(const ChunkBackwardParams& p, const ChunkInfo& chunk, int head,
                                                    uint32_t sums, uint32_t last, float gamma_end, int lane) {
  float d_cumsum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t at = sums + (2 * lane + i) * 4;
    d_cumsum[i] = load_shared_f1(at) + load_shared_f1(at + kChunk * 4) - load_shared_f1(at + 2 * kChunk * 4);
    if (2 * lane + i >= chunk.valid) d_cumsum[i] = 0.0f;
    if (2 * lane + i == chunk.valid - 1) {
      float total[3];
#pragma unroll
      for (int group = 0; group < 3; ++group) {
        const float4 x = load_shared_f4(last + 16 * group);
        total[group] = x.x + x.y + x.z + x.w;
      }
      d_cumsum[i] += gamma_end * (total[0] + total[1]) + total[2];
    }
  }
  float sum = d_cumsum[0] + d_cumsum[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, sum, step);
    if (lane + step < 32) sum += other;
  }
  float d_g[2] = {sum, sum - d_cumsum[0]};
  // Without a state before it a sequence's first token has nothing to forget: exactly 0 (NaN stays), which as a sum of
  // terms that cancel it would be but for their rounding.
  if (lane == 0 && p.initial_state.data == nullptr && sequence_info(p, chunk.sequence).token == chunk.token) {
    d_g[0] *= 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row >= chunk.valid) continue;
    constexpr float kMinLogDecay = -80.0f;  // below it the decay is clamped: no gradient
    const bool clamped = !p.g_is_cumsum && p.g.data != nullptr &&
                         load_element(p.g, row_offset(p.g, chunk.batch, chunk.token + row, head)) < kMinLogDecay;
    store_element(p.dg, row_offset(p.dg, chunk.batch, chunk.token + row, head), clamped ? 0.0f : d_g[i]);
  }
}

// The items of a block: chunk slots from both ends in turns (the serial passes end there, and the L2 cache still has
// some of what they wrote last), the key heads of a slot side by side.
struct ItemCursor {
  int turn, key_head, slots;
  __device__ ItemCursor(int Hq, int all_slots) {
    turn = static_cast<int>(blockIdx.x) / Hq;
    key_head = static_cast<int>(blockIdx.x) - turn * Hq;
    slots = all_slots;
  }
  __device__ bool valid() const { return turn < slots; }
  __device__ int slot() const { return turn % 2 == 0 ? slots - 1 - turn / 2 : turn / 2; }
  // turns, heads: gridDim.x / Hq and what is left of it.
  __device__ void advance(int Hq, int turns, int heads) {
    turn += turns;
    key_head += heads;
    if (key_head >= Hq) {
      key_head -= Hq;
      ++turn;
    }
  }
};

// One thread: every operand of every item, in the order the groups use them.
__device__ __forceinline__ void load_operands(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, int slots,
                                              uint32_t smem, const GradientsBarriers& bars) {
  using Traits = GradientsTraits;
  StageCursor cursor;
  uint32_t keys_phase = 1;  // the first round finds everything empty
  const int turns = static_cast<int>(gridDim.x) / p.Hq, heads = static_cast<int>(gridDim.x) - turns * p.Hq;
  for (ItemCursor item(p.Hq, slots); item.valid(); item.advance(p.Hq, turns, heads), keys_phase ^= 1) {
    const int slot = item.slot(), key_head = item.key_head;
    const ChunkInfo chunk = chunk_info(p, slot);
    for (int member = 0; member < p.group; ++member) {
      const int head = key_head * p.group + member;
      const int64_t tile = static_cast<int64_t>(slot) * p.Hv + head;
#pragma unroll 1
      for (int half = 0; half < 2; ++half, cursor.advance()) {
        const uint32_t bar = bars.full(cursor.stage), to = smem + Traits::kStageRing + cursor.stage * Traits::kStage;
        mbarrier_wait(bars.empty(cursor.stage), cursor.phase ^ 1);
        mbarrier_arrive_expect(bar, Traits::kStage);
        tma_load_5d(to + Traits::kDo, &maps.d_o, bar, 0, p.has_d_o ? chunk.token : -kChunk, half, head, chunk.batch);
        bulk_load(to + Traits::kVNew, p.v_new + tile * kTokensBytes + half * kTileBytes, kTileBytes, bar);
        tma_load_5d(to + Traits::kDv, &maps.dv, bar, 0, chunk.token, half, head, chunk.batch);
#pragma unroll 1
        for (int k_half = 0; k_half < 2; ++k_half) {
          const int64_t from = tile * kStateBytes + k_half * kStateHalfBytes + half * kTileBytes;
          bulk_load(to + Traits::kState + k_half * kTileBytes, p.states + from, kTileBytes, bar);
          bulk_load(to + Traits::kGrad + k_half * kTileBytes, p.state_grads + from, kTileBytes, bar);
        }
        bulk_load(to + Traits::kGates, p.gates + tile * kGateVectors * kChunk, kGateBytes, bar);
      }
      if (member == 0) {  // after the first head: it needs them last, and the item before may still hold their place
        const uint32_t bar = bars.keys_full();
        mbarrier_wait(bars.keys_empty(), keys_phase);
        mbarrier_arrive_expect(bar, 2 * kTokensBytes);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          tma_load_5d(smem + Traits::kQ + half * kTileBytes, &maps.q, bar, 0, chunk.token, half, key_head, chunk.batch);
          tma_load_5d(smem + Traits::kK + half * kTileBytes, &maps.k, bar, 0, chunk.token, half, key_head, chunk.batch);
        }
      }
    }
  }
}

enum GradientsGroup : int { kQuery, kPlus, kMinus };

// One warpgroup through one value head, both halves of V. Its sums go to `sums` and `last`.
template <typename T>
struct HeadWork {
  const ChunkBackwardParams& p;
  const GradientsBarriers& bars;
  const ChunkInfo& chunk;
  int head;
  uint32_t ring, sQ, sK, sP, sD, sums, last, keys_phase, products_phase;
  int warp, lane;

  __device__ int row(int h) const { return 16 * warp + lane / 4 + 8 * h; }
  __device__ uint32_t open(const StageCursor& cursor) const {
    mbarrier_wait(bars.full(cursor.stage), cursor.phase);
    return ring + cursor.stage * GradientsTraits::kStage;
  }
  __device__ void release(const StageCursor& cursor) const {
    __syncwarp();
    mbarrier_arrive_warp(bars.empty(cursor.stage), lane);
  }
  // The rows' sums over this head alone: the accumulator runs on over the heads of a group, `before` is what it had.
  __device__ void keep_sums(GradientsGroup group, const float (&dots)[2], float (&before)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0) {
        store_shared_f1(sums + static_cast<uint32_t>(group) * kChunk * 4 + row(h) * 4, dots[h] - before[h]);
      }
      before[h] = dots[h];
    }
  }

  // The query group's part (rows dO, factor scale, the diagonal included) and the plus group's (rows dv, factor -rho,
  // strictly lower) are one code: two groups running the same instructions fetch them once. Returns gC.
  __device__ __forceinline__ float lower(bool plus, StageCursor& cursor, float (&acc)[64], float (&before)[2]) const {
    using Traits = GradientsTraits;
    float product[32], factor[2], part = 0.0f;
    const uint32_t rows_at = plus ? Traits::kDv : Traits::kDo;
#pragma unroll
    for (int i = 0; i < 32; ++i) product[i] = 0.0f;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t stage = open(cursor), gates = stage + Traits::kGates;
      wgmma_fence();
      add_rows_times_rows<T>(product, stage + rows_at, stage + Traits::kVNew);
      wgmma_commit();
      float row_factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // dv of a small beta is Z, and rho = beta what is missing; else rho = 1
        const float beta = load_shared_f1(gates + kBetaOffset + row(h) * 4);
        factor[h] = !plus ? p.scale : fabsf(beta) < p.small_beta ? -beta : -1.0f;
        row_factor[h] = factor[h] * load_shared_f1(gates + kGammaOffset + row(h) * 4);
      }
      uint32_t x[16];
      load_rows<T>(x, stage + rows_at, row_factor, warp, lane);
      wgmma_fence();
      add_product<T>(acc, x, stage + Traits::kState);
      wgmma_commit();
      // <dS, S>: five eighths of a half each, the rest is the minus group's
      if (half == static_cast<int>(plus)) {
        part = state_product<T>(stage + Traits::kState, stage + Traits::kGrad, 0, 5, 32 * warp + lane);
      }
      wgmma_wait<0>();
      pin(x);
      pin(product);
      pin(acc);
      if (half == 0) {
        release(cursor);
        cursor.advance();
      }
    }
    part = warp_sum(part);
    if (lane == 0) store_shared_f1(last + (plus ? 16 : 0) + warp * 4, part);

    const uint32_t gates = ring + cursor.stage * Traits::kStage + Traits::kGates;
    if (plus && p.dbeta.data != nullptr) store_beta_gradient(product, gates);

    // dP = scale G o (dO V'^T) or D = -beta_row G o strict_lower(Z V'^T). What lies above the diagonal (the one that
    // counts) or past the end (a neighbour's products, NaN perhaps) is masked off the packed words.
    const float c_row[2] = {load_shared_f1(gates + row(0) * 4), load_shared_f1(gates + row(1) * 4)};
    const float gamma_end = load_shared_f1(gates + kGammaOffset + (kChunk - 1) * 4);
    uint32_t packed[16], inside[2], diagonal[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      inside[h] = row(h) < chunk.valid ? ~0u : 0u;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int below = lane / 4 + 8 * h - 8 * side - 2 * (lane % 4) - static_cast<int>(plus);
        diagonal[2 * side + h] = ((below >= 0 ? 0xffffu : 0u) | (below >= 1 ? 0xffff0000u : 0u)) & inside[h];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float2 c = load_shared_f2(gates + (16 * j + 8 * side + 2 * (lane % 4)) * 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int i = 8 * j + 4 * side + 2 * h;
          packed[i / 2] = pack2<T>(factor[h] * exp2_approx(c_row[h] - c.x) * product[i],
                                   factor[h] * exp2_approx(c_row[h] - c.y) * product[i + 1]) &
                          (j < warp    ? inside[h]
                           : j == warp ? diagonal[2 * side + h]
                                       : 0u);
        }
      }
    }
    release(cursor);
    cursor.advance();
    mbarrier_wait(bars.keys_full(), keys_phase);
    wgmma_fence();
    add_product<T>(acc, packed, sK);
    wgmma_commit();
    mbarrier_wait(bars.products_empty(), products_phase ^ 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_matrix_x4(tile_piece(plus ? sD : sP, 16 * warp + (lane & 15), 2 * j + (lane >> 4)), packed[4 * j],
                      packed[4 * j + 1], packed[4 * j + 2], packed[4 * j + 3]);
    }
    __syncwarp();
    mbarrier_arrive_warp(bars.products_full(), lane);
    wgmma_wait<0>();
    pin(packed);
    pin(acc);
    float dots[2];
    row_dots<T>(dots, acc, plus ? sK : sQ, warp, lane);
    keep_sums(plus ? kPlus : kQuery, dots, before);
    return gamma_end;
  }

  // dbeta = <Z, V'> / beta = <dv, V'> / beta^2 from the diagonal of the product; small betas come later
  // (small_betas.cuh).
  __device__ __forceinline__ void store_beta_gradient(const float (&product)[32], uint32_t gates) const {
    float dot[2] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (j == warp) dot[h] = (lane / 4) % 2 == 0 ? product[8 * j + 6 * h] : product[8 * j + 6 * h + 1];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float beta = load_shared_f1(gates + kBetaOffset + row(h) * 4);
      if (lane / 8 == lane % 4 && row(h) < chunk.valid && !(fabsf(beta) < p.small_beta)) {
        store_element(p.dbeta, row_offset(p.dbeta, chunk.batch, chunk.token + row(h), head), dot[h] / (beta * beta));
      }
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

  __device__ __forceinline__ void minus(StageCursor& cursor, float (&acc)[64], float (&before)[2]) const {
    using Traits = GradientsTraits;
    float part = 0.0f;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint32_t stage = open(cursor), gates = stage + Traits::kGates;
      const float factor[2] = {load_shared_f1(gates + kRatioOffset + row(0) * 4),
                               load_shared_f1(gates + kRatioOffset + row(1) * 4)};
      uint32_t x[16];
      load_rows<T>(x, stage + Traits::kVNew, factor, warp, lane);
      wgmma_fence();
      add_product<T>(acc, x, stage + Traits::kGrad);
      wgmma_commit();
      part += load_shared_f1(gates + kGammaOffset + (kChunk - 1) * 4) *
              state_product<T>(stage + Traits::kState, stage + Traits::kGrad, 5, 3, 32 * warp + lane);
      wgmma_wait<0>();
      pin(x);
      pin(acc);
      release(cursor);
      cursor.advance();
    }

    // So far the head's part is diag(gC / gamma) V' dS^T: its row sums belong to the last token too.
    float dots[2];
    mbarrier_wait(bars.keys_full(), keys_phase);
    row_dots<T>(dots, acc, sK, warp, lane);
    part = warp_sum(part + (lane % 4 == 0 ? dots[0] - before[0] + dots[1] - before[1] : 0.0f));
    if (lane == 0) store_shared_f1(last + 32 + warp * 4, part);

    mbarrier_wait(bars.products_full(), products_phase);
    uint32_t dP[16], D[16];
    load_transposed(dP, sP);
    load_transposed(D, sD);
    __syncwarp();
    mbarrier_arrive_warp(bars.products_empty(), lane);
    wgmma_fence();
    add_product<T>(acc, dP, sQ);
    add_product<T>(acc, D, sK);
    wgmma_commit();
    wgmma_wait<0>();
    pin(dP);
    pin(D);
    pin(acc);
    row_dots<T>(dots, acc, sK, warp, lane);
    keep_sums(kMinus, dots, before);
  }
};

// One warpgroup through all items of its block. kNorms: q and k were normalised (a kernel of its own: what the other
// does not execute would still take its registers).
template <typename T, bool kNorms, bool kIsMinus>
__device__ __forceinline__ void group_gradients(const ChunkBackwardParams& p, GradientsGroup group, int slots,
                                                uint32_t smem, const GradientsBarriers& bars, int warp, int lane) {
  using Traits = GradientsTraits;
  const uint32_t sQ = smem + Traits::kQ, sK = smem + Traits::kK;
  StageCursor cursor;
  uint32_t keys_phase = 0, parity = 0, tail_phase = 0;
  const int turns = static_cast<int>(gridDim.x) / p.Hq, heads = static_cast<int>(gridDim.x) - turns * p.Hq;
  ItemCursor item(p.Hq, slots);
  ChunkInfo next_chunk = item.valid() ? chunk_info(p, item.slot()) : ChunkInfo{};
  for (; item.valid(); keys_phase ^= 1) {
    const int key_head = item.key_head;
    ChunkInfo chunk = next_chunk;
    item.advance(p.Hq, turns, heads);
    if (item.valid()) next_chunk = chunk_info(p, item.slot());  // comes while this item is worked on
    if (chunk.valid < kChunk) {
      const int thread = group * 128 + 32 * warp + lane;
      mbarrier_wait(bars.keys_full(), keys_phase);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        zero_tail(sQ + half * kTileBytes, chunk.valid, thread, Traits::kGroups * 128);
        zero_tail(sK + half * kTileBytes, chunk.valid, thread, Traits::kGroups * 128);
      }
      fence_proxy_async();
      __syncwarp();
      mbarrier_arrive_warp(bars.tail(), lane);
      mbarrier_wait(bars.tail(), tail_phase);
      tail_phase ^= 1;
    }
    float acc[64], before[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.0f;

    for (int member = 0; member < p.group; ++member, parity ^= 1) {
      // Addresses made from these are made again for each head, not kept in registers that the accumulators need.
      asm volatile("" : "+r"(warp), "+r"(lane), "+r"(chunk.token));
      const int head = key_head * p.group + member;
      const HeadWork<T> work = {p,
                                bars,
                                chunk,
                                head,
                                smem + Traits::kStageRing,
                                sQ,
                                sK,
                                smem + Traits::kP,
                                smem + Traits::kD,
                                smem + Traits::kSums + parity * Traits::kSumsBytes,
                                smem + Traits::kLast + parity * Traits::kLastBytes,
                                keys_phase,
                                parity,
                                warp,
                                lane};
      if constexpr (kIsMinus) {
        work.minus(cursor, acc, before);
        named_barrier_arrive(kSumsBarrier + parity, Traits::kGroups * 128);
      } else {
        const float gamma_end = work.lower(group == kPlus, cursor, acc, before);
        if (group == kPlus) {
          named_barrier_arrive(kSumsBarrier + parity, Traits::kGroups * 128);
        } else {
          // Before the sums: the others need not wait for the gate's gradient to take the place of q and k.
          if (!kNorms && member + 1 == p.group) {
            named_barrier_arrive(kKeysBarrier, Traits::kGroups * 128);
          }
          named_barrier_sync(kSumsBarrier + parity, Traits::kGroups * 128);
          if (warp == 0 && p.dg.data != nullptr) {
            store_gate_gradient(p, chunk, head, work.sums, work.last, gamma_end, lane);
          }
        }
      }
    }

    if (kNorms && group == kQuery) {
      through_norm<T>(acc, before, sQ, p.q_inverse_norms, p, chunk, key_head, warp, lane);
      named_barrier_arrive(kKeysBarrier, Traits::kGroups * 128);
    }
    if (group != kQuery) {
      if constexpr (kNorms) {
        through_norm<T>(acc, before, sK, p.k_inverse_norms, p, chunk, key_head, warp, lane);
      }
      // dk = plus + minus, met where q and k were: 128 threads x 64 floats are just their 32 KB.
      static_assert(2 * kTokensBytes == 128 * 64 * sizeof(float));
      const uint32_t mine = sQ + (32 * warp + lane) * 16;
      if constexpr (!kIsMinus) {
        named_barrier_sync(kKeysBarrier, Traits::kGroups * 128);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          store_shared_u4(mine + i * 128 * 16,
                          make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                     __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
        }
        named_barrier_arrive(kMeetBarrier, 2 * 128);
      } else {
        named_barrier_arrive(kKeysBarrier, Traits::kGroups * 128);
        named_barrier_sync(kMeetBarrier, 2 * 128);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float4 x = load_shared_f4(mine + i * 128 * 16);
          acc[4 * i] += x.x;
          acc[4 * i + 1] += x.y;
          acc[4 * i + 2] += x.z;
          acc[4 * i + 3] += x.w;
        }
      }
      fence_proxy_async();  // the copy engine writes here next
    }
    __syncwarp();
    mbarrier_arrive_warp(bars.keys_empty(), lane);
    if (kIsMinus || group == kQuery) store_rows<T>(kIsMinus ? p.dk : p.dq, chunk, key_head, acc, warp, lane);
  }
}

template <typename T, bool kNorms>
__global__ __launch_bounds__(GradientsTraits::kThreads,
                             1) void sm90_chunk_bwd_gradients_kernel(const ChunkBackwardParams p,
                                                                     const __grid_constant__ ChunkBackwardMaps maps) {
  launch_dependents();
  wait_for_predecessors();
  using Traits = GradientsTraits;
  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const GradientsBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int slots = total_chunks(p);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages + 1; ++i) {
      mbarrier_init(bars.full(i), 1);
      mbarrier_init(bars.empty(i), Traits::kConsumerWarps * kWarpArrivals);
    }
    mbarrier_init(bars.products_full(), 8 * kWarpArrivals);
    mbarrier_init(bars.products_empty(), 4 * kWarpArrivals);
    mbarrier_init(bars.tail(), Traits::kConsumerWarps * kWarpArrivals);
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Traits::kConsumerWarps) {
    release_registers<Traits::kLoadRegisters>();
    if (warp == Traits::kConsumerWarps && lane == 0) load_operands(p, maps, slots, smem, bars);
    return;
  }
  if (warp < 8) {
    claim_registers<Traits::kLowerRegisters>();
    group_gradients<T, kNorms, false>(p, warp < 4 ? kQuery : kPlus, slots, smem, bars, warp % 4, lane);
  } else {
    claim_registers<Traits::kMinusRegisters>();
    group_gradients<T, kNorms, true>(p, kMinus, slots, smem, bars, warp - 8, lane);
  }
}

}  // namespace flash_qla::cuda::sm90
