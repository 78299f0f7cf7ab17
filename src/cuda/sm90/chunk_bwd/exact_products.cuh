// What rounding S and dS to the tiles that the gradients take (gradients/kernel.cuh) has left of dg, for small calls.
// Where nothing decays and the final state's gradient is large each token's dg is nearly the one number <dS, S>, a sum
// of 16,384 products of which little is left, and over few tokens the tiles' rounding is most of its error
// (docs/numerics.md). So the passes of small calls leave their states in fp32 as well. With E and H, the rests of S at
// a pair's start and of dS at its end, the gradient of the gate's cumsum at token t lacks
//   scale gamma_t q_t^T E dO_t - gamma_t k_t^T E dv_t - c_t, c_t = (gP / gamma_t) k_t^T H V'_t,
// gamma being counted from the pair's start, and at the pair's last token also gP (<dS, S> - <rounded dS, rounded S>)
// and the sum of all c_t.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/sm90/chunk_bwd/gradients/layout.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kExactProductsThreads = 256;  // a warp has 16 tokens of the pair

// Rests leave the range of fp16 otherwise: of the largest number, 65504, 32 are left.
template <typename T>
inline constexpr float kStateRestScale = std::is_same_v<T, __nv_bfloat16> ? 1.0f : 1024.0f;

struct ExactProductsTile {
  // Rows are K, columns V: eight rows of four words each are in banks of their own.
  static constexpr int kStride = kHeadDim + 8;
  uint16_t rests[kHeadDim * kStride];
};

// <states, grads> less that of their rounded parts, this thread's part, and the rest of one of them into the tile.
template <typename T, bool kOfGrads>
__device__ __forceinline__ float find_rests(ExactProductsTile& tile, const float4* states, const float4* grads) {
  float sum = 0.0f;
  constexpr int kTurns = kHeadDim * kHeadDim / 4 / kExactProductsThreads, kAtOnce = 8;  // loads on their way together
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    float4 loaded[kAtOnce][2];
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      const int i = (turn + at) * kExactProductsThreads + static_cast<int>(threadIdx.x);
      loaded[at][0] = states[i], loaded[at][1] = grads[i];
    }
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      // As the passes' threads hold them (passes/traits.cuh): S^T of 64 of V, a warp 16 of them.
      const int i = (turn + at) * kExactProductsThreads + static_cast<int>(threadIdx.x);
      const int thread = i % 128, lane = thread % 32, block = i / 128 % 16;
      const int v = i / 2048 * 64 + thread / 32 * 16 + lane / 4, k = 8 * block + 2 * (lane % 4);
      const float4 s = loaded[at][0], d = loaded[at][1];
      const float2 s0 = unpack2<T>(pack2<T>(s.x, s.y)), s1 = unpack2<T>(pack2<T>(s.z, s.w));
      const float2 d0 = unpack2<T>(pack2<T>(d.x, d.y)), d1 = unpack2<T>(pack2<T>(d.z, d.w));
      const float4 e = make_float4(s.x - s0.x, s.y - s0.y, s.z - s1.x, s.w - s1.y);
      const float4 h = make_float4(d.x - d0.x, d.y - d0.y, d.z - d1.x, d.w - d1.y);
      sum += (fmaf(e.x, d.x, s0.x * h.x) + fmaf(e.y, d.y, s0.y * h.y)) +
             (fmaf(e.z, d.z, s1.x * h.z) + fmaf(e.w, d.w, s1.y * h.w));
      const float4 rest = kOfGrads ? h : e;
      const float scale = kStateRestScale<T>;
      const uint32_t low = pack2<T>(scale * rest.x, scale * rest.y), high = pack2<T>(scale * rest.z, scale * rest.w);
      uint16_t* const to = tile.rests + k * ExactProductsTile::kStride + v;
      to[0] = static_cast<uint16_t>(low);
      to[ExactProductsTile::kStride] = static_cast<uint16_t>(low >> 16);
      to[8] = static_cast<uint16_t>(high);
      to[ExactProductsTile::kStride + 8] = static_cast<uint16_t>(high >> 16);
    }
  }
  return sum;
}

// x_t^T rests y_t of the thread's rows t (lane / 4 of the warp's 16, and 8 on), alike in the four lanes that share
// them. values(row, v) and keys(row, k): two neighbours of y and x of row 0 or 1.
template <typename T, typename Values, typename Keys>
__device__ __forceinline__ float2 bilinear(const ExactProductsTile& tile, Values values, Keys keys) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  // All of them asked for at once: the kernel is a chain of waits for memory.
  uint32_t y[8][4], x[kHeadDim / 8][2];
#pragma unroll
  for (int step = 0; step < 8; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) y[step][i] = values(i % 2, 16 * step + 8 * (i / 2) + 2 * q);
  }
#pragma unroll
  for (int block = 0; block < kHeadDim / 8; ++block) {
#pragma unroll
    for (int row = 0; row < 2; ++row) x[block][row] = keys(row, 8 * block + 2 * q);
  }
  float2 sum = make_float2(0.0f, 0.0f);
  constexpr int kAtOnce = 4;  // chains of products
#pragma unroll
  for (int first = 0; first < kHeadDim / 8; first += kAtOnce) {
    float acc[kAtOnce][4] = {};
    const uint16_t* row = tile.rests + (8 * first + g) * ExactProductsTile::kStride + 2 * q;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint16_t* at = row + 8 * i * ExactProductsTile::kStride + 16 * step;
        mma_m16n8k16<T>(acc[i], y[step][0], y[step][1], y[step][2], y[step][3], *reinterpret_cast<const uint32_t*>(at),
                        *reinterpret_cast<const uint32_t*>(at + 8));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float2 x0 = unpack2<T>(x[first + i][0]), x1 = unpack2<T>(x[first + i][1]);
      sum.x += fmaf(acc[i][0], x0.x, acc[i][1] * x0.y);
      sum.y += fmaf(acc[i][2], x1.x, acc[i][3] * x1.y);
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, step);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, step);
  }
  return make_float2(sum.x / kStateRestScale<T>, sum.y / kStateRestScale<T>);
}

