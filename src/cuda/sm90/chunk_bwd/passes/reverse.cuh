// The reverse pass, dS, by a warpgroup for a half of V (kernel.cuh).
#pragma once

#include "cuda/sm90/chunk_bwd/passes/traits.cuh"

namespace flash_qla::cuda::sm90::bwd {

// For fp16: powers of two that bring the largest of a thread's two rows of dU^T to about 2^10, no less than 1. What
// decays falls below the smallest numbers of fp16 otherwise; the rows of dS^T are scaled alike for the product.
__device__ __forceinline__ void find_lift(float (&lift)[2], const float (&Z)[32], const float (&step_factor)[16]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float most = 0.0f;
#pragma unroll
    for (int i = row; i < 16; i += 2) {
      most = fmaxf(
          most, fmaxf(fabsf(step_factor[2 * (i / 2)] * Z[2 * i]), fabsf(step_factor[2 * (i / 2) + 1] * Z[2 * i + 1])));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const int exponent = static_cast<int>(__float_as_uint(most) >> 23) - 127;
    lift[row] = __uint_as_float(static_cast<uint32_t>(127 + min(max(10 - exponent, 0), 60)) << 23);
  }
}

// Of a power of two between 2^-126 and 2^126.
__device__ __forceinline__ float inverse_power(float x) {
  return __uint_as_float((uint32_t{254} << 23) - __float_as_uint(x));
}

// dh0 += Q^T of what rounding has left of diag(scale gamma) dO in the sequence's first chunk, the last step's. Its Q
// and gates are still in their stage; dO has come again, into the next one.
template <typename T, Variant kVariant>
__device__ __forceinline__ void add_rest_to_dh0(float (&dS)[64], const PassWork& work, uint32_t smem,
                                                const PassBarriers& bars,
                                                const StageCursor<PassTraits<kVariant>::kRevStages>& next, int group,
                                                const Lane& at) {
  using Traits = PassTraits<kVariant>;
  const int stage = (next.stage == 0 ? Traits::kRevStages : next.stage) - 1;
  const uint32_t sDo = smem + next.stage * Traits::kRevStage + Traits::kRevDo + group * kTileBytes;
  uint32_t d_o[16], rest[16];
  float factor[16];
  load_vector(factor, smem + Traits::kGates + stage * kPassGateBytes + kPassFactor, at.lane);
  mbarrier_wait(bars.loaded(next.stage), next.phase);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    load_matrix_x4_trans(transposed_piece(sDo, j, at), d_o[4 * j], d_o[4 * j + 1], d_o[4 * j + 2], d_o[4 * j + 3]);
  }
  // Past the sequence's end there is another one.
  const int valid = work.info(work.chunk(work.steps - 1)).valid;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int left = valid - (8 * (i / 2) + 2 * (at.lane % 4));
    d_o[i] &= (left > 0 ? 0xffffu : 0u) | (left > 1 ? 0xffff0000u : 0u);
  }
  rest_of_scaled_tokens<T>(rest, d_o, factor);
#pragma unroll
  for (int i = 0; i < 64; ++i) dS[i] *= kRestScale<T>;
  wgmma_fence();
  add_product<T>(dS, rest, smem + stage * Traits::kRevStage + Traits::kRevQ);
  wgmma_commit();
  wgmma_wait<0>();
  pin(rest);
  pin(dS);
#pragma unroll
  for (int i = 0; i < 64; ++i) dS[i] *= 1.0f / kRestScale<T>;
}

