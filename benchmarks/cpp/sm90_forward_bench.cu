// Times of the Hopper forward through the C interface: what each option costs beside the plain call, and how long the
// first call of a process takes.
//
//   sm90_forward_bench [modes|cold] [--reps N] [--only TEXT]
//
// `modes` prints for each option (with --only: those that have TEXT in their names) its time beside the plain call's,
// measured in turn, and the bound on it; what an option has to write or read more is allowed the time of its bytes.
// `cold` prints the time of the first call after the context is there, and of the second.
#include <chrono>

#include "device_bench.h"

namespace flash_qla::testing {
namespace {

constexpr int64_t kDim = 128;
constexpr double kBytesPerMillisecond = 4.27e9;  // reading and writing on an H200, as a copy does

// Gates of 0.05 on average, as the benchmark's rows have them: 3.2 a chunk. Chunks that decay by more than 5 in fp16,
// 50 in bf16, take longer (docs/notebook/sm90_forward.md), and are not what an option costs.
constexpr float kLeastGate = -0.1f;

struct Row {
  int64_t Hq, Hv, N, length;
};

struct Mode {
  const char* name;
  double factor;  // allowed time beside the plain row's, apart from the time of its bytes
  double bytes;   // more than the plain row moves; 0 where the factor has to do
  std::function<void(ForwardArguments&)> change;
};

class Bench : DeviceBench {
 public:
  using DeviceBench::DeviceBench;

  void run_modes(const std::string& only) {
    for (const Row& row : {Row{16, 64, 4, 8192}, Row{16, 64, 8, 1024}}) modes(row, only);
  }

  void run_cold() {
    const auto call = plain({16, 64, 1, 2048}, DType::kBFloat16);
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    for (const char* which : {"first", "second"}) {
      const auto begin = std::chrono::steady_clock::now();
      ForwardArguments args = call;
      size_t bytes = 0;
      Status status = ChunkForward::workspace_size(args, &bytes);
      void* workspace = arena_.take(bytes);
      if (status.ok()) status = ChunkForward::run(args, workspace, bytes, stream_);
      if (!status.ok()) {
        std::fprintf(stderr, "%s\n", status.message());
        std::exit(2);
      }
      check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
      const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
      std::printf("%s call: %.2f ms until its result is there\n", which, ms);
    }
  }

