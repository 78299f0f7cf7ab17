// sequence_cut against a cut that looks at one token after another, over random streams; and what it refuses. Compiled
// a second time for the emulated CUDA kernel (tests/emulation).
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "call_case.h"

namespace flash_qla {
namespace {

using Ints = std::vector<int64_t>;
using Flags = std::vector<uint8_t>;

Tensor view(Ints& values, std::initializer_list<int64_t> shape) { return tensor(values.data(), DType::kInt64, shape); }
Tensor view(Flags& values) { return tensor(values.data(), DType::kBool, {static_cast<int64_t>(values.size())}); }

// One rank's cut, filled with what no cut writes.
struct Cut {
  int64_t P, R;
  Ints local, sequences, rows, entering, leaving, halo, count;
  Flags starts, ends, enters, leaves, through;

  Cut(int64_t P, int64_t R)
      : P(P),
        R(R),
        local(R + 1, -7),
        sequences(R, -7),
        rows(2 * P, -7),
        entering(P, -7),
        leaving(P, -7),
        halo(P, -7),
        count(P, -7),
        starts(R, 7),
        ends(R, 7),
        enters(P, 7),
        leaves(P, 7),
        through(P, 7) {}

  SequenceCutArguments arguments(Ints& cu, Ints& bounds, int64_t last_part, bool all_rows) {
    SequenceCutArguments args;
    args.set_device(kTestedDevice);
    args.cu_seqlens = view(cu, {static_cast<int64_t>(cu.size())});
    args.bounds = view(bounds, {P, 2});
    args.last_part = last_part;
    args.all_rows = all_rows;
    args.local_cu_seqlens = view(local, {R + 1});
    args.sequences = view(sequences, {R});
    args.starts_here = view(starts);
    args.ends_here = view(ends);
    args.row_counts = view(count, {P});
    args.rows = view(rows, {P, 2});
    args.enters = view(enters);
    args.leaves = view(leaves);
    args.through = view(through);
    args.entering_rows = view(entering, {P});
    args.leaving_rows = view(leaving, {P});
    args.halo_tokens = view(halo, {P});
    return args;
  }
};

// The sequence of a token, -1 for none.
int64_t owner(const Ints& cu, int64_t token) {
  for (size_t n = 0; n + 1 < cu.size(); ++n) {
    if (cu[n] <= token && token < cu[n + 1]) return static_cast<int64_t>(n);
  }
  return -1;
}

// What each rank should see of each sequence, token by token.
void expect_cut(const Cut& cut, const Ints& cu, const Ints& bounds, bool all_rows, std::vector<int>* begins,
                std::vector<int>* finishes) {
  const int64_t N = static_cast<int64_t>(cu.size()) - 1;
  int64_t local = 0;
  ASSERT_EQ(cut.local[0], 0);
  for (int64_t row = 0; row < cut.R; ++row) {
    const int64_t n = cut.sequences[row];
    if (n < 0) {
      ASSERT_GE(row, std::accumulate(cut.count.begin(), cut.count.end(), int64_t{0}));
      ASSERT_EQ(cut.local[row + 1], local);
      ASSERT_FALSE(cut.starts[row] || cut.ends[row]);
      continue;
    }
    ASSERT_LT(n, N);
    (*begins)[n] += cut.starts[row];
    (*finishes)[n] += cut.ends[row];
    local = cut.local[row + 1];
  }
  local = 0;
  int64_t first_row = 0;
  for (int64_t p = 0; p < cut.P; ++p) {
    const int64_t begin = bounds[2 * p], end = bounds[2 * p + 1];
    const int64_t row_behind = first_row + cut.count[p];
    int64_t first = -1, last = -1;
    for (int64_t token = begin; token < end; ++token) {
      const int64_t n = owner(cu, token);
      if (n < 0) continue;
      const int64_t row =
          std::upper_bound(cut.local.begin(), cut.local.end(), local) - cut.local.begin() - 1;  // of this token
      ASSERT_LT(row, cut.R);
      ASSERT_EQ(cut.sequences[row], n);
      if (all_rows) {
        ASSERT_EQ(row, p * N + n);
      }
      ASSERT_GE(row, first_row);
      ASSERT_LT(row, row_behind);
      if (first < 0) first = row;
      last = row;
      ++local;
    }
    first_row = row_behind;
    ASSERT_EQ(cut.rows[2 * p], first);
    ASSERT_EQ(cut.rows[2 * p + 1], last);
    const bool enters = first >= 0 && begin > 0 && owner(cu, begin - 1) == cut.sequences[first];
    const bool leaves = last >= 0 && owner(cu, end) == cut.sequences[last];
    ASSERT_EQ(cut.enters[p], enters);
    ASSERT_EQ(cut.leaves[p], leaves);
    ASSERT_EQ(cut.through[p], enters && leaves && first == last);
    ASSERT_EQ(cut.entering[p], enters ? first : -1);
    ASSERT_EQ(cut.leaving[p], leaves ? last : -1);
    int64_t halo = 0;
    while (enters && begin - halo > 0 && owner(cu, begin - halo - 1) == cut.sequences[first]) ++halo;
    ASSERT_EQ(cut.halo[p], halo);
  }
  ASSERT_EQ(cut.local[cut.R], local);
}

TEST(SequenceCut, AgreesWithACutTokenByToken) {
  std::mt19937 random(5);
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < (kTestedDevice == DeviceType::kCpu ? 100000 : 1000); ++round) {
    const int64_t W = draw(1, 5), N = draw(0, 6);
    const bool zigzag = draw(0, 1) != 0, all_rows = draw(0, 1) != 0;
    Ints cu = {0};
    for (int64_t n = 0; n < N; ++n) cu.push_back(cu.back() + (draw(0, 2) == 0 ? 0 : draw(0, 9)));
    const int64_t tokens = cu.back() + (draw(0, 2) == 0 ? draw(0, 5) : 0);
    // Cuts anywhere, on the sequences' own borders too, and empty parts.
    const int64_t parts = zigzag ? 2 * W : W;
    Ints cuts = {0, tokens};
    for (int64_t i = 1; i < parts; ++i) {
      cuts.push_back(draw(0, 1) ? draw(0, tokens) : cu[static_cast<size_t>(draw(0, N))]);
    }
    std::sort(cuts.begin(), cuts.end());

    std::vector<int> begins(static_cast<size_t>(N), 0), finishes(static_cast<size_t>(N), 0);
    for (int64_t rank = 0; rank < W; ++rank) {
      Ints places = {rank};
      if (zigzag) places.push_back(parts - 1 - rank);
      Ints bounds;
      int64_t last_part = -1;
      for (size_t p = 0; p < places.size(); ++p) {
        bounds.push_back(cuts[static_cast<size_t>(places[p])]);
        bounds.push_back(cuts[static_cast<size_t>(places[p] + 1)]);
        if (places[p] == parts - 1) last_part = static_cast<int64_t>(p);
      }
      const int64_t P = static_cast<int64_t>(places.size());
      Cut cut(P, all_rows ? P * N : N + P + draw(0, 1));
      const Status status = run<SequenceCut>(cut.arguments(cu, bounds, last_part, all_rows));
      ASSERT_TRUE(status.ok()) << status.message();
      expect_cut(cut, cu, bounds, all_rows, &begins, &finishes);
      if (HasFatalFailure()) {
        FAIL() << "round " << round << " rank " << rank << " of " << W << (zigzag ? " zigzag" : "");
      }
    }
    for (int64_t n = 0; n < N; ++n) {
      ASSERT_EQ(begins[static_cast<size_t>(n)], 1) << "round " << round << " sequence " << n;
      ASSERT_EQ(finishes[static_cast<size_t>(n)], 1) << "round " << round << " sequence " << n;
    }
  }
}

TEST(SequenceCut, OffsetsInAnyOrderStayInBounds) {
  std::mt19937 random(6);
  std::uniform_int_distribution<int64_t> any(-50, 50);
  for (int round = 0; round < (kTestedDevice == DeviceType::kCpu ? 2000 : 200); ++round) {
    Ints cu(6), bounds(4);
    for (int64_t& x : cu) x = any(random);
    for (int64_t& x : bounds) x = any(random);
    Cut cut(2, round % 2 ? 10 : 3);
    const Status status = run<SequenceCut>(cut.arguments(cu, bounds, round % 3 - 1, round % 2 != 0));
    ASSERT_TRUE(status.ok()) << status.message();
    for (int64_t row : cut.rows) ASSERT_LT(row, 20);
  }
}

TEST(SequenceCut, RefusesWhatItCannotMean) {
  Ints cu = {0, 3, 5}, bounds = {0, 2};
  const auto refusal = [&](auto&& change) {
    Cut cut(1, 3);
    SequenceCutArguments args = cut.arguments(cu, bounds, -1, false);
    change(args);
    const Status status = run<SequenceCut>(args);
    EXPECT_TRUE(cut.local == Ints(4, -7) && cut.starts == Flags(3, 7)) << "a refused call has written";
    return std::string(status.message());
  };
  EXPECT_EQ(refusal([](auto& a) { a.cu_seqlens = Tensor{}; }), "sequence_cut: cu_seqlens (None) must be given");
  EXPECT_EQ(refusal([](auto& a) { a.bounds.shape[1] = 3; }),
            "sequence_cut: bounds.shape[1] (3) must be 2: begin and end (2)");
  EXPECT_EQ(refusal([](auto& a) { a.last_part = 1; }), "sequence_cut: last_part (1) must be from -1 to 0");
  EXPECT_EQ(refusal([](auto& a) { a.all_rows = 1; }),
            "sequence_cut: local_cu_seqlens.shape[0] (4) must be 1 * 2 + 1 with all_rows");
  EXPECT_EQ(refusal([](auto& a) { a.enters.dtype = FLASH_QLA_INT32; }),
            "sequence_cut: enters.dtype (int32) must be bool");
  EXPECT_EQ(refusal([](auto& a) { a.struct_size = 8; }).rfind("sequence_cut: args.struct_size (8) must be ", 0), 0u);
}

}  // namespace
}  // namespace flash_qla
