// The kernels of the Hopper forward alone: every variant against a token recurrence in fp64 on the device, and times.
//   forward_harness check [filter] [runs]     every case once, poisoned outputs, then repeated runs compared bit by bit
//   forward_harness time [filter] [option]    median of graph replays, error checked first; option: a variant (1, 2),
//                                             and 4 for fp16, 8 saved, 16 dense, 32 auto_cp, 64 strong decay of three
//                                             quarters of the heads, 128 of all
#include "forward_harness_cases.cuh"

namespace {

using namespace flash_qla::cuda::sm90;
using namespace flash_qla::cuda::sm90::cp;
using namespace flash_qla::cuda::sm90::fwd;
using namespace flash_qla::cuda::sm90::bench;

uint64_t checksum(const void* device, int64_t bytes) {
  std::vector<uint64_t> host((bytes + 7) / 8, 0);
  CHECK_CUDA(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
  uint64_t sum = 1469598103934665603ull;
  for (uint64_t x : host) sum = (sum ^ x) * 1099511628211ull;
  return sum;
}

template <typename T>
bool run_check(const Case& c, int repeats) {
  Problem p = build<T>(c, 17);
  poison_outputs(p);
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const Errors e = measure<T>(c, p);
  int64_t tail = 0;
  if (c.padding > 0) {
    std::vector<uint16_t> rows(static_cast<size_t>(c.padding) * c.hv * 128);
    CHECK_CUDA(cudaMemcpy(rows.data(), static_cast<T*>(p.args.o) + (p.tokens - c.padding) * c.hv * 128, rows.size() * 2,
                          cudaMemcpyDeviceToHost));
    for (uint16_t x : rows) tail += x != 0;
  }
  const int64_t o_bytes = p.tokens * c.hv * 256,
                s_bytes = p.state_elements * (c.state_type == flash_qla::DType::kFloat32 ? 4 : 2);
  const auto bits = [&] {
    uint64_t sum = checksum(p.args.o, o_bytes) ^ checksum(p.args.final_state.data, s_bytes);
    if (p.args.a != nullptr) sum ^= checksum(p.args.a, p.tokens * c.hv * 128);
    if (p.args.g_cumsum != nullptr) sum ^= checksum(p.args.g_cumsum, p.tokens * c.hv * 4);
    return sum;
  };
  const uint64_t before = bits();
  int different = 0;
  for (int i = 0; i < repeats; ++i) {
    CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
    if (i % 10 == 9 || i == repeats - 1) different += bits() != before;
  }
  // The kernel that makes A behind the forward has the same bits; of other NaN.
  bool other_a = false;
  if (c.save_a && c.split == Mode::kAuto && !c.poison_tail) {
    const uint64_t a = checksum(p.args.a, p.tokens * c.hv * 128);
    Args other = p.args;
    other.split = Mode::kOff;
    poison_outputs(p);
    CHECK_CUDA(launch_chunk_forward(other, c.variant, nullptr));
    other_a = checksum(p.args.a, p.tokens * c.hv * 128) != a;
  }
  // The library's bounds; with correlated keys in bf16 what an emulation is off by (docs/numerics.md).
  constexpr double kBound = 5e-3, kCorrelated = 8e-3;
  const double bound = c.correlated && !c.half ? kCorrelated : kBound;
  const bool ok = e.bad_tiles == 0 && e.o < bound && e.state < bound && e.h < bound && e.cumsum < 1e-5 &&
                  e.a < kBound && tail == 0 && different == 0 && !other_a;
  std::printf("%s %-34s o %.2e (%.2e) state %.2e (%.2e)", ok ? "ok  " : "FAIL", c.name.c_str(), e.o, e.o_worst, e.state,
              e.state_worst);
  if (c.save || c.save_a) std::printf(" h %.2e cumsum %.1e A %.2e", e.h, e.cumsum, e.a);
  if (tail != 0) std::printf(" tail %lld", static_cast<long long>(tail));
  if (different != 0) std::printf(" DIFFERENT %d", different);
  if (other_a) std::printf(" A DIFFERS");
  std::printf("\n");
  std::fflush(stdout);
  release();
  return ok;
}

template <typename T>
void run_time(const Case& c) {
  Problem p = build<T>(c, 23);
  poison_outputs(p);
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const Errors e = measure<T>(c, p);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  for (int i = 0; i < 5; ++i) CHECK_CUDA(cudaGraphLaunch(exec, stream));
  std::vector<float> times;
  for (int i = 0; i < 21; ++i) {
    CHECK_CUDA(cudaEventRecord(start, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaEventRecord(stop, stream));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2];
  const int sms = c.variant == Variant::kTwoCta ? 2 : 1;
  const int tiles = static_cast<int>(c.lengths.size()) * c.hv * sms;
  const double steps = static_cast<double>((tiles + 131) / 132) * ((c.lengths[0] + 63) / 64);
  std::printf("%-26s %8.4f ms (min %.4f)  bar %.4f  %5.3f us/step  o %.2e (%.2e) state %.2e%s\n", c.name.c_str(), ms,
              times[0], c.bar_ms, ms * 1e3 / steps, e.o, e.o_worst, e.state, e.bad_tiles ? "  WRONG" : "");
  std::fflush(stdout);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  release();
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("%s", flash_qla::build_info().c_str());
  const std::string command = argc > 1 ? argv[1] : "check";
  const std::string filter = argc > 2 ? argv[2] : "";
  const int option = argc > 3 ? std::atoi(argv[3]) : -1;
  bool ok = true;
  if (command == "check") {
    for (const Case& c : check_cases()) {
      if (c.name.find(filter) == std::string::npos) continue;
      const int repeats = option >= 0 ? option : 50;
      ok &= c.half ? run_check<__half>(c, repeats) : run_check<__nv_bfloat16>(c, repeats);
    }
    std::printf(ok ? "all ok\n" : "FAILURES\n");
  } else {
    for (Case& c : time_cases()) {
      if (c.name.find(filter) == std::string::npos) continue;
      if (option >= 0)
        c.variant = static_cast<Variant>(option & 3), c.half = option & 4, c.save = option & 8, c.dense = option & 16,
        c.split = option & 32 ? Mode::kAuto : c.split,
        c.gates = option & 128  ? Gates::kAllStrong
                  : option & 64 ? Gates::kStrong
                                : c.gates;
      c.half ? run_time<__half>(c) : run_time<__nv_bfloat16>(c);
    }
  }
  return ok ? 0 : 1;
}
