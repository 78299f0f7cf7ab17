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
// as they would in exact arithmetic. The minus group makes dP^T and D^T with products of its own: the kernel waits for
// memory, not for the tensor cores, and a transposition through shared memory would add two barriers.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

struct GradientsTraits {
  static constexpr int kGroups = 3;
  static constexpr int kThreads = kGroups * 128 + 128;
  static constexpr int kLoadRegisters = 32, kGroupRegisters = 160;  // 32 + 3 * 160 = 4 * 128
  static constexpr int kConsumerWarps = kGroups * 4;

  // Rings: states and their gradients (32 KB each), rows of 64 tokens (dO, V', dv: 16 KB each), gates. A head takes 2,
  // 3 and 1. 3 and 5: about 100 KB are on their way while a head is worked on; 32 KB cover the latency at full
  // bandwidth.
  static constexpr int kStates = 3, kTokens = 5;
  // 4: the copy engine may be two heads ahead of the slowest reader of the gates.
  static constexpr int kGates = 4;

  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kTokensBytes;
  static constexpr uint32_t kStateRing = kK + kTokensBytes;
  static constexpr uint32_t kTokenRing = kStateRing + kStates * kStateBytes;
  static constexpr uint32_t kGateRing = kTokenRing + kTokens * kTokensBytes;
  // Row sums of the three groups, two heads deep, then 4 + 4 warps' parts of the last token's term, two heads deep.
  static constexpr uint32_t kSums = kGateRing + kGates * kGateBytes;
  static constexpr uint32_t kSumsBytes = 3 * kChunk * 4;
  static constexpr uint32_t kLast = kSums + 2 * kSumsBytes;
  static constexpr uint32_t kLastBytes = 8 * 4;
  static constexpr uint32_t kBarriers = kLast + 2 * kLastBytes;
  static constexpr uint32_t kBytes = 1024 + kBarriers + 8 * 2 * (kStates + kTokens + 1);
  static_assert(kBytes <= 232448, "shared memory of one block on sm_90");
};

// Named barriers: all groups after a tail was zeroed, all groups after a head, plus and minus when they meet.
constexpr uint32_t kItemBarrier = 1, kHeadBarrier = 2, kKeysBarrier = 3;

// Slot and phase of the index-th use of a ring.
template <int kSlots>
struct RingUse {
  int slot;
  uint32_t phase;
  __device__ explicit RingUse(int index) : slot(index % kSlots), phase((index / kSlots) & 1) {}
};

struct GradientsBarriers {
  uint32_t base;
  __device__ uint32_t state_full(int i) const { return base + 16 * i; }
  __device__ uint32_t state_empty(int i) const { return base + 16 * i + 8; }
  __device__ uint32_t token_full(int i) const { return state_full(GradientsTraits::kStates + i); }
  __device__ uint32_t token_empty(int i) const { return state_empty(GradientsTraits::kStates + i); }
  __device__ uint32_t keys_full() const { return state_full(GradientsTraits::kStates + GradientsTraits::kTokens); }
  __device__ uint32_t keys_empty() const { return state_empty(GradientsTraits::kStates + GradientsTraits::kTokens); }
};

// acc [64 rows, 64 tokens] = X Y^T, both [2 halves][64 rows][64].
template <typename T>
__device__ __forceinline__ void rows_times_rows(float (&acc)[32], uint32_t sX, uint32_t sY) {
  const uint64_t x = wgmma_descriptor(sX), y = wgmma_descriptor(sY);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t at = (step / 4) * kTileBytes + (step % 4) * 32;
    if (step == 0) {
      mma_ss_n64_init<T>(acc, wgmma_advance(x, at), wgmma_advance(y, at));
    } else {
      mma_ss_n64<T>(acc, wgmma_advance(x, at), wgmma_advance(y, at));
    }
  }
}

