// Times of the generic CUDA paths, of decode and of the verification of draft tokens, one line a case: median time,
// bytes that must move at least where that is what limits, and the bound that the project holds itself to on an H200.
//
//   cuda_generic_bench [--reps N] [--only prefill|decode|steps|verify]
//
// steps and verify have the rows of `python -m flash_qla bench` at which a call takes microseconds, and run only when
// they are named.
#include "device_bench.h"

namespace flash_qla::testing {
namespace {

__global__ void count_kernel(int32_t* data, int64_t n) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) data[i] = static_cast<int32_t>(n - 1 - i);
}

class Bench : DeviceBench {
 public:
  using DeviceBench::DeviceBench;

  void run(const std::string& only) {
    if (only.empty() || only == "prefill") prefills();
    if (only.empty() || only == "decode") decodes();
    if (only == "steps") steps();
    if (only == "verify") verifications();
  }

 private:
  void prefills() {
    prefill(128, 128, 8192, 10.0, 40.0);
    prefill(96, 192, 8192, 15.0, 60.0);
    prefill(128, 128, 2048, 0.0, 0.0);
    prefill(64, 64, 8192, 0.0, 0.0);
    prefill(256, 256, 8192, 0.0, 0.0);
  }

  void decodes() {
    const double copy = 4.27e9;  // bytes a millisecond: reading and writing on an H200
    for (const bool v_first : {true, false}) {
      for (const int64_t batch : {1, 16, 64, 256}) {
        decode(batch, 1, DType::kFloat32, v_first,
               batch == 1     ? 0.008
               : batch == 256 ? 1.25 * states_bytes(batch, 4) / copy
                              : 0.0);
        decode(batch, 1, DType::kBFloat16, v_first,
               batch == 1     ? 0.008
               : batch == 256 ? 1.35 * states_bytes(batch, 2) / copy
                              : 0.0);
      }
    }
    decode(64, 4, DType::kFloat32, true, 0.0);
  }

  void steps() {
    for (const DType state : {DType::kBFloat16, DType::kFloat32}) {
      for (const int64_t batch : {1, 4, 8, 16, 24, 32, 40, 48, 64, 128, 256}) decode(batch, 1, state, true, 0.0);
    }
  }

