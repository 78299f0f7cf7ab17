// Warpgroup matrix products (wgmma, sm_90a), fp32 accumulators. CCCL has no wrapper for them.
//
// Names: mma_<rs|ss>_n<N>[_trans][_init]. rs: A from registers, ss: A from shared memory; trans: B is stored with N
// contiguous; init: D = A B, otherwise D += A B. The init forms name D as a pure output, so that no copy of an old
// value is carried round a loop. M is 64 and K is 16: warp w of the group holds rows 16w..16w+15, and an accumulator of
// N columns is N/2 registers:
//   d[4j + 2h + e] = D[16w + lane/4 + 8h][8j + 2(lane%4) + e].
// The packed pairs of an accumulator's 16 columns are the A registers of one K step.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_qla::cuda {

// A 128-byte swizzled operand in shared memory. `stride_bytes`: from 8 rows to the next 8. `leading_bytes`: from 64
// contiguous elements to the next 64 (read for the N-contiguous form alone).
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem, uint32_t leading_bytes = 16,
                                                     uint32_t stride_bytes = 1024) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}

// An operand that is not swizzled and stored with N contiguous: blocks of 8 rows (K) of 16 bytes each. `leading_bytes`:
// from 8 rows to the next 8; `stride_bytes`: from 8 columns to the next 8.
__device__ __forceinline__ uint64_t wgmma_block_descriptor(uint32_t smem, uint32_t leading_bytes,
                                                           uint32_t stride_bytes) {
  return static_cast<uint64_t>((smem & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32;
}

// The same operand `bytes` further on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) {
  // In the low word alone, which the address cannot leave: 64-bit sums would cost a carry and two more moves each.
  return (descriptor & 0xffffffff00000000u) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
}

// The same for a descriptor that all lanes have in common, hidden from the compiler: it would mask the bits again that
// an address cannot have, an instruction more for each product.
__device__ __forceinline__ uint64_t wgmma_advance_uniform(uint64_t descriptor, uint32_t bytes) {
  uint64_t sum;
  asm("{\n"
      ".reg .b32 low;\n"
      "add.u32 low, %1, %2;\n"
      "mov.b64 %0, {low, %3};\n"
      "}\n"
      : "=l"(sum)
      : "r"(static_cast<uint32_t>(descriptor)), "r"(bytes >> 4), "r"(static_cast<uint32_t>(descriptor >> 32)));
  return sum;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads of an accumulator above the wait before it, or writes below the fence after it.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Keeps packed A registers alive up to here: the tensor core reads them until its group has been waited for.
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Assembler text: registers of an accumulator as the first operands, and their constraints. FLASH_QLA_WGMMA: a product
// of either element type; `operands` is what follows the accumulator, `sums` its constraints, the rest A and B.
#define FLASH_QLA_WGMMA_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_QLA_WGMMA_SUMS_8(c, d) c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7])
#define FLASH_QLA_WGMMA_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_QLA_WGMMA_SUMS_16(c, d)                                                                           \
  c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]), c(d[8]), c(d[9]), c(d[10]), c(d[11]), \
      c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define FLASH_QLA_WGMMA_TEXT_32 \
  FLASH_QLA_WGMMA_TEXT_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_QLA_WGMMA_SUMS_32(c, d)                                                                            \
  FLASH_QLA_WGMMA_SUMS_16(c, d), c(d[16]), c(d[17]), c(d[18]), c(d[19]), c(d[20]), c(d[21]), c(d[22]), c(d[23]), \
      c(d[24]), c(d[25]), c(d[26]), c(d[27]), c(d[28]), c(d[29]), c(d[30]), c(d[31])
#define FLASH_QLA_WGMMA_TEXT_64                                                      \
  FLASH_QLA_WGMMA_TEXT_32                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_QLA_WGMMA_SUMS_64(c, d)                                                                               \
  FLASH_QLA_WGMMA_SUMS_32(c, d), c(d[32]), c(d[33]), c(d[34]), c(d[35]), c(d[36]), c(d[37]), c(d[38]), c(d[39]),    \
      c(d[40]), c(d[41]), c(d[42]), c(d[43]), c(d[44]), c(d[45]), c(d[46]), c(d[47]), c(d[48]), c(d[49]), c(d[50]), \
      c(d[51]), c(d[52]), c(d[53]), c(d[54]), c(d[55]), c(d[56]), c(d[57]), c(d[58]), c(d[59]), c(d[60]), c(d[61]), \
      c(d[62]), c(d[63])
