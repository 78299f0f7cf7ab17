// The gate vectors of a chunk and value head, by one warp: lane l has tokens 2l and 2l + 1.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90::bwd {

// What memory holds of two tokens, in its own type: to convert it would be to wait for it.
struct RawGates {
  uint32_t g[2], beta[2];
};

// Volatile: where it is asked for is how far ahead it is.
__device__ __forceinline__ uint32_t load_bits(const StridedTensor& t, int64_t offset) {
  uint32_t bits;
  if (t.type == DType::kFloat32) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(static_cast<const float*>(t.data) + offset));
  } else {
    asm volatile("ld.global.u16 %0, [%1];" : "=r"(bits) : "l"(static_cast<const uint16_t*>(t.data) + offset));
  }
  return bits;
}

__device__ __forceinline__ float from_bits(uint32_t bits, DType type) {
  const float half = __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return type == DType::kFloat32 ? __uint_as_float(bits) : type == DType::kFloat16 ? half : __uint_as_float(bits << 16);
}

__device__ __forceinline__ RawGates load_gates(const Args& p, const ChunkInfo& chunk, int head, int lane) {
  RawGates raw{};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    // Past the end: a cumsum stays at its last value, decays are 0.
    const int token = chunk.token + (p.g_is_cumsum ? min(row, chunk.valid - 1) : row);
    const bool inside = row < chunk.valid;
    if (p.g.data != nullptr && (inside || p.g_is_cumsum)) {
      raw.g[i] = load_bits(p.g, row_offset(p.g, chunk.batch, token, head));
    }
    if (p.beta.data != nullptr && inside) {
      raw.beta[i] = load_bits(p.beta, row_offset(p.beta, chunk.batch, chunk.token + row, head));
    }
  }
  return raw;
}

// Cumulative log2 decay and what follows from it: pairs of the lane's two tokens.
struct Gates {
  float2 cumsum, gamma, ratio, beta;
};

__device__ __forceinline__ Gates make_gates(const Args& p, const RawGates& raw, int valid, int lane) {
  float c0 = from_bits(raw.g[0], p.g.type), c1 = from_bits(raw.g[1], p.g.type);
  float beta[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    beta[i] = p.beta.data != nullptr ? from_bits(raw.beta[i], p.beta.type) : 2 * lane + i < valid ? 1.0f : 0.0f;
  }
  if (!p.g_is_cumsum) {
    c0 = c0 < kGateFloor ? kGateFloor : c0;
    c1 = c1 < kGateFloor ? kGateFloor : c1;
    const float sum = prefix_sum(c0 + c1, lane);
    c0 = sum - c1;
    c1 = sum;
  }
  // Rounded by themselves wherever this is compiled to: all forms of the passes have the same bits.
  const float last = __fmul_rn(__shfl_sync(0xffffffffu, c1, 31), kLog2e);
  c0 = __fmul_rn(c0, kLog2e);
  c1 = __fmul_rn(c1, kLog2e);
  return {make_float2(c0, c1), make_float2(exp2_approx(c0), exp2_approx(c1)),
          make_float2(exp2_approx(last - c0), exp2_approx(last - c1)), make_float2(beta[0], beta[1])};
}

// A beta of the chunk's tokens is below `small`.
__device__ __forceinline__ bool any_small_beta(const Gates& gates, float small, int valid, int lane) {
  return __any_sync(0xffffffffu, (2 * lane < valid && fabsf(gates.beta.x) < small) ||
                                     (2 * lane + 1 < valid && fabsf(gates.beta.y) < small));
}

// To shared memory: the four vectors one after another.
__device__ __forceinline__ void store_gates(uint32_t smem, const Gates& gates, int lane) {
  const uint32_t to = smem + static_cast<uint32_t>(lane) * 8;
  store_shared_f2(to, gates.cumsum.x, gates.cumsum.y);
  store_shared_f2(to + kGammaOffset, gates.gamma.x, gates.gamma.y);
  store_shared_f2(to + kRatioOffset, gates.ratio.x, gates.ratio.y);
  store_shared_f2(to + kBetaOffset, gates.beta.x, gates.beta.y);
}

// What the passes take of them (traits.h). A thread of a warpgroup has columns 8j + 2 (lane % 4) + e of an accumulator,
// that is, of the pairs of tokens those of lanes 4j + lane % 4 here: they lie side by side, 16 bytes at a time where
// pass_gate_piece() says, so that four threads read four banks. The last vector is split where T is bf16 (SplitFactor):
// of a pair both first parts, then both second ones.
__device__ __forceinline__ uint32_t pass_gate_piece(int quad_lane, int piece) {
  return static_cast<uint32_t>(quad_lane * 64 + ((piece ^ (quad_lane >> 1)) << 4));
}

template <typename T>
__device__ __forceinline__ void store_pass_gates(uint32_t smem, const Gates& gates, float scale, float small_beta,
                                                 int lane) {
  store_shared_f2(smem + static_cast<uint32_t>(lane) * 8, gates.cumsum.x, gates.cumsum.y);
  const uint32_t to = smem + pass_gate_piece(lane % 4, lane / 8) + static_cast<uint32_t>(lane / 4 % 2 * 8);
  store_shared_f2(to + kPassRatio, gates.ratio.x, gates.ratio.y);
  store_shared_f2(to + kPassStep, -gates.gamma.x * gates.beta.x, -gates.gamma.y * gates.beta.y);
  store_shared_f2(to + kPassBeta, gates.beta.x, gates.beta.y);
  store_shared_f2(to + kPassGiven, fabsf(gates.beta.x) < small_beta ? 1.0f : gates.beta.x,
                  fabsf(gates.beta.y) < small_beta ? 1.0f : gates.beta.y);
  const float2 factor = make_float2(__fmul_rn(scale, gates.gamma.x), __fmul_rn(scale, gates.gamma.y));
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const SplitFactor x(factor.x), y(factor.y);
    store_shared_f2(to + kPassFactor, __uint_as_float(pack2<T>(x.high, y.high)),
                    __uint_as_float(pack2<T>(x.rest, y.rest)));
  } else {
    store_shared_f2(to + kPassFactor, factor.x, factor.y);
  }
}

// One thread: (slot * Hv + head) has a beta that small_betas.cuh sees to.
__device__ __forceinline__ void note_small_beta(const Args& p, int tile) {
  p.small_tiles[atomicAdd(p.small_count, 1)] = tile;
}

}  // namespace flash_qla::cuda::sm90::bwd
