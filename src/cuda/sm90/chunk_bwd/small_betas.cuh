// dbeta and dv of the rows that the reverse pass left as Z (|beta| < kSmallBeta), exactly and without a division:
// dbeta = <Z, error>, error = v - gamma S^T k - sum_{j < i} G_ij (K K^T)_ij V'_j, and dv = beta Z. Such rows are rare
// (most blocks look at 64 betas and leave), so this is plain code, a warp a row.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kSmallBetasThreads = 128;

// Element of tiles [halves of the columns][`rows` rows][64] in memory.
template <typename T>
__device__ __forceinline__ float tile_element(const uint8_t* tiles, int rows, int row, int column) {
  const uint32_t at = tile_piece((column / 64) * rows * 128, row, (column % 64) / 8) + (column % 8) * 2;
  return unpack2<T>(*reinterpret_cast<const uint16_t*>(tiles + at)).x;
}

template <typename T>
__global__ __launch_bounds__(kSmallBetasThreads) void sm90_chunk_bwd_small_betas_kernel(const ChunkBackwardParams p) {
  const int slot = blockIdx.x / p.Hv, head = blockIdx.x % p.Hv, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (slot >= total_chunks(p)) return;
  const ChunkInfo chunk = chunk_info(p, slot);
  const int64_t tile = static_cast<int64_t>(slot) * p.Hv + head;
  const float* gates = p.gates + tile * kGateVectors * kChunk;
  const uint8_t* state = p.states + tile * kStateBytes;
  const uint8_t* v_new = p.v_new + tile * kTokensBytes;
  const int row_of_thread = threadIdx.x % kChunk;
  const bool small = row_of_thread < chunk.valid && fabsf(gates[3 * kChunk + row_of_thread]) < kSmallBeta;
  if (!__syncthreads_or(small)) return;

  auto key = [&](int row, int column) {
    return load_element(p.k, row_offset(p.k, chunk.batch, chunk.token + row, head / p.group) + column * p.k.stride[3]);
  };
  for (int row = warp; row < chunk.valid; row += kSmallBetasThreads / 32) {
    const float beta = gates[3 * kChunk + row];
    if (!(fabsf(beta) < kSmallBeta)) continue;
    float error[4] = {};  // of columns lane, lane + 32 ..
    for (int column = 0; column < kDim; ++column) {
      const float x = key(row, column);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        error[i] -= x * tile_element<T>(state, kDim, lane + 32 * i, column);  // S^T: rows are V
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t offset = row_offset(p.v, chunk.batch, chunk.token + row, head) + (lane + 32 * i) * p.v.stride[3];
      error[i] = load_element(p.v, offset) + gates[kChunk + row] * error[i];
    }
    for (int j = 0; j < row; ++j) {
      float kk = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) kk += key(row, lane + 32 * i) * key(j, lane + 32 * i);
      kk = warp_sum(kk) * exp2_approx(gates[row] - gates[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) error[i] -= kk * tile_element<T>(v_new, kChunk, j, lane + 32 * i);
    }
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t offset = row_offset(p.dv, chunk.batch, chunk.token + row, head) + lane + 32 * i;
      const float z = load_element(p.dv, offset);
      dot += z * error[i];
      store_element(p.dv, offset, beta * z);
    }
    dot = warp_sum(dot);
    if (lane == 0 && p.dbeta.data != nullptr) {
      store_element(p.dbeta, row_offset(p.dbeta, chunk.batch, chunk.token + row, head), dot);
    }
  }
}

}  // namespace flash_qla::cuda::sm90
