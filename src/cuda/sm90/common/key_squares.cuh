// |k|^2 of keys in memory, by a few threads each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90 {

template <typename Element>
__device__ inline float sum_of_squares(uint4 x) {
  const uint32_t words[4] = {x.x, x.y, x.z, x.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Element low, high;
    const uint16_t bits[2] = {static_cast<uint16_t>(words[i] & 0xffff), static_cast<uint16_t>(words[i] >> 16)};
    memcpy(static_cast<void*>(&low), &bits[0], 2);
    memcpy(static_cast<void*>(&high), &bits[1], 2);
    const float a = static_cast<float>(low), b = static_cast<float>(high);
    sum = fmaf(a, a, fmaf(b, b, sum));
  }
  return sum;
}

// A key by four neighbouring threads, which read 64 bytes side by side at a time; quad_sum() gives all of it.
inline constexpr int kThreadsPerKey = 4;
template <typename Element>
__device__ inline float own_part_of_square(const Element* key) {
  const uint4* from = reinterpret_cast<const uint4*>(key) + threadIdx.x % kThreadsPerKey;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeadDim / 8 / kThreadsPerKey; ++i) sum += sum_of_squares<Element>(from[i * kThreadsPerKey]);
  return sum;
}

}  // namespace flash_qla::cuda::sm90
