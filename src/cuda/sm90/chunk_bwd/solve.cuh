// A of every chunk and value head where the caller has none: A = (I + strict_lower(diag(beta) K K^T))^-1 by forward
// substitution in fp32, rounded once. One block a (chunk, key head), its value heads one after another; of links
// (kLinks) a (chunk, value head) that they want.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kSolveThreads = 128;  // one warpgroup: it owns K K^T

struct SolveSmem {
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kOut = kK + kTokensBytes;  // A on its way out, rows of 128 bytes
  static constexpr uint32_t kBeta = kOut + kTileBytes;
  static constexpr uint32_t kBarrier = kBeta + kChunk * 4;
  static constexpr uint32_t kKkt = kBarrier + 16;  // K K^T in fp32
  // 68: rows stay 16-byte aligned, and the four-row steps of the accumulator's stores fall into different banks.
  static constexpr uint32_t kKktStride = 68 * 4;
  static constexpr uint32_t kBytes = 1024 + kKkt + 64 * kKktStride;  // 1024: the tiles' alignment, made up by hand
};

template <typename T, bool kLinks = false>
__global__ __launch_bounds__(kSolveThreads, 3) void sm90_chunk_bwd_solve_kernel(const Args p,
                                                                                const __grid_constant__ Maps maps) {
  launch_dependents();
  wait_for_predecessors();
  ChunkInfo chunk{};
  int first_head = 0, key_head = 0;
  if constexpr (kLinks) {
    if (static_cast<int>(blockIdx.x) >= *p.link_tile_count) return;
    const LinkTile link = p.link_tiles[blockIdx.x];
    chunk = {link.token, link.valid, 0, 0};
    first_head = link.tile % p.Hv;
    key_head = first_head / p.group;
  } else {
    const int slot = blockIdx.x / p.Hq;
    key_head = blockIdx.x % p.Hq;
    if (slot >= total_chunks(p)) return;
    chunk = chunk_info(p, slot);
    first_head = key_head * p.group;
  }
  if (chunk.valid <= 0) return;

  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const uint32_t sK = smem + SolveSmem::kK, sOut = smem + SolveSmem::kOut, sBeta = smem + SolveSmem::kBeta;
  const uint32_t barrier = smem + SolveSmem::kBarrier, sKkt = smem + SolveSmem::kKkt;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32;

  if (thread == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(barrier, kTokensBytes);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(sK + half * kTileBytes, &maps.k, barrier, 0, chunk.token, half, key_head, chunk.batch);
    }
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  if (chunk.valid < kChunk) {
    for (int half = 0; half < 2; ++half) zero_tail(sK + half * kTileBytes, chunk.valid, thread, kSolveThreads);
    fence_proxy_async();
    __syncthreads();
  }

  float kk[32];
  const uint64_t k_desc = wgmma_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint64_t at = wgmma_advance(k_desc, (step / 4) * kTileBytes + (step % 4) * 32);
    if (step == 0) {
      mma_ss_n64_init<T>(kk, at, at);
    } else {
      mma_ss_n64<T>(kk, at, at);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(kk);
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      store_shared_f2(sKkt + (row + 8 * h) * SolveSmem::kKktStride + (8 * j + column) * 4, kk[4 * j + 2 * h],
                      kk[4 * j + 2 * h + 1]);
    }
  }

  const int members = kLinks ? 1 : p.group;
  for (int member = 0; member < members; ++member) {
    const int head = first_head + member;
    if (thread < kChunk) {
      const bool inside = thread < chunk.valid;
      store_shared_f1(sBeta + thread * 4,
                      !inside ? 0.0f
                      : p.beta.data == nullptr
                          ? 1.0f
                          : load_element(p.beta, row_offset(p.beta, chunk.batch, chunk.token + thread, head)));
    }
    __syncthreads();
    // A thread a column: x_i = [i = column] - beta_i sum_j<i (K K^T)_ij x_j.
    if (thread < kChunk) {
      float x[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < i; j += 4) {
          const float4 l = load_shared_f4(sKkt + i * SolveSmem::kKktStride + j * 4);
          sum += l.x * x[j];
          if (j + 1 < i) sum += l.y * x[j + 1];
          if (j + 2 < i) sum += l.z * x[j + 2];
          if (j + 3 < i) sum += l.w * x[j + 3];
        }
        x[i] = (i == thread ? 1.0f : 0.0f) - load_shared_f1(sBeta + i * 4) * sum;
        const uint16_t bits = static_cast<uint16_t>(pack2<T>(i >= thread ? x[i] : 0.0f, 0.0f) & 0xffffu);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(sOut + i * 128 + thread * 2), "h"(bits) : "memory");
      }
    }
    __syncthreads();
    for (int piece = thread; piece < chunk.valid * 8; piece += kSolveThreads) {
      uint16_t* to = static_cast<uint16_t*>(p.A.data) + row_offset(p.A, chunk.batch, chunk.token + piece / 8, head) +
                     piece % 8 * 8;
      *reinterpret_cast<uint4*>(to) = load_shared_u4(sOut + piece * 16);
    }
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
