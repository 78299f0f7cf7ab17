// Links of parts by calls of path "sm80", and by segments as path "sm90" makes them (sm90_links.cpp), on the
// CPU: against the recurrence in double ("cuda_reference"), and with the kinds of the recurrence in float32.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/half.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {
namespace {

// The bounds of a final state and of dh0 in bf16 (docs/numerics.md), relative to the norm of a head's whole tensor:
// links are made as these are.
constexpr double kStateBound = 5e-3, kGradientBound = 8e-3;

struct Links {
  std::vector<float> S, M, kind;
};

struct LinkProblem {
  int64_t B, T, Hq, Hv, K, V, P;
  std::vector<int64_t> offsets, rows;  // offsets: empty for rows of a batch
  std::vector<uint8_t> crosses, through;
  std::vector<BFloat16> q, k, v;  // v: or the gradient of o
  std::vector<float> g, beta, given;
  int mode = FLASH_QLA_CP_AUTO;

  int64_t sequences() const { return offsets.empty() ? B : static_cast<int64_t>(offsets.size()) - 1; }
};

template <class Op, class Arguments>
void run_on(const char* path, Arguments* args) {
  args->options.path = path;
  args->set_device(DeviceType::kCuda);
  size_t bytes = 0;
  Status status = Op::workspace_size(*args, &bytes);
  ASSERT_TRUE(status.ok()) << status.message();
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  const std::unique_ptr<void, Free> memory(std::aligned_alloc(256, (bytes + 256) / 256 * 256));
  std::memset(memory.get(), 0xff, bytes);
  status = Op::run(*args, memory.get(), bytes);
  ASSERT_TRUE(status.ok()) << status.message();
}

template <class Arguments>
void fill(const LinkProblem& p, Arguments* args) {
  args->k = tensor(p.k.data(), DType::kBFloat16, {p.B, p.T, p.Hq, p.K});
  args->g = tensor(p.g.data(), DType::kFloat32, {p.B, p.T, p.Hv});
  args->beta = tensor(p.beta.data(), DType::kFloat32, {p.B, p.T, p.Hv});
  if (!p.offsets.empty()) {
    args->cu_seqlens = tensor(p.offsets.data(), DType::kInt64, {static_cast<int64_t>(p.offsets.size())});
  }
  args->rows = tensor(p.rows.data(), DType::kInt64, {p.P, 2});
  args->through = tensor(p.through.data(), DType::kBool, {p.P});
  args->options.scale = 0.3f;
  args->options.cp_mode = p.mode;
}

Links empty_links(const LinkProblem& p) {
  const float poison = std::numeric_limits<float>::quiet_NaN();
  return {std::vector<float>(p.P * p.Hv * p.K * p.V, poison), std::vector<float>(p.P * p.Hv * p.K * p.K, poison),
          std::vector<float>(p.P * p.Hv, poison)};
}

Links forward(const LinkProblem& p, const char* path) {
  Links links = empty_links(p);
  ChunkSummaryArguments args;
  fill(p, &args);
  args.v = tensor(p.v.data(), DType::kBFloat16, {p.B, p.T, p.Hv, p.V});
  args.initial_state = tensor(p.given.data(), DType::kFloat32, {p.sequences(), p.Hv, p.K, p.V});
  args.leaves = tensor(p.crosses.data(), DType::kBool, {p.P});
  args.S = tensor(links.S.data(), DType::kFloat32, {p.P, p.Hv, p.K, p.V});
  args.M = tensor(links.M.data(), DType::kFloat32, {p.P, p.Hv, p.K, p.K});
  args.kind = tensor(links.kind.data(), DType::kFloat32, {p.P, p.Hv});
  run_on<ChunkSummary>(path, &args);
  return links;
}

Links backward(const LinkProblem& p, const std::vector<float>& forward_kind, const char* path) {
  Links links = empty_links(p);
  ChunkSummaryBackwardArguments args;
  fill(p, &args);
  args.q = tensor(p.q.data(), DType::kBFloat16, {p.B, p.T, p.Hq, p.K});
  args.d_o = tensor(p.v.data(), DType::kBFloat16, {p.B, p.T, p.Hv, p.V});
  args.dht = tensor(p.given.data(), DType::kFloat32, {p.sequences(), p.Hv, p.K, p.V});
  args.enters = tensor(p.crosses.data(), DType::kBool, {p.P});
  args.forward_kind = tensor(forward_kind.data(), DType::kFloat32, {p.P, p.Hv});
  args.R = tensor(links.S.data(), DType::kFloat32, {p.P, p.Hv, p.K, p.V});
  args.kind = tensor(links.kind.data(), DType::kFloat32, {p.P, p.Hv});
  run_on<ChunkSummaryBackward>(path, &args);
  return links;
}

// What a head's matrix is off by, beside the larger of its own norm and kLeast.
void expect_close(const std::vector<float>& found, const std::vector<float>& wanted, int64_t size, double bound,
                  const std::string& what) {
  constexpr double kLeast = 1e-3;
  for (size_t first = 0; first < wanted.size(); first += static_cast<size_t>(size)) {
    double difference = 0.0, norm = 0.0;
    for (size_t i = first; i < first + static_cast<size_t>(size); ++i) {
      ASSERT_FALSE(std::isnan(found[i])) << what << ": every element is written";
      difference += (static_cast<double>(found[i]) - wanted[i]) * (static_cast<double>(found[i]) - wanted[i]);
      norm += static_cast<double>(wanted[i]) * wanted[i];
    }
    EXPECT_LE(std::sqrt(difference), bound * std::max(std::sqrt(norm), kLeast))
        << what << ", matrix " << first / static_cast<size_t>(size);
  }
}

class LinkCallsEmulated : public ::testing::Test {
 protected:
  double normal() { return std::normal_distribution<double>()(random_); }
  double uniform() { return std::uniform_real_distribution<double>()(random_); }

