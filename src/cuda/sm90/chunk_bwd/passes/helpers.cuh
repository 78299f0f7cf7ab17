// The warps beside the passes (passes/kernel.cuh): they load stages, store tiles, count chunks for the gradients, wait
// for prepare.cuh, and of both halves of V make gates, G o A and P.
#pragma once

#include "cuda/sm90/chunk_bwd/passes/traits.cuh"

namespace flash_qla::cuda::sm90::bwd {

// One warp, a pair of chunks a lane: counts for the gradients what this block leaves of a pair when all of it is in
// memory, and lists what is complete. Both wait for memory, longer than the passes take for several pairs while that is
// busy: so all that are there are counted at once.
template <Variant kVariant, bool kReverse>
__device__ __forceinline__ void count_chunks(const Args& p, PassWork work, uint32_t smem, int lane) {
  using Traits = PassTraits<kVariant>;
  if (work.steps == work.warmup) return;
  const int from = work.chunk(work.warmup), to = work.chunk(work.steps - 1);
  const int pairs = (kReverse ? from / 2 - to / 2 : to / 2 - from / 2) + 1;
  for (int counted = 0; counted < pairs;) {
    uint32_t done = load_shared_acquire(smem + Traits::kStored);
    if (Traits::kBoth && kReverse) done = min(done, load_shared_acquire(smem + Traits::kMade));
    const int turn = counted + lane, pair = from / 2 + (kReverse ? -turn : turn);
    const int first = max(2 * pair, kReverse ? to : from), last = min(2 * pair + 1, kReverse ? from : to);
    const int step = kReverse ? work.first - first : last - work.first;
    // Each lane has asked by itself, so a later one may have been told of more than an earlier one: what is counted
    // ends before the first that has not seen its pair.
    const uint32_t missing = ~__ballot_sync(0xffffffffu, turn < pairs && step < static_cast<int>(done));
    const int next = counted + (missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1);
    if (turn < next) {
      // A chunk without a second one counts as both.
      const bool alone = (2 * pair + 1) * kChunk >= work.sequence.length;
      const uint32_t by = (alone ? 2 : last - first + 1) * Traits::kHalves;
      const uint32_t item = static_cast<uint32_t>(work.sequence.first_pair + pair) * p.Hq + work.key_head;
      if (fetch_add_release(p.progress + item, by) + by == kPairCount * p.group) {
        store_relaxed(p.ready + atomicAdd(p.ready_count, 1u), item + 1);
      }
    }
    if (next == counted) __nanosleep(100);
    counted = next;
  }
}

// One warp: what goes out, to memory; it gives the stages back.
template <Variant kVariant, bool kReverse>
__device__ __forceinline__ void store_tiles(const Args& p, const Maps& maps, PassWork work, uint32_t smem,
                                            const PassBarriers& bars, int lane) {
  using Traits = PassTraits<kVariant>;
  const uint32_t out = smem + Traits::kOut, stored = smem + Traits::kStored;
  uint32_t kept = 0;  // phase of state_full
  StageCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    recompute_from(work.head, work.sequence.batch, lane);  // as in the passes
    const int c = work.chunk(step);
    const ChunkInfo chunk = work.info(c);
    const int64_t tile = work.tile(p, c);
    const uint32_t tokens = smem + cursor.stage * (kReverse ? Traits::kRevStage : Traits::kFwdStage) +
                            (kReverse ? Traits::kRevDo : Traits::kFwdV);
    const bool wanted = step >= work.warmup, keeps = work.keeps_state(step);
    if (keeps) {
      for (int group = 0; group < Traits::kHalves; ++group) {
        mbarrier_wait(bars.state_full(group), kept);
        if (lane == 0) {
          fence_proxy_async();
          const int half = work.half + group;
          if (kReverse) {
            const int first = c / 2 * (2 * kChunk);  // of the pair's tokens
            const bool in_output = waits_in_output(p, min(2 * kChunk, work.sequence.length - first));
            const int place = (p.grads_in_outputs ? work.n : work.sequence.first_pair + c / 2) * p.Hv + work.head;
#pragma unroll 1
            for (int part = 0; part < 2; ++part) {
              const uint32_t from = out + part * kTileBytes;
              const int token = work.sequence.token + first + part * kChunk;
              if (!in_output) {
                tma_store_5d(&maps.state_grads, from, 0, 0, half, part, place);
              } else if (work.head + 1 == (work.key_head + 1) * p.group) {
                tma_store_5d(&maps.dk, from, 0, token, half, work.key_head, work.sequence.batch);
              } else {
                tma_store_5d(&maps.dq, from, 0, token, half, work.key_head, work.sequence.batch);
              }
            }
          } else {
            uint8_t* to = p.states + work.state_tile(p, c) * kStateBytes + half * kTileBytes;
            bulk_store(to, out, kTileBytes);
            bulk_store(to + kStateHalfBytes, out + kTileBytes, kTileBytes);
          }
        }
        if constexpr (Traits::kBoth) {
          if (lane == 0) {
            tma_store_commit();
            tma_store_wait_read();
          }
          arrive_warp(bars.state_empty(group ^ 1), lane);
        }
      }
      kept ^= 1;
    }
    mbarrier_wait(bars.tokens_full(cursor.stage), cursor.phase);
    // Also where nothing goes out: without it a row that the copy engine loads into this stage next may lose to what
    // the passes have left here.
    if (lane == 0) fence_proxy_async();
    if (wanted) {
      if (kReverse && chunk.valid < kChunk) {
        // The copy engine knows no sequence ends.
        for (int piece = lane; piece < chunk.valid * 8; piece += 32) {
          const int row = piece / 8, within = piece % 8;
          uint16_t* to = static_cast<uint16_t*>(p.dv.data) +
                         row_offset(p.dv, chunk.batch, chunk.token + row, work.head) + 64 * work.half + 8 * within;
          for (int group = 0; group < Traits::kHalves; ++group) {
            *reinterpret_cast<uint4*>(to + 64 * group) =
                load_shared_u4(tile_piece(tokens + group * kTileBytes, row, within));
          }
        }
      } else if (lane == 0) {
        if (kReverse) {
          for (int group = 0; group < Traits::kHalves; ++group) {
            tma_store_5d(&maps.dv, tokens + group * kTileBytes, 0, chunk.token, work.half + group, work.head,
                         chunk.batch);
          }
        } else {
          bulk_store(p.v_new + tile * kTokensBytes + work.half * kTileBytes, tokens, Traits::kHalves * kTileBytes);
        }
      }
      if (lane == 0) {
        tma_store_commit();  // a group a step
        tma_store_wait_read();
      }
    }
    arrive_warp(bars.empty(cursor.stage), lane);
    if (keeps && !Traits::kBoth) arrive_warp(bars.state_empty(), lane);
    // What was left two steps ago has had the time that it takes.
    if (lane == 0 && step > 0) {
      tma_store_wait_but<2>();
      store_shared_release(stored, step - 1);
    }
  }
  if (lane == 0) {
    tma_store_wait_all();
    store_shared_release(stored, work.steps);
  }
}

