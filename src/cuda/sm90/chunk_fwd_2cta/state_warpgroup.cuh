// The state warpgroup of a block of a pair: the products of chunk_fwd/state_warpgroup.cuh for 64 rows of V, in an order
// of its own.
//
// No other group keeps the tensor cores busy here while this one computes between two products, and a warp cannot go on
// while its next wgmma waits for the one before. So the next product is issued first wherever there is one: S Q before
// W is made, A_g W before S is scaled, the state's update before O is put away.
#pragma once

#include "cuda/common/compiler.cuh"
#include "cuda/sm90/chunk_fwd/state_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd_2cta/places.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::ChunkDescriptor, fwd::kFirstChunk, fwd::state_matrix;

// The low word of a tile's descriptor, in a form that the compiler knows to be uniform and nothing else of; and the
// descriptor.
__device__ __forceinline__ uint32_t uniform_place(uint32_t tile) {
  return uniform(static_cast<uint32_t>(wgmma_descriptor(tile)));
}
__device__ __forceinline__ uint64_t descriptor_at(uint32_t place) {
  return (wgmma_descriptor(0) & 0xffffffff00000000u) | place;
}

// D^T = S0^T X^T, X a [64][128] tile: started, and counted as a group of its own.
template <typename Element>
__device__ __forceinline__ void start_state_product(float (&d)[32], const uint32_t (&packed)[32], uint64_t x_rows) {
  mma_rs_n64_init<Element>(d, packed, x_rows);
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    mma_rs_n64<Element>(d, packed + 4 * i, wgmma_advance(x_rows, (i >> 2) * kChunk * 128 + (i & 3) * 32));
  }
  wgmma_commit();
}

// A quarter, 16 tokens, of O^T, tokens times `factor`, into its stage.
template <typename Element>
__device__ __forceinline__ void store_o_quarter(const float* x, const float4& f, uint32_t address) {
  uint32_t packed[4];
  pack_scaled<Element>(packed, x, f);
  store_matrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3]);
}

template <typename Traits>
struct StateWarpgroup : fwd::StateWarpgroup<Traits> {
  using Base = fwd::StateWarpgroup<Traits>;
  using Element = typename Traits::Element;
  using Base::at;
  using Base::p;
  Places<Traits> places;

  // After a tile's last chunk.
  __device__ void finish_tile(float (&s)[64], const ChunkDescriptor& c) const {
    if (p.readers != nullptr) this->settle_readers(c, at);
    if (c.slot_out < 0) return;
    const StateSet& set = p.args.final_state;
    move_state<true>(state_matrix(set, c.slot_out, c.head), set.type, p.args.state_v_first, s, this->first_row(c),
                     at.q);
  }

  // The chunk that is at hand, and where its things are.
  struct Walk {
    uint32_t m = 0, stage_k = 0, stage_q = 0, stage_v = 0, local_gate = 0;
    uint32_t k_place, q_place, a_place;  // low words of descriptors
    int2 chunk;                          // valid and flags
    float mild = 0.0f;                   // kGateMild of it, if it is ready
    bool ready = false;                  // what it needs is there
    bool listed = false;                 // the next chunk's descriptor is there

    __device__ uint32_t gate(const Places<Traits>& places) const {
      return smem() + Traits::kSmemGate +
             (places.own(m) ? local_gate : Traits::kLocalGates + (m >> 1) % Traits::kRemoteGates) * Traits::kBytesGate;
    }
    __device__ void find_products() {
      k_place = uniform_place(smem() + Traits::kSmemK + stage_k * Traits::kBytesK);
      q_place = uniform_place(smem() + Traits::kSmemQ + stage_q * Traits::kBytesK);
      a_place = uniform_place(smem() + Traits::kSmemA + m % Traits::kStagesA * Traits::kBytesMatrix);
    }
  };

