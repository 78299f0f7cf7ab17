// Pair-parallel gradients from S, dS, V' and dv: dq, dk, dg and dbeta. One work item is a pair of chunks of a key head,
// and the value heads of its group follow one another, so that dq and dk are summed in fp32 accumulators and rounded
// once. An item belongs to a cluster of two blocks, a chunk each ("early" and "late"): what both need is loaded once.
//
// Three warpgroups of a block share the operands:
//   query   dq      = scale diag(gamma) dO S^T + dP K
//   plus    the part of dk whose gate enters with +:  dU S^T + D K
//   minus   the part whose gate enters with -:        diag(gP / gamma) V' dS^T + dP^T Q + D^T K
// with dP = scale G o (dO V'^T) and D = -beta_row G o strict_lower(Z V'^T) over the pair: S is the state at its start,
// dS its gradient at its end, gP the decay of all of it. Of the blocks of dP and D, [late rows, early columns] is made
// by the late block, which needs it for dq and plus, and handed to the early one, whose minus needs it. Then the
// gradient of the gate's cumsum at token i is
//   <q_i, dq_i> + <k_i, plus_i> - <k_i, minus_i>, and at the pair's last token + gP <dS, S> + sum_i <k_i, (diag(gP /
//   gamma) V' dS^T)_i>.
// Both members of each pair of tokens (+ at i, - at j) come from the same rounded operands, so what cancels in the
// later sum cancels as it would in exact arithmetic. The minus group takes dP and D, transposed, from the tiles that
// the others leave, and makes <dS, S>; a warp makes the gate's gradient, for which the blocks exchange one sum a head.
#pragma once

#include "cuda/sm90/chunk_bwd/gradients/groups.cuh"
#include "cuda/sm90/chunk_bwd/gradients/helpers.cuh"

