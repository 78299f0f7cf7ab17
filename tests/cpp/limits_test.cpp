// Arguments that no program means, but that one may hand over: a Status comes back, never a signal, and at once.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "call_case.h"

namespace flash_qla {
namespace {

// A legal prefill on a pool, with both kinds of checkpoints: every tensor that a forward call can have but
// initial_state, final_state and those of drafts.
struct PoolCase : Case {
  static constexpr int64_t kSlots = 4;
  Buffer<double> pool{{kSlots, 2, 3, 4}}, checkpoints{{2, 2, 3, 4}}, A_log{{2}}, dt_bias{{2}};
  Buffer<double> g_cumsum{{1, 130, 2}}, A{{1, 130, 2, 64}}, h{{4, 2, 3, 4}};
  Buffer<int32_t> initial{{2}}, final{{2}}, starts{{3}}, offsets{{1}}, slots{{1}};
  std::vector<unsigned char> has{1, 1};

  PoolCase() : Case(1, 130, 1, 2, 3, 4, {0, 64, 130}) {
    initial.data = {0, 1};
    final.data = {0, 1};
    starts.data = {0, 1, 2};
    offsets.data = {10};
    slots.data = {2};
    for (Buffer<double>* x : {&A_log, &dt_bias}) x->data = {0.0, 0.1};
  }

  ForwardArguments forward() {
    ForwardArguments args = Case::forward();
    args.initial_state = args.final_state = {};
    args.options.use_gate_in_kernel = 1;
    args.A_log = A_log.view();
    args.dt_bias = dt_bias.view();
    args.state_pool = pool.view();
    args.initial_state_indices = initial.view();
    args.final_state_indices = final.view();
    args.has_initial_state = tensor(has.data(), DType::kBool, {2});
    args.checkpoint_every = 64;
    args.checkpoints = checkpoints.view();
    args.checkpoint_cu_starts = starts.view();
    args.checkpoint_offsets = offsets.view();
    args.checkpoint_indices = slots.view();
    args.g_cumsum = g_cumsum.view();
    args.A = A.view();
    args.h = h.view();
    return args;
  }

