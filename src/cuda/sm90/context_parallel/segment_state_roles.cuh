// The roles of the kernels that make last states and transitions of segments: those of cuts (segment_state.cuh) and of
// links between ranks' parts (link_states.cuh). A segment is a work item, and comes out of it as one state.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/compiler.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/chunk_fwd/state_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/common/decay_products.cuh"
#include "cuda/sm90/common/ut_transform.cuh"
#include "cuda/sm90/context_parallel/scan.cuh"

namespace flash_qla::cuda::sm90::cp {

using fwd::Kernel, fwd::KernelArgs, fwd::ForwardTraits, fwd::ChunkDescriptor, fwd::QueueProducer;
using fwd::kFirstChunk, fwd::kLastChunk, fwd::kNoSlot, fwd::kNoValues, fwd::kToTransition;
using fwd::load_gates, fwd::produce_chunk;

// kLink: of links. A segment of a cut ends at a boundary, so that all its chunks are full ones; one of a link may end
// with its sequence, and leaves its state, or transition, as a matrix [V][K] in fp32 (link_chains.cu).
template <typename Element_, bool kLink_ = false>
struct SegmentStateTraits : ForwardTraits<Element_> {
  static constexpr bool kLink = kLink_;
  using Element = Element_;
  using Base = ForwardTraits<Element_>;
  static constexpr uint32_t kInputG = Base::kGateInput, kInputBeta = Base::kGateBeta;
  static constexpr bool kStateOnly = true;
  static constexpr int kProducerGroups = 3;
  static constexpr int kThreads = 128 * (kProducerGroups + Base::kStateGroups);
  // 640 threads have 96 each to share out. A state group needs S (64), an accumulator (32) and a packed operand (32).
  static constexpr int kProducerRegisters = 64;
  static constexpr int kStateRegisters = 144;

  // All of a chunk is one stage: three are in preparation, one in use, one on its way.
  static constexpr uint32_t kStages = 5;
  static constexpr uint32_t kStageK = 0;
  static constexpr uint32_t kStageV = kStageK + Base::kBytesK;
  static constexpr uint32_t kStageA = kStageV + Base::kBytesV;
  static constexpr uint32_t kStageGate = kStageA + Base::kBytesMatrix;
  static constexpr uint32_t kBytesStage = (kStageGate + Base::kBytesGate + 1023) / 1024 * 1024;  // tiles are swizzled

  static constexpr uint32_t kSmemDescriptors = kStages * kBytesStage;
  static constexpr uint32_t kSmemProducer = kSmemDescriptors + Base::kDescriptorRing * Base::kBytesDescriptor;
  // Barriers, 8 bytes each.
  static constexpr uint32_t kFull = kSmemProducer + Base::kBytesProducer;  // K, V, g and beta
  static constexpr uint32_t kFullA = kFull + 8 * kStages;                  // A_g and the gates
  static constexpr uint32_t kDone = kFullA + 8 * kStages;  // the state groups are through with the chunk
  // A descriptor is written, by each group in its turn. One for each: of a single one a group could not tell the turn
  // before its own from the next but one.
  static constexpr uint32_t kListed = kDone + 8 * kStages;
  static constexpr uint32_t kWarmedUp = kListed + 8 * kProducerGroups;  // all warps are through with the first queue
  static constexpr uint32_t kOpen = kWarmedUp + 8;                      // a queue is: the first one, then the second
  static constexpr uint32_t kReset = kOpen + 8;                         // ... and may be opened the second time
  static constexpr uint32_t kSmemBytes = kReset + 8;
  // Where the second queue's first chunks are until then: a stage that the warm-up of instructions does not use.
  static constexpr uint32_t kSmemFound = kBytesStage;
  static_assert(kSmemBytes <= 227 * 1024);

