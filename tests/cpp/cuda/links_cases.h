// Cases of streams over ranks and of their links: for the Hopper kernels on a GPU, and for what of them the CPU
// emulates.
#pragma once

#include "checker.h"
#include "links_call.h"
#include "ranked_calls.h"

namespace flash_qla::testing {

// Who computes the ranks' calls and links, and what they are held to.
struct RankPaths {
  const char* path;
  const char* link_path;
  Oracle oracle;
  bool plans;  // forwards that go on from a carry are planned: on a GPU, by Hopper's kernels
};
inline constexpr RankPaths kHopperRanks = {"sm90", nullptr, kDeviceOracle, true};
inline constexpr RankPaths kEmulatedRanks = {"sm80", "sm90", kDeviceOracle, false};

enum class LinkGates { kMixed, kKeep, kForget, kRaw };
// Of a mixed call a head that keeps everything, one that forgets within a chunk, one that decays slowly, one that
// forgets, and again.
inline bool forgets(LinkGates gates, int64_t head) {
  return gates == LinkGates::kForget || (gates == LinkGates::kMixed && head % 2 == 1);
}
inline void set_link_gates(Buffer& g, LinkGates gates, Random& random) {
  if (gates == LinkGates::kRaw) return;
  g.fill([&](int64_t, int64_t, int64_t head, int64_t) {
    if (forgets(gates, head)) return -0.3 - 0.15 * random.uniform();
    return gates == LinkGates::kMixed && head % 4 == 2 ? -0.002 * random.uniform() : 0.0;
  });
}

struct RankedCase {
  const char* name;
  int64_t Hq, Hv;
  std::vector<int64_t> lengths, cuts;  // of sequences; places in the stream where parts meet
  LinkGates gates = LinkGates::kMixed;
  bool forced = false;  // the forward is cut wherever it can be
  bool zigzag = false;
  bool carried = true;  // there are heads that the forward goes on from
  bool planned = true;  // every rank's forward is planned for a split
  bool v_first = false;
  bool carries = true;
  bool in_place = false;
  flash_qla_cp_mode mode = FLASH_QLA_CP_AUTO;

  // A tool takes too long for the others.
  bool is_small() const { return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) <= 1000; }

  Shape shape(DType dtype) const {
    Shape s;
    s.dtype = dtype;
    s.Hq = Hq;
    s.Hv = Hv;
    s.K = s.V = 128;
    s.pack(lengths, 7);
    return s;
  }
  Features features() const {
    Features f;
    f.initial_state = f.final_state = true;
    f.v_first = v_first;
    f.force_intra_cp = forced;
    f.cp_mode = mode;
    f.gate = f.dt_bias = f.sigmoid = f.l2norm = gates == LinkGates::kRaw;
    return f;
  }
  // own: pieces as a tool wants them, each exact and with nothing in it.
  RankedOptions options(int64_t T, const RankPaths& paths, bool own) const {
    RankedOptions o;
    o.zigzag = zigzag;
    o.bounds = {0};
    o.bounds.insert(o.bounds.end(), cuts.begin(), cuts.end());
    o.bounds.push_back(T);
    o.ranks = static_cast<int64_t>(o.bounds.size() - 1) / o.parts();
    // Emulated links take gates as they are.
    const bool emulates_links = paths.link_path != nullptr && gates != LinkGates::kRaw;
    o.link_path = emulates_links ? paths.link_path : nullptr;
    o.carries = carries && (paths.link_path == nullptr || emulates_links);
    o.plans = planned && paths.plans;
    o.in_place = in_place;
    o.pieces = std::make_shared<Pieces>(own ? Arena::Pieces::kExact : Arena::Pieces::kGuarded, !own);
    o.carried_heads = std::make_shared<int64_t>(0);
    return o;
  }
};

