// The fused Hopper forward: one persistent block per SM, a tile is one (sequence, value head), names as in
// docs/math.md.
//
// Two state warpgroups carry S^T in fp32 registers, 64 rows of V each, and run the recurrent products with A from
// registers:
//   W = V - gamma K S0,  V' = Ag W,  O = scale gamma Q S0 + P V',  S1 = gC S0 + K^T (gC/gamma) V'     (all transposed:
//   M = V, N = tokens)
// Two auxiliary warpgroups take every second chunk each and make, off that chain, the gates, A_g and P; they also run
// the copy engine. All chunks of all tiles of a block form one numbered stream m = 0, 1, ..; its records are in a ring
// that one thread fills six ahead.
#pragma once
#pragma once

#include "cuda/sm90/chunk_fwd/exact_inverse_warp.cuh"
#include "cuda/sm90/chunk_fwd/gate_warp.cuh"
#include "cuda/sm90/chunk_fwd/inverse_warp.cuh"
#include "cuda/sm90/chunk_fwd/load_warp.cuh"
#include "cuda/sm90/chunk_fwd/producer_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd/product_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd/state_warpgroup.cuh"
#include "cuda/sm90/chunk_fwd/traits.h"
#include "cuda/sm90/chunk_fwd/work_queue.cuh"
#include "cuda/sm90/chunk_fwd/zero_fill.cuh"

