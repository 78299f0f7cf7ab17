// What CUDA's compiler knows by itself, for kernels that the host's compiler compiles: built-in variables, instructions
// of a warp and of a block, intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "scheduler.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

// ---- a block and its warps

inline void __syncthreads(cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::barrier_sync(0, 0, where);
}
// Whether x is not 0 in all threads.
inline int __syncthreads_and(int x, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  static int zeros;
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0) zeros = 0;
  __syncthreads(where);
  zeros += x == 0;
  __syncthreads(where);
  const int result = zeros == 0;
  __syncthreads(where);
  return result;
}

namespace cuda_emulation {

struct Nothing {};

// One element of type T of each lane; f(lane, elements) is the lane's result.
template <class T, class Function>
auto of_lanes(const char* name, Where where, uint32_t mask, T x, Function f) {
  using Out = decltype(f(0, static_cast<const T*>(nullptr)));
  return collective<Out>(name, where, mask, x, [=](const T* in, Out* out) {
    for (int lane = 0; lane < 32; ++lane) {
      if (mask >> lane & 1) out[lane] = f(lane, in);
    }
  });
}

// The lane that lane `lane` reads: `source`, or itself where that is outside of its section of `width` lanes.
inline int shuffle_source(int lane, int source, int width) {
  return source < 0 || source / width != lane / width || source >= 32 ? lane : source;
}

}  // namespace cuda_emulation

inline void __syncwarp(uint32_t mask = 0xffffffffu, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::of_lanes("__syncwarp", where, mask, cuda_emulation::Nothing{},
                           [](int, const cuda_emulation::Nothing*) { return cuda_emulation::Nothing{}; });
}

template <class T>
T __shfl_sync(uint32_t mask, T x, int source, int width = 32,
              cuda_emulation::Where where = cuda_emulation::Where::current()) {
  struct Item {
    T x;
    int source;
  };
  return cuda_emulation::of_lanes("__shfl_sync", where, mask, Item{x, source}, [=](int lane, const Item* in) {
    return in[lane / width * width + (in[lane].source & (width - 1))].x;
  });
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int bits, int width = 32,
                  cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::of_lanes("__shfl_xor_sync", where, mask, x, [=](int lane, const T* in) {
    return in[cuda_emulation::shuffle_source(lane, lane ^ bits, width)];
  });
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, unsigned distance, int width = 32,
                 cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::of_lanes("__shfl_up_sync", where, mask, x, [=](int lane, const T* in) {
    return in[cuda_emulation::shuffle_source(lane, lane - static_cast<int>(distance), width)];
  });
}
template <class T>
T __shfl_down_sync(uint32_t mask, T x, unsigned distance, int width = 32,
                   cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::of_lanes("__shfl_down_sync", where, mask, x, [=](int lane, const T* in) {
    return in[cuda_emulation::shuffle_source(lane, lane + static_cast<int>(distance), width)];
  });
}

inline uint32_t __ballot_sync(uint32_t mask, int x, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::of_lanes("__ballot_sync", where, mask, x, [=](int, const int* in) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane) bits |= (mask >> lane & 1) && in[lane] != 0 ? 1u << lane : 0;
    return bits;
  });
}
inline int __any_sync(uint32_t mask, int x, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return __ballot_sync(mask, x, where) != 0;
}
inline int __all_sync(uint32_t mask, int x, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return __ballot_sync(mask, x == 0, where) == 0;
}
template <class T>
uint32_t __match_any_sync(uint32_t mask, T x, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::of_lanes("__match_any_sync", where, mask, x, [=](int lane, const T* in) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (mask >> i & 1) && in[i] == in[lane] ? 1u << i : 0;
    return bits;
  });
}
#define EMULATION_REDUCE(name, expression)                                                     \
  template <class T>                                                                           \
  T name(uint32_t mask, T x, cuda_emulation::Where where = cuda_emulation::Where::current()) { \
    return cuda_emulation::of_lanes(#name, where, mask, x, [=](int own, const T* in) {         \
      T a = in[own];                                                                           \
      for (int lane = 0; lane < 32; ++lane) {                                                  \
        if ((mask >> lane & 1) == 0 || lane == own) continue;                                  \
        const T b = in[lane];                                                                  \
        a = expression;                                                                        \
      }                                                                                        \
      return a;                                                                                \
    });                                                                                        \
  }
EMULATION_REDUCE(__reduce_add_sync, a + b)
EMULATION_REDUCE(__reduce_max_sync, a > b ? a : b)
EMULATION_REDUCE(__reduce_min_sync, a < b ? a : b)
EMULATION_REDUCE(__reduce_or_sync, a | b)
EMULATION_REDUCE(__reduce_and_sync, a& b)
#undef EMULATION_REDUCE
inline uint32_t __activemask() { return 1u << cuda_emulation::lane_id(); }

// ---- memory. One thread runs at a time: every access is atomic.

#define EMULATION_ATOMIC(name, expression) \
  template <class T, class U>              \
  T name(T* p, U value) {                  \
    const T old = *p, x = T(value);        \
    *p = T(expression);                    \
    return old;                            \
  }
EMULATION_ATOMIC(atomicAdd, old + x)
EMULATION_ATOMIC(atomicSub, old - x)
EMULATION_ATOMIC(atomicExch, x)
EMULATION_ATOMIC(atomicMax, old > x ? old : x)
EMULATION_ATOMIC(atomicMin, old < x ? old : x)
EMULATION_ATOMIC(atomicOr, old | x)
EMULATION_ATOMIC(atomicAnd, old& x)
#undef EMULATION_ATOMIC
template <class T>
T atomicCAS(T* p, T expected, T value) {
  const T old = *p;
  if (old == expected) *p = value;
  return old;
}

template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T x) {
  *p = x;
}
template <class T>
void __stcg(T* p, T x) {
  *p = x;
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() { cuda_emulation::fail("__trap()"); }
inline size_t __cvta_generic_to_shared(const void* p) { return cuda_emulation::shared_address(p); }

// ---- numbers

template <class To, class From>
To emulation_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(static_cast<void*>(&y), &x, sizeof(y));
  return y;
}
inline float __uint_as_float(uint32_t x) { return emulation_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return emulation_bits<uint32_t>(x); }
inline float __int_as_float(int32_t x) { return emulation_bits<float>(x); }
inline int32_t __float_as_int(float x) { return emulation_bits<int32_t>(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) y |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return y;
}
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
// As CUDA has them: for any two numbers, without std.
template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}
using std::exp, std::exp2, std::log, std::log1p, std::log2, std::sqrt, std::fabs, std::isnan, std::isinf, std::isfinite;