// Every kind of cut in few tokens, and long ones. A forward of 256 tokens can be cut; one of 4,096 tokens of four heads
// is, unforced, on 78 to 132 multiprocessors.
inline const std::vector<RankedCase>& ranked_cases() {
  static const std::vector<RankedCase> cases = {
      {.name = "two ranks", .Hq = 1, .Hv = 2, .lengths = {600}, .cuts = {321}, .forced = true},
      {.name = "three ranks, packed",
       .Hq = 1,
       .Hv = 2,
       .lengths = {100, 0, 430, 1, 0, 380},
       .cuts = {290, 610},
       .forced = true,
       .v_first = true},
      {.name = "one sequence through three ranks",
       .Hq = 1,
       .Hv = 2,
       .lengths = {850},
       .cuts = {270, 560},
       .gates = LinkGates::kKeep,
       .forced = true},
      {.name = "zigzag",
       .Hq = 1,
       .Hv = 2,
       .lengths = {90, 500, 60},
       .cuts = {150, 330, 500},
       .forced = true,
       .zigzag = true},
      {.name = "heads that forget",
       .Hq = 1,
       .Hv = 2,
       .lengths = {40, 820},
       .cuts = {270, 556},
       .gates = LinkGates::kForget,
       .forced = true,
       .carried = false},
      {.name = "cuts between sequences",
       .Hq = 1,
       .Hv = 2,
       .lengths = {256, 320, 0, 256},
       .cuts = {256, 576},
       .forced = true,
       .carried = false},
      {.name = "few tokens",
       .Hq = 1,
       .Hv = 2,
       .lengths = {70, 20},
       .cuts = {33, 70},
       .carried = false,
       .planned = false},
      {.name = "raw gates",
       .Hq = 1,
       .Hv = 2,
       .lengths = {600},
       .cuts = {321},
       .gates = LinkGates::kRaw,
       .forced = true,
       .carried = false},
      {.name = "final states in place",
       .Hq = 1,
       .Hv = 2,
       .lengths = {100, 700, 0, 90},
       .cuts = {280, 570},
       .gates = LinkGates::kKeep,
       .forced = true,
       .in_place = true},
      {.name = "without a carry",
       .Hq = 1,
       .Hv = 2,
       .lengths = {600},
       .cuts = {321},
       .forced = true,
       .carried = false,
       .carries = false},
      {.name = "without a split",
       .Hq = 1,
       .Hv = 2,
       .lengths = {600},
       .cuts = {200, 421},
       .carried = false,
       .planned = false,
       .carries = false,
       .mode = FLASH_QLA_CP_OFF},
      {.name = "long, two ranks", .Hq = 2, .Hv = 4, .lengths = {16384}, .cuts = {8192}},
      {.name = "long, all keep, three ranks",
       .Hq = 2,
       .Hv = 4,
       .lengths = {13000},
       .cuts = {4400, 8801},
       .gates = LinkGates::kKeep},
      {.name = "long, all keep, in place",
       .Hq = 2,
       .Hv = 4,
       .lengths = {300, 12000},
       .cuts = {6155},
       .gates = LinkGates::kKeep,
       .v_first = true,
       .in_place = true},
      {.name = "long, packed, three ranks", .Hq = 4, .Hv = 8, .lengths = {100, 14000, 0, 60}, .cuts = {5003, 9640}},
      {.name = "long, by length", .Hq = 2, .Hv = 4, .lengths = {17000}, .cuts = {8501}, .mode = FLASH_QLA_CP_INVARIANT},
      {.name = "long, zigzag", .Hq = 2, .Hv = 4, .lengths = {16000}, .cuts = {4000, 8010, 12000}, .zigzag = true}};
  return cases;
}

inline std::string describe_ranked(size_t i, const RankedCase& c, DType dtype) {
  return "case " + std::to_string(i) + ", " + c.name + ", " + name_of(dtype);
}

// Whether a run of all cases has this one in this dtype: the long ones by turns, as drawing them takes most of the
// time.
inline bool has_dtype(const Settings& settings, size_t i, DType dtype) {
  return ranked_cases()[i].is_small() || !settings.only_cases.empty() || (i % 2 == 0) == (dtype == DType::kFloat16);
}

// Cases of a run: `run(what, case, dtype, random)` for each of them in both dtypes.
template <class Run>
void for_each_ranked_case(const Settings& settings, Run&& run) {
  for (size_t i = 0; i < ranked_cases().size(); ++i) {
    const RankedCase& c = ranked_cases()[i];
    if (!settings.only_cases.empty() && settings.only_cases.count(static_cast<int64_t>(i)) == 0) continue;
    if (settings.small && settings.only_cases.empty() && !c.is_small()) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      if (!has_dtype(settings, i, dtype)) continue;
      Random random(settings.seed * 1000003 + i);
      const std::string what = describe_ranked(i, c, dtype);
      // A small run is one under a tool: should it not end, its log says where it was.
      if (settings.small) {
        std::printf("%s\n", what.c_str());
        std::fflush(stdout);
      }
      run(what, c, dtype, random);
    }
  }
}

inline void expect_intact(const std::string& what, const Pieces& pieces, Checker& checker) {
  if (!pieces.intact()) checker.fail(what, "ranks", "memory beside a tensor between calls was written");
}

