// Sums and products of packed fp16 pairs of an emulated thread; src/cuda/sm90/common/packed_half.cuh says what each is
// for.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/fragment.cuh"

namespace flash_qla::cuda::sm90 {

inline uint32_t add2(uint32_t a, uint32_t b) {
  const float2 x = unpack2<__half>(a), y = unpack2<__half>(b);
  return pack2<__half>(x.x + y.x, x.y + y.y);
}
inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  const float2 x = unpack2<__half>(a), y = unpack2<__half>(b), z = unpack2<__half>(c);
  const auto rounded = [](float p, float q, float r) {
    const double sum = static_cast<double>(p) * static_cast<double>(q) + static_cast<double>(r);
    return __half2float(__double2half(sum));
  };
  return pack2<__half>(rounded(x.x, y.x, z.x), rounded(x.y, y.y, z.y));
}

}  // namespace flash_qla::cuda::sm90
