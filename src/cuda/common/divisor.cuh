// Division by a number that the host knows.
#pragma once

#include <cstdint>

namespace flash_qla::cuda {

// Division of numbers below 2^31 by one that the host knows, in three instructions: a warp that has nothing else to do
// waits for every one of a division's twenty.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  static Divisor by(int64_t divisor) {
    Divisor d{static_cast<uint32_t>(divisor), 0, 0};
    while ((int64_t{1} << d.shift) < divisor) ++d.shift;
    d.multiplier = static_cast<uint32_t>((((uint64_t{1} << d.shift) - d.divisor) << 32) / d.divisor + 1);
    return d;
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const { return (__umulhi(x, multiplier) + x) >> shift; }
};

}  // namespace flash_qla::cuda
