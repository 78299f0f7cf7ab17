// The CUDA paths against each other and against the host, on a machine with a GPU:
//   cuda_reference (the fp64 oracle on the device) against reference (the one on the host), fp64 tensors, to 1e-12;
//   cuda_generic, cuda_decode, sm80 and sm90 against cuda_reference, at the bounds that the library promises;
// over drawn shapes and options, and over cases that are chosen for their size. Every output and the workspace start as
// NaN, every run is done twice and must give the same bits, inputs must stay as they are, and nothing may be written
// past the end of a tensor. Calls with malformed device data (four times --cases of them on Hopper) must return, and
// leave all other memory as it is. Without a GPU it says so and succeeds.
//
//   generic_test [--cases N] [--seed S] [--only-case C,..] [--only NAME] [--gigabytes G] [--small] [--once] [--kernels]
//
// prints a line for every failed check, one summary per group, and exits with 1 if any check failed. --once leaves out
// the second runs, --only the groups whose names (in run()) do not contain NAME; --gigabytes is the memory taken on the
// device, of which all groups but the large ones need a few. --kernels prints the names of the library's kernels, after
// each group those that have been launched for the first time, and the sizes that its calls had.
#include <sstream>

#include "checker.h"
#include "decode_tests.h"
#include "invariance_tests.cuh"
#include "launches.h"
#include "malformed_links_tests.cuh"
#include "malformed_tests.cuh"
#include "order_tests.cuh"
#include "sm80_backward_tests.cuh"
#include "sm80_tests.cuh"
#include "sm90_backward_tests.cuh"
#include "sm90_lengths_tests.cuh"
#include "sm90_links_tests.cuh"
#include "sm90_segment_tests.cuh"
#include "sm90_split_tests.cuh"
#include "sm90_stale_tests.cuh"
#include "verify_tests.h"

