// What links leave for the forward of the same tokens (cuda/sm90/context_parallel/carry.h), on the CPU: the plan that
// cuts carried heads, and the states at their cuts, against the recurrence in double. The forward's own kernels, which
// take items and states from there, want Hopper's instructions.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "core/half.h"
#include "cuda/common/launch.h"
#include "cuda/sm90/context_parallel/cut_states.cuh"
#include "cuda/sm90/context_parallel/plan_device.cuh"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {
namespace {

using namespace cuda::sm90;
using cp::WorkItem, cp::LinkChain;

constexpr int64_t kHq = 2, kHv = 4, kSize = int64_t{kHeadDim} * kHeadDim;
constexpr int32_t kSms = 132;
// In place of a spacing: it was not chosen beforehand; the lengths were expected, and no cut of them.
constexpr int32_t kNoSpacing = -1, kExpectedWhole = -2;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// docs/numerics.md: of float32. Segments' matrices are made in double here, and go along in float32.
constexpr double kBound = 1e-5;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, Free>;
Memory allocate(size_t bytes) { return Memory(std::aligned_alloc(256, (bytes + 512) / 256 * 256)); }

// Packed sequences, of which one is a part's.
class CarryEmulated : public ::testing::Test {
 protected:
  // row: the part's; starts: it begins here, and its first state is known.
  void make(std::vector<int64_t> offsets, int64_t row, bool starts) {
    offsets_ = std::move(offsets);
    row_ = row;
    starts_ = starts;
    const int64_t T = tokens();
    std::mt19937 random(static_cast<unsigned>(T + row));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < T * kHq; ++i) {
      std::vector<float> key(kHeadDim);
      float square = 0.f;
      for (float& x : key) square += (x = normal(random)) * x;
      for (float x : key) k_.push_back(to_bfloat16(x / std::sqrt(square)));
    }
    for (int64_t i = 0; i < T * kHv * kHeadDim; ++i) v_.push_back(to_bfloat16(normal(random)));
    for (int64_t i = 0; i < T * kHv; ++i) {
      // Two heads keep their state, and two forget within a chunk.
      g_.push_back(i % kHv == 0 ? 0.f : i % kHv == 1 ? -1e-3f : -0.5f);
      beta_.push_back(0.5f + 0.4f * std::tanh(normal(random)));
    }
    for (int64_t i = 0; i < sequences() * kHv * kSize; ++i) initial_.push_back(normal(random));
  }
  int64_t tokens() const { return offsets_.back(); }
  int64_t sequences() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t length(int64_t n) const { return offsets_[n + 1] - offsets_[n]; }

  // The links of the part, into carry_.
  void summarise(int mode) {
    const int64_t rows[2] = {row_, row_};
    const uint8_t leaves[1] = {1}, through[1] = {!starts_};
    std::vector<float> S(kHv * kSize), M(kHv * kSize), kind(kHv);
    ChunkSummaryArguments args;
    args.set_device(DeviceType::kCuda);
    args.options.path = "sm90";
    args.options.cp_mode = mode;
    args.k = tensor(k_.data(), DType::kBFloat16, {1, tokens(), kHq, kHeadDim});
    args.v = tensor(v_.data(), DType::kBFloat16, {1, tokens(), kHv, kHeadDim});
    args.g = tensor(g_.data(), DType::kFloat32, {1, tokens(), kHv});
    args.beta = tensor(beta_.data(), DType::kFloat32, {1, tokens(), kHv});
    args.cu_seqlens = tensor(offsets_.data(), DType::kInt64, {sequences() + 1});
    args.initial_state = tensor(initial_.data(), DType::kFloat32, {sequences(), kHv, kHeadDim, kHeadDim});
    args.rows = tensor(rows, DType::kInt64, {1, 2});
    args.leaves = tensor(leaves, DType::kBool, {1});
    args.through = tensor(through, DType::kBool, {1});
    args.S = tensor(S.data(), DType::kFloat32, {1, kHv, kHeadDim, kHeadDim});
    args.M = tensor(M.data(), DType::kFloat32, {1, kHv, kHeadDim, kHeadDim});
    args.kind = tensor(kind.data(), DType::kFloat32, {1, kHv});
    int64_t floats = 0;
    ASSERT_TRUE(ChunkSummary::carry_size(args, &floats).ok());
    ASSERT_GT(floats, 0);
    carry_memory_ = allocate(static_cast<size_t>(floats) * 4);
    std::fill_n(static_cast<float*>(carry_memory_.get()), floats, kNan);
    args.carry = tensor(static_cast<float*>(carry_memory_.get()), DType::kFloat32, {1, floats});
    size_t bytes = 0;
    ASSERT_TRUE(ChunkSummary::workspace_size(args, &bytes).ok());
    const Memory workspace = allocate(bytes);
    const Status status = ChunkSummary::run(args, workspace.get(), bytes);
    ASSERT_TRUE(status.ok()) << status.message();
    carry_ = cp::carry_at(carry_memory_.get(), floats * 4, 1, kHv);
    ASSERT_GE(carry_.slots, 2 * kHv);

    args.carry.shape[1] = floats - 1;  // another size, and a path that makes none
    EXPECT_FALSE(ChunkSummary::run(args, workspace.get(), bytes).ok());
    args.carry.shape[1] = floats;
    args.options.path = "cuda_generic";
    EXPECT_FALSE(ChunkSummary::run(args, workspace.get(), bytes).ok());
  }

