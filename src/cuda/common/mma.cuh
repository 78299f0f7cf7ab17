// Matrix products by one warp (mma.sync), fp32 sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_qla::cuda {

// d [16x8] += A [16x16] B [16x8], in the fragments of the instruction: a0 .. a3 are rows lane / 4 and + 8 of the left,
// then of the right eight columns of A, b0 and b1 the upper and lower eight rows of B.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// A 16x16 matrix of fp16: as a left operand, which is a result's form as well; as a right operand (the upper and lower
// eight rows of the left, then of the right eight columns); as fp32 sums.
struct HalfLeft {
  uint32_t x[4];
};
struct HalfRight {
  uint32_t x[4];
};
struct HalfSum {
  float x[8] = {};
};

__device__ __forceinline__ void add_half_product(HalfSum& d, const HalfLeft& a, const HalfRight& b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mma_m16n8k16<__half>(d.x + 4 * half, a.x[0], a.x[1], a.x[2], a.x[3], b.x[2 * half], b.x[2 * half + 1]);
  }
}

}  // namespace flash_qla::cuda