  void verifications() {
    for (const DType state : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t heads : {8, 32}) {
        for (const int64_t batch : {1, 2, 4, 8, 16, 64}) {
          for (const int64_t T : {4, 6, 8}) {
            if (T != 6 || batch == 1) verify(heads, batch, T, state, false);
          }
        }
        for (const int64_t batch : {1, 16}) verify(heads, batch, 8, state, true);
      }
    }
  }

  static double states_bytes(int64_t batch, int64_t size) {
    return 2.0 * static_cast<double>(batch * 32 * 128 * 128 * size);
  }

  static void print(const std::string& what, double ms, double bound, double bytes) {
    std::printf("%-52s %9.5f ms", what.c_str(), ms);
    if (bytes > 0.0) std::printf("  %7.1f GB/s", bytes / ms * 1e-6);
    if (bound > 0.0) std::printf("  bound %.4f ms: %s", bound, ms <= bound ? "met" : "MISSED");
    std::printf("\n");
    std::fflush(stdout);
  }

  void prefill(int64_t K, int64_t V, int64_t T, double forward_bound, double backward_bound) {
    constexpr int64_t kHq = 16, kHv = 32;
    constexpr DType kType = DType::kBFloat16;
    arena_.reset();
    const float unit = 1.7f / std::sqrt(static_cast<float>(K));  // keys of about unit norm
    const Tensor q = draw(kType, {1, T, kHq, K}, -unit, unit), k = draw(kType, {1, T, kHq, K}, -unit, unit);
    const Tensor v = draw(kType, {1, T, kHv, V}, -1.f, 1.f), o = draw(kType, {1, T, kHv, V}, -1.f, 1.f);
    const Tensor g = draw(DType::kFloat32, {1, T, kHv}, -0.2f, 0.f);
    const Tensor beta = draw(DType::kFloat32, {1, T, kHv}, 0.f, 1.f);
    ForwardArguments forward;
    forward.options.path = "cuda_generic";
    forward.q = q;
    forward.k = k;
    forward.v = v;
    forward.g = g;
    forward.beta = beta;
    forward.o = o;
    forward.final_state = draw(DType::kFloat32, {1, kHv, K, V}, 0.f, 1.f);
    char what[96];
    std::snprintf(what, sizeof(what), "forward   T %lld  Hq 16 Hv 32  K %lld V %lld  bf16", static_cast<long long>(T),
                  static_cast<long long>(K), static_cast<long long>(V));
    print(what, time_op<ChunkForward>(forward, 1), forward_bound, 0.0);

    BackwardArguments backward;
    backward.options.path = "cuda_generic";
    backward.q = q;
    backward.k = k;
    backward.v = v;
    backward.g = g;
    backward.beta = beta;
    backward.d_o = draw(kType, {1, T, kHv, V}, -1.f, 1.f);
    backward.dq = draw(kType, {1, T, kHq, K}, 0.f, 1.f);
    backward.dk = draw(kType, {1, T, kHq, K}, 0.f, 1.f);
    backward.dv = draw(kType, {1, T, kHv, V}, 0.f, 1.f);
    backward.dg = draw(DType::kFloat32, {1, T, kHv}, 0.f, 1.f);
    backward.dbeta = draw(DType::kFloat32, {1, T, kHv}, 0.f, 1.f);
    std::snprintf(what, sizeof(what), "backward  T %lld  Hq 16 Hv 32  K %lld V %lld  bf16", static_cast<long long>(T),
                  static_cast<long long>(K), static_cast<long long>(V));
    print(what, time_op<ChunkBackward>(backward, 1), backward_bound, 0.0);
  }

  // T tokens of each of `batch` sequences, raw gates, and a row of the pool for each.
  template <class Arguments>
  void draw_tokens(Arguments& args, const char* path, int64_t batch, int64_t T, int64_t key_heads, int64_t heads,
                   DType state) {
    constexpr int64_t kDim = 128;
    constexpr DType kType = DType::kBFloat16;
    args.q = draw(kType, {batch, T, key_heads, kDim}, -1.f, 1.f);
    args.k = draw(kType, {batch, T, key_heads, kDim}, -1.f, 1.f);
    args.v = draw(kType, {batch, T, heads, kDim}, -1.f, 1.f);
    args.g = draw(kType, {batch, T, heads}, -1.f, 1.f);
    args.beta = draw(kType, {batch, T, heads}, -1.f, 1.f);
    args.A_log = draw(DType::kFloat32, {heads}, -2.f, 1.f);
    args.dt_bias = draw(DType::kFloat32, {heads}, -1.f, 1.f);
    args.o = draw(kType, {batch, T, heads, kDim}, -1.f, 1.f);
    args.state_pool = draw(state, {batch, heads, kDim, kDim}, -0.1f, 0.1f);
    args.initial_state_indices = tensor(arena_.take(static_cast<size_t>(batch) * 4), DType::kInt32, {batch});
    count_kernel<<<1, 256, 0, stream_>>>(static_cast<int32_t*>(args.initial_state_indices.data), batch);
    args.options.use_qk_l2norm_in_kernel = 1;
    args.options.use_gate_in_kernel = 1;
    args.options.use_beta_sigmoid_in_kernel = 1;
    args.options.path = path;
  }

  void decode(int64_t batch, int64_t T, DType state, bool v_first, double bound) {
    arena_.reset();
    ForwardArguments args;
    draw_tokens(args, "cuda_decode", batch, T, 16, 32, state);
    args.options.state_v_first = v_first;
    char what[96];
    std::snprintf(what, sizeof(what), "decode    batch %lld  T %lld  %s states [%s]", static_cast<long long>(batch),
                  static_cast<long long>(T), state == DType::kFloat32 ? "fp32" : "bf16", v_first ? "V, K" : "K, V");
    print(what, time_op<Recurrent>(args, 20), bound, states_bytes(batch, size_of(state)));
  }

  // T draft tokens of each of `batch` sequences: chains, or trees of eight.
  void verify(int64_t heads, int64_t batch, int64_t T, DType state, bool tree) {
    constexpr int64_t kDim = 128;
    arena_.reset();
    VerifyArguments args;
    draw_tokens(args, "cuda_verify", batch, T, heads / 2, heads, state);
    args.states_out = tensor(nullptr, state, {batch, T, heads, kDim, kDim});
    const int64_t elements = batch * T * heads * kDim * kDim;
    args.states_out.data = arena_.take(static_cast<size_t>(elements * size_of(state)));
    if (tree) {
      const std::vector<int32_t> parents = {-1, 0, 0, 1, 1, 2, 2, 3};
      args.parents = tensor(arena_.take(static_cast<size_t>(batch * T) * 4), DType::kInt32, {batch, T});
      for (int64_t n = 0; n < batch; ++n) {
        check_cuda(cudaMemcpyAsync(static_cast<int32_t*>(args.parents.data) + n * T, parents.data(),
                                   static_cast<size_t>(T) * 4, cudaMemcpyHostToDevice, stream_),
                   "cudaMemcpyAsync");
      }
    }
    args.options.state_v_first = 1;
    const double ms = time_op<Verify>(args, 20);
    std::printf("verify    heads %2lld  batch %2lld  T %lld  %s states%s %9.2f us\n", static_cast<long long>(heads),
                static_cast<long long>(batch), static_cast<long long>(T), state == DType::kFloat32 ? "fp32" : "bf16",
                tree ? "  tree " : "  chain", ms * 1e3);
    std::fflush(stdout);
  }
};

}  // namespace
}  // namespace flash_qla::testing

int main(int argc, char** argv) {
  int reps = 11;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::string(argv[i]) == "--reps") reps = std::atoi(argv[i + 1]);
    if (std::string(argv[i]) == "--only") only = argv[i + 1];
  }
  if (!only.empty() && only != "prefill" && only != "decode" && only != "steps" && only != "verify") {
    std::fprintf(stderr, "--only names no group: %s\n", only.c_str());
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: nothing was measured\n");
    return 0;
  }
  std::printf("%s\n", flash_qla::build_info().c_str());
  flash_qla::testing::Bench(reps).run(only);
  return 0;
}
