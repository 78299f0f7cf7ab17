// Moving 8x8 matrices of 16-bit elements between registers and shared memory, and packing fp32 pairs into them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_qla::cuda {

// (lo, hi) rounded to nearest even; `lo` in the low half. fp16 saturates to infinity, bf16 does not need to.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float lo, float hi) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float lo, float hi) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
}

template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

__device__ __forceinline__ void load_matrix_x4(uint32_t smem, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_trans(uint32_t smem, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                                                     uint32_t& r3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(smem)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_trans(uint32_t smem, uint32_t (&r)[4]) {
  load_matrix_x4_trans(smem, r[0], r[1], r[2], r[3]);
}

// The transpose of an 8x8 matrix of 16-bit elements: lane l holds elements 2 (l % 4) and the next of row l / 4, before
// and after.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void store_matrix_x4(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

__device__ __forceinline__ void store_matrix_x4_trans(uint32_t smem, uint32_t r0, uint32_t r1, uint32_t r2,
                                                      uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// Plain shared-memory accesses by address. Volatile: the compiler must not move them away from where a role placed
// them, hoisting them would cost registers the accumulators need.
__device__ __forceinline__ float4 load_shared_f4(uint32_t smem) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}

__device__ __forceinline__ float2 load_shared_f2(uint32_t smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem) : "memory");
  return v;
}

__device__ __forceinline__ float load_shared_f1(uint32_t smem) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(smem) : "memory");
  return v;
}

__device__ __forceinline__ uint4 load_shared_u4(uint32_t smem) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(smem)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_f1(uint32_t smem, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(v) : "memory");
}

__device__ __forceinline__ void store_shared_f2(uint32_t smem, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ void store_shared_u4(uint32_t smem, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Eight bytes to global memory, or nothing: predicated, so that no branch ends the instructions that are put in order
// together.
__device__ __forceinline__ void store_global_u2_if(bool stores, void* global, uint2 v) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.global.v2.u32 [%1], {%2, %3};\n"
      "}\n" ::"r"(static_cast<uint32_t>(stores)),
      "l"(global), "r"(v.x), "r"(v.y)
      : "memory");
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_qla::cuda