 private:
  template <class T>
  Tensor upload(DType type, const std::vector<T>& values) {
    Tensor t = tensor(nullptr, type, {static_cast<int64_t>(values.size())});
    t.data = arena_.take(values.size() * sizeof(T));
    check_cuda(cudaMemcpy(t.data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return t;
  }

  // Inference as an engine calls it: packed sequences, gates in float32, states in and out.
  ForwardArguments plain(const Row& row, DType type) {
    const int64_t T = row.N * row.length;
    const float unit = 1.7f / std::sqrt(static_cast<float>(kDim));  // keys of about unit norm
    ForwardArguments args;
    args.options.device_type = FLASH_QLA_CUDA;
    check_cuda(cudaGetDevice(&args.options.device_index), "cudaGetDevice");
    args.q = draw(type, {1, T, row.Hq, kDim}, -unit, unit);
    args.k = draw(type, {1, T, row.Hq, kDim}, -unit, unit);
    args.v = draw(type, {1, T, row.Hv, kDim}, -1.f, 1.f);
    args.g = draw(DType::kFloat32, {1, T, row.Hv}, kLeastGate, 0.f);
    args.beta = draw(DType::kFloat32, {1, T, row.Hv}, 0.f, 1.f);
    args.initial_state = draw(DType::kFloat32, {row.N, row.Hv, kDim, kDim}, -0.1f, 0.1f);
    args.o = draw(type, {1, T, row.Hv, kDim}, 0.f, 1.f);
    args.final_state = draw(DType::kFloat32, {row.N, row.Hv, kDim, kDim}, 0.f, 1.f);
    std::vector<int32_t> offsets;
    for (int64_t n = 0; n <= row.N; ++n) offsets.push_back(static_cast<int32_t>(n * row.length));
    args.cu_seqlens = upload(DType::kInt32, offsets);
    return args;
  }

  void modes(const Row& row, const std::string& only) {
    const int64_t T = row.N * row.length, chunks = T / kChunkSize + row.N;
    const auto pool = [&](ForwardArguments& args, DType type) {
      args.state_pool = draw(type, {2 * row.N, row.Hv, kDim, kDim}, -0.1f, 0.1f);
      args.initial_state = args.final_state = Tensor{};
      std::vector<int32_t> indices;
      for (int64_t n = 0; n < row.N; ++n) indices.push_back(static_cast<int32_t>(2 * row.N - 1 - 2 * n));
      args.initial_state_indices = upload(DType::kInt32, indices);
      args.options.state_v_first = 1;
    };
    const auto norm = [](ForwardArguments& args) { args.options.use_qk_l2norm_in_kernel = 1; };
    const auto activate = [&](ForwardArguments& args) {
      args.options.use_gate_in_kernel = args.options.use_beta_sigmoid_in_kernel = 1;
      // exp(A_log) softplus(g + dt_bias) of about the plain call's 0.05.
      args.A_log = draw(DType::kFloat32, {row.Hv}, -3.2f, -2.2f);
      args.dt_bias = draw(DType::kFloat32, {row.Hv}, -1.f, 1.f);
    };
    const auto keep_training = [&](ForwardArguments& args) {
      args.g_cumsum = draw(DType::kFloat32, {1, T, row.Hv}, 0.f, 1.f);
      args.A = draw(DType::kBFloat16, {1, T, row.Hv, kChunkSize}, 0.f, 1.f);
    };
    const double training_bytes = static_cast<double>(T * row.Hv) * (4 + 2 * kChunkSize);
    const double h_bytes = static_cast<double>(chunks * row.Hv * kDim * kDim) * 2;
    const std::vector<Mode> all = {
        {"fp16", 1.05, 0.0, nullptr},
        {"dense", 1.05, 0.0,
         [&](ForwardArguments& args) {
           for (Tensor* t : {&args.q, &args.k, &args.v, &args.o, &args.g, &args.beta}) {
             t->shape[0] = row.N;
             t->shape[1] = row.length;
             t->stride[0] = row.length * t->stride[1];
           }
           args.cu_seqlens = Tensor{};
         }},
        {"[V, K] states", 1.15, 0.0, [](ForwardArguments& args) { args.options.state_v_first = 1; }},
        {"pool fp32", 1.15, 0.0, [&](ForwardArguments& args) { pool(args, DType::kFloat32); }},
        {"pool bf16", 1.15, 0.0, [&](ForwardArguments& args) { pool(args, DType::kBFloat16); }},
        {"checkpoints every 1024", 1.15, 0.0,
         [&](ForwardArguments& args) {
           std::vector<int32_t> starts;
           for (int64_t n = 0; n <= row.N; ++n) starts.push_back(static_cast<int32_t>(n * (row.length / 1024)));
           args.checkpoint_every = 1024;
           args.checkpoint_cu_starts = upload(DType::kInt32, starts);
           args.checkpoints = draw(DType::kFloat32, {starts.back(), row.Hv, kDim, kDim}, 0.f, 1.f);
         }},
        {"a listed token a sequence", 1.15, 0.0,
         [&](ForwardArguments& args) {
           pool(args, DType::kFloat32);
           std::vector<int32_t> offsets, slots;
           for (int64_t n = 0; n < row.N; ++n) {
             offsets.push_back(static_cast<int32_t>(n * row.length + row.length / 2 + 20));
             slots.push_back(static_cast<int32_t>(2 * n));
           }
           args.checkpoint_offsets = upload(DType::kInt32, offsets);
           args.checkpoint_indices = upload(DType::kInt32, slots);
         }},
        {"bf16 g and beta", 1.15, 0.0,
         [&](ForwardArguments& args) {
           args.g = draw(DType::kBFloat16, {1, T, row.Hv}, kLeastGate, 0.f);
           args.beta = draw(DType::kBFloat16, {1, T, row.Hv}, 0.f, 1.f);
         }},
        {"l2norm", 1.15, 0.0, norm},
        {"gate and beta activations", 1.15, 0.0, activate},
        {"l2norm, gate and beta", 1.15, 0.0,
         [&](ForwardArguments& args) {
           norm(args);
           activate(args);
         }},
        {"saved A and cumsum", 1.1, training_bytes, keep_training},
        {"h", 1.1, h_bytes,
         [&](ForwardArguments& args) { args.h = draw(DType::kBFloat16, {chunks, row.Hv, kDim, kDim}, 0.f, 1.f); }},
        {"h, A and cumsum", 1.1, training_bytes + h_bytes,
         [&](ForwardArguments& args) {
           keep_training(args);
           args.h = draw(DType::kBFloat16, {chunks, row.Hv, kDim, kDim}, 0.f, 1.f);
         }},
        {"v with heads before tokens", 1.15, 0.0,
         [&](ForwardArguments& args) {
           args.v.stride[1] = kDim;
           args.v.stride[2] = T * kDim;
         }},
        {"v copied", 1.0, 4.0 * static_cast<double>(T * row.Hv * kDim),
         [&](ForwardArguments& args) {
           args.v = draw(DType::kBFloat16, {1, T, row.Hv, kDim + 1}, -1.f, 1.f);
           args.v.shape[3] = kDim;
         }},
    };
    std::printf("Hq %lld Hv %lld, %lld sequences of %lld tokens, K = V = 128\n", static_cast<long long>(row.Hq),
                static_cast<long long>(row.Hv), static_cast<long long>(row.N), static_cast<long long>(row.length));
    for (const Mode& mode : all) {
      if (std::string(mode.name).find(only) == std::string::npos) continue;
      arena_.reset();
      ForwardArguments base = plain(row, DType::kBFloat16);
      ForwardArguments args = plain(row, mode.change == nullptr ? DType::kFloat16 : DType::kBFloat16);
      if (mode.change != nullptr) mode.change(args);
      base.options.path = args.options.path = "sm90";
      const std::vector<double> ms = time_in_turn({prepare<ChunkForward>(base), prepare<ChunkForward>(args)}, 3);
      const double allowed = mode.factor * ms[0] + mode.bytes / kBytesPerMillisecond;
      std::printf("  %-28s %8.4f ms  plain %8.4f ms  %5.2fx  bound %8.4f ms: %s\n", mode.name, ms[1], ms[0],
                  ms[1] / ms[0], allowed, ms[1] <= allowed ? "met" : "MISSED");
      std::fflush(stdout);
    }
  }
};

}  // namespace
}  // namespace flash_qla::testing

int main(int argc, char** argv) {
  std::string command = "modes", only;
  int reps = 11;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--reps" && i + 1 < argc) {
      reps = std::atoi(argv[++i]);
    } else if (argument == "--only" && i + 1 < argc) {
      only = argv[++i];
    } else if (argument == "modes" || argument == "cold") {
      command = argument;
    } else {
      std::fprintf(stderr, "usage: sm90_forward_bench [modes|cold] [--reps N] [--only TEXT]\n");
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: nothing was measured\n");
    return 0;
  }
  std::printf("%s", flash_qla::build_info().c_str());
  flash_qla::testing::Bench bench(reps);
  command == "cold" ? bench.run_cold() : bench.run_modes(only);
  return 0;
}