#define FLASH_QLA_WGMMA(shape, accumulator, operands, sums, ...)                                            \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                         \
    asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32.bf16.bf16 {" accumulator "}, " operands ";" \
                 : sums                                                                                     \
                 : __VA_ARGS__);                                                                            \
  } else {                                                                                                  \
    asm volatile("wgmma.mma_async.sync.aligned." shape "k16.f32.f16.f16 {" accumulator "}, " operands ";"   \
                 : sums                                                                                     \
                 : __VA_ARGS__);                                                                            \
  }
#define FLASH_QLA_WGMMA_A_REGISTERS(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// Two products each, D = A B (name_init) and D += A B (name), of 64 rows of A. transposed: B is stored with N
// contiguous. A in registers:
#define FLASH_QLA_WGMMA_RS(name, shape, values, a_and_b, transposed)                                \
  template <typename T>                                                                             \
  __device__ __forceinline__ void name##_init(float (&d)[values], const uint32_t* a, uint64_t b) {  \
    FLASH_QLA_WGMMA(shape, FLASH_QLA_WGMMA_TEXT_##values, a_and_b ", 0, 1, 1, " transposed,         \
                    FLASH_QLA_WGMMA_SUMS_##values("=f", d), FLASH_QLA_WGMMA_A_REGISTERS(a), "l"(b)) \
  }                                                                                                 \
  template <typename T>                                                                             \
  __device__ __forceinline__ void name(float (&d)[values], const uint32_t* a, uint64_t b) {         \
    FLASH_QLA_WGMMA(shape, FLASH_QLA_WGMMA_TEXT_##values, a_and_b ", 1, 1, 1, " transposed,         \
                    FLASH_QLA_WGMMA_SUMS_##values("+f", d), FLASH_QLA_WGMMA_A_REGISTERS(a), "l"(b)) \
  }
FLASH_QLA_WGMMA_RS(mma_rs_n16_trans, "m64n16", 8, "{%8, %9, %10, %11}, %12", "1")
FLASH_QLA_WGMMA_RS(mma_rs_n32, "m64n32", 16, "{%16, %17, %18, %19}, %20", "0")
FLASH_QLA_WGMMA_RS(mma_rs_n32_trans, "m64n32", 16, "{%16, %17, %18, %19}, %20", "1")
FLASH_QLA_WGMMA_RS(mma_rs_n64, "m64n64", 32, "{%32, %33, %34, %35}, %36", "0")
FLASH_QLA_WGMMA_RS(mma_rs_n128_trans, "m64n128", 64, "{%64, %65, %66, %67}, %68", "1")
// Both from shared memory:
#define FLASH_QLA_WGMMA_SS(name, shape, values, a_and_b, transposed)                           \
  template <typename T>                                                                        \
  __device__ __forceinline__ void name##_init(float (&d)[values], uint64_t a, uint64_t b) {    \
    FLASH_QLA_WGMMA(shape, FLASH_QLA_WGMMA_TEXT_##values, a_and_b ", 0, 1, 1, 0, " transposed, \
                    FLASH_QLA_WGMMA_SUMS_##values("=f", d), "l"(a), "l"(b))                    \
  }                                                                                            \
  template <typename T>                                                                        \
  __device__ __forceinline__ void name(float (&d)[values], uint64_t a, uint64_t b) {           \
    FLASH_QLA_WGMMA(shape, FLASH_QLA_WGMMA_TEXT_##values, a_and_b ", 1, 1, 1, 0, " transposed, \
                    FLASH_QLA_WGMMA_SUMS_##values("+f", d), "l"(a), "l"(b))                    \
  }
FLASH_QLA_WGMMA_SS(mma_ss_n64, "m64n64", 32, "%32, %33", "0")
FLASH_QLA_WGMMA_SS(mma_ss_n128_trans, "m64n128", 64, "%64, %65", "1")

#undef FLASH_QLA_WGMMA_RS
#undef FLASH_QLA_WGMMA_SS
#undef FLASH_QLA_WGMMA
#undef FLASH_QLA_WGMMA_A_REGISTERS
#undef FLASH_QLA_WGMMA_TEXT_8
#undef FLASH_QLA_WGMMA_SUMS_8
#undef FLASH_QLA_WGMMA_TEXT_16
#undef FLASH_QLA_WGMMA_SUMS_16
#undef FLASH_QLA_WGMMA_TEXT_32
#undef FLASH_QLA_WGMMA_SUMS_32
#undef FLASH_QLA_WGMMA_TEXT_64
#undef FLASH_QLA_WGMMA_SUMS_64

}  // namespace flash_qla::cuda
