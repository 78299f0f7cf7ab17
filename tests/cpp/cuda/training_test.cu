// A training step (forward and backward, the paths that the library chooses) as trainers run it, on a machine with a
// GPU:
//   the same step again and again, beside another stream's work: the same bits every time;
//   the step captured once in a CUDA graph, replayed with other lengths written into cu_seqlens: the bits of a direct
//   call with those lengths;
//   the same step from a thread that has called nothing of CUDA before, as frameworks run their backward passes;
//   heads divided among calls, and a sequence taken out of its batch: the bits of the whole call.
// Without a GPU it says so and succeeds.
//
//   training_test [--repeats N]
//
// prints a line for every failed check and exits with 1 if any check failed.
#include <chrono>
#include <functional>
#include <thread>

#include "calls.h"

namespace flash_qla::testing {
namespace {

__global__ void count_differences_kernel(const uint8_t* a, const uint8_t* b, size_t bytes, unsigned long long* count) {
  unsigned long long found = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < bytes; i += size_t{gridDim.x} * blockDim.x) {
    found += a[i] != b[i];
  }
  if (found > 0) atomicAdd(count, found);
}

__global__ void busy_kernel(float* data, int64_t size) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < size; i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = data[i] * 0.5f + 1.0f;
  }
}

int64_t checks = 0, failures = 0;

void expect(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}