// diag(factor) X as A operand, X [2 halves][64 rows][64]; factor[0], [1]: of the thread's two rows.
template <typename T>
__device__ __forceinline__ void load_rows(uint32_t (&x)[32], uint32_t sX, const float (&factor)[2], int warp,
                                          int lane) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    uint32_t* a = x + 4 * step;
    load_matrix_x4(tile_piece(sX + (step / 4) * kTileBytes, 16 * warp + (lane & 15), 2 * (step % 4) + (lane >> 4)),
                   a[0], a[1], a[2], a[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = scale2<T>(a[i], factor[i % 2]);
  }
}

// acc [64 tokens, 128 of K] += X [64 tokens, 128 of V] S^T.
template <typename T>
__device__ __forceinline__ void add_times_state(float (&acc)[64], const uint32_t (&x)[32], uint32_t sS) {
  const uint64_t s = wgmma_descriptor(sS, kStateHalfBytes);
#pragma unroll
  for (int step = 0; step < 8; ++step) mma_rs_n128_trans<T>(acc, x + 4 * step, wgmma_advance(s, step * 2048));
}

// acc [64 rows, 128] += X [64 rows, 64 tokens] Y, X packed.
template <typename T>
__device__ __forceinline__ void add_times_tokens(float (&acc)[64], const uint32_t (&x)[16], uint32_t sY) {
  const uint64_t y = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) mma_rs_n128_trans<T>(acc, x + 4 * j, wgmma_advance(y, j * 2048));
}

// <acc_i, X_i> of the thread's two rows, for X [2 halves][64 rows][64].
template <typename T>
__device__ __forceinline__ void row_dots(float (&dots)[2], const float (&acc)[64], uint32_t sX, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 x = unpack2<T>(
          load_shared_u1(tile_piece(sX + (j / 8) * kTileBytes, 16 * warp + lane / 4 + 8 * h, j % 8) + (lane % 4) * 4));
      sum += acc[4 * j + 2 * h] * x.x + acc[4 * j + 2 * h + 1] * x.y;
    }
    dots[h] = quad_sum(sum);
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

// What a warpgroup sees of one value head.
struct HeadOperands {
  uint32_t d_o, v_new, d_v, state, state_grad, gates;  // shared memory
};

// <dS, S> over the two tiles sets, this thread's part.
template <typename T>
__device__ __forceinline__ float state_product(uint32_t sS, uint32_t sDS, int thread) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = 0; i < static_cast<int>(kStateBytes / 16 / 128); ++i) {
    const uint4 a = load_shared_u4(sS + (thread + 128 * i) * 16), b = load_shared_u4(sDS + (thread + 128 * i) * 16);
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 s = unpack2<T>(x[w]), d = unpack2<T>(y[w]);
      sum += s.x * d.x + s.y * d.y;
    }
  }
  return sum;
}

// dbeta and dv of the rows that the reverse pass left as Z (|beta| < kSmallBeta), exactly: dbeta = <Z, error> with
// error = v - gamma S^T k - sum_{j < i} G_ij (K K^T)_ij V'_j. A warp a row, four of V a lane: rare, so simple.
template <typename T>
__device__ __forceinline__ void finish_small_betas(const ChunkBackwardParams& p, const ChunkInfo& chunk, int head,
                                                   const HeadOperands& in, uint32_t sK, int warp, int lane) {
  auto element = [](uint32_t address) {
    uint16_t bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
    return unpack2<T>(bits).x;
  };
  auto at = [](uint32_t tiles, int row, int column) {
    return tile_piece(tiles + (column / 64) * kTileBytes, row, (column % 64) / 8) + (column % 8) * 2;
  };
  for (int row = 16 * warp; row < min(16 * warp + 16, chunk.valid); ++row) {
    const float beta = load_shared_f1(in.gates + kBetaOffset + row * 4);
    if (!(fabsf(beta) < kSmallBeta)) continue;
    const float c = load_shared_f1(in.gates + row * 4), gamma = load_shared_f1(in.gates + kGammaOffset + row * 4);
    float error[4] = {};
    for (int k = 0; k < kDim; ++k) {
      const float key = element(at(sK, row, k));
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // S^T tiles: [2 halves of K][128 of V][64 of K]
        error[i] -=
            key * element(tile_piece(in.state + (k / 64) * kStateHalfBytes, 4 * lane + i, (k % 64) / 8) + (k % 8) * 2);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t offset = row_offset(p.v, chunk.batch, chunk.token + row, head) + (4 * lane + i) * p.v.stride[3];
      error[i] = load_element(p.v, offset) + gamma * error[i];
    }
    for (int j = 0; j < row; ++j) {
      float kk = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) kk += element(at(sK, row, 4 * lane + i)) * element(at(sK, j, 4 * lane + i));
      kk = warp_sum(kk) * exp2_approx(c - load_shared_f1(in.gates + j * 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) error[i] -= kk * element(at(in.v_new, j, 4 * lane + i));
    }
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float z = element(at(in.d_v, row, 4 * lane + i));
      dot += z * error[i];
      store_element(p.dv, row_offset(p.dv, chunk.batch, chunk.token + row, head) + 4 * lane + i, beta * z);
    }
    dot = warp_sum(dot);
    if (lane == 0 && p.dbeta.data != nullptr) {
      store_element(p.dbeta, row_offset(p.dbeta, chunk.batch, chunk.token + row, head), dot);
    }
  }
}