inline RankedForward draw_ranked_forward(const RankedCase& c, DType dtype, const RankPaths& paths,
                                         const Settings& settings, Random& random) {
  RankedForward call;
  call.draw(c.shape(dtype), c.features(), PoolFeatures{}, false, random);
  set_link_gates(call.in.g, c.gates, random);
  call.ranked = c.options(call.in.shape.T, paths, settings.small);
  return call;
}
inline RankedBackward draw_ranked_backward(const RankedCase& c, DType dtype, const RankPaths& paths,
                                           const Settings& settings, Random& random) {
  RankedBackward call;
  call.draw(c.shape(dtype), c.features(), false, true, true, random);
  set_link_gates(call.in.g, c.gates, random);
  call.ranked = c.options(call.in.shape.T, paths, settings.small);
  call.ranked.in_place = false;
  call.ranked.plans = false;               // a forward of A alone may be computed in another way
  call.dA_log = call.ddt_bias = Buffer();  // sums over ranks, which are the caller's
  return call;
}

// Forwards over ranks against one call over the stream by the oracle: on the device, and of few tokens on the host.
inline int64_t test_ranked_forward(const Settings& settings, Arena& arena, const RankPaths& paths) {
  Checker checker(std::string("forward over ranks, ") + paths.path, settings, arena, paths.path);
  for_each_ranked_case(settings, [&](const std::string& what, const RankedCase& c, DType dtype, Random& random) {
    const RankedForward call = draw_ranked_forward(c, dtype, paths, settings, random);
    checker.check(what, call, paths.path, paths.oracle.path, paths.oracle.device);
    if (c.carried && *call.ranked.carried_heads == 0) checker.fail(what, paths.path, "no head has a carry");
    if (!settings.small && c.is_small()) {
      checker.check(what + ", on the host", call, paths.path, kHostOracle.path, kHostOracle.device);
    }
    expect_intact(what, *call.ranked.pieces, checker);
  });
  return checker.finish();
}

// Likewise backwards, with and without the forward's A.
inline int64_t test_ranked_backward(const Settings& settings, Arena& arena, const RankPaths& paths) {
  Checker checker(std::string("backward over ranks, ") + paths.path, settings, arena, paths.path);
  for_each_ranked_case(settings, [&](const std::string& what, const RankedCase& c, DType dtype, Random& random) {
    RankedBackward call = draw_ranked_backward(c, dtype, paths, settings, random);
    // In a small run, and of long cases, by turns: both forms of the kernels, half of the time.
    for (const bool gives_A : {false, true}) {
      const bool turn = (dtype == DType::kFloat16) != (c.gates == LinkGates::kKeep);
      if ((settings.small || !c.is_small()) && gives_A != turn) continue;
      call.ranked.gives_A = gives_A;
      checker.check(what + (gives_A ? ", given A" : ""), call, paths.path, paths.oracle.path, paths.oracle.device,
                    {.emulation = c.gates != LinkGates::kRaw});
      expect_intact(what, *call.ranked.pieces, checker);
    }
    if (!settings.small && c.is_small()) {
      checker.check(what + ", on the host", call, paths.path, kHostOracle.path, kHostOracle.device,
                    {.emulation = c.gates != LinkGates::kRaw});
    }
  });
  return checker.finish();
}

// --- links by themselves ---

// Sequences around one of so many tokens, and the parts that are asked for.
struct LinkCase {
  const char* name;
  int64_t tokens;
  std::vector<int64_t> rows;  // first and last of each part
  bool through = true;
  bool carries = true, gives_A = false;
  flash_qla_cp_mode mode = FLASH_QLA_CP_AUTO;
  bool v_first = false;
};

inline const std::vector<LinkCase>& link_cases() {
  static const std::vector<LinkCase> cases = {
      {.name = "a token", .tokens = 1, .rows = {1, 1}},
      {.name = "a chunk and a token", .tokens = 65, .rows = {1, 1}, .carries = false},
      {.name = "a part between others", .tokens = 400, .rows = {1, 1}},
      {.name = "... that begins here",
       .tokens = 400,
       .rows = {1, 1},
       .through = false,
       .gives_A = true,
       .v_first = true},
      {.name = "parts without tokens", .tokens = 300, .rows = {1, 1, -1, -1, 2, 2, 7, 9}, .gives_A = true},
      {.name = "parts of several sequences", .tokens = 320, .rows = {0, 1, 2, 2}, .through = false, .carries = false},
      {.name = "by length", .tokens = 300, .rows = {1, 1}, .mode = FLASH_QLA_CP_INVARIANT},
      {.name = "nothing is forgotten",
       .tokens = 300,
       .rows = {1, 1},
       .carries = false,
       .gives_A = true,
       .mode = FLASH_QLA_CP_OFF},
      {.name = "long", .tokens = 5003, .rows = {1, 1}, .gives_A = true},
      {.name = "long, begins here", .tokens = 9999, .rows = {1, 1}, .through = false},
      {.name = "long, by length", .tokens = 9999, .rows = {1, 1}, .mode = FLASH_QLA_CP_INVARIANT}};
  return cases;
}

