// Decode by path cuda_decode, on the CPU.
#include <gtest/gtest.h>

#include "decode_tests.h"
#include "memory.h"

namespace flash_qla::testing {
namespace {

TEST(Decode, DrawnRows) {
  Settings settings;
  settings.cases = 60;
  Arena arena(kPieces);
  EXPECT_EQ(test_decode(settings, arena, "reference", FLASH_QLA_CPU), 0);
}

}  // namespace
}  // namespace flash_qla::testing