  using Tiles = Stages<0, kBytesStage, kStages>;
  using Full = Ring<kFull, kStages>;
  using FullA = Ring<kFullA, kStages>;
  using Done = Ring<kDone, kStages>;
  using Listed = Ring<kListed, kProducerGroups>;
};

template <typename Traits>
struct ProducerWarpgroup {
  using Element = typename Traits::Element;
  static constexpr int kAhead = Traits::kStages - 1;  // chunks that are brought, and listed, ahead
  static constexpr int kListThread = 64;              // of the warp that has least to do: it lists a chunk
  // Named barriers of meet(), after the last of scan.cuh.
  static constexpr uint32_t kFirstMeeting = kNextBarrier + 1;
  const KernelArgs& p;
  uint32_t group;  // 0 .. 2: of every third chunk
  int thread;      // 0 .. 127

  __device__ const ChunkDescriptor& descriptor(uint32_t m) const {
    return reinterpret_cast<const ChunkDescriptor*>(shared_memory() +
                                                    Traits::kSmemDescriptors)[m % Traits::kDescriptorRing];
  }
  // Of the group of chunk m.
  __device__ void sync(uint32_t m) const { named_barrier_sync(1 + recompute(m) % Traits::kProducerGroups, 128); }
  // The barrier at which only the warp with A_g's diagonal waits. One of its own: who does not wait may be at the next
  // sync() first.
  __device__ void meet(uint32_t m, bool waits) const {
    const uint32_t barrier = kFirstMeeting + recompute(m) % Traits::kProducerGroups;
    if (waits) {
      named_barrier_sync(barrier, 128);
    } else {
      named_barrier_arrive(barrier, 128);
    }
  }

  // All of chunk m into its stage, by all threads.
  __device__ void load(uint32_t m) const {
    const ChunkDescriptor& c = descriptor(m);
    const uint32_t stage = Traits::Tiles::tile(m), full = Traits::Full::barrier(m);
    if (c.valid < 0) {  // the end
      mbarrier_arrive(full);
      if (thread == 0) mbarrier_arrive(full);
      return;
    }
    if (thread == 0) {
      const bool with_v = !(c.flags & kNoValues);
      mbarrier_arrive_expect(full, Traits::kBytesK + (with_v ? Traits::kBytesV : 0));
      tma_load_4d(stage + Traits::kStageK, &p.k, full, 0, c.row, 0, c.key_head);
      if (with_v) tma_load_4d(stage + Traits::kStageV, &p.v, full, 0, c.row, 0, c.head);
    }
    load_gates<Traits>(p.args, c, gates(m), full, thread);
  }

  // What lies behind the end of a sequence is another one's: the state groups wait for A_g before they read K there.
  __device__ void clear_tail(uint32_t m) const {
    const ChunkDescriptor& c = descriptor(m);
    const uint32_t stage = Traits::Tiles::tile(m);
    zero_tail_rows(stage + Traits::kStageK, 2, c.valid, number());
    if (!(c.flags & kNoValues)) zero_tail_rows(stage + Traits::kStageV, 2, c.valid, number());
    sync(m);
  }

  __device__ int number() const { return recompute(thread); }
  __device__ int warp() const { return static_cast<int>(uniform(static_cast<uint32_t>(number()) >> 5)); }
  __device__ FragmentPosition at() const { return fragment_position(number()); }
  __device__ uint32_t tile_a(uint32_t m) const { return Traits::Tiles::tile(recompute(m)) + Traits::kStageA; }
  __device__ uint32_t gates(uint32_t m) const { return Traits::Tiles::tile(recompute(m)) + Traits::kStageGate; }