  LinkProblem draw(int64_t B, int64_t T, std::vector<int64_t> offsets, std::vector<int64_t> rows, int64_t K,
                   int64_t V) {
    LinkProblem p{
        B,  T,  1,  3,  K,  V, static_cast<int64_t>(rows.size()) / 2, std::move(offsets), std::move(rows), {}, {},
        {}, {}, {}, {}, {}, {}};
    for (std::vector<BFloat16>* rows_of : {&p.q, &p.k}) {
      for (int64_t i = 0; i < B * T; ++i) {
        std::vector<double> row(K);
        double square = 0.0;
        for (double& x : row) {
          x = normal();
          square += x * x;
        }
        for (double x : row) rows_of->push_back(to_bfloat16(static_cast<float>(x / std::sqrt(square))));
      }
    }
    for (int64_t i = 0; i < B * T * p.Hv * V; ++i) p.v.push_back(to_bfloat16(static_cast<float>(normal())));
    for (int64_t i = 0; i < B * T * p.Hv; ++i) {
      // One head forgets within a chunk, one keeps everything, one decays slowly.
      p.g.push_back(i % p.Hv == 0 ? -0.5f : i % p.Hv == 1 ? 0.f : static_cast<float>(-0.02 * uniform()));
      p.beta.push_back(static_cast<float>(uniform()));
    }
    for (int64_t i = 0; i < p.sequences() * p.Hv * K * V; ++i) p.given.push_back(static_cast<float>(normal()));
    for (int64_t i = 0; i < p.P; ++i) {
      p.crosses.push_back(uniform() < 0.8);
      p.through.push_back(p.crosses.back() && uniform() < 0.6);
    }
    return p;
  }

