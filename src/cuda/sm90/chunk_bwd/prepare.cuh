// Chunk-parallel preparation: gate vectors, G o A (A taken or solved for) and P of every chunk and value head.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kPrepareThreads = 128;  // one warpgroup: it owns the 64 x 64 products

struct PrepareSmem {
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kTokensBytes;
  static constexpr uint32_t kTile = kK + kTokensBytes;  // P or G o A on its way out
  static constexpr uint32_t kGates = kTile + kTileBytes;
  static constexpr int kGateHeads = kPrepareThreads / 32;  // value heads whose gates are made at once, a warp each
  static constexpr uint32_t kBarrier = kGates + kGateHeads * kGateBytes;
  static constexpr uint32_t kKkt = kBarrier + 16;  // K K^T in fp32, only when A is solved for
  // 68: rows stay 16-byte aligned, and the four-row steps of the accumulator's stores fall into different banks.
  static constexpr uint32_t kKktStride = 68 * 4;
  // 1024: the tiles' alignment, made up by hand.
  static constexpr uint32_t bytes(bool has_A) { return 1024 + kKkt + (has_A ? 0 : 64 * kKktStride); }
};

// Cumulative log2 decay and what follows from it, by one warp: lane l has tokens 2l and 2l + 1.
__device__ __forceinline__ void make_gates(const ChunkBackwardParams& p, const ChunkInfo& chunk, int head, int tile,
                                           int lane, uint32_t smem) {
  constexpr float kLog2E = 1.4426950408889634f;
  float cumsum[2] = {0.0f, 0.0f}, beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    // Past the end: a cumsum stays at its last value, decays are 0.
    const int token = chunk.token + (p.g_is_cumsum ? min(row, chunk.valid - 1) : row);
    const bool inside = row < chunk.valid;
    if (p.g.data != nullptr && (inside || p.g_is_cumsum)) {
      cumsum[i] = load_element(p.g, row_offset(p.g, chunk.batch, token, head));
    }
    beta[i] = !inside                  ? 0.0f
              : p.beta.data == nullptr ? 1.0f
                                       : load_element(p.beta, row_offset(p.beta, chunk.batch, chunk.token + row, head));
  }
  if (!p.g_is_cumsum) {
    constexpr float kMinLogDecay = -80.0f;  // docs/math.md; a NaN stays
#pragma unroll
    for (int i = 0; i < 2; ++i) cumsum[i] = cumsum[i] < kMinLogDecay ? kMinLogDecay : cumsum[i];
    float sum = cumsum[0] + cumsum[1];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    cumsum[0] = sum - cumsum[1];
    cumsum[1] = sum;
  }
  const bool small = (2 * lane < chunk.valid && fabsf(beta[0]) < kSmallBeta) ||
                     (2 * lane + 1 < chunk.valid && fabsf(beta[1]) < kSmallBeta);
  if (__any_sync(0xffffffffu, small) && lane == 0) p.small_tiles[atomicAdd(p.small_count, 1)] = tile;
  const float last = __shfl_sync(0xffffffffu, cumsum[1], 31) * kLog2E;
  const float c0 = cumsum[0] * kLog2E, c1 = cumsum[1] * kLog2E;
  const uint32_t at = smem + static_cast<uint32_t>(lane) * 8;
  store_shared_f2(at, c0, c1);
  store_shared_f2(at + kGammaOffset, exp2_approx(c0), exp2_approx(c1));
  store_shared_f2(at + kRatioOffset, exp2_approx(last - c0), exp2_approx(last - c1));
  store_shared_f2(at + kBetaOffset, beta[0], beta[1]);
}

// `bytes` from shared to global memory, by the whole block.
__device__ __forceinline__ void copy_out(void* global, uint32_t smem, uint32_t bytes, int thread) {
  uint4* out = static_cast<uint4*>(global);
  for (uint32_t i = thread; i < bytes / 16; i += kPrepareThreads) out[i] = load_shared_u4(smem + i * 16);
}