  // The forward's plan with that carry, and the states at its cuts. Boundaries: of a warm-up of one chunk in the heads
  // that forget, else exact. spacing: 0: cut wherever it is possible; or kNoSpacing, kExpectedWhole.
  void plan(int32_t spacing, bool v_first) {
    cp::PlanArgs p{};
    fwd::Args& args = p.args;
    args.num_tokens = tokens();
    args.cu_seqlens = offsets_.data();
    args.cu_seqlens_are_64_bit = 1;
    args.num_sequences = static_cast<int32_t>(sequences());
    args.num_key_heads = kHq;
    args.num_value_heads = kHv;
    args.split = cp::Mode::kAuto;
    args.force_split = spacing == 0;
    args.state_v_first = v_first;
    args.initial.slot_stride = kHv * kSize;
    args.initial.head_stride = kSize;
    given_ = initial_;
    for (int64_t i = 0; i < sequences() * kHv * kSize && v_first; ++i) {
      const int64_t at = i % kSize;
      given_[i - at + at % kHeadDim * kHeadDim + at / kHeadDim] = initial_[i];
    }
    args.initial.data = given_.data();
    p.capacity = cp::plan_capacity(args.split, args.force_split, tokens(), args.num_sequences, kHv, kSms);
    p.capacity.carried = carry_.slots;
    p.carry = carry_;
    p.sms = kSms;
    p.costs = cp::Costs(kHq, kHv);
    p.by_heads = cp::Divisor(kHv);
    if (spacing > 0 || spacing == kExpectedWhole) {
      for (int64_t n = 0; n < sequences(); ++n) {
        const int32_t chunks = cp::chunks_in(static_cast<int32_t>(length(n)));
        p.expected_lengths.chunks += chunks;
        p.expected_lengths.sequences += chunks > 0;
        p.expected_lengths.longest = std::max(p.expected_lengths.longest, chunks);
      }
      if (spacing > 0) p.expected_cut_spacing.set_spacing(spacing);
    }
    slots_ = p.capacity.slots;
    warmups_.assign(slots_ + 16, 0);
    for (int64_t i = 0; i < slots_; ++i) warmups_[i] = i % kHv >= 2;
    state_items_.assign(p.capacity.state_items, WorkItem{});
    items_.assign(p.capacity.output_items + p.capacity.carried, WorkItem{});
    scans_.assign(p.capacity.scans, cp::Scan{});
    planned_.assign(sequences(), cp::PlannedSequence{});
    kinds_.assign(sequences() * kHv, 0);
    cut_states_.assign((slots_ + carry_.slots) * kSize, kNan);
    counters_ = {};
    start_ = {};
    p.workspace.counters = &counters_;
    p.workspace.start = &start_;
    p.workspace.warmups = warmups_.data();
    p.workspace.sequences = planned_.data();
    p.workspace.kinds = kinds_.data();
    p.workspace.state_items = state_items_.data();
    p.workspace.output_items = items_.data();
    p.workspace.scans = scans_.data();
    p.workspace.cut_states = reinterpret_cast<float4*>(cut_states_.data());

    ASSERT_EQ(cp::launch_carried(p, nullptr), cudaSuccess);
    const cuda::LaunchConfig shape(1, cp::kListThreads, 0, nullptr, true);
    const auto kernel = reinterpret_cast<void (*)(cp::PlanArgs)>(const_cast<void*>(cp::list_kernel()));
    ASSERT_EQ(cudaLaunchKernelEx(&shape.config, kernel, p), cudaSuccess);
    ASSERT_EQ(counters_.made, 1u);
    items_.resize(counters_.outputs.items + counters_.outputs.dependent_items);
  }