  // A_g of chunk m, its gates, and the descriptor of a later chunk.
  __device__ void prepare(uint32_t m) const {
    if (Traits::kLink && descriptor(m).valid < kChunk) clear_tail(m);
    {
      float kkt[32];
      const uint64_t k_rows = uniform_descriptor(Traits::Tiles::tile(m) + Traits::kStageK);
      start_product<Element>(kkt, k_rows, k_rows);
      const float beta0 = load_shared_f1(gates(m) + Traits::kGateBeta + 4 * at().row);
      const float beta1 = load_shared_f1(gates(m) + Traits::kGateBeta + 4 * at().row + 32);
      wgmma_wait<0>();
      pin(kkt);
      store_kkt<true>(kkt, beta0, beta1, tile_a(m), at());
      sync(m);  // what solve_pair() reads of -M is there
      if (warp() < 2) {
        UtTransform<Traits>::solve_pair(tile_a(m), warp(), number() & 31);
      } else {
        store_kkt<false>(kkt, beta0, beta1, tile_a(m), at());
      }
    }
    if (number() >= 96) {
      const uint32_t gate = gates(m), place = 8 * (number() & 31);
      make_gates<Traits>(
          p.args.scale, load_shared_f2(gate + Traits::kGateInput + place),
          [&] { return load_shared_f2(gate + Traits::kGateBeta + place); },
          Traits::kLink && fwd::is_short_last_chunk<Traits>(descriptor(m)), gate, gate, number() & 31);
    }
    if (number() == kListThread) {
      if (m > 0) Traits::Listed::wait(m - 1);
      produce_chunk<Traits>(p, m + kAhead);
      mbarrier_arrive(Traits::Listed::barrier(m));
    }
    __syncwarp();
    sync(m);  // its results are there, all of -M, and the gates
    const uint32_t gate = gates(m);
    UtTransform<Traits>::finish_by_four(
        tile_a(m), gate, gate + Traits::kGateBeta, gate + Traits::kGateMild, warp(), number() & 31,
        [&](bool waits) { meet(m, waits); }, [](auto, float) {});
    fence_proxy_async();
    m = recompute(m);
    __syncwarp();
    Traits::FullA::arrive(m, number() & 31);
  }

  __device__ void run() const {
    load(group);
    if (group == 0) load(Traits::kProducerGroups);
#pragma unroll 1
    for (uint32_t m = group;; m += Traits::kProducerGroups) {
      Traits::Full::wait(m);
      if (descriptor(m).valid < 0) return;  // no item ends with a chunk at a checkpoint
      prepare(m);
      m = recompute(m);
      if (m > 0) Traits::Done::wait(m - 1);
      load(m + kAhead);
    }
  }
};

template <typename Traits>
struct StateWarpgroup : fwd::StateWarpgroup<Traits> {
  using Element = typename Traits::Element;
  using Base = fwd::StateWarpgroup<Traits>;
  using Base::descriptor;
  using Base::group;
  using Base::load_chunk;
  using Base::p;

  // Registers are short here as well: what is made of the thread's and the chunk's number is made again (recompute()).
  __device__ FragmentPosition place(int thread) const { return fragment_position(recompute(thread)); }
  __device__ uint32_t stage(uint32_t m) const { return Traits::Tiles::tile(recompute(m)); }
  __device__ uint32_t gates(uint32_t m) const { return stage(m) + Traits::kStageGate; }

