// The scan along a chain of segments on the CPU, against double precision.
#include "cuda/sm90/context_parallel/chain_scan.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"

namespace flash_qla::cuda::sm90::cp {
namespace {

// Twice over the chain, so that a block's second scan finds what the first has left. x: [column][row], as B and the
// states after each step, which come behind it.
__global__ void scan_twice(const float* transitions, int32_t steps, const float* x, float* after) {
  const ChainPlace at;
  const int column0 = static_cast<int>(blockIdx.x) * kChainColumns;
  const auto load = [&](int32_t number, ChainShare& columns) {
    for (int i = 0; i < kChainColumns; ++i) columns[i] = x[number * kMatrix + (column0 + i) * kHeadDim + at.row];
  };
  for (int turn = 0; turn < 2; ++turn) {
    ChainShare state;
    load(0, state);
    scan_chain(
        *dynamic_shared<ChainMemory>(), transitions, steps, state,
        [&](int32_t step, ChainShare& added) { load(1 + step, added); },
        [&](int32_t step, const ChainShare& columns) {
          float* to = after + (turn * steps + step) * kMatrix;
          for (int i = 0; i < kChainColumns; ++i) to[(column0 + i) * kHeadDim + at.row] = columns[i];
        });
  }
}

TEST(ChainScan, IsTheSum) {
  constexpr int32_t kSteps = 3;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> cells(kSteps * kMatrix), x((1 + kSteps) * kMatrix), after(2 * kSteps * kMatrix);
  for (float& value : cells) value = normal(random) / std::sqrt(static_cast<float>(kHeadDim));
  for (float& value : x) value = normal(random);
  ASSERT_TRUE(launch("scan_twice", scan_twice, kChainSlices, kChainThreads, sizeof(ChainMemory), nullptr, cells.data(),
                     kSteps, x.data(), after.data())
                  .ok());
  std::vector<double> state(x.begin(), x.begin() + kMatrix), next(kMatrix);
  double worst = 0.0;
  for (int32_t step = 0; step < kSteps; ++step) {
    const float* m = cells.data() + step * kMatrix;
    for (int column = 0; column < kHeadDim; ++column) {
      for (int row = 0; row < kHeadDim; ++row) {
        double sum = x[(1 + step) * kMatrix + column * kHeadDim + row];
        for (int term = 0; term < kHeadDim; ++term) {
          sum += state[column * kHeadDim + term] * m[term * kHeadDim + row];
        }
        next[column * kHeadDim + row] = sum;
        for (int turn = 0; turn < 2; ++turn) {
          const float got = after[(turn * kSteps + step) * kMatrix + column * kHeadDim + row];
          ASSERT_TRUE(std::isfinite(got));
          worst = std::max(worst, std::abs(got - sum));
        }
      }
    }
    state.swap(next);
  }
  // fp32 sums of 128 terms about one.
  EXPECT_LT(worst, 2e-5);
  EXPECT_GT(worst, 0.0);
}

}  // namespace
}  // namespace flash_qla::cuda::sm90::cp