// dg of a chunk from the row sums, by one warp: lane l has tokens 2l and 2l + 1.
__device__ __forceinline__ void store_gate_gradient(const ChunkBackwardParams& p, const ChunkInfo& chunk, int head,
                                                    uint32_t sums, uint32_t last, uint32_t gates, int lane) {
  float d_cumsum[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t at = sums + (2 * lane + i) * 4;
    d_cumsum[i] = load_shared_f1(at) + load_shared_f1(at + kChunk * 4) - load_shared_f1(at + 2 * kChunk * 4);
    if (2 * lane + i >= chunk.valid) d_cumsum[i] = 0.0f;
    if (2 * lane + i == chunk.valid - 1) {
      const float4 states = load_shared_f4(last), keys = load_shared_f4(last + 16);
      d_cumsum[i] +=
          load_shared_f1(gates + kGammaOffset + (kChunk - 1) * 4) * (states.x + states.y + states.z + states.w) +
          (keys.x + keys.y + keys.z + keys.w);
    }
  }
  float sum = d_cumsum[0] + d_cumsum[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, sum, step);
    if (lane + step < 32) sum += other;
  }
  const float d_g[2] = {sum, sum - d_cumsum[0]};
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

// One thread: every operand of every item, in the order the groups use them.
__device__ __forceinline__ void load_operands(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, int items,
                                              uint32_t smem, const GradientsBarriers& bars) {
  using Traits = GradientsTraits;
  int head_index = 0, item_index = 0;
  auto load_state_tiles = [&](const uint8_t* from, int index) {
    const RingUse<Traits::kStates> use(index);
    mbarrier_wait(bars.state_empty(use.slot), use.phase ^ 1);
    mbarrier_arrive_expect(bars.state_full(use.slot), kStateBytes);
    bulk_load(smem + Traits::kStateRing + use.slot * kStateBytes, from, kStateBytes, bars.state_full(use.slot));
  };
  auto open_tokens = [&](int index, uint32_t bytes, uint32_t* bar) {
    const RingUse<Traits::kTokens> use(index);
    mbarrier_wait(bars.token_empty(use.slot), use.phase ^ 1);
    *bar = bars.token_full(use.slot);
    mbarrier_arrive_expect(*bar, bytes);
    return smem + Traits::kTokenRing + use.slot * kTokensBytes;
  };
  for (int item = blockIdx.x; item < items; item += gridDim.x, ++item_index) {
    const int slot = item / p.Hq, key_head = item % p.Hq;
    const ChunkInfo chunk = chunk_info(p, slot);
    for (int member = 0; member < p.group; ++member, ++head_index) {
      const int head = key_head * p.group + member;
      const int64_t tile = static_cast<int64_t>(slot) * p.Hv + head;
      uint32_t bar, to;
      to = open_tokens(3 * head_index, kTokensBytes + kGateBytes, &bar);
      for (int half = 0; half < 2; ++half) {
        tma_load_5d(to + half * kTileBytes, &maps.d_o, bar, 0, p.has_d_o ? chunk.token : -kChunk, half, head,
                    chunk.batch);
      }
      bulk_load(smem + Traits::kGateRing + (head_index % Traits::kGates) * kGateBytes,
                p.gates + tile * kGateVectors * kChunk, kGateBytes, bar);
      to = open_tokens(3 * head_index + 1, kTokensBytes, &bar);
      bulk_load(to, p.v_new + tile * kTokensBytes, kTokensBytes, bar);
      to = open_tokens(3 * head_index + 2, kTokensBytes, &bar);
      for (int half = 0; half < 2; ++half) {
        tma_load_5d(to + half * kTileBytes, &maps.dv, bar, 0, chunk.token, half, head, chunk.batch);
      }
      load_state_tiles(p.states + tile * kStateBytes, 2 * head_index);
      load_state_tiles(p.state_grads + tile * kStateBytes, 2 * head_index + 1);
      if (member ==
          0) {  // after the first head's operands: they are needed before q and k, which the last item may still hold
        mbarrier_wait(bars.keys_empty(), (item_index & 1) ^ 1);
        mbarrier_arrive_expect(bars.keys_full(), 2 * kTokensBytes);
        for (int half = 0; half < 2; ++half) {
          tma_load_5d(smem + Traits::kQ + half * kTileBytes, &maps.q, bars.keys_full(), 0, chunk.token, half, key_head,
                      chunk.batch);
          tma_load_5d(smem + Traits::kK + half * kTileBytes, &maps.k, bars.keys_full(), 0, chunk.token, half, key_head,
                      chunk.batch);
        }
      }
    }
  }
}

