// How fast states decay, and how much they may grow, over the chunks of the windows before the runs of a forward pass
// (segments.cuh), where prepare.cuh is not there to tell: of one sequence whose passes make their own tiles.
#pragma once

#include "cuda/sm90/chunk_bwd/gates.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kDecaySumsThreads = 2 * kChunk;

inline unsigned decay_sums_blocks(const Args& p) {
  const int edges = (p.chunk_bound - 1) / p.run_chunks;
  return static_cast<unsigned>(edges * kMostWarmup * p.Hq);
}

// A block a chunk of a window and key head, two threads a token. The kernel after it is launched when it has ended, so
// that clusters of that one find whole pairs of multiprocessors.
template <typename T>
__global__ __launch_bounds__(kDecaySumsThreads) void sm90_chunk_bwd_decay_sums_kernel(const Args p) {
  const int key_head = static_cast<int>(blockIdx.x) % p.Hq, place = static_cast<int>(blockIdx.x) / p.Hq;
  const int c = (place / kMostWarmup + 1) * p.run_chunks - 1 - place % kMostWarmup;
  const SequenceInfo sequence = sequence_info(p, 0);
  if (c < sequence.chunks()) {
    const ChunkInfo chunk = {sequence.token + c * kChunk, min(kChunk, sequence.length - c * kChunk), 0, 0};
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = thread / 2;
    float square = 0.0f;
    if (row < chunk.valid) {
      const auto* key =
          reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.k.data) +
                                         row_offset(p.k, 0, chunk.token + row, key_head) + thread % 2 * (kHeadDim / 2));
#pragma unroll
      for (int piece = 0; piece < 8; ++piece) add_squares<T>(square, key[piece]);
    }
    square += __shfl_xor_sync(0xffffffffu, square, 1);
    __shared__ float betas[kChunk], sums[kDecaySumsThreads / 32 + 1];
    for (int head = key_head * p.group; head < (key_head + 1) * p.group; ++head) {
      if (warp == 0) {
        const Gates gates = make_gates(p, load_gates(p, chunk, head, lane), chunk.valid, lane);
        if (lane == 31) sums[kDecaySumsThreads / 32] = gates.cumsum.y / kLog2e;
        betas[2 * lane] = gates.beta.x;
        betas[2 * lane + 1] = gates.beta.y;
      }
      __syncthreads();
      const float factor = fabsf(1.0f - betas[row] * square);
      // NaN stays; an odd thread has its neighbour's row.
      const float growth = warp_sum(factor <= 1.0f || thread % 2 == 1 ? 0.0f : logf(factor));
      if (lane == 0) sums[warp] = growth;
      __syncthreads();
      if (thread == 0) {
        const int64_t tile = static_cast<int64_t>(sequence.first_slot + c) * p.Hv + head;
        p.log_decay_sums[tile] = sums[4] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
      }
    }
    if (thread == 0) p.prepared[static_cast<int64_t>(sequence.first_slot + c) * p.Hq + key_head] = 1;
  }
  wait_for_predecessors();  // who comes after this one waits for this one alone
}

}  // namespace flash_qla::cuda::sm90::bwd
