// Sums and products of packed fp16 pairs.
#pragma once

#include <cstdint>

namespace flash_qla::cuda::sm90 {

// a + b and a * b + c of packed fp16 pairs, each rounded once.
__device__ __forceinline__ uint32_t add2(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

}  // namespace flash_qla::cuda::sm90