namespace flash_qla::cuda::sm90::fwd {

// Instructions that no warp executes: they move the code behind them to other places of the instruction cache.
template <int kCount>
__device__ __forceinline__ void move_code(const ChunkForwardKernelParams& p) {
  if constexpr (kCount > 0) {
    if (p.tiles < 0) {  // never, which only the launcher knows
#pragma unroll
      for (int i = 0; i < kCount; ++i) asm volatile("nanosleep.u32 1;");
    }
  }
}

// What an auxiliary warp does. thread: in its warpgroup.
template <typename Traits>
__device__ __forceinline__ void run_duty(const ChunkForwardKernelParams& p, int group, int thread) {
  if (group == 1) {
    move_code<Traits::kMoved.products>(p);
    ProductRole<Traits>{{{}, p, thread}}.run();
    finish_tiles(p, thread, 128);
    if constexpr (Traits::kEndsWhereKept) clear_skipped(p, thread, 128);
    return;
  }
  const int warp = __reduce_or_sync(0xffffffffu, static_cast<uint32_t>(thread) >> 5);
  thread &= 31;
  if (warp == 0) {
    move_code<Traits::kMoved.copies>(p);
    CopyRole<Traits>{{{}, p, thread}}.run();
  } else if (warp == 1) {
    move_code<Traits::kMoved.gates>(p);
    GateRole<Traits>{{{}, p, thread}}.run();
  } else {
    move_code<Traits::kMoved.inverse>(p);
    using Inverse = std::conditional_t<Traits::kFastInverse, FastInverseRole<Traits>, InverseRole<Traits>>;
    Inverse{{{}, p, thread}}.run(static_cast<uint32_t>(warp - 2));
  }
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    sm90_chunk_forward_kernel(const __grid_constant__ ChunkForwardKernelParams p) {
  // The warpgroup by votes, so that the compiler knows it to be the same in all lanes: descriptors then stay in uniform
  // registers.
  const int group =
      (__any_sync(0xffffffffu, threadIdx.x & 128) ? 1 : 0) + (__any_sync(0xffffffffu, threadIdx.x & 256) ? 2 : 0);
  // The thread's number in its group. The auxiliary role gets it out of a shuffle, as one that the assembler cannot ask
  // for anew; in the state role, what comes of such a number is kept through the loop, and spilled.
  const int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStagesK; ++i) mbarrier_init(smem() + Traits::kFullK + 8 * i, 1);
    for (int i = 0; i < Traits::kBarriersQ; ++i) mbarrier_init(smem() + Traits::kFullQ + 8 * i, 1);
    for (int i = 0; i < Traits::kStagesA; ++i) {
      // The warps of an auxiliary group, or the one that makes the chunk's A_g.
      mbarrier_init(smem() + Traits::kFullA + 8 * i, (Traits::kDuties ? 1 : 4) * kWarpArrivals);
      mbarrier_init(smem() + Traits::kFullM + 8 * i, 4 * kWarpArrivals);
    }
    for (int i = 0; i < Traits::kBarriersDone; ++i) {
      mbarrier_init(smem() + Traits::kDone + 8 * i, (4 * Traits::kStateGroups + Traits::kKeepsA) * kWarpArrivals);
    }
    for (int i = 0; i < Traits::kStagesP; ++i) {
      constexpr uint32_t kArrivalsV = Traits::kDuties ? kWarpArrivals : 1;  // a warp announces it, or one thread
      mbarrier_init(smem() + Traits::kFullP + 8 * i, 4 * kWarpArrivals + kArrivalsV);
      mbarrier_init(smem() + Traits::kTailV + 8 * i, kArrivalsV);
    }
    for (int i = 0; i < Traits::kBarriersO; ++i) {
      mbarrier_init(smem() + Traits::kFullO + 8 * i, 4 * kWarpArrivals * Traits::kStateGroups);
    }
    for (int i = 0; i < Traits::kStagesRaw; ++i) {
      mbarrier_init(smem() + Traits::kFullRaw + 8 * i, Traits::kDuties ? 32 : 128);  // threads that load g and beta
    }
    for (int i = 0; i < Traits::kStagesGate; ++i) {
      mbarrier_init(smem() + Traits::kFullGate + 8 * i, kWarpArrivals);
    }
    for (int i = 0; i < Traits::kStagesQ; ++i) {
      mbarrier_init(smem() + Traits::kFreeQ + 8 * i, 4 * kWarpArrivals * (Traits::kStateGroups + 1));
    }
    for (int i = 0; i < Traits::kStates; ++i) {
      mbarrier_init(smem() + Traits::kFullState + 8 * i, 1);
      mbarrier_init(smem() + Traits::kFreeState + 8 * i, 4 * kWarpArrivals * Traits::kStateGroups);
    }
    if constexpr (Traits::kStagedH) mbarrier_init(smem() + Traits::kFreeH, 1);
    mbarrier_init(smem() + Traits::kFullLast, 4 * kWarpArrivals * Traits::kStateGroups);
    mbarrier_init_fence();
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.o);
    if constexpr (Traits::kStagedH) tma_prefetch_map(&p.h);
    if constexpr (Traits::kKeepsA) tma_prefetch_map(&p.a);
    reinterpret_cast<uint2*>(shared_memory() + Traits::kTailCount)[0] = make_uint2(0, 0);
    *reinterpret_cast<const CUtensorMap**>(shared_memory() + Traits::kMaps) = &p.q;
  }
  if (threadIdx.x < 32) list_first_chunks<Traits>(p, static_cast<int>(threadIdx.x));
  if (threadIdx.x / 32 == 4) prefetch_first_chunk<Traits>(p, threadIdx.x % 32);
  // Blocks of P right of the diagonal are never written: zero once.
  for (uint32_t i = threadIdx.x * 16; i < Traits::kStagesP * Traits::kBytesMatrix; i += Traits::kThreads * 16) {
    store_shared_u4(smem() + Traits::kSmemP + i, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  __syncthreads();

  if (group < Traits::kAuxGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kAuxRegisters));
    if constexpr (Traits::kDuties) {
      run_duty<Traits>(p, group, __shfl_sync(0xffffffffu, thread, thread & 31));
    } else {
      AuxRole<Traits> role{{}, p, group, __shfl_sync(0xffffffffu, thread, thread & 31)};
      role.run();
      // Asked anew, lest the group be kept through the role, and spilled.
      if (threadIdx.x / 128 == Traits::kAuxGroups - 1)
        finish_tiles(p, __shfl_sync(0xffffffffu, thread, thread & 31), 128);
    }
    if (threadIdx.x == 0) {
      // Also without a tile that starts from a boundary state: a kernel must not end before those it depends on.
      asm volatile("griddepcontrol.wait;" ::: "memory");
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kStateRegisters));
    StateRole<Traits> role{p, group - Traits::kAuxGroups, lane_place(thread)};
    role.run();
  }
}

template <typename Traits>
ChunkForwardKernel describe_kernel() {
  return {reinterpret_cast<const void*>(&sm90_chunk_forward_kernel<Traits>),
          Traits::kThreads,
          Traits::kSmemBytes,
          Traits::kStateGroups,
          Traits::kBlocks,
          Traits::kEndsWhereKept,
          kStagesStates<Traits>};
}

}  // namespace flash_qla::cuda::sm90::fwd
