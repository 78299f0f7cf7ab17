// The state warpgroups: S^T in registers, the recurrent products, O; and what is saved of the state on the way.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/compiler.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/gate_warp.cuh"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/common/gate_vectors.cuh"
#include "cuda/sm90/common/state_io.cuh"
#include "cuda/sm90/common/state_products.cuh"
#include "cuda/sm90/common/tile.cuh"
#include "cuda/sm90/context_parallel/cut_states.cuh"

namespace flash_qla::cuda::sm90::fwd {

using cp::cut_state_position, cp::kCutStateVectors, cp::Progress;

// Chunks that differ in what is done for them.
enum class ChunkForm {
  kMild,
  kStrong,  // decays too fast for kMild
  kEither,  // which of them is asked in the loop
};

template <typename Traits>
struct StateWarpgroup {
  using Element = typename Traits::Element;
  const KernelArgs& p;
  int group;  // which 64 rows of V
  FragmentPosition at;

  __device__ int first_row(const ChunkDescriptor& c) const { return first_row(c, at); }
  __device__ int first_row(const ChunkDescriptor& c, const FragmentPosition& at) const {
    return 64 * (group + c.half) + at.row;
  }

  // What is saved of the state on the way: h, states at listed tokens, checkpoints.

  // The state at the chunk's start, as the products below see it.
  __device__ void save_h(const uint32_t (&packed)[32], const ChunkDescriptor& c) const {
    // An empty sequence has no chunk, though its work item has one. A chunk number below zero, which only offsets out
    // of order can give, is past the rows as well.
    if (p.args.h == nullptr || c.valid == 0 || (c.flags & kWarmupChunk) ||
        static_cast<uint32_t>(c.chunk) >= p.args.h_rows) {
      return;
    }
    Element* base = static_cast<Element*>(p.args.h) +
                    (static_cast<int64_t>(c.chunk) * p.args.num_value_heads + c.head) * (kHeadDim * kHeadDim);
    uint32_t* words = reinterpret_cast<uint32_t*>(base) + paired_word(at.q);
    const int dv = first_row(c);
    if (p.args.state_v_first) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int block = 2 * (i >> 1), row = dv + 8 * (i & 1);
        *reinterpret_cast<uint2*>(words + (row * kHeadDim + 8 * block) / 2) =
            pair_words(packed[2 * block + (i & 1)], packed[2 * block + 2 + (i & 1)], at.q);
      }
    } else {
      const int key = at.lane >> 2;
      words += (key * kHeadDim + dv - key) / 2;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        *reinterpret_cast<uint2*>(words + 8 * i * kHeadDim / 2) =
            pair_words(transpose_8x8(packed[2 * i]), transpose_8x8(packed[2 * i + 1]), at.q);
      }
    }
  }

  // The same by the copy engine, where save_h() would store; whether it has been sent. The groups take turns in the
  // tile: the second waits for the first's half of this chunk, the first for the second's of the one before.
  __device__ bool send_h(const uint32_t (&packed)[32], const ChunkDescriptor& c) const {
    if (c.valid == 0 || (c.flags & (kWarmupChunk | kStartsInsideChunk)) ||
        static_cast<uint32_t>(c.chunk) >= p.args.h_rows) {
      return false;
    }
    mbarrier_wait(smem() + Traits::kFreeH, group ^ 1);
    const uint32_t tile = smem() + Traits::kSmemH;
    if (p.args.state_v_first) {
      const uint32_t row = tile + (16 * at.warp + (at.lane & 15)) * 128 + (((at.lane >> 4) ^ at.swizzle) << 4);
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        store_matrix_x4((row ^ ((b & 3) << 5)) + (b >> 2) * Traits::kHalf, packed[4 * b], packed[4 * b + 1],
                        packed[4 * b + 2], packed[4 * b + 3]);
      }
    } else {
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        store_matrix_x4_trans(tile + at.trans_row + at.trans_chunk + b * 2048, packed[4 * b], packed[4 * b + 1],
                              packed[4 * b + 2], packed[4 * b + 3]);
      }
    }
    fence_proxy_async();
    named_barrier_sync(4 + group, 128);
    if (sends_h()) {
      const int matrix = c.chunk * p.args.num_value_heads + c.head;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = p.args.state_v_first ? group : i, half = p.args.state_v_first ? i : group;
        tma_store_4d(&p.h, tile + i * Traits::kHalf, 0, 64 * row, half, matrix);
      }
      tma_store_commit();
    }
    return true;
  }
  __device__ bool sends_h() const { return at.warp == 0 && at.lane == 0; }

  // The state at the chunk's start in full, for every entry of its list.
  __device__ void save_listed(float (&s)[64], const ChunkDescriptor& c, const FragmentPosition& at) const {
    const Args& args = p.args;
    if (args.start_lists == nullptr || c.valid == 0 || (c.flags & kWarmupChunk)) return;
    for (int32_t entry = args.start_lists[c.row]; entry >= 0; entry = args.start_next[entry]) {
      float* matrix =
          args.start_states + (static_cast<int64_t>(entry) * args.num_value_heads + c.head) * (kHeadDim * kHeadDim);
      move_state<true>(matrix, DType::kFloat32, args.state_v_first, s, first_row(c, at), at.q);
    }
  }

  // The state after a chunk that ends at listed tokens, into their slots of the pool.
  __device__ void save_at_listed(float (&s)[64], const ChunkDescriptor& c, const FragmentPosition& at) const {
    const Args& args = p.args;
    if (c.flags & kWarmupChunk) return;
#pragma unroll 1
    for (int32_t first = 0; first < args.num_listed; first += 32) {
      const int32_t entry = first + at.lane;
      ListedToken listed{0, kNoSlot};
      if (entry < args.num_listed) listed = listed_tokens<Traits>()[entry];
      const int32_t slot = listed.token == c.row + c.valid ? listed.slot : kNoSlot;
#pragma unroll 1
      for (uint32_t found = __ballot_sync(0xffffffffu, slot >= 0); found != 0; found &= found - 1) {
        const int32_t to = __shfl_sync(0xffffffffu, slot, __ffs(found) - 1);
        move_state<true>(state_matrix(args.final_state, to, c.head), args.final_state.type, args.state_v_first, s,
                         first_row(c, at), at.q);
      }
    }
  }

  // The state after every n-th full chunk of a sequence.
  __device__ void save_checkpoint(float (&s)[64], const ChunkDescriptor& c) const {
    const Args& args = p.args;
    const bool whole = Traits::kEndsAtCheckpoints ? (c.flags & kEndsWholeChunk) != 0 : c.valid == kChunk;
    if (args.checkpoints == nullptr || !whole || (c.flags & kWarmupChunk) ||
        (c.position + 1) % args.checkpoint_every_chunks != 0) {
      return;
    }
    const int64_t first = load_index(args.checkpoint_cu_starts, args.checkpoint_starts_are_64_bit,
                                     c.sequence * args.checkpoint_starts_stride);
    const int64_t row = first + (c.position + 1) / args.checkpoint_every_chunks - 1;
    if (row < 0 || row >= args.checkpoint_rows) return;
    char* matrix = static_cast<char*>(args.checkpoints) +
                   (row * args.num_value_heads + c.head) * (kHeadDim * kHeadDim) * element_size(args.checkpoint_type);
    move_state<true>(matrix, args.checkpoint_type, args.state_v_first, s, first_row(c), at.q);
  }

  __device__ const ChunkDescriptor& descriptor(uint32_t m) const {
    return reinterpret_cast<const ChunkDescriptor*>(shared_memory() +
                                                    Traits::kSmemDescriptors)[m % Traits::kDescriptorRing];
  }
  // valid and flags of a chunk.
  __device__ int2 load_chunk(uint32_t m) const {
    int row, head;
    int2 chunk;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(row), "=r"(chunk.x), "=r"(chunk.y), "=r"(head)
                 : "r"(smem() + Traits::kSmemDescriptors + m % Traits::kDescriptorRing * Traits::kBytesDescriptor)
                 : "memory");
    return chunk;
  }

  __device__ void load_initial(float (&s)[64], const ChunkDescriptor& c, const FragmentPosition& at) const {
    if constexpr (Traits::kStateOnly) {
      if (c.flags & kFromIdentity) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          s[i] = first_row(c, at) + 8 * ((i >> 1) & 1) == 8 * (i >> 2) + 2 * at.q + (i & 1) ? 1.0f : 0.0f;
        }
        return;
      }
    } else if (c.flags & kFromCutState) {
      // Only here are the states at cuts waited for: the tile's first chunks are prepared meanwhile. All blocks that
      // make them run, or this kernel would not have started.
      if (at.lane == 0) {
        const Progress& progress = p.counters->progress;
        while (load_relaxed(&progress.states_left) + load_relaxed(&progress.slices_left) != 0) __nanosleep(50);
        acquire_loads();
      }
      __syncwarp();
      const float4* from = p.cut_states + c.slot_in * kCutStateVectors;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float4 x = __ldcg(from + cut_state_position(group + c.half, at.warp, j, at.lane));
        s[4 * j] = x.x, s[4 * j + 1] = x.y, s[4 * j + 2] = x.z, s[4 * j + 3] = x.w;
      }
      return;
    }
    if (c.slot_in >= 0) {
      const StateSet& set = p.args.initial;
      move_state<false>(state_matrix(set, c.slot_in, c.head), set.type, p.args.state_v_first, s, first_row(c, at),
                        at.q);
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    }
  }

  // At the end of an item of a cut call whose final states overwrite initial ones. An item that has read one says so;
  // the one that is about to overwrite it waits for them all. They have earlier tickets or run in the kernel before
  // this one, so that they need nothing of this block.
  __device__ void settle_readers(const ChunkDescriptor& c, const FragmentPosition& at) const {
    __syncwarp();
    if (at.lane == 0) {
      const uint32_t* readers = p.readers + (2 * (c.sequence * p.args.num_value_heads + c.head) + group + c.half);
      if (c.flags & kCountedReader) asm volatile("red.release.gpu.global.add.u32 [%0], -1;" ::"l"(readers) : "memory");
      while (c.slot_out >= 0 && !Traits::kStateOnly && load_acquire(readers) != 0) __nanosleep(100);
    }
    __syncwarp();
  }

  // O^T of a chunk, tokens times `factor`, into the V stage it no longer needs, to be sent from there.
  __device__ void store_o(const float (&o)[32], const float4 (&factor)[4], uint32_t stage) const {
    const uint32_t address = stage + group * Traits::kHalf + at.trans_row + at.trans_chunk;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* x = o + 8 * b;
      const float4 f = factor[b];
      store_matrix_x4_trans(address + b * 2048, pack2<Element>(x[0] * f.x, x[1] * f.y),
                            pack2<Element>(x[2] * f.x, x[3] * f.y), pack2<Element>(x[4] * f.z, x[5] * f.w),
                            pack2<Element>(x[6] * f.z, x[7] * f.w));
    }
  }
  // The same where O has its factors.
  __device__ void store_o(const float (&o)[32], uint32_t stage) const {
    const uint32_t address = stage + group * Traits::kHalf + at.trans_row + at.trans_chunk;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* x = o + 8 * b;
      store_matrix_x4_trans(address + b * 2048, pack2<Element>(x[0], x[1]), pack2<Element>(x[2], x[3]),
                            pack2<Element>(x[4], x[5]), pack2<Element>(x[6], x[7]));
    }
  }
  // By the chunk's parity: the first group may be one chunk further than the second, but not two.
  static __device__ uint32_t lag_barrier(uint32_t m) { return 2 + (m & 1); }

  static __device__ uint32_t stage_gate(uint32_t m) { return Traits::Gates::tile(m); }
  // From A_g W on mild chunks and others have code of their own, without branches between products and in one piece:
  // what an SM does not execute is not in the way of what it does. Up to there the code is common, as another SM, which
  // shares the cache of instructions, may have chunks of the other form. Calls that save h take 1 to 6 % longer with
  // it.
  static constexpr bool kFinishesByForm = kCompactCode<Traits>;

  __device__ void run() const {
    float s[64];  // S^T: rows V, columns K
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    uint32_t m = 0;
    int2 chunk_now = load_chunk(0);
    // The first state after the first K, so that the card's blocks do not all ask memory for states while they wait for
    // K.
    if (chunk_now.x >= 0) Traits::FullK::wait(0);
    // What is done once a tile, or where a state is kept, lies outside of the loop over chunks, whose code so lies in
    // one piece.
#pragma unroll 1
    while (chunk_now.x >= 0) {
      if (!Traits::kEndsAtCheckpoints || (chunk_now.y & kFirstChunk)) {
        load_initial(s, descriptor(m), at);
      }
      if constexpr (Traits::kEndsAtCheckpoints) {
        // The thread's place is made again, as there is no register to keep what comes of it through the loop.
        save_listed(s, descriptor(m), fragment_position(recompute(32 * at.warp + at.lane)));
      }
      bool state_leaves = false;
      // One chunk. Whether the next one may follow in the same loop.
      const auto step = [&](auto makes_output) -> bool {
        constexpr bool kMakesOutput = decltype(makes_output)::value;
        const uint32_t parity_p = Traits::FullP::parity(m);
        const uint32_t k_tile = Traits::TilesK::tile(m);
        // Of the chunk's number, which is known to be the same in all lanes: a stage counted from chunk to chunk is
        // not, and then each product's descriptor is moved from a vector register.
        const uint32_t q_tile = Traits::TilesQ::tile(m);
        const uint32_t stage_v = m % Traits::kStagesV;
        const uint32_t v_base = smem() + Traits::kSmemV;
        const uint32_t gate = stage_gate(m), columns = gate + 80 * at.q;
        // ptxas moves what belongs under a product between or before the product's wgmma, unless a branch holds it:
        // this is always so, which only the launcher knows.
        const bool always = keep_in_branch(p);
        uint32_t packed[32];
        const auto pack_state = [&](int first, int end) {
#pragma unroll
          for (int i = first; i < end; ++i) packed[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
        };
        // Half of S is packed ahead of the wait for P, the rest under the first products.
        constexpr int kPackedAhead = kFinishesByForm ? 16 : 32;
        if constexpr (kFinishesByForm) {
          wgmma_wait<0>();
          pin(s);
          pack_state(0, kPackedAhead);
#pragma unroll
          for (int i = 0; i < kPackedAhead; ++i) asm volatile("" : "+r"(packed[i])::"memory");
        }
        // P of this chunk covers K, Q, V and the gates as well: its makers have waited for them, V arrives on the same
        // barrier.
        mbarrier_wait(Traits::FullP::barrier(m), parity_p);

        // Ahead of its use.
        float last = load_shared_f1(gate + Traits::kGateDecay + Traits::kGateLast);
        if constexpr (!kFinishesByForm) {
          wgmma_wait<0>();
          pin(s);
          pack_state(0, kPackedAhead);
        }
        // u^T = S0^T K^T, then o^T = S0^T Q^T after it.
        float u[32], o[32];  // o: O^T, rows V, columns tokens
        float4 factor[4];    // of O, by tokens
        const uint64_t k_rows = wgmma_descriptor(k_tile), q_rows = wgmma_descriptor(q_tile);
        // The second state group starts once the first has S K and S Q: in step both would wait for the tensor cores,
        // and then leave them idle, at the same time.
        if constexpr (!kFinishesByForm) pin(packed);
        if (group == 1) named_barrier_sync(lag_barrier(m), 256);
        wgmma_fence();
        mma_rs_n64_init<Element>(u, packed, k_rows);
#pragma unroll
        for (int i = 1; i < 8; ++i) {
          if (4 * i == kPackedAhead) {
            if (Traits::kSave || always) pack_state(kPackedAhead, 32);  // kSave: 1 % slower with the branch
            wgmma_fence();
          }
          mma_rs_n64<Element>(u, packed + 4 * i,
                              wgmma_advance_uniform(k_rows, (i >> 2) * Traits::kHalf + (i & 3) * 32));
        }
        wgmma_commit();
        if constexpr (kMakesOutput) {
          wgmma_fence();
          mma_rs_n64_init<Element>(o, packed, q_rows);
#pragma unroll
          for (int i = 1; i < 8; ++i) {
            mma_rs_n64<Element>(o, packed + 4 * i,
                                wgmma_advance_uniform(q_rows, (i >> 2) * Traits::kHalf + (i & 3) * 32));
          }
          wgmma_commit();
        }
        bool sent = false;
        if constexpr (Traits::kStoresHByTma) sent = send_h(packed, descriptor(m));
        // Under both products: gC S0, and V in the accumulator's layout.
        if (__any_sync(0xffffffffu, last != 1.0f)) {  // a branch, so that this does not sink between the products below
#pragma unroll
          for (int i = 0; i < 64; ++i) s[i] *= last;
        }
        uint32_t v[16];
        const uint32_t v_rows =
            v_base + stage_v * Traits::kBytesV + group * Traits::kHalf + at.trans_row + at.trans_chunk;
#pragma unroll
        for (int b = 0; b < 4; ++b)
          load_matrix_x4_trans(v_rows + b * 2048, v[4 * b], v[4 * b + 1], v[4 * b + 2], v[4 * b + 3]);
        wgmma_wait<0>();
        pin(u);
        if constexpr (kMakesOutput) pin(o);
        pin(packed);

        if (group == 0) named_barrier_arrive(lag_barrier(m), 256);
        if (Traits::kStoresHByTma && sent && sends_h()) {
          tma_store_wait_read();
          mbarrier_arrive(smem() + Traits::kFreeH);
        }
        Traits::FreeQ::arrive(m, at.lane);
        const float mild_factor = load_shared_f1(gate + Traits::kGateMild);
        const uint32_t full_a = Traits::FullA::barrier(m);
        const uint32_t parity_a = Traits::FullA::parity(m);
        constexpr bool kByForm = kFinishesByForm && kMakesOutput;
        bool a_there = false;  // asked for ahead of the answer's use
        if constexpr (kByForm) a_there = mbarrier_test(full_a, parity_a);
        // W^T = V^T - u^T diag(gamma)
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const float4 gamma = load_shared_f4(columns + Traits::kGateDecay + 16 * b);
          if constexpr (kSavesA<Traits>) {
            subtract_from_values<Element>(v + 4 * b, u + 8 * b, gamma,
                                          load_shared_f4(columns + Traits::kGateFactor + 16 * b));
          } else {
            subtract_from_values<Element>(v + 4 * b, u + 8 * b, gamma);
          }
        }
        bool strong = false;
        if constexpr (kByForm) strong = __all_sync(0xffffffffu, mild_factor == 0.0f);
        int2 chunk_next;
        const auto finish = [&](auto known_form) {
          constexpr ChunkForm kForm = decltype(known_form)::value;
          constexpr bool kAsksForm = kForm == ChunkForm::kEither;
          if constexpr (kAsksForm) {
            mbarrier_wait(full_a, parity_a);
          } else {
            while (!a_there) a_there = mbarrier_try_wait(full_a, parity_a);
          }
          // V'^T = W^T Ag^T
          const uint64_t a_rows = wgmma_descriptor(Traits::TilesA::tile(m));
          float low[16], high[16];
          multiply_lower<Element>(low, high, v, a_rows);
          // With mild decay (gate_vectors.cuh) V' comes with what S needs, and O takes its factors last of all.
          const bool mild = kAsksForm ? __any_sync(0xffffffffu, mild_factor != 0.0f) : kForm == ChunkForm::kMild;
          constexpr bool kStrong = kForm == ChunkForm::kStrong;
          if (kMakesOutput && !mild && (!kStrong || always)) {
            scale_outputs(o, p.args.scale, columns + Traits::kGateDecay);
          } else if (kMakesOutput && !kWideExponents<Element>) {
            // Beside h there is no register to keep it in.
            if constexpr (Traits::kStoresHByTma) last = load_shared_f1(gate + Traits::kGateDecay + Traits::kGateLast);
#pragma unroll
            for (int i = 0; i < 32; ++i) o[i] *= last;
          }
          // What comes next, ahead of its use.
          if constexpr (kMakesOutput && !kStrong) {
#pragma unroll
            for (int b = 0; b < 4; ++b) factor[b] = load_shared_f4(columns + Traits::kGateScaled + 16 * b);
          }
          wgmma_wait<0>();
          pin(low);
          pin(high);
          pin(v);

          // O^T += V'^T P^T
          uint32_t corrected[16];
          pack_values<Element>(corrected, low, high);
          const uint64_t p_rows = wgmma_descriptor(Traits::TilesP::tile(m));
          if constexpr (kMakesOutput) {
            pin(o);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i)
              mma_rs_n64<Element>(o, corrected + 4 * i, wgmma_advance_uniform(p_rows, 32 * i));
            wgmma_commit();
          }
          // S1^T = gC S0^T + (V'^T diag(gC / gamma)) K
          if constexpr (kStrong) {
            if (always) scale_values(low, high, columns + Traits::kGateToEnd);
            wgmma_wait<0>();  // P V' reads its operand's registers as it goes
            pin(o);
            pin(corrected);
            pack_values<Element>(corrected, low, high);
          } else if (!mild) {
            wgmma_wait<0>();  // P V' reads its operand's registers as it goes
            if constexpr (kMakesOutput) pin(o);
            pin(corrected);
            pack_scaled_values<Element>(corrected, low, high, columns + Traits::kGateToEnd);
          }
          const uint64_t k_columns = wgmma_descriptor(k_tile, Traits::kHalf);
          pin(s);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i)
            mma_rs_n128_trans<Element>(s, corrected + 4 * i, wgmma_advance_uniform(k_columns, 2048 * i));
          wgmma_commit();
          chunk_next = load_chunk(m + 1);
          // O leaves while the state's update runs.
          wgmma_wait<1>();
          if constexpr (kMakesOutput) {
            pin(o);
            if constexpr (!kStrong) {
              store_o(o, factor, v_base + stage_v * Traits::kBytesV);
            } else if (always) {
              store_o(o, v_base + stage_v * Traits::kBytesV);
            }
          }
          __syncwarp();  // the chunk's end, on which lane 0 arrives below, says that O is there
          wgmma_wait<0>();
          if constexpr (kMakesOutput) pin(o);
          pin(s);
          pin(corrected);
        };
        if constexpr (!kByForm) {
          finish(std::integral_constant<ChunkForm, ChunkForm::kEither>{});
        } else if (strong) {
          finish(std::integral_constant<ChunkForm, ChunkForm::kStrong>{});
        } else {
          finish(std::integral_constant<ChunkForm, ChunkForm::kMild>{});
        }
        Traits::Done::arrive(m, at.lane);

        state_leaves = chunk_now.y & (Traits::kEndsAtCheckpoints ? kLastChunk | kCheckpointChunk : kLastChunk);
        chunk_now = chunk_next;
        ++m;
        if (Traits::kSkipsWarmup && ((chunk_now.y & kWarmupChunk) == 0) != kMakesOutput) return false;
        return !state_leaves;
      };
#pragma unroll 1
      while (!state_leaves) {
        if (Traits::kSkipsWarmup && __any_sync(0xffffffffu, (chunk_now.y & kWarmupChunk) != 0)) {
#pragma unroll 1
          while (step(std::false_type{})) {
          }
        } else {
#pragma unroll 1
          while (step(std::true_type{})) {
          }
        }
      }
      const ChunkDescriptor& chunk = descriptor(m - 1);
      if constexpr (Traits::kEndsAtCheckpoints) {
        if (chunk.flags & kCheckpointChunk) {
          save_checkpoint(s, chunk);
          save_at_listed(s, chunk, at);
        }
        if (!(chunk.flags & kLastChunk)) continue;
      }
      if (p.readers != nullptr) settle_readers(chunk, at);
      if (chunk.slot_out >= 0) {
        const StateSet& set = p.args.final_state;
        move_state<true>(state_matrix(set, chunk.slot_out, chunk.head), set.type, p.args.state_v_first, s,
                         first_row(chunk), at.q);
      }
    }
    if (Traits::kStoresHByTma && sends_h()) tma_store_wait_all();
  }
};

}  // namespace flash_qla::cuda::sm90::fwd