// A block a pair and value head.
template <typename T>
__global__ __launch_bounds__(kExactProductsThreads) void sm90_chunk_bwd_exact_products_kernel(const Args p) {
  launch_dependents();
  wait_for_predecessors();
  __shared__ ExactProductsTile tile;
  __shared__ float warp_sums[kExactProductsThreads / 32], by_token[2 * kChunk], by_all[2 * kChunk];
  const int thread = threadIdx.x, lane = thread % 32;
  const int pair_index = static_cast<int>(blockIdx.x) / p.Hv, head = static_cast<int>(blockIdx.x) - pair_index * p.Hv;
  if (pair_index >= total_pairs(p)) return;
  const PairInfo pair = pair_info(p, pair_index);
  const int batch = p.cu_seqlens == nullptr ? pair.sequence : 0;
  const SequenceInfo sequence = sequence_info(p, pair.sequence);
  const auto kept = [&](bool is_grad) {
    return reinterpret_cast<const float4*>(
        exact_state(p, sequence, pair.sequence, pair_index - sequence.first_pair, head, is_grad));
  };
  const float4 *states = kept(false), *grads = kept(true);
  if (states == nullptr) return;
  const auto gates_of = [&](int chunk) {
    return p.gates + (static_cast<int64_t>(pair.slot + chunk) * p.Hv + head) * p.gate_stride;
  };
  const auto decay_of = [&](int chunk) { return gates_of(chunk)[kGammaOffset / 4 + kChunk - 1]; };
  const float early_decay = decay_of(0), late_decay = pair.valid > kChunk ? decay_of(1) : 1.0f;

  // The thread's rows of an operand of the pair; past the sequence's end there is another one.
  const int first = thread / 32 * 16 + lane / 4;
  const auto rows_of = [&](const StridedTensor& t, int of_head) {
    return [&t, first, of_head, pair, batch](int row, int column) -> uint32_t {
      const int token = first + 8 * row;
      if (t.data == nullptr || token >= pair.valid) return 0u;
      const auto* at =
          static_cast<const uint16_t*>(t.data) + row_offset(t, batch, pair.token + token, of_head) + column;
      return *reinterpret_cast<const uint32_t*>(at);
    };
  };
  const auto corrected = [&](int row, int column) -> uint32_t {  // V'
    const int token = first + 8 * row;
    if (token >= pair.valid) return 0u;
    const int64_t at = (static_cast<int64_t>(pair.slot + token / kChunk) * p.Hv + head) * kTokensBytes +
                       column / 64 * kTileBytes + tile_piece(0, token % kChunk, column % 64 / 8) + column % 8 * 2;
    return *reinterpret_cast<const uint32_t*>(p.v_new + at);
  };
  const int key_head = head / p.group;
  const auto queries = rows_of(p.q, key_head), keys = rows_of(p.k, key_head);

  const float sum = warp_sum(find_rests<T, false>(tile, states, grads));
  if (lane == 0) warp_sums[thread / 32] = sum;
  __syncthreads();
  const float2 of_queries = bilinear<T>(tile, rows_of(p.d_o, head), queries);
  const float2 of_keys = bilinear<T>(tile, rows_of(p.dv, head), keys);
  __syncthreads();
  find_rests<T, true>(tile, states, grads);
  __syncthreads();
  const float2 carried = bilinear<T>(tile, corrected, keys);
  if (lane % 4 == 0) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = first + 8 * row, chunk = token / kChunk, at = token % kChunk;
      float lost = 0.0f, more = 0.0f;
      if (token < pair.valid) {
        const float* gates = gates_of(chunk);
        const float gamma = gates[kGammaOffset / 4 + at] * (chunk > 0 ? early_decay : 1.0f);
        const float ratio = gates[kRatioOffset / 4 + at] * (chunk > 0 ? 1.0f : late_decay);
        lost = gamma * (p.scale * (row == 0 ? of_queries.x : of_queries.y) - (row == 0 ? of_keys.x : of_keys.y));
        more = ratio * (row == 0 ? carried.x : carried.y);
      }
      by_token[token] = lost;
      by_all[token] = more;
    }
  }
  __syncthreads();
  if (thread >= pair.valid) return;
  float lost = 0.0f;
  for (int warp = 0; warp < kExactProductsThreads / 32; ++warp) lost += warp_sums[warp];
  lost *= early_decay * late_decay;
  // Of each later token's gradient, less c of itself, and c of all.
#pragma unroll 8
  for (int token = 0; token < pair.valid; ++token) lost += token < thread ? by_all[token] : by_token[token];
  // Of infinite states, or such as T cannot hold, nothing is known to be lost.
  if (!isfinite(lost)) return;
  const int early = thread / kChunk * kChunk;
  const ChunkInfo chunk = {pair.token + early, min(kChunk, pair.valid - early), pair.sequence, batch};
  const int64_t offset = row_offset(p.dg, batch, pair.token + thread, head);
  const float d_g = load_element(p.dg, offset);
  if (has_no_gate_gradient(p, chunk, head, thread - early, d_g)) return;
  store_element(p.dg, offset, d_g + lost);
}

}  // namespace flash_qla::cuda::sm90::bwd
