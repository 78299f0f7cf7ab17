// Streams that are cut over ranks, as a user of the C++ interface does it: cut, summary, links side by side, combine,
// call. Held to one call over the whole stream by the reference; and what the four operations refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "call_case.h"
#include "stream_of_ranks.h"

namespace flash_qla {
namespace {

class Links : public testing::TestWithParam<const char*> {};

TEST_P(Links, EveryResultIsThatOfOneRank) {
  hold_to_one_rank<double>(GetParam(), DeviceType::kCpu, 60, 150, 5, 3, 1e-12, [](Case*, int) {});
}

INSTANTIATE_TEST_SUITE_P(Paths, Links, testing::Values("cpu", "reference"),
                         [](const auto& info) { return std::string(info.param); });

// Every rule is broken once; nothing is written.
template <class Op, class Arguments>
std::string refusal(Arguments args) {
  return run<Op>(args).message();
}

TEST(ChunkSummary, RefusesWhatTheContractForbids) {
  Case c(1, 5, 1, 2, 3, 4);
  Buffer<double> S({1, 2, 3, 4}), M({1, 2, 3, 3}), kind({1, 2});
  std::vector<int64_t> rows = {0, 0};
  std::vector<uint8_t> yes = {1};
  const auto legal = [&] {
    ChunkSummaryArguments args;
    args.k = c.k.view();
    args.v = c.v.view();
    args.g = c.g.view();
    args.beta = c.beta.view();
    args.rows = tensor(rows.data(), DType::kInt64, {1, 2});
    args.leaves = args.through = tensor(yes.data(), DType::kBool, {1});
    args.S = S.view();
    args.M = M.view();
    args.kind = kind.view();
    return args;
  };
  const auto refused = [&](auto&& change) {
    ChunkSummaryArguments args = legal();
    change(args);
    const std::string message = refusal<ChunkSummary>(args);
    EXPECT_TRUE(S.untouched() && M.untouched() && kind.untouched()) << message;
    return message;
  };
  EXPECT_EQ(refused([](auto& a) { a.rows = Tensor{}; }), "chunk_summary: rows (None) must be given");
  EXPECT_EQ(refused([](auto& a) { a.leaves.dtype = FLASH_QLA_INT32; }),
            "chunk_summary: leaves.dtype (int32) must be bool");
  EXPECT_EQ(refused([](auto& a) { a.through.shape[0] = 2; }),
            "chunk_summary: through.shape[0] (2) must be rows.shape[0] (1)");
  EXPECT_EQ(refused([](auto& a) { a.M.shape[3] = 4; }), "chunk_summary: M.shape[3] (4) must be k.shape[3] (3)");
  EXPECT_EQ(refused([](auto& a) { a.S.dtype = FLASH_QLA_FLOAT32; }),
            "chunk_summary: S.dtype (float32) must be float64, as k is");
  EXPECT_EQ(refused([](auto& a) { a.S.stride[1] = 0; }),
            "chunk_summary: S.stride[1] (0) must not be zero: it is written");
  EXPECT_EQ(refused([](auto& a) { a.options.path = "no"; }), "chunk_summary: path (no) must be one of: cpu, reference");
  EXPECT_TRUE(run<ChunkSummary>(legal()).ok());
}

TEST(ChunkForward, RefusesHalfAPairOfEnteringStates) {
  Case c(1, 5, 1, 2, 3, 4);
  std::vector<int64_t> rows = {0};
  Buffer<double> states({1, 2, 3, 4});
  ForwardArguments args = c.forward("cpu");
  args.entering_rows = tensor(rows.data(), DType::kInt64, {1});
  EXPECT_EQ(refusal<ChunkForward>(args), "chunk_forward: entering_state (None) must be given");
  EXPECT_EQ(refusal<Recurrent>(args), "recurrent: entering_state (None) must be given");
  args.entering_state = states.view();
  EXPECT_EQ(refusal<Recurrent>(args), "recurrent: entering_rows must be left to the chunked forward (it was given)");
  args.entering_state.shape[2] = 4;
  EXPECT_EQ(refusal<ChunkForward>(args), "chunk_forward: entering_state.shape[2] (4) must be q.shape[3] (3)");
  EXPECT_TRUE(c.o.untouched());
}

}  // namespace
}  // namespace flash_qla
