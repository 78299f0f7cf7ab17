// How path sm80 cuts calls into blocks and segments on cards of different sizes.
#include <gtest/gtest.h>

#include "cuda/sm80/plan.h"

namespace flash_qla::cuda::sm80 {
namespace {

constexpr int kCards[] = {1, 46, 84, 108, 132, 170};

struct Row {
  int64_t heads, K, V;
};

Problem problem_of(const Row& row, int64_t sequences, int64_t length) {
  Problem p;
  p.dtype = DType::kBFloat16;
  p.B = p.N = sequences;
  p.T = length;
  p.Hq = p.Hv = row.heads;
  p.group = 1;
  p.K = row.K;
  p.V = row.V;
  p.chunk_bound = sequences * ceil_div(length, kChunkSize);
  return p;
}

SplitPlan plan_of(const Row& row, int64_t sequences, int64_t length, int multiprocessors, flash_qla_cp_mode mode) {
  flash_qla_options options{};
  options.cp_mode = mode;
  return plan_split(problem_of(row, sequences, length), options, multiprocessors, false);
}

TEST(Sm80Plan, BlocksHaveOneTwoOrFourStrips) {
  for (const int sms : kCards) {
    for (const int64_t heads : {1, 8, 30, 64, 1000}) {
      for (const int64_t V : {3, 16, 48, 128, 256}) {
        const int strips = strips_for_outputs(problem_of({heads, 128, V}, 1, 8192), 1, sms).of_a_block;
        EXPECT_TRUE(strips == 1 || strips == 2 || strips == 4) << strips;
        EXPECT_LT(strips, 2 * ceil_div(V, kStrip) + (strips == 1)) << "strips beyond the head's last one";
      }
    }
  }
}

TEST(Sm80Plan, FewStripsSpreadAndManyShare) {
  EXPECT_EQ(strips_for_outputs(problem_of({8, 128, 256}, 1, 8192), 1, 132).of_a_block,
            1);  // 128 strips for 132 multiprocessors
  EXPECT_EQ(strips_for_outputs(problem_of({32, 128, 128}, 1, 8192), 1, 132).of_a_block, 2);  // 256
  EXPECT_EQ(strips_for_outputs(problem_of({30, 96, 192}, 1, 8192), 1, 132).of_a_block,
            4);  // 360: what they load would not come in time
  EXPECT_EQ(strips_for_outputs(problem_of({120, 96, 192}, 1, 8192), 1, 132).of_a_block, 4);
}

TEST(Sm80Plan, CutsLongSequencesOfFewHeads) {
  const auto cut = [](const Row& row, int64_t sequences, int64_t length) {
    return plan_of(row, sequences, length, 132, FLASH_QLA_CP_AUTO).rule.least_chunks > 0;
  };
  EXPECT_TRUE(cut({8, 64, 64}, 1, 8192));
  EXPECT_TRUE(cut({8, 96, 96}, 1, 8192));
  EXPECT_TRUE(cut({16, 64, 128}, 1, 8192));
  EXPECT_TRUE(cut({8, 128, 256}, 1, 8192));
  EXPECT_TRUE(cut({8, 256, 256}, 1, 8192));
  EXPECT_TRUE(cut({1, 128, 128}, 1, 100000));
  EXPECT_FALSE(cut({8, 64, 64}, 4, 2048));  // as short sequences as this are as fast whole
  EXPECT_FALSE(cut({8, 96, 96}, 4, 2048));
  EXPECT_FALSE(cut({16, 64, 128}, 4, 2048));
  EXPECT_FALSE(cut({8, 128, 256}, 4, 2048));
  EXPECT_FALSE(cut({8, 256, 256}, 4, 2048));
  EXPECT_FALSE(cut({32, 128, 128}, 1, 8192));
  EXPECT_FALSE(cut({30, 96, 192}, 1, 8192));
  EXPECT_FALSE(cut({1, 64, 64}, 1, 1024));
}

// Of an H100 at 1.755 GHz: the rows of benchmarks/results/h100_portable_forward.json (commit 1c2289f), whole and, where
// they were cut, in so many segments.
TEST(Sm80Plan, CostsAgreeWithWhatWasMeasured) {
  struct Measured {
    Row row;
    int64_t group, sequences, segments;
    double microseconds;
  };
  constexpr int kCard = 132;
  for (const Measured& m : {Measured{{32, 128, 128}, 2, 1, 1, 273.7}, Measured{{32, 128, 128}, 2, 4, 1, 245.5},
                            Measured{{8, 64, 64}, 1, 1, 1, 166.3}, Measured{{8, 64, 64}, 1, 1, 8, 76.8},
                            Measured{{8, 64, 64}, 1, 4, 1, 70.9}, Measured{{16, 64, 128}, 2, 1, 1, 177.8},
                            Measured{{16, 64, 128}, 2, 4, 1, 96.1}, Measured{{8, 96, 96}, 1, 1, 1, 197.7},
                            Measured{{8, 96, 96}, 1, 1, 4, 127.8}, Measured{{8, 96, 96}, 1, 4, 1, 88.6},
                            Measured{{30, 96, 192}, 1, 1, 1, 345.3}, Measured{{30, 96, 192}, 1, 4, 1, 333},
                            Measured{{8, 128, 256}, 1, 1, 1, 238.2}, Measured{{8, 128, 256}, 1, 1, 4, 186.3},
                            Measured{{8, 128, 256}, 1, 4, 1, 127.8}, Measured{{8, 256, 256}, 1, 1, 1, 438.3},
                            Measured{{8, 256, 256}, 1, 1, 4, 302.9}, Measured{{8, 256, 256}, 1, 4, 1, 217.8}}) {
    Problem p = problem_of(m.row, m.sequences, 8192 / m.sequences);
    p.group = m.group;
    p.Hq = p.Hv / p.group;
    const double clocks = pass_clocks(p, p.chunk_bound / p.N, m.segments, kCard) + other_clocks(p, kCard);
    EXPECT_NEAR(clocks / 1755, m.microseconds, 0.1 * m.microseconds)
        << m.row.K << " x " << m.row.V << ", " << m.sequences << " sequences, " << m.segments << " segments";
  }
}

// A call is cut only where that is expected to save a tenth of it.
TEST(Sm80Plan, CutsSave) {
  for (const int sms : kCards) {
    for (const Row& row : {Row{1, 64, 64}, Row{4, 128, 128}, Row{8, 96, 96}, Row{8, 128, 256}, Row{8, 256, 256},
                           Row{32, 128, 128}, Row{30, 96, 192}}) {
      for (const int64_t sequences : {1, 2, 4}) {
        for (const int64_t length : {900, 2048, 8192, 50000}) {
          const Problem p = problem_of(row, sequences, length);
          const SplitPlan plan = plan_of(row, sequences, length, sms, FLASH_QLA_CP_AUTO);
          if (plan.rule.least_chunks == 0) continue;
          const int64_t chunks = ceil_div(length, kChunkSize);
          const int64_t segments = segments_of(plan.rule, chunks, segment_chunks(plan.rule, p.chunk_bound));
          const double whole = pass_clocks(p, chunks, 1, sms);
          EXPECT_LE(pass_clocks(p, chunks, segments, sms) + 0.1 * (whole + other_clocks(p, sms)), whole)
              << row.heads << " heads, " << row.K << " x " << row.V << ", " << sequences << " of " << length;
        }
      }
    }
  }
}

// Whatever the card, what a cut needs is room that the plan has counted, and it is expected to pay.
TEST(Sm80Plan, SegmentsFitTheirRoom) {
  for (const int sms : kCards) {
    for (const Row& row : {Row{1, 64, 64}, Row{4, 128, 128}, Row{8, 96, 96}, Row{8, 256, 256}, Row{2, 100, 60}}) {
      for (const int64_t length : {900, 3000, 8192, 50000}) {
        for (const flash_qla_cp_mode mode : {FLASH_QLA_CP_AUTO, FLASH_QLA_CP_INVARIANT}) {
          const SplitPlan plan = plan_of(row, 1, length, sms, mode);
          if (plan.rule.least_chunks == 0) continue;
          const int64_t chunks = ceil_div(length, kChunkSize), at_least = segment_chunks(plan.rule, chunks);
          const int64_t segments = segments_of(plan.rule, chunks, at_least);
          EXPECT_LE(segments, plan.rows);
          EXPECT_LE(segments, plan.parts);
          if (mode == FLASH_QLA_CP_INVARIANT) {
            EXPECT_EQ(at_least, kInvariantChunks) << "whatever the card";
          } else {
            EXPECT_GE(segments, kLeastSegments);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace flash_qla::cuda::sm80