namespace flash_qla::cuda::sm90::bwd {

// One warp goes with the groups through the stages; in the early block a thread of it takes the next item, once an
// item's first head is there.
__device__ __forceinline__ void hand_out_items(const Args& p, uint32_t smem, const GradientsBarriers& bars,
                                               uint32_t rank, int lane) {
  uint32_t turn = 0;
  for (uint32_t index = 0;; ++index) {
    if (rank == kEarly && lane == 0) hand_out(p, smem, bars, index);
    __syncwarp();
    // The rest of the item before, and this one's first head.
    for (const uint32_t first = index * p.group; turn <= first; ++turn) {
      mbarrier_wait(bars.full(0), turn % 2);
      if (turn == first && GradientsItem(smem, index).is_end()) return;
      arrive_both(bars.empty(0), lane);
      mbarrier_wait(bars.full(1), turn % 2);
      arrive_both(bars.empty(1), lane);
    }
  }
}

// A group through all items of its block. One code for the three of them as far as they do the same: what two
// multiprocessors run should fit the cache of instructions that they share (about 2000). kNorms: q and k were
// normalised (a kernel of its own: what the other does not execute would still take its registers).
template <typename T, bool kNorms, bool kIsMinus>
__device__ __forceinline__ void group_gradients(const Args& p, GradientsGroup group, uint32_t smem,
                                                const GradientsBarriers& bars, uint32_t rank, int warp, int lane) {
  using Traits = GradientsTraits;
  uint32_t turn = 0;
  for (uint32_t index = 0;; index = __shfl_sync(0xffffffffu, index + 1, 0)) {
    // The shuffle says that the index is the warp's: it is kept in a uniform register, others are full as an item ends.
    mbarrier_wait(bars.full(0), turn % 2);
    const uint32_t keys = smem + rank * Traits::kKeys, other_keys = smem + Traits::kKeys;
    const GradientsItem item(smem, index);
    if (item.is_end()) {  // who makes dg is to see it too
      mbarrier_wait(bars.sums_empty(turn % 2), (turn / 2 % 2) ^ 1);
      mbarrier_arrive_warp(bars.sums_full(turn % 2), lane);
      return;
    }
    if (item.late_valid() < kChunk) {
      const int thread = group * 128 + 32 * warp + lane, valid = item.valid(), late_valid = item.late_valid();
      mbarrier_wait(bars.keys_full(), index % 2);
#pragma unroll 1
      for (uint32_t tile = 0; tile < 2 * kTokensBytes; tile += kTileBytes) {
        zero_tail(keys + tile, valid, thread, Traits::kGroups * 128);
        if (rank == kEarly) zero_tail(other_keys + tile, late_valid, thread, Traits::kGroups * 128);
      }
      fence_proxy_async();
      __syncwarp();
      mbarrier_arrive_warp(bars.tail(), lane);
      mbarrier_wait(bars.tail(), item.tails() % 2);
    }
    float acc[64], dot = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; ++i) acc[i] = 0.0f;

    do {
      // Addresses made from these are made again for each head, not kept in registers that the accumulators need.
      recompute_from(warp, lane);
      HeadWork<T> work = {p, bars, smem, index, turn, rank, warp, lane};
      const uint32_t own_rows = keys + (group == kQuery ? Traits::kQ : Traits::kK);
      uint32_t part = 0;
#pragma unroll 1
      do {
        uint32_t dot_rows[32];
        float inner = 0.0f;
        if constexpr (kIsMinus) {
          if (part == 0) {
            inner = work.minus_of_state(acc);
            mbarrier_wait(bars.keys_full(), index % 2);
            work.open_sums();
          } else {
            work.add_transposed(turn + 1 == (index + 1) * p.group, acc);
          }
        } else {
          work.lower(group == kPlus, own_rows, acc, dot_rows);
        }
        if constexpr (kIsMinus) load_dot_rows(dot_rows, own_rows, warp, lane);
        dot = row_dots<T>(acc, dot_rows, inner, lane);
        work.keep_sums(group, part != 0, dot);
      } while (part++ == 0 && kIsMinus);
      __syncwarp();
      mbarrier_arrive_warp(bars.sums_full(turn % 2), lane);
    } while (++turn < (index + 1) * p.group);

    if constexpr (kNorms) {
      through_norm<T>(acc, dot, keys + (group == kQuery ? Traits::kQ : Traits::kK),
                      group == kQuery ? p.q_inverse_norms : p.k_inverse_norms, p, item.chunk(p), item.key_head(), warp,
                      lane);
    }
    // The next item's q and k may come: what is left needs neither.
    __syncwarp();
    arrive_both(bars.keys_empty(), lane);
    // Where rows go, the last head's dS may have waited: both blocks have it by now.
    for (int half = 0; half < 2; ++half) mbarrier_wait(bars.empty(half), (turn - 1) % 2);
    recompute_from(warp, lane);  // what follows from these is made again
    // dk = plus + minus: each gives the other half of its columns, 128 threads x 32 floats, and adds and stores the
    // half that it keeps. Where dP and D were, which nobody needs any more: minus gives first, and what plus takes it
    // replaces by what it gives. A warp deals with that of the other group which has the same rows.
    static_assert(2 * kTileBytes == 128 * 32 * sizeof(float));
    const uint32_t warps_part = smem + Traits::kP + warp * (kTileBytes / 2), mine = warps_part + lane * 16;
    const auto give = [&](const float* half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        store_shared_u4(mine + i * 32 * 16,
                        make_uint4(__float_as_uint(half[4 * i]), __float_as_uint(half[4 * i + 1]),
                                   __float_as_uint(half[4 * i + 2]), __float_as_uint(half[4 * i + 3])));
      }
    };
    const auto add_given = [&](float* half) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 x = load_shared_f4(mine + i * 32 * 16);
        half[4 * i] += x.x;
        half[4 * i + 1] += x.y;
        half[4 * i + 2] += x.z;
        half[4 * i + 3] += x.w;
      }
    };
    const StridedTensor& t = group == kQuery ? p.dq : p.dk;
    const ChunkInfo chunk = item.chunk(p);
    const int row = 16 * warp + (lane >> 2), rows = t.data == nullptr ? 0 : chunk.valid - row;
    auto* const to = static_cast<uint16_t*>(t.data) + row_offset(t, chunk.batch, chunk.token + row, item.key_head()) +
                     8 * (lane & 3);
    const auto leave = [&](int quarter, uint32_t place) {
      gather_quarter_rows<T>(acc + 16 * quarter, place, lane);
      __syncwarp();
      store_quarter_rows(to + kHeadDim / 4 * quarter, t.stride[1], rows, place, lane);
      __syncwarp();
    };
    if constexpr (kIsMinus) {
      named_barrier_sync(kTakenBarrier, 128);
      give(acc);
      named_barrier_arrive(kMinusBarrier, 2 * 128);
      named_barrier_sync(kPlusBarrier, 2 * 128);
      add_given(acc + 32);
      __syncwarp();
      leave(2, warps_part);
      leave(3, warps_part);
      mbarrier_arrive_warp(bars.products_empty(), lane);
    } else {
      if (group == kPlus) {
        named_barrier_sync(kMinusBarrier, 2 * 128);
        add_given(acc);
        give(acc + 32);
        named_barrier_arrive(kPlusBarrier, 2 * 128);
      }
      const uint32_t place = smem + Traits::kRows + (group == kPlus ? 4 + warp : warp) * (kTileBytes / 8);
      leave(0, place);
      leave(1, place);
      if (group == kQuery) {
        leave(2, place);
        leave(3, place);
      }
    }
  }
}

