// Chunk-parallel preparation: gate vectors, G o A and P of every chunk and value head, for serial passes that do not
// make them themselves (states.cuh). One block a (chunk, key head), its value heads one after another.
#pragma once

#include "cuda/sm90/chunk_bwd/gates.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kPrepareThreads = 128;  // one warpgroup: it owns the 64 x 64 products

struct PrepareSmem {
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kTokensBytes;
  static constexpr uint32_t kTile = kK + kTokensBytes;  // P on its way out
  static constexpr uint32_t kGates = kTile + kTileBytes;
  static constexpr int kGateHeads = kPrepareThreads / 32;  // value heads whose gates are made at once, a warp each
  static constexpr uint32_t kBarrier = kGates + kGateHeads * kGateBytes;
  static constexpr uint32_t kBytes = 1024 + kBarrier + 8;  // 1024: the tiles' alignment, made up by hand
};

// `bytes` from shared to global memory, by the whole block.
__device__ __forceinline__ void copy_out(void* global, uint32_t smem, uint32_t bytes, int thread) {
  uint4* out = static_cast<uint4*>(global);
  for (uint32_t i = thread; i < bytes / 16; i += kPrepareThreads) out[i] = load_shared_u4(smem + i * 16);
}

template <typename T>
__global__ __launch_bounds__(kPrepareThreads,
                             4) void sm90_chunk_bwd_prepare_kernel(const ChunkBackwardParams p,
                                                                   const __grid_constant__ ChunkBackwardMaps maps) {
  launch_dependents();
  wait_for_predecessors();
  const int slot = blockIdx.x / p.Hq, key_head = blockIdx.x % p.Hq;
  if (slot >= total_chunks(p)) return;
  const ChunkInfo chunk = chunk_info(p, slot);
  if (chunk.valid <= 0) return;

  extern __shared__ uint8_t raw[];
  const uint32_t smem = (smem_address(raw) + 1023u) & ~1023u;
  const uint32_t sQ = smem + PrepareSmem::kQ, sK = smem + PrepareSmem::kK, sTile = smem + PrepareSmem::kTile;
  const uint32_t sGates = smem + PrepareSmem::kGates, barrier = smem + PrepareSmem::kBarrier;
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
    if (head >= (key_head + 1) * p.group) return;
    const RawGates raw = load_gates(p, chunk, head, lane);
    store_gates(sGates + warp * kGateBytes, make_gates(raw, p.g_is_cumsum, lane), lane);
    if (any_small_beta(raw, p.small_beta, chunk.valid, lane) && lane == 0) note_small_beta(p, slot * p.Hv + head);
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
  fetch_A(key_head * p.group);
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

  float qk[32];
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
  wgmma_commit();
  wgmma_wait<0>();
  pin(qk);
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);

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
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm90
