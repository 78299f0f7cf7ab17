// The groups of cuda_generic_test that are about the Hopper forward's sequence split (docs/notebook/sequence_split.md).
#pragma once

#include "sm90_forward_tests.cuh"
#include "sm90_repeat_tests.cuh"

namespace flash_qla::testing {

// Gates of each head at a rate of its own, some of which change along the sequence: heads that need transitions beside
// heads that forget within a few chunks, and boundaries of both kinds in one head.
inline void mix_gates(Buffer& g, Random& random) {
  if (!g.present()) return;
  static const std::vector<double> kRates = {0.0, 0.002, 0.05, 0.5};  // of decay a token; a warm-up sums up 16
  constexpr int64_t kTurn = 700;
  std::vector<double> rates, later;
  for (int64_t head = 0; head < g.shape_view().shape[2]; ++head) {
    rates.push_back(random.pick(kRates));
    later.push_back(random.chance(0.5) ? random.pick(kRates) : rates.back());
  }
  g.fill([&](int64_t, int64_t t, int64_t head, int64_t) {
    const size_t i = static_cast<size_t>(head);
    return -2.0 * (t / kTurn % 2 == 0 ? rates[i] : later[i]) * random.uniform();
  });
}

// Every `every`-th head without decay and the others with so much of it that they forget within five chunks.
inline void part_gates(Buffer& g, int64_t every, Random& random) {
  g.fill([&](int64_t, int64_t, int64_t head, int64_t) {
    return head % every == every - 1 ? 0.0 : -0.055 * random.uniform(0.9, 1.1);
  });
}

// Fails unless explain() says that the call's split is planned on the device.
inline void expect_plan(const std::string& what, const ForwardCall& call, Checker& checker) {
  const std::string text = explained(call, arguments_for_sm90(call));
  if (text.find("split: planned") == std::string::npos) checker.fail(what, "sm90", "no split is planned: " + text);
}

// The sequence split against the oracle and against the same call without a cut: cut wherever it is possible, every
// option, pools with rows that are skipped, checkpoints, h, A and the cumsum. Thousands of tokens with beta up to 2 and
// no decay take bf16 past its bounds, whole or split.
inline int64_t test_sm90_split(const Settings& settings, Arena& arena) {
  Checker checker("sequence split, sm90", settings, arena, "sm90");
  const auto draw = [&](Random& r) {
    static const std::vector<int64_t> kLengths = {256, 300, 640, 1000, 1537, 2100};
    const DType type = r.chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    Shape s;
    s.dtype = type;
    s.K = s.V = 128;
    // More boundaries and key heads than the planner looks at at once: it reads their gates before their keys.
    const bool many = !settings.small && r.chance(0.2);
    s.Hq = many ? 16 : r.integer(1, 2);
    s.Hv = s.Hq * (many ? 1 : r.integer(1, 6));  // the planner looks at four heads of a group together
    do {
      s.T = settings.small ? r.integer(256, 400) : many ? kLengths.back() : r.pick(kLengths);
      s.cu_seqlens = r.chance(0.6) ? draw_offsets(s.T, r) : std::vector<int64_t>{};
    } while (tokens_of(s) < 256);
    if (s.cu_seqlens.empty()) s.B = r.integer(1, 2);
    Features f = draw_features(type, r);
    f.force_intra_cp = true;
    f.cp_mode = r.chance(0.3) ? FLASH_QLA_CP_INVARIANT : FLASH_QLA_CP_AUTO;
    ForwardCall call;
    call.draw(s, f, draw_pool_features(false, !s.cu_seqlens.empty(), r), false, r);
    if (!f.gate && !f.strong_decay) mix_gates(call.in.g, r);
    return call;
  };
  int64_t drawn = 0, taken = 0;
  for_each_case(settings, settings.small ? settings.cases : settings.cases / 3, draw,
                [&](const std::string& what, const ForwardCall& call) {
                  ++drawn;
                  if (!ChunkForward::can_implement(arguments_for_sm90(call)).ok()) return;
                  ++taken;
                  expect_plan(what, call, checker);
                  ForwardCall whole = call;
                  whole.in.features.cp_mode = FLASH_QLA_CP_OFF;
                  whole.in.features.force_intra_cp = false;
                  checker.check(what, call, "sm90", "cuda_reference", FLASH_QLA_CUDA,
                                {.plain = &whole, .emulation = true});
                });
  if (2 * taken < drawn) checker.fail("can_implement", "sm90", "takes too few calls");
  return checker.finish();
}

// Calls of which the split's lists are planned: as many as the planner finds by itself, and forced ones.
struct SplitCase {
  const char* name;
  int64_t Hq, Hv;
  std::vector<int64_t> lengths;
  flash_qla_cp_mode mode;
  bool forced;
  DType dtype = DType::kBFloat16;
  bool v_first = false, pool = false, keeps = false;
  bool all_exact = false;  // in no head, and the lengths are those that the host guesses

