// Matrix products by one emulated warp; src/cuda/common/mma.cuh says what each is for.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/fragment.cuh"

namespace flash_qla::cuda {

namespace emulated {

struct ProductIn {
  uint32_t a[4], b[2];
  float d[4];
};
struct ProductOut {
  float d[4];
};

// D += A B, A 16 rows of kInner; rounded once, to fp32 or to fp16.
template <typename T, int kInner, bool kHalfSum>
ProductOut multiply_add(const ProductIn& operands, const char* name, cuda_emulation::Where where) {
  const auto product = [](const ProductIn* in, ProductOut* out) {
    ++cuda_emulation::counters().products;
    float a[16][kInner], b[kInner][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int part = 0; part < kInner / 8; ++part) {
        for (int i = 0; i < 2; ++i) {
          const float2 pair = unpack2<T>(in[lane].a[i + 2 * part]);
          a[g + 8 * i][2 * t + 8 * part] = pair.x;
          a[g + 8 * i][2 * t + 8 * part + 1] = pair.y;
        }
        const float2 pair = unpack2<T>(in[lane].b[part]);
        b[2 * t + 8 * part][g] = pair.x;
        b[2 * t + 8 * part + 1][g] = pair.y;
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        double sum = static_cast<double>(in[lane].d[i]);
        for (int k = 0; k < kInner; ++k) sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
        out[lane].d[i] = kHalfSum ? __half2float(__double2half(sum)) : static_cast<float>(sum);
      }
    }
  };
  return cuda_emulation::collective<ProductOut>(name, where, 0xffffffffu, operands, product);
}

template <int kInner>
void multiply_add_half_sum(uint32_t& low, uint32_t& high, const uint32_t (&a)[4], const uint32_t (&b)[2],
                           const char* name, cuda_emulation::Where where) {
  const float2 rows0 = unpack2<__half>(low), rows8 = unpack2<__half>(high);
  const ProductIn in{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {rows0.x, rows0.y, rows8.x, rows8.y}};
  const ProductOut out = multiply_add<__half, kInner, true>(in, name, where);
  low = pack2<__half>(out.d[0], out.d[1]);
  high = pack2<__half>(out.d[2], out.d[3]);
}

}  // namespace emulated

template <typename T>
inline void mma_m16n8k16(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                         cuda_emulation::Where where = cuda_emulation::Where::current()) {
  const emulated::ProductIn in{{a0, a1, a2, a3}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const emulated::ProductOut out = emulated::multiply_add<T, 16, false>(in, "mma_m16n8k16", where);
  for (int i = 0; i < 4; ++i) d[i] = out.d[i];
}

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                         cuda_emulation::Where where = cuda_emulation::Where::current()) {
  mma_m16n8k16<T>(d, a[0], a[1], a[2], a[3], b0, b1, where);
}

inline void mma_m16n8k8_half(float* d, uint32_t a0, uint32_t a1, uint32_t b,
                             cuda_emulation::Where where = cuda_emulation::Where::current()) {
  const emulated::ProductIn in{{a0, a1, 0u, 0u}, {b, 0u}, {d[0], d[1], d[2], d[3]}};
  const emulated::ProductOut out = emulated::multiply_add<__half, 8, false>(in, "mma_m16n8k8_half", where);
  for (int i = 0; i < 4; ++i) d[i] = out.d[i];
}

inline void mma_m16n8k16_half_sum(uint32_t& low, uint32_t& high, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                  uint32_t b0, uint32_t b1,
                                  cuda_emulation::Where where = cuda_emulation::Where::current()) {
  emulated::multiply_add_half_sum<16>(low, high, {a0, a1, a2, a3}, {b0, b1}, "mma_m16n8k16_half_sum", where);
}
inline void mma_m16n8k8_half_sum(uint32_t& low, uint32_t& high, uint32_t a0, uint32_t a1, uint32_t b,
                                 cuda_emulation::Where where = cuda_emulation::Where::current()) {
  emulated::multiply_add_half_sum<8>(low, high, {a0, a1, 0u, 0u}, {b, 0u}, "mma_m16n8k8_half_sum", where);
}

}  // namespace flash_qla::cuda
