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
  // One group lives within the 255 registers of any thread. Two need more than an even share: the loading warp comes as
  // a whole warpgroup then, that leaves them its registers (24 + 2 * 240 = 3 * 168).
  static constexpr bool kMoveRegisters = kGroups == 2;
  static constexpr int kThreads = kGroups * 128 + (kMoveRegisters ? 128 : 32);
  static constexpr int kLoadRegisters = 24, kGroupRegisters = 240;

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
  static constexpr uint32_t kBytes = 1024 + kBarriers + 2 * 8 * 5;  // 1024: the tiles' alignment
  static_assert(kBytes <= 232448, "shared memory of one block on sm_90");
};

constexpr uint32_t kGroupBarrier = 1;  // named barriers 1 and 2: one for each group
constexpr uint32_t kBlockBarrier = 3;  // all groups

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

// What both passes know of their work.
struct StatesWork {
  SequenceInfo sequence;
  int n, head, key_head;
  int half;  // of V, the block's first
};

template <typename T, int kGroups>
__device__ __forceinline__ void forward_states(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                               uint32_t full, uint32_t empty, const Lane& at) {
  using Traits = StatesTraits<kGroups>;
  const int half = work.half + at.group, chunks = work.sequence.chunks();
  const uint32_t out = smem + Traits::kOutOffset + at.group * Traits::kOut, out_v = out + 2 * kTileBytes;
  const uint32_t column = 2 * (at.lane % 4) * 4;  // bytes, of a gate vector
  float S[64];
  load_state(S, p.initial_state, p.state_v_first, work.n, work.head, 64 * half, at);

  int stage = 0;
  uint32_t phase = 0;
  for (int c = 0; c < chunks; ++c) {
    const int valid = min(kChunk, work.sequence.length - c * kChunk);
    const uint32_t base = smem + stage * Traits::kFwdStage;
    const uint32_t sK = base + Traits::kFwdK, sV = base + Traits::kFwdV + at.group * kTileBytes;
    const uint32_t sGA = base + Traits::kFwdGA, sGates = base + Traits::kFwdGates;
    const int64_t tile = static_cast<int64_t>(work.sequence.first_slot + c) * p.Hv + work.head;
    mbarrier_wait(full + 8 * stage, phase);
    if (valid < kChunk) {
      zero_tail(sK, valid, at.thread, 128);
      zero_tail(sK + kTileBytes, valid, at.thread, 128);
      zero_tail(sV, valid, at.thread, 128);
      fence_proxy_async();
      named_barrier_sync(kBlockBarrier, kGroups * 128);
    }

    // u = S^T K^T, and under it the state on its way out.
    uint32_t packed[32];
    float u[32];
    pack_state<T>(packed, S);
    wgmma_fence();
    state_times_keys<T>(u, packed, sK);
    wgmma_commit();
    if (at.thread == 0) tma_store_wait_read();
    named_barrier_sync(kGroupBarrier + at.group, 128);
    put_state(out, packed, at);
    fence_proxy_async();
    named_barrier_sync(kGroupBarrier + at.group, 128);
    if (at.thread == 0) {
      uint8_t* to = p.states + tile * kStateBytes + half * kTileBytes;
      bulk_store(to, out, kTileBytes);
      bulk_store(to + kStateHalfBytes, out + kTileBytes, kTileBytes);
      tma_store_commit();
    }
    wgmma_wait<0>();
    pin(packed);
    pin(u);

    // beta W, W = V - gamma K S, transposed.
    uint32_t w[16];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t v[4];
      load_matrix_x4_trans(transposed_piece(sV, j, at), v[0], v[1], v[2], v[3]);
#pragma unroll
      for (int side = 0; side < 2; ++side) {  // tokens 16j + 8 side
        const uint32_t gate = sGates + (16 * j + 8 * side) * 4 + column;
        const float2 gamma = load_shared_f2(gate + kGammaOffset), beta = load_shared_f2(gate + kBetaOffset);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 x = unpack2<T>(v[2 * side + h]);
          const int i = 8 * j + 4 * side + 2 * h;
          w[i / 2] = pack2<T>(beta.x * (x.x - gamma.x * u[i]), beta.y * (x.y - gamma.y * u[i + 1]));
        }
      }
    }

    // V'^T = (beta W)^T (G o A)^T.
    float v_new[32];
    const uint64_t ga_desc = wgmma_descriptor(sGA);
    wgmma_fence();
    mma_rs_n64_init<T>(v_new, w, ga_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64<T>(v_new, w + 4 * j, wgmma_advance(ga_desc, j * 32));
    wgmma_commit();
    const float gamma_end = load_shared_f1(sGates + kGammaOffset + (kChunk - 1) * 4);
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] *= gamma_end;
    wgmma_wait<0>();
    pin(w);
    pin(v_new);

    // S = gC S + K^T diag(gC / gamma) V', and under it V' on its way out.
    uint32_t plain[16], scaled[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 ratio = load_shared_f2(sGates + kRatioOffset + 8 * (i / 2) * 4 + column);
      plain[i] = pack2<T>(v_new[2 * i], v_new[2 * i + 1]);
      scaled[i] = pack2<T>(ratio.x * v_new[2 * i], ratio.y * v_new[2 * i + 1]);
    }
    wgmma_fence();
    add_outer<T>(S, scaled, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_matrix_x4_trans(transposed_piece(out_v, j, at), plain[4 * j], plain[4 * j + 1], plain[4 * j + 2],
                            plain[4 * j + 3]);
    }
    fence_proxy_async();
    named_barrier_sync(kGroupBarrier + at.group, 128);
    if (at.thread == 0) {
      bulk_store(p.v_new + tile * kTokensBytes + half * kTileBytes, out_v, kTileBytes);
      tma_store_commit();
    }
    wgmma_wait<0>();
    pin(scaled);
    pin(S);
    if (at.lane == 0) mbarrier_arrive(empty + 8 * stage);
    if (++stage == Traits::kFwdStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  if (at.thread == 0) tma_store_wait_all();
}

