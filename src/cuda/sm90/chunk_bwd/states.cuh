// The two serial passes, side by side in one launch: the forward one keeps S at each chunk's start and V', the reverse
// one keeps dS at each chunk's end and writes dv. Neither needs the other, so a short batch fills twice the
// multiprocessors.
//
// States are held transposed, S^T [64 of V, 128 of K] to a warpgroup, as fp32 accumulators: packed, they are the A
// operand of the next product, and S never waits for shared memory. One warp loads, each warpgroup owns 64 of V.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

// kGroups: warpgroups of a block, each with half of V: 1 while blocks are fewer than multiprocessors (the chain of
// products is shortest with a tensor core of its own), else 2 (K, Q, G o A and P are loaded once for both).
template <int kGroups>
struct StatesTraits {
  // One group lives within the 255 registers of any thread. Two need more than an even share: the copying warps come as
  // a whole warpgroup then, that leaves them its registers (40 + 2 * 232 = 3 * 168).
  static constexpr bool kMoveRegisters = kGroups == 2;
  static constexpr int kThreads = kGroups * 128 + (kMoveRegisters ? 128 : 64);
  static constexpr int kCopyRegisters = 56, kGroupRegisters = 224;

  // A stage of the forward pass: K, V, G o A, gates.
  static constexpr uint32_t kFwdK = 0;
  static constexpr uint32_t kFwdV = kFwdK + kTokensBytes;
  static constexpr uint32_t kFwdGA = kFwdV + kGroups * kTileBytes;
  static constexpr uint32_t kFwdGates = kFwdGA + kTileBytes;
  static constexpr uint32_t kFwdStage = kFwdGates + kGateBytes;
  // A stage of the reverse pass: K, Q, dO, G o A, P, gates.
  static constexpr uint32_t kRevK = 0;
  static constexpr uint32_t kRevQ = kRevK + kTokensBytes;
  static constexpr uint32_t kRevDo = kRevQ + kTokensBytes;
  static constexpr uint32_t kRevGA = kRevDo + kGroups * kTileBytes;
  static constexpr uint32_t kRevP = kRevGA + kTileBytes;
  static constexpr uint32_t kRevGates = kRevP + kTileBytes;
  static constexpr uint32_t kRevStage = kRevGates + kGateBytes;

  // As many stages as fit beside the outgoing tiles: 2 to 5.
  static constexpr int kRevStages = kGroups == 1 ? 3 : 2;
  static constexpr int kFwdStages = kGroups == 1 ? 5 : 4;

  // On their way out, for each group: the state (two tiles) and 64 tokens of V' or dv.
  static constexpr uint32_t kOut = 3 * kTileBytes;
  static constexpr uint32_t kStagesBytes =
      kRevStages * kRevStage > kFwdStages* kFwdStage ? kRevStages* kRevStage : kFwdStages* kFwdStage;
  static constexpr uint32_t kOutOffset = kStagesBytes;
  static constexpr uint32_t kBarriers = kOutOffset + kGroups * kOut;
  // Full and empty of five stages, then of each group's state and token tiles on their way out.
  static constexpr uint32_t kBarrierCount = 2 * 5 + kGroups * 4;
  static constexpr uint32_t kBytes = 1024 + kBarriers + 8 * kBarrierCount;  // 1024: the tiles' alignment
  static_assert(kBytes <= 232448, "shared memory of one block on sm_90");
};

constexpr uint32_t kBlockBarrier = 1;  // named barrier of all groups

// A group's outgoing tiles: written by the group, stored by a warp that has nothing else to do, so that the chain of
// products waits neither for the copy engine nor for the fence before it.
struct OutBarriers {
  uint32_t base;
  __device__ uint32_t state_full() const { return base; }
  __device__ uint32_t state_empty() const { return base + 8; }
  __device__ uint32_t tokens_full() const { return base + 16; }
  __device__ uint32_t tokens_empty() const { return base + 24; }
};

// One warpgroup's place.
struct Lane {
  int warp, lane, group, thread;  // warp and thread within the group
};

// S^T from memory, or zeros.
__device__ __forceinline__ void load_state(float (&S)[64], const StridedTensor& t, bool v_first, int n, int head,
                                           int v0, const Lane& at) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = v0 + 16 * at.warp + at.lane / 4 + 8 * (i / 2), k = 8 * j + 2 * (at.lane % 4) + i % 2;
      S[4 * j + i] = t.data == nullptr ? 0.0f : load_element(t, state_offset(t, v_first, n, head, k, v));
    }
  }
}

