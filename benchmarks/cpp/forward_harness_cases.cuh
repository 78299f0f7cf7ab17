// The calls that forward_harness checks and times.
#pragma once

#include "forward_harness_problem.cuh"

namespace flash_qla::cuda::sm90::bench {

// The forms in which several SMs work on a head.
inline constexpr std::pair<const char*, Variant> kSharedForms[] = {{"split", Variant::kTwoCta}};

inline std::vector<Case> check_cases() {
  std::vector<Case> cases;
  auto add = [&](const char* name, int hq, int hv, std::vector<int> lengths) -> Case& {
    cases.push_back({});
    Case& c = cases.back();
    c.name = name, c.hq = hq, c.hv = hv, c.lengths = std::move(lengths);
    return c;
  };
  add("1x64 no h0", 1, 1, {64}).h0 = false;
  add("1x64", 1, 1, {64});
  add("1x128", 1, 1, {128});
  add("1x256", 1, 2, {256});
  add("1x1024 dense", 2, 4, {1024}).dense = true;
  add("2x192 dense", 2, 4, {192, 192}).dense = true;
  add("mixed", 2, 8, {37, 300, 64, 129, 1});
  add("mixed long", 2, 4, {1, 63, 64, 65, 127, 129, 300, 1000});
  {
    Case& c = add("zero lengths", 2, 4, {0, 70, 0, 0, 128, 0});
    c.offsets_64 = true, c.padding = 77;
  }
  add("all empty", 2, 4, {0, 0, 0});
  {
    Case& c = add("v first, pool bf16", 2, 4, {100, 64, 257, 1, 63, 200, 128, 90});
    c.v_first = true, c.pool = true, c.state_type = DType::kBFloat16;
  }
  {
    Case& c = add("pool fp32", 2, 4, {100, 64, 257, 1, 63, 200, 128, 90});
    c.pool = true;
  }
  add("g zero", 2, 4, {500}).gates = Gates::kZero;
  add("g strong", 2, 8, {500, 129}).gates = Gates::kStrong;
  add("g extreme", 2, 8, {500, 129}).gates = Gates::kExtreme;
  add("correlated", 2, 8, {500, 129}).correlated = true;
  {
    Case& c = add("NaN neighbours", 2, 4, {100, 64, 30, 100, 129, 64, 1, 65});
    c.poison_tail = true, c.padding = 40;
  }
  {
    Case& c = add("many tiles", 4, 16, {});
    for (int i = 0; i < 60; ++i) c.lengths.push_back((i * 37) % 400);
  }
  // More tiles than multiprocessors (132), of few sequences.
  add("two tiles to a block", 4, 32, {0, 300, 1, 64, 129, 700, 65, 2}).padding = 33;
  add("two tiles to a block, very unequal", 4, 32, {20, 130, 64, 0, 1500, 5, 300, 1, 70}).padding = 3;
  for (const bool unequal : {false, true}) {
    Case& c = add(unequal ? "eight tiles to a block, very unequal" : "eight tiles to a block", 4, 32, {});
    for (int i = 0; i < 31; ++i) c.lengths.push_back(unequal && i == 7 ? 2000 : (i * 53) % 300);
    c.padding = 5;
  }
  // Initial states that come ahead of their tiles beside tiles without any, of one chunk and of more, in turns.
  for (const bool v_first : {false, true}) {
    Case& c = add(v_first ? "some from zero, v first" : "some from zero", 4, 32, {});
    for (int i = 0; i < 27; ++i) c.lengths.push_back(i % 2 ? 1 + (i * 37) % 64 : (i * 53) % 300);
    c.some_from_zero = true, c.v_first = v_first;
  }
  add("fp16 mixed", 2, 8, {37, 300, 64, 129, 1}).half = true;
  // The same where a sequence's bits may depend on the batch: another kernel.
  for (size_t i = 0, whole = cases.size(); i < whole; ++i) {
    for (const bool half : {false, true}) {
      Case c = cases[i];
      if (half && c.half) continue;
      c.name = (half ? "any bits, fp16, " : "any bits, ") + c.name;
      c.half |= half, c.split = Mode::kAuto, c.variant = Variant::kOneCta;
      cases.push_back(c);
      // Kernels of their own as well.
      const std::string name = c.name;
      c.name = name + ", A", c.save_a = true;
      cases.push_back(c);
      c.name = name + ", A and h", c.save_a = false, c.save = true;
      cases.push_back(c);
    }
    // And with each number of SMs to a head.
    for (const auto& [form, variant] : kSharedForms) {
      Case c = cases[i];
      c.name = form + (", " + c.name);
      c.variant = variant;
      cases.push_back(c);
    }
  }
  for (const auto& [form, variant] : kSharedForms) {
    const std::string name = form;
    add((name + " mixed").c_str(), 2, 8, {37, 300, 64, 129, 1, 500}).variant = variant;
    {
      Case& c = add((name + " NaN, v first").c_str(), 2, 4, {100, 64, 30, 100, 129, 64, 1, 65});
      c.variant = variant, c.poison_tail = true, c.v_first = true, c.padding = 9;
    }
    {
      Case& c = add(("save, v first, " + name).c_str(), 2, 8, {37, 300, 64, 129, 1});
      c.save = true, c.v_first = true, c.variant = variant;
    }
    {
      Case& c = add(("fp16 save, " + name).c_str(), 2, 8, {37, 300, 64, 129, 1});
      c.save = true, c.half = true, c.variant = variant;
    }
  }
  {
    Case& c = add("save", 2, 8, {37, 300, 64, 129, 1});
    c.save = true;
  }
  for (Mode mode : {Mode::kAuto, Mode::kInvariant}) {
    const std::string name = mode == Mode::kAuto ? "cut, " : "cut by length, ";
    auto add_cut = [&](const char* what, int hq, int hv, std::vector<int> lengths) -> Case& {
      Case& c = add((name + what).c_str(), hq, hv, std::move(lengths));
      c.split = mode, c.force_split = true;
      return c;
    };
    add_cut("1x2048", 2, 8, {2048});
    add_cut("1x2048 g zero", 2, 8, {2048}).gates = Gates::kZero;
    add_cut("1x4096 dense", 2, 4, {4096}).dense = true;
    add_cut("2x1000 dense", 2, 4, {1000, 1000}).dense = true;
    add_cut("mixed gates", 2, 8, {9000, 300, 5000}).gates = Gates::kMixed;
    add_cut("decay", 2, 8, {9000, 300, 5000}).gates = Gates::kDecay;
    add_cut("strong", 2, 8, {3000, 129}).gates = Gates::kStrong;
    add_cut("extreme", 2, 8, {3000, 129}).gates = Gates::kExtreme;
    add_cut("fp16", 2, 8, {2037, 300, 64, 1290, 1}).half = true;
    add_cut("no h0", 2, 8, {2037, 300, 64, 1290, 1}).h0 = false;
    {
      Case& c = add_cut("zero lengths, padding", 2, 4, {0, 700, 0, 0, 1280, 0});
      c.offsets_64 = true, c.padding = 777;
    }
    add_cut("all empty", 2, 4, {0, 0, 0});
    {
      Case& c = add_cut("v first, pool bf16", 2, 4, {1000, 640, 257, 1, 63, 2000, 128, 900});
      c.v_first = true, c.pool = true, c.state_type = DType::kBFloat16;
    }
    {
      Case& c = add_cut("NaN neighbours", 2, 4, {1000, 640, 300, 1000, 1290, 64, 1, 650});
      c.poison_tail = true, c.padding = 40;
    }
    for (const auto& [form, variant] : kSharedForms) {
      Case& c = add_cut((std::string(form) + ", v first").c_str(), 2, 4, {1000, 640, 300, 1});
      c.v_first = true, c.variant = variant;
    }
    add_cut("save", 2, 8, {2037, 300, 64, 1290, 1}).save = true;
    add_cut("many", 4, 16, {}).lengths.assign(60, 333);
  }
  for (auto [name, lengths] : {std::pair<const char*, std::vector<int>>{"auto 1x8192", {8192}},
                               {"auto long and short", {64, 9000, 300, 1, 0, 5000}},
                               {"auto 20 equal", std::vector<int>(20, 500)}}) {
    Case& c = add(name, 2, 8, lengths);
    c.split = Mode::kAuto;
  }
  // Lengths are looked at first: uncut, with a poisoned tail behind them, and cut.
  for (auto [name, lengths] : {std::pair<const char*, std::vector<int>>{"asked 2x16384", {16384, 16384}},
                               {"asked 28672+4096", {28672, 4096}}}) {
    Case& c = add(name, 8, 24, lengths);
    c.split = Mode::kAuto, c.padding = 77;
  }
  {
    Case& c = add("scale 0", 2, 2, {200});
    c.scale = 0.0f;
  }
  return cases;
}

inline std::vector<Case> time_cases() {
  struct Row {
    int hq, hv, n, length;
    double bar;
  };
  const Row rows[] = {{16, 64, 4, 8192, 0.58},  {16, 64, 8, 4096, 0.60},  {16, 64, 4, 2048, 0.155},
                      {16, 64, 8, 1024, 0.158}, {16, 64, 1, 32768, 0.95}, {16, 64, 1, 8192, 0.26},
                      {16, 48, 8, 4096, 0.46},  {8, 32, 4, 8192, 0.295},  {8, 32, 8, 4096, 0.30},
                      {8, 32, 4, 2048, 0.084},  {8, 32, 8, 1024, 0.086},  {8, 24, 4, 2048, 0.083},
                      {16, 16, 4, 8192, 0.26},  {4, 16, 8, 1024, 0.047},  {2, 8, 8, 1024, 0.042}};
  std::vector<Case> cases;
  for (const Row& r : rows) {
    Case c;
    c.name =
        std::to_string(r.hq) + "/" + std::to_string(r.hv) + " " + std::to_string(r.n) + "x" + std::to_string(r.length);
    c.hq = r.hq, c.hv = r.hv, c.bar_ms = r.bar;
    c.lengths.assign(r.n, r.length);
    cases.push_back(c);
  }
  return cases;
}

}  // namespace flash_qla::cuda::sm90::bench
