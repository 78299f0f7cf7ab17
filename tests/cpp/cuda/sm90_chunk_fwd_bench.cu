// Development harness of the fused Hopper forward: checks against a token recurrence in fp64 on the device, and times.
//   sm90_chunk_fwd_bench check [filter]    every case once, poisoned outputs, then repeated runs compared bit by bit
//   sm90_chunk_fwd_bench split [filter]    the rows of docs/notebook/sequence_split.md: without and with a split, in
//   turns sm90_chunk_fwd_bench repeat [filter]   the same rows: 1,000 runs with a split compared bit by bit
//   sm90_chunk_fwd_bench soak [count]      one graph replayed with other lengths and gates, each checked
//   sm90_chunk_fwd_bench time [filter] [option]   the rows of docs/notebook/sm90_forward.md: median of graph replays,
//   error checked first; option: a variant, and 4 for fp16, 8 saved, 16 dense, 32 auto_cp, 64 strong decay
//   of three quarters of the heads, 128 of all
#include "sm90_chunk_fwd_cases.cuh"

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

// Median milliseconds of graph replays, the graphs taking turns.
std::vector<double> time_graphs(const std::vector<Args>& calls, Variant variant, int rounds) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  std::vector<cudaGraphExec_t> graphs;
  for (const Args& args : calls) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK_CUDA(launch_chunk_forward(args, variant, stream));
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    graphs.push_back(exec);
  }
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<std::vector<float>> times(calls.size());
  for (int i = -3; i < rounds; ++i) {
    for (size_t j = 0; j < graphs.size(); ++j) {
      CHECK_CUDA(cudaEventRecord(start, stream));
      CHECK_CUDA(cudaGraphLaunch(graphs[j], stream));
      CHECK_CUDA(cudaEventRecord(stop, stream));
      CHECK_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 0) times[j].push_back(ms);
    }
  }
  std::vector<double> medians;
  for (std::vector<float>& t : times) {
    std::sort(t.begin(), t.end());
    medians.push_back(t[t.size() / 2]);
  }
  for (cudaGraphExec_t exec : graphs) CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaEventDestroy(start));
  CHECK_CUDA(cudaEventDestroy(stop));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return medians;
}

