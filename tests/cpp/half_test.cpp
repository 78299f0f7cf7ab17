// Conversions of core/half.h: every bit pattern, and the rounding of every kind of value between two of them.
#include "core/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace flash_qla {
namespace {

// What a 16-bit format means, from its definition: an independent decoder for to_float.
double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const double sign = bits >> (exponent_bits + mantissa_bits) ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0 + fraction, exponent - bias));
}

struct BFloat16Format {
  using Type = BFloat16;
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static Type round(float x) { return to_bfloat16(x); }
};
struct Float16Format {
  using Type = Float16;
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static Type round(float x) { return to_float16(x); }
};

template <class Format>
class Half : public testing::Test {
 public:
  using Type = typename Format::Type;
  static Type of_bits(uint32_t bits) { return Type{static_cast<uint16_t>(bits)}; }
  static double value(uint32_t bits) { return decode(bits, Format::kExponentBits, Format::kMantissaBits); }
  static uint16_t round(float x) { return Format::round(x).bits; }
  // Bits of positive infinity: those below are the finite numbers, in order.
  static constexpr uint32_t kInfinity = ((1u << Format::kExponentBits) - 1) << Format::kMantissaBits;
};

using Formats = testing::Types<BFloat16Format, Float16Format>;
TYPED_TEST_SUITE(Half, Formats);

TYPED_TEST(Half, EveryPatternDecodes) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = this->value(bits);
    const float got = to_float(this->of_bits(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(got), expected) << bits;
      ASSERT_EQ(std::signbit(got), (bits >> 15) != 0) << bits;
    }
  }
}

TYPED_TEST(Half, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t back = this->round(to_float(this->of_bits(bits)));
    if (std::isnan(this->value(bits))) {
      ASSERT_TRUE(std::isnan(this->value(back))) << bits;
      ASSERT_EQ(back >> 15, bits >> 15) << "the sign of NaN " << bits;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

TYPED_TEST(Half, MidpointsGoToTheEvenNeighbour) {
  for (uint32_t bits = 0; bits + 1 < this->kInfinity; ++bits) {
    const double low = this->value(bits), high = this->value(bits + 1);
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(static_cast<double>(middle), (low + high) / 2) << "float32 holds every midpoint";
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    ASSERT_EQ(this->round(middle), even) << bits;
    ASSERT_EQ(this->round(-middle), even | 0x8000u) << bits;
    ASSERT_EQ(this->round(std::nextafterf(middle, 0.0f)), bits) << bits;
    ASSERT_EQ(this->round(std::nextafterf(middle, INFINITY)), bits + 1) << bits;
  }
}

TYPED_TEST(Half, OverflowGoesToInfinity) {
  const uint32_t largest = this->kInfinity - 1;
  const double step = this->value(largest) - this->value(largest - 1);
  const float first_that_overflows = static_cast<float>(this->value(largest) + step / 2);
  EXPECT_EQ(this->round(first_that_overflows), this->kInfinity);
  EXPECT_EQ(this->round(std::nextafterf(first_that_overflows, 0.0f)), largest);
  EXPECT_EQ(this->round(-first_that_overflows), this->kInfinity | 0x8000u);
  EXPECT_EQ(this->round(INFINITY), this->kInfinity);
  EXPECT_EQ(this->round(std::numeric_limits<float>::max()), this->kInfinity);
}

TYPED_TEST(Half, UnderflowGoesToZeroOfTheSameSign) {
  const float half_of_smallest = static_cast<float>(this->value(1) / 2);
  EXPECT_EQ(this->round(half_of_smallest), 0);  // the even one
  EXPECT_EQ(this->round(-half_of_smallest), 0x8000);
  EXPECT_EQ(this->round(std::nextafterf(half_of_smallest, 1.0f)), 1);
  EXPECT_EQ(this->round(0.0f), 0);
  EXPECT_EQ(this->round(-0.0f), 0x8000);
  EXPECT_EQ(this->round(std::numeric_limits<float>::denorm_min()), 0);
}

TYPED_TEST(Half, NanStaysNan) {
  // Payloads in the low bits alone must not round to infinity.
  for (uint32_t payload : {1u, 0x1fffu, 0x2000u, 0x7fffu, 0x400000u, 0x7fffffu}) {
    for (uint32_t sign : {0u, 0x80000000u}) {
      EXPECT_TRUE(std::isnan(this->value(this->round(bits_float(sign | 0x7f800000u | payload))))) << payload;
    }
  }
}

TEST(HalfConversions, ThroughTemplates) {
  EXPECT_EQ(from_float<float>(1.5f), 1.5f);
  EXPECT_EQ(from_float<double>(1.5f), 1.5);
  EXPECT_EQ(to_float(from_float<BFloat16>(1.5f)), 1.5f);
  EXPECT_EQ(to_float(from_float<Float16>(-1.5f)), -1.5f);
}

}  // namespace
}  // namespace flash_qla
