// dbeta and dv of the rows that the reverse pass left as Z (|beta| < small_beta), exactly and without a division:
// dbeta = <Z, error>, error = v - gamma S^T k - sum_{j < i} G_ij (K K^T)_ij V'_j, j from the start of the row's pair of
// chunks, where S is, and dv = beta Z. Such rows are rare (most blocks look at 64 betas and leave), so this is plain
// code, a block a row at a time.
// The kernel comes behind all others but those that correct single heads. It zeroes the gradients of tokens outside all
// sequences as well, and lists the heads that last_tokens.cuh corrects.
#pragma once

#include "cuda/sm90/chunk_bwd/last_window.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kSmallBetasThreads = kHeadDim;  // one of V each, and a token of a pair each
static_assert(kSmallBetasThreads >= 2 * kChunk);
constexpr int kSmallBetasBlocks = 528;  // four for each of an H200's multiprocessors

// Zeroes `columns` elements of each row [0, token, head] from `begin` on.
__device__ __forceinline__ void zero_rows(const StridedTensor& t, int begin, int end, int heads, uint32_t columns) {
  if (t.data == nullptr) return;
  for (int token = begin + static_cast<int>(blockIdx.x); token < end; token += kSmallBetasBlocks) {
    for (uint32_t i = threadIdx.x; i < static_cast<uint32_t>(heads) * columns; i += kSmallBetasThreads) {
      store_element(t, row_offset(t, 0, token, i / columns) + i % columns * t.stride[3], 0.0f);
    }
  }
}

// Of tokens before the first sequence and after the last.
__device__ __forceinline__ void zero_tokens(const Args& p, int begin, int end) {
  if (begin >= end) return;
  zero_rows(p.dq, begin, end, p.Hq, kHeadDim);
  zero_rows(p.dk, begin, end, p.Hq, kHeadDim);
  zero_rows(p.dv, begin, end, p.Hv, kHeadDim);
  zero_rows(p.dg, begin, end, p.Hv, 1);
  zero_rows(p.dbeta, begin, end, p.Hv, 1);
}

// The tokens of all sequences, which follow one another.
__device__ __forceinline__ int2 all_tokens(const Args& p) {
  if (p.cu_seqlens == nullptr) return make_int2(0, p.T);
  return make_int2(given_offset(p, 0), given_offset(p, p.N));
}

// Eight elements from memory, 16-byte aligned, times as many floats.
template <typename T>
__device__ __forceinline__ float dot8(const void* x, const float* y) {
  const uint4 bits = *static_cast<const uint4*>(x);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<T>(words[i]);
    sum += pair.x * y[2 * i] + pair.y * y[2 * i + 1];
  }
  return sum;
}