template <typename T, int kGroups>
__device__ __forceinline__ void reverse_states(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                               const StatesWork& work, uint32_t smem, uint32_t full, uint32_t empty,
                                               const Lane& at) {
  using Traits = StatesTraits<kGroups>;
  const int half = work.half + at.group, chunks = work.sequence.chunks();
  const uint32_t out = smem + Traits::kOutOffset + at.group * Traits::kOut, out_v = out + 2 * kTileBytes;
  const uint32_t column = 2 * (at.lane % 4) * 4;
  float dS[64];
  load_state(dS, p.dht, p.state_v_first, work.n, work.head, 64 * half, at);

  int stage = 0;
  uint32_t phase = 0;
  for (int c = chunks - 1; c >= 0; --c) {
    const int token = work.sequence.token + c * kChunk, valid = min(kChunk, work.sequence.length - c * kChunk);
    const uint32_t base = smem + stage * Traits::kRevStage;
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ,
                   sDo = base + Traits::kRevDo + at.group * kTileBytes;
    const uint32_t sGA = base + Traits::kRevGA, sP = base + Traits::kRevP, sGates = base + Traits::kRevGates;
    const int64_t tile = static_cast<int64_t>(work.sequence.first_slot + c) * p.Hv + work.head;
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

    // K dS and P^T dO, transposed; under them dS on its way out.
    uint32_t packed[32], d_o[16];
    float k_dS[32], p_do[32];
    pack_state<T>(packed, dS);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_matrix_x4_trans(transposed_piece(sDo, j, at), d_o[4 * j], d_o[4 * j + 1], d_o[4 * j + 2], d_o[4 * j + 3]);
    }
    const uint64_t p_desc = wgmma_descriptor(sP);
    wgmma_fence();
    state_times_keys<T>(k_dS, packed, sK);
    mma_rs_n64_trans_init<T>(p_do, d_o, p_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64_trans<T>(p_do, d_o + 4 * j, wgmma_advance(p_desc, j * 2048));
    wgmma_commit();
    if (at.thread == 0) tma_store_wait_read();
    named_barrier_sync(kGroupBarrier + at.group, 128);
    put_state(out, packed, at);
    fence_proxy_async();
    named_barrier_sync(kGroupBarrier + at.group, 128);
    if (at.thread == 0) {
      uint8_t* to = p.state_grads + tile * kStateBytes + half * kTileBytes;
      bulk_store(to, out, kTileBytes);
      bulk_store(to + kStateHalfBytes, out + kTileBytes, kTileBytes);
      tma_store_commit();
    }

    // dS = gC dS + Q^T diag(scale gamma) dO
    uint32_t scaled[16];
    const float gamma_end = load_shared_f1(sGates + kGammaOffset + (kChunk - 1) * 4);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 gamma = load_shared_f2(sGates + kGammaOffset + 8 * (i / 2) * 4 + column);
      const float2 x = unpack2<T>(d_o[i]);
      scaled[i] = pack2<T>(p.scale * gamma.x * x.x, p.scale * gamma.y * x.y);
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) dS[i] *= gamma_end;
    wgmma_fence();
    add_outer<T>(dS, scaled, sQ);
    wgmma_commit();
    wgmma_wait<1>();
    pin(packed);
    pin(d_o);
    pin(k_dS);
    pin(p_do);

    // dV' = diag(gC / gamma) K dS + P^T dO, then Z = (G o A)^T dV'.
    uint32_t d_v_new[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 ratio = load_shared_f2(sGates + kRatioOffset + 8 * (i / 2) * 4 + column);
      d_v_new[i] = pack2<T>(ratio.x * k_dS[2 * i] + p_do[2 * i], ratio.y * k_dS[2 * i + 1] + p_do[2 * i + 1]);
    }
    float Z[32];
    const uint64_t ga_desc = wgmma_descriptor(sGA);
    wgmma_fence();
    mma_rs_n64_trans_init<T>(Z, d_v_new, ga_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64_trans<T>(Z, d_v_new + 4 * j, wgmma_advance(ga_desc, j * 2048));
    wgmma_commit();
    wgmma_wait<0>();
    pin(scaled);
    pin(d_v_new);
    pin(Z);
    pin(dS);

    // dS += K^T dU, dU = -diag(gamma beta) Z; dv = beta Z (traits.h says what small betas get).
    uint32_t dU[16], d_v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t gate = sGates + 8 * (i / 2) * 4 + column;
      const float2 gamma = load_shared_f2(gate + kGammaOffset), beta = load_shared_f2(gate + kBetaOffset);
      dU[i] = pack2<T>(-gamma.x * beta.x * Z[2 * i], -gamma.y * beta.y * Z[2 * i + 1]);
      d_v[i] = pack2<T>(fabsf(beta.x) < kSmallBeta ? Z[2 * i] : beta.x * Z[2 * i],
                        fabsf(beta.y) < kSmallBeta ? Z[2 * i + 1] : beta.y * Z[2 * i + 1]);
    }
    wgmma_fence();
    add_outer<T>(dS, dU, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      store_matrix_x4_trans(transposed_piece(out_v, j, at), d_v[4 * j], d_v[4 * j + 1], d_v[4 * j + 2], d_v[4 * j + 3]);
    }
    fence_proxy_async();
    named_barrier_sync(kGroupBarrier + at.group, 128);
    if (valid == kChunk) {
      if (at.thread == 0) {
        tma_store_5d(&maps.dv, out_v, 0, token, half, work.head, work.sequence.batch);
        tma_store_commit();
      }
    } else {
      // The copy engine knows no sequence ends.
      for (int piece = at.thread; piece < valid * 8; piece += 128) {
        const int row = piece / 8, within = piece % 8;
        uint16_t* to = static_cast<uint16_t*>(p.dv.data) +
                       row_offset(p.dv, work.sequence.batch, token + row, work.head) + 64 * half + 8 * within;
        *reinterpret_cast<uint4*>(to) = load_shared_u4(tile_piece(out_v, row, within));
      }
    }
    wgmma_wait<0>();
    pin(dU);
    pin(dS);
    if (at.lane == 0) mbarrier_arrive(empty + 8 * stage);
    if (++stage == Traits::kRevStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  if (at.thread == 0) tma_store_wait_all();

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
    const int c = reverse ? chunks - 1 - step : step;
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

  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, kGroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();

  if (warp >= kGroups * 4) {
    if constexpr (Traits::kMoveRegisters) release_registers<Traits::kLoadRegisters>();
    if (warp == kGroups * 4 && lane == 0) load_stages<kGroups>(p, maps, work, reverse, smem, full, empty);
  } else {
    if constexpr (Traits::kMoveRegisters) claim_registers<Traits::kGroupRegisters>();
    const Lane at = {warp % 4, lane, warp / 4, static_cast<int>(threadIdx.x % 128)};
    if (reverse) {
      reverse_states<T, kGroups>(p, maps, work, smem, full, empty, at);
    } else {
      forward_states<T, kGroups>(p, work, smem, full, empty, at);
    }
  }
}

}  // namespace flash_qla::cuda::sm90