  // Links both ways, against the recurrence.
  void check(const LinkProblem& p, const std::string& what) {
    const Links found = forward(p, "sm80"), wanted = forward(p, "cuda_reference"), kinds = forward(p, "cuda_generic");
    EXPECT_EQ(found.kind, kinds.kind) << what;
    for (float kind : found.kind) ++kinds_[static_cast<int>(kind)];
    expect_close(found.S, wanted.S, p.K * p.V, kStateBound, what + " S");
    // A transition that is forgotten is zero, and at most e^-16 of the identity in the recurrence.
    expect_close(found.M, wanted.M, p.K * p.K, kStateBound, what + " M");
    const Links back = backward(p, found.kind, "sm80"), back_wanted = backward(p, wanted.kind, "cuda_reference");
    EXPECT_EQ(back.kind, backward(p, kinds.kind, "cuda_generic").kind) << what;
    expect_close(back.S, back_wanted.S, p.K * p.V, kGradientBound, what + " R");
  }

  // Links by segments, which leave nothing to rounding here but the last bits of float32.
  void check_segments(const LinkProblem& p, const std::string& what) {
    const Links found = forward(p, "sm90"), wanted = forward(p, "cuda_reference"), kinds = forward(p, "cuda_generic");
    EXPECT_EQ(found.kind, kinds.kind) << what;
    for (float kind : found.kind) ++kinds_[static_cast<int>(kind)];
    constexpr double kBound = 1e-5;  // docs/numerics.md: of float32
    expect_close(found.S, wanted.S, p.K * p.V, kBound, what + " S");
    expect_close(found.M, wanted.M, p.K * p.K, kBound, what + " M");
    const Links back = backward(p, found.kind, "sm90"), back_wanted = backward(p, wanted.kind, "cuda_reference");
    EXPECT_EQ(back.kind, backward(p, kinds.kind, "cuda_generic").kind) << what;
    expect_close(back.S, back_wanted.S, p.K * p.V, kBound, what + " R");
  }

