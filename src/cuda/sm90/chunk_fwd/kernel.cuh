// The fused Hopper forward by one CTA a work item: read this file first, then traits.h, then the roles. Names are those
// of docs/math.md; docs/kernels/forward.md has the same drawing in full and a table of the hand-overs.
//
// A persistent CTA takes work items (a sequence, or a segment of one, and a value head). The chunks of all its items
// form one queue m = 0, 1, ..; the descriptors of chunks lie in a ring that is filled some chunks ahead. Over the chain
// of states two warpgroups carry S^T in fp32 registers, 64 rows of V each:
//   W = V - gamma K S0,  V' = Ag W,  O = scale gamma Q S0 + P V',  S1 = gC S0 + K^T (gC/gamma) V'     (all transposed)
// Off that chain eight producer warps make what it needs. [..] is a ring of stages in shared memory, a name with k the
// barrier that says it is full:
//
//   load warp     K, Q, V -kFullK-> [K x5] -kFullQ-> [Q x2]   [V x3] -(on kFullP)--------------------+
//                                      |                |                                            |
//   gate warp     g, beta -kFullInput-> [input x8]      |   makes gates -kFullGate-> [gates x4]      |
//                                      |                |                              |             |
//   product       K K^T, beta -> -M -kFullM-> [A x4] ---|---> inverse warps: A_g -kFullA-> [A x4]    |
//   warpgroup     Q K^T, gates -> P  -kFullP-> [P x2] <-+     (one to every second chunk)    |       |
//                                                                                            v       v
//   state warpgroups 0, 1:  S K | S Q | A_g W | P V' | update of S;  O into V's stage -------------------- kDone
//   load warp     O out of V's stage, by the copy engine;  [K], [V] again after kDone, [Q] after kFreeQ
//
// kDone is the end of a chunk: it frees the stages of K, V, gates, A and P. The second state warpgroup runs half a
// chunk after the first (lag_barrier()).
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/compiler.cuh"
#include "cuda/sm90/chunk_fwd/gate_warp.cuh"
#include "cuda/sm90/chunk_fwd/load_warp.cuh"
#include "cuda/sm90/chunk_fwd/product_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/chunk_fwd/state_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"

namespace flash_qla::cuda::sm90::fwd {

// What a producer warp does. thread: in its warpgroup.
template <typename Traits>
__device__ __forceinline__ void run_producer(const KernelArgs& p, int group, int thread) {
  if (group == 1) {
    ProductWarpgroup<Traits>{{p, thread}}.run();
    finish_items(p, thread, 128);
    if constexpr (Traits::kEndsAtCheckpoints) zero_skipped(p, thread, 128);
    return;
  }
  const int warp = uniform(static_cast<uint32_t>(thread) >> 5);
  thread &= 31;
  if (warp == 0) {
    LoadWarp<Traits>{{p, thread}}.run();
  } else if (warp == 1) {
    GateWarp<Traits>{{p, thread}}.run();
  } else {
    InverseWarp<Traits>{{p, thread}}.run(static_cast<uint32_t>(warp - 2));
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) sm90_chunk_fwd_kernel(const __grid_constant__ KernelArgs p) {
  const int group = warpgroup_number();
  // The thread's number in its group. The producer role gets it out of a shuffle, as one that the assembler cannot ask
  // for again; in the state role, what comes of such a number is kept through the loop, and spilled.
  const int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStagesK; ++i) Traits::FullK::init(i, 1);
    for (int i = 0; i < Traits::kStagesQ; ++i) Traits::FullQ::init(i, 1);
    for (int i = 0; i < Traits::kStagesA; ++i) {
      Traits::FullA::init(i, kWarpArrivals);
      Traits::FullM::init(i, 4 * kWarpArrivals);
    }
    for (int i = 0; i < Traits::kBarriersDone; ++i) {
      Traits::Done::init(i, (4 * Traits::kStateGroups + Traits::kSavesA) * kWarpArrivals);
    }
    for (int i = 0; i < Traits::kStagesP; ++i) {
      Traits::FullP::init(i, 5 * kWarpArrivals);  // the product warps, and V
      Traits::TailV::init(i, kWarpArrivals);
    }
    for (int i = 0; i < Traits::kStagesInput; ++i) {
      Traits::FullInput::init(i, 32);  // lanes that load g and beta
    }
    for (int i = 0; i < Traits::kStagesGate; ++i) {
      Traits::FullGate::init(i, kWarpArrivals);
    }
    for (int i = 0; i < Traits::kStagesQ; ++i) {
      Traits::FreeQ::init(i, 4 * kWarpArrivals * (Traits::kStateGroups + 1));
    }
    if constexpr (Traits::kStoresHByTma) mbarrier_init(smem() + Traits::kFreeH, 1);
    mbarrier_init_fence();
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.o);
    if constexpr (Traits::kStoresHByTma) tma_prefetch_map(&p.h);
    if constexpr (Traits::kSavesA) tma_prefetch_map(&p.a);
    reinterpret_cast<uint2*>(shared_memory() + Traits::kTailCount)[0] = make_uint2(0, 0);
  }
  if (threadIdx.x < 32) queue_first_chunks<Traits>(p, static_cast<int>(threadIdx.x));
  if (threadIdx.x / 32 == 4) prefetch_first_chunk<Traits>(p, threadIdx.x % 32);
  // Blocks of P right of the diagonal are never written: zero once.
  for (uint32_t i = threadIdx.x * 16; i < Traits::kStagesP * Traits::kBytesMatrix; i += Traits::kThreads * 16) {
    store_shared_u4(smem() + Traits::kSmemP + i, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  __syncthreads();

  if (group < Traits::kProducerGroups) {
    release_registers<Traits::kProducerRegisters>();
    run_producer<Traits>(p, group, thread_from_shuffle(thread, thread & 31));
    if (threadIdx.x == 0) {
      // Also without an item that starts from a state at a cut: a kernel must not end before those it depends on.
      wait_for_predecessors();
    }
  } else {
    claim_registers<Traits::kStateRegisters>();
    StateWarpgroup<Traits> role{p, group - Traits::kProducerGroups, fragment_position(thread)};
    role.run();
  }
}

template <typename Traits>
Kernel describe_kernel() {
  return {reinterpret_cast<const void*>(&sm90_chunk_fwd_kernel<Traits>),
          Traits::kThreads,
          Traits::kSmemBytes,
          Traits::kStateGroups,
          Traits::kClusterCtas,
          Traits::kEndsAtCheckpoints};
}

}  // namespace flash_qla::cuda::sm90::fwd
