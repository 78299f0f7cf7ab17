// The backward of path sm80 on the CPU, against the recurrence in double precision.
#include "sm80_backward_tests.cuh"

#include <gtest/gtest.h>

#include <cstdlib>

#include "cuda/sm80/plan.h"
#include "memory.h"
#include "scheduler.h"

namespace flash_qla::testing {
namespace {

// Few enough for a minute. FLASH_QLA_CASES and FLASH_QLA_SEED draw others.
Settings settings_for(int64_t cases) {
  Settings settings;
  settings.cases = cases;
  if (const char* given = std::getenv("FLASH_QLA_CASES")) settings.cases = std::atoi(given);
  if (const char* given = std::getenv("FLASH_QLA_SEED")) settings.seed = static_cast<uint64_t>(std::atoi(given));
  return settings;
}

class Sm80Backward : public ::testing::TestWithParam<HeadDims> {};

TEST_P(Sm80Backward, Drawn) {
  Arena arena(kPieces);
  const HeadDims dims = GetParam();
  cuda_emulation::counters() = {};
  const Settings settings = settings_for(dims.K * dims.V >= 128 * 128 ? 5 : 8);
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    if (takes(dims, type)) EXPECT_EQ(test_sm80_backward_of(settings, arena, kHostOracle, type, dims), 0);
  }
  EXPECT_GT(cuda_emulation::counters().products, 0);
  EXPECT_EQ(cuda_emulation::counters().bank_conflicts, 0);
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm80Backward, ::testing::ValuesIn(kSm80Dims), [](const auto& info) {
  return "K" + std::to_string(info.param.K) + "V" + std::to_string(info.param.V);
});

TEST(Sm80Backward, Heads) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_backward_heads(settings_for(1), arena, kHostOracle), 0);
}

TEST(Sm80Backward, Betas) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_backward_betas(settings_for(1), arena), 0);
}

TEST(Sm80Backward, Invariance) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_backward_invariance(settings_for(1), arena), 0);
}

TEST(Sm80Backward, Neighbours) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_backward_neighbours(settings_for(1), arena), 0);
}

TEST(Sm80Backward, MalformedDeviceData) {
  Arena arena(kPieces);
  EXPECT_EQ(test_sm80_backward_malformed(settings_for(20), arena), 0);
}

// However a call is cut into blocks, which depends on the number of multiprocessors, and into groups of heads, which
// depends on its scratch, its bits are the same.
TEST(Sm80Backward, BitsDoNotDependOnTheCut) {
  Arena arena(kPieces);
  Checker checker("backward: strips in a block, heads in a group, sm80", settings_for(1), arena, "sm80");
  const int multiprocessors_before = cuda_emulation::settings().multiprocessors;
  const size_t scratch_before = cuda::sm80::most_scratch;
  Random random(5);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.T = 40;
  s.Hq = 10;
  s.Hv = 10;
  s.K = 64;
  s.V = 250;
  Features f;
  f.initial_state = f.l2norm = f.strided = true;
  BackwardCall drawn;
  drawn.draw(s, f, false, true, true, random);
  BackwardCall first = drawn;
  checker.run("whole", first, "sm80");
  const auto check = [&](const std::string& what) {
    BackwardCall call = drawn;
    checker.run(what, call, "sm80");
    check_same(checker, what, call, first);
  };
  for (const int multiprocessors : {1000, 100, 1}) {
    cuda_emulation::settings().multiprocessors = multiprocessors;
    check(std::to_string(multiprocessors) + " multiprocessors");
  }
  cuda_emulation::settings().multiprocessors = multiprocessors_before;
  // Nor do other gradients depend on that of the initial state being wanted.
  BackwardCall without = drawn;
  without.dh0 = Buffer();
  checker.run("without dh0", without, "sm80");
  check_same(checker, "without dh0", without, first);
  cuda::sm80::most_scratch = 1;
  check("heads in groups");
  cuda::sm80::most_scratch = scratch_before;
  EXPECT_EQ(checker.finish(), 0);
}

// Scratch serves calls of fewer tokens and sequences, and is bounded where heads can go one group after another.
TEST(Sm80Backward, Scratch) {
  const auto bytes = [](int64_t T, int64_t N, int64_t heads, int64_t dim) {
    BackwardArguments args;
    args.options.device_type = FLASH_QLA_CUDA;
    args.options.path = "sm80";
    const auto tensor = [&](std::vector<int64_t> shape, DType type) {
      Tensor t{};
      t.ndim = static_cast<int32_t>(shape.size());
      t.dtype = static_cast<int32_t>(type);
      int64_t stride = 1;
      for (int i = t.ndim - 1; i >= 0; --i) {
        t.shape[i] = shape[static_cast<size_t>(i)];
        t.stride[i] = stride;
        stride *= t.shape[i];
      }
      return t;
    };
    for (Tensor* t : {&args.q, &args.k, &args.v, &args.d_o, &args.dq, &args.dk, &args.dv}) {
      *t = tensor({1, T, heads, dim}, DType::kBFloat16);
    }
    for (Tensor* t : {&args.g, &args.beta, &args.dg, &args.dbeta}) *t = tensor({1, T, heads}, DType::kFloat32);
    args.cu_seqlens = tensor({N + 1}, DType::kInt32);
    size_t size = 0;
    const Status status = ChunkBackward::workspace_size(args, &size);
    EXPECT_TRUE(status.ok()) << status.message();
    return size;
  };
  size_t before = 0;
  for (const int64_t T : {1000, 8192, 30000, 50000, 200000}) {
    const size_t size = bytes(T, 4, 16, 128);
    EXPECT_GE(size, before) << T;
    before = size;
  }
  EXPECT_LE(bytes(16384, 1, 32, 128), (size_t{768} << 20) + 256);
  EXPECT_GE(bytes(8192, 40, 16, 128), bytes(8192, 30, 16, 128));
}

}  // namespace
}  // namespace flash_qla::testing