  std::mt19937 random_{7};
  int kinds_[3] = {0, 0, 0};
};

TEST_F(LinkCallsEmulated, SegmentsOfPackedSequences) {
  for (const int64_t first : {1, 64, 500}) {
    const std::vector<int64_t> offsets = {0, first, first, first + 190, first + 190 + 700};
    check_segments(draw(1, offsets.back() + 5, offsets, {0, 3}, 128, 128), "one part, " + std::to_string(first));
    check_segments(draw(1, offsets.back() + 5, offsets, {0, 1, 2, 3}, 128, 128), "two parts, " + std::to_string(first));
    check_segments(draw(1, offsets.back() + 5, offsets, {0, 0, 2, 2}, 128, 128), "others, " + std::to_string(first));
  }
  for (int kind = 0; kind < 3; ++kind) EXPECT_GT(kinds_[kind], 0) << "no link of kind " << kind;
}

TEST_F(LinkCallsEmulated, SegmentsOfRowsOfABatch) { check_segments(draw(2, 300, {}, {0, 0, 1, 1}, 128, 128), "batch"); }

// One part of more chunks than a window may have: a head that forgets later than that keeps everything.
TEST_F(LinkCallsEmulated, SegmentsOfALongPart) {
  LinkProblem p = draw(1, 66 * 64, {0, 66 * 64}, {0, 0}, 128, 128);
  p.crosses = p.through = {1};
  const int64_t tokens = p.T;
  for (int64_t t = 0; t < tokens; ++t) p.g[t * p.Hv + 2] = -15.9f / static_cast<float>(tokens - 64);
  p.g[1 * p.Hv + 2] = -0.15f;  // in the first chunk, which a window of 64 at the end leaves out
  const Links found = forward(p, "sm90"), wanted = forward(p, "cuda_reference");
  EXPECT_EQ(forward(p, "cuda_generic").kind[2], FLASH_QLA_LINK_CONSTANT);
  EXPECT_EQ(found.kind, (std::vector<float>{FLASH_QLA_LINK_CONSTANT, FLASH_QLA_LINK_AFFINE, FLASH_QLA_LINK_AFFINE}));
  expect_close(found.S, wanted.S, p.K * p.V, 1e-5, "S");
}

// Keys of |k|^2 = 1 + e^x and beta = 1 let a state grow by e^x a token, against a decay of e^-0.5. A NaN forgets
// nothing.
TEST_F(LinkCallsEmulated, LongKeysKeepWhatGatesForget) {
  for (const int64_t K : {18, 128, 200}) {  // rows that are read by element, in one turn of a warp, and in two
    LinkProblem p = draw(1, 250, {0, 250}, {0, 0}, K, 4);
    p.crosses = p.through = {1};
    p.Hq = 3;
    p.Hv = 6;
    const std::vector<BFloat16> unit = p.k;
    p.k.clear();
    for (int64_t i = 0; i < p.T * p.Hq; ++i) {
      const double growth = i % p.Hq == 1 ? 0.6 : 0.3, length = std::sqrt(1.0 + std::exp(growth));
      for (int64_t j = 0; j < K; ++j) {
        p.k.push_back(to_bfloat16(static_cast<float>(length * to_float(unit[i / p.Hq * K + j]))));
      }
    }
    p.k.back() = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
    p.v.assign(p.T * p.Hv * p.V, to_bfloat16(0.f));
    p.g.assign(p.T * p.Hv, -0.5f);
    p.beta.assign(p.T * p.Hv, 1.f);
    p.given.assign(p.Hv * K * p.V, 0.f);
    constexpr float kForgets = FLASH_QLA_LINK_CONSTANT, kKeeps = FLASH_QLA_LINK_AFFINE;
    EXPECT_EQ(forward(p, "cuda_generic").kind, (std::vector<float>{kForgets, kForgets, kKeeps, kKeeps, kKeeps, kKeeps}))
        << K << " keys";
  }
}

// Windows of every length up to the row's own, of heads whose gates decide and of heads whose keys do: six value heads
// share a key head, and a block looks at four. A NaN behind a window does not matter, one within it does.
TEST_F(LinkCallsEmulated, WindowsOfManyLengths) {
  constexpr int64_t kChunks = 11, kTokens = kChunks * 64 - 20, kGroup = 6;
  LinkProblem p = draw(1, 30 + kTokens, {0, 30, 30 + kTokens}, {1, 1}, 128, 128);
  p.crosses = p.through = {1};
  p.Hq = 4;
  p.Hv = p.Hq * kGroup;
  const std::vector<BFloat16> unit = p.k;
  const double growths[4] = {0.0, 0.1, 0.2, 0.0};
  p.k.clear();
  for (int64_t i = 0; i < p.T * p.Hq; ++i) {
    const double length = std::sqrt(1.0 + std::exp(growths[i % p.Hq]));
    for (int64_t j = 0; j < p.K; ++j) {
      const double x = growths[i % p.Hq] == 0.0 ? 1.0 : length;
      p.k.push_back(to_bfloat16(static_cast<float>(x * to_float(unit[i / p.Hq * p.K + j]))));
    }
  }
  // In the middle of the row: a window of five chunks from either end does not see it.
  p.k[((30 + 340) * p.Hq + 3) * p.K] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  p.v.assign(p.T * p.Hv * p.V, to_bfloat16(0.f));
  p.given.assign(p.sequences() * p.Hv * p.K * p.V, 0.f);
  p.beta.assign(p.T * p.Hv, 1.f);
  for (int round = 0; round < 3; ++round) {
    p.g.clear();
    for (int64_t i = 0; i < p.T * p.Hv; ++i) {
      const int64_t head = i % p.Hv, in_group = head % kGroup;
      const double chunks = in_group == 5 ? 100.0 : 0.5 + 2.2 * static_cast<double>(in_group) + 0.6 * round;
      p.g.push_back(static_cast<float>(-16.0 / (64.0 * chunks) - growths[head / kGroup] * (0.9 + 0.1 * round)));
    }
    LinkProblem few_values = p;  // kinds do not depend on them
    few_values.V = 4;
    few_values.v.resize(p.T * p.Hv * 4);
    const Links wanted = forward(few_values, "cuda_generic");
    for (float kind : wanted.kind) ++kinds_[static_cast<int>(kind)];
    EXPECT_EQ(forward(p, "sm90").kind, wanted.kind) << "round " << round;
  }
  EXPECT_GT(kinds_[FLASH_QLA_LINK_CONSTANT], 20);
  EXPECT_GT(kinds_[FLASH_QLA_LINK_AFFINE], 20);
}

TEST_F(LinkCallsEmulated, SegmentsWithoutForgetting) {
  for (const int mode : {FLASH_QLA_CP_OFF, FLASH_QLA_CP_INVARIANT}) {
    LinkProblem p = draw(1, 2500, {0, 2500}, {0, 0}, 128, 128);
    p.crosses = p.through = {1};
    p.mode = mode;
    const Links found = forward(p, "sm90"), wanted = forward(p, "cuda_reference");
    EXPECT_EQ(found.kind[0], mode == FLASH_QLA_CP_OFF ? FLASH_QLA_LINK_AFFINE : FLASH_QLA_LINK_CONSTANT);
    expect_close(found.S, wanted.S, p.K * p.V, 1e-5, "S");
    expect_close(found.M, wanted.M, p.K * p.K, 1e-5, "M");
    expect_close(backward(p, found.kind, "sm90").S, backward(p, wanted.kind, "cuda_reference").S, p.K * p.V, 1e-5, "R");
  }
}

TEST_F(LinkCallsEmulated, PackedSequences) {
  for (int round = 0; round < 8; ++round) {
    const int64_t first = std::uniform_int_distribution<int64_t>(0, 150)(random_);
    const int64_t second = std::uniform_int_distribution<int64_t>(0, 150)(random_);
    const std::vector<int64_t> offsets = {0, first, first, first + second, first + second + 70};
    // One part, of the first and the last row, and two parts, of which one may be without tokens.
    check(draw(1, offsets.back() + 5, offsets, {0, 3}, 64, 48), "one part, round " + std::to_string(round));
    check(draw(1, offsets.back() + 5, offsets, {0, 1, 2, 3}, 40, 64), "two parts, round " + std::to_string(round));
  }
  for (int kind = 0; kind < 3; ++kind) EXPECT_GT(kinds_[kind], 0) << "no link of kind " << kind;
}

TEST_F(LinkCallsEmulated, RowsOfABatch) { check(draw(2, 100, {}, {0, 0, 1, 1}, 64, 64), "batch"); }

// The row numbers are device data: any value is harmless, and counts as no tokens.
TEST_F(LinkCallsEmulated, RowsOutOfRange) {
  LinkProblem p = draw(1, 130, {0, 130}, {-5, 9}, 64, 64);
  p.crosses = {1};
  for (float x : forward(p, "sm80").kind) EXPECT_EQ(x, FLASH_QLA_LINK_NONE);
  check(p, "out of range");
}

TEST_F(LinkCallsEmulated, SaysWhatItDoesNotTake) {
  const LinkProblem p = draw(1, 130, {0, 130}, {0, 0}, 64, 64);
  std::vector<float> R(p.Hv * p.K * p.V), kind(p.Hv);
  ChunkSummaryBackwardArguments args;
  fill(p, &args);
  args.q = tensor(p.q.data(), DType::kBFloat16, {p.B, p.T, p.Hq, p.K});
  args.enters = tensor(p.crosses.data(), DType::kBool, {p.P});
  args.forward_kind = tensor(kind.data(), DType::kFloat32, {p.P, p.Hv});
  args.R = tensor(R.data(), DType::kFloat32, {p.P, p.Hv, p.K, p.V});
  args.kind = tensor(kind.data(), DType::kFloat32, {p.P, p.Hv});
  args.options.path = "sm80";
  args.set_device(DeviceType::kCuda);
  const Status status = ChunkSummaryBackward::can_implement(args);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(std::string(status.message()).find("needs the gradient of o in the dtype of q"), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace flash_qla