// One row without and with a split: times, and errors per head.
bool run_split(Case c) {
  using T = __nv_bfloat16;
  c.split = Mode::kAuto;
  Problem p = build<T>(c, 23);
  const bool planned = decide(p.args, sm_count()).planned;
  Args unsplit = p.args;
  unsplit.split = Mode::kOff;
  Errors errors[2];
  for (int i = 0; i < 2; ++i) {
    poison_outputs(p);
    CHECK_CUDA(launch_chunk_forward(i == 0 ? unsplit : p.args, c.variant, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    errors[i] = measure<T>(c, p);
  }
  // Of the results with a split: builds that cut alike have the same.
  unsigned* sum_of_bits = scratch<unsigned>(1);
  CHECK_CUDA(cudaMemset(sum_of_bits, 0, 4));
  add_up<<<264, 256>>>(static_cast<const uint32_t*>(p.args.o), p.tokens * c.hv * 64, sum_of_bits);
  add_up<<<264, 256>>>(static_cast<const uint32_t*>(p.args.final_state.data), p.state_elements, sum_of_bits);
  unsigned bits = 0;
  CHECK_CUDA(cudaMemcpy(&bits, sum_of_bits, 4, cudaMemcpyDeviceToHost));
  PlanCounters plan{};
  if (planned) CHECK_CUDA(cudaMemcpy(&plan, p.args.workspace, sizeof(plan), cudaMemcpyDeviceToHost));
  double worse = 0;
  for (int i = 0; i < c.hv; ++i) {
    worse = std::max(
        {worse, errors[1].o_heads[i] / errors[0].o_heads[i], errors[1].state_heads[i] / errors[0].state_heads[i]});
  }
  const std::vector<double> ms = time_graphs({unsplit, p.args}, c.variant, 15);
  const bool ok = errors[0].bad_tiles + errors[1].bad_tiles == 0 && worse <= 1.1;
  std::printf("%s %-22s off %7.4f on %7.4f ms  bar %.3f%s | o %.2e -> %.2e state %.2e -> %.2e, worst head x%.3f | ",
              ok ? "ok  " : "FAIL", c.name.c_str(), ms[0], ms[1], c.bar_ms,
              c.bar_ms > 0 && ms[1] > c.bar_ms ? " MISSED" : "", errors[0].o, errors[1].o, errors[0].state,
              errors[1].state, worse);
  std::printf("bits %08x spacing %d merge %d/%d tiles %d+%d+%d+%d+%d, chains %u%s%s\n", bits, plan.spacing,
              plan.decaying_join, plan.exact_join, plan.states.items, plan.outputs.items, plan.outputs.dependent_items,
              plan.halves.items, plan.halves.dependent_items, plan.progress.pieces / kScanSlices,
              plan.even == 1 ? " (even)" : "", planned ? "" : " (not planned)");
  std::fflush(stdout);
  release();
  return ok;
}

// `count` runs of one row, all outputs compared bit by bit with the first.
bool run_repeat(Case c, int count) {
  using T = __nv_bfloat16;
  c.split = Mode::kAuto;
  Problem p = build<T>(c, 29);
  poison_outputs(p);
  const int64_t o_bytes = p.tokens * c.hv * 256, s_bytes = p.state_elements * 4;
  char* o = scratch<char>(o_bytes);
  char* s = scratch<char>(s_bytes);
  unsigned* differences = scratch<unsigned>(1);
  CHECK_CUDA(cudaMemset(differences, 0, 4));
  for (int i = 0; i < count; ++i) {
    CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
    if (i == 0) {
      CHECK_CUDA(cudaMemcpyAsync(o, p.args.o, o_bytes, cudaMemcpyDeviceToDevice));
      CHECK_CUDA(cudaMemcpyAsync(s, p.args.final_state.data, s_bytes, cudaMemcpyDeviceToDevice));
    }
    count_differences<<<264, 256>>>(static_cast<const uint32_t*>(p.args.o), reinterpret_cast<const uint32_t*>(o),
                                    o_bytes / 4, differences);
    count_differences<<<264, 256>>>(static_cast<const uint32_t*>(p.args.final_state.data),
                                    reinterpret_cast<const uint32_t*>(s), s_bytes / 4, differences);
    if (i % 100 == 0) poison_outputs(p);
  }
  unsigned found = 0;
  CHECK_CUDA(cudaMemcpy(&found, differences, 4, cudaMemcpyDeviceToHost));
  std::printf("%s %-22s %d runs, %u words differ\n", found == 0 ? "ok  " : "FAIL", c.name.c_str(), count, found);
  std::fflush(stdout);
  release();
  return found == 0;
}

// One graph of a call of up to 6 sequences and 12,288 tokens; lengths and gates change in place between replays.
bool run_soak(int count) {
  using T = __nv_bfloat16;
  Case c;
  c.name = "soak", c.hq = 2, c.hv = 4, c.split = Mode::kAuto;
  c.lengths = {12288, 0, 0, 0, 0, 0};
  Problem p = build<T>(c, 31);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  uint64_t state = 88172645463325252ull;
  auto below = [&](int n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<int>(state % static_cast<uint64_t>(n));
  };
  bool ok = true;
  double worst = 0;
  int checked = 0;
  for (int i = 0; i < count && ok; ++i) {
    int left = 12288;
    std::vector<int> offsets(1, 0);
    std::vector<int64_t> wide(1, 0);
    for (size_t s = 0; s < c.lengths.size(); ++s) {
      c.lengths[s] = below(3) == 0 ? below(100) : below(left + 1);
      c.lengths[s] = std::min(c.lengths[s], left);
      left -= c.lengths[s];
      offsets.push_back(12288 - left);
      wide.push_back(12288 - left);
    }
    CHECK_CUDA(cudaMemcpyAsync(const_cast<void*>(p.args.cu_seqlens), offsets.data(), offsets.size() * 4,
                               cudaMemcpyHostToDevice, stream));
    CHECK_CUDA(cudaMemcpyAsync(const_cast<int64_t*>(p.oracle.offsets), wide.data(), wide.size() * 8,
                               cudaMemcpyHostToDevice, stream));
    if (i % 10 == 0) {
      const int modes[] = {0, 1, 2, 4, 5};
      fill_gates<<<12288 * c.hv / 256, 256, 0, stream>>>(const_cast<float*>(p.args.g), const_cast<float*>(p.args.beta),
                                                         12288, c.hv, modes[below(5)], false, 100 + i);
    }
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    if (i % 50 == 0) {
      CHECK_CUDA(cudaStreamSynchronize(stream));
      const Errors e = measure<T>(c, p);
      worst = std::max({worst, e.o_worst, e.state_worst});
      ok = e.bad_tiles == 0;
      ++checked;
    }
  }
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::printf("%s soak: %d replays of one graph, %d checked, worst tile %.2e\n", ok ? "ok  " : "FAIL", count, checked,
              worst);
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  release();
  return ok;
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
  } else if (command == "split" || command == "repeat") {
    for (Case& c : split_cases()) {
      if (c.name.find(filter) == std::string::npos) continue;
      if (command == "split" && option >= 0) c.variant = static_cast<Variant>(option);
      ok &= command == "split" ? run_split(c) : run_repeat(c, option >= 0 ? option : 1000);
    }
  } else if (command == "soak") {
    ok = run_soak(filter.empty() ? 10000 : std::atoi(filter.c_str()));
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
