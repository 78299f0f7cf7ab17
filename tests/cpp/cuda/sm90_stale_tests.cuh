// The groups of cuda_generic_test about what is left in memory: every form of the Hopper kernels, run again and again
// while shared memory and scratch hold one thing after another, must give the same bits. Who reads what it has not
// written finds something else each time; so does who writes where the copy engine writes too, for then one of both
// comes last now and then, and what lies there otherwise is seen (docs/kernels/memory.md says what orders them).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/context_parallel/plan_state.h"
#include "launches.h"
#include "sm90_lengths_tests.cuh"

namespace flash_qla::testing {

struct Stale {
  const char* name;
  uint32_t word;
};

// NaN and infinities are seen wherever they come to; ordinary numbers come further than those, and the largest ones
// are what a product of numbers that are there may not overflow with.
constexpr Stale kStale[] = {{"NaN", 0x7fc07fc0},
                            {"infinities of bf16", 0xff80ff80},
                            {"infinities of fp16", 0x7c007c00},
                            {"ordinary numbers", 0x3f803f80},
                            {"the largest numbers", 0x7b7f7b7f}};

// What Features::drawn_on_device leaves out of a call, in its uploaded tensors, states of float.
template <typename T, class Call>
void draw_on_device(Call& call) {
  // Rows of 128 elements of about unit norm: a sum of squares of variance 1 / 128.
  const float unit = std::sqrt(3.0f / 128.0f);
  uint32_t seed = 1;
  const auto draw = [&]<typename Element>(Buffer& x, Element, float most) {
    if (!x.present()) return;
    const auto elements = static_cast<int64_t>(x.bytes().size() / sizeof(Element));  // those between rows as well
    draw_kernel<Element><<<1024, 256>>>(static_cast<Element*>(x.device().data), elements, -most, most, seed++);
  };
  draw(call.in.q, T{}, unit);
  draw(call.in.k, T{}, unit);
  draw(call.in.v, T{}, 1.7f);
  draw(call.in.initial_state, float{}, 0.8f);
  if constexpr (std::is_base_of_v<BackwardCall, Call>) {
    draw(call.d_o, T{}, 1.7f);
    draw(call.dht, float{}, 1.7f);
  } else {
    draw(call.pool, float{}, 0.8f);
  }
}

// A of a backward call, made by a forward one; `o` is scratch of v's shape.
inline std::string make_A(BackwardCall& call, const Tensor& o, Arena& arena) {
  ForwardArguments args;
  call.in.set(args, [](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
  args.options.path = "sm90";
  args.options.device_type = FLASH_QLA_CUDA;
  check_cuda(cudaGetDevice(&args.options.device_index), "cudaGetDevice");
  args.o = o;
  args.A = call.A.device();
  size_t bytes = 0;
  Status status = ChunkForward::workspace_size(args, &bytes);
  if (!status.ok()) return std::string(status.message());
  void* workspace = arena.take(bytes);
  // NaN; and a tool that looks for reads of what was not written has the backward alone before it.
  check_cuda(cudaMemset(workspace, 0xff, bytes), "cudaMemset");
  status = ChunkForward::run(args, workspace, bytes);
  return status.ok() ? std::string() : std::string(status.message());
}

constexpr int kStaleRuns = 24;  // over each of kStale: 120 in all find what is wrong in one call of twenty

// kStaleRuns times over each of kStale: the bits that the call has over zeros. Small runs, under tools that see by
// themselves what is read and was not written, leave memory as it is. exact_heads, where it is not -1: so
// many of the split's heads must be exact.
template <class Call>
void repeat_over_stale(const std::string& what, Call& call, const Settings& settings, Checker& checker, Arena& arena,
                       int64_t exact_heads = -1) {
  // A small run is one under a tool: should it not end, its log says where it was.
  if (settings.small) {
    std::printf("%s\n", what.c_str());
    std::fflush(stdout);
  }
  arena.reset();
  RepeatedCall<Call> repeated(call, arena);
  checker.count(path_of(call, repeated.arguments()));
  if (call.in.shape.dtype == DType::kFloat16) {
    draw_on_device<__half>(call);
  } else {
    draw_on_device<__nv_bfloat16>(call);
  }
  if constexpr (std::is_same_v<Call, BackwardCall>) {
    if (call.A.present()) {
      const std::string error = make_A(call, call.dv.device(), arena);
      if (!error.empty()) checker.fail(what, "sm90", "A: " + error);
    }
  }
  repeated.give_anew();
  const std::vector<char*> expected = repeated.take_results(arena);
  check_cuda(cudaDeviceSynchronize(), "sm90, over stale memory");  // the stream does not wait for it
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const auto run_over = [&](uint32_t word) {
    repeated.poison(stream);
    if (!settings.small) {
      repeated.fill_scratch(word, stream);
      fill_shared_memory(word, stream);
    }
    repeated.run(stream);
  };
  run_over(0);
  repeated.keep(expected, stream);
  unsigned long long before = 0;
  for (const Stale& stale : kStale) {
    for (int i = 0; i < (settings.small ? 1 : kStaleRuns) && repeated.status().ok(); ++i) {
      run_over(stale.word);
      repeated.compare(expected, stream);
    }
    const unsigned long long now = repeated.different();
    if (now != before) {
      checker.fail(what, "sm90",
                   "over " + std::string(stale.name) + " " + std::to_string(now - before) + " words differ in " +
                       std::to_string(kStaleRuns) + " runs");
    }
    before = now;
    if (settings.small) break;
  }
  if (!repeated.status().ok()) checker.fail(what, "sm90", repeated.status().message());
  if (exact_heads >= 0) {
    cuda::sm90::cp::PlanCounters plan{};  // at the start of a planned call's scratch
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaMemcpy(&plan, repeated.workspace(), sizeof(plan), cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (plan.spacing == 0 || plan.exact_heads != exact_heads) {
      checker.fail(what, "sm90", "of the plan's heads " + std::to_string(plan.exact_heads) + " are exact");
    }
  }
  if (!arena.intact()) checker.fail(what, "sm90", "memory past the end of a tensor was written");
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

// A kernel of links between ranks' parts, of carries, or one of the backward's in its form for links:
// test_sm90_links_stale() has them.
inline bool is_of_links(const std::string& name) {
  const bool has_form = name.find("bwd_make_a") != std::string::npos || name.find("bwd_prepare") != std::string::npos;
  return name.find("link") != std::string::npos || name.find("scan_carried") != std::string::npos ||
         (has_form && name.find(", true>") != std::string::npos);
}

// Fails for each of the program's Hopper kernels of one direction that no call of the group has launched: a form
// without a case here.
inline void expect_all_launched(bool backward, Checker& checker) {
  const std::set<std::string> launched = launched_kernels();
  for (const std::string& name : kernels_of_the_program()) {
    if (name.compare(0, 6, "sm90::") != 0 || (name.find("chunk_bwd") != std::string::npos) != backward) continue;
    if (name == "sm90::fwd::read_lengths_kernel" || is_of_links(name)) continue;  // the first: in test_unequal_call()
    if (launched.count(name) == 0) checker.fail(name, "sm90", "no case launches it");
  }
}

// So many sequences of drawn lengths. Each case is drawn by itself, so that one alone (--only-case) is the same.
struct StaleCase {
  const char* name;
  int64_t Hq, Hv, sequences, tokens;  // tokens: of all together
  Features features;
  PoolFeatures pool;
  std::vector<int64_t> lengths;  // instead of drawn ones
  int64_t steady = 0;            // not 0: part_gates() of so many

  // What a tool takes too long for, unless it is asked for by number. Shorter sequences would not be cut.
  bool too_long(bool small) const { return small && (!lengths.empty() || (steady > 0 && tokens > 4096)); }

  Shape shape(DType dtype, bool dense, bool small, Random& random) const {
    Shape s;
    s.dtype = dtype;
    s.Hq = Hq;
    s.Hv = Hv;
    s.K = s.V = 128;
    const int64_t end = small && steady == 0 ? tokens / 8 : tokens;
    if (dense) {
      s.B = sequences;
      s.T = end / sequences;
      return s;
    }
    s.cu_seqlens = {0};
    for (const int64_t length : lengths) s.cu_seqlens.push_back(s.cu_seqlens.back() + length);
    if (lengths.empty()) {
      for (int64_t n = 1; n < sequences; ++n) s.cu_seqlens.push_back(random.integer(0, end));
      s.cu_seqlens.push_back(end);
      std::sort(s.cu_seqlens.begin(), s.cu_seqlens.end());
    }
    s.T = s.cu_seqlens.back() + random.integer(0, 20);
    return s;
  }
};

inline int64_t test_sm90_forward_stale(const Settings& settings, Arena& arena) {
  Checker checker("forward over stale memory, sm90", settings, arena, "sm90");
  forget_launches();
  Features states;
  states.drawn_on_device = states.initial_state = states.final_state = true;
  Features off = states, options = states, forced = states, by_length = states;
  off.cp_mode = FLASH_QLA_CP_OFF;
  options.l2norm = options.gate = options.dt_bias = options.sigmoid = true;
  forced.force_intra_cp = true;
  by_length.cp_mode = FLASH_QLA_CP_INVARIANT;
  PoolFeatures none, saved, saved_h, pool, checkpoints, listed;
  saved.A = saved.g_cumsum = true;
  saved_h = saved;
  saved_h.h = true;
  PoolFeatures h_alone;
  h_alone.h = true;
  pool.pool = pool.skip_rows = pool.has_initial = true;
  checkpoints = pool;
  checkpoints.packed_checkpoints = true;
  listed.pool = listed.listed_checkpoints = true;
  PoolFeatures every_state = checkpoints;
  every_state.listed_checkpoints = every_state.h = every_state.A = every_state.g_cumsum = true;
  struct Case {
    StaleCase sizes;
    bool dense = false;
  };
  // On 132 multiprocessors.
  const Case cases[] = {
      {{"pairs, few tiles", 2, 8, 3, 600, states, none, {}}},
      {{"pairs, few tiles, that save", 2, 8, 3, 600, states, saved_h, {}}},
      {{"pairs, few tiles, no split", 2, 8, 2, 900, off, none, {}}},
      {{"pairs", 2, 8, 7, 1200, states, none, {}}},
      {{"pairs that save", 2, 8, 7, 1200, states, saved_h, {}}},
      {{"pairs, checkpoints", 2, 8, 6, 1200, states, checkpoints, {}}},
      {{"a tile to a block", 8, 32, 4, 700, states, none, {}}},
      {{"a tile to a block, no split", 8, 32, 4, 700, off, none, {}}},
      {{"two tiles to a block", 4, 32, 8, 1000, states, none, {}}},
      {{"two tiles to a block, no split", 4, 32, 8, 1000, off, none, {}}},
      {{"tickets", 2, 12, 30, 1500, states, none, {}}},
      {{"planned", 2, 8, 40, 3000, states, none, {}}},
      {{"options", 4, 16, 9, 1100, options, none, {}}},
      {{"pool", 4, 16, 10, 1200, states, pool, {}}},
      {{"A and cumsum", 4, 32, 8, 1000, states, saved, {}}},
      {{"A and cumsum, three tiles to a block", 4, 32, 13, 1000, states, saved, {}}},
      {{"A of two value heads to a key head", 8, 16, 10, 1000, states, saved, {}}},
      {{"h", 4, 32, 8, 1000, states, saved_h, {}}},
      {{"h, three tiles to a block", 4, 32, 13, 1000, states, saved_h, {}}},
      {{"h, no split", 4, 32, 8, 1000, off, saved_h, {}}},
      {{"h alone", 4, 32, 8, 1000, states, h_alone, {}}},
      {{"A of two value heads to a key head, no split", 8, 16, 10, 1000, off, saved, {}}},
      {{"checkpoints", 2, 8, 20, 2000, states, checkpoints, {}}},
      {{"checkpoints, no split", 2, 8, 20, 2000, off, checkpoints, {}}},
      {{"listed", 2, 8, 20, 2000, states, listed, {}}},
      {{"listed, no split", 2, 8, 20, 2000, off, listed, {}}},
      {{"all that is kept", 2, 8, 20, 2000, states, every_state, {}}},
      {{"split", 2, 8, 1, 8192, states, none, {}}},
      {{"split, two sequences", 2, 4, 2, 8192, states, none, {}}},
      {{"split, forced", 2, 6, 5, 3000, forced, none, {}}},
      {{"split, forced, saved", 2, 6, 5, 3000, forced, saved_h, {}}},
      {{"split, forced, all that is kept", 2, 6, 5, 3000, forced, every_state, {}}},
      {{"split by length", 2, 4, 3, 9000, by_length, none, {}}},
      // Rows that are skipped, which nobody else writes.
      {{"dense, pool", 2, 8, 20, 2000, states, checkpoints, {}}, true},
      // Lengths as they are expected.
      {{"split, expected lengths", 2, 8, 1, 8192, states, none, {}}, true},
      // ... in heads that are decaying or exact everywhere, with the usual warm-ups: choices are looked up, but for a
      // sixth, for which one is worked out; where no head decays there may be other ways.
      {{"even split, a quarter, short", 1, 4, 1, 3072, states, none, {}, 4}, true},
      {{"even split, a quarter", 2, 8, 1, 8192, states, none, {}, 4}, true},
      {{"even split, a quarter, two sequences", 4, 16, 2, 16384, states, none, {}, 4}, true},
      {{"even split, a quarter, 32 heads", 8, 32, 1, 16384, states, none, {}, 4}, true},
      {{"even split, a quarter, unaligned", 4, 16, 2, 16384, states, none, {8162, 8170}, 4}},
      {{"even split, a quarter, saved", 2, 8, 1, 8192, states, saved_h, {}, 4}, true},
      {{"even split, half", 2, 8, 1, 8192, states, none, {}, 2}, true},
      {{"even split, a sixth", 2, 12, 1, 12288, states, none, {}, 6}, true},
      {{"even split, all", 2, 8, 1, 8192, states, none, {}, 1}, true},
      {{"even split, none", 2, 8, 1, 8192, states, none, {}, 100}, true},
      // ... and where pairs of SMs make what waits for boundary states.
      {{"even split, all, pairs", 8, 32, 1, 32768, states, none, {}, 1}, true},
      {{"even split, all, pairs, unaligned", 8, 32, 1, 32768, states, none, {32720}, 1}},
      {{"even split, all, pairs, saved", 16, 32, 1, 24576, states, saved_h, {}, 1}, true},
      // ... and a segment's state and transition are one tile.
      {{"even split, all, short", 1, 16, 1, 6144, states, none, {}, 1}, true},
      {{"even split, all, long segments", 4, 16, 1, 32768, states, none, {}, 1}, true},
      {{"even split, all, two sequences, unaligned", 4, 8, 2, 16384, states, none, {8200, 8200}, 1}},
      {{"even split, all, saved", 2, 8, 1, 16384, states, saved_h, {}, 1}, true},
  };
  int64_t number = 0;
  for (const auto& [c, dense] : cases) {
    const int64_t i = number++;
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    if (c.too_long(settings.small) && settings.only_cases.empty()) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
      ForwardCall call;
      call.draw(c.shape(dtype, dense, settings.small, random), c.features, c.pool, false, random);
      if (c.steady > 0) {
        part_gates(call.in.g, c.steady, random);
      } else if (!c.features.gate) {
        mix_gates(call.in.g, random);
      }
      const std::string what = "case " + std::to_string(i) + ", " + c.name + describe(call.in.shape, c.features);
      repeat_over_stale(what, call, settings, checker, arena, c.steady > 0 ? c.sequences * (c.Hv / c.steady) : -1);
    }
  }
  if (!settings.small && settings.only_cases.empty()) expect_all_launched(false, checker);
  return checker.finish();
}

inline int64_t test_sm90_backward_stale(const Settings& settings, Arena& arena) {
  Checker checker("backward over stale memory, sm90", settings, arena, "sm90");
  forget_launches();
  Features whole;
  whole.drawn_on_device = whole.initial_state = true;
  whole.cp_mode = FLASH_QLA_CP_OFF;  // no segments
  Features norms = whole, cut = whole, forced = whole;
  norms.l2norm = norms.sigmoid = true;
  cut.cp_mode = FLASH_QLA_CP_AUTO;
  forced.cp_mode = FLASH_QLA_CP_AUTO;
  forced.force_intra_cp = true;
  // dht: where it is given and nothing may depend on the batch (CP_OFF) packed sequences take the form of states in
  // fp32.
  struct Case {
    StaleCase sizes;
    bool dense, given_A, dht = true;
  };
  // 4 * sequences * Hv blocks of halves on 132 multiprocessors (chunk_bwd/launch.cu).
  const Case cases[] = {
      {{"both halves, one sequence", 16, 32, 1, 2000, whole, {}, {}}, false, true, false},
      {{"both halves, one sequence, no A", 15, 30, 1, 2000, whole, {}, {}}, false, false, false},
      {{"both halves, one long sequence", 16, 32, 1, 8192, cut, {}, {8192}}, false, true},
      {{"both halves, two sequences", 8, 16, 2, 1100, whole, {}, {}}, true, true, false},
      {{"both halves, four", 16, 32, 4, 8192, whole, {}, {5809, 1244, 406, 733}}, false, true, false},
      {{"both halves", 16, 32, 4, 4000, whole, {}, {}}, false, false, false},
      {{"both halves, norms", 8, 24, 4, 3000, norms, {}, {}}, false, false, false},
      {{"halves beside prepare", 2, 4, 2, 3000, whole, {}, {}}, false, true},
      {{"halves, one wave", 4, 8, 3, 3000, whole, {}, {}}, false, true},
      {{"halves, waves", 8, 16, 4, 3000, whole, {}, {}}, false, true, false},
      {{"both halves, one wave", 20, 40, 1, 1500, whole, {}, {}}, false, true, false},
      {{"both halves, many short sequences", 8, 8, 24, 4000, whole, {}, {}}, false, true, false},
      {{"segments", 2, 4, 1, 8192, cut, {}, {}}, false, true},
      {{"segments, forced, waves", 2, 6, 3, 3000, forced, {}, {}}, false, false},
      {{"states in fp32", 2, 4, 2, 700, cut, {}, {}}, false, true},
      {{"states in fp32, segments", 2, 4, 2, 1100, forced, {}, {}}, false, false},
      {{"states in fp32, by sequence", 8, 16, 3, 2000, whole, {}, {}}, false, true},
  };
  int64_t number = 0;
  for (const auto& [c, dense, given_A, dht] : cases) {
    const int64_t i = number++;
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    if (c.too_long(settings.small) && settings.only_cases.empty()) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
      const Shape s = c.shape(dtype, dense, settings.small, random);
      BackwardCall call;
      call.draw(s, c.features, false, true, dht, random);
      if (given_A) call.A = Buffer(dtype, {s.B, s.T, s.Hv, kChunkSize});
      mix_gates(call.in.g, random);
      const std::string what = "case " + std::to_string(i) + ", " + c.name + describe(s, c.features);
      repeat_over_stale(what, call, settings, checker, arena);
    }
  }
  if (!settings.small && settings.only_cases.empty()) expect_all_launched(true, checker);
  return checker.finish();
}

}  // namespace flash_qla::testing