// One thread of a warp of its own: tells the one below for how many steps prepare.cuh has left what the copy engine is
// to load. To ask takes as long as a step.
template <Variant kVariant, bool kReverse>
__device__ __forceinline__ void watch_prepared(const Args& p, PassWork work, uint32_t smem) {
  constexpr int kSteps = 8;  // asked for at once
  for (int known = 0; known < work.steps;) {
    uint32_t done[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int slot = work.sequence.first_slot + work.chunk(min(known + i, work.steps - 1));
      done[i] = load_relaxed(p.prepared + static_cast<int64_t>(slot) * p.Hq + work.key_head);
    }
    if (done[0] == 0) {
      __nanosleep(100);
      continue;
    }
    acquire_loads();
    bool all = true;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      all &= done[i] != 0;
      known += all;
    }
    store_shared_release(smem + PassTraits<kVariant>::kMade, known);
  }
}

// One thread: the tensors' tiles into the stages.
template <Variant kVariant, bool kReverse>
__device__ __forceinline__ void load_stages(const Args& p, const Maps& maps, PassWork work, uint32_t smem,
                                            const PassBarriers& bars) {
  using Traits = PassTraits<kVariant>;
  [[maybe_unused]] uint32_t prepared = 0;  // steps
  StageCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    const ChunkInfo chunk = work.info(work.chunk(step));
    const uint32_t bar = bars.loaded(cursor.stage);
    const uint32_t base = smem + cursor.stage * (kReverse ? Traits::kRevStage : Traits::kFwdStage);
    if constexpr (!Traits::kBoth) {
      const uint32_t at = static_cast<uint32_t>(step);
      if (p.beside && at >= prepared) {
        while ((prepared = load_shared_acquire(smem + Traits::kMade)) <= at) {
        }
        fence_proxy_async_all();
      }
    }
    mbarrier_wait(bars.empty(cursor.stage), cursor.phase ^ 1);  // the first round finds all stages empty
    mbarrier_arrive_expect(bar, !Traits::kBoth ? (kReverse ? Traits::kRevStage : Traits::kFwdStage) + kPassGateBytes
                                : kReverse     ? Traits::kRevP
                                               : Traits::kFwdStage);
    if constexpr (kReverse) {
      // P is made of these first.
      for (int half = 0; half < 2; ++half) {
        tma_load_5d(base + Traits::kRevQ + half * kTileBytes, &maps.q, bar, 0, chunk.token, half, work.key_head,
                    chunk.batch);
      }
    }
    static_assert(Traits::kFwdK == Traits::kRevK);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(base + Traits::kFwdK + half * kTileBytes, &maps.k, bar, 0, chunk.token, half, work.key_head,
                  chunk.batch);
    }
    const uint32_t sGA = base + (kReverse ? Traits::kRevGA : Traits::kFwdGA);
    if constexpr (Traits::kBoth) {
      tma_load_5d(sGA, &maps.A, bar, 0, chunk.token, 0, work.head, chunk.batch);
    } else {
      const int64_t tile = work.tile(p, work.chunk(step));
      bulk_load(sGA, p.GA + tile * kTileBytes, kTileBytes, bar);
      bulk_load(smem + Traits::kGates + cursor.stage * kPassGateBytes,
                p.gates + tile * p.gate_stride + kGateBytes / sizeof(float), kPassGateBytes, bar);
      if constexpr (kReverse) bulk_load(base + Traits::kRevP, p.P + tile * kTileBytes, kTileBytes, bar);
    }
    if constexpr (kReverse) {
      // Without dO: a tile wholly outside the tensor, which arrives as zeros.
      for (int group = 0; group < Traits::kHalves; ++group) {
        tma_load_5d(base + Traits::kRevDo + group * kTileBytes, &maps.d_o, bar, 0, p.has_d_o ? chunk.token : -kChunk,
                    work.half + group, work.head, chunk.batch);
      }
    } else {
      for (int group = 0; group < Traits::kHalves; ++group) {
        // A transition has no values: outside the tensor as well.
        tma_load_5d(base + Traits::kFwdV + group * kTileBytes, &maps.v, bar, 0,
                    work.transition() ? -kChunk : chunk.token, work.half + group, work.head, chunk.batch);
      }
    }
  }
  if (kReverse && work.makes_dh0(p)) {  // dO of the last step once more, for add_rest_to_dh0(): dv has taken its place
    const ChunkInfo chunk = work.info(work.chunk(work.steps - 1));
    mbarrier_wait(bars.empty(cursor.stage), cursor.phase ^ 1);
    mbarrier_arrive_expect(bars.loaded(cursor.stage), Traits::kHalves * kTileBytes);
    for (int group = 0; group < Traits::kHalves; ++group) {
      tma_load_5d(smem + cursor.stage * Traits::kRevStage + Traits::kRevDo + group * kTileBytes, &maps.d_o,
                  bars.loaded(cursor.stage), 0, chunk.token, work.half + group, work.head, chunk.batch);
    }
    cursor.advance();
  }
}