  bool untouched() const {
    return o.untouched() && pool.untouched() && checkpoints.untouched() && g_cumsum.untouched() && A.untouched() &&
           h.untouched();
  }
};

struct Member {
  const char* name;
  Tensor flash_qla_forward_arguments::* tensor;
};

const Member kForwardMembers[] = {
    {"q", &flash_qla_forward_arguments::q},
    {"k", &flash_qla_forward_arguments::k},
    {"v", &flash_qla_forward_arguments::v},
    {"g", &flash_qla_forward_arguments::g},
    {"beta", &flash_qla_forward_arguments::beta},
    {"A_log", &flash_qla_forward_arguments::A_log},
    {"dt_bias", &flash_qla_forward_arguments::dt_bias},
    {"cu_seqlens", &flash_qla_forward_arguments::cu_seqlens},
    {"state_pool", &flash_qla_forward_arguments::state_pool},
    {"initial_state_indices", &flash_qla_forward_arguments::initial_state_indices},
    {"final_state_indices", &flash_qla_forward_arguments::final_state_indices},
    {"has_initial_state", &flash_qla_forward_arguments::has_initial_state},
    {"checkpoints", &flash_qla_forward_arguments::checkpoints},
    {"checkpoint_cu_starts", &flash_qla_forward_arguments::checkpoint_cu_starts},
    {"checkpoint_offsets", &flash_qla_forward_arguments::checkpoint_offsets},
    {"checkpoint_indices", &flash_qla_forward_arguments::checkpoint_indices},
    {"o", &flash_qla_forward_arguments::o},
    {"g_cumsum", &flash_qla_forward_arguments::g_cumsum},
    {"A", &flash_qla_forward_arguments::A},
    {"h", &flash_qla_forward_arguments::h},
};

struct BackwardMember {
  const char* name;
  Tensor flash_qla_backward_arguments::* tensor;
};

const BackwardMember kBackwardMembers[] = {
    {"q", &flash_qla_backward_arguments::q},         {"k", &flash_qla_backward_arguments::k},
    {"v", &flash_qla_backward_arguments::v},         {"g", &flash_qla_backward_arguments::g},
    {"beta", &flash_qla_backward_arguments::beta},   {"initial_state", &flash_qla_backward_arguments::initial_state},
    {"do", &flash_qla_backward_arguments::d_o},      {"dht", &flash_qla_backward_arguments::dht},
    {"dq", &flash_qla_backward_arguments::dq},       {"dk", &flash_qla_backward_arguments::dk},
    {"dv", &flash_qla_backward_arguments::dv},       {"dg", &flash_qla_backward_arguments::dg},
    {"dbeta", &flash_qla_backward_arguments::dbeta}, {"dh0", &flash_qla_backward_arguments::dh0},
};

void expect_refused(const Status& s, const std::string& message) {
  EXPECT_EQ(s.code(), FLASH_QLA_INVALID_VALUE);
  EXPECT_EQ(std::string(s.message()).substr(0, message.size()), message);
}

TEST(Limits, TheCasesThatTheseTestsBreakAreLegal) {
  PoolCase c;
  const Status s = run<ChunkForward>(c.forward());
  EXPECT_TRUE(s.ok()) << s.message();
  EXPECT_FALSE(c.pool.untouched());
  EXPECT_TRUE(run<ChunkBackward>(static_cast<Case&>(c).backward()).ok());
}

TEST(Limits, TensorsWithoutMemoryAreRefused) {
  for (const Member& member : kForwardMembers) {
    PoolCase c;
    ForwardArguments args = c.forward();
    (args.*member.tensor).data = nullptr;
    expect_refused(run<ChunkForward>(args),
                   std::string("chunk_forward: ") + member.name + ".data (NULL) must point to memory");
    EXPECT_TRUE(c.untouched()) << member.name;
  }
  for (const BackwardMember& member : kBackwardMembers) {
    Case c;
    BackwardArguments args = c.backward();
    (args.*member.tensor).data = nullptr;
    expect_refused(run<ChunkBackward>(args),
                   std::string("chunk_backward: ") + member.name + ".data (NULL) must point to memory");
    EXPECT_TRUE(c.dq.untouched() && c.dh0.untouched()) << member.name;
  }
}

TEST(Limits, NumbersOfDimensionsOutOfRangeAreRefused) {
  for (const int32_t ndim : {-1, INT32_MIN, FLASH_QLA_MAX_DIMS + 1, INT32_MAX}) {
    for (const Member& member : kForwardMembers) {
      PoolCase c;
      ForwardArguments args = c.forward();
      (args.*member.tensor).ndim = ndim;
      expect_refused(run<ChunkForward>(args),
                     std::string("chunk_forward: ") + member.name + ".ndim (" + std::to_string(ndim) + ")");
      EXPECT_TRUE(c.untouched()) << member.name;
    }
    for (const BackwardMember& member : kBackwardMembers) {
      Case c;
      BackwardArguments args = c.backward();
      (args.*member.tensor).ndim = ndim;
      expect_refused(run<ChunkBackward>(args),
                     std::string("chunk_backward: ") + member.name + ".ndim (" + std::to_string(ndim) + ")");
    }
  }
}

TEST(Limits, SixDimensionsCanBeDescribed) {
  const Tensor t = tensor(nullptr, DType::kFloat32, {2, 3, 4, 5, 6, 7});
  EXPECT_EQ(t.ndim, 6);
  EXPECT_EQ(t.shape[5], 7);
  EXPECT_EQ(t.stride[0], 3 * 4 * 5 * 6 * 7);
}

TEST(Limits, InitOfNothingDoesNothing) {
  flash_qla_forward_arguments_init(nullptr);
  flash_qla_backward_arguments_init(nullptr);
}

TEST(Limits, StructuresOfAnotherSizeAreRefused) {
  for (const size_t size : {size_t{0}, sizeof(flash_qla_forward_arguments) - 8, SIZE_MAX}) {
    Case c;
    ForwardArguments args = c.forward();
    EXPECT_EQ(args.struct_size, sizeof(flash_qla_forward_arguments));
    // A structure of another version has another name in the place of this one: it must not be read.
    args.options.operation = reinterpret_cast<const char*>(1);
    args.struct_size = size;
    const std::string message = "chunk_forward: args.struct_size (" + std::to_string(size) + ") must be " +
                                std::to_string(sizeof(flash_qla_forward_arguments));
    size_t bytes = 77;
    char text[64] = "unchanged";
    expect_refused(ChunkForward::can_implement(args), message);
    expect_refused(ChunkForward::workspace_size(args, &bytes), message);
    expect_refused(ChunkForward::run(args, nullptr, 0), message);
    expect_refused(flash_qla_chunk_forward_explain(&args, text, sizeof(text)), message);
    expect_refused(Recurrent::can_implement(args), "recurrent" + message.substr(message.find(':')));
    EXPECT_EQ(bytes, 77u);
    EXPECT_STREQ(text, "unchanged");
    EXPECT_TRUE(c.o.untouched() && c.final_state.untouched());
  }
  Case c;
  BackwardArguments args = c.backward();
  EXPECT_EQ(args.struct_size, sizeof(flash_qla_backward_arguments));
  args.struct_size = sizeof(flash_qla_forward_arguments);
  expect_refused(ChunkBackward::run(args, nullptr, 0), "chunk_backward: args.struct_size (");
  EXPECT_TRUE(c.dq.untouched());
}

TEST(Limits, SizesWhoseProductsWrapAreRefused) {
  // 2^58 tokens of 4 heads and 16 values: 2^64 elements, which is 0 in 64 bits.
  constexpr int64_t kTokens = int64_t{1} << 58;
  ForwardArguments args;
  args.q = args.k = args.v = args.o = tensor(nullptr, DType::kFloat32, {1, kTokens, 4, 16});
  expect_refused(ChunkForward::run(args, nullptr, 0),
                 "chunk_forward: q.shape[0] * q.shape[1] (1 * 288230376151711744)");
  expect_refused(Recurrent::run(args, nullptr, 0), "recurrent: q.shape[0] * q.shape[1] (1 * 288230376151711744)");

  // The tokens are few, and the slots of the pool are not.
  PoolCase c;
  args = c.forward();
  args.state_pool.shape[0] = int64_t{1} << 60;
  expect_refused(run<ChunkForward>(args), "chunk_forward: state_pool.shape (2^63 bytes or more in all) must fit");
  EXPECT_TRUE(c.untouched());

  // No tensor is too large, and what is kept of sequences and heads would be.
  args = ForwardArguments();
  args.q = args.k = tensor(nullptr, DType::kFloat32, {1, 0, int64_t{1} << 30, 256});
  args.v = args.o = tensor(nullptr, DType::kFloat32, {1, 0, int64_t{1} << 30, 256});
  args.cu_seqlens = tensor(nullptr, DType::kInt32, {int64_t{1} << 20});
  expect_refused(ChunkForward::can_implement(args), "chunk_forward: v.shape[2] (1073741824) must not be above 2^56 /");
}

TEST(Limits, AnEmptyTensorMayHaveAnyOtherExtents) {
  ForwardArguments args;
  args.q = args.k = args.v = args.o = tensor(nullptr, DType::kFloat32, {FLASH_QLA_MAX_TOKENS, 0, 2, 16});
  EXPECT_TRUE(ChunkForward::can_implement(args).ok());
}

// Bytes of scratch for so many tokens, in at most a second.
template <class Op, class Arguments>
Status timed_size(int64_t tokens, int64_t sequences, size_t* bytes) {
  Arguments args;
  args.q = args.k = tensor(nullptr, DType::kFloat32, {1, tokens, 1, 16});
  args.v = tensor(nullptr, DType::kFloat32, {1, tokens, 2, 16});
  args.cu_seqlens = tensor(nullptr, DType::kInt64, {sequences + 1});
  if constexpr (std::is_same_v<Arguments, ForwardArguments>) {
    args.o = args.v;
  } else {
    args.dq = args.dk = args.q;
    args.dv = args.v;
  }
  const auto start = std::chrono::steady_clock::now();
  const Status s = Op::workspace_size(args, bytes);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1)) << tokens << " tokens";
  return s;
}