template <typename T, bool kHasA>
__global__ __launch_bounds__(kPrepareThreads, kHasA ? 4 : 3) void sm90_chunk_bwd_prepare_kernel(
    const ChunkBackwardParams p, const __grid_constant__ ChunkBackwardMaps maps) {
  launch_dependents();
  wait_for_predecessors();
  const int slot = blockIdx.x / p.Hq, key_head = blockIdx.x % p.Hq;
  if (slot >= total_chunks(p)) return;
  const ChunkInfo chunk = chunk_info(p, slot);
  if (chunk.valid <= 0) return;

  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const uint32_t sQ = smem + PrepareSmem::kQ, sK = smem + PrepareSmem::kK, sTile = smem + PrepareSmem::kTile;
  const uint32_t sGates = smem + PrepareSmem::kGates, barrier = smem + PrepareSmem::kBarrier,
                 sKkt = smem + PrepareSmem::kKkt;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;

  if (thread == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, 2 * kTokensBytes);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(sQ + half * kTileBytes, &maps.q, barrier, 0, chunk.token, half, key_head, chunk.batch);
      tma_load_5d(sK + half * kTileBytes, &maps.k, barrier, 0, chunk.token, half, key_head, chunk.batch);
    }
  }
  // What the first heads need besides is fetched while q and k are on their way.
  auto make_gates_from = [&](int first) {
    const int head = first + warp;
    if (head < (key_head + 1) * p.group) {
      make_gates(p, chunk, head, slot * p.Hv + head, lane, sGates + warp * kGateBytes);
    }
  };
  uint4 a[4];
  auto fetch_A = [&](int head) {
    constexpr int kRows = kPrepareThreads / 8;
    const uint16_t* from = static_cast<const uint16_t*>(p.A.data) +
                           row_offset(p.A, chunk.batch, chunk.token + thread / 8, head) + thread % 8 * 8;
#pragma unroll
    for (int r = 0; r < 4; ++r, from += kRows * p.A.stride[1]) {
      a[r] = make_uint4(0, 0, 0, 0);
      if (thread / 8 + kRows * r < chunk.valid) a[r] = *reinterpret_cast<const uint4*>(from);
    }
  };
  make_gates_from(key_head * p.group);
  if constexpr (kHasA) fetch_A(key_head * p.group);
  __syncthreads();
  mbarrier_wait(barrier, 0);
  if (chunk.valid < kChunk) {
    for (int half = 0; half < 2; ++half) {
      zero_tail(sQ + half * kTileBytes, chunk.valid, thread, kPrepareThreads);
      zero_tail(sK + half * kTileBytes, chunk.valid, thread, kPrepareThreads);
    }
    fence_proxy_async();
    __syncthreads();
  }

  // Q K^T, and K K^T where the inverse is needed.
  float qk[32], kk[32];
  const uint64_t q_desc = wgmma_descriptor(sQ), k_desc = wgmma_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t at = (step / 4) * kTileBytes + (step % 4) * 32;
    if (step == 0) {
      mma_ss_n64_init<T>(qk, wgmma_advance(q_desc, at), wgmma_advance(k_desc, at));
    } else {
      mma_ss_n64<T>(qk, wgmma_advance(q_desc, at), wgmma_advance(k_desc, at));
    }
  }
  if constexpr (!kHasA) {
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint32_t at = (step / 4) * kTileBytes + (step % 4) * 32;
      if (step == 0) {
        mma_ss_n64_init<T>(kk, wgmma_advance(k_desc, at), wgmma_advance(k_desc, at));
      } else {
        mma_ss_n64<T>(kk, wgmma_advance(k_desc, at), wgmma_advance(k_desc, at));
      }
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(qk);
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  if constexpr (!kHasA) {
    pin(kk);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        store_shared_f2(sKkt + (row + 8 * h) * PrepareSmem::kKktStride + (8 * j + column) * 4, kk[4 * j + 2 * h],
                        kk[4 * j + 2 * h + 1]);
      }
    }
  }

  for (int member = 0; member < p.group; ++member) {
    const int head = key_head * p.group + member;
    const int64_t tile = static_cast<int64_t>(slot) * p.Hv + head;
    if (member > 0 && member % PrepareSmem::kGateHeads == 0) make_gates_from(head);
    __syncthreads();
    const uint32_t gates = sGates + member % PrepareSmem::kGateHeads * kGateBytes;
    copy_out(p.gates + tile * kGateVectors * kChunk, gates, kGateBytes, thread);

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
      store_matrix_x4(tile_piece(sTile, 16 * warp + (lane & 15), 2 * j + (lane >> 4)), packed[0], packed[1], packed[2],
                      packed[3]);
    }
    __syncthreads();
    copy_out(p.P + tile * kTileBytes, sTile, kTileBytes, thread);

    if constexpr (kHasA) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = (thread + r * kPrepareThreads) / 8, piece = thread % 8;
        const uint32_t words[4] = {a[r].x, a[r].y, a[r].z, a[r].w};
        uint32_t gated[4];
        const float c = load_shared_f1(gates + i * 4);
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int col = 8 * piece + 2 * w;
          const float2 other = load_shared_f2(gates + col * 4);
          const float2 x = unpack2<T>(words[w]);
          gated[w] = pack2<T>(col <= i ? x.x * exp2_approx(c - other.x) : 0.0f,
                              col + 1 <= i ? x.y * exp2_approx(c - other.y) : 0.0f);
        }
        *reinterpret_cast<uint4*>(p.GA + tile * kTileBytes + tile_piece(0, i, piece)) =
            make_uint4(gated[0], gated[1], gated[2], gated[3]);
      }
      if (member + 1 < p.group) fetch_A(head + 1);
    } else {
      __syncthreads();
      // Forward substitution, a thread a column: x_i = [i = column] - beta_i sum_j<i (K K^T)_ij x_j.
      if (thread < kChunk) {
        float x[kChunk];
        const float c_column = load_shared_f1(gates + thread * 4);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          float sum = 0.0f;
#pragma unroll
          for (int j = 0; j < i; j += 4) {
            const float4 l = load_shared_f4(sKkt + i * PrepareSmem::kKktStride + j * 4);
            sum += l.x * x[j];
            if (j + 1 < i) sum += l.y * x[j + 1];
            if (j + 2 < i) sum += l.z * x[j + 2];
            if (j + 3 < i) sum += l.w * x[j + 3];
          }
          x[i] = (i == thread ? 1.0f : 0.0f) - load_shared_f1(gates + kBetaOffset + i * 4) * sum;
          const bool kept = i >= thread && i < chunk.valid;
          const float ga = kept ? x[i] * exp2_approx(load_shared_f1(gates + i * 4) - c_column) : 0.0f;
          const uint16_t bits = static_cast<uint16_t>(pack2<T>(ga, 0.0f) & 0xffffu);
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile_piece(sTile, i, thread / 8) + (thread % 8) * 2), "h"(bits)
                       : "memory");
        }
      }
      __syncthreads();
      copy_out(p.GA + tile * kTileBytes, sTile, kTileBytes, thread);
    }
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm90