  // The last state of a segment, or its transition.
  __device__ void save_cut_state(float (&s)[64], const ChunkDescriptor& c, const FragmentPosition& at) const {
    if constexpr (Traits::kLink) {
      float* matrix = reinterpret_cast<float*>(p.cut_states) + c.slot_out * (kHeadDim * kHeadDim);
      move_state<true>(matrix, DType::kFloat32, p.keys_first == 0, s, this->first_row(c, at), at.q);
      return;
    }
    if (c.flags & kToTransition) {
      // Rows of S^T are M's columns, so that 8x8 blocks are transposed.
      constexpr int kParts = kTransitionParts<Element>;
      auto* to = reinterpret_cast<TransitionRows<kParts>*>(p.transitions) + c.slot_out * kTransitionSteps;
      const int columns = 4 * group + at.warp;
#pragma unroll
      for (int rows = 0; rows < kTransitionSteps; ++rows) {
        // One of the lane's pairs of M's rows 2q and 2q + 1 may meet the diagonal, in two of the four blocks.
        const bool on_diagonal = rows == columns && at.lane >> 3 == at.q, second = (at.lane >> 2 & 1) != 0;
        uint2 parts[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = s + 8 * rows + 4 * (i & 1) + 2 * (i >> 1);
          float2 pair = make_float2(x[0], x[1]);
          if ((i == 0 || i == 3) && on_diagonal) {
            to[rows].diagonal[(at.lane >> 2) + 8 * (i & 1)] = second ? pair.y : pair.x;
            pair = second ? make_float2(pair.x, 0.0f) : make_float2(0.0f, pair.y);
          }
          parts[i] = pack_two_parts(pair.x, pair.y);
          parts[i] = make_uint2(transpose_8x8(parts[i].x), transpose_8x8(parts[i].y));
        }
        uint4(&place)[kParts][32] = to[rows].columns[columns];
        place[0][at.lane] = make_uint4(parts[0].x, parts[1].x, parts[2].x, parts[3].x);
        if constexpr (kParts == 2) {
          place[1][at.lane] = make_uint4(parts[0].y, parts[1].y, parts[2].y, parts[3].y);
        }
      }
      return;
    }
    float4* to = p.cut_states + c.slot_out * kCutStateVectors;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      to[cut_state_position(group, at.warp, j, at.lane)] =
          make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
    }
  }