// Packed S^T (A operand order) to its tiles [2 halves of K][64 of V][64 of K].
__device__ __forceinline__ void put_state(uint32_t tiles, const uint32_t (&packed)[32], const Lane& at) {
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    store_matrix_x4(
        tile_piece(tiles + (step / 4) * kTileBytes, 16 * at.warp + (at.lane & 15), 2 * (step % 4) + (at.lane >> 4)),
        packed[4 * step], packed[4 * step + 1], packed[4 * step + 2], packed[4 * step + 3]);
  }
}

// Where a lane's 8x8 matrix of tokens 16j.. and the group's V columns 16 warp.. lies in a tile [64 tokens][64 of V],
// transposed.
__device__ __forceinline__ uint32_t transposed_piece(uint32_t tile, int j, const Lane& at) {
  const int matrix = at.lane >> 3;
  return tile_piece(tile, 16 * j + 8 * (matrix >> 1) + (at.lane & 7), 2 * at.warp + (matrix & 1));
}

template <typename T>
__device__ __forceinline__ void pack_state(uint32_t (&packed)[32], const float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) packed[i] = pack2<T>(S[2 * i], S[2 * i + 1]);
}

// acc^T [64 of V, 64 tokens] = S^T K^T.
template <typename T>
__device__ __forceinline__ void state_times_keys(float (&acc)[32], const uint32_t (&packed)[32], uint32_t sK) {
  const uint64_t desc = wgmma_descriptor(sK);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint64_t b = wgmma_advance(desc, (step / 4) * kTileBytes + (step % 4) * 32);
    if (step == 0) {
      mma_rs_n64_init<T>(acc, packed, b);
    } else {
      mma_rs_n64<T>(acc, packed + 4 * step, b);
    }
  }
}

// S^T += X^T [64 of V, 64 tokens] Y [64 tokens, 128 of K].
template <typename T>
__device__ __forceinline__ void add_outer(float (&S)[64], const uint32_t (&x)[16], uint32_t sY) {
  const uint64_t desc = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) mma_rs_n128_trans<T>(S, x + 4 * j, wgmma_advance(desc, j * 2048));
}

// Its first or second 32 tokens alone.
template <typename T>
__device__ __forceinline__ void add_outer_half(float (&S)[64], const uint32_t (&x)[16], uint32_t sY, int half) {
  const uint64_t desc = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 2 * half; j < 2 * half + 2; ++j) mma_rs_n128_trans<T>(S, x + 4 * j, wgmma_advance(desc, j * 2048));
}

// What both passes know of their work.
struct StatesWork {
  SequenceInfo sequence;
  int n, head, key_head;
  int half;  // of V, the block's first
};

// The chunk of the step-th turn of a pass.
__device__ __forceinline__ int chunk_of(int step, int chunks, bool reverse) {
  return reverse ? chunks - 1 - step : step;
}

__device__ __forceinline__ void arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}

// A gate vector at the thread's 16 columns: x[2j + e] belongs to column 8j + 2 (lane % 4) + e.
__device__ __forceinline__ void load_columns(float (&x)[16], uint32_t vector, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = load_shared_f2(vector + (8 * j + 2 * (lane % 4)) * 4);
    x[2 * j] = pair.x;
    x[2 * j + 1] = pair.y;
  }
}

