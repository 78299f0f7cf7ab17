// The state warpgroups of a relay: the products of state_role.cuh for 64 rows of V, shared out between two blocks,
// which both hold S^T. The leader's chain from chunk to chunk is S K, W, A_g W and the update; it hands V'' on, from
// which the follower, a step behind, makes O and its own copy of the next state.
#pragma once

#include "pair_state.cuh"
#include "relay_places.cuh"

namespace flash_qla::cuda::sm90 {

// V'^T = W^T Ag^T, W^T = V^T - u^T diag(gamma), as multiply_lower(), but for the first 32 tokens ahead. v: V^T, then
// W^T.
template <typename Element>
__device__ __forceinline__ void correct_values(float (&low)[16], float (&high)[16], uint32_t (&v)[16],
                                               const float (&u)[32], const float4 (&gamma)[4], uint64_t a_rows) {
#pragma unroll
  for (int b = 0; b < 2; ++b) take_from_values<Element>(v + 4 * b, u + 8 * b, gamma[b]);
  wgmma_fence();
  mma_rs_n32_init<Element>(low, v, a_rows);
  mma_rs_n32_init<Element>(high, v, wgmma_advance_uniform(a_rows, 4096));
  mma_rs_n32<Element>(low, v + 4, wgmma_advance_uniform(a_rows, 32));
  mma_rs_n32<Element>(high, v + 4, wgmma_advance_uniform(a_rows, 4096 + 32));
  wgmma_commit();
#pragma unroll
  for (int b = 2; b < 4; ++b) take_from_values<Element>(v + 4 * b, u + 8 * b, gamma[b]);
  wgmma_fence();
  mma_rs_n32<Element>(high, v + 8, wgmma_advance_uniform(a_rows, 4096 + 64));
  mma_rs_n32<Element>(high, v + 12, wgmma_advance_uniform(a_rows, 4096 + 96));
  wgmma_commit();
}

template <typename Traits>
struct RelayStateRole : StateRole<Traits> {
  using Base = StateRole<Traits>;
  using Element = typename Traits::Element;
  using Base::at;
  using Base::p;
  RelayPlaces<Traits> places;

  // The chunk that is at hand, and where its things are.
  struct Walk {
    uint32_t m = 0;
    uint32_t k_place, other_place;  // low words of descriptors: K; A_g of a leader, Q of a follower
    int2 chunk;                     // valid and flags
    float mild = 0.0f;              // kGateMild of it, if it is ready
    bool wide = false;              // of a leader: the chunk before this one took two stages of V''
    uint32_t wide_chunks = 0;       // .. and of how many the second one is known to be free again
    bool ready = false;             // what it needs is there
    bool listed = false;            // the next chunk's record is there

    template <bool kLeads>
    __device__ void find_products() {
      using Places = RelayPlaces<Traits>;
      k_place = uniform_place(Places::stage_k(m));
      other_place = uniform_place(kLeads ? Places::tile_a(m) : Places::stage_q(m));
    }
  };
  template <bool kLeads>
  static __device__ uint32_t gate_of(uint32_t m) {
    return kLeads ? RelayPlaces<Traits>::lead_gate(m) : RelayPlaces<Traits>::follow_gate(m);
  }

  // What the barriers of the chunk after this one say. They answer late: they are asked a product ahead.
  struct Answers {
    bool ready, listed;  // all that it needs is there; so is the record of the one after it
  };
  template <bool kLeads>
  __device__ Answers ask(const Walk& w) const {
    return {places.template ready<kLeads>(w.m + 1), places.test_record(w.m + 2)};
  }
  // To the next chunk.
  template <bool kLeads>
  __device__ void move_on(Walk& w, Answers next) const {
    ++w.m;
    w.ready = __all_sync(0xffffffffu, next.ready);
    if (w.ready) w.mild = load_shared_f1(gate_of<kLeads>(w.m) + Traits::kGateMild);
    if (!w.listed) places.wait_record(w.m);
    w.chunk = this->load_chunk(w.m);
    w.listed = __all_sync(0xffffffffu, next.listed);
    w.template find_products<kLeads>();
  }
  // By votes, so that the compiler knows the warp to be whole in the loop: descriptors then stay in uniform registers.
  template <bool kMild>
  __device__ bool goes_on(const Walk& w) const {
    return __all_sync(0xffffffffu,
                      w.ready && w.chunk.x == kChunk && !(w.chunk.y & kFirstChunk) && (w.mild != 0.0f) == kMild);
  }

