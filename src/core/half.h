// bfloat16 and float16 on the host: bits, and conversions that round to nearest even and keep NaN and infinity.
#pragma once

#include <cstdint>
#include <cstring>

namespace flash_qla {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(double x) { return static_cast<float>(x); }
inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Shifting the fields into place makes a float32 whose exponent is 112 too small; the product repairs it exactly,
  // subnormals included.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

inline BFloat16 to_bfloat16(float x) {
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline Float16 to_float16(float x) {
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 65520 or more
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 puts the last kept bit at the last bit of the sum's mantissa, so the sum rounds for us.
    const uint32_t sum = float_bits(bits_float(magnitude) + 0.5f);
    return {static_cast<uint16_t>(sign | (sum - 0x3f000000u))};
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13))};
}

// Conversion to T from a compute type.
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline double from_float<double>(float x) {
  return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  return to_bfloat16(x);
}
template <>
inline Float16 from_float<Float16>(float x) {
  return to_float16(x);
}

}  // namespace flash_qla
