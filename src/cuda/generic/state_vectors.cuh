// States as decode and verify kernels move them: 16 bytes a thread and access, kept as they were read until they are
// used; and sums over the lanes of a warp.
#pragma once

#include "cuda/common/device_tensor.cuh"

namespace flash_qla::cuda {

// Elements of State in a 32-bit word, and their conversion to and from float: one instruction packs both halves.
template <class State>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(State));

template <class State>
__device__ float unpack_word(uint32_t word, int i) {
  if constexpr (std::is_same_v<State, float>) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<State, __nv_bfloat16>) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    return i == 0 ? pair.x : pair.y;
  }
}

// `high` is looked at where a word holds two.
template <class State>
__device__ uint32_t pack_word(float low, float high) {
  if constexpr (std::is_same_v<State, float>) {
    return __float_as_uint(low);
  } else if constexpr (std::is_same_v<State, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// 16 bytes of states.
template <class State>
struct Vector {
  static constexpr int kSize = 4 * kPerWord<State>;
  uint32_t words[4];
};

// kStreams: says that the state will not be needed again soon.
template <class State, bool kStreams>
__device__ Vector<State> load_vector(const State* data) {
  const uint4* from = reinterpret_cast<const uint4*>(data);
  const uint4 raw = kStreams ? __ldcs(from) : *from;
  return {raw.x, raw.y, raw.z, raw.w};
}

template <class State, bool kStreams>
__device__ void store_vector(State* data, const Vector<State>& vector) {
  uint4* to = reinterpret_cast<uint4*>(data);
  const uint4 raw = make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
  if constexpr (kStreams) {
    __stcs(to, raw);
  } else {
#ifdef __CUDA_ARCH__
    // As one access: of an assignment the compiler makes four, which takes a tenth more with 16 rows.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
                 : "memory");
#else
    *to = raw;  // compiled for the host, in tests
#endif
  }
}

template <class State>
__device__ void unpack(float (&x)[Vector<State>::kSize], const Vector<State>& vector) {
  constexpr int kWord = kPerWord<State>;
#pragma unroll
  for (int i = 0; i < Vector<State>::kSize; ++i) x[i] = unpack_word<State>(vector.words[i / kWord], i % kWord);
}

template <class State>
__device__ Vector<State> pack(const float (&x)[Vector<State>::kSize]) {
  constexpr int kWord = kPerWord<State>;
  Vector<State> vector;
#pragma unroll
  for (int w = 0; w < 4; ++w) vector.words[w] = pack_word<State>(x[w * kWord], x[w * kWord + kWord - 1]);
  return vector;
}

// A sum over kLanes lanes that lie kStride apart; all of them get it.
template <int kLanes, int kStride = 1>
__device__ float lane_sum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance * kStride);
  }
  return x;
}

// Sums of kSize numbers over kLanes lanes that lie kStride apart. Lanes halve among themselves what they have left to
// add, so that it takes about as many exchanges as there are numbers. In the end the l-th of the lanes has in x[0] the
// sum of number l * kSize / kLanes, and behind it those of the next ones where there are more numbers than lanes.
template <int kLanes, int kStride, int kSize>
__device__ void scatter_sums(float (&x)[kSize]) {
  const unsigned lane = threadIdx.x % 32;
  int left = kSize;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    if (left == 1) {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], distance * kStride);
      continue;
    }
    left /= 2;
    const bool high = (lane & static_cast<unsigned>(distance * kStride)) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = high ? x[i + left] : x[i], sent = high ? x[i] : x[i + left];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, distance * kStride);
    }
  }
}

template <int kSize>
__device__ float dot(const float (&a)[kSize], const float (&b)[kSize]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// kSize floats of shared memory side by side, on a boundary of as many.
template <int kSize>
__device__ void load_shared(float (&x)[kSize], const float* s_from) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    if constexpr (kSize % 4 == 0) {
      const float4 quad = *reinterpret_cast<const float4*>(s_from + i);
      x[i] = quad.x;
      x[i + 1] = quad.y;
      x[i + 2] = quad.z;
      x[i + 3] = quad.w;
    } else if constexpr (kSize == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(s_from);
      x[0] = pair.x;
      x[1] = pair.y;
    } else {
      x[0] = *s_from;
    }
  }
}

// The first kLeft of them to shared memory, likewise.
template <int kLeft, int kSize>
__device__ void store_shared(float* s_to, const float (&x)[kSize]) {
  static_assert(kLeft == 1 || kLeft == 2 || kLeft % 4 == 0);
  if constexpr (kLeft % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kLeft; i += 4) {
      *reinterpret_cast<float4*>(s_to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  } else if constexpr (kLeft == 2) {
    *reinterpret_cast<float2*>(s_to) = make_float2(x[0], x[1]);
  } else {
    *s_to = x[0];
  }
}

// Whether states can be moved 16 bytes at a time: one (row, head) is contiguous and begins on a 16-byte boundary.
inline bool moves_in_vectors(const Tensor& t) {
  if (!present(t)) return true;
  const int64_t vector = 16 / size_of(dtype(t));
  return t.stride[3] == 1 && t.stride[2] == t.shape[3] && t.stride[0] % vector == 0 && t.stride[1] % vector == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

}  // namespace flash_qla::cuda