  // The operand of a product with V'', a warp's 16 rows, to the follower, as the registers hold it.
  __device__ void hand_on(const uint32_t (&operand)[16], uint32_t stage, uint32_t barrier) const {
    stage = cluster_address(stage, places.follower());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_cluster_u4(stage + at.warp * Traits::kBytesRows + 512 * i + 16 * at.lane,
                       make_uint4(operand[4 * i], operand[4 * i + 1], operand[4 * i + 2], operand[4 * i + 3]), barrier);
    }
  }
  __device__ void take_over(uint32_t (&operand)[16], uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = load_shared_u4(stage + at.warp * Traits::kBytesRows + 512 * i + 16 * at.lane);
      operand[4 * i] = words.x, operand[4 * i + 1] = words.y, operand[4 * i + 2] = words.z;
      operand[4 * i + 3] = words.w;
    }
  }

  static __device__ uint64_t columns_of(uint64_t k_rows) {
    return wgmma_advance(k_rows, 0) + (uint64_t{Traits::kHalf / 16 - 1} << 16);
  }
  // S1^T = gC S0^T + (V'^T diag(gC / gamma)) K, started.
  __device__ void start_update(float (&s)[64], const uint32_t (&corrected)[16], uint64_t k_columns) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) mma_rs_n128_trans<Element>(s, corrected + 4 * i, wgmma_advance(k_columns, 2048 * i));
    wgmma_commit();
  }

  // Of S: as many as are scaled while S K runs.
  static constexpr int kScaledFirst = 32;

  // Chunks, until one needs something that is seldom done. A copy for each kind of decay, lest the instructions of one
  // lie between those of the other. rows, column: a lane's places in a tile and in a vector.
  template <bool kMild>
  __device__ __forceinline__ void lead_chunks(float (&s)[64], Walk& w, uint32_t rows, uint32_t column) const {
    bool go;
#pragma unroll 1
    do {
      const uint32_t m = w.m;
      const uint32_t v_rows = places.stage_v(m) + rows;
      const uint32_t gate = places.lead_gate(m), columns = gate + column;
      wgmma_wait<0>();
      pin(s);
      uint32_t v[16];
      float4 gamma[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        load_matrix_x4_trans(v_rows + b * 2048, v[4 * b], v[4 * b + 1], v[4 * b + 2], v[4 * b + 3]);
        gamma[b] = load_shared_f4(columns + Traits::kGateDecay + 16 * b);
      }
      const float last = load_shared_f1(gate + Traits::kGateDecay + Traits::kGateLast);
      uint32_t packed[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) packed[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
      float u[32];
      const uint64_t k_rows = descriptor_at(w.k_place), a_rows = descriptor_at(w.other_place);
      const uint64_t k_columns = columns_of(k_rows);
      wgmma_fence();
      start_state_product<Element>(u, packed, k_rows);
      // gC S0; the rest under A_g W. In branches that are always taken, lest it sink between the products.
      if (m != 0xffffffffu) {
#pragma unroll
        for (int i = 0; i < kScaledFirst; ++i) s[i] *= last;
      }
      wgmma_wait<0>();
      pin(u);
      pin(packed);

      float low[16], high[16];
      correct_values<Element>(low, high, v, u, gamma, a_rows);
      const Answers next = ask<true>(w);
      if (m != 0xffffffffu) {
#pragma unroll
        for (int i = kScaledFirst; i < 64; ++i) s[i] *= last;
      }
      // The follower's stages: what they held has become O, and left.
      places.wait_free_c(m, Traits::kStagesC);
      if (!kMild) places.wait_free_c(m, Traits::kStagesC - 1);
      if (w.wide) mbarrier_wait(smem() + Traits::kFreeNext, w.wide_chunks & 1);
      if (w.wide) ++w.wide_chunks;
      w.wide = !kMild;
      wgmma_wait<0>();
      pin(low);
      pin(high);
      pin(v);
      uint32_t corrected[16], plain[16];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        plain[i] = pack2<Element>(low[2 * i], low[2 * i + 1]);
        plain[8 + i] = pack2<Element>(high[2 * i], high[2 * i + 1]);
      }
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        if constexpr (kMild) {
#pragma unroll
          for (int i = 0; i < 4; ++i) corrected[4 * b + i] = plain[4 * b + i];
        } else {
          const float4 rest = load_shared_f4(columns + Traits::kGateRest + 16 * b);
          pack_scaled<Element>(corrected + 4 * b, b < 2 ? low + 8 * b : high + 8 * (b - 2), rest);
        }
      }
      // Ahead of the update, which holds up whatever comes behind its products.
      const uint32_t barrier = cluster_address(places.full_c(m), places.follower());
      if (at.lane == 0) mbarrier_arrive_expect_cluster(barrier, (kMild ? 1 : 2) * Traits::kBytesRows);
      hand_on(plain, places.stage_c(m), barrier);
      if constexpr (!kMild) hand_on(corrected, places.stage_c(m + 1), barrier);
      pin(s);
      wgmma_fence();
      start_update(s, corrected, k_columns);
      move_on<true>(w, next);
      wgmma_wait<0>();
      pin(s);
      pin(corrected);
      places.arrive_done(Traits::kLeadDone, m, at.lane);
      go = goes_on<kMild>(w);
    } while (go);
  }

  template <bool kMild>
  __device__ __forceinline__ void follow_chunks(float (&s)[64], Walk& w, uint32_t rows, uint32_t column) const {
    bool go;
#pragma unroll 1
    do {
      const uint32_t m = w.m;
      const ChunkRecord& chunk = this->record(m);
      const uint32_t gate = places.follow_gate(m), columns = gate + column;
      wgmma_wait<0>();
      pin(s);
      const float last = load_shared_f1(gate + Traits::kGateDecay + Traits::kGateLast);
      float4 factor[4];  // of O, by tokens
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float4 f = load_shared_f4(columns + (kMild ? Traits::kGateScaled : Traits::kGateDecay) + 16 * b);
        const float scale = kMild ? 1.0f : p.args.scale;
        factor[b] = make_float4(f.x * scale, f.y * scale, f.z * scale, f.w * scale);
      }
      if constexpr (Traits::kSave) this->save_listed(s, chunk);
      uint32_t packed[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) packed[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
      float o[32];
      const uint64_t k_rows = descriptor_at(w.k_place), q_rows = descriptor_at(w.other_place);
      const uint64_t k_columns = columns_of(k_rows);
      const uint64_t p_rows = descriptor_at(uniform_place(places.tile_p(m)));
      wgmma_fence();
      start_state_product<Element>(o, packed, q_rows);
      if constexpr (Traits::kSave) this->save_h(packed, chunk);
      places.wait_c(m);
      uint32_t plain[16], corrected[16];
      take_over(plain, places.stage_c(m));
      if constexpr (!kMild) {
        take_over(corrected, places.stage_c(m + 1));
        fence_proxy_async();  // the loads have come back: the leader fills the stage next
        __syncwarp();
        jitter();
        if (at.lane == 0) mbarrier_arrive_cluster(cluster_address(smem() + Traits::kFreeNext, places.leader()));
      }
      // gC S0 meanwhile.
      if (m != 0xffffffffu) {
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= last;
      }
      // O^T += V'^T P^T. With mild decay (aux_role.cuh) V' comes with what S needs, and O takes its factors last of
      // all.
      if constexpr (!kMild || !kWideExponents<Element>) {
        wgmma_wait<0>();
        pin(o);
        if constexpr (kMild) {
#pragma unroll
          for (int i = 0; i < 32; ++i) o[i] *= last;
        } else {
#pragma unroll
          for (int b = 0; b < 4; ++b) scale_tokens(o + 8 * b, factor[b]);
        }
        pin(o);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_rs_n64<Element>(o, plain + 4 * i, wgmma_advance(p_rows, 32 * i));
      wgmma_commit();
      if constexpr (kMild) {
#pragma unroll
        for (int i = 0; i < 16; ++i) corrected[i] = plain[i];
      }
      pin(s);
      wgmma_fence();
      start_update(s, corrected, k_columns);
      const Answers next = ask<false>(w);
      wgmma_wait<2>();
      if (at.lane == 0) {
        jitter();
        mbarrier_arrive_cluster(cluster_address(places.free_q(m), Traits::kLeaders + m % Traits::kLeaders));
      }
      wgmma_wait<1>();
      pin(o);
      pin(packed);
      places.arrive_done(Traits::kOutputDone, m, at.lane);
      // O takes the place of V'' once all warps have theirs of it.
      const uint32_t o_rows = places.stage_c(m) + rows;
      named_barrier_sync(kStateBarrier, 128);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        put_o_quarter<Element>(o + 8 * b, kMild ? factor[b] : make_float4(1.0f, 1.0f, 1.0f, 1.0f), o_rows + b * 2048);
      }
      __syncwarp();
      mbarrier_arrive_warp(places.full_o(m), at.lane);
      move_on<false>(w, next);
      wgmma_wait<0>();
      pin(s);
      pin(plain);
      pin(corrected);
      places.arrive_done(Traits::kFollowDone, m, at.lane);
      if constexpr (Traits::kSave) this->save_checkpoint(s, chunk);
      go = goes_on<kMild>(w);
    } while (go);
  }
  static constexpr uint32_t kStateBarrier = 1 + Traits::kAuxGroups;  // those before it are the auxiliary groups'

  // Zeros behind a sequence's end, where a chunk has one.
  template <bool kLeads>
  __device__ void clear_tails(uint32_t m, int valid) const {
    const int thread = 32 * at.warp + at.lane;
    clear_tail_rows(places.stage_k(m), 2, valid, thread);
    if constexpr (kLeads) clear_tail_rows(places.stage_v(m), 1, valid, thread);
    named_barrier_sync(kStateBarrier, 128);
  }

  template <bool kLeads>
  __device__ __forceinline__ void run() const {
    float s[64];  // S^T: rows V, columns K
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    // Places in a tile, out of shuffles, so that they are kept and not made anew in every chunk.
    const uint32_t rows = __shfl_sync(0xffffffffu, at.trans_row + at.trans_chunk, at.lane);
    const uint32_t column = __shfl_sync(0xffffffffu, 80 * at.q, at.lane);
    Walk w;
    w.template find_products<kLeads>();
    places.wait_record(0);
    w.chunk = this->load_chunk(0);
#pragma unroll 1
    while (true) {
      const bool more = __any_sync(0xffffffffu, w.chunk.x >= 0);
      if (!more || (w.chunk.y & kFirstChunk)) {
        if (!kLeads && w.m > 0) finish_tile(s, this->record(w.m - 1));
        if (!more) return;
        if (w.m == 0) mbarrier_wait(places.full_k(0), 0);  // as in state_role.cuh
        this->load_initial(s, this->record(w.m), at);
      }
      if (!w.ready) {
        places.template wait_ready<kLeads>(w.m);
        w.mild = load_shared_f1(gate_of<kLeads>(w.m) + Traits::kGateMild);
      }
      if (__any_sync(0xffffffffu, w.chunk.x < kChunk)) clear_tails<kLeads>(w.m, w.chunk.x);
      const bool mild = __any_sync(0xffffffffu, w.mild != 0.0f);
      if constexpr (kLeads) {
        mild ? lead_chunks<true>(s, w, rows, column) : lead_chunks<false>(s, w, rows, column);
      } else {
        mild ? follow_chunks<true>(s, w, rows, column) : follow_chunks<false>(s, w, rows, column);
      }
    }
  }

  // After a tile's last chunk.
  __device__ void finish_tile(float (&s)[64], const ChunkRecord& c) const {
    if (p.readers != nullptr) this->settle_readers(c, at);  // the leader has read the initial state long ago
    if (c.slot_out < 0) return;
    const StateSet& set = p.args.final_state;
    move_state<true>(state_matrix(set, c.slot_out, c.head), set.type, p.args.state_v_first, s, this->first_row(c),
                     at.q);
  }
};

}  // namespace flash_qla::cuda::sm90
