// What lies in offsets and indices: how it is read, what the check of device data refuses, and what it does unchecked.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "call_case.h"
#include "core/host_tensor.h"

namespace flash_qla {
namespace {

// host_sequences: offsets of any value lead to token ranges inside the call.

std::vector<Sequence> sequences_of(std::vector<int32_t> offsets, int64_t T) {
  Problem p;
  p.B = 1;
  p.T = T;
  p.N = static_cast<int64_t>(offsets.size()) - 1;
  p.varlen = true;
  return host_sequences(tensor(offsets.data(), DType::kInt32, {p.N + 1}), p);
}

TEST(HostSequences, CountsChunksSequenceBySequence) {
  const auto s = sequences_of({0, 65, 65, 129, 130}, 200);
  ASSERT_EQ(s.size(), 4u);
  EXPECT_EQ(s[0].begin, 0);
  EXPECT_EQ(s[0].length, 65);
  EXPECT_EQ(s[0].chunks(), 2);
  EXPECT_EQ(s[1].length, 0);
  EXPECT_EQ(s[1].first_chunk, 2);
  EXPECT_EQ(s[2].first_chunk, 2);
  EXPECT_EQ(s[3].first_chunk, 3);
  EXPECT_EQ(s[3].begin, 129);
}

TEST(HostSequences, ClampsWhatIsOutOfOrderOrRange) {
  const std::vector<std::vector<int32_t>> broken = {
      {-5, 10, 20}, {0, 30, 10},       {0, 1000, 20},      {500, 600, 700}, {10, 5, 0},
      {0, -1, -2},  {INT32_MIN, 0, 5}, {0, INT32_MAX, 20}, {20, 20, 20},    {0, INT32_MIN, INT32_MAX}};
  for (const auto& offsets : broken) {
    int64_t end = 0, chunks = 0;
    for (const Sequence& s : sequences_of(offsets, 20)) {
      EXPECT_GE(s.begin, end);
      EXPECT_GE(s.length, 0);
      EXPECT_LE(s.begin + s.length, 20);
      EXPECT_EQ(s.first_chunk, chunks);
      end = s.begin + s.length;
      chunks += s.chunks();
    }
    EXPECT_LE(chunks, 20 / kChunkSize + 2) << "more chunks than the bound that h is allocated with";
  }
}

TEST(HostSequences, DenseBatches) {
  Problem p;
  p.B = p.N = 3;
  p.T = 65;
  const auto s = host_sequences(Tensor{}, p);
  ASSERT_EQ(s.size(), 3u);
  EXPECT_EQ(s[2].b, 2);
  EXPECT_EQ(s[2].begin, 0);
  EXPECT_EQ(s[2].first_chunk, 4);
}

TEST(HostTensor, SlotsOutsideThePoolAreSkipped) {
  EXPECT_EQ(slot_or_skip(3, -1, 5), 3);
  EXPECT_EQ(slot_or_skip(0, -1, 5), 0);
  EXPECT_EQ(slot_or_skip(-1, -1, 5), -1);
  EXPECT_EQ(slot_or_skip(5, -1, 5), -1);
  EXPECT_EQ(slot_or_skip(3, 3, 5), -1);
  EXPECT_EQ(slot_or_skip(-2, -100, 5), -1) << "a null_index below -1 does not make negative slots real";
  EXPECT_EQ(slot_or_skip(INT64_MAX, -1, 5), -1);
}

TEST(HostTensor, LoadsAndStoresEveryDtype) {
  unsigned char memory[64] = {};
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const Tensor t = tensor(memory, dtype, {2, 2});
    store(t, offset_of(t, 1, 1), -2.5);
    EXPECT_EQ(load(t, 3), -2.5);
  }
  const int32_t narrow[4] = {1, -2, 3, 4};
  const int64_t wide[4] = {1, -2, int64_t{1} << 40, 4};
  EXPECT_EQ(load_index(tensor(narrow, DType::kInt32, {2, 2}), 0, 1), -2);
  EXPECT_EQ(load_index(tensor(wide, DType::kInt64, {4}), 2), int64_t{1} << 40);
}

// Offsets and indices that break their rules: refused when asked to look, harmless when not.

TEST(DeviceData, IsCheckedOnRequest) {
  Case c(1, 20, 1, 2, 3, 4, {0, 30, 10});
  ForwardArguments args = c.forward();
  args.options.check_device_data = 1;
  const Status s = run<ChunkForward>(args);
  EXPECT_EQ(s.code(), FLASH_QLA_INVALID_VALUE);
  EXPECT_STREQ(s.message(), "chunk_forward: cu_seqlens[2] (10) must not be below cu_seqlens[1] (30)");
  EXPECT_TRUE(c.o.untouched());
  args.options.check_device_data = 0;
  for (const std::string& path : cpu_paths()) {
    args.options.path = path.c_str();
    EXPECT_TRUE(run<ChunkForward>(args).ok());
  }
}

TEST(DeviceData, IsCheckedByTheEnvironment) {
  Case c(1, 20, 1, 2, 3, 4, {0, 10, 21});
  ASSERT_EQ(setenv("FLASH_QLA_CHECK", "1", 1), 0);
  const Status s = run<ChunkBackward>(c.backward());
  unsetenv("FLASH_QLA_CHECK");
  EXPECT_STREQ(s.message(), "chunk_backward: cu_seqlens[2] (21) must not be above q.shape[1] (20)");
  EXPECT_TRUE(c.dq.untouched());
}

TEST(DeviceData, ChunkStatesThatAreTooFewAreRefused) {
  // Two sequences of one chunk each; h has a row for one.
  Case c(1, 20, 1, 2, 3, 4, {0, 10, 20});
  Buffer<double> h({1, 2, 3, 4});
  ForwardArguments args = c.forward();
  args.h = h.view();
  args.options.check_device_data = 1;
  EXPECT_STREQ(run<ChunkForward>(args).message(),
               "chunk_forward: h.shape[0] (1) must be at least 2, the chunks of cu_seqlens");
  EXPECT_TRUE(h.untouched() && c.o.untouched());
  args.options.check_device_data = 0;
  for (const std::string& path : cpu_paths()) {
    args.options.path = path.c_str();
    EXPECT_TRUE(run<ChunkForward>(args).ok());
  }
}

TEST(DeviceData, IndicesOf64BitsAreReadWhole) {
  // A double has no room for this one: it would round to a slot that is even further past the pool.
  constexpr int64_t kIndex = (int64_t{1} << 60) + 1;
  Case c(1, 5);
  Buffer<double> pool({4, 2, 3, 4});
  ForwardArguments args = c.forward();
  args.initial_state = args.final_state = {};
  args.state_pool = pool.view();
  args.initial_state_indices = tensor(&kIndex, DType::kInt64, {1});
  args.options.check_device_data = 1;
  EXPECT_STREQ(run<ChunkForward>(args).message(),
               "chunk_forward: initial_state_indices[0] (1152921504606846977) must be below state_pool.shape[0] (4)");
  EXPECT_TRUE(pool.untouched() && c.o.untouched());
}

}  // namespace
}  // namespace flash_qla
