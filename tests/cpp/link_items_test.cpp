// How the tokens of links are cut into segments (cuda/sm90/links/link_items.h): every token once, every
// matrix in a place of its own, and never more of them than there is room for.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "cuda/sm90/links/link_items.h"

namespace flash_qla::cuda::sm90::links {
namespace {

constexpr int32_t kSms = 132;

TEST(LinkItems, SegmentsCoverTheTokensOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    const bool backward = round % 2 == 1;
    const LinkTokens tokens{below(1000), below(100), backward ? 0 : below(5) * kChunk, 0, below(4)};
    LinkTokens t = tokens;
    t.to = t.from + 1 + below(40 * kChunk);
    LinkChain chain{below(50), 0, 0, 0, backward ? 0 : below(2)};
    chain.segments = even_link_spacing(t.chunks(), 1 + below(kMostLinkSegments)).segments(t.chunks());
    ASSERT_GE(chain.segments, 1);
    ASSERT_LE(chain.segments, t.chunks());
    const bool starts = below(2) == 1;
    std::set<int32_t> cells;
    int32_t at = backward ? t.first + t.to : t.first + t.from;  // where the pass stands
    for (int32_t i = 0; i < chain.matrices(); ++i) {
      const WorkItem item = link_item(chain, i, t, starts, 7, backward);
      ASSERT_TRUE(cells.insert(item.slot).second) << "two matrices in one place";
      ASSERT_GE(item.slot, chain.first_cell);
      ASSERT_LT(item.slot, chain.first_cell + chain.matrices());
      ASSERT_GT(item.tokens, 0);
      ASSERT_EQ(item.row - t.first, item.position * kChunk);
      ASSERT_EQ(item.chunk, t.first_chunk + item.position);
      ASSERT_EQ(item.sequence, t.row);
      ASSERT_EQ(item.head, 7);
      const bool transition = (item.flags & kItemTransition) != 0;
      ASSERT_EQ(transition, i >= chain.segments);
      if (!transition) {
        ASSERT_EQ(item.slot, chain.state_cell(i));
        ASSERT_EQ((item.flags & kItemFromStart) != 0, starts && i == 0);
        // Segments follow one another as the pass goes, and only that of the last tokens may end within a chunk.
        ASSERT_EQ(backward ? item.row + item.tokens : item.row, at);
        at = backward ? item.row : item.row + item.tokens;
        ASSERT_TRUE(item.tokens % kChunk == 0 || item.row + item.tokens == t.first + t.to);
        continue;
      }
      const int32_t segment = chain.segments - chain.transitions() + i - chain.segments;
      ASSERT_EQ(item.slot, chain.transition_cell(segment));
      const WorkItem state = link_item(chain, segment, t, starts, 7, backward);
      ASSERT_EQ(item.row, state.row);
      ASSERT_EQ(item.tokens, state.tokens);
    }
    ASSERT_EQ(at, backward ? t.first + t.from : t.first + t.to);
    ASSERT_EQ(chain.transitions(), chain.segments - (chain.is_affine ? 0 : 1));
  }
}

TEST(LinkItems, AnyGatesFit) {
  for (const int64_t chains : {1, 4, 32, 64, 1000}) {
    for (const int32_t chunks : {1, 5, 63, 64, 512, 5000}) {
      for (const bool affine : {false, true}) {
        LinkChain chain{0, 0, 0, 0, affine};
        chain.segments = even_link_spacing(chunks, 1).segments(chunks);
        EXPECT_LE(chains * chain.matrices(), link_capacity(chains, false, kSms)) << "one segment always fits";
        chain.segments = invariant_link_spacing().segments(chunks);
        EXPECT_LE(chains * chain.matrices(), link_capacity(chains, true, kSms)) << "whatever other heads do";
      }
    }
  }
}

// The number of segments that takes least, of those that fit. carried: of so many heads the forward goes on.
int32_t best(int32_t heads, int32_t chunks, bool affine, bool backward, int32_t carried = 0) {
  int32_t found = 0;
  float least = 0.0f;
  for (int32_t n = 1; n <= kMostLinkSegments; ++n) {
    LinkChain chain{0, 0, 0, 0, affine};
    chain.segments = even_link_spacing(chunks, n).segments(chunks);
    if (heads * chain.matrices() > link_capacity(heads, false, kSms)) continue;
    float time = link_time(heads * chain.segments, heads * chain.transitions(), chunks, n, kSms, backward);
    if (carried > 0) time += carried_time(heads * chain.segments, carried, chunks, n, kSms);
    if (found == 0 || time < least) {
      found = n;
      least = time;
    }
  }
  return found;
}

TEST(LinkItems, FewHeadsAreSharedByTheCard) {
  EXPECT_EQ(best(8, 512, true, false), 8);  // 128 items, one to a multiprocessor
  EXPECT_EQ(best(32, 512, true, false), 2);
  EXPECT_LT(best(1, 512, true, false), 40);  // more of them take longer to be put together
  EXPECT_EQ(best(132, 512, false, false), 1);
  EXPECT_GE(best(8, 512, false, true), 8);
}

// The forward's items are the links' segments: two of each head would leave half of the card idle.
TEST(LinkItems, SegmentsServeTheForwardToo) {
  EXPECT_EQ(best(32, 512, true, false, 32), 4);
  EXPECT_EQ(best(8, 512, true, false, 32), 8) << "others fill the card";
}

}  // namespace
}  // namespace flash_qla::cuda::sm90::links