template <class Op, class Arguments>
void expect_limits() {
  size_t bytes = 0;
  EXPECT_TRUE((timed_size<Op, Arguments>(FLASH_QLA_MAX_TOKENS, 1, &bytes).ok()));
  EXPECT_TRUE((timed_size<Op, Arguments>(1, FLASH_QLA_MAX_TOKENS, &bytes).ok()));
  bytes = 77;
  for (const int64_t most : {int64_t{FLASH_QLA_MAX_TOKENS} + 1, int64_t{1} << 40, INT64_MAX}) {
    const Status tokens = timed_size<Op, Arguments>(most, 1, &bytes);
    EXPECT_NE(std::string(tokens.message())
                  .find("q.shape[0] * q.shape[1] (1 * " + std::to_string(most) + ") must be at most 2147483647 tokens"),
              std::string::npos)
        << tokens.message();
    if (most == INT64_MAX) continue;  // cu_seqlens has one element more
    const Status sequences = timed_size<Op, Arguments>(1, most, &bytes);
    EXPECT_NE(std::string(sequences.message())
                  .find("cu_seqlens.shape[0] - 1 (" + std::to_string(most) + ") must be at most 2147483647 sequences"),
              std::string::npos)
        << sequences.message();
  }
  EXPECT_EQ(bytes, 77u);
}

