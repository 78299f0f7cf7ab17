// Verification of draft tokens by the paths cuda_verify, cuda_generic and cuda_reference, on the CPU.
#include <gtest/gtest.h>

#include "memory.h"
#include "verify_tests.h"

namespace flash_qla::testing {
namespace {

TEST(Verify, DrawnTrees) {
  Settings settings;
  settings.cases = 40;
  Arena arena(kPieces);
  EXPECT_EQ(test_verify(settings, arena, "reference", FLASH_QLA_CPU), 0);
}

}  // namespace
}  // namespace flash_qla::testing
