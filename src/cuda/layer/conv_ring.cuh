// A thread's next tokens on their way to shared memory: as many loads under way as memory needs, without a register.
#pragma once

#include <cstdlib>

#include "cuda/common/cp_async.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

constexpr int kConvThreads = 128;

// Bytes between tokens: below 2^31, as allows_token_vectors() sees to, so that a place is one instruction away.
template <class T>
__device__ __forceinline__ int token_step(const DeviceTensor& t) {
  return static_cast<int>(t.stride[1] * static_cast<int64_t>(sizeof(T)));
}
template <class T>
__device__ __forceinline__ T* at_token(T* first, int i, int step) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + static_cast<int64_t>(i) * step);
}

// The same on the host: a tensor [B, T, ..] whose tokens are near enough, and one [B, T, H, D] that is read and written
// by vectors, token by token.
inline bool has_near_tokens(const Tensor& t) { return t.shape[1] <= 1 || std::abs(t.stride[1]) < int64_t{1} << 29; }
inline bool allows_token_vectors(const Tensor& t) { return allows_vectors(t) && has_near_tokens(t); }

// Vectors of kTensors tensors, token after token. A thread reads what it has fetched itself, so nothing is shared.
// Eight slots of 16 bits: with four blocks of one tensor, or three of two, 57 to 84 KB of a multiprocessor are under
// way.
template <class T, int kTensors>
struct TokenRing {
  static constexpr int kSlots = sizeof(T) == 4 ? 4 : 8, kPieces = sizeof(T) / 2;  // of 16 bytes
  uint4 pieces[kSlots][kTensors][kPieces][kConvThreads];

  // Starts to load; zeros where not wanted. A token's tensors are followed by one close().
  __device__ __forceinline__ void fetch(uint32_t token, int tensor, const T* from, bool wanted) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      cp_async_16_or_zero(smem_address(&pieces[token % kSlots][tensor][i][threadIdx.x]),
                          reinterpret_cast<const uint4*>(from) + i, wanted);
    }
  }
  static __device__ __forceinline__ void close() { cp_async_commit(); }
  // Until all but the last kSlots - 1 tokens are there.
  static __device__ __forceinline__ void wait() { cp_async_wait<kSlots - 1>(); }
  __device__ __forceinline__ Packed<T> take(uint32_t token, int tensor) const {
    Packed<T> v;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) v.bits[i] = pieces[token % kSlots][tensor][i][threadIdx.x];
    return v;
  }
};

}  // namespace flash_qla::cuda