  // Item by item, and within an item chunk by chunk: what an item's first chunk and its last one do lies outside of the
  // loop that all go through (2 to 7 % of a call in which no head decays). The next descriptor is waited for under the
  // product that ends a chunk.
  __device__ void run(int thread) const {
    float s[64];         // S^T: rows V, columns K
    uint32_t tiles = 0;  // whose last state this warp has stored
    uint32_t m = 0;
    Traits::Full::wait(m);
    int2 chunk = load_chunk(m);  // valid, flags
#pragma unroll 1
    while (chunk.x >= 0) {
      this->load_initial(s, descriptor(m), place(thread));
      bool last;
      // The item that warms up instructions has no last chunk: it ends with the queue.
#pragma unroll 1
      do {
        if (Traits::kLink && chunk.x < kChunk) Traits::FullA::wait(m);  // K's tail is cleared
        // u^T = S0^T K^T, which needs nothing of A_g. In two parts: all of S0 packed does not fit beside S and u.
        float u[32];
        const uint64_t k_rows = uniform_descriptor(stage(m) + Traits::kStageK);
        const auto product = [&](const uint32_t* packed, int i) {
          const uint64_t rows = wgmma_advance(k_rows, (i >> 2) * Traits::kHalf + (i & 3) * 32);
          i == 0 ? mma_rs_n64_init<Element>(u, packed, rows) : mma_rs_n64<Element>(u, packed, rows);
        };
        {
          uint32_t packed[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) packed[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < 4; ++i) product(packed + 4 * i, i);
          wgmma_commit();
          wgmma_wait<0>();
          pin(u);
          pin(packed);
        }
        uint32_t packed[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) packed[i] = pack2<Element>(s[32 + 2 * i], s[32 + 2 * i + 1]);
        wgmma_fence();
#pragma unroll
        for (int i = 4; i < 8; ++i) product(packed + 4 * (i - 4), i);
        wgmma_commit();
        Traits::FullA::wait(m);
        const float decay = load_shared_f1(gates(m) + Traits::kGateDecay + Traits::kGateLast);
        if (__any_sync(0xffffffffu,
                       decay != 1.0f)) {  // a branch, so that this does not sink between the products below
#pragma unroll
          for (int i = 0; i < 64; ++i) s[i] *= decay;
        }
        wgmma_wait<0>();
        pin(u);
        pin(packed);

        // W^T = V^T - u^T diag(gamma)
        uint32_t v[16];
        {
          const FragmentPosition at = place(thread);
          const uint32_t rows = stage(m) + Traits::kStageV + group * Traits::kHalf + at.trans_row + at.trans_chunk;
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            load_matrix_x4_trans(rows + b * 2048, v[4 * b], v[4 * b + 1], v[4 * b + 2], v[4 * b + 3]);
          }
          const bool none = (chunk.y & kNoValues) != 0;
#pragma unroll
          for (int i = 0; i < 16; ++i) v[i] = none ? 0u : v[i];
        }
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const float4 gamma = load_shared_f4(gates(m) + 80 * place(thread).q + Traits::kGateDecay + 16 * b);
          subtract_from_values<Element>(v + 4 * b, u + 8 * b, gamma);
        }
        // V'^T = W^T Ag^T
        const uint64_t a_rows = uniform_descriptor(stage(m) + Traits::kStageA);
        float low[16], high[16];
        multiply_lower<Element>(low, high, v, a_rows);
        const bool mild = __any_sync(0xffffffffu, load_shared_f1(gates(m) + Traits::kGateMild) != 0.0f);
        wgmma_wait<0>();
        pin(low);
        pin(high);
        pin(v);

        // S1^T = gC S0^T + (V'^T diag(gC / gamma)) K; where the decay is mild V' comes with that factor.
        if (!mild) {
          scale_values(low, high, gates(m) + 80 * place(thread).q + Traits::kGateToEnd);
        }
        uint32_t corrected[16];
        pack_values<Element>(corrected, low, high);
        const uint64_t k_columns = uniform_descriptor(stage(m) + Traits::kStageK, Traits::kHalf);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          mma_rs_n128_trans<Element>(s, corrected + 4 * i, wgmma_advance(k_columns, 2048 * i));
        wgmma_commit();
        last = (chunk.y & kLastChunk) != 0;
        if (!last) {
          Traits::Full::wait(m + 1);
          chunk = load_chunk(m + 1);
        }
        wgmma_wait<0>();
        pin(s);
        pin(corrected);
        Traits::Done::arrive(m, recompute(thread) & 31);
        ++m;
      } while (!last && chunk.x >= 0);
      if (!last) break;
      if (p.readers != nullptr) this->settle_readers(descriptor(m - 1), place(thread));
      save_cut_state(s, descriptor(m - 1), place(thread));
      ++tiles;
      Traits::Full::wait(m);
      chunk = load_chunk(m);
    }
    __syncwarp();
    if (!Traits::kLink && thread % 32 == 0 && tiles > 0) {
      __threadfence();
      atomicSub(&p.counters->progress.states_left, tiles);
    }
  }
};

template <typename Traits>
__device__ __forceinline__ QueueProducer& queue_producer() {
  return *reinterpret_cast<QueueProducer*>(shared_memory() + Traits::kSmemProducer);
}
template <typename Traits>
__device__ __forceinline__ ChunkDescriptor* queue_descriptors() {
  return reinterpret_cast<ChunkDescriptor*>(shared_memory() + Traits::kSmemDescriptors);
}

// The barriers of a queue, by one thread; again: of the second.
template <typename Traits>
__device__ __forceinline__ void reset_stream(bool again) {
  const auto init = [&](uint32_t barrier, uint32_t arrivals) {
    if (again) mbarrier_invalidate(barrier);
    mbarrier_init(barrier, arrivals);
  };
#pragma unroll 1
  for (uint32_t i = 0; i < Traits::kStages; ++i) {
    init(smem() + Traits::kFull + 8 * i, 1 + 128);
    init(smem() + Traits::kFullA + 8 * i, 4 * kWarpArrivals);
    init(smem() + Traits::kDone + 8 * i, kStateWarps * kWarpArrivals);
  }
#pragma unroll 1
  for (int i = 0; i < Traits::kProducerGroups; ++i) init(smem() + Traits::kListed + 8 * i, 1);
  mbarrier_init_fence();
}

}  // namespace flash_qla::cuda::sm90::cp
