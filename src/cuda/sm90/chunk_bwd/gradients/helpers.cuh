// The warps beside the groups (gradients/kernel.cuh): one loads, one makes dg and dbeta.
#pragma once

#include "cuda/sm90/chunk_bwd/gradients/layout.cuh"

namespace flash_qla::cuda::sm90::bwd {

// q and k of an item's chunk.
__device__ __forceinline__ void load_keys(const Args& p, const Maps& maps, uint32_t smem, const GradientsBarriers& bars,
                                          uint32_t rank, uint32_t index) {
  using Traits = GradientsTraits;
  const GradientsItem item(smem, index);
  const ChunkInfo chunk = item.chunk(p);
  const int key_head = item.key_head();
  mbarrier_wait(bars.keys_empty(), (index % 2) ^ 1);
  const uint32_t bar = bars.keys_full(), to = smem + rank * Traits::kKeys;
  mbarrier_arrive_expect(bar, rank == kEarly ? 4 * kTokensBytes : 3 * kTokensBytes);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const uint32_t at = to + half * kTileBytes;
    if (rank == kEarly) {
      tma_load_5d(at + Traits::kQ, &maps.q, bar, 0, chunk.token, half, key_head, chunk.batch);
    } else {
      tma_load_5d_cluster(at + Traits::kQ, &maps.q, bar, 0, chunk.token, half, key_head, chunk.batch, kBothBlocks);
    }
    tma_load_5d_cluster(at + Traits::kK, &maps.k, bar, 0, chunk.token, half, key_head, chunk.batch, kBothBlocks);
  }
}

// One thread: the stages of every item, in the order the groups use them, and its q and k after the first head's: those
// are free when all is done with the item before, which is before the second head's stages are. Of what both blocks
// need each brings half.
__device__ __forceinline__ void load_stages(const Args& p, const Maps& maps, uint32_t smem,
                                            const GradientsBarriers& bars, uint32_t rank) {
  using Traits = GradientsTraits;
  for (uint32_t index = 0;; ++index) {
    mbarrier_arrive_expect(bars.taken(index), 4);
    uint32_t taken = taken_item(smem, bars, index);
    if (taken == kNoItem) {
      mbarrier_wait(bars.empty(0), (index * p.group % 2) ^ 1);
      GradientsItem(smem, index).store_end();
      mbarrier_arrive(bars.full(0));
      return;
    }
    taken = wait_for_item(p, taken);
    uint32_t heads = static_cast<uint32_t>(p.Hq);
    recompute_from(heads);  // what a division by it takes is made again for each item: few registers
    const uint32_t pair_index = taken / heads;
    const int key_head = static_cast<int>(taken - pair_index * static_cast<uint32_t>(p.Hq));
    const PairInfo pair = pair_info(p, static_cast<int>(pair_index));
    const ChunkInfo chunk = chunk_of(p, pair, rank);
    const int slot = pair.slot + (rank == kLate && has_late_chunk(pair) ? 1 : 0);
    const GradientsItem item(smem, index), before(smem, index - 1);
    const uint32_t tails = index == 0 ? 0 : before.tails() + (before.late_valid() < kChunk ? 1 : 0);
    item.store(chunk, key_head, max(0, pair.valid - kChunk), tails, slot, static_cast<int>(pair_index));
    for (int of_group = 0; of_group < p.group; ++of_group) {
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        // What is known of the item is read again each time, and what follows from the rank is made again: few
        // registers.
        recompute_from(rank, index);
        const ChunkInfo chunk = item.chunk(p);
        const uint32_t turn = index * p.group + of_group;
        const int head = item.key_head() * p.group + of_group;
        // Unsigned: products of signed numbers take more registers.
        const auto tile_of = [&](int place) {
          return static_cast<uint64_t>(static_cast<uint32_t>(place)) * static_cast<uint32_t>(p.Hv) +
                 static_cast<uint32_t>(head);
        };
        const uint64_t tile = tile_of(item.slot());
        const uint32_t bar = bars.full(half), to = smem + Traits::kStageRing + half * Traits::kStage;
        mbarrier_wait(bars.empty(half), (turn % 2) ^ 1);  // the first round finds everything empty
        mbarrier_arrive_expect(
            bar, (rank == kEarly ? Traits::kEarlyLoads : Traits::kLateLoads) + (half == 0 ? Traits::kHeadGates : 0));
        tma_load_5d(to + Traits::kDo, &maps.d_o, bar, 0, p.has_d_o ? chunk.token : -kChunk, half, head, chunk.batch);
        const uint8_t* v_new = p.v_new + tile * kTokensBytes + half * kTileBytes;
        if (rank == kEarly) {
          bulk_load_cluster(to + Traits::kVEarly, v_new, kTileBytes, bar, kBothBlocks);
        } else {
          bulk_load(to + Traits::kVLate, v_new, kTileBytes, bar);
        }
        tma_load_5d(to + Traits::kDv, &maps.dv, bar, 0, chunk.token, half, head, chunk.batch);
        const uint32_t part = rank * kTileBytes;
        bulk_load_cluster(to + Traits::kState + part,
                          p.states + tile_of(item.pair()) * kStateBytes + rank * kStateHalfBytes + half * kTileBytes,
                          kTileBytes, bar, kBothBlocks);
        const uint32_t grad = to + Traits::kGrad + part;
        if (!waits_in_output(p, kChunk + item.late_valid())) {
          const int place = (p.grads_in_outputs ? chunk.sequence : item.pair()) * p.Hv + head;
          tma_load_5d_cluster(grad, &maps.state_grads, bar, 0, 0, half, static_cast<int>(rank), place, kBothBlocks);
        } else {
          const CUtensorMap* map = of_group + 1 == p.group ? &maps.dk : &maps.dq;
          tma_load_5d_cluster(grad, map, bar, 0, chunk.token, half, item.key_head(), chunk.batch, kBothBlocks);
        }
        if (half == 0) {
          bulk_load_cluster(smem + Traits::kGates + turn % 2 * Traits::kHeadGates + rank * kGateBytes,
                            p.gates + tile * static_cast<uint32_t>(p.gate_stride), kGateBytes, bar, kBothBlocks);
        }
      }
      if (of_group == 0) load_keys(p, maps, smem, bars, rank, index);
    }
  }
}

