// Streams over ranks as the device tests compute them (tests/cpp/cuda/ranked_calls.h), with links by path "sm90" but
// for the kernels that multiply by wgmma (sm90_links.cpp), and calls by "sm80".
#include <gtest/gtest.h>

#include "links_cases.h"
#include "memory.h"

namespace flash_qla::testing {
namespace {

Settings once() {
  Settings settings;
  settings.small = true;
  settings.twice = false;
  return settings;
}

TEST(RankedCallsEmulated, Forward) {
  Arena arena(kPieces);
  EXPECT_EQ(test_ranked_forward(once(), arena, kEmulatedRanks), 0);
}
// The oracle's backward takes most of the time: a few cases.
TEST(RankedCallsEmulated, Backward) {
  Arena arena(kPieces);
  Settings settings = once();
  settings.only_cases = {3, 6, 7};
  EXPECT_EQ(test_ranked_backward(settings, arena, kEmulatedRanks), 0);
}
TEST(RankedCallsEmulated, Links) {
  Arena arena(kPieces);
  EXPECT_EQ(test_links(once(), arena, kEmulatedRanks), 0);
}

}  // namespace
}  // namespace flash_qla::testing