  ForwardCall draw(Random& random) const {
    Shape s;
    s.dtype = dtype;
    s.Hq = Hq;
    s.Hv = Hv;
    s.K = s.V = 128;
    s.pack(lengths, all_exact ? 0 : 10);
    Features f;
    f.initial_state = f.final_state = true;
    f.v_first = v_first;
    f.cp_mode = mode;
    f.force_intra_cp = forced;
    if (pool) f.state_dtype = dtype;
    PoolFeatures kept;
    kept.pool = kept.skip_rows = kept.has_initial = kept.packed_checkpoints = kept.listed_checkpoints = pool;
    kept.h = kept.A = kept.g_cumsum = keeps;
    ForwardCall call;
    call.draw(s, f, kept, false, random);
    if (all_exact) {
      call.in.g.fill([](int64_t, int64_t, int64_t, int64_t) { return 0.0; });
    } else {
      mix_gates(call.in.g, random);
    }
    return call;
  }
};

// A thousand runs of split calls.
inline int64_t test_sm90_split_repeat(const Settings& settings, Arena& arena) {
  Checker checker("a thousand runs, sequence split, sm90", settings, arena, "sm90");
  const std::vector<int64_t> mixed = {1500, 0, 300, 2049, 64, 700};
  const std::vector<SplitCase> cases = {
      {"one long sequence", 2, 8, {8192}, FLASH_QLA_CP_AUTO, false},
      {"two unequal ones, [V, K]", 1, 4, {9000, 3000}, FLASH_QLA_CP_AUTO, false, DType::kFloat16, true},
      {"forced", 2, 4, mixed, FLASH_QLA_CP_AUTO, true},
      {"forced, pool and checkpoints", 2, 4, mixed, FLASH_QLA_CP_AUTO, true, DType::kBFloat16, true, true},
      {"forced, pool and checkpoints, [K, V]", 1, 6, mixed, FLASH_QLA_CP_AUTO, true, DType::kFloat16, false, true},
      {"forced, what training keeps", 2, 4, mixed, FLASH_QLA_CP_AUTO, true, DType::kBFloat16, false, false, true},
      {"by length", 2, 4, {4500, 300, 5000}, FLASH_QLA_CP_INVARIANT, false},
      {"many key heads", 16, 16, {8192}, FLASH_QLA_CP_AUTO, false},
      {"no decay", 2, 8, {8192}, FLASH_QLA_CP_AUTO, false, DType::kBFloat16, false, false, false, true},
      {"no decay, fp16", 4, 16, {16370}, FLASH_QLA_CP_AUTO, false, DType::kFloat16, true, false, false, true},
      {"no decay, two sequences",
       4,
       8,
       {8200, 8200},
       FLASH_QLA_CP_AUTO,
       false,
       DType::kBFloat16,
       false,
       false,
       false,
       true}};
  for (size_t i = 0; i < cases.size(); ++i) {
    if (settings.small && !cases[i].forced) continue;
    Random random(40 + i);
    ForwardCall call = cases[i].draw(random);
    expect_plan(cases[i].name, call, checker);
    ForwardCall whole = call;
    whole.in.features.cp_mode = FLASH_QLA_CP_OFF;
    checker.check(cases[i].name, call, "sm90", "cuda_reference", FLASH_QLA_CUDA, {.plain = &whole});
    repeat_call(cases[i].name, call, settings.small ? 8 : 1000, random, checker, arena);
  }
  return checker.finish();
}

// Ten thousand replays of captured graphs whose lengths and gates change in place, and with them what is cut, which
// boundaries need transitions and how many tiles there are. The results of each pattern are compared with the oracle
// once, and bit by bit in each replay.
inline int64_t test_sm90_split_soak(const Settings& settings, Arena& arena) {
  Checker checker("graph replays with changing lengths and gates, sequence split, sm90", settings, arena, "sm90");
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const auto one_long = [](int64_t N) {
    std::vector<int64_t> lengths(static_cast<size_t>(N), 6);
    lengths[0] = 512;
    return lengths;
  };
  const std::vector<SplitCase> cases = {
      {"two sequences", 1, 4, {12288, 0}, FLASH_QLA_CP_AUTO, false},
      {"33 sequences, forced", 2, 4, one_long(33), FLASH_QLA_CP_AUTO, true},
      {"128 sequences, forced", 2, 4, one_long(128), FLASH_QLA_CP_AUTO, true, DType::kFloat16, true, false, true},
      {"three sequences, by length", 2, 4, {9000, 100, 100}, FLASH_QLA_CP_INVARIANT, false}};
  const int replays = settings.small ? 20 : 2500, patterns = settings.small ? 3 : 8;
  for (size_t c = 0; c < cases.size(); ++c) {
    if (settings.small && cases[c].lengths[0] > 512) continue;
    Random random(60 + c);
    ForwardCall call = cases[c].draw(random);
    const int64_t N = call.in.shape.N(), tokens = call.in.shape.cu_seqlens.back();
    expect_plan(cases[c].name, call, checker);
    std::vector<ForwardCall> drawn;
    for (int i = 0; i < patterns; ++i) {
      std::vector<int64_t> offsets = call.in.shape.cu_seqlens;
      if (i > 0) {
        const int64_t end = i == 1 ? 0 : tokens - random.integer(0, 40);  // once all of them are empty
        offsets = {0};
        while (static_cast<int64_t>(offsets.size()) < N) {
          offsets.push_back(random.chance(0.2) ? offsets.back() : random.integer(0, end));
        }
        std::sort(offsets.begin(), offsets.end());
        offsets.push_back(end);
      }
      call.in.shape.cu_seqlens = offsets;
      call.in.cu_seqlens.fill(
          [&](int64_t n, int64_t, int64_t, int64_t) { return static_cast<double>(offsets[static_cast<size_t>(n)]); });
      mix_gates(call.in.g, random);
      checker.check(std::string(cases[c].name) + ", pattern " + std::to_string(i), call, "sm90", "cuda_reference",
                    FLASH_QLA_CUDA);
      drawn.push_back(call);
    }
    arena.reset();
    RepeatedCall repeated(call, arena);
    const auto set_inputs = [&](size_t i) {
      for (const auto& [to, from] :
           {std::pair<const Tensor&, Buffer&>{repeated.arguments().cu_seqlens, drawn[i].in.cu_seqlens},
            {repeated.arguments().g, drawn[i].in.g}}) {
        check_cuda(cudaMemcpyAsync(to.data, from.device().data, from.bytes().size(), cudaMemcpyDeviceToDevice, stream),
                   "cudaMemcpyAsync");
      }
    };
    for (ForwardCall& pattern : drawn) {
      pattern.in.cu_seqlens.upload(arena);
      pattern.in.g.upload(arena);
    }
    soak_replays(checker, cases[c].name, repeated, drawn.size(), set_inputs, replays, random, arena, stream);
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  return checker.finish();
}

// With a split a head's error is at most 1.1 times what it is without (docs/numerics.md).
inline int64_t test_sm90_split_error(const Settings& settings, Arena& arena) {
  Checker checker("error with and without a split, sm90", settings, arena, "sm90");
  const std::vector<SplitCase> cases = {
      {"one sequence", 2, 8, {8192}, FLASH_QLA_CP_AUTO, false},
      {"three", 1, 4, {9000, 300, 5000}, FLASH_QLA_CP_AUTO, false},
      {"three, by length", 1, 4, {9000, 300, 5000}, FLASH_QLA_CP_INVARIANT, false},
      {"fp16", 1, 8, {8192}, FLASH_QLA_CP_AUTO, false, DType::kFloat16, true},
      {"many key heads", 16, 16, {8192}, FLASH_QLA_CP_AUTO, false},
      {"no decay", 2, 8, {8192}, FLASH_QLA_CP_AUTO, false, DType::kBFloat16, false, false, false, true}};
  for (size_t c = 0; c < cases.size(); ++c) {
    Random random(80 + c);
    ForwardCall split = cases[c].draw(random);
    expect_plan(cases[c].name, split, checker);
    ForwardCall whole = split, expected = split;
    whole.in.features.cp_mode = FLASH_QLA_CP_OFF;
    checker.run(cases[c].name, split, "sm90");
    for (const auto& [call, path] :
         {std::pair<ForwardCall*, const char*>{&whole, "sm90"}, {&expected, "cuda_reference"}}) {
      const std::string error = run_call(*call, path, FLASH_QLA_CUDA, arena);
      if (!error.empty()) checker.fail(cases[c].name, path, error);
    }
    double worst = 0.0;
    for (int64_t head = 0; head < cases[c].Hv; ++head) {
      for (const bool state : {false, true}) {
        const auto error = [&](ForwardCall& call) {
          const int dim = state ? 1 : 2;
          Buffer got = (state ? call.final_state : call.o).slice(dim, head, head + 1);
          Buffer want = (state ? expected.final_state : expected.o).slice(dim, head, head + 1);
          return relative_error(got, want, -1);
        };
        const double with = error(split), without = error(whole);
        worst = std::max(worst, with / without);
        if (!(with <= 1.1 * without)) {
          checker.fail(cases[c].name, "sm90",
                       std::string(state ? "state" : "o") + " of head " + std::to_string(head) + " is off by " +
                           std::to_string(with) + ", without a split by " + std::to_string(without));
        }
      }
    }
    std::printf("  %-20s worst head %.3f times the error without a split\n", cases[c].name, worst);
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