// One warp: the gate vectors into the stages; the reverse pass keeps them for the gradients.
template <typename T, Variant kVariant, bool kReverse>
__device__ __forceinline__ void make_gate_stages(const Args& p, PassWork work, uint32_t smem, const PassBarriers& bars,
                                                 int lane) {
  using Traits = PassTraits<kVariant>;
  StageCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  // Two chunks' are on their way while a stage is waited for: beside the copy engine's loads they take longer than a
  // step.
  auto load = [&](int step) {
    return load_gates(p, work.info(work.chunk(min(step, work.steps - 1))), work.head, lane);
  };
  const auto make = [&](int step, RawGates& raw) {
    const int c = work.chunk(step), valid = work.info(c).valid;
    constexpr bool keeps = kReverse;
    const Gates gates = make_gates(p, raw, valid, lane);
    raw = load(step + 2);
    const bool small = keeps && any_small_beta(gates, p.small_beta, valid, lane);
    mbarrier_wait(bars.empty(cursor.stage), cursor.phase ^ 1);
    store_pass_gates<T>(smem + Traits::kGates + cursor.stage * kPassGateBytes, gates, p.scale, p.small_beta, lane);
    arrive_warp(bars.gates(cursor.stage), lane);
    if (keeps) {
      const int64_t tile = work.tile(p, c);
      float2* kept = reinterpret_cast<float2*>(p.gates + tile * p.gate_stride) + lane;
      kept[0] = gates.cumsum;
      kept[kChunk / 2] = gates.gamma;
      kept[kChunk] = gates.ratio;
      kept[3 * kChunk / 2] = gates.beta;
      if (small) {
        if (starts_beside_plan<kVariant>(p)) wait_for_predecessors();  // for the list
        if (lane == 0) note_small_beta(p, static_cast<int>(tile));
      }
      __syncwarp();
      if (lane == 0) store_shared_release(smem + Traits::kMade, step + 1);
    }
    cursor.advance();
  };
  if (work.steps == 0) return;
  // By turns in two places: to move one to the other would be to wait for it.
  RawGates even = load(0), odd = load(1);
  for (int step = 0; step < work.steps; step += 2) {
    make(step, even);
    if (step + 1 < work.steps) make(step + 1, odd);
  }
}

