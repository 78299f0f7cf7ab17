// Verification of draft tokens through the C and C++ interface: what it computes, what it refuses and leaves alone.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "call_case.h"

namespace flash_qla {
namespace {

// Two sequences of three drafts. The pool has a slot more than they read.
struct Drafts {
  Case call;
  Buffer<double> pool, states;
  Buffer<int32_t> slots, parents, rows;

  Drafts() : call(2, 3), pool({3, 2, 3, 4}), states({2, 3, 2, 3, 4}), slots({2}), parents({2, 3}), rows({2}) {
    for (size_t i = 0; i < pool.data.size(); ++i) pool.data[i] = 0.1 * static_cast<double>(i % 7);
    slots.data = {2, 0};
    parents.data = {-1, 0, 0, -1, -1, 1};
    rows.data = {1, 0};
  }

  VerifyArguments arguments(const char* path = "reference") {
    VerifyArguments args;
    args.options.path = path;
    args.q = call.q.view();
    args.k = call.k.view();
    args.v = call.v.view();
    args.g = call.g.view();
    args.beta = call.beta.view();
    args.o = call.o.view();
    args.state_pool = pool.view();
    args.initial_state_indices = slots.view();
    args.parents = parents.view();
    args.states_out = states.view();
    args.states_out_indices = rows.view();
    return args;
  }
};

TEST(Verify, PathsAgreeOnATree) {
  Drafts by_reference, by_cpu;
  ASSERT_TRUE(run<Verify>(by_reference.arguments()).ok());
  const Status status = run<Verify>(by_cpu.arguments("cpu"));
  ASSERT_TRUE(status.ok()) << status.message();
  for (size_t i = 0; i < by_cpu.call.o.data.size(); ++i) {
    EXPECT_NEAR(by_cpu.call.o.data[i], by_reference.call.o.data[i], 1e-12);
  }
  for (size_t i = 0; i < by_cpu.states.data.size(); ++i) {
    EXPECT_NEAR(by_cpu.states.data[i], by_reference.states.data[i], 1e-12);
  }
  EXPECT_EQ(by_cpu.pool.data, Drafts().pool.data) << "the pool is only read";
}

TEST(Verify, AChainIsTheRecurrence) {
  Drafts drafts;
  VerifyArguments args = drafts.arguments();
  args.parents = Tensor{};
  ASSERT_TRUE(run<Verify>(args).ok());
  ForwardArguments recurrent = drafts.call.forward();
  Buffer<double> o({2, 3, 2, 4}), initial({2, 2, 3, 4});
  for (size_t i = 0; i < 24; ++i) {
    initial.data[i] = drafts.pool.data[48 + i];
    initial.data[24 + i] = drafts.pool.data[i];
  }
  recurrent.o = o.view();
  recurrent.initial_state = initial.view();
  ASSERT_TRUE(run<Recurrent>(recurrent).ok());
  EXPECT_EQ(o.data, drafts.call.o.data);
  for (size_t n = 0; n < 2; ++n) {  // row 1 - n of states_out, after token 2
    for (size_t i = 0; i < 24; ++i) {
      EXPECT_EQ(drafts.states.data[((1 - n) * 3 + 2) * 24 + i], drafts.call.final_state.data[n * 24 + i]);
    }
  }
}

TEST(Verify, RefusedCallsWriteNothing) {
  struct Broken {
    const char* message;
    void (*change)(VerifyArguments*);
  };
  const Broken broken[] = {
      {"verify: state_pool (None) must be given", [](VerifyArguments* a) { a->state_pool = Tensor{}; }},
      {"verify: initial_state_indices (None) must be given",
       [](VerifyArguments* a) { a->initial_state_indices = Tensor{}; }},
      {"verify: o (None) must be given", [](VerifyArguments* a) { a->o = Tensor{}; }},
      {"verify: states_out_indices must come with states_out (it was given)",
       [](VerifyArguments* a) { a->states_out = Tensor{}; }},
      {"verify: states_out.shape[0] (1) must be at least 2, the number of sequences, without states_out_indices",
       [](VerifyArguments* a) {
         a->states_out_indices = Tensor{};
         a->states_out.shape[0] = 1;
       }},
      {"verify: parents.shape[1] (2) must be q.shape[1] (3)", [](VerifyArguments* a) { a->parents.shape[1] = 2; }},
      {"verify: states_out must not share memory with state_pool (they overlap)",
       [](VerifyArguments* a) { a->state_pool.data = a->states_out.data; }},
      {"verify: args.struct_size (3) must be", [](VerifyArguments* a) { a->struct_size = 3; }}};
  for (const Broken& one : broken) {
    Drafts drafts;
    VerifyArguments args = drafts.arguments();
    one.change(&args);
    const Status status = Verify::run(args, nullptr, 0);
    EXPECT_EQ(std::string(status.message()).rfind(one.message, 0), 0u) << status.message();
    EXPECT_TRUE(drafts.call.o.untouched() && drafts.states.untouched());
  }
  EXPECT_EQ(flash_qla_verify_can_implement(nullptr).code, FLASH_QLA_INVALID_VALUE);
  flash_qla_verify_arguments_init(nullptr);
}

TEST(Verify, TheCheckReadsWhatTheDeviceHolds) {
  Drafts drafts;
  VerifyArguments args = drafts.arguments();
  args.options.check_device_data = 1;
  EXPECT_TRUE(run<Verify>(args).ok());
  drafts.parents.data[4] = 1;
  EXPECT_STREQ(run<Verify>(args).message(), "verify: parents[1, 1] (1) must be -1 or an earlier token, at most 0");
  drafts.slots.data[1] = -1;  // a skipped row's tokens are not looked at
  EXPECT_TRUE(run<Verify>(args).ok());
}

TEST(Verify, ExplainNamesThePath) {
  Drafts drafts;
  EXPECT_EQ(Verify::explain(drafts.arguments(nullptr)).rfind("path: cpu\n", 0), 0u);
}

}  // namespace
}  // namespace flash_qla
