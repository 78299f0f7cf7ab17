// Device helpers that the backward's kernels share: element access, sequences and chunks, tails.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/bulk.cuh"
#include "cuda/common/compiler.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/chunk_bwd/args.h"
#include "cuda/sm90/chunk_bwd/traits.h"

namespace flash_qla::cuda::sm90::bwd {

// Where many are loaded, the type is asked for once: with_type().
template <DType kType>
__device__ __forceinline__ float load_element_of(const StridedTensor& t, int64_t offset) {
  if constexpr (kType == DType::kBFloat16) {
    return __bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[offset]);
  } else if constexpr (kType == DType::kFloat16) {
    return __half2float(static_cast<const __half*>(t.data)[offset]);
  } else {
    return static_cast<const float*>(t.data)[offset];
  }
}

// f(std::integral_constant<DType, a tensor's type>).
template <typename F>
__device__ __forceinline__ auto with_type(DType type, F f) {
  switch (type) {
    case DType::kBFloat16:
      return f(std::integral_constant<DType, DType::kBFloat16>());
    case DType::kFloat16:
      return f(std::integral_constant<DType, DType::kFloat16>());
    default:
      return f(std::integral_constant<DType, DType::kFloat32>());
  }
}

__device__ __forceinline__ float load_element(const StridedTensor& t, int64_t offset) {
  return with_type(t.type, [&](auto type) { return load_element_of<type()>(t, offset); });
}

template <DType kType>
__device__ __forceinline__ void store_element_of(const StridedTensor& t, int64_t offset, float value) {
  if constexpr (kType == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(t.data)[offset] = __float2bfloat16_rn(value);
  } else if constexpr (kType == DType::kFloat16) {
    static_cast<__half*>(t.data)[offset] = __float2half_rn(value);
  } else {
    static_cast<float*>(t.data)[offset] = value;
  }
}

__device__ __forceinline__ void store_element(const StridedTensor& t, int64_t offset, float value) {
  with_type(t.type, [&](auto type) { store_element_of<type()>(t, offset, value); });
}

// Offset of [b, t, head] (and of its first column where there is one).
__device__ __forceinline__ int64_t row_offset(const StridedTensor& t, int64_t b, int64_t token, int64_t head) {
  return b * t.stride[0] + token * t.stride[1] + head * t.stride[2];
}

// Offset of [n, head, k, v] of a state, whichever of K and V comes first.
__device__ __forceinline__ int64_t state_offset(const StridedTensor& t, bool v_first, int64_t n, int64_t head, int k,
                                                int v) {
  return n * t.stride[0] + head * t.stride[1] + (v_first ? v : k) * t.stride[2] + (v_first ? k : v) * t.stride[3];
}

struct SequenceInfo {
  int32_t token, length, first_slot, batch, first_pair;
  __device__ int chunks() const { return (length + kChunk - 1) / kChunk; }
};

// Offset i of the caller, kept within the T tokens: it comes from the device and may be anything.
__device__ __forceinline__ int32_t given_offset(const Args& p, int i) {
  const int64_t at = i * p.cu_seqlens_stride;
  const int64_t value = p.cu_seqlens_64 ? static_cast<const int64_t*>(p.cu_seqlens)[at]
                                        : static_cast<int64_t>(static_cast<const int32_t*>(p.cu_seqlens)[at]);
  return static_cast<int32_t>(max(int64_t{0}, min(value, static_cast<int64_t>(p.T))));
}

// Tokens of sequence n. Of several the plan kernel has left offsets that never go back, so that no two sequences
// overlap and all chunks together fit the workspace. One needs no such care.
__device__ __forceinline__ void sequence_range(const Args& p, int n, int32_t* begin, int32_t* length) {
  const bool one = p.N == 1;
  *begin = one ? given_offset(p, 0) : p.bounds[n];
  *length = max(0, (one ? given_offset(p, 1) : p.bounds[n + 1]) - *begin);
}

// Adds the squares of eight elements of T.
template <typename T>
__device__ __forceinline__ void add_squares(float& sum, const uint4& x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = unpack2<T>(words[w]);
    sum += pair.x * pair.x + pair.y * pair.y;
  }
}

__device__ __forceinline__ SequenceInfo sequence_info(const Args& p, int n) {
  SequenceInfo s;
  if (p.cu_seqlens == nullptr) {
    s = {0, p.T, n * p.per_sequence, n, n * pairs_of(p.per_sequence)};
  } else {
    s.batch = 0;
    // Of one sequence all is known before the plan kernel has listed anything.
    s.first_slot = p.N == 1 ? 0 : p.first_slot[n];
    s.first_pair = p.N == 1 ? 0 : p.first_pair[n];
    sequence_range(p, n, &s.token, &s.length);
  }
  return s;
}

__device__ __forceinline__ int total_chunks(const Args& p) {
  return p.cu_seqlens == nullptr ? p.chunk_bound : *p.total_chunks;
}

__device__ __forceinline__ ChunkInfo chunk_info(const Args& p, int slot) {
  if (p.cu_seqlens != nullptr) return p.chunk_map[slot];
  const int n = slot / p.per_sequence;
  const int token = (slot - n * p.per_sequence) * kChunk;
  return {token, min(kChunk, p.T - token), n, n};
}

__device__ __forceinline__ int total_pairs(const Args& p) {
  return p.cu_seqlens == nullptr ? p.pair_bound : *p.total_pairs;
}