enum class GradientsGroup { kQuery, kPlus, kMinus };

// One warpgroup's part of one value head. acc runs on over the heads of a group; `before` are its row sums so far.
template <typename T, GradientsGroup kGroup>
__device__ __forceinline__ void head_gradients(const ChunkBackwardParams& p, const ChunkInfo& chunk, int head,
                                               const HeadOperands& in, uint32_t sQ, uint32_t sK, uint32_t sums,
                                               uint32_t last, float (&acc)[64], float (&before)[2], uint32_t state_full,
                                               uint32_t state_phase, uint32_t grad_full, uint32_t grad_phase,
                                               uint32_t keys_full, uint32_t keys_phase, int warp, int lane) {
  const int thread = 32 * warp + lane;
  const int rows[2] = {16 * warp + lane / 4, 16 * warp + lane / 4 + 8};
  const int column = 2 * (lane % 4);
  const float c_row[2] = {load_shared_f1(in.gates + rows[0] * 4), load_shared_f1(in.gates + rows[1] * 4)};
  float factor[2], dots[2];
  uint32_t packed[16], x[32];
  float product[32];

  if constexpr (kGroup == GradientsGroup::kQuery) {
    // dP from dO V'^T, then dq += scale diag(gamma) dO S^T + dP K
    wgmma_fence();
    rows_times_rows<T>(product, in.d_o, in.v_new);
    wgmma_commit();
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[h] = p.scale * load_shared_f1(in.gates + kGammaOffset + rows[h] * 4);
    wgmma_wait<0>();
    pin(product);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = 8 * j + column;
      const float2 c = load_shared_f2(in.gates + col * 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool row_inside = rows[h] < chunk.valid;
        const float p0 =
            row_inside && col <= rows[h] ? p.scale * exp2_approx(c_row[h] - c.x) * product[4 * j + 2 * h] : 0.0f;
        const float p1 = row_inside && col + 1 <= rows[h]
                             ? p.scale * exp2_approx(c_row[h] - c.y) * product[4 * j + 2 * h + 1]
                             : 0.0f;
        packed[2 * j + h] = pack2<T>(p0, p1);
      }
    }
    mbarrier_wait(state_full, state_phase);
    load_rows<T>(x, in.d_o, factor, warp, lane);
    wgmma_fence();
    add_times_state<T>(acc, x, in.state);
    mbarrier_wait(keys_full, keys_phase);
    wgmma_fence();
    add_times_tokens<T>(acc, packed, sK);
    wgmma_commit();
    mbarrier_wait(grad_full, grad_phase);
    const float part = warp_sum(state_product<T>(in.state, in.state_grad, thread));
    if (lane == 0) store_shared_f1(last + warp * 4, part);
    wgmma_wait<0>();
    pin(x);
    pin(packed);
    pin(acc);
    row_dots<T>(dots, acc, sQ, warp, lane);
  } else if constexpr (kGroup == GradientsGroup::kPlus) {
    // D from dv V'^T, then plus += dU S^T + D K; dv of small betas is Z, and rho what is missing
    wgmma_fence();
    rows_times_rows<T>(product, in.d_v, in.v_new);
    wgmma_commit();
    float rho[2];
    bool small = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float beta = load_shared_f1(in.gates + kBetaOffset + rows[h] * 4);
      const bool small_row = fabsf(beta) < kSmallBeta && rows[h] < chunk.valid;
      rho[h] = small_row ? beta : 1.0f;
      small |= small_row;
      factor[h] = -rho[h] * load_shared_f1(in.gates + kGammaOffset + rows[h] * 4);
    }
    wgmma_wait<0>();
    pin(product);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = 8 * j + column;
      const float2 c = load_shared_f2(in.gates + col * 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool row_inside = rows[h] < chunk.valid;
        const float a = product[4 * j + 2 * h], b = product[4 * j + 2 * h + 1];
        packed[2 * j + h] =
            pack2<T>(row_inside && col < rows[h] ? -rho[h] * exp2_approx(c_row[h] - c.x) * a : 0.0f,
                     row_inside && col + 1 < rows[h] ? -rho[h] * exp2_approx(c_row[h] - c.y) * b : 0.0f);
        // dbeta = <Z, V'> / beta = <dv, V'> / beta^2: the product's diagonal
        if ((col == rows[h] || col + 1 == rows[h]) && row_inside && p.dbeta.data != nullptr) {
          const float beta = load_shared_f1(in.gates + kBetaOffset + rows[h] * 4);
          if (!(fabsf(beta) < kSmallBeta)) {
            store_element(p.dbeta, row_offset(p.dbeta, chunk.batch, chunk.token + rows[h], head),
                          (col == rows[h] ? a : b) / (beta * beta));
          }
        }
      }
    }
    mbarrier_wait(state_full, state_phase);
    load_rows<T>(x, in.d_v, factor, warp, lane);
    wgmma_fence();
    add_times_state<T>(acc, x, in.state);
    mbarrier_wait(keys_full, keys_phase);
    wgmma_fence();
    add_times_tokens<T>(acc, packed, sK);
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
    pin(packed);
    pin(acc);
    row_dots<T>(dots, acc, sK, warp, lane);
    if (__any_sync(0xffffffffu, small)) finish_small_betas<T>(p, chunk, head, in, sK, warp, lane);
  } else {
    // minus += diag(gC / gamma) V' dS^T, whose row sums belong to the last token too; beside it dP^T from V' dO^T
#pragma unroll
    for (int h = 0; h < 2; ++h) factor[h] = load_shared_f1(in.gates + kRatioOffset + rows[h] * 4);
    wgmma_fence();
    rows_times_rows<T>(product, in.v_new, in.d_o);
    wgmma_commit();
    wgmma_wait<0>();
    pin(product);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = 8 * j + column;  // the query's token
      const float2 c = load_shared_f2(in.gates + col * 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        packed[2 * j + h] = pack2<T>(
            rows[h] <= col && col < chunk.valid ? p.scale * exp2_approx(c.x - c_row[h]) * product[4 * j + 2 * h] : 0.0f,
            rows[h] <= col + 1 && col + 1 < chunk.valid
                ? p.scale * exp2_approx(c.y - c_row[h]) * product[4 * j + 2 * h + 1]
                : 0.0f);
      }
    }
    mbarrier_wait(grad_full, grad_phase);
    load_rows<T>(x, in.v_new, factor, warp, lane);
    wgmma_fence();
    add_times_state<T>(acc, x, in.state_grad);
    wgmma_commit();
    mbarrier_wait(keys_full, keys_phase);
    wgmma_wait<0>();
    pin(x);
    pin(acc);
    row_dots<T>(dots, acc, sK, warp, lane);
    const float part = warp_sum(lane % 4 == 0 ? dots[0] - before[0] + dots[1] - before[1] : 0.0f);
    if (lane == 0) store_shared_f1(last + 16 + warp * 4, part);

    // D^T from V' dv^T, then minus += dP^T Q + D^T K
    wgmma_fence();
    rows_times_rows<T>(product, in.v_new, in.d_v);
    wgmma_commit();
    add_times_tokens<T>(acc, packed, sQ);
    wgmma_commit();
    wgmma_wait<1>();
    pin(product);
    uint32_t packed_D[16];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int col = 8 * j + column;
      const float2 c = load_shared_f2(in.gates + col * 4), beta = load_shared_f2(in.gates + kBetaOffset + col * 4);
      const float rho[2] = {fabsf(beta.x) < kSmallBeta ? beta.x : 1.0f, fabsf(beta.y) < kSmallBeta ? beta.y : 1.0f};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        packed_D[2 * j + h] = pack2<T>(
            rows[h] < col && col < chunk.valid ? -rho[0] * exp2_approx(c.x - c_row[h]) * product[4 * j + 2 * h] : 0.0f,
            rows[h] < col + 1 && col + 1 < chunk.valid
                ? -rho[1] * exp2_approx(c.y - c_row[h]) * product[4 * j + 2 * h + 1]
                : 0.0f);
      }
    }
    wgmma_fence();
    add_times_tokens<T>(acc, packed_D, sK);
    wgmma_commit();
    wgmma_wait<0>();
    pin(packed);
    pin(packed_D);
    pin(acc);
    row_dots<T>(dots, acc, sK, warp, lane);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (lane % 4 == 0)
      store_shared_f1(sums + static_cast<uint32_t>(kGroup) * kChunk * 4 + rows[h] * 4, dots[h] - before[h]);
    before[h] = dots[h];
  }
}