  // S^T [V][K] of a sequence and head after each of its tokens, in double.
  template <class Visit>
  void recur(int64_t n, int64_t head, const Visit& after) const {
    std::vector<double> S(kSize);
    for (int64_t i = 0; i < kSize; ++i) {
      S[i % kHeadDim * kHeadDim + i / kHeadDim] = initial_[(n * kHv + head) * kSize + i];
    }
    after(0, S);
    for (int64_t t = offsets_[n]; t < offsets_[n + 1]; ++t) {
      const double decay = std::exp(g_[t * kHv + head]), beta = beta_[t * kHv + head];
      double key[kHeadDim];
      for (int64_t k = 0; k < kHeadDim; ++k) key[k] = to_float(k_[(t * kHq + head / (kHv / kHq)) * kHeadDim + k]);
      for (int64_t v = 0; v < kHeadDim; ++v) {
        double along = 0.0;
        for (int64_t k = 0; k < kHeadDim; ++k) along += S[v * kHeadDim + k] * key[k];
        const double u = beta * (to_float(v_[(t * kHv + head) * kHeadDim + v]) - decay * along);
        for (int64_t k = 0; k < kHeadDim; ++k) S[v * kHeadDim + k] = decay * S[v * kHeadDim + k] + u * key[k];
      }
      after(t + 1 - offsets_[n], S);
    }
  }

  // S^T's element as a state group's thread finds it: fragments of products of 64 rows of V.
  float at_cut(int64_t slot, int v, int k) const {
    const int row = v % 16, lane = row % 8 * 4 + k % 8 / 2;
    const int vector = cp::cut_state_position(v / 64, v % 64 / 16, k / 8, lane);
    return cut_states_[slot * kSize + vector * 4 + row / 8 * 2 + k % 2];
  }

  // Every token once for each head, and the carried ones' segments from their true states.
  void check() {
    for (int64_t n = 0; n < sequences(); ++n) {
      for (int64_t head = 0; head < kHv; ++head) {
        const bool carried = n == row_ && head < 2;
        std::vector<int> written(length(n), 0);
        std::vector<const WorkItem*> from_cuts;
        int ends = 0;
        for (const WorkItem& item : items_) {
          if (item.sequence != n || item.head != head) continue;
          const int64_t first = item.row - offsets_[n];
          ASSERT_EQ(first, int64_t{item.position} * kChunkSize);
          ASSERT_LE(first + item.tokens, length(n));
          for (int64_t t = first + item.warmup * kChunkSize; t < first + item.tokens; ++t) ++written[t];
          ends += (item.flags & cp::kItemToEnd) != 0;
          EXPECT_EQ((item.flags & cp::kItemToEnd) != 0, first + item.tokens == length(n));
          if (!carried) continue;
          EXPECT_EQ(item.warmup, 0);
          EXPECT_EQ((item.flags & cp::kItemFromStart) != 0, first == 0);
          EXPECT_EQ((item.flags & cp::kItemFromCutState) != 0, first > 0);
          if (first > 0) from_cuts.push_back(&item);
        }
        EXPECT_EQ(ends, 1);
        for (int count : written) ASSERT_EQ(count, 1) << "sequence " << n << ", head " << head;
        if (!carried) continue;
        EXPECT_EQ(static_cast<int32_t>(from_cuts.size()) + 1, carry_.chains[head].segments);
        segments_ = std::max<size_t>(segments_, from_cuts.size() + 1);
        if (from_cuts.empty()) continue;
        recur(n, head, [&](int64_t token, const std::vector<double>& S) {
          for (const WorkItem* item : from_cuts) {
            if (item->position * int64_t{kChunkSize} != token) continue;
            ASSERT_GE(item->slot, slots_) << "beside those of the forward's own";
            double off = 0.0, norm = 0.0;
            for (int i = 0; i < kSize; ++i) {
              const double difference = at_cut(item->slot, i / kHeadDim, i % kHeadDim) - S[i];
              off += difference * difference;
              norm += S[i] * S[i];
            }
            EXPECT_LE(std::sqrt(off), kBound * std::sqrt(norm)) << "head " << head << ", token " << token;
          }
        });
      }
    }
    // Carried heads' states are there before the plan: their items wait for nothing. They come last of those, or first
    // if they are longer and no other head's states are to come.
    int32_t shortest = INT32_MAX, longest = 0, last_carried = -1, last_other = -1;
    for (int32_t i = 0; i < static_cast<int32_t>(items_.size()); ++i) {
      const WorkItem& item = items_[i];
      const bool from_cut = (item.flags & cp::kItemFromCutState) != 0, carried = item.sequence == row_ && item.head < 2;
      EXPECT_EQ(from_cut && !carried, i >= counters_.outputs.items) << "item " << i;
      if (i >= counters_.outputs.items) continue;
      if (from_cut) {
        shortest = std::min(shortest, item.tokens), last_carried = i;
      } else if (!carried) {
        longest = std::max(longest, item.tokens), last_other = i;
      }
    }
    if (last_carried >= 0 && last_other >= 0) {
      EXPECT_EQ(last_carried > last_other, shortest <= longest || counters_.states.items > 0)
          << shortest << " and " << longest;
    }
    for (int32_t i = 0; i < counters_.states.items; ++i) {
      EXPECT_FALSE(state_items_[i].sequence == row_ && state_items_[i].head < 2) << "a state is made twice";
    }
  }

