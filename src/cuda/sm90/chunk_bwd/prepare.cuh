// Chunk-parallel preparation: gate vectors, G o A and P of every chunk and value head, for serial passes that do not
// make them themselves (passes/kernel.cuh), and for segments how much a chunk lets a state grow or decay
// (segments.cuh). A piece of work is a (chunk, key head), its value heads one after another; the four warpgroups of a
// block work by themselves. Of links (kLinks) a piece is a (chunk, value head) that they want. Where the passes leave
// half of the device idle this runs beside them, on the other half, and they wait for each chunk.
#pragma once

#include "cuda/sm90/chunk_bwd/gates.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90::bwd {

// In which order chunks are made ready for the passes, which go through several pieces (whole sequences, or segments)
// at the same time, each from both ends at once.

// How many of `total` things that follow one another a piece has, of `units` pieces; the last one may have fewer.
__device__ __forceinline__ uint32_t piece_length(uint32_t units, uint32_t total) { return (total + units - 1) / units; }

// The turn-th thing of units * piece_length(units, total): of every piece in turns, its ends first and its middle last.
// `total` or more: there is no such thing in the last piece.
__device__ __forceinline__ uint32_t outer_first(uint32_t turn, uint32_t units, uint32_t total) {
  const uint32_t length = piece_length(units, total), step = turn / units, piece = turn - step * units;
  return piece * length + (step % 2 == 0 ? step / 2 : length - 1 - step / 2);
}

struct PrepareTraits {
  static constexpr int kGroups = 4;          // warpgroups of a block
  static constexpr int kGroupThreads = 128;  // they own the 64 x 64 products
  static constexpr int kThreads = kGroups * kGroupThreads;

  // Of each group.
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kTokensBytes;
  static constexpr uint32_t kTile = kK + kTokensBytes;  // P on its way out
  static constexpr uint32_t kGates = kTile + kTileBytes;
  static constexpr int kGateHeads = kGroupThreads / 32;  // value heads whose gates are made at once, a warp each
  static constexpr uint32_t kGroupBytes = kGates + kGateHeads * kAllGateBytes;
  static_assert(kGroupBytes % 1024 == 0, "the tiles' alignment");

  // Of all: a barrier and four sums each.
  static constexpr uint32_t kBarriers = kGroups * kGroupBytes;
  static constexpr uint32_t kSums = kBarriers + kGroups * 8;
  // 1024: the tiles' alignment, made up by hand. More than half of a multiprocessor's: one block each.
  static constexpr uint32_t kBytes = 1024 + kSums + kGroups * 16;
};

// `bytes` from shared to global memory, by the whole group.
__device__ __forceinline__ void copy_out(void* global, uint32_t smem, uint32_t bytes, int thread) {
  uint4* out = static_cast<uint4*>(global);
  for (uint32_t i = thread; i < bytes / 16; i += PrepareTraits::kGroupThreads) out[i] = load_shared_u4(smem + i * 16);
}

struct PrepareWork {
  ChunkInfo chunk;
  int slot, key_head;  // slot < 0: there is no more
  int first_head;      // of the piece
};

// The first piece of work that is there at `at` or a multiple of `step` after it. Segments come from their ends
// inwards, as sequences do: there is what tells how a pass reaches its edge.
__device__ __forceinline__ PrepareWork find_prepare_work(const Args& p, uint32_t* at, uint32_t step) {
  const uint32_t heads = static_cast<uint32_t>(p.Hq);
  const SequenceInfo only = p.N == 1 ? sequence_info(p, 0) : SequenceInfo{};
  const uint32_t total = static_cast<uint32_t>(p.N == 1 ? only.chunks() : total_chunks(p));
  uint32_t units = static_cast<uint32_t>(p.segment_chunks > 0 ? p.segment_bound : p.N);
  uint32_t places = units * piece_length(units, total) * heads;
  // The last unit may be shorter: where its empty places would be all that a second turn has, chunks come as one unit.
  if (total * heads <= step && places > step) {
    units = 1;
    places = total * heads;
  }
  for (; *at < places; *at += step) {
    const uint32_t turn = *at / heads;
    const uint32_t slot = outer_first(turn, units, total);
    if (slot >= total) continue;
    const int offset = static_cast<int>(slot) * kChunk;
    const ChunkInfo chunk = p.N == 1 ? ChunkInfo{only.token + offset, min(kChunk, only.length - offset), 0, 0}
                                     : chunk_info(p, static_cast<int>(slot));
    const int key_head = static_cast<int>(*at - turn * heads);
    if (chunk.valid > 0) return {chunk, static_cast<int>(slot), key_head, key_head * p.group};
  }
  return {{}, -1, 0, 0};
}