  // Chunks, until one needs something that is seldom done. Two copies, so that the instructions of the other kind of
  // decay do not lie between those of this one. rows, column: a lane's places in a tile and in a vector.
  template <bool kMild>
  __device__ __forceinline__ void take_chunks(float (&s)[64], Walk& w, uint32_t rows, uint32_t column) const {
    bool go;
#pragma unroll 1
    do {
      const uint32_t m = w.m;
      const ChunkDescriptor& chunk = this->descriptor(m);
      const uint32_t v_rows = smem() + Traits::kSmemV + w.stage_v * Traits::kBytesV + rows;
      const uint32_t gate = w.gate(places), columns = gate + column;
      wgmma_wait<0>();
      pin(s);
      // Before S is packed: the assembler asks for them no later than after the first product, and answers come late
      // beside products.
      uint32_t v[16];
      float4 gamma[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        load_matrix_x4_trans(v_rows + b * 2048, v[4 * b], v[4 * b + 1], v[4 * b + 2], v[4 * b + 3]);
        gamma[b] = load_shared_f4(columns + Traits::kGateDecay + 16 * b);
      }
      const float last = load_shared_f1(gate + Traits::kGateDecay + Traits::kGateLast);
      if constexpr (Traits::kSave) this->save_listed(s, chunk, at);
      // u^T = S0^T K^T and o^T = S0^T Q^T
      uint32_t packed[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) packed[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
      float u[32], o[32];
      const uint64_t k_rows = descriptor_at(w.k_place), q_rows = descriptor_at(w.q_place);
      wgmma_fence();
      start_state_product<Element>(u, packed, k_rows);
      start_state_product<Element>(o, packed, q_rows);
      const uint64_t a_rows = descriptor_at(w.a_place);
      const uint64_t p_rows = wgmma_advance(a_rows, Traits::kSmemP - Traits::kSmemA);
      const uint64_t k_columns = wgmma_advance(k_rows, 0) + (uint64_t{Traits::kHalf / 16 - 1} << 16);
      wgmma_wait<1>();
      pin(u);

      // W^T = V^T - u^T diag(gamma)
#pragma unroll
      for (int b = 0; b < 4; ++b) subtract_from_values<Element>(v + 4 * b, u + 8 * b, gamma[b]);
      // V'^T = W^T Ag^T
      float low[16], high[16];
      multiply_lower<Element>(low, high, v, a_rows);
      if constexpr (Traits::kSave) this->save_h(packed, chunk);
      // Under it: gC S0, and what comes next. In a branch that is always taken, so that it does not sink between the
      // products below.
      if (m != 0xffffffffu) {
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= last;
      }
      float4 factor[4];  // of O, by tokens
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if constexpr (!kMild) {
          factor[b] = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
        } else if constexpr (kWideExponents<Element>) {
          const float4 g = gamma[b];
          const float scale = p.args.scale;
          factor[b] = make_float4(g.x * scale, g.y * scale, g.z * scale, g.w * scale);
        } else {
          factor[b] = load_shared_f4(columns + Traits::kGateScaled + 16 * b);
        }
      }
      ++w.m;
      w.stage_k = w.stage_k == Traits::kStagesK - 1 ? 0 : w.stage_k + 1;
      w.stage_q = w.stage_q == Traits::kStagesQ - 1 ? 0 : w.stage_q + 1;
      w.stage_v = w.stage_v == Traits::kStagesV - 1 ? 0 : w.stage_v + 1;
      if (m & 1) w.local_gate = w.local_gate == Traits::kLocalGates - 1 ? 0 : w.local_gate + 1;
      w.find_products();
      if (!w.listed) places.wait_descriptor(w.m);
      w.chunk = this->load_chunk(w.m);
      wgmma_wait<0>();
      pin(low);
      pin(high);
      pin(v);
      pin(o);
      pin(packed);

      // O^T += V'^T P^T. With mild decay (gate_vectors.cuh) V' comes with what S needs, and O takes its factors last of
      // all.
      if constexpr (!kMild) {
        scale_outputs(o, p.args.scale, columns + Traits::kGateDecay);
      } else if constexpr (!kWideExponents<Element>) {
#pragma unroll
        for (int i = 0; i < 32; ++i) o[i] *= last;
      }
      uint32_t corrected[16];
      pack_values<Element>(corrected, low, high);
      pin(o);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_rs_n64<Element>(o, corrected + 4 * i, wgmma_advance(p_rows, 32 * i));
      wgmma_commit();
      // S1^T = gC S0^T + (V'^T diag(gC / gamma)) K
      if constexpr (!kMild) {
        wgmma_wait<0>();  // P V' reads its operand's registers as it goes
        pin(o);
        pin(corrected);
        pack_scaled_values<Element>(corrected, low, high, columns + Traits::kGateToEnd);
      }
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_rs_n128_trans<Element>(s, corrected + 4 * i, wgmma_advance(k_columns, 2048 * i));
      wgmma_commit();
      // O takes V's place while S is made. A barrier answers late: it is asked before.
      const bool is_ready = places.ready(w.m), is_listed = places.test_descriptor(w.m + 1);
      wgmma_wait<1>();
      pin(o);
      w.ready = __all_sync(0xffffffffu, is_ready);
      w.listed = __all_sync(0xffffffffu, is_listed);
      if (w.ready) w.mild = load_shared_f1(w.gate(places) + Traits::kGateMild);
#pragma unroll
      for (int b = 0; b < 4; ++b) store_o_quarter<Element>(o + 8 * b, factor[b], v_rows + b * 2048);
      __syncwarp();
      mbarrier_arrive_warp(places.full_o(m), at.lane);
      wgmma_wait<0>();
      pin(s);
      pin(corrected);
      places.arrive_done(m, at.lane);

      if constexpr (Traits::kSave) this->save_checkpoint(s, chunk);
      // By votes, so that the compiler knows the warp to be whole in the loop: descriptors then stay in uniform
      // registers.
      go =
          __all_sync(0xffffffffu, w.ready && w.chunk.x >= 0 && !(w.chunk.y & kFirstChunk) && (w.mild != 0.0f) == kMild);
    } while (go);
  }

  __device__ void run() const {
    float s[64];  // S^T: rows V, columns K
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    // Places in a tile, out of shuffles, so that they are kept and not made anew in every chunk.
    const uint32_t rows = __shfl_sync(0xffffffffu, at.trans_row + at.trans_chunk, at.lane);
    const uint32_t column = __shfl_sync(0xffffffffu, 80 * at.q, at.lane);
    Walk w;
    w.find_products();
    places.wait_descriptor(0);
    w.chunk = this->load_chunk(0);
    if (__any_sync(0xffffffffu, w.chunk.x >= 0)) places.wait_k(0);  // as in chunk_fwd/state_warpgroup.cuh
#pragma unroll 1
    while (true) {
      const bool more = __any_sync(0xffffffffu, w.chunk.x >= 0);
      if (!more || (w.chunk.y & kFirstChunk)) {
        if (w.m > 0) finish_tile(s, this->descriptor(w.m - 1));
        if (!more) return;
        this->load_initial(s, this->descriptor(w.m), at);
      }
      if (!w.ready) {
        places.wait_k(w.m);
        places.wait_q(w.m);
        places.wait_p(w.m);
        w.mild = load_shared_f1(w.gate(places) + Traits::kGateMild);
      }
      if (__any_sync(0xffffffffu, w.mild != 0.0f)) {
        take_chunks<true>(s, w, rows, column);
      } else {
        take_chunks<false>(s, w, rows, column);
      }
    }
  }
};

}  // namespace flash_qla::cuda::sm90::fwd_2cta