// One warp: dg and dbeta of the block's chunk, a head at a time, from what the groups leave; lane l has tokens 2l and
// 2l + 1. Little code, for what it takes of the cache: loops stay loops, and both leave by the same stores.
__device__ __forceinline__ void finish_gates(const Args& p, uint32_t smem, const GradientsBarriers& bars, uint32_t rank,
                                             int lane) {
  using Traits = GradientsTraits;
  uint32_t turn = 0;
  for (uint32_t index = 0;; ++index) {
    for (; turn < (index + 1) * p.group; ++turn) {
      // What follows from these is made again for each head: few registers.
      recompute_from(index, rank, lane);
      const uint32_t parity = turn % 2, phase = turn / 2 % 2;
      const uint32_t sums = smem + Traits::kSums + parity * Traits::kSumsBytes + lane * 8;
      mbarrier_wait(bars.sums_full(parity), phase);
      if (GradientsItem(smem, index).is_end()) return;
      // Sums run on over the heads of an item.
      const uint32_t before = smem + Traits::kBefore + lane * 8;
      const auto less_before = [&](float2 x, uint32_t group) {
        if (turn == index * p.group) return x;
        const float2 y = load_shared_f2(before + group * kChunk * 4);
        return make_float2(x.x - y.x, x.y - y.y);
      };
      const float2 of_state = less_before(load_shared_f2(sums + Traits::kStateSums), kMinus);
      const auto of_group = [&](uint32_t group) {
        const float2 x = load_shared_f2(sums + group * kChunk * 4), y = less_before(x, group);
        store_shared_f2(before + group * kChunk * 4, x.x, x.y);
        return y;
      };
      const float2 query = of_group(kQuery), plus = of_group(kPlus), minus = of_group(kMinus);
      const int valid = GradientsItem(smem, index).valid(), row = 2 * lane;
      const float first = row < valid ? query.x + plus.x - minus.x : 0.0f;
      // Sum over this lane's tokens and all later ones; lane 0's is that of the chunk, as its `last` is.
      float suffix = first + (row + 1 < valid ? query.y + plus.y - minus.y : 0.0f), last = of_state.x + of_state.y;
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {
        const float later = __shfl_down_sync(0xffffffffu, suffix, step);
        last += __shfl_down_sync(0xffffffffu, last, step);
        if (lane + step < 32) suffix += later;
      }
      last = __shfl_sync(0xffffffffu, last, 0);
      if (lane == 0) {
        mbarrier_arrive_expect(bars.received(parity), 4);
        store_cluster_u1(cluster_address(smem + Traits::kReceived + parity * 4, rank ^ 1),
                         __float_as_uint(rank == kEarly ? last : last + suffix),
                         cluster_address(bars.received(parity), rank ^ 1));
      }
      mbarrier_wait(bars.received(parity), phase);
      suffix += last + load_shared_f1(smem + Traits::kReceived + parity * 4);

#pragma unroll 1
      for (int i = 0; i < 4; ++i) {  // dbeta and dg of the first token, dbeta and dg of the second one
        recompute_from(index, rank, lane);
        const GradientsItem item(smem, index);
        const ChunkInfo chunk = item.chunk(p);
        const int head = item.key_head() * p.group + static_cast<int>(turn - index * p.group);
        const int token = row + i / 2;
        const bool is_gate = i % 2 != 0;
        const float b = load_shared_f1(sums + 4 * kChunk * 4 + i / 2 * 4);
        // dbeta = <Z, V'> / beta = <dv, V'> / beta^2; small betas come later (small_betas.cuh).
        float value = is_gate ? suffix : __fdividef(load_shared_f1(sums + 3 * kChunk * 4 + i / 2 * 4), b * b);
        if (i == 1) suffix -= first;
        const StridedTensor& t = is_gate ? p.dg : p.dbeta;
        if (t.data == nullptr || token >= valid || (!is_gate && fabsf(b) < p.small_beta)) continue;
        if (is_gate && has_no_gate_gradient(p, chunk, head, token, value)) value = 0.0f;
        store_element(t, row_offset(t, chunk.batch, chunk.token + token, head), value);
      }
      __syncwarp();
      mbarrier_arrive_warp(bars.sums_empty(parity), lane);
    }
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