// Of links: piece `at` of their list.
__device__ __forceinline__ PrepareWork link_prepare_work(const Args& p, uint32_t at) {
  if (at >= static_cast<uint32_t>(*p.link_tile_count)) return {{}, -1, 0, 0};
  const LinkTile link = p.link_tiles[at];
  const int slot = link.tile / p.Hv, head = link.tile - slot * p.Hv;
  return {{link.token, link.valid, 0, 0}, slot, head / p.group, head};
}

template <typename T, bool kLinks = false>
__global__ __launch_bounds__(PrepareTraits::kThreads,
                             1) void sm90_chunk_bwd_prepare_kernel(const Args p, const __grid_constant__ Maps maps) {
  // In this order: passes beside this kernel find the counters as the kernels before have left them.
  // Of one sequence a block knows its first pieces by itself and makes them while the plan kernel runs: it waits before
  // it writes to memory. What came before that kernel has ended when it begins.
  const bool starts_early = p.N == 1 && !p.makes_A;
  const bool tells_growth = p.segment_chunks > 0;
  if (!starts_early) wait_for_predecessors();
  using Traits = PrepareTraits;
  extern __shared__ uint8_t raw_smem[];
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / Traits::kGroupThreads, 0);
  const int thread = threadIdx.x % Traits::kGroupThreads, lane = thread & 31, warp = thread / 32;
  const uint32_t aligned = (smem_address(raw_smem) + 1023u) & ~1023u, smem = aligned + group * Traits::kGroupBytes;
  const uint32_t sQ = smem + Traits::kQ, sK = smem + Traits::kK, sTile = smem + Traits::kTile;
  const uint32_t sGates = smem + Traits::kGates, barrier = aligned + Traits::kBarriers + group * 8;
  const uint32_t sSums = aligned + Traits::kSums + group * 16;
  auto sync = [&] { named_barrier_sync(1 + group, Traits::kGroupThreads); };

  const uint32_t step = gridDim.x * Traits::kGroups;
  uint32_t at = blockIdx.x * Traits::kGroups + group;
  const int members = kLinks ? 1 : p.group;  // value heads of a piece
  const auto find = [&] { return kLinks ? link_prepare_work(p, at) : find_prepare_work(p, &at, step); };
  PrepareWork next = find();
  auto load_tokens = [&](const PrepareWork& work) {
    if (thread > 0 || work.slot < 0) return;
    mbarrier_arrive_expect(barrier, 2 * kTokensBytes);
    uint32_t to = sQ;
    to = recompute(to);  // what follows from it is made again: few registers
    for (int half = 0; half < 2; ++half, to += kTileBytes) {
      tma_load_5d(to, &maps.q, barrier, 0, work.chunk.token, half, work.key_head, work.chunk.batch);
      tma_load_5d(to + kTokensBytes, &maps.k, barrier, 0, work.chunk.token, half, work.key_head, work.chunk.batch);
    }
  };
  if (thread == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  if constexpr (kWarpArrivals == 32) __syncwarp();  // racecheck does not know that it is the same thread which arrives
  load_tokens(next);

  // What a piece's first heads need besides is fetched while the piece before is worked on.
  RawGates raw;
  auto fetch_gates = [&](const PrepareWork& work, int head) {
    if (work.slot >= 0 && head < work.first_head + members) raw = load_gates(p, work.chunk, head, lane);
  };
  auto put_gates = [&](const PrepareWork& work, int head) {
    if (head >= work.first_head + members) return;
    const Gates gates = make_gates(p, raw, work.chunk.valid, lane);
    const uint32_t to = sGates + warp * kAllGateBytes;
    store_gates(to, gates, lane);
    store_pass_gates<T>(to + kGateBytes, gates, p.scale, p.small_beta, lane);
    if (any_small_beta(gates, p.small_beta, work.chunk.valid, lane)) {
      wait_for_predecessors();  // for the list
      if (lane == 0) note_small_beta(p, work.slot * p.Hv + head);
    }
  };
  uint4 a[4];
  auto fetch_A = [&](const PrepareWork& work, int head) {
    if (work.slot < 0) return;
    constexpr int kRows = Traits::kGroupThreads / 8;
    const uint16_t* from = static_cast<const uint16_t*>(p.A.data) +
                           row_offset(p.A, work.chunk.batch, work.chunk.token + thread / 8, head) + thread % 8 * 8;
#pragma unroll
    for (int r = 0; r < 4; ++r, from += kRows * p.A.stride[1]) {
      a[r] = make_uint4(0, 0, 0, 0);
      if (thread / 8 + kRows * r < work.chunk.valid) a[r] = *reinterpret_cast<const uint4*>(from);
    }
  };
  fetch_gates(next, next.first_head + warp);
  fetch_A(next, next.first_head);

  for (uint32_t phase = 0; next.slot >= 0; phase ^= 1) {
    const PrepareWork work = next;
    const int first_head = work.first_head, valid = work.chunk.valid;
    put_gates(work, first_head + warp);
    sync();  // the first time for the barrier too
    mbarrier_wait(barrier, phase);
    if (valid < kChunk) {
      for (int half = 0; half < 2; ++half) {
        zero_tail(sQ + half * kTileBytes, valid, thread, Traits::kGroupThreads);
        zero_tail(sK + half * kTileBytes, valid, thread, Traits::kGroupThreads);
      }
      fence_proxy_async();
      sync();
    }

    float qk[32];
    start_query_key_products<T>(qk, sQ, sK);
    // |k|^2 of a row by two threads, under the products.
    float square = 0.0f;
    if (tells_growth) {
#pragma unroll 2
      for (int piece = 0; piece < 8; ++piece) {
        add_squares<T>(square, load_shared_u4(tile_piece(sK + thread % 2 * kTileBytes, thread / 2, piece)));
      }
      square += __shfl_xor_sync(0xffffffffu, square, 1);
    }
    at += step;
    next = find();
    wgmma_wait<0>();
    pin(qk);
    sync();
    load_tokens(next);  // all have read what is there
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
    // After the first time it costs a few clocks. What the kernel after this one finds is there when it is launched.
    wait_for_predecessors();
    launch_dependents();

    for (int member = 0; member < members; ++member) {
      const int head = first_head + member;
      const int64_t tile = static_cast<int64_t>(work.slot) * p.Hv + head;
      if (member > 0 && member % Traits::kGateHeads == 0) {
        fetch_gates(work, head + warp);
        put_gates(work, head + warp);
        sync();
      }
      const uint32_t gates = sGates + member % Traits::kGateHeads * kAllGateBytes;
      copy_out(p.gates + tile * (kAllGateBytes / 4), gates, kAllGateBytes, thread);
      if (tells_growth) {
        const float factor = fabsf(1.0f - load_shared_f1(gates + kBetaOffset + thread / 2 * 4) * square);
        // NaN stays; an odd thread has its neighbour's row.
        const float growth = warp_sum(factor <= 1.0f || thread % 2 == 1 ? 0.0f : logf(factor));
        if (lane == 0) store_shared_f1(sSums + warp * 4, growth);
      }

      // P
      const float c_row[2] = {load_shared_f1(gates + row * 4), load_shared_f1(gates + row * 4 + 32)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t packed[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
          const int col = 16 * j + 8 * (part / 2) + column, r = row + 8 * (part % 2);
          const float2 c = load_shared_f2(gates + col * 4);
          const float g0 = col <= r ? exp2_approx(c_row[part % 2] - c.x) : 0.0f;
          const float g1 = col + 1 <= r ? exp2_approx(c_row[part % 2] - c.y) : 0.0f;
          const int i = 8 * j + 4 * (part / 2) + 2 * (part % 2);
          packed[part] = pack2<T>(p.scale * g0 * qk[i], p.scale * g1 * qk[i + 1]);
        }
        store_matrix_x4(tile_piece(sTile, 16 * warp + (lane & 15), 2 * j + (lane >> 4)), packed[0], packed[1],
                        packed[2], packed[3]);
      }
      sync();
      if (tells_growth && thread == 0) {
        const float g = load_shared_f1(gates + (kChunk - 1) * 4) / kLog2e;
        p.log_decay_sums[tile] = g + ((load_shared_f1(sSums) + load_shared_f1(sSums + 4)) +
                                      (load_shared_f1(sSums + 8) + load_shared_f1(sSums + 12)));
      }
      copy_out(p.P + tile * kTileBytes, sTile, kTileBytes, thread);

      // G o A below the diagonal, on which both are 1: what that multiplies the passes add in fp32.
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = (thread + r * Traits::kGroupThreads) / 8, piece = thread % 8;
        const uint32_t words[4] = {a[r].x, a[r].y, a[r].z, a[r].w};
        uint32_t gated[4];
        const float c = load_shared_f1(gates + i * 4);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int col = 8 * piece + 2 * w;
          const float2 other = load_shared_f2(gates + col * 4);
          const float2 x = unpack2<T>(words[w]);
          gated[w] = pack2<T>(col < i ? x.x * exp2_approx(c - other.x) : 0.0f,
                              col + 1 < i ? x.y * exp2_approx(c - other.y) : 0.0f);
        }
        *reinterpret_cast<uint4*>(p.GA + tile * kTileBytes + tile_piece(0, i, piece)) =
            make_uint4(gated[0], gated[1], gated[2], gated[3]);
      }
      if (member + 1 < members) {
        fetch_A(work, head + 1);
      } else {
        fetch_gates(next, next.first_head + warp);
        fetch_A(next, next.first_head);
      }
      sync();
    }
    if ((p.beside || p.segment_chunks > 0) && thread == 0) {
      add_release(p.prepared + static_cast<int64_t>(work.slot) * p.Hq + work.key_head, 1);
    }
  }
  wait_for_predecessors();  // who had no work at all
}

}  // namespace flash_qla::cuda::sm90::bwd