// One warpgroup through all items of its block.
template <typename T, GradientsGroup kGroup>
__device__ __forceinline__ void group_gradients(const ChunkBackwardParams& p, int items, uint32_t smem,
                                                const GradientsBarriers& bars, int warp, int lane) {
  using Traits = GradientsTraits;
  const uint32_t sQ = smem + Traits::kQ, sK = smem + Traits::kK;
  int head_index = 0, item_index = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, ++item_index) {
    const int slot = item / p.Hq, key_head = item % p.Hq;
    ChunkInfo chunk = chunk_info(p, slot);
    const uint32_t keys_phase = item_index & 1;
    if (chunk.valid < kChunk) {
      const int thread = static_cast<int>(kGroup) * 128 + 32 * warp + lane;
      mbarrier_wait(bars.keys_full(), keys_phase);
      for (int half = 0; half < 2; ++half) {
        zero_tail(sQ + half * kTileBytes, chunk.valid, thread, Traits::kGroups * 128);
        zero_tail(sK + half * kTileBytes, chunk.valid, thread, Traits::kGroups * 128);
      }
      fence_proxy_async();
      named_barrier_sync(kItemBarrier, Traits::kGroups * 128);
    }
    float acc[64], before[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.0f;

    for (int member = 0; member < p.group; ++member, ++head_index) {
      const int head = key_head * p.group + member;
      // Addresses made from these are made again for each head, not kept in registers that the accumulators need.
      asm volatile("" : "+r"(warp), "+r"(lane), "+r"(chunk.token), "+r"(chunk.batch), "+r"(head_index));
      const RingUse<Traits::kTokens> d_o(3 * head_index), v_new(3 * head_index + 1), d_v(3 * head_index + 2);
      const RingUse<Traits::kStates> state(2 * head_index), grad(2 * head_index + 1);
      const uint32_t tokens = smem + Traits::kTokenRing, states = smem + Traits::kStateRing;
      const HeadOperands in = {
          tokens + d_o.slot * kTokensBytes, tokens + v_new.slot * kTokensBytes,
          tokens + d_v.slot * kTokensBytes, states + state.slot * kStateBytes,
          states + grad.slot * kStateBytes, smem + Traits::kGateRing + (head_index % Traits::kGates) * kGateBytes};
      const uint32_t sums = smem + Traits::kSums + (head_index & 1) * Traits::kSumsBytes;
      const uint32_t last = smem + Traits::kLast + (head_index & 1) * Traits::kLastBytes;
      mbarrier_wait(bars.token_full(d_o.slot), d_o.phase);
      mbarrier_wait(bars.token_full(v_new.slot), v_new.phase);
      mbarrier_wait(bars.token_full(d_v.slot), d_v.phase);
      head_gradients<T, kGroup>(p, chunk, head, in, sQ, sK, sums, last, acc, before, bars.state_full(state.slot),
                                state.phase, bars.state_full(grad.slot), grad.phase, bars.keys_full(), keys_phase, warp,
                                lane);
      __syncwarp();
      if (lane == 0) {
        mbarrier_arrive(bars.token_empty(d_o.slot));
        mbarrier_arrive(bars.token_empty(v_new.slot));
        mbarrier_arrive(bars.token_empty(d_v.slot));
        mbarrier_arrive(bars.state_empty(state.slot));
        mbarrier_arrive(bars.state_empty(grad.slot));
      }
      named_barrier_sync(kHeadBarrier, Traits::kGroups * 128);
      if (kGroup == GradientsGroup::kQuery && warp == 0 && p.dg.data != nullptr) {
        store_gate_gradient(p, chunk, head, sums, last, in.gates, lane);
      }
    }
    if constexpr (kGroup == GradientsGroup::kQuery) {
      __syncwarp();
      if (lane == 0) mbarrier_arrive(bars.keys_empty());
      store_rows<T>(p.dq, chunk, key_head, acc, warp, lane);
    } else {
      // dk = plus + minus, met where q and k were: 128 threads x 64 floats are just their 32 KB.
      static_assert(2 * kTokensBytes == 128 * 64 * sizeof(float));
      const uint32_t mine = sQ + (32 * warp + lane) * 16;
      if constexpr (kGroup == GradientsGroup::kPlus) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          store_shared_u4(mine + i * 128 * 16,
                          make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                     __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
        }
        named_barrier_sync(kKeysBarrier, 2 * 128);
      } else {
        named_barrier_sync(kKeysBarrier, 2 * 128);
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
      __syncwarp();
      if (lane == 0) mbarrier_arrive(bars.keys_empty());
      if constexpr (kGroup == GradientsGroup::kMinus) store_rows<T>(p.dk, chunk, key_head, acc, warp, lane);
    }
  }
}

template <typename T>
__global__ __launch_bounds__(GradientsTraits::kThreads,
                             1) void sm90_chunk_bwd_gradients_kernel(const ChunkBackwardParams p,
                                                                     const __grid_constant__ ChunkBackwardMaps maps) {
  using Traits = GradientsTraits;
  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const GradientsBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int items = total_chunks(p) * p.Hq;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStates + Traits::kTokens + 1; ++i) {
      mbarrier_init(bars.state_full(i), 1);
      mbarrier_init(bars.state_empty(i), Traits::kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= Traits::kConsumerWarps) {
    release_registers<Traits::kLoadRegisters>();
    if (warp == Traits::kConsumerWarps && lane == 0) load_operands(p, maps, items, smem, bars);
    return;
  }
  claim_registers<Traits::kGroupRegisters>();
  if (warp < 4) {
    group_gradients<T, GradientsGroup::kQuery>(p, items, smem, bars, warp, lane);
  } else if (warp < 8) {
    group_gradients<T, GradientsGroup::kPlus>(p, items, smem, bars, warp - 4, lane);
  } else {
    group_gradients<T, GradientsGroup::kMinus>(p, items, smem, bars, warp - 8, lane);
  }
}

}  // namespace flash_qla::cuda::sm90