// A step's tensors on the device. Everything that it writes lies in one block, so that a run is compared as a whole.
class Step {
 public:
  Step(const Shape& shape, const Features& features, uint64_t seed, Arena& arena) {
    Random random(seed);
    backward_.draw(shape, features, false, true, true, random);
    for (auto [name, buffer] : backward_.inputs()) buffer->upload(arena);
    Inputs& in = backward_.in;
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    in.set(forward_args_, [](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
    backward_args_ = backward_.arguments([](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
    for (auto* options : {&forward_args_.options, &backward_args_.options}) {
      options->device_type = FLASH_QLA_CUDA;
      options->device_index = device;
    }
    // Sizes first, then one block for all.
    o_ = Buffer(shape.dtype, {shape.B, shape.T, shape.Hv, shape.V});
    A_ = Buffer(shape.dtype, {shape.B, shape.T, shape.Hv, kChunkSize});
    final_state_ = Buffer(DType::kFloat32, state_shape(shape, features.v_first, shape.N()));
    bytes_ = 0;
    const auto place = [&](const char* name, const Buffer& buffer, Tensor* to) {
      if (!buffer.present()) return;
      *to = buffer.shape_view();
      places_.push_back({to, name, bytes_});
      bytes_ += (buffer.bytes().size() + 255) / 256 * 256;
    };
    place("o", o_, &forward_args_.o);
    place("final_state", final_state_, &forward_args_.final_state);
    place("A", A_, &forward_args_.A);
    place("dq", backward_.dq, &backward_args_.dq);
    place("dk", backward_.dk, &backward_args_.dk);
    place("dv", backward_.dv, &backward_args_.dv);
    place("dg", backward_.dg, &backward_args_.dg);
    place("dbeta", backward_.dbeta, &backward_args_.dbeta);
    place("dh0", backward_.dh0, &backward_args_.dh0);
    place("dA_log", backward_.dA_log, &backward_args_.dA_log);
    place("ddt_bias", backward_.ddt_bias, &backward_args_.ddt_bias);
    outputs_ = static_cast<uint8_t*>(arena.take(bytes_));
    for (const Place& p : places_) p.tensor->data = outputs_ + p.at;
    backward_args_.A = forward_args_.A;
    size_t forward_bytes = 0, backward_bytes = 0;
    require(ChunkForward::workspace_size(forward_args_, &forward_bytes));
    require(ChunkBackward::workspace_size(backward_args_, &backward_bytes));
    workspace_bytes_ = std::max(forward_bytes, backward_bytes);
    workspace_ = arena.take(workspace_bytes_);
    count_ = static_cast<unsigned long long*>(arena.take(sizeof(unsigned long long)));
    settle();
  }

  // Outputs and scratch poisoned, then both passes, all in the stream.
  void run(cudaStream_t stream) {
    run_forward(stream);
    run_backward(stream);
  }
  void run_forward(cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(outputs_, 0xff, bytes_, stream), "cudaMemsetAsync");
    check_cuda(cudaMemsetAsync(workspace_, 0xff, workspace_bytes_, stream), "cudaMemsetAsync");
    require(ChunkForward::run(forward_args_, workspace_, workspace_bytes_, stream));
    check_cuda(cudaMemsetAsync(workspace_, 0xff, workspace_bytes_, stream), "cudaMemsetAsync");
  }
  void run_backward(cudaStream_t stream) {
    require(ChunkBackward::run(backward_args_, workspace_, workspace_bytes_, stream));
  }

  void set_offsets(const std::vector<int64_t>& offsets) {
    backward_.in.cu_seqlens.fill(
        [&](int64_t i, int64_t, int64_t, int64_t) { return static_cast<double>(offsets[static_cast<size_t>(i)]); });
    backward_.in.cu_seqlens.write_device();
    settle();
  }

  uint8_t* keep(Arena& arena) {
    settle();
    auto* copy = static_cast<uint8_t*>(arena.take(bytes_));
    check_cuda(cudaMemcpy(copy, outputs_, bytes_, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    settle();
    return copy;
  }

  // Whether a run differs from a kept one; the first time, names the tensors that do.
  bool differs(const uint8_t* kept, cudaStream_t stream) {
    if (count(kept, 0, bytes_, stream) == 0) return false;
    if (!named_) {
      for (size_t i = 0; i < places_.size(); ++i) {
        const size_t end = i + 1 < places_.size() ? places_[i + 1].at : bytes_;
        const auto bytes = count(kept, places_[i].at, end, stream);
        if (bytes > 0) std::printf("%s differs in %llu bytes\n", places_[i].name, bytes);
      }
    }
    named_ = true;
    return true;
  }

 private:
  // Copies from pageable memory and memsets may still be under way when they return, and streams that do not block
  // would not wait for them.
  static void settle() { check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

  unsigned long long count(const uint8_t* kept, size_t begin, size_t end, cudaStream_t stream) {
    check_cuda(cudaMemsetAsync(count_, 0, sizeof(*count_), stream), "cudaMemsetAsync");
    count_differences_kernel<<<528, 256, 0, stream>>>(outputs_ + begin, kept + begin, end - begin, count_);
    unsigned long long found = 0;
    check_cuda(cudaMemcpyAsync(&found, count_, sizeof(found), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return found;
  }

  static void require(const Status& status) {
    if (status.ok()) return;
    std::printf("FAILED %s\n", status.message());
    std::exit(1);
  }

  BackwardCall backward_;
  Buffer o_, A_, final_state_;
  ForwardArguments forward_args_;
  BackwardArguments backward_args_;
  struct Place {
    Tensor* tensor;
    const char* name;
    size_t at;  // bytes from the block's start
  };
  std::vector<Place> places_;
  bool named_ = false;
  size_t bytes_ = 0, workspace_bytes_ = 0;
  uint8_t* outputs_ = nullptr;
  void* workspace_ = nullptr;
  unsigned long long* count_ = nullptr;
};

Shape model_shape(int64_t T, int64_t Hq, int64_t Hv, std::vector<int64_t> offsets) {
  Shape s;
  s.T = T;
  s.Hq = Hq;
  s.Hv = Hv;
  s.K = s.V = 128;
  s.dtype = DType::kBFloat16;
  s.cu_seqlens = std::move(offsets);
  return s;
}

void test_repeats(int64_t repeats, Arena& arena) {
  struct Repeated {
    const char* name;
    Shape shape;
    bool options, segments;
  };
  const Shape batch = model_shape(1000, 4, 8, {0, 300, 300, 365, 990});
  for (const Repeated& repeated :
       {Repeated{"without options", batch, false, false}, Repeated{"with options", batch, true, false},
        // Both passes cut wherever it is possible.
        Repeated{"in segments", model_shape(3000, 2, 4, {0, 1600, 1637, 1637, 2949}), false, true},
        // Forward passes of heads that forget in runs.
        Repeated{"in runs", model_shape(2700, 8, 16, {}), false, false},
        // One sequence of so many heads: the passes prepare their own tiles.
        Repeated{"of 32 heads", model_shape(1000, 16, 32, {}), false, false}}) {
    arena.reset();
    Features f;
    f.initial_state = true;
    f.l2norm = f.gate = f.dt_bias = f.sigmoid = repeated.options;
    f.force_intra_cp = repeated.segments;
    Step step(repeated.shape, f, 3, arena);
    cudaStream_t stream, other;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check_cuda(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
    constexpr int64_t kBusy = int64_t{16} << 20;
    auto* data = static_cast<float*>(arena.take(kBusy * sizeof(float)));
    step.run(stream);
    const uint8_t* first = step.keep(arena);
    int64_t differing = 0;
    for (int64_t i = 0; i < repeats; ++i) {
      if (i % 2 == 1) busy_kernel<<<66, 512, 0, other>>>(data, kBusy);  // half of an H200, every second time
      step.run(stream);
      differing += step.differs(first, stream);
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    expect(differing == 0,
           std::to_string(differing) + " of " + std::to_string(repeats) + " repeats differ in their bits");
    expect(arena.intact(), "memory past the end of a tensor was written");
    std::printf("%lld repeats %s: %lld differ\n", static_cast<long long>(repeats), repeated.name,
                static_cast<long long>(differing));
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
    check_cuda(cudaStreamDestroy(other), "cudaStreamDestroy");
  }
}

void test_threads(Arena& arena) {
  for (const bool options : {false, true}) {
    arena.reset();
    Features f;
    f.l2norm = f.gate = f.sigmoid = options;
    Step step(model_shape(300, 2, 4, {0, 100, 300}), f, 9, arena);
    step.run_forward(nullptr);
    step.run_backward(nullptr);
    const uint8_t* first = step.keep(arena);
    step.run_forward(nullptr);
    std::thread([&] { step.run_backward(nullptr); }).join();
    expect(!step.differs(first, nullptr), "a step whose backward runs in a thread of its own differs");
    std::thread([&] {
      step.run_forward(nullptr);
      step.run_backward(nullptr);
    }).join();
    expect(!step.differs(first, nullptr), "a step in a thread of its own differs");
  }
  std::printf("a step in threads of its own: compared\n");
}

void test_graph(Arena& arena) {
  constexpr int64_t kTokens = 1500, kSequences = 40;
  const auto offsets_of = [](const std::vector<int64_t>& lengths) {
    std::vector<int64_t> offsets = {0};
    for (int64_t n = 0; n < kSequences; ++n) {
      const size_t i = static_cast<size_t>(n);
      offsets.push_back(offsets.back() + (i < lengths.size() ? lengths[i] : 0));
    }
    return offsets;
  };
  std::vector<int64_t> short_ones(kSequences, 6), even(kSequences, kTokens / kSequences);
  short_ones[0] = 512;
  const std::vector<std::vector<int64_t>> plans = {offsets_of({1000, 3, 64, 0, 129, 300}),
                                                   offsets_of(short_ones),
                                                   offsets_of(even),
                                                   offsets_of({kTokens}),
                                                   offsets_of({}),
                                                   offsets_of({0, 0, 65}),
                                                   offsets_of({63, 1, 1})};
  for (const bool options : {false, true}) {
    arena.reset();
    Features f;
    f.initial_state = true;
    f.l2norm = f.gate = f.dt_bias = f.sigmoid = options;
    Step step(model_shape(kTokens, 2, 4, plans[0]), f, 5, arena);
    cudaStream_t stream;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    std::vector<const uint8_t*> wanted;
    for (const auto& plan : plans) {
      step.set_offsets(plan);
      step.run(stream);
      wanted.push_back(step.keep(arena));
    }
    cudaGraph_t graph;
    cudaGraphExec_t replayable;
    step.set_offsets(plans[0]);
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    step.run(stream);
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&replayable, graph, 0), "cudaGraphInstantiate");
    int64_t differing = 0, replays = 0;
    for (int round = 0; round < 20; ++round) {
      for (size_t i = 0; i < plans.size(); ++i, ++replays) {
        step.set_offsets(plans[i]);
        check_cuda(cudaGraphLaunch(replayable, stream), "cudaGraphLaunch");
        differing += step.differs(wanted[i], stream);
      }
    }
    expect(differing == 0, std::to_string(differing) + " replays differ from direct calls");
    std::printf("%lld replays of one graph with other lengths %s options: %lld differ\n",
                static_cast<long long>(replays), options ? "with" : "without", static_cast<long long>(differing));
    check_cuda(cudaGraphExecDestroy(replayable), "cudaGraphExecDestroy");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
}

bool same(Buffer a, Buffer b) {
  return a.slice(0, 0, a.shape_view().shape[0]).bytes() == b.slice(0, 0, b.shape_view().shape[0]).bytes();
}

// auto_cp off: the bits of a sequence depend on nothing but the sequence, and heads may be divided among cards.
// Few heads and many: the kernels prepare a single long sequence of 32 heads in another place.
void test_invariance(int64_t Hq, int64_t Hv, Arena& arena) {
  Random random(13);
  const Shape s = model_shape(400, Hq, Hv, {0, 17, 17, 209, 400});
  Features f;
  f.initial_state = true;
  BackwardCall whole;
  whole.draw(s, f, false, true, true, random);
  const auto run = [&](BackwardCall& call) {
    call.in.features.cp_mode = FLASH_QLA_CP_OFF;
    const std::string error = run_call(call, nullptr, FLASH_QLA_CUDA, arena);
    expect(error.empty(), error);
  };
  const auto part = [&](int64_t begin, int64_t end, int64_t n, int64_t first_head, int64_t heads) {
    BackwardCall call = whole;
    const auto cut = [&](Buffer& b, bool keys) {
      const int64_t group = s.Hv / s.Hq;
      b = b.slice(1, begin, end);
      b = keys ? b.slice(2, first_head / group, (first_head + heads) / group)
               : b.slice(2, first_head, first_head + heads);
    };
    for (Buffer* b : {&call.in.q, &call.in.k, &call.dq, &call.dk}) cut(*b, true);
    for (Buffer* b : {&call.in.v, &call.in.g, &call.in.beta, &call.d_o, &call.dv, &call.dg, &call.dbeta})
      cut(*b, false);
    for (Buffer* b : {&call.in.initial_state, &call.dht, &call.dh0}) {
      *b = b->slice(0, n, n + 1).slice(1, first_head, first_head + heads);
    }
    call.in.shape.T = end - begin;
    call.in.shape.cu_seqlens.clear();
    call.in.cu_seqlens = Buffer();
    return call;
  };
  BackwardCall all = whole;
  run(all);
  for (const int64_t heads : {Hv, Hv / 2}) {
    for (int64_t first = 0; first < s.Hv; first += heads) {
      BackwardCall alone = part(17, 209, 2, first, heads);
      run(alone);
      const std::string what = " of a sequence alone, heads from " + std::to_string(first) + ", differs";
      const int64_t group = s.Hv / s.Hq, key = first / group, keys = heads / group;
      expect(same(alone.dq, all.dq.slice(1, 17, 209).slice(2, key, key + keys)), "dq" + what);
      expect(same(alone.dk, all.dk.slice(1, 17, 209).slice(2, key, key + keys)), "dk" + what);
      expect(same(alone.dv, all.dv.slice(1, 17, 209).slice(2, first, first + heads)), "dv" + what);
      expect(same(alone.dg, all.dg.slice(1, 17, 209).slice(2, first, first + heads)), "dg" + what);
      expect(same(alone.dbeta, all.dbeta.slice(1, 17, 209).slice(2, first, first + heads)), "dbeta" + what);
      expect(same(alone.dh0, all.dh0.slice(0, 2, 3).slice(1, first, first + heads)), "dh0" + what);
    }
  }
  std::printf("a sequence alone, and its %lld heads in two calls, against the batch: compared\n",
              static_cast<long long>(Hv));
}

int run(int64_t repeats) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: nothing was tested\n");
    return 0;
  }
  const auto begin = std::chrono::steady_clock::now();
  Arena arena(size_t{4} << 30);
  test_repeats(repeats, arena);
  test_threads(arena);
  test_graph(arena);
  test_invariance(2, 4, arena);
  test_invariance(16, 32, arena);
  std::printf("training step, %lld repeats, graphs, threads, parts: %lld cases, %lld failed, %.1f s\n",
              static_cast<long long>(repeats), static_cast<long long>(checks), static_cast<long long>(failures),
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flash_qla::testing

int main(int argc, char** argv) {
  int64_t repeats = 1000;
  if (argc == 3 && std::string(argv[1]) == "--repeats") {
    repeats = std::atoll(argv[2]);
  } else if (argc != 1) {
    std::fprintf(stderr, "usage: training_test [--repeats N]\n");
    return 2;
  }
  std::printf("%s", flash_qla::build_info().c_str());
  return flash_qla::testing::run(repeats);
}
