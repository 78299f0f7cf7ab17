// Eight neighbouring channels of a row: how they are loaded, kept and stored. 16 bytes in bf16 and fp16, 32 in fp32.
#pragma once

#include "cuda/common/device_tensor.cuh"
#include "cuda/layer/approx.cuh"

namespace flash_qla::cuda {

constexpr int kVector = 8;

template <class T>
struct alignas(16) Packed {
  uint4 bits[sizeof(T) / 2];
};

template <class T>
__device__ __forceinline__ Packed<T> load_packed(const T* p) {
  return *reinterpret_cast<const Packed<T>*>(p);
}
template <class T>
__device__ __forceinline__ void store_packed(T* p, const Packed<T>& v) {
  *reinterpret_cast<Packed<T>*>(p) = v;
}

__device__ __forceinline__ void unpack_word(uint32_t word, __nv_bfloat16*, float* x) {
  x[0] = __uint_as_float(word << 16);
  x[1] = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack_word(uint32_t word, __half*, float* x) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
  x[0] = both.x;
  x[1] = both.y;
}

template <class T>
__device__ __forceinline__ void unpack(const Packed<T>& v, float (&x)[kVector]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[4 * i] = __uint_as_float(v.bits[i].x);
      x[4 * i + 1] = __uint_as_float(v.bits[i].y);
      x[4 * i + 2] = __uint_as_float(v.bits[i].z);
      x[4 * i + 3] = __uint_as_float(v.bits[i].w);
    }
  } else {
    unpack_word(v.bits[0].x, static_cast<T*>(nullptr), x);
    unpack_word(v.bits[0].y, static_cast<T*>(nullptr), x + 2);
    unpack_word(v.bits[0].z, static_cast<T*>(nullptr), x + 4);
    unpack_word(v.bits[0].w, static_cast<T*>(nullptr), x + 6);
  }
}

__device__ __forceinline__ uint32_t pack_word(float low, float high, __nv_bfloat16*) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ __forceinline__ uint32_t pack_word(float low, float high, __half*) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <class T>
__device__ __forceinline__ Packed<T> pack(const float (&x)[kVector]) {
  Packed<T> v;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v.bits[i] = make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]), __float_as_uint(x[4 * i + 2]),
                             __float_as_uint(x[4 * i + 3]));
    }
  } else {
    T* const none = nullptr;
    v.bits[0] = make_uint4(pack_word(x[0], x[1], none), pack_word(x[2], x[3], none), pack_word(x[4], x[5], none),
                           pack_word(x[6], x[7], none));
  }
  return v;
}

// sigmoid(u). Two instructions of the special function unit where results are rounded to 16 bits; exact to float32
// where they are not.
template <class T>
__device__ __forceinline__ float sigmoid_for(float u) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-u));
  constexpr float kLog2e = 1.44269504f;
  return approx_reciprocal(1.0f + approx_exp2(-kLog2e * u));
}

// The derivative of u sigmoid(u), with s = sigmoid(u).
__device__ __forceinline__ float silu_slope(float u, float s) { return s + u * s * (1.0f - s); }

// u sigmoid(u) from u times silu_scale(), which a caller makes a factor of what u is a sum of: an instruction less.
template <class T>
__device__ __forceinline__ float silu_scale() {
  return sizeof(T) == 4 ? 1.0f : -1.44269504f;  // -log2(e)
}
template <class T>
__device__ __forceinline__ float scaled_silu(float u) {
  if constexpr (sizeof(T) == 4) return u * sigmoid_for<T>(u);
  return u * approx_reciprocal(fmaf(approx_exp2(u), silu_scale<T>(), silu_scale<T>()));
}

// Sums over groups of `lanes` neighbouring lanes, a power of two that is the same in all threads; every lane of the
// warp takes part. Without a loop, and several at a time: they overlap.
template <int kCount>
__device__ __forceinline__ void group_sums(float (&x)[kCount], int lanes) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    if (lanes <= distance) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], distance);
  }
}
__device__ __forceinline__ float group_sum(float x, int lanes) {
  float one[] = {x};
  group_sums(one, lanes);
  return one[0];
}

// Calls f with a value of the dtype: bf16, fp16, or else fp32.
template <class Function>
auto with_dtype(DType type, Function&& f) {
  return type == DType::kBFloat16 ? f(__nv_bfloat16()) : type == DType::kFloat16 ? f(__half()) : f(float());
}

// Whether rows of a tensor may be read and written eight channels at a time: they lie side by side, and no row begins
// off the grid of 16 bytes.
inline bool allows_vectors(const Tensor& t) {
  const int last = t.ndim - 1;
  if (t.stride[last] != 1 || t.shape[last] % kVector != 0) return false;
  for (int i = 0; i < last; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % kVector != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace flash_qla::cuda