inline LinksCall draw_links_call(const LinkCase& c, DType dtype, const RankPaths& paths, const Settings& settings,
                                 Random& random) {
  Shape s;
  s.dtype = dtype;
  s.Hq = 1;
  s.Hv = 2;
  s.K = s.V = 128;
  s.cu_seqlens = {0, 37, 37 + c.tokens, 57 + c.tokens, 57 + c.tokens};  // parts begin off every grid
  s.T = s.cu_seqlens.back() + 5;
  Features f;
  f.initial_state = true;
  f.v_first = c.v_first;
  f.cp_mode = c.mode;
  LinksCall call;
  call.draw_links(s, f, c.rows, random);
  set_link_gates(call.in.g, LinkGates::kMixed, random);
  call.through.fill([&](int64_t, int64_t, int64_t, int64_t) { return c.through ? 1.0 : 0.0; });
  call.carries = c.carries;
  call.gives_A = c.gives_A && paths.link_path == nullptr;
  call.pieces =
      std::make_shared<Pieces>(settings.small ? Arena::Pieces::kExact : Arena::Pieces::kGuarded, !settings.small);
  return call;
}

// What a link is to be: of a part without tokens, of one in which the sequence begins or whose head forgets, and
// others.
inline double expected_kind(const LinkCase& c, const Shape& s, int64_t part, int64_t head) {
  const int64_t row = c.rows[static_cast<size_t>(2 * part)];
  if (row < 0 || row >= s.N()) return FLASH_QLA_LINK_NONE;
  if (!c.through) return FLASH_QLA_LINK_CONSTANT;
  const int64_t tokens = s.cu_seqlens[static_cast<size_t>(row) + 1] - s.cu_seqlens[static_cast<size_t>(row)];
  const bool is_forgotten = c.mode != FLASH_QLA_CP_OFF && forgets(LinkGates::kMixed, head) && tokens >= kChunkSize;
  return is_forgotten ? FLASH_QLA_LINK_CONSTANT : FLASH_QLA_LINK_AFFINE;
}

// Links against those of the oracle, and their kinds.
inline int64_t test_links(const Settings& settings, Arena& arena, const RankPaths& paths) {
  const char* const path = paths.link_path != nullptr ? paths.link_path : paths.path;
  Checker checker(std::string("links, ") + path, settings, arena, path);
  for (size_t i = 0; i < link_cases().size(); ++i) {
    const LinkCase& c = link_cases()[i];
    if (!settings.only_cases.empty() && settings.only_cases.count(static_cast<int64_t>(i)) == 0) continue;
    if (settings.small && settings.only_cases.empty() && c.tokens > 1000) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      Random random(settings.seed * 1000003 + i);
      LinksCall call = draw_links_call(c, dtype, paths, settings, random);
      const std::string what = "case " + std::to_string(i) + ", " + c.name + ", " + name_of(dtype);
      if (settings.small) {
        std::printf("%s\n", what.c_str());
        std::fflush(stdout);
      }
      checker.check(what, call, path, paths.oracle.path, paths.oracle.device);
      if (!settings.small && c.tokens <= 400) {
        checker.check(what + ", on the host", call, path, kHostOracle.path, kHostOracle.device);
      }
      expect_intact(what, *call.pieces, checker);
      if (!checker.run(what, call, path)) continue;
      for (const auto& [name, buffer] :
           {std::pair<const char*, Buffer*>{"kind", &call.kind}, {"kind of the backward", &call.back_kind}}) {
        const Tensor found = buffer->host();
        for (int64_t part = 0; part < found.shape[0]; ++part) {
          for (int64_t head = 0; head < found.shape[1]; ++head) {
            const double kind = load(found, offset_of(found, part, head)),
                         expected = expected_kind(c, call.in.shape, part, head);
            if (kind != expected) {
              checker.fail(what, path,
                           std::string(name) + " of part " + std::to_string(part) + ", head " + std::to_string(head) +
                               " is " + std::to_string(kind) + ", not " + std::to_string(expected));
            }
          }
        }
      }
    }
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