  std::vector<int64_t> offsets_;
  int64_t row_ = 0, slots_ = 0;
  bool starts_ = false;
  std::vector<BFloat16> k_, v_;
  std::vector<float> g_, beta_, initial_, given_, cut_states_;
  Memory carry_memory_;
  cp::Carry carry_;
  std::vector<uint8_t> warmups_;
  std::vector<WorkItem> state_items_, items_;
  std::vector<cp::Scan> scans_;
  std::vector<cp::PlannedSequence> planned_;
  std::vector<int32_t> kinds_;
  cp::PlanCounters counters_{};
  cp::PlanStart start_{};
  size_t segments_ = 0;
};

TEST_F(CarryEmulated, OneSequenceGoesThrough) {
  make({0, 1000}, 0, false);
  summarise(FLASH_QLA_CP_AUTO);
  for (const int32_t spacing : {4, 0}) {
    plan(spacing, spacing == 0);
    check();
    EXPECT_EQ(counters_.states.items, 0) << "nothing is left to be made";
  }
  EXPECT_GE(segments_, 4u);
}

TEST_F(CarryEmulated, OneSequenceBeginsHere) {
  make({0, 832}, 0, true);
  summarise(FLASH_QLA_CP_AUTO);
  plan(4, true);
  check();
  EXPECT_GT(segments_, 4u);
}

TEST_F(CarryEmulated, OthersBesideIt) {
  for (const bool starts : {false, true}) {
    k_.clear(), v_.clear(), g_.clear(), beta_.clear(), initial_.clear();
    make({0, 37, 700, 2000}, 1, starts);
    summarise(FLASH_QLA_CP_AUTO);
    for (const int32_t spacing : {4, 0, kNoSpacing, kExpectedWhole}) {
      plan(spacing, false);
      check();
      if (spacing >= 0) {
        EXPECT_GT(counters_.states.items, 0) << "the last sequence's, which no link has";
      }
      EXPECT_GT(segments_, 1u) << "carried heads are cut in any case";
    }
  }
}

TEST_F(CarryEmulated, BySequencesLengths) {
  make({0, 2200}, 0, false);
  summarise(FLASH_QLA_CP_INVARIANT);
  plan(0, false);
  check();
  EXPECT_EQ(segments_, 2u);
}

// Lengths that the links did not have, as of offsets that have changed since: nothing is carried.
TEST_F(CarryEmulated, OtherLengths) {
  make({0, 37, 700, 1400}, 1, false);
  summarise(FLASH_QLA_CP_AUTO);
  offsets_ = {0, 37, 764, 1400};
  const int64_t row = row_;
  plan(4, false);
  row_ = -1;
  check();
  for (const WorkItem& item : items_) EXPECT_LT(item.slot, slots_) << row;
  offsets_ = {0, 764, 37, 1400};  // out of order: nothing is cut
  plan(0, false);
  EXPECT_EQ(counters_.outputs.dependent_items, 0);
  EXPECT_EQ(counters_.outputs.items, 3 * kHv);
}

}  // namespace
}  // namespace flash_qla