template <typename T, int kGroups>
__device__ __forceinline__ void forward_states(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                               uint32_t full, uint32_t empty, const OutBarriers& bars, Lane at) {
  using Traits = StatesTraits<kGroups>;
  const int half = work.half + at.group, chunks = work.sequence.chunks();
  const uint32_t out = smem + Traits::kOutOffset + at.group * Traits::kOut, out_v = out + 2 * kTileBytes;
  float S[64];
  load_state(S, p.initial_state, p.state_v_first, work.n, work.head, 64 * half, at);

  int stage = 0;
  uint32_t phase = 0;
  for (int c = 0; c < chunks; ++c) {
    // Addresses made from these are made again in each step, not kept in registers that the accumulators need.
    asm volatile("" : "+r"(at.warp), "+r"(at.lane), "+r"(at.thread));
    const int valid = min(kChunk, work.sequence.length - c * kChunk);
    const uint32_t base = smem + stage * Traits::kFwdStage;
    const uint32_t sK = base + Traits::kFwdK, sV = base + Traits::kFwdV + at.group * kTileBytes;
    const uint32_t sGA = base + Traits::kFwdGA, sGates = base + Traits::kFwdGates;
    const uint32_t out_phase = (c & 1) ^ 1;
    uint32_t packed[32];
    pack_state<T>(packed, S);
    mbarrier_wait(full + 8 * stage, phase);
    if (valid < kChunk) {
      zero_tail(sK, valid, at.thread, 128);
      zero_tail(sK + kTileBytes, valid, at.thread, 128);
      zero_tail(sV, valid, at.thread, 128);
      fence_proxy_async();
      named_barrier_sync(kBlockBarrier, kGroups * 128);
    }

    // u = S^T K^T; under it the state on its way out, and what the next product needs.
    float u[32];
    wgmma_fence();
    state_times_keys<T>(u, packed, sK);
    wgmma_commit();
    float beta_v[32], beta_gamma[16];
    {
      float beta[16];
      load_columns(beta, sGates + kBetaOffset, at.lane);
      load_columns(beta_gamma, sGates + kGammaOffset, at.lane);
#pragma unroll
      for (int i = 0; i < 16; ++i) beta_gamma[i] *= beta[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t v[4];
        load_matrix_x4_trans(transposed_piece(sV, j, at), v[0], v[1], v[2], v[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 x = unpack2<T>(v[i]);
          beta_v[8 * j + 2 * i] = beta[4 * j + 2 * (i / 2)] * x.x;
          beta_v[8 * j + 2 * i + 1] = beta[4 * j + 2 * (i / 2) + 1] * x.y;
        }
      }
    }
    mbarrier_wait(bars.state_empty(), out_phase);
    put_state(out, packed, at);
    arrive_warp(bars.state_full(), at.lane);
    wgmma_wait<0>();
    pin(packed);
    pin(u);

    // V'^T = (beta W)^T (G o A)^T, W = V - gamma K S.
    uint32_t w[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      w[i] = pack2<T>(beta_v[2 * i] - beta_gamma[2 * (i / 2)] * u[2 * i],
                      beta_v[2 * i + 1] - beta_gamma[2 * (i / 2) + 1] * u[2 * i + 1]);
    }
    float v_new[32];
    const uint64_t ga_desc = wgmma_descriptor(sGA);
    wgmma_fence();
    mma_rs_n64_init<T>(v_new, w, ga_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64<T>(v_new, w + 4 * j, wgmma_advance(ga_desc, j * 32));
    wgmma_commit();
    float ratio[16];
    load_columns(ratio, sGates + kRatioOffset, at.lane);
    const float gamma_end = load_shared_f1(sGates + kGammaOffset + (kChunk - 1) * 4);
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] *= gamma_end;
    mbarrier_wait(bars.tokens_empty(), out_phase);
    wgmma_wait<0>();
    pin(w);
    pin(v_new);

    // S = gC S + K^T diag(gC / gamma) V', and under it V' on its way out.
    uint32_t scaled[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scaled[i] = pack2<T>(ratio[2 * (i / 2)] * v_new[2 * i], ratio[2 * (i / 2) + 1] * v_new[2 * i + 1]);
    }
    wgmma_fence();
    add_outer<T>(S, scaled, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t plain[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) plain[i] = pack2<T>(v_new[8 * j + 2 * i], v_new[8 * j + 2 * i + 1]);
      store_matrix_x4_trans(transposed_piece(out_v, j, at), plain[0], plain[1], plain[2], plain[3]);
    }
    arrive_warp(bars.tokens_full(), at.lane);
    wgmma_wait<0>();
    pin(scaled);
    pin(S);
    arrive_warp(empty + 8 * stage, at.lane);
    if (++stage == Traits::kFwdStages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

template <typename T, int kGroups>
__device__ __forceinline__ void reverse_states(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                               uint32_t full, uint32_t empty, const OutBarriers& bars, Lane at) {
  using Traits = StatesTraits<kGroups>;
  const int half = work.half + at.group, chunks = work.sequence.chunks();
  const uint32_t out = smem + Traits::kOutOffset + at.group * Traits::kOut, out_v = out + 2 * kTileBytes;
  float dS[64];
  load_state(dS, p.dht, p.state_v_first, work.n, work.head, 64 * half, at);

  int stage = 0;
  uint32_t phase = 0;
  for (int step = 0; step < chunks; ++step) {
    // Addresses made from these are made again in each step, not kept in registers that the accumulators need.
    asm volatile("" : "+r"(at.warp), "+r"(at.lane), "+r"(at.thread));
    const int valid = min(kChunk, work.sequence.length - chunk_of(step, chunks, true) * kChunk);
    const uint32_t base = smem + stage * Traits::kRevStage;
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ,
                   sDo = base + Traits::kRevDo + at.group * kTileBytes;
    const uint32_t sGA = base + Traits::kRevGA, sP = base + Traits::kRevP, sGates = base + Traits::kRevGates;
    const uint32_t out_phase = (step & 1) ^ 1;
    mbarrier_wait(full + 8 * stage, phase);
    if (valid < kChunk) {
      for (int k_half = 0; k_half < 2; ++k_half) {
        zero_tail(sK + k_half * kTileBytes, valid, at.thread, 128);
        zero_tail(sQ + k_half * kTileBytes, valid, at.thread, 128);
      }
      zero_tail(sDo, valid, at.thread, 128);
      fence_proxy_async();
      named_barrier_sync(kBlockBarrier, kGroups * 128);
    }

    // P^T dO, which needs no state, then K dS, transposed; under them dS on its way out.
    uint32_t packed[32], d_o[16];
    float k_dS[32], p_do[32];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_matrix_x4_trans(transposed_piece(sDo, j, at), d_o[4 * j], d_o[4 * j + 1], d_o[4 * j + 2], d_o[4 * j + 3]);
    }
    const uint64_t p_desc = wgmma_descriptor(sP);
    wgmma_fence();
    mma_rs_n64_trans_init<T>(p_do, d_o, p_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64_trans<T>(p_do, d_o + 4 * j, wgmma_advance(p_desc, j * 2048));
    wgmma_commit();
    pack_state<T>(packed, dS);
    wgmma_fence();
    state_times_keys<T>(k_dS, packed, sK);
    wgmma_commit();
    uint32_t scaled[16];
    float gamma[16], ratio[16];
    load_columns(gamma, sGates + kGammaOffset, at.lane);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = unpack2<T>(d_o[i]);
      scaled[i] = pack2<T>(p.scale * gamma[2 * (i / 2)] * x.x, p.scale * gamma[2 * (i / 2) + 1] * x.y);
    }
    load_columns(ratio, sGates + kRatioOffset, at.lane);
    const float gamma_end = load_shared_f1(sGates + kGammaOffset + (kChunk - 1) * 4);
#pragma unroll
    for (int i = 0; i < 64; ++i) dS[i] *= gamma_end;

    // dS = gC dS + Q^T diag(scale gamma) dO fills the gaps in the chain of products: half of it here, half after Z.
    wgmma_fence();
    add_outer_half<T>(dS, scaled, sQ, 0);
    wgmma_commit();
    mbarrier_wait(bars.state_empty(), out_phase);
    put_state(out, packed, at);
    arrive_warp(bars.state_full(), at.lane);
    wgmma_wait<1>();
    pin(packed);
    pin(d_o);
    pin(k_dS);
    pin(p_do);

    // dV' = diag(gC / gamma) K dS + P^T dO, then Z = (G o A)^T dV'.
    uint32_t d_v_new[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      d_v_new[i] = pack2<T>(ratio[2 * (i / 2)] * k_dS[2 * i] + p_do[2 * i],
                            ratio[2 * (i / 2) + 1] * k_dS[2 * i + 1] + p_do[2 * i + 1]);
    }
    float Z[32];
    const uint64_t ga_desc = wgmma_descriptor(sGA);
    wgmma_fence();
    mma_rs_n64_trans_init<T>(Z, d_v_new, ga_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64_trans<T>(Z, d_v_new + 4 * j, wgmma_advance(ga_desc, j * 2048));
    wgmma_commit();
    add_outer_half<T>(dS, scaled, sQ, 1);
    wgmma_commit();
    float beta[16];
    load_columns(beta, sGates + kBetaOffset, at.lane);
    load_columns(gamma, sGates + kGammaOffset, at.lane);  // again: there are no registers to keep it in
    mbarrier_wait(bars.tokens_empty(), out_phase);
    wgmma_wait<1>();
    pin(d_v_new);
    pin(Z);

    // dS += K^T dU, dU = -diag(gamma beta) Z; dv = beta Z (traits.h says what small betas get).
    uint32_t dU[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int x = 2 * (i / 2), y = x + 1;
      dU[i] = pack2<T>(-gamma[x] * beta[x] * Z[2 * i], -gamma[y] * beta[y] * Z[2 * i + 1]);
    }
    wgmma_fence();
    add_outer<T>(dS, dU, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t d_v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int x = 4 * j + 2 * (i / 2), y = x + 1;
        d_v[i] = pack2<T>((fabsf(beta[x]) < kSmallBeta ? 1.0f : beta[x]) * Z[8 * j + 2 * i],
                          (fabsf(beta[y]) < kSmallBeta ? 1.0f : beta[y]) * Z[8 * j + 2 * i + 1]);
      }
      store_matrix_x4_trans(transposed_piece(out_v, j, at), d_v[0], d_v[1], d_v[2], d_v[3]);
    }
    arrive_warp(bars.tokens_full(), at.lane);
    wgmma_wait<0>();
    pin(scaled);
    pin(dU);
    pin(dS);
    arrive_warp(empty + 8 * stage, at.lane);
    if (++stage == Traits::kRevStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  if (p.dh0.data != nullptr) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = 64 * half + 16 * at.warp + at.lane / 4 + 8 * (i / 2), k = 8 * j + 2 * (at.lane % 4) + i % 2;
        store_element(p.dh0, state_offset(p.dh0, p.state_v_first, work.n, work.head, k, v), dS[4 * j + i]);
      }
    }
  }
}

// One warp: a group's outgoing tiles to memory.
template <int kGroups>
__device__ __forceinline__ void store_tiles(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                            StatesWork work, bool reverse, uint32_t smem, const OutBarriers& bars,
                                            int group, int lane) {
  using Traits = StatesTraits<kGroups>;
  const int half = work.half + group, chunks = work.sequence.chunks();
  const uint32_t out = smem + Traits::kOutOffset + group * Traits::kOut, out_v = out + 2 * kTileBytes;
  for (int step = 0; step < chunks; ++step) {
    asm volatile("" : "+r"(work.head), "+r"(work.sequence.batch), "+r"(lane));  // as in the passes
    const int c = chunk_of(step, chunks, reverse), phase = step & 1;
    const int token = work.sequence.token + c * kChunk, valid = min(kChunk, work.sequence.length - c * kChunk);
    const int64_t tile = static_cast<int64_t>(work.sequence.first_slot + c) * p.Hv + work.head;
    mbarrier_wait(bars.state_full(), phase);
    fence_proxy_async();
    if (lane == 0) {
      uint8_t* to = (reverse ? p.state_grads : p.states) + tile * kStateBytes + half * kTileBytes;
      bulk_store(to, out, kTileBytes);
      bulk_store(to + kStateHalfBytes, out + kTileBytes, kTileBytes);
      tma_store_commit();
      tma_store_wait_read();
      mbarrier_arrive(bars.state_empty());
    }
    mbarrier_wait(bars.tokens_full(), phase);
    fence_proxy_async();
    if (reverse && valid < kChunk) {
      // The copy engine knows no sequence ends.
      for (int piece = lane; piece < valid * 8; piece += 32) {
        const int row = piece / 8, within = piece % 8;
        uint16_t* to = static_cast<uint16_t*>(p.dv.data) +
                       row_offset(p.dv, work.sequence.batch, token + row, work.head) + 64 * half + 8 * within;
        *reinterpret_cast<uint4*>(to) = load_shared_u4(tile_piece(out_v, row, within));
      }
    } else if (lane == 0) {
      if (reverse) {
        tma_store_5d(&maps.dv, out_v, 0, token, half, work.head, work.sequence.batch);
      } else {
        bulk_store(p.v_new + tile * kTokensBytes + half * kTileBytes, out_v, kTileBytes);
      }
      tma_store_commit();
      tma_store_wait_read();
    }
    arrive_warp(bars.tokens_empty(), lane);
  }
  if (lane == 0) tma_store_wait_all();
}

// Keeps the stages full; one thread.
template <int kGroups>
__device__ __forceinline__ void load_stages(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                            const StatesWork& work, bool reverse, uint32_t smem, uint32_t full,
                                            uint32_t empty) {
  using Traits = StatesTraits<kGroups>;
  const int chunks = work.sequence.chunks(), batch = work.sequence.batch;
  const int stages = reverse ? Traits::kRevStages : Traits::kFwdStages;
  int stage = 0;
  uint32_t phase = 1;  // the first round finds all stages empty
  for (int step = 0; step < chunks; ++step) {
    const int c = chunk_of(step, chunks, reverse);
    const int token = work.sequence.token + c * kChunk;
    const int64_t tile = static_cast<int64_t>(work.sequence.first_slot + c) * p.Hv + work.head;
    const uint32_t bar = full + 8 * stage;
    mbarrier_wait(empty + 8 * stage, phase);
    mbarrier_arrive_expect(bar, reverse ? Traits::kRevStage : Traits::kFwdStage);
    const uint32_t base = smem + stage * (reverse ? Traits::kRevStage : Traits::kFwdStage);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(base + half * kTileBytes, &maps.k, bar, 0, token, half, work.key_head,
                  batch);  // K first in both stages
    }
    if (reverse) {
      for (int half = 0; half < 2; ++half) {
        tma_load_5d(base + Traits::kRevQ + half * kTileBytes, &maps.q, bar, 0, token, half, work.key_head, batch);
      }
      for (int group = 0; group < kGroups; ++group) {
        // Without dO: a tile wholly outside the tensor, which arrives as zeros.
        tma_load_5d(base + Traits::kRevDo + group * kTileBytes, &maps.d_o, bar, 0, p.has_d_o ? token : -kChunk,
                    work.half + group, work.head, batch);
      }
      bulk_load(base + Traits::kRevGA, p.GA + tile * kTileBytes, kTileBytes, bar);
      bulk_load(base + Traits::kRevP, p.P + tile * kTileBytes, kTileBytes, bar);
      bulk_load(base + Traits::kRevGates, p.gates + tile * kGateVectors * kChunk, kGateBytes, bar);
    } else {
      for (int group = 0; group < kGroups; ++group) {
        tma_load_5d(base + Traits::kFwdV + group * kTileBytes, &maps.v, bar, 0, token, work.half + group, work.head,
                    batch);
      }
      bulk_load(base + Traits::kFwdGA, p.GA + tile * kTileBytes, kTileBytes, bar);
      bulk_load(base + Traits::kFwdGates, p.gates + tile * kGateVectors * kChunk, kGateBytes, bar);
    }
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// Blocks: (reverse pass first: its steps are longer) x sequence x value head x half of V when a block has one.
template <typename T, int kGroups>
__global__ __launch_bounds__(StatesTraits<kGroups>::kThreads,
                             1) void sm90_chunk_bwd_states_kernel(const ChunkBackwardParams p,
                                                                  const __grid_constant__ ChunkBackwardMaps maps) {
  launch_dependents();
  wait_for_predecessors();
  using Traits = StatesTraits<kGroups>;
  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const uint32_t full = smem + Traits::kBarriers, empty = full + 8 * 5;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  constexpr int kHalves = 2 / kGroups;
  int index = blockIdx.x;
  const int one_pass = gridDim.x / 2;
  const bool reverse = index < one_pass;
  if (!reverse) index -= one_pass;
  StatesWork work;
  work.half = index % kHalves;
  index /= kHalves;
  work.head = index % p.Hv;
  work.n = index / p.Hv;
  work.key_head = work.head / p.group;
  work.sequence = sequence_info(p, work.n);

  const uint32_t out_bars = full + 8 * 10;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, kGroups * 4);
    }
    for (int group = 0; group < kGroups; ++group) {
      const OutBarriers bars = {out_bars + 32 * group};
      mbarrier_init(bars.state_full(), 4);
      mbarrier_init(bars.state_empty(), 1);
      mbarrier_init(bars.tokens_full(), 4);
      mbarrier_init(bars.tokens_empty(), 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= kGroups * 4) {
    if constexpr (Traits::kMoveRegisters) release_registers<Traits::kCopyRegisters>();
    const int group = warp - kGroups * 4 - 1;
    if (group < 0) {
      if (lane == 0) load_stages<kGroups>(p, maps, work, reverse, smem, full, empty);
    } else if (group < kGroups) {
      store_tiles<kGroups>(p, maps, work, reverse, smem, OutBarriers{out_bars + 32 * group}, group, lane);
    }
  } else {
    if constexpr (Traits::kMoveRegisters) claim_registers<Traits::kGroupRegisters>();
    const Lane at = {warp % 4, lane, warp / 4, static_cast<int>(threadIdx.x % 128)};
    const OutBarriers bars = {out_bars + 32 * at.group};
    if (reverse) {
      reverse_states<T, kGroups>(p, work, smem, full, empty, bars, at);
    } else {
      forward_states<T, kGroups>(p, work, smem, full, empty, bars, at);
    }
  }
}

}  // namespace flash_qla::cuda::sm90