template <typename T>
__global__ __launch_bounds__(kSmallBetasThreads) void sm90_chunk_bwd_small_betas_kernel(const Args p) {
  launch_dependents();
  const int2 tokens = all_tokens(p);
  wait_for_predecessors();
  // Here and not while the call is planned: that kernel's blocks would lie where clusters of the passes are to start,
  // and these would be spread over the pairs of multiprocessors that are left. Usually there is nothing to zero.
  zero_tokens(p, 0, tokens.x);
  zero_tokens(p, tokens.y, p.T);
  __shared__ WindowSums window_sums;
  for (int item = blockIdx.x; p.corrects_last && item < p.N * p.Hv; item += gridDim.x) {
    const int n = item / p.Hv;
    const SequenceInfo sequence = sequence_info(p, n);
    if (sequence.length == 0 || find_window(p, sequence, item - n * p.Hv, window_sums).tokens == 0) continue;
    if (threadIdx.x == 0) p.last_items[atomicAdd(p.last_count, 1)] = item;
  }
  __shared__ float key[kHeadDim], coefficient[2 * kChunk], warp_dots[kSmallBetasThreads / 32];
  const int thread = threadIdx.x, count = *p.small_count;
  for (int entry = blockIdx.x; entry < count; entry += gridDim.x) {
    const int64_t tile = p.small_tiles[entry];
    const int slot = static_cast<int>(tile / p.Hv), head = static_cast<int>(tile % p.Hv);
    const ChunkInfo chunk = chunk_info(p, slot);
    const float* gates = p.gates + tile * p.gate_stride;
    const float* betas = gates + 3 * kChunk;
    const SequenceInfo sequence = sequence_info(p, chunk.sequence);
    const int place = slot - sequence.first_slot, early = place % 2 * kChunk;  // tokens of the pair before this chunk
    const uint8_t* state =
        p.states + (static_cast<int64_t>(sequence.first_pair + place / 2) * p.Hv + head) * kStateBytes;
    // Of the pair's first chunk.
    const int64_t first_tile = tile - (early > 0 ? p.Hv : 0);
    const uint8_t* v_new = p.v_new + first_tile * kTokensBytes;
    const float* first_gates = p.gates + first_tile * p.gate_stride;
    const float early_decay = early > 0 ? first_gates[2 * kChunk - 1] : 1.0f;
    auto key_row = [&](int row) {
      return static_cast<const uint16_t*>(p.k.data) + row_offset(p.k, chunk.batch, chunk.token + row, head / p.group);
    };
    // All betas at once, by every warp: looked at one after another they would be 64 waits for memory.
    uint64_t small_rows = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 32 * half + thread % 32;
      const bool small = fabsf(betas[row]) < p.small_beta && row < chunk.valid;
      small_rows |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, small)) << (32 * half);
    }
    for (; small_rows != 0; small_rows &= small_rows - 1) {
      const int row = __ffsll(static_cast<long long>(small_rows)) - 1;
      key[thread] = unpack2<T>(key_row(row)[thread]).x;
      __syncthreads();
      // S^T k: tiles [2 halves of K][128 of V][64 of K]
      float read = 0.0f;
#pragma unroll 4
      for (int piece = 0; piece < kHeadDim / 8; ++piece) {
        const uint32_t at = (piece / 8) * kStateHalfBytes + tile_piece(0, thread, piece % 8);
        read += dot8<T>(state + at, key + 8 * piece);
      }
      // G_ij (K K^T)_ij, a thread a token of the pair
      if (thread < early + row) {
        float kk = 0.0f;
        // By eight: all sixteen pieces at once take more registers than the compiler gives them, and spill.
#pragma unroll 8
        for (int piece = 0; piece < kHeadDim / 8; ++piece)
          kk += dot8<T>(key_row(thread - early) + 8 * piece, key + 8 * piece);
        coefficient[thread] = kk * (thread < early ? gates[kChunk + row] * first_gates[2 * kChunk + thread]
                                                   : exp2_approx(gates[row] - gates[thread - early]));
      }
      __syncthreads();
      float error = load_element(p.v, row_offset(p.v, chunk.batch, chunk.token + row, head) + thread * p.v.stride[3]) -
                    gates[kChunk + row] * early_decay * read;
#pragma unroll 8
      for (int j = 0; j < early + row; ++j) {
        const int64_t at = j / kChunk * p.Hv * static_cast<int64_t>(kTokensBytes) + (thread / 64) * kTileBytes +
                           tile_piece(0, j % kChunk, thread % 64 / 8) + thread % 8 * 2;
        error -= coefficient[j] * unpack2<T>(*reinterpret_cast<const uint16_t*>(v_new + at)).x;
      }
      const int64_t offset = row_offset(p.dv, chunk.batch, chunk.token + row, head) + thread;
      const float z = load_element(p.dv, offset);
      store_element(p.dv, offset, betas[row] * z);
      const float dot = warp_sum(z * error);
      if (thread % 32 == 0) warp_dots[thread / 32] = dot;
      __syncthreads();
      if (thread == 0 && p.dbeta.data != nullptr) {
        store_element(p.dbeta, row_offset(p.dbeta, chunk.batch, chunk.token + row, head),
                      warp_dots[0] + warp_dots[1] + warp_dots[2] + warp_dots[3]);
      }
    }
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
