// The group of cuda_generic_test that is about calls whose lengths the device is asked for first
// (docs/notebook/sequence_split.md).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/sm90/context_parallel/plan.h"
#include "sm90_split_tests.cuh"

namespace flash_qla::testing {

// A number of [-0.5, 0.5) for element i.
__device__ inline float drawn(int64_t i, uint32_t seed) {
  uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull;
  x ^= x >> 31;
  x *= 0xbf58476d1ce4e5b9ull;
  return static_cast<float>(x >> 40) * 0x1p-24f - 0.5f;
}

template <typename T>
__global__ void draw_kernel(T* data, int64_t n, float low, float high, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    data[i] = static_cast<T>(low + (high - low) * (drawn(i, seed) + 0.5f));
  }
}

// Log decays [tokens, heads]: a third of the heads do not decay, a third forget within a few chunks, the others turn
// from one to the other every 700 tokens; `shift` says which is which.
__global__ void draw_gates_kernel(float* g, int64_t tokens, int heads, int shift, uint32_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < tokens * heads;
       i += gridDim.x * blockDim.x) {
    const int kind = (static_cast<int>(i % heads) + shift) % 3;
    const bool decays = kind == 0 || (kind == 1 && i / heads / 700 % 2 == 0);
    g[i] = decays ? -0.2f * (drawn(i, seed) + 0.5f) : 0.0f;
  }
}

// Sums over elements [outer, heads, inner] of each head, a block a head: (a - b)^2 and b^2.
template <typename T>
__global__ void compare_heads_kernel(const T* a, const T* b, int64_t outer, int64_t inner, double* sums) {
  double difference = 0.0, norm = 0.0;
  for (int64_t i = threadIdx.x; i < outer * inner; i += blockDim.x) {
    const int64_t at = (i / inner * gridDim.x + blockIdx.x) * inner + i % inner;
    const double got = static_cast<float>(a[at]), want = static_cast<float>(b[at]);
    difference += (got - want) * (got - want);
    norm += want * want;
  }
  atomicAdd(&sums[2 * blockIdx.x], difference);
  atomicAdd(&sums[2 * blockIdx.x + 1], norm);
}

// A call of several sequences of which the host cannot know whether a cut pays: as many of equal length would nearly
// fill the card, unequal ones leave it idle. That takes half a million tokens times heads, so all of it is made and
// compared on the device.
template <typename T>
class UnequalCall {
 public:
  struct Size {
    int64_t sequences, Hq, Hv, tokens;
  };

  UnequalCall(const Size& size, Arena& arena) : size_(size), arena_(arena) {
    const DType type = std::is_same_v<T, __half> ? DType::kFloat16 : DType::kBFloat16;
    const auto take = [&](DType dtype, std::initializer_list<int64_t> shape) {
      int64_t n = 1;
      for (const int64_t d : shape) n *= d;
      return tensor(arena.take(static_cast<size_t>(n * size_of(dtype))), dtype, shape);
    };
    const int64_t rows = size.tokens;
    args_.q = take(type, {1, rows, size.Hq, kDim});
    args_.k = take(type, {1, rows, size.Hq, kDim});
    args_.v = take(type, {1, rows, size.Hv, kDim});
    args_.o = take(type, {1, rows, size.Hv, kDim});
    args_.g = take(DType::kFloat32, {1, rows, size.Hv});
    args_.beta = take(DType::kFloat32, {1, rows, size.Hv});
    args_.initial_state = take(DType::kFloat32, {size.sequences, size.Hv, kDim, kDim});
    args_.final_state = take(DType::kFloat32, {size.sequences, size.Hv, kDim, kDim});
    args_.cu_seqlens = take(DType::kInt32, {size.sequences + 1});
    // Keys and queries of about unit norm: a sum of 128 squares of numbers of variance 1 / 128.
    const float unit = std::sqrt(3.0f / kDim);
    fill<T>(args_.q, -unit, unit, 1);
    fill<T>(args_.k, -unit, unit, 2);
    fill<T>(args_.v, -1.7f, 1.7f, 3);
    fill<float>(args_.beta, 0.0f, 1.0f, 4);
    fill<float>(args_.initial_state, -0.8f, 0.8f, 5);
    args_.options.path = "sm90";
    args_.options.device_type = FLASH_QLA_CUDA;
    check_cuda(cudaGetDevice(&args_.options.device_index), "cudaGetDevice");
    status_ = ChunkForward::workspace_size(args_, &workspace_bytes_);
    workspace_ = arena.take(workspace_bytes_);
    check_cuda(cudaMemset(workspace_, 0xff, workspace_bytes_), "cudaMemset");
    count_ = static_cast<unsigned long long*>(arena.take(sizeof(*count_)));
    check_cuda(cudaMemset(count_, 0, sizeof(*count_)), "cudaMemset");
  }
  const Status& status() const { return status_; }
  const ForwardArguments& arguments() const { return args_; }