template <typename T, Variant kVariant>
__device__ __forceinline__ void reverse_states(const Args& p, PassWork work, uint32_t smem, const PassBarriers& bars,
                                               Lane at) {
  using Traits = PassTraits<kVariant>;
  const uint32_t out = smem + Traits::kOut;
  float dS[64];
  const int group = Traits::kHalves == 2 ? work.half : 0;
  uint32_t kept = 1 ^ group;                          // as in the forward pass
  constexpr bool kLifts = std::is_same_v<T, __half>;  // find_lift()

  StageCursor<Traits::kRevStages> cursor;
  const auto gates_of = [&] { return smem + Traits::kGates + cursor.stage * kPassGateBytes; };
  uint32_t d_o[16] = {};
  float factor[16] = {}, ratio[16] = {};
  const auto fetch = [&](int step) {  // as in the forward pass
    const uint32_t base = smem + cursor.stage * Traits::kRevStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ;
    const uint32_t sDo = base + Traits::kRevDo + group * kTileBytes;
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (work.has_tail(step)) {
      if constexpr (Traits::kBoth) {  // those who prepare it zero its last rows
        mbarrier_wait(bars.gated(cursor.stage), cursor.phase);
      } else {
        const int valid = work.info(work.chunk(step)).valid, thread = 32 * at.warp + at.lane;
        for (int k_half = 0; k_half < 2; ++k_half) {
          zero_tail(sK + k_half * kTileBytes, valid, thread, 128);
          zero_tail(sQ + k_half * kTileBytes, valid, thread, 128);
        }
        zero_tail(sDo, valid, thread, 128);
        fence_proxy_async();
        named_barrier_sync(kStateBarrier, 128);
      }
    }

    if constexpr (Traits::kBoth) mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    if constexpr (!Traits::kBoth) load_vector(factor, sGates + kPassFactor, at.lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_matrix_x4_trans(transposed_piece(sDo, j, at), d_o[4 * j], d_o[4 * j + 1], d_o[4 * j + 2], d_o[4 * j + 3]);
    }
    if constexpr (!Traits::kBoth) load_vector(ratio, sGates + kPassRatio, at.lane);
  };
  start_state(dS, p, work, p.dht, at);
  if (work.steps > 0) fetch(0);
  for (int step = 0; step < work.steps; ++step) {
    // Addresses made from these are made again in each step, not kept in registers that the accumulators need.
    recompute_from(at.warp, at.lane);
    const int stage = cursor.stage;
    const uint32_t base = smem + stage * Traits::kRevStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ;
    const uint32_t sDo = base + Traits::kRevDo + group * kTileBytes;
    const uint32_t sGA = base + Traits::kRevGA, sP = base + Traits::kRevP;

    // K dS, transposed, which waits for nothing but K, then P^T dO; under them dS on its way out.
    uint32_t packed[32];
    float k_dS[32], p_do[32];
    pack_state<T>(packed, dS);
    keep_exact<kVariant>(dS, p, work, step, at);
    const float gamma_end = exp2_approx(load_shared_f1(sGates + (kChunk - 1) * 4));
#pragma unroll
    for (int i = 0; i < 64; ++i) dS[i] *= gamma_end;
    wgmma_fence();
    state_times_keys<T>(k_dS, packed, sK);
    wgmma_commit();
    // Of two groups each goes one by one: the other one fills the gaps.
    constexpr bool kEarly = !Traits::kBoth;
    uint32_t scaled[16];
    if constexpr (kEarly) {
      scale_tokens<T>(scaled, d_o, factor);
    } else {
      if (work.keeps_state(step)) hand_out_state(out, packed, bars, group, kept, at);
      wgmma_wait<0>();
      pin(packed);
      pin(k_dS);
    }
    if constexpr (Traits::kBoth) mbarrier_wait(bars.gated(stage), cursor.phase);
    wgmma_fence();
    add_to_earlier<T, true>(p_do, d_o, sP);
    wgmma_commit();

    // dS = gC dS + Q^T diag(scale gamma) dO fills the gaps in the chain of products: half of it here, half after Z
    // (or all of it).
    if constexpr (kEarly) {
      wgmma_fence();
      add_product_half<T>(dS, scaled, sQ, 0);
      wgmma_commit();
    }
    if (kEarly && work.keeps_state(step)) hand_out_state(out, packed, bars, group, kept, at);
    wgmma_wait<kEarly ? 1 : 0>();
    if constexpr (kEarly) {
      pin(packed);
      pin(k_dS);
    }
    pin(d_o);
    pin(p_do);
    float step_factor[16], given[16];
    if constexpr (kEarly) {
      load_vector(step_factor, sGates + kPassStep, at.lane);
      load_vector(given, sGates + kPassGiven, at.lane);
    } else {
      load_vector(ratio, sGates + kPassRatio, at.lane);
    }

    // dV' = diag(gC / gamma) K dS + P^T dO, then Z = (G o A)^T dV', a token's own share in fp32.
    uint32_t d_v_new[16];
    float Z[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      Z[2 * i] = ratio[2 * (i / 2)] * k_dS[2 * i] + p_do[2 * i];
      Z[2 * i + 1] = ratio[2 * (i / 2) + 1] * k_dS[2 * i + 1] + p_do[2 * i + 1];
      d_v_new[i] = pack2<T>(Z[2 * i], Z[2 * i + 1]);
    }
    wgmma_fence();
    add_to_earlier<T, false>(Z, d_v_new, sGA);
    wgmma_commit();
    if constexpr (!kEarly) {
      load_vector(factor, sGates + kPassFactor, at.lane);
      scale_tokens<T>(scaled, d_o, factor);
      wgmma_fence();
      add_product_half<T>(dS, scaled, sQ, 0);
    }
    add_product_half<T>(dS, scaled, sQ, 1);
    wgmma_commit();
    if constexpr (!kEarly) load_vector(step_factor, sGates + kPassStep, at.lane);
    wgmma_wait<1>();
    pin(d_v_new);
    pin(Z);

    // dS += K^T dU, dU = -diag(gamma beta) Z; dv = beta Z (traits.h says what small betas get).
    uint32_t dU[16];
    float lift[2] = {1.0f, 1.0f};
    const bool lifts = kLifts && (!p.has_d_o || (step + 1 == work.steps && work.makes_dh0(p)));
    if (kLifts && lifts) {
      wgmma_wait<0>();
      pin(dS);
      find_lift(lift, Z, step_factor);
#pragma unroll
      for (int i = 0; i < 64; ++i) dS[i] *= lift[i / 2 % 2];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float x = step_factor[2 * (i / 2)] * Z[2 * i], y = step_factor[2 * (i / 2) + 1] * Z[2 * i + 1];
      if constexpr (kLifts) x *= lift[i % 2], y *= lift[i % 2];
      dU[i] = pack2<T>(x, y);
    }
    wgmma_fence();
    add_product<T>(dS, dU, sK);
    wgmma_commit();
    if constexpr (!kEarly) load_vector(given, sGates + kPassGiven, at.lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t d_v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d_v[i] = pack2<T>(given[4 * j + 2 * (i / 2)] * Z[8 * j + 2 * i],
                          given[4 * j + 2 * (i / 2) + 1] * Z[8 * j + 2 * i + 1]);
      }
      store_matrix_x4_trans(transposed_piece(sDo, j, at), d_v[0], d_v[1], d_v[2], d_v[3]);
    }
    arrive_warp(bars.tokens_full(stage), at.lane);
    cursor.advance();
    if (step + 1 < work.steps) fetch(step + 1);
    wgmma_wait<0>();
    pin(scaled);
    pin(dU);
    pin(dS);
    if (kLifts && lifts) {
#pragma unroll
      for (int i = 0; i < 64; ++i) dS[i] *= inverse_power(lift[i / 2 % 2]);
    }
    arrive_warp(bars.empty(stage), at.lane);
  }
  wgmma_wait<0>();
  pin(dS);
  if (work.makes_dh0(p)) add_rest_to_dh0<T, kVariant>(dS, work, smem, bars, cursor, group, at);
  finish_state(dS, p, work, p.dh0, at);
}

}  // namespace flash_qla::cuda::sm90::bwd
