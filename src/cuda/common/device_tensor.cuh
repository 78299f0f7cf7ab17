// Strided tensors of any dtype as kernels see them, with conversions to and from the type that a kernel computes in.
// The dtype is looked at when the kernel runs: every thread takes the same branch, and one kernel serves all dtypes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/problem.h"

namespace flash_qla::cuda {

struct DeviceTensor {
  void* data;         // NULL: absent, or without elements
  int64_t stride[4];  // no tensor of a call has more dimensions
  int32_t dtype;
  int32_t quads;  // rows of the last dimension may be read four elements at a time
};
static_assert(std::is_trivially_copyable_v<DeviceTensor>);

// Whether rows of the last dimension have their elements side by side, begin on a grid of `grain` elements and are a
// multiple of it long: so many can be read at once. The stride of a dimension of one index means nothing.
inline bool rows_fit(const Tensor& t, int64_t grain) {
  const int last = t.ndim - 1;
  if (t.stride[last] != 1 || t.shape[last] % grain != 0) return false;
  for (int i = 0; i < last; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % grain != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(grain * size_of(dtype(t))) == 0;
}

inline DeviceTensor device_tensor(const Tensor& t) {
  DeviceTensor d{};
  if (!present(t)) return d;
  d.data = t.data;
  for (int i = 0; i < t.ndim; ++i) d.stride[i] = t.stride[i];
  d.dtype = t.dtype;
  d.quads = rows_fit(t, 4);
  return d;
}

// A contiguous tensor in the workspace.
inline DeviceTensor workspace_tensor(void* data, DType type, int64_t d0, int64_t d1, int64_t d2, int64_t d3) {
  Tensor t{};
  t.data = data;
  t.dtype = static_cast<int32_t>(type);
  t.ndim = 4;
  const int64_t shape[] = {d0, d1, d2, d3};
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.stride[i] = stride;
    stride *= shape[i];
  }
  return device_tensor(t);
}

__device__ inline int64_t offset_of(const DeviceTensor& t, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return i * t.stride[0] + j * t.stride[1] + k * t.stride[2] + l * t.stride[3];
}

template <class Real>
__device__ inline Real load(const DeviceTensor& t, int64_t offset) {
  switch (static_cast<DType>(t.dtype)) {
    case DType::kFloat64:
      return static_cast<Real>(static_cast<const double*>(t.data)[offset]);
    case DType::kBFloat16:
      return static_cast<Real>(__bfloat162float(static_cast<const __nv_bfloat16*>(t.data)[offset]));
    case DType::kFloat16:
      return static_cast<Real>(__half2float(static_cast<const __half*>(t.data)[offset]));
    default:  // validation has left float32 alone
      return static_cast<Real>(static_cast<const float*>(t.data)[offset]);
  }
}

template <class Real>
__device__ inline void store(const DeviceTensor& t, int64_t offset, Real x) {
  switch (static_cast<DType>(t.dtype)) {
    case DType::kFloat64:
      static_cast<double*>(t.data)[offset] = static_cast<double>(x);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(t.data)[offset] = __float2bfloat16_rn(static_cast<float>(x));
      break;
    case DType::kFloat16:
      static_cast<__half*>(t.data)[offset] = __float2half_rn(static_cast<float>(x));
      break;
    default:
      static_cast<float*>(t.data)[offset] = static_cast<float>(x);
      break;
  }
}

// Loads in two steps. The bits are read first and converted later, so that a thread has all its loads in flight before
// it waits for one: a conversion behind a branch on the dtype would wait at every load. float64 has no place here.
struct RawQuad {
  uint32_t x[4];
};

__device__ inline bool is_wide(const DeviceTensor& t) { return t.dtype == static_cast<int32_t>(DType::kFloat32); }

__device__ inline uint32_t load_raw(const DeviceTensor& t, int64_t offset) {
  return is_wide(t) ? static_cast<const uint32_t*>(t.data)[offset] : static_cast<const uint16_t*>(t.data)[offset];
}

__device__ inline float unpack(const DeviceTensor& t, uint32_t raw) {
  if (is_wide(t)) return __uint_as_float(raw);
  if (t.dtype == static_cast<int32_t>(DType::kBFloat16)) return __uint_as_float(raw << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(raw)));
}