  // One set of lengths and gates, on the device.
  struct Pattern {
    Tensor cu_seqlens, g;
  };
  Pattern pattern(const std::vector<int32_t>& offsets, int shift) {
    Pattern p{args_.cu_seqlens, args_.g};
    p.cu_seqlens.data = arena_.take(offsets.size() * sizeof(int32_t));
    p.g.data = arena_.take(bytes_of(args_.g));
    check_cuda(cudaMemcpy(p.cu_seqlens.data, offsets.data(), offsets.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    draw_gates_kernel<<<1024, 256>>>(static_cast<float*>(p.g.data), size_.tokens, static_cast<int>(size_.Hv), shift,
                                     static_cast<uint32_t>(7 + shift));
    check_cuda(cudaDeviceSynchronize(), "draw_gates_kernel");
    return p;
  }
  void set(const Pattern& p, cudaStream_t stream) const {
    copy(args_.cu_seqlens, p.cu_seqlens, stream);
    copy(args_.g, p.g, stream);
  }
  void poison(cudaStream_t stream) const {
    for (const Tensor& t : {args_.o, args_.final_state}) {
      check_cuda(cudaMemsetAsync(t.data, 0xff, bytes_of(t), stream), "cudaMemsetAsync");
    }
  }
  void run(cudaStream_t stream) { status_ = ChunkForward::run(args_, workspace_, workspace_bytes_, stream); }

  struct Results {
    Tensor o, final_state;
  };
  Results take_results() {
    Results r{args_.o, args_.final_state};
    r.o.data = arena_.take(bytes_of(r.o));
    r.final_state.data = arena_.take(bytes_of(r.final_state));
    return r;
  }
  void keep(const Results& results, cudaStream_t stream) const {
    copy(results.o, args_.o, stream);
    copy(results.final_state, args_.final_state, stream);
  }
  void count_different(const Results& results, cudaStream_t stream) const {
    for (const auto& [a, b] : {std::pair{args_.o, results.o}, {args_.final_state, results.final_state}}) {
      count_different_kernel<<<512, 256, 0, stream>>>(static_cast<const uint32_t*>(a.data),
                                                      static_cast<const uint32_t*>(b.data),
                                                      static_cast<int64_t>(bytes_of(a) / 4), count_);
    }
  }
  // Words that have differed so far. Waits for the device.
  unsigned long long different() const {
    unsigned long long count = 0;
    check_cuda(cudaDeviceSynchronize(), "sm90, lengths first");
    check_cuda(cudaMemcpy(&count, count_, sizeof(count), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return count;
  }

  // The oracle's results for the lengths and gates that are set, until it is called again.
  const Results& expected() {
    ForwardArguments args = args_;
    args.options.path = "cuda_reference";
    if (oracle_workspace_ == nullptr) {
      oracle_ = take_results();
      status_ = ChunkForward::workspace_size(args, &oracle_bytes_);
      oracle_workspace_ = arena_.take(oracle_bytes_);
    }
    args.o = oracle_.o;
    args.final_state = oracle_.final_state;
    if (status_.ok()) status_ = ChunkForward::run(args, oracle_workspace_, oracle_bytes_);
    check_cuda(cudaDeviceSynchronize(), "cuda_reference");
    return oracle_;
  }
  // Largest relative error of a head of o, and of the final state. NaN anywhere: infinite.
  std::pair<double, double> errors(const Results& wanted) {
    std::pair<double, double> worst;
    worst.first = worst_head<T>(args_.o, wanted.o, size_.tokens, kDim);
    worst.second = worst_head<float>(args_.final_state, wanted.final_state, size_.sequences, kDim * kDim);
    return worst;
  }

 private:
  static constexpr int64_t kDim = 128;

  static size_t bytes_of(const Tensor& t) {
    int64_t n = size_of(dtype(t));
    for (int i = 0; i < t.ndim; ++i) n *= t.shape[i];
    return static_cast<size_t>(n);
  }
  static void copy(const Tensor& to, const Tensor& from, cudaStream_t stream) {
    check_cuda(cudaMemcpyAsync(to.data, from.data, bytes_of(to), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }
  template <typename E>
  static void fill(const Tensor& t, float low, float high, uint32_t seed) {
    draw_kernel<E>
        <<<1024, 256>>>(static_cast<E*>(t.data), static_cast<int64_t>(bytes_of(t) / sizeof(E)), low, high, seed);
  }
  template <typename E>
  double worst_head(const Tensor& got, const Tensor& want, int64_t outer, int64_t inner) {
    std::vector<double> sums(static_cast<size_t>(2 * size_.Hv));
    auto* on_device = static_cast<double*>(arena_.take(sums.size() * sizeof(double)));
    check_cuda(cudaMemset(on_device, 0, sums.size() * sizeof(double)), "cudaMemset");
    compare_heads_kernel<E><<<static_cast<unsigned>(size_.Hv), 1024>>>(
        static_cast<const E*>(got.data), static_cast<const E*>(want.data), outer, inner, on_device);
    check_cuda(cudaMemcpy(sums.data(), on_device, sums.size() * sizeof(double), cudaMemcpyDeviceToHost), "cudaMemcpy");
    double worst = 0.0;
    for (size_t head = 0; head < sums.size(); head += 2) {
      const double error = std::sqrt(sums[head] / std::max(sums[head + 1], 1e-300));
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    return worst;
  }

  Size size_;
  Arena& arena_;
  ForwardArguments args_;
  Results oracle_;
  Status status_;
  size_t workspace_bytes_ = 0, oracle_bytes_ = 0;
  void *workspace_ = nullptr, *oracle_workspace_ = nullptr;
  unsigned long long* count_ = nullptr;
};

// Whether the device goes on to cut sequences of these lengths, in tensors of so many tokens.
inline bool cuts_pay(const std::vector<int32_t>& offsets, int64_t tokens, int64_t key_heads, int64_t heads) {
  using namespace cuda::sm90::cp;
  int32_t longest = 0;
  for (size_t n = 1; n < offsets.size(); ++n) longest = std::max(longest, chunks_in(offsets[n] - offsets[n - 1]));
  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const auto value_heads = static_cast<int32_t>(heads);
  const Costs costs(static_cast<int32_t>(key_heads), value_heads);
  return longest >=
         least_longest(divide_up(tokens, kChunk), static_cast<int32_t>(offsets.size()) - 1, value_heads, sms, costs);
}

template <typename T>
void test_unequal_call(const char* name, const typename UnequalCall<T>::Size& size, const Settings& settings,
                       Checker& checker, Arena& arena) {
  arena.reset();
  UnequalCall<T> call(size, arena);
  if (!call.status().ok()) checker.fail(name, "sm90", call.status().message());
  if (explained(ForwardCall(), call.arguments()).find("unequal length") == std::string::npos) {
    checker.fail(name, "sm90", "lengths are not asked for first");
  }
  // One long sequence beside short ones, the same in another order, equal ones, the short ones alone, nothing at all.
  const auto N = static_cast<int32_t>(size.sequences), tokens = static_cast<int32_t>(size.tokens);
  std::vector<std::vector<int32_t>> lengths(5, {0});
  for (int32_t n = 0; n < N; ++n) {
    const int32_t shorter = tokens / 8 / (N - 1) - 3 * n;
    lengths[0].push_back(n == 0 ? tokens - tokens / 8 : lengths[0].back() + shorter);
    lengths[1].push_back(n == N - 1 ? tokens - 5 : lengths[1].back() + shorter);
    lengths[2].push_back(lengths[2].back() + tokens / N);
    lengths[3].push_back(lengths[3].back() + (n == 1 ? 0 : 200 + 77 * n));
    lengths[4].push_back(0);
  }
  // Under a tool one of each kind; the oracle's share of the time is too large there.
  if (settings.small) lengths = {lengths[0], lengths[3]};
  const int runs = settings.small ? 2 : 1000, replays = settings.small ? 2 : 500;
  cudaStream_t stream, other;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  Random random(91);
  std::vector<typename UnequalCall<T>::Pattern> patterns;
  std::vector<typename UnequalCall<T>::Results> first;
  std::set<bool> ways;
  for (size_t i = 0; i < lengths.size(); ++i) {
    checker.count(path_of(ForwardCall(), call.arguments()));
    ways.insert(cuts_pay(lengths[i], size.tokens, size.Hq, size.Hv));
    patterns.push_back(call.pattern(lengths[i], static_cast<int>(i)));
    call.set(patterns[i], stream);
    call.poison(stream);
    call.run(stream);
    first.push_back(call.take_results());
    call.keep(first[i], stream);
    check_cuda(cudaDeviceSynchronize(), name);
    if (settings.small) continue;
    const auto [o, state] = call.errors(call.expected());
    std::printf("  %-36s lengths %zu: o %.2e, state %.2e\n", name, i, o, state);
    if (!(o <= 5e-3)) checker.fail(name, "sm90", "o differs by " + std::to_string(o));
    if (!(state <= 5e-3)) checker.fail(name, "sm90", "the state differs by " + std::to_string(state));
  }
  if (ways.size() != 2) checker.fail(name, "sm90", "all or none of the lengths are cut");

  // The same bits in each run, half of them beside another kernel, a quarter over shared memory that is full of
  // something, and in each replay of a graph.
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  call.run(stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < runs + replays && call.status().ok(); ++i) {
    const auto which = static_cast<size_t>(random.integer(0, static_cast<int64_t>(patterns.size()) - 1));
    if (i % 2 == 1)
      spin_kernel<<<static_cast<unsigned>(random.integer(1, 160)), 64, 0, other>>>(random.integer(1000, 200000));
    if (i % 4 == 0) fill_shared_memory(i % 8 == 0 ? 0x7fc07fc0 : 0x3f803f80, stream);  // NaN; ordinary numbers
    call.set(patterns[which], stream);
    call.poison(stream);
    if (i < runs) {
      call.run(stream);
    } else {
      check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    }
    call.count_different(first[which], stream);
  }
  if (!call.status().ok()) checker.fail(name, "sm90", call.status().message());
  if (const auto words = call.different(); words > 0) {
    checker.fail(name, "sm90", std::to_string(words) + " words moved between runs");
  }
  if (!arena.intact()) checker.fail(name, "sm90", "memory past the end of a tensor was written");
  check_cuda(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
}

// Heads for tiles of whole heads and, where all lengths are equal, for tiles of half heads.
inline int64_t test_sm90_lengths_first(const Settings& settings, Arena& arena) {
  Checker checker("lengths first, sm90", settings, arena, "sm90");
  test_unequal_call<__nv_bfloat16>("two sequences, 48 heads", {2, 2, 48, 36864}, settings, checker, arena);
  test_unequal_call<__half>("three sequences, 32 heads, fp16", {3, 2, 32, 53248}, settings, checker, arena);
  if (!settings.small) {
    test_unequal_call<__nv_bfloat16>("two sequences, 28 heads", {2, 2, 28, 32768}, settings, checker, arena);
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