namespace flash_qla::testing {
namespace {

// The host's oracle takes O(T K V) steps of std::vector arithmetic, so these shapes are small.
constexpr int64_t kHostLongest = 130, kHostState = 66 * 66;

int64_t test_oracle(const Settings& settings, Arena& arena) {
  Checker forward("forward, cuda_reference against the host", settings, arena);
  const auto draw = [](Random& r) { return draw_forward(DType::kFloat64, kHostLongest, kHostState, r); };
  for_each_case(settings, settings.cases / 3, draw, [&](const std::string& what, const ForwardCall& call) {
    forward.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, {.exact_bound = 1e-12});
  });
  Checker backward("backward, cuda_reference against the host", settings, arena);
  const auto draw_back = [](Random& r) { return draw_backward(DType::kFloat64, kHostLongest, kHostState, r); };
  for_each_case(settings, settings.cases / 3, draw_back, [&](const std::string& what, const BackwardCall& call) {
    backward.check(what, call, "cuda_reference", "reference", FLASH_QLA_CPU, {.exact_bound = 1e-12});
  });
  return forward.finish() + backward.finish();
}

int64_t test_generic(const Settings& settings, Arena& arena) {
  Checker forward("forward, cuda_generic", settings, arena, "cuda_generic");
  const auto draw = [&](Random& r) {
    return draw_forward(draw_dtype(r), settings.longest(), settings.largest_state(), r);
  };
  for_each_case(settings, settings.cases, draw, [&](const std::string& what, const ForwardCall& call) {
    forward.check(what, call, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  });
  Checker backward("backward, cuda_generic", settings, arena, "cuda_generic");
  const auto draw_back = [&](Random& r) {
    return draw_backward(draw_dtype(r), settings.longest(), settings.largest_state(), r);
  };
  for_each_case(settings, settings.cases, draw_back, [&](const std::string& what, const BackwardCall& call) {
    backward.check(what, call, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  });
  return forward.finish() + backward.finish();
}

// NaN in one sequence: the others must not see it, and it must stand where the oracle has it.
int64_t test_nan(const Settings& settings, Arena& arena) {
  Checker checker("NaN stays in its sequence", settings, arena, "cuda_generic");
  Random random(7);
  Shape s;
  s.T = 200;
  s.Hv = 2;
  s.K = 48;
  s.V = 40;
  s.cu_seqlens = {0, 70, 130, 200};
  Features f;
  f.final_state = true;
  ForwardCall forward;
  forward.draw(s, f, PoolFeatures{}, false, random);
  forward.in.g.fill([&](int64_t, int64_t t, int64_t, int64_t) { return t == 90 ? NAN : -0.1 * random.uniform(); });
  checker.check("forward", forward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  for (const bool initial_state : {true, false}) {
    f.initial_state = initial_state;
    BackwardCall backward;
    backward.draw(s, f, false, true, false, random);
    backward.in.g.fill([&](int64_t, int64_t t, int64_t, int64_t) { return -0.1 * random.uniform() * (t % 3); });
    backward.d_o.fill([&](int64_t, int64_t t, int64_t, int64_t) { return t == 129 ? NAN : random.normal(); });
    checker.check(initial_state ? "backward" : "backward from zero", backward, "cuda_generic", "cuda_reference",
                  FLASH_QLA_CUDA);
  }
  return checker.finish();
}

bool on_hopper() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  return major == 9;
}

int64_t test_large(const Settings& settings, Arena& arena) {
  Checker checker("large", settings, arena, "cuda_generic");
  Random random(11);
  const auto both = [&](const char* what, const Shape& s, Features f) {
    f.initial_state = f.final_state = true;
    ForwardCall forward;
    forward.draw(s, f, PoolFeatures{}, false, random);
    checker.check(std::string(what) + ", forward", forward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
    BackwardCall backward;
    backward.draw(s, f, false, true, true, random);
    checker.check(std::string(what) + ", backward", backward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  };
  Shape many;
  many.T = 65536;
  many.Hv = 2;
  many.K = 16;
  many.V = 8;
  many.dtype = DType::kBFloat16;
  many.cu_seqlens.resize(65537);
  std::iota(many.cu_seqlens.begin(), many.cu_seqlens.end(), 0);
  both("65,536 sequences of one token", many, Features{});

  Shape models;
  models.T = 1000;
  models.Hq = 16;
  models.Hv = 32;
  models.K = models.V = 128;
  models.dtype = DType::kBFloat16;
  Features raw;
  raw.l2norm = raw.gate = raw.dt_bias = raw.sigmoid = true;
  both("16 and 32 heads of 128", models, raw);

  Shape olmo = models;
  olmo.T = 300;
  olmo.K = 96;
  olmo.V = 192;
  both("K 96, V 192", olmo, Features{});

  Shape longer;
  longer.T = 1 << 20;
  longer.K = longer.V = 8;
  ForwardCall forward;
  Features f;
  f.final_state = true;
  forward.draw(longer, f, PoolFeatures{}, false, random);
  checker.check("a million tokens, forward", forward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  longer.T = 1 << 17;
  BackwardCall backward;
  backward.draw(longer, f, false, true, true, random);
  checker.check("131,072 tokens, backward", backward, "cuda_generic", "cuda_reference", FLASH_QLA_CUDA);
  return checker.finish();
}

template <int64_t (*test)(const Settings&, Arena&, const RankPaths&)>
int64_t of_ranks(const Settings& settings, Arena& arena) {
  return test(settings, arena, kHopperRanks);
}

// Which kernels these are: the record of a tool's runs says so (tools/sanitizer_page.py).
#if defined(FLASH_QLA_RACECHECK)
constexpr const char* kBuild = "FLASH_QLA_RACECHECK";
#elif defined(FLASH_QLA_JITTER)
constexpr const char* kBuild = "FLASH_QLA_JITTER";
#else
constexpr const char* kBuild = "plain";
#endif

int run(const Settings& settings) {
  if (settings.kernels) {
    std::printf("build: %s\n", kBuild);
    for (const std::string& name : kernels_of_the_program()) std::printf("the program has %s\n", name.c_str());
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no GPU: nothing was tested\n");
    return 0;
  }
  std::printf("%s\n", build_info().c_str());
  std::fflush(stdout);  // a tool that ends this program must leave the commit in its log
  // initcheck pays for every megabyte.
  Arena arena(settings.small ? size_t{256} << 20 : static_cast<size_t>(settings.gigabytes) << 30);
  // A call that asks for its lengths is never small, and the oracle's backward takes 8 MB for each sequence and head.
  const auto with_room = [&](int64_t (*test)(const Settings&, Arena&)) {
    if (!settings.small) return test(settings, arena);
    Arena own(size_t{15} << 27);
    return test(settings, own);
  };
  // Cases that a small run leaves out keep their lengths where they are asked for by number.
  const auto as_asked = [&](int64_t (*test)(const Settings&, Arena&)) {
    return settings.only_cases.empty() ? test(settings, arena) : with_room(test);
  };
  struct Group {
    const char* name;
    bool needs_hopper;
    std::function<int64_t()> test;
  };
  std::vector<Group> groups = {
      {"oracle", false, [&] { return test_oracle(settings, arena); }},
      {"generic", false, [&] { return test_generic(settings, arena); }},
      {"decode", false, [&] { return test_decode(settings, arena, "cuda_reference", FLASH_QLA_CUDA); }},
      {"verify", false, [&] { return test_verify(settings, arena, "cuda_reference", FLASH_QLA_CUDA); }},
      {"nan", false, [&] { return test_nan(settings, arena); }},
      {"invariance", false, [&] { return test_invariance(settings, arena, "cuda_generic", 128, 72, {64, 100}); }},
      {"sm80 forward, drawn", false, [&] { return test_sm80_forward(settings, arena, kDeviceOracle); }},
      {"sm80 forward, cut", false, [&] { return test_sm80_split(settings, arena, kDeviceOracle); }},
      {"sm80 forward, planned to be cut", false,
       [&] { return test_sm80_planned_split(settings, arena, kDeviceOracle); }},
      {"sm80 forward, invariance", false, [&] { return test_sm80_invariance(settings, arena); }},
      {"sm80 forward, neighbours", false, [&] { return test_sm80_neighbours(settings, arena); }},
      {"sm80 forward, listed", false, [&] { return test_sm80_listed(settings, arena); }},
      {"sm80 forward, malformed", false, [&] { return test_sm80_malformed(settings, arena); }},
      {"sm80 backward, drawn", false, [&] { return test_sm80_backward(settings, arena, kDeviceOracle); }},
      {"sm80 backward, heads", false, [&] { return test_sm80_backward_heads(settings, arena, kDeviceOracle); }},
      {"sm80 backward, betas", false, [&] { return test_sm80_backward_betas(settings, arena); }},
      {"sm80 backward, invariance", false, [&] { return test_sm80_backward_invariance(settings, arena); }},
      {"sm80 backward, neighbours", false, [&] { return test_sm80_backward_neighbours(settings, arena); }},
      {"sm80 backward, malformed", false, [&] { return test_sm80_backward_malformed(settings, arena); }},
      {"sm90 forward, drawn", true, [&] { return test_sm90_forward(settings, arena); }},
      {"sm90 forward, single tokens", true, [&] { return test_sm90_single_tokens(settings, arena); }},
      {"sm90 forward, few tokens", true, [&] { return test_sm90_few_tokens(settings, arena); }},
      {"sm90 forward, strong decay", true, [&] { return test_sm90_strong_decay(settings, arena); }},
      {"sm90 forward, keys", true, [&] { return test_sm90_keys(settings, arena); }},
      {"sm90 forward, repeats", true, [&] { return test_sm90_repeat(settings, arena); }},
      {"sm90 forward, shared tiles", true, [&] { return test_sm90_repeat_shared(settings, arena); }},
      {"sm90 forward, soak", true, [&] { return test_sm90_soak(settings, arena); }},
      {"sm90 forward, checkpoints", true, [&] { return test_sm90_checkpoints(settings, arena); }},
      {"sm90 forward, listed", true, [&] { return test_sm90_listed(settings, arena); }},
      {"sm90 forward, norms", true, [&] { return test_sm90_norms(settings, arena); }},
      {"sm90 forward, batch", true, [&] { return test_sm90_batch(settings, arena); }},
      {"sm90 forward, modes", true, [&] { return test_sm90_modes(settings, arena); }},
      {"sm90 forward, nan", true, [&] { return test_sm90_nan(settings, arena); }},
      {"sm90 forward, stale memory", true, [&] { return as_asked(test_sm90_forward_stale); }},
      {"sm90 forward, invariance", true, [&] { return test_invariance(settings, arena, "sm90", 128, 128, {64, 128}); }},
      {"orders", true, [&] { return test_orders(settings, arena); }},
      {"sm90 split, drawn", true, [&] { return test_sm90_split(settings, arena); }},
      {"sm90 split, repeats", true, [&] { return test_sm90_split_repeat(settings, arena); }},
      {"sm90 split, soak", true, [&] { return test_sm90_split_soak(settings, arena); }},
      {"sm90 lengths first", true, [&] { return with_room(test_sm90_lengths_first); }},
      {"sm90 backward, drawn", true, [&] { return test_sm90_backward(settings, arena, false); }},
      {"sm90 backward, drawn, few tokens", true, [&] { return test_sm90_backward(settings, arena, true); }},
      {"sm90 backward, segments", true, [&] { return test_sm90_segments(settings, arena); }},
      {"sm90 backward, stale memory", true, [&] { return as_asked(test_sm90_backward_stale); }},
      {"sm90 backward, long sequence", true, [&] { return test_sm90_long_sequence(settings, arena); }},
      {"sm90 backward, one sequence", true, [&] { return test_sm90_one_sequence(settings, arena); }},
      {"sm90 backward, many sequences", true, [&] { return with_room(test_sm90_many_sequences); }},
      {"sm90 links, alone", true, [&] { return as_asked(of_ranks<test_links>); }},
      {"sm90 links, forward", true, [&] { return as_asked(of_ranks<test_ranked_forward>); }},
      {"sm90 links, backward", true, [&] { return as_asked(of_ranks<test_ranked_backward>); }},
      {"sm90 links, carry", true, [&] { return test_sm90_carry_is_read(settings, arena); }},
      {"sm90 links, stale memory", true, [&] { return as_asked(test_sm90_links_stale); }}};
  if (!settings.small) {
    groups.push_back({"sm90 split, error", true, [&] { return test_sm90_split_error(settings, arena); }});
    groups.push_back({"sm90 backward, head halves", true, [&] { return test_sm90_head_halves(settings, arena); }});
    groups.push_back({"sm90 forward, large", true, [&] { return test_sm90_large(settings, arena); }});
    groups.push_back({"large", false, [&] { return test_large(settings, arena); }});
  }
  // Last: a call that leads out of bounds ends the program.
  groups.push_back({"malformed, other sizes", false, [&] { return test_malformed_generic(settings, arena); }});
  groups.push_back({"malformed, links", true, [&] { return test_malformed_links(settings, arena); }});
  groups.push_back({"malformed, sm90", true, [&] { return test_malformed(settings, arena); }});
  std::set<std::string> told;
  const bool hopper = on_hopper();
  int64_t failures = 0, done = 0;
  for (const Group& group : groups) {
    if (std::string(group.name).find(settings.only) == std::string::npos) continue;
    ++done;
    if (group.needs_hopper && !hopper) {
      std::printf("%s: no Hopper GPU, not tested\n", group.name);
    } else {
      failures += group.test();
    }
    if (!settings.kernels) continue;
    for (const std::string& name : launched_kernels()) {
      if (told.insert(name).second) std::printf("launched %s\n", name.c_str());
    }
    Tails::print();
    std::fflush(stdout);
  }
  if (done == 0) {
    std::fprintf(stderr, "--only names no group\n");
    return 2;
  }
  std::printf("%lld failed\n", static_cast<long long>(failures));
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace flash_qla::testing

int main(int argc, char** argv) {
  flash_qla::testing::Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&] { return i + 1 < argc ? std::atoll(argv[++i]) : 0; };
    if (flag == "--cases") {
      settings.cases = value();
    } else if (flag == "--seed") {
      settings.seed = static_cast<uint64_t>(value());
    } else if (flag == "--only-case") {
      std::stringstream list(i + 1 < argc ? argv[++i] : "");
      for (std::string number; std::getline(list, number, ',');) settings.only_cases.insert(std::atoll(number.c_str()));
    } else if (flag == "--only" && i + 1 < argc) {
      settings.only = argv[++i];
    } else if (flag == "--gigabytes") {
      settings.gigabytes = value();
    } else if (flag == "--small") {
      settings.small = true;
    } else if (flag == "--once") {
      settings.twice = false;
    } else if (flag == "--kernels") {
      settings.kernels = true;
    } else {
      std::fprintf(stderr,
                   "usage: generic_test [--cases N] [--seed S] [--only-case C,..] [--only NAME] [--small] [--once] "
                   "[--kernels]\n");
      return 2;
    }
  }
  return flash_qla::testing::run(settings);
}