TEST(Limits, TokensAndSequences) {
  expect_limits<ChunkForward, ForwardArguments>();
  expect_limits<Recurrent, ForwardArguments>();
  expect_limits<ChunkBackward, BackwardArguments>();
}

TEST(Overlap, OutputsThatShareMemoryWithInputsAreRefused) {
  for (const Member& member : kForwardMembers) {
    if (std::string(member.name) == "o") continue;
    PoolCase c;
    ForwardArguments args = c.forward();
    uint64_t place = 0;  // addresses far from each other; can_implement() reads nothing there
    for (const Member& each : kForwardMembers) {
      (args.*each.tensor).data = reinterpret_cast<void*>(place += uint64_t{1} << 20);
    }
    EXPECT_TRUE(ChunkForward::can_implement(args).ok());
    const Tensor& other = args.*member.tensor;
    int64_t bytes = size_of(dtype(other));
    for (int32_t i = 0; i < other.ndim; ++i) bytes *= other.shape[i];
    args.o.data = static_cast<char*>(other.data) + bytes - 1;
    expect_refused(ChunkForward::can_implement(args),
                   std::string("chunk_forward: o must not share memory with ") + member.name + " (they overlap)");
    args.o.data = static_cast<char*>(other.data) + bytes;
    EXPECT_TRUE(ChunkForward::can_implement(args).ok()) << member.name;
  }
}

TEST(Overlap, ThePoolAndCheckpointsMayNotBeInputsEither) {
  PoolCase c;
  ForwardArguments args = c.forward();
  args.state_pool.data = args.v.data;
  expect_refused(run<ChunkForward>(args), "chunk_forward: state_pool must not share memory with v (they overlap)");
  args = c.forward();
  args.checkpoints.data = args.q.data;
  expect_refused(run<ChunkForward>(args), "chunk_forward: checkpoints must not share memory with q (they overlap)");
  args = c.forward();
  args.checkpoints.data = args.state_pool.data;
  expect_refused(run<ChunkForward>(args),
                 "chunk_forward: checkpoints must not share memory with state_pool (they overlap)");
  EXPECT_TRUE(c.untouched());
}

TEST(Overlap, ColumnsOfOneBufferLieApart) {
  // q, k, v and o side by side in each token's row, as a fused projection leaves them.
  constexpr int64_t T = 70, K = 3, V = 4, kRow = 2 * K + 2 * V * 2;
  Case plain(1, T, 1, 2, K, V);
  std::vector<double> rows(T * kRow, kCanary);
  ForwardArguments args = plain.forward();
  int64_t column = 0;
  for (Tensor* t : {&args.q, &args.k, &args.v, &args.o}) {
    const auto* from = static_cast<const double*>(t->data);
    const int64_t width = t->shape[2] * t->shape[3];
    for (int64_t i = 0; i < T * width; ++i) rows[static_cast<size_t>(i / width * kRow + column + i % width)] = from[i];
    t->data = rows.data() + column;
    t->stride[0] = T * kRow;
    t->stride[1] = kRow;
    column += width;
  }
  const Status s = run<ChunkForward>(args);
  ASSERT_TRUE(s.ok()) << s.message();
  ASSERT_TRUE(run<ChunkForward>(plain.forward()).ok());
  for (int64_t i = 0; i < T * V * 2; ++i) {
    ASSERT_EQ(rows[static_cast<size_t>(i / (V * 2) * kRow + 2 * K + V * 2 + i % (V * 2))],
              plain.o.data[static_cast<size_t>(i)]);
  }
  // One column to the left, o's first value is v's last.
  args.o.data = static_cast<double*>(args.o.data) - 1;
  expect_refused(run<ChunkForward>(args), "chunk_forward: o must not share memory with v (they overlap)");
}

TEST(Overlap, ElementsOfOneOutputMayNotOverlap) {
  Case c;
  ForwardArguments args = c.forward();
  args.o.stride[1] = args.o.stride[2];  // a token's second head is the next token's first
  expect_refused(run<ChunkForward>(args), "chunk_forward: o.stride (some elements overlap) must give each element");
  EXPECT_TRUE(c.o.untouched());
}

}  // namespace
}  // namespace flash_qla
