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
}  // namespace emulated

template <typename T>
inline void mma_m16n8k16(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                         cuda_emulation::Where where = cuda_emulation::Where::current()) {
  using namespace emulated;
  const auto product = [](const ProductIn* in, ProductOut* out) {
    ++cuda_emulation::counters().products;
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 2; ++i) {
          const float2 pair = unpack2<T>(in[lane].a[i + 2 * half]);
          a[g + 8 * i][2 * t + 8 * half] = pair.x;
          a[g + 8 * i][2 * t + 8 * half + 1] = pair.y;
        }
        const float2 pair = unpack2<T>(in[lane].b[half]);
        b[2 * t + 8 * half][g] = pair.x;
        b[2 * t + 8 * half + 1][g] = pair.y;
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        double sum = static_cast<double>(in[lane].d[i]);
        for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
        out[lane].d[i] = static_cast<float>(sum);
      }
    }
  };
  const ProductIn in{{a0, a1, a2, a3}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const ProductOut out = cuda_emulation::collective<ProductOut>("mma_m16n8k16", where, 0xffffffffu, in, product);
  for (int i = 0; i < 4; ++i) d[i] = out.d[i];
}

}  // namespace flash_qla::cuda