__device__ __forceinline__ PairInfo pair_info(const Args& p, int pair) {
  if (p.cu_seqlens != nullptr) {
    const int4 x = *reinterpret_cast<const int4*>(p.pair_map + pair);
    return {x.x, x.y, x.z, x.w};
  }
  // Unsigned: a division of signed numbers takes half as many instructions more.
  int32_t chunks = p.per_sequence;
  recompute_from(chunks);  // not kept by who asks again and again, with few registers
  const uint32_t pairs = pairs_of(chunks), sequence = static_cast<uint32_t>(pair) / pairs;
  const int n = static_cast<int>(sequence), chunk = 2 * static_cast<int>(pair - sequence * pairs);
  return {chunk * kChunk, min(2 * kChunk, p.T - chunk * kChunk), n * p.per_sequence + chunk, n};
}

// Whether dS at the end of a pair of `valid` tokens waits for the gradients in rows of dq or (a group's last head's)
// dk. There or in scratch (args.h) it is tiles [64 of V][64 of K], the columns of which are those of a half of V; in
// the outputs each chunk of the pair has a half of K.
__device__ __forceinline__ bool waits_in_output(const Args& p, int valid) {
  return p.grads_in_outputs && valid == 2 * kChunk;
}

// S at the start of a sequence's pair-th pair, or dS at its end, in fp32 (args.h); null: they are not kept.
__device__ __forceinline__ float* exact_state(const Args& p, const SequenceInfo& sequence, int n, int pair, int head,
                                              bool is_grad) {
  int first = sequence.first_pair;
  if (p.exact_by_sequence) {
    const int pairs = pairs_of(sequence.chunks());
    first = p.cu_seqlens != nullptr && p.N > 1 ? p.first_exact[n] : wants_exact(pairs) ? n * pairs : -1;
    if (first < 0) return nullptr;
  }
  const int64_t tile = static_cast<int64_t>(first + pair) * p.Hv + head;
  return p.exact_states + (2 * tile + static_cast<int>(is_grad)) * (kHeadDim * kHeadDim);
}

// Zeroes rows valid .. 63 of a tile: rows past a sequence's end hold its neighbour's tokens, and 0 * NaN is NaN.
__device__ __forceinline__ void zero_tail(uint32_t tile, int valid, int thread, int threads) {
  for (int piece = valid * 8 + thread; piece < 64 * 8; piece += threads) {
    store_shared_u4(tile + static_cast<uint32_t>(piece) * 16, make_uint4(0, 0, 0, 0));
  }
}

// Byte address of the 16-byte piece `piece` of row `row` in a tile.
__device__ __forceinline__ uint32_t tile_piece(uint32_t tile, int row, int piece) {
  return tile + static_cast<uint32_t>(row * 128 + ((piece ^ (row & 7)) << 4));
}

template <typename T>
__device__ __forceinline__ uint32_t scale2(uint32_t packed, float factor) {
  const float2 x = unpack2<T>(packed);
  return pack2<T>(x.x * factor, x.y * factor);
}

// A factor as a sum of two bf16 numbers, to 17 bits: bf16 has the exponents of fp32. A millionth of the factor more,
// so that the second part has the first one's sign and is not 0: an infinite element stays infinite. An infinite factor
// has no rest.
struct SplitFactor {
  float high, rest;
  __device__ explicit SplitFactor(float f) {
    high = __uint_as_float(__float_as_uint(f) & 0xffff0000u);
    rest = fmaf(high, 0x1p-20f, isfinite(f) ? f - high : 0.0f);
  }
};

// A pair of bf16 elements times such factors, rounded once (but for 2^-17 of it): two instructions in place of five.
__device__ __forceinline__ uint32_t scale2_split(uint32_t packed, uint32_t high, uint32_t rest) {
  uint32_t y;
  asm("{\n.reg .b32 low;\nmul.rn.bf16x2 low, %1, %3;\nfma.rn.bf16x2 %0, %1, %2, low;\n}"
      : "=r"(y)
      : "r"(packed), "r"(high), "r"(rest));
  return y;
}

// 16 bytes in one store: what nvcc knows of where a value comes from it takes for a reason to store it in four.
__device__ __forceinline__ void store_global_u4(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// qk [64 of q, 64 of k] = Q K^T by a warpgroup, Q and K tiles [2 halves of K][64 tokens][64]: on its way.
template <typename T>
__device__ __forceinline__ void start_query_key_products(float (&qk)[32], uint32_t sQ, uint32_t sK) {
  const uint64_t q_desc = wgmma_descriptor(sQ), k_desc = wgmma_descriptor(sK);
  wgmma_fence();
#pragma unroll
  for (int k_step = 0; k_step < 8; ++k_step) {
    const uint32_t by = (k_step / 4) * kTileBytes + (k_step % 4) * 32;
    if (k_step == 0) {
      mma_ss_n64_init<T>(qk, wgmma_advance(q_desc, by), wgmma_advance(k_desc, by));
    } else {
      mma_ss_n64<T>(qk, wgmma_advance(q_desc, by), wgmma_advance(k_desc, by));
    }
  }
  wgmma_commit();
}

// acc [64 rows, 128] += X [64 rows, 64] Y by a warpgroup, X packed, Y tiles [2 halves of its columns][64][64]: 64 of V
// of a state, or tokens.
template <typename T>
__device__ __forceinline__ void add_product(float (&acc)[64], const uint32_t (&x)[16], uint32_t sY) {
  const uint64_t y = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) mma_rs_n128_trans<T>(acc, x + 4 * j, wgmma_advance(y, j * 2048));
}

}  // namespace flash_qla::cuda::sm90::bwd