// Elements [i, i + 4) of a row that starts at `offset` and has `size` elements; zero past its end.
__device__ inline RawQuad load_raw_quad(const DeviceTensor& t, int64_t offset, int i, int size) {
  RawQuad raw{};
  if (t.quads) {
    if (i >= size) return raw;
    if (is_wide(t)) {
      const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(t.data) + offset + i);
      raw = {bits.x, bits.y, bits.z, bits.w};
    } else {
      const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(t.data) + offset + i);
      raw.x[0] = bits.x;
      raw.x[1] = bits.y;
    }
    return raw;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (i + j < size) raw.x[j] = load_raw(t, offset + static_cast<int64_t>(i + j) * t.stride[3]);
  }
  return raw;
}

__device__ inline float4 unpack(const DeviceTensor& t, const RawQuad& raw) {
  if (is_wide(t) || !t.quads) {
    return make_float4(unpack(t, raw.x[0]), unpack(t, raw.x[1]), unpack(t, raw.x[2]), unpack(t, raw.x[3]));
  }
  if (t.dtype == static_cast<int32_t>(DType::kBFloat16)) {
    return make_float4(__uint_as_float(raw.x[0] << 16), __uint_as_float(raw.x[0] & 0xffff0000u),
                       __uint_as_float(raw.x[1] << 16), __uint_as_float(raw.x[1] & 0xffff0000u));
  }
  const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x[0]));
  const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&raw.x[1]));
  return make_float4(low.x, low.y, high.x, high.y);
}

// Two elements as a store to `dtype` and a load would leave them; one instruction converts both. Not for float64.
__device__ inline float2 round_pair(int32_t dtype, float2 x) {
  if (dtype == static_cast<int32_t>(DType::kBFloat16)) return __bfloat1622float2(__float22bfloat162_rn(x));
  if (dtype == static_cast<int32_t>(DType::kFloat16)) return __half22float2(__float22half2_rn(x));
  return x;
}

// A vector or matrix of indices, int32 or int64.
__device__ inline int64_t load_index(const DeviceTensor& t, int64_t i, int64_t j = 0) {
  const int64_t offset = i * t.stride[0] + j * t.stride[1];
  return t.dtype == static_cast<int32_t>(DType::kInt32) ? static_cast<const int32_t*>(t.data)[offset]
                                                        : static_cast<const int64_t*>(t.data)[offset];
}

// A tensor of states, [rows, Hv, K, V] or [rows, Hv, V, K], with its strides by meaning.
struct DeviceStates {
  void* data;                     // NULL: absent, or without elements
  int64_t row, head, key, value;  // strides
  int64_t rows;
  int32_t dtype;
};
static_assert(std::is_trivially_copyable_v<DeviceStates>);

inline DeviceStates device_states(const Tensor& t, bool v_first) {
  DeviceStates d{};
  if (!present(t)) return d;
  d.data = t.data;
  d.row = t.stride[0];
  d.head = t.stride[1];
  d.key = t.stride[v_first ? 3 : 2];
  d.value = t.stride[v_first ? 2 : 3];
  d.rows = t.shape[0];
  d.dtype = t.dtype;
  return d;
}

template <class Real>
__device__ inline Real load(const DeviceStates& t, int64_t offset) {
  DeviceTensor view{};
  view.data = t.data;
  view.dtype = t.dtype;
  return load<Real>(view, offset);
}

template <class Real>
__device__ inline void store(const DeviceStates& t, int64_t offset, Real x) {
  DeviceTensor view{};
  view.data = t.data;
  view.dtype = t.dtype;
  store<Real>(view, offset, x);
}

}  // namespace flash_qla::cuda
