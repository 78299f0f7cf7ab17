// What the reference cannot tell of the CPU backend: bits that depend on nothing but the sequence, NaN that stays where
// it is, threads, and gradients that are asked for singly.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "cpu_call.h"

namespace flash_qla {
namespace {

using namespace cpu_call;

TEST(CpuBackendIsolation, NanReachesOnlyLaterTokensOfItsSequence) {
  Case c;
  c.lengths = {100, 80};
  const Inputs clean = make_inputs(c);
  const Outputs expected = forward<ChunkForward>(c, clean, "cpu", false);
  const auto poison = [](const Tensor& t, double x) { store(t, offset_of(t, 0, 21, 0, 3), x); };
  for (int which = 0; which < 5; ++which) {
    for (double value : {kNaN, kInfinity}) {
      Inputs in = clean;
      if (which == 0) poison(in.q.t, value);
      if (which == 1) poison(in.k.t, value);
      if (which == 2) poison(in.v.t, value);
      if (which == 3) store(in.g.t, offset_of(in.g.t, 0, 21, 0), kNaN);
      if (which == 4) store(in.beta.t, offset_of(in.beta.t, 0, 21, 0), value);
      const Outputs out = forward<ChunkForward>(c, in, "cpu", false);
      for (int64_t t = 0; t < in.T; ++t) {
        if (t >= 21 && t < 100) continue;
        for (int64_t head = 0; head < c.Hv; ++head) {
          for (int64_t j = 0; j < c.V; ++j) {
            const int64_t offset = offset_of(out.o.t, 0, t, head, j);
            ASSERT_EQ(load(out.o.t, offset), load(expected.o.t, offset)) << which << " " << t;
          }
        }
      }
      if (which != 0 && value != value) {
        const Outputs reference = forward<ChunkForward>(c, in, "reference", false);
        EXPECT_LE(distance(out.o.t, reference.o.t), 1e-5) << which;
      }
    }
  }
}

// Results depend on neither the number of threads, nor the run, nor the batch, nor which heads are in the call.
TEST(CpuBackendBits, IndependentOfThreadsRunsAndNeighbours) {
  Case c;
  c.lengths = {150, 0, 500, 70};
  c.Hq = 2, c.Hv = 4, c.K = 128, c.V = 64;
  const Inputs in = make_inputs(c);
  c.threads = 1;
  const Outputs out = forward<ChunkForward>(c, in, "cpu", true);
  const Gradients gradients = backward(c, in, "cpu");
  for (int threads : {2, 3, 7, 2, 2}) {
    c.threads = threads;
    const Outputs again = forward<ChunkForward>(c, in, "cpu", true);
    EXPECT_TRUE(same_bits(again.o, out.o) && same_bits(again.final_state, out.final_state) &&
                same_bits(again.h, out.h));
    const Gradients g = backward(c, in, "cpu");
    EXPECT_TRUE(same_bits(g.dq, gradients.dq) && same_bits(g.dk, gradients.dk) && same_bits(g.dv, gradients.dv));
    EXPECT_TRUE(same_bits(g.dg, gradients.dg) && same_bits(g.dbeta, gradients.dbeta) &&
                same_bits(g.dh0, gradients.dh0));
  }

  // The third sequence alone, and the second key head with its value heads alone.
  ForwardArguments args = forward_arguments(c, in, "cpu");
  const auto cut = [](Tensor t, int dim, int64_t begin, int64_t count) {
    t.data = static_cast<char*>(t.data) + begin * t.stride[dim] * size_of(dtype(t));
    t.shape[dim] = count;
    return t;
  };
  const auto part = [&](const Tensor& t, int64_t heads) { return cut(cut(t, 1, 150, 500), 2, heads / 2, heads / 2); };
  args.q = part(in.q.t, 2);
  args.k = part(in.k.t, 2);
  args.v = part(in.v.t, 4);
  args.g = part(in.g.t, 4);
  args.beta = part(in.beta.t, 4);
  args.cu_seqlens = Tensor{};
  args.initial_state = cut(cut(in.h0.t, 0, 2, 1), 1, 2, 2);
  const Owned o = poisoned(c.dtype, {1, 500, 2, c.V});
  args.o = o.t;
  run<ChunkForward>(args);
  const Tensor whole = part(out.o.t, 4);
  for (int64_t t = 0; t < 500; ++t) {
    for (int64_t head = 0; head < 2; ++head) {
      for (int64_t j = 0; j < c.V; ++j) {
        ASSERT_EQ(load(o.t, offset_of(o.t, 0, t, head, j)), load(whole, offset_of(whole, 0, t, head, j)));
      }
    }
  }
}

// A call large enough for several threads.
Case threaded_case() {
  Case c;
  c.T = 400, c.Hq = c.Hv = 4, c.K = c.V = 64, c.threads = 4;
  return c;
}

TEST(CpuBackendThreads, CallersBesideEachOther) {
  const Case c = threaded_case();
  const Inputs in = make_inputs(c);
  const Outputs expected = forward<ChunkForward>(c, in, "cpu", false);
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < wrong.size(); ++i) {
    callers.emplace_back([&, i] {
      for (int repeat = 0; repeat < 10; ++repeat) {
        wrong[i] += !same_bits(forward<ChunkForward>(c, in, "cpu", false).o, expected.o);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

// A forked child has none of its parent's threads: it must neither hang nor differ.
TEST(CpuBackendThreads, WorksInAForkedChild) {
  const Case c = threaded_case();
  const Inputs in = make_inputs(c);
  const Outputs expected = forward<ChunkForward>(c, in, "cpu", false);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a hang ends the child
    _exit(same_bits(forward<ChunkForward>(c, in, "cpu", false).o, expected.o) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(CpuBackendBits, PrefillInTwoPartsEqualsOne) {
  for (DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    Case c;
    c.dtype = type;
    c.T = 300, c.K = 128, c.V = 64;
    const Inputs in = make_inputs(c);
    const Outputs whole = forward<ChunkForward>(c, in, "cpu", false);
    const int64_t first = 128;
    Owned o = poisoned(c.dtype, {1, c.T, c.Hv, c.V}), middle = poisoned(accumulator(c), state_shape(c, 1)),
          last = middle;
    for (int part = 0; part < 2; ++part) {
      ForwardArguments args = forward_arguments(c, in, "cpu");
      args.o = o.t;
      for (Tensor* t : {&args.q, &args.k, &args.v, &args.g, &args.beta, &args.o}) {
        t->data = static_cast<char*>(t->data) + (part == 0 ? 0 : first * t->stride[1] * size_of(dtype(*t)));
        t->shape[1] = part == 0 ? first : c.T - first;
      }
      if (part == 1) args.initial_state = middle.t;
      args.final_state = part == 0 ? middle.t : last.t;
      run<ChunkForward>(args);
    }
    EXPECT_TRUE(same_bits(o, whole.o));
    EXPECT_TRUE(same_bits(last, whole.final_state));
  }
}

// Each gradient asked for alone has the bits it has among all, and what is kept from the forward changes none.
TEST(CpuBackendArguments, EachGradientAlone) {
  Case c;
  c.Hv = 4, c.gate = c.sigmoid = c.l2norm = true;
  const Inputs in = make_inputs(c);
  Gradients all = backward(c, in, "cpu");
  const Outputs kept = forward<ChunkForward>(c, in, "cpu", true);
  Gradients one = make_gradients(c, in);
  Owned unused;
  BackwardArguments none = backward_arguments(c, in, "cpu", &unused);
  none.A = kept.A.t;
  none.o = kept.o.t;
  for (size_t i = 0; i < pairs(&one, &none).size(); ++i) {
    BackwardArguments args = none;
    auto [gradient, argument] = pairs(&one, &args)[i];
    *argument = gradient->t;
    run<ChunkBackward>(args);
    EXPECT_TRUE(same_bits(*gradient, *pairs(&all, &args)[i].first)) << i;
  }
}

TEST(CpuBackendArguments, RepeatedAndReversedInputs) {
  Case c;
  c.T = 90;
  Inputs in = make_inputs(c);
  // One gradient for every element of o, one key for every token, and the values backwards.
  for (int64_t& stride : in.d_o.t.stride) stride = 0;
  in.k.t.stride[1] = 0;
  in.v.t.data = static_cast<char*>(in.v.t.data) + (c.T - 1) * in.v.t.stride[1] * size_of(c.dtype);
  in.v.t.stride[1] = -in.v.t.stride[1];
  expect_near("o", forward<ChunkForward>(c, in, "cpu", false).o, forward<ChunkForward>(c, in, "reference", false).o, 2,
              1e-5);
  const Gradients ours = backward(c, in, "cpu"), reference = backward(c, in, "reference");
  expect_near("dq", ours.dq, reference.dq, 2, 1e-5);
  expect_near("dk", ours.dk, reference.dk, 2, 1e-5);
  expect_near("dv", ours.dv, reference.dv, 2, 1e-5);
  expect_near("dg", ours.dg, reference.dg, 2, 1e-5);
}

// Pools: rows that read, start from zero, are skipped, or only lose their write; checkpoints in the same call.

}  // namespace
}  // namespace flash_qla