// The cumsum at a thread's two rows; past the end -infinity, so that G is 0 there.
__device__ __forceinline__ void load_row_cumsums(float (&c_row)[2], uint32_t sGates, int valid, const Lane& at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * at.warp + at.lane / 4 + 8 * h;
    c_row[h] = row < valid ? load_shared_f1(sGates + row * 4) : -INFINITY;
  }
}

// Which packed pairs of a thread lie on or below the diagonal of a block of 16 x 16 on it (strictly: below it alone):
// words to mask them with, so that what is above (infinite G, whatever A holds there) leaves no trace.
__device__ __forceinline__ void diagonal_masks(uint32_t (&diagonal)[4], int lane, bool strictly) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
    const int below = lane / 4 + 8 * (part % 2) - (8 * (part / 2) + 2 * (lane % 4)) - static_cast<int>(strictly);
    diagonal[part] = (below >= 0 ? 0xffffu : 0u) | (below >= 1 ? 0xffff0000u : 0u);
  }
}

// Where a lane's part of 16 rows by 16 columns j lies in a tile, for loads and stores of four 8x8 matrices.
__device__ __forceinline__ uint32_t block_piece(uint32_t tile, int j, const Lane& at) {
  return tile_piece(tile, 16 * at.warp + (at.lane & 15), 2 * j + (at.lane >> 4));
}

// A tile of A to G o A below the diagonal, of some rows by sixteens.
template <typename T>
__device__ __forceinline__ void gate_tile(uint32_t sGA, uint32_t sGates, int valid, int first, int end,
                                          const uint32_t (&diagonal)[4], const Lane& at) {
  // The loops stay loops: what these warps execute takes instruction fetches from the chain of products.
#pragma unroll 1
  for (int i = first; i < end; ++i) {
    const Lane rows = {i, at.lane};
    float c_row[2];
    load_row_cumsums(c_row, sGates, valid, rows);
#pragma unroll 1
    for (int j = 0; j <= i; ++j) {
      uint32_t a[4];
      load_matrix_x4(block_piece(sGA, j, rows), a[0], a[1], a[2], a[3]);
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
        const float2 c = load_shared_f2(sGates + (16 * j + 8 * (part / 2) + 2 * (at.lane % 4)) * 4);
        const float2 x = unpack2<T>(a[part]);
        a[part] = pack2<T>(exp2_approx(c_row[part % 2] - c.x) * x.x, exp2_approx(c_row[part % 2] - c.y) * x.y) &
                  (j < i ? ~0u : diagonal[part]);
      }
      store_matrix_x4(block_piece(sGA, j, rows), a[0], a[1], a[2], a[3]);
    }
    // Above the diagonal products take the other block of the same 32 x 32 alone.
    if (i % 2 == 0) store_matrix_x4(block_piece(sGA, i + 1, rows), 0, 0, 0, 0);
  }
}

