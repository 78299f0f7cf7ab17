// The kernels of the Hopper backward alone: every intermediate and every gradient against an fp64 token recurrence,
// bitwise repeats, neighbours poisoned with NaN, and the time of each kernel.
//   backward_harness check [part of a case's name]
//   backward_harness time [part of a row's name [chunks of a segment [both | exact]]]
#include "backward_harness_call.cuh"

namespace {

using namespace flash_qla::cuda::sm90::bwd::bench;

std::vector<Case> check_cases() {
  std::vector<Case> cases;
  auto add = [&](std::string name, int Hq, int Hv, std::vector<int> lengths) -> Case& {
    Case c;
    c.name = std::move(name);
    c.Hq = Hq;
    c.Hv = Hv;
    c.lengths = std::move(lengths);
    cases.push_back(std::move(c));
    return cases.back();
  };
  add("1x64", 1, 1, {64}).varlen = false;
  add("1x256 A solved", 1, 1, {256}).A = false;
  add("1x1000, small beta", 1, 2, {1000}).small_beta = true;
  {
    Case& c = add("1x600 fp16, padding", 2, 4, {600});
    c.fp16 = true;
    c.small_beta = true;
    c.padding = 70;
  }
  add("varlen GVA", 2, 4, {37, 300, 0, 64, 129, 1}).padding = 20;
  {
    Case& c = add("dense 2x200 GVA cumsum", 2, 6, {200, 200});
    c.varlen = false;
    c.cumsum = true;
  }
  {
    Case& c = add("40 heads, two groups", 20, 40, {130, 65, 192});
    c.v_first = true;
    c.int64_offsets = true;
  }
  {
    Case& c = add("strong decay", 2, 4, {300, 129, 64});
    c.strong = true;
    c.A = false;
  }
  {
    Case& c = add("small beta", 2, 4, {100, 200, 64});
    c.small_beta = true;
  }
  {
    Case& c = add("fp16 bf16 gates", 2, 4, {100, 200, 65});
    c.fp16 = true;
    c.half_gates = true;
    c.small_beta = true;
  }
  {
    Case& c = add("no states, no A", 2, 2, {100, 200, 65});
    c.h0 = c.dht = c.A = false;
  }
  {
    Case& c = add("segments", 2, 4, {1600, 37, 0, 2049, 512});
    c.segment_chunks = 9;
    c.padding = 7;
  }
  {
    Case& c = add("segments dense cumsum", 2, 8, {1500, 1500});
    c.segment_chunks = 8;
    c.varlen = false;
    c.cumsum = true;
    c.v_first = true;
  }
  {
    Case& c = add("segments strong, no states", 1, 4, {1300, 700, 1});
    c.segment_chunks = 3;
    c.strong = true;
    c.h0 = c.dht = c.A = false;
  }
  {
    Case& c = add("segments fp16", 2, 4, {1400, 200, 900});
    c.segment_chunks = 4;
    c.fp16 = true;
    c.half_gates = true;
    c.small_beta = true;
  }
  add("no dO", 2, 2, {100, 200, 65}).d_o = false;
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  std::printf("%s", flash_qla::build_info().c_str());
  const std::string mode = argc > 1 ? argv[1] : "check";
  const std::string wanted = argc > 2 ? argv[2] : "";
  bool good = true;
  if (mode == "check") {
    for (Case c : check_cases()) {
      if (c.name.find(wanted) == std::string::npos) continue;
      // All forms have the same bits, but for what is cut into pieces and for dg with states in fp32.
      const bool same_bits = c.segment_chunks == 0;
      Outputs first;
      const std::string name = c.name;
      const auto check = [&](const char* form) {
        c.name = form + name;
        Runner runner(c);
        good &= runner.check();
        if (!same_bits || c.exact) return;
        const Outputs& outputs = runner.checked();
        if (first.dq.empty()) first = outputs;
        if (!(outputs == first)) std::printf("%s: not the bits of the first form\n", c.name.c_str());
        good &= outputs == first;
      };
      check("");
      c.whole_values = true;
      check("both halves of V, ");
      c.whole_values = false;
      c.exact = true;
      check("states in fp32 ");
    }
    std::printf("%s\n", good ? "all checks passed" : "CHECKS FAILED");
  } else {
    struct Row {
      int Hq, Hv, sequences, length;
    };
    const std::vector<Row> table = {{16, 32, 1, 8192},  {16, 32, 4, 2048}, {16, 32, 8, 1024}, {8, 16, 1, 8192},
                                    {8, 16, 8, 1024},   {4, 8, 1, 8192},   {2, 4, 1, 8192},   {2, 4, 8, 1024},
                                    {16, 32, 1, 32768}, {8, 16, 1, 32768}, {4, 8, 1, 32768},  {2, 4, 1, 32768},
                                    {1, 2, 1, 640},     {4, 8, 1, 1024},   {8, 16, 1, 1000},  {16, 32, 1, 512}};
    for (const Row& row : table) {
      Case c;
      c.name = std::to_string(row.Hq) + "/" + std::to_string(row.Hv) + " " + std::to_string(row.sequences) + "x" +
               std::to_string(row.length);
      if (c.name.find(wanted) == std::string::npos) continue;
      c.Hq = row.Hq;
      c.Hv = row.Hv;
      c.segment_chunks = argc > 3 ? std::atoi(argv[3]) : -1;
      c.whole_values = argc > 4 && std::string(argv[4]) == "both";
      c.exact = argc > 4 && std::string(argv[4]) == "exact";
      c.cumsum = true;  // what the forward hands over
      c.lengths.assign(row.sequences, row.length);
      Runner(c).time();
    }
  }
  return good ? 0 : 1;
}
