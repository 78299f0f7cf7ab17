// The forward pass, S, by a warpgroup for a half of V (kernel.cuh).
#pragma once

#include "cuda/sm90/chunk_bwd/passes/traits.cuh"

namespace flash_qla::cuda::sm90::bwd {

template <typename T, Variant kVariant>
__device__ __forceinline__ void forward_states(const Args& p, PassWork work, uint32_t smem, const PassBarriers& bars,
                                               Lane at) {
  using Traits = PassTraits<kVariant>;
  const uint32_t out = smem + Traits::kOut;
  float S[64];
  const int group = Traits::kHalves == 2 ? work.half : 0;
  // The phase of state_empty that has to have ended: before the first state one has, of the half that begins.
  uint32_t kept = 1 ^ group;

  StageCursor<Traits::kFwdStages> cursor;
  const auto gates_of = [&] { return smem + Traits::kGates + cursor.stage * kPassGateBytes; };
  // What the step at the cursor takes of its stage besides the operands of products, while the products of the step
  // before still run: beside these a load takes 100 clocks.
  float beta[16] = {}, step_factor[16] = {};
  uint32_t v[16] = {};
  const auto fetch = [&](int step) {
    const uint32_t base = smem + cursor.stage * Traits::kFwdStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kFwdK, sV = base + Traits::kFwdV + group * kTileBytes;
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (work.has_tail(step)) {
      if constexpr (Traits::kBoth) {  // those who prepare it zero its last rows
        mbarrier_wait(bars.gated(cursor.stage), cursor.phase);
      } else {
        const int valid = work.info(work.chunk(step)).valid, thread = 32 * at.warp + at.lane;
        zero_tail(sK, valid, thread, 128);
        zero_tail(sK + kTileBytes, valid, thread, 128);
        zero_tail(sV, valid, thread, 128);
        fence_proxy_async();
        named_barrier_sync(kStateBarrier, 128);
      }
    }

    if constexpr (Traits::kBoth) mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    load_vector(beta, sGates + kPassBeta, at.lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_matrix_x4_trans(transposed_piece(sV, j, at), v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
    load_vector(step_factor, sGates + kPassStep, at.lane);
  };
  start_state(S, p, work, p.initial_state, at);
  if (work.steps > 0) fetch(0);
  for (int step = 0; step < work.steps; ++step) {
    // Addresses made from these are made again in each step, not kept in registers that the accumulators need.
    recompute_from(at.warp, at.lane);
    const int stage = cursor.stage;
    const uint32_t base = smem + stage * Traits::kFwdStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kFwdK, sV = base + Traits::kFwdV + group * kTileBytes;
    const uint32_t sGA = base + Traits::kFwdGA;

    // u = S^T K^T; under it the state on its way out.
    uint32_t packed[32];
    pack_state<T>(packed, S);
    keep_exact<kVariant>(S, p, work, step, at);
    float u[32];
    wgmma_fence();
    state_times_keys<T>(u, packed, sK);
    wgmma_commit();
    // Which product is rounded by itself and which in the sum below is said here: all forms have the same bits.
    float beta_v[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = unpack2<T>(v[i]);
      beta_v[2 * i] = __fmul_rn(beta[2 * (i / 2)], x.x);
      beta_v[2 * i + 1] = __fmul_rn(beta[2 * (i / 2) + 1], x.y);
    }
    if constexpr (Traits::kBoth) mbarrier_wait(bars.gated(stage), cursor.phase);
    if (work.keeps_state(step)) hand_out_state(out, packed, bars, group, kept, at);
    wgmma_wait<0>();
    pin(packed);
    pin(u);
    float ratio[16];
    load_vector(ratio, sGates + kPassRatio, at.lane);
    const float gamma_end = exp2_approx(load_shared_f1(sGates + (kChunk - 1) * 4));

    // V'^T = (beta W)^T (G o A)^T, W = V - gamma K S: a token's own share, which is most of it, in fp32, those of
    // others by the product.
    uint32_t w[16];
    float v_new[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v_new[2 * i] = fmaf(step_factor[2 * (i / 2)], u[2 * i], beta_v[2 * i]);
      v_new[2 * i + 1] = fmaf(step_factor[2 * (i / 2) + 1], u[2 * i + 1], beta_v[2 * i + 1]);
      w[i] = pack2<T>(v_new[2 * i], v_new[2 * i + 1]);
    }
    wgmma_fence();
    add_to_later<T>(v_new, w, sGA);
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] *= gamma_end;
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
    add_product<T>(S, scaled, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t plain[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) plain[i] = pack2<T>(v_new[8 * j + 2 * i], v_new[8 * j + 2 * i + 1]);
      store_matrix_x4_trans(transposed_piece(sV, j, at), plain[0], plain[1], plain[2], plain[3]);
    }
    arrive_warp(bars.tokens_full(stage), at.lane);
    cursor.advance();
    if (step + 1 < work.steps) fetch(step + 1);
    wgmma_wait<0>();
    pin(scaled);
    pin(S);
    arrive_warp(bars.empty(stage), at.lane);
  }
  // Of whole sequences nobody wants a final state.
  wgmma_wait<0>();
  pin(S);
  finish_state(S, p, work, StridedTensor{}, at);
}

}  // namespace flash_qla::cuda::sm90::bwd