template <typename T, bool kNorms>
__global__ __launch_bounds__(GradientsTraits::kThreads,
                             1) void sm90_chunk_bwd_gradients_kernel(const Args p, const __grid_constant__ Maps maps) {
  // Beside the passes: its blocks come when all of theirs have started (passes/kernel.cuh), and wait for each item.
  launch_dependents();
  using Traits = GradientsTraits;
  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const GradientsBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t rank = __shfl_sync(0xffffffffu, cluster_rank(), 0);

  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages + 1; ++i) {
      mbarrier_init(bars.full(i), 1);
      const uint32_t warps = Traits::kConsumerWarps + (i < Traits::kStages ? 1 : 0);  // who hands out goes along
      mbarrier_init(bars.empty(i), 2 * warps * kWarpArrivals);
    }
    mbarrier_init(bars.products_full(), 8 * kWarpArrivals);
    mbarrier_init(bars.products_empty(), 4 * kWarpArrivals);
    mbarrier_init(bars.late_rows_full(), 1);
    mbarrier_init(bars.late_rows_empty(), 4 * kWarpArrivals);
    mbarrier_init(bars.tail(), Traits::kConsumerWarps * kWarpArrivals);
    for (uint32_t parity = 0; parity < 2; ++parity) {
      mbarrier_init(bars.sums_full(parity), Traits::kConsumerWarps * kWarpArrivals);
      mbarrier_init(bars.sums_empty(parity), kWarpArrivals);
      mbarrier_init(bars.received(parity), 1);
    }
    for (uint32_t slot = 0; slot < Traits::kTakenSlots; ++slot) mbarrier_init(bars.taken(slot), 1);
    mbarrier_init_fence();
  }
  cluster_sync();

  // Each role ends by itself, when neither block writes to the other any more.
  if (warp >= Traits::kConsumerWarps) {
    release_registers<Traits::kLoadRegisters>();
    if (warp == Traits::kConsumerWarps && elect_one()) load_stages(p, maps, smem, bars, rank);
    if (warp == Traits::kConsumerWarps + 1) {
      finish_gates(p, smem, bars, rank, lane);
      // For the kernel after this one, which waits for this one alone. At the end: one warp's wait holds up its block.
      wait_for_predecessors();
    }
    if (warp == Traits::kConsumerWarps + 2) hand_out_items(p, smem, bars, rank, lane);
  } else if (warp < 8) {
    claim_registers<Traits::kLowerRegisters>();
    group_gradients<T, kNorms, false>(p, warp < 4 ? kQuery : kPlus, smem, bars, rank, warp % 4, lane);
  } else {
    claim_registers<Traits::kMinusRegisters>();
    group_gradients<T, kNorms, true>(p, kMinus, smem, bars, rank, warp - 8, lane);
  }
  __syncwarp();
  cluster_sync();
}

}  // namespace flash_qla::cuda::sm90::bwd