// A warp's rows of P, out of Q K^T. c_row: the gates' sums of a lane's two rows.
template <typename T>
__device__ __forceinline__ void store_P(uint32_t tile, const float (&qk)[32], const float (&c_row)[2], uint32_t sGates,
                                        const uint32_t (&diagonal)[4], float scale, const Lane& at) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t packed[4] = {};
    if (j <= at.warp) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int i = 8 * j + 4 * (part / 2) + 2 * (part % 2);
        const float2 c = load_shared_f2(sGates + (16 * j + 8 * (part / 2) + 2 * (at.lane % 4)) * 4);
        const float g0 = exp2_approx(c_row[part % 2] - c.x), g1 = exp2_approx(c_row[part % 2] - c.y);
        packed[part] = pack2<T>(scale * g0 * qk[i], scale * g1 * qk[i + 1]) & (j < at.warp ? ~0u : diagonal[part]);
      }
    }
    store_matrix_x4(block_piece(tile, j, at), packed[0], packed[1], packed[2], packed[3]);
  }
}

// One warpgroup: in each stage A becomes G o A below the diagonal (on it both are 1: what that multiplies the state
// groups add in fp32), and in the reverse pass P = scale G o (Q K^T) comes beside it.
template <typename T, Variant kVariant, bool kReverse>
__device__ __forceinline__ void make_stages(const Args& p, PassWork work, uint32_t smem, const PassBarriers& bars,
                                            Lane at) {
  using Traits = PassTraits<kVariant>;
  StageCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    // Addresses made from these are made again in each step: few registers.
    recompute_from(at.warp, at.lane);
    const int valid = work.info(work.chunk(step)).valid;
    const uint32_t base = smem + cursor.stage * (kReverse ? Traits::kRevStage : Traits::kFwdStage);
    const uint32_t sGA = base + (kReverse ? Traits::kRevGA : Traits::kFwdGA);
    const uint32_t sGates = smem + Traits::kGates + cursor.stage * kPassGateBytes;
    static_assert(Traits::kFwdK == Traits::kRevK);
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ;
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (valid < kChunk) {
      const int thread = 32 * at.warp + at.lane;
      // V or dO, K, and Q.
#pragma unroll 1
      for (int tile = 0; tile < (kReverse ? 6 : 4); ++tile) {
        static_assert(Traits::kRevQ == 2 * kTileBytes && Traits::kRevDo == 4 * kTileBytes &&
                      Traits::kFwdV == 2 * kTileBytes);
        zero_tail(base + tile * kTileBytes, valid, thread, 128);
      }
      zero_tail(sGA, valid, thread, 128);
      fence_proxy_async();
      named_barrier_sync(kPrepareBarrier, 128);
    }
    if constexpr (kReverse) {
      float qk[32];
      start_query_key_products<T>(qk, sQ, sK);
      mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
      float c_row[2];
      load_row_cumsums(c_row, sGates, valid, at);
      wgmma_wait<0>();
      pin(qk);
      recompute_from(at.warp, at.lane);
      uint32_t diagonal[4];
      diagonal_masks(diagonal, at.lane, false);
      store_P<T>(base + Traits::kRevP, qk, c_row, sGates, diagonal, p.scale, at);
    } else {
      mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    }
    recompute_from(at.warp, at.lane);
    uint32_t diagonal[4];
    diagonal_masks(diagonal, at.lane, true);
    // Rows by sixteens: none, the last, the first two, the third. A quarter of the multiprocessor has a warp of each
    // group, and what one of them executes is what the state groups' there wait for: P's first warp has the least to do
    // and its last one the most, and the first quarter has the gates' warp as well.
    const int first = at.warp == 1 ? 3 : at.warp == 2 ? 0 : 2, end = at.warp == 0 ? 0 : at.warp == 2 ? 2 : first + 1;
    gate_tile<T>(sGA, sGates, valid, first, end, diagonal, at);
    fence_proxy_async();
    arrive_warp(bars.gated(cursor.stage), at.lane);
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
