// The groups of cuda_generic_test in which one call of the Hopper forward runs again and again, directly and in graphs.
#pragma once

#include "checker.h"
#include "repeated_call.cuh"

namespace flash_qla::testing {

// The same bits in each of `runs` runs, half of them beside another kernel that takes a varying part of the card.
inline void repeat_call(const char* what, ForwardCall& call, int runs, Random& random, Checker& checker, Arena& arena) {
  arena.reset();
  cudaStream_t stream, other;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  RepeatedCall repeated(call, arena);
  const std::vector<char*> first = repeated.take_results(arena);
  repeated.poison(stream);
  repeated.run(stream);
  repeated.keep(first, stream);
  for (int i = 0; i < runs && repeated.status().ok(); ++i) {
    if (i % 2 == 1)
      spin_kernel<<<static_cast<unsigned>(random.integer(1, 160)), 64, 0, other>>>(random.integer(1000, 200000));
    repeated.poison(stream);
    repeated.run(stream);
    repeated.compare(first, stream);
  }
  if (!repeated.status().ok()) checker.fail(what, "sm90", repeated.status().message());
  if (const auto words = repeated.different(); words > 0) {
    checker.fail(what, "sm90", std::to_string(words) + " words moved between runs");
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
}

// A batch of so many sequences, run again and again.
struct Repeated {
  const char* name;
  DType dtype;
  int sequences;
  int64_t Hv;
  bool keeps;  // h, A and the cumsum
};

inline int64_t repeat_batches(const char* group, const std::vector<Repeated>& kinds, const Settings& settings,
                              Arena& arena) {
  Checker checker(group, settings, arena, "sm90");
  uint64_t seed = 3;
  for (const Repeated& kind : kinds) {
    Random random(seed++);
    Shape s;
    s.dtype = kind.dtype;
    s.Hq = 2;
    s.Hv = kind.Hv;
    s.K = s.V = 128;
    // Of very different lengths.
    s.cu_seqlens = {0};
    for (int n = 0; n < kind.sequences; ++n) {
      const int64_t most = n % 8 == 0 ? 400 : 90;
      s.cu_seqlens.push_back(s.cu_seqlens.back() + random.integer(0, settings.small ? most / 2 : most));
    }
    s.T = s.cu_seqlens.back() + 10;
    Features f;
    f.initial_state = f.final_state = true;
    PoolFeatures kept;
    kept.h = kept.A = kept.g_cumsum = kind.keeps;
    ForwardCall call;
    call.draw(s, f, kept, false, random);
    checker.check(kind.name, call, "sm90", "cuda_reference", FLASH_QLA_CUDA);
    repeat_call(kind.name, call, settings.small ? 1 : 1000, random, checker, arena);
  }
  return checker.finish();
}

// A thousand runs of a full card, tiles given out by tickets: many sequences and few, and with what training keeps.
inline int64_t test_sm90_repeat(const Settings& settings, Arena& arena) {
  return repeat_batches("a thousand runs, sm90",
                        {{"many sequences", DType::kBFloat16, 40, 8, false},
                         {"fewer sequences", DType::kFloat16, 30, 12, false},
                         {"few sequences", DType::kBFloat16, 20, 8, false},
                         {"what training keeps", DType::kFloat16, 40, 8, true}},
                        settings, arena);
}

// A thousand runs of calls with so few tiles that two multiprocessors share one.
inline int64_t test_sm90_repeat_shared(const Settings& settings, Arena& arena) {
  std::vector<Repeated> kinds;
  for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
    for (const bool keeps : {false, true}) {
      kinds.push_back({keeps ? "two share, h kept" : "two share", type, 5, 8, keeps});
      kinds.push_back({keeps ? "two share few tiles, h kept" : "two share few tiles", type, 3, 8, keeps});
    }
  }
  return repeat_batches("a thousand runs of shared tiles, sm90", kinds, settings, arena);
}

// One captured graph of a call, replayed with its inputs set to one drawn pattern after another: the bits of direct
// calls. set_inputs(i) copies pattern i's to the call's, in the stream.
template <typename SetInputs>
void soak_replays(Checker& checker, const std::string& what, RepeatedCall<ForwardCall>& repeated, size_t patterns,
                  const SetInputs& set_inputs, int replays, Random& random, Arena& arena, cudaStream_t stream) {
  std::vector<std::vector<char*>> expected;
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the stream does not wait for uploads
  for (size_t i = 0; i < patterns; ++i) {
    expected.push_back(repeated.take_results(arena));
    set_inputs(i);
    repeated.poison(stream);
    repeated.run(stream);
    repeated.keep(expected[i], stream);
  }
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  repeated.run(stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  if (!repeated.status().ok()) checker.fail("run", "sm90", repeated.status().message());
  for (int i = 0; i < replays; ++i) {
    const size_t pattern = static_cast<size_t>(random.integer(0, static_cast<int64_t>(patterns) - 1));
    set_inputs(pattern);
    repeated.poison(stream);
    check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    repeated.compare(expected[pattern], stream);
  }
  if (const auto words = repeated.different(); words > 0) {
    checker.fail(what, "sm90", std::to_string(words) + " words differ in the replays");
  }
  check_cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

// Ten thousand replays of captured graphs whose lengths change in place: [512] + [6] * (N - 1), which has hung others'
// kernels, and drawn ones, empty sequences included.
inline int64_t test_sm90_soak(const Settings& settings, Arena& arena) {
  Checker checker("graph replays with changing lengths, sm90", settings, arena, "sm90");
  cudaStream_t stream;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  const std::vector<int64_t> counts = settings.small ? std::vector<int64_t>{33} : std::vector<int64_t>{33, 64, 97, 128};
  const int replays = settings.small ? 50 : 2500, patterns = settings.small ? 3 : 8;
  for (const int64_t N : counts) {
    Random random(static_cast<uint64_t>(N));
    Shape s;
    s.dtype = DType::kBFloat16;
    s.T = 512 + 6 * (N - 1);
    s.Hq = 2;
    s.Hv = 4;
    s.K = s.V = 128;
    s.cu_seqlens.assign(static_cast<size_t>(N) + 1, 0);
    Features f;
    f.initial_state = f.final_state = true;
    PoolFeatures kept;
    kept.h = kept.A = kept.g_cumsum = N % 2 == 1;  // both kernels
    ForwardCall call;
    call.draw(s, f, kept, false, random);
    std::vector<ForwardCall> drawn;
    for (int i = 0; i < patterns; ++i) {
      std::vector<int64_t> offsets = {0};
      if (i == 0) {
        offsets.push_back(512);
        while (static_cast<int64_t>(offsets.size()) <= N) offsets.push_back(offsets.back() + 6);
      } else {
        const int64_t end = i == 1 ? 0 : s.T - random.integer(0, 40);  // once all of them are empty
        while (static_cast<int64_t>(offsets.size()) < N) {
          offsets.push_back(random.chance(0.2) ? offsets.back() : random.integer(0, end));
        }
        std::sort(offsets.begin(), offsets.end());
        offsets.push_back(end);
      }
      call.in.shape.cu_seqlens = offsets;
      call.in.cu_seqlens.fill(
          [&](int64_t n, int64_t, int64_t, int64_t) { return static_cast<double>(offsets[static_cast<size_t>(n)]); });
      checker.check(std::to_string(N) + " sequences, pattern " + std::to_string(i), call, "sm90", "cuda_reference",
                    FLASH_QLA_CUDA);
      drawn.push_back(call);
    }
    arena.reset();
    RepeatedCall repeated(call, arena);
    const Tensor cu_seqlens = repeated.arguments().cu_seqlens;
    const size_t offset_bytes = call.in.cu_seqlens.bytes().size();
    std::vector<void*> offsets;
    for (ForwardCall& pattern : drawn) {
      pattern.in.cu_seqlens.upload(arena);
      offsets.push_back(pattern.in.cu_seqlens.device().data);
    }
    const auto set_lengths = [&](size_t i) {
      check_cuda(cudaMemcpyAsync(cu_seqlens.data, offsets[i], offset_bytes, cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
    };
    soak_replays(checker, std::to_string(N) + " sequences", repeated, drawn.size(), set_lengths, replays, random, arena,
                 stream);
  }
  cudaStreamDestroy(stream);
  return checker.finish();
}

}  // namespace flash_qla::testing
