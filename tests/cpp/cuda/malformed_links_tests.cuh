// Malformed calls of the operations for streams that are cut over ranks: offsets and bounds in any order, rows and
// places that are not there, kinds that no link has (malformed_calls.cuh).
#pragma once

#include "links_call.h"
#include "malformed_tests.cuh"

namespace flash_qla::testing {

inline DType draw_index_type(Random& random) { return random.chance(0.5) ? DType::kInt32 : DType::kInt64; }
inline void draw_flags(Buffer& flags, int64_t count, Random& random) {
  flags = Buffer(DType::kBool, {count});
  flags.fill([&](int64_t, int64_t, int64_t, int64_t) { return random.chance(0.8) ? 1.0 : 0.0; });
}
// Indices around [0, end]; now and then those that `right` says.
template <class Right>
void draw_any_indices(Buffer& indices, int64_t end, Random& random, Right&& right) {
  const DType type = dtype(indices.shape_view());
  const bool are_right = random.chance(0.3);
  indices.fill([&](int64_t i, int64_t j, int64_t, int64_t) {
    return static_cast<double>(are_right ? right(i, j) : any_index(type, end, random));
  });
}
// Kinds of links: NONE, CONSTANT and AFFINE, or any number.
inline void draw_any_kinds(Buffer& kinds, Random& random) {
  static const std::vector<double> kAny = {NAN, -1.0, 0.5, 3.0, 1e30, INFINITY, -INFINITY, 1.0, 2.0};
  const bool are_right = random.chance(0.3);
  kinds.fill([&](int64_t, int64_t, int64_t, int64_t) {
    return are_right ? static_cast<double>(random.integer(0, 2)) : random.pick(kAny);
  });
}

// Links of rows that are there or not.
inline LinksCall draw_malformed_links(const MalformedSize& size, Arena::Pieces pieces, Random& random) {
  const Shape s = draw_malformed_shape(size, random);
  Features f = draw_malformed_features(s, random);
  const int64_t P = random.integer(1, 4);
  LinksCall call;
  call.draw_links(s, f, std::vector<int64_t>(static_cast<size_t>(2 * P), 0), random);
  draw_any_indices(call.rows, s.N() - 1, random, [&](int64_t p, int64_t) { return p % s.N(); });
  for (Buffer* flags : {&call.leaves, &call.enters, &call.through}) draw_flags(*flags, P, random);
  if (random.chance(0.5)) {
    call.forward_kind = Buffer(DType::kFloat32, {P, s.Hv});
    draw_any_kinds(call.forward_kind, random);
  }
  call.carries = f.cp_mode != FLASH_QLA_CP_OFF && random.chance(0.5);
  call.gives_A = random.chance(0.4);
  call.pieces = std::make_shared<Pieces>(pieces, pieces == Arena::Pieces::kGuarded);
  break_offsets(call.in.cu_seqlens, s.T, random);
  return call;
}

// A rank's links and its forward, which goes on from them: of the same rows, or of others.
struct PartsForward : ForwardCall {
  struct Arguments : ForwardArguments {
    Tensor rows{}, leaves{}, through{}, links_offsets{};
  };
  Buffer rows, leaves, through, entering_rows, entering_state;
  Buffer links_offsets;  // absent: the links have the forward's offsets
  std::shared_ptr<Pieces> pieces;

  NamedBuffers inputs() {
    NamedBuffers all = ForwardCall::inputs();
    for (auto [name, buffer] : NamedBuffers{{"rows", &rows},
                                            {"leaves", &leaves},
                                            {"through", &through},
                                            {"entering_rows", &entering_rows},
                                            {"entering_state", &entering_state},
                                            {"links_offsets", &links_offsets}}) {
      all.push_back({name, buffer});
    }
    return all;
  }
  template <class View>
  Arguments arguments(View view) {
    Arguments args;
    static_cast<ForwardArguments&>(args) = ForwardCall::arguments(view);
    args.rows = view(rows);
    args.leaves = view(leaves);
    args.through = view(through);
    args.entering_rows = view(entering_rows);
    args.entering_state = view(entering_state);
    args.links_offsets = view(links_offsets);
    return args;
  }
  Status workspace_size(const Arguments&, size_t* bytes) const {
    *bytes = Pieces::kPatternBytes;
    return Status();
  }
  Status run(const Arguments& given, void* workspace, size_t, void* stream = nullptr) const {
    const auto own = static_cast<cudaStream_t>(stream);
    const Shape& s = in.shape;
    const int64_t P = given.rows.shape[0];
    pieces->begin(workspace, own);
    ForwardArguments args = given;
    ChunkSummaryArguments links;
    links.options = args.options;
    links.k = args.k;
    links.v = args.v;
    links.g = args.g;
    links.beta = args.beta;
    links.A_log = args.A_log;
    links.dt_bias = args.dt_bias;
    links.cu_seqlens = links_offsets.present() ? given.links_offsets : args.cu_seqlens;
    links.initial_state = args.initial_state;
    links.rows = given.rows;
    links.leaves = given.leaves;
    links.through = given.through;
    links.S = pieces->tensor("S", DType::kFloat32, {P, s.Hv, s.K, s.V}, own);
    links.M = pieces->tensor("M", DType::kFloat32, {P, s.Hv, s.K, s.K}, own);
    links.kind = pieces->tensor("kind", DType::kFloat32, {P, s.Hv}, own);
    int64_t floats = 0;
    FLASH_QLA_RETURN_IF_ERROR(ChunkSummary::carry_size(links, &floats));
    if (floats > 0) args.carry = links.carry = pieces->tensor("carry", DType::kFloat32, {P, floats}, own);
    FLASH_QLA_RETURN_IF_ERROR(run_with_pieces<ChunkSummary>(links, "links", *pieces, own));
    return run_with_pieces<ChunkForward>(args, "forward", *pieces, own);
  }
};

// States of parts for rows that are there or not.
inline void draw_parts_states(const Shape& s, int64_t P, Buffer* rows, Buffer* states, Random& random) {
  *rows = Buffer(draw_index_type(random), {P});
  draw_any_indices(*rows, s.N() - 1, random, [&](int64_t p, int64_t) { return p % s.N(); });
  *states = Buffer(DType::kFloat32, {P, s.Hv, s.K, s.V});
}

inline PartsForward draw_malformed_parts_forward(const MalformedSize& size, Arena::Pieces pieces, Random& random) {
  const Shape s = draw_malformed_shape(size, random);
  PoolFeatures kept = draw_pool_features(false, !s.cu_seqlens.empty(), random);
  kept.pool = false;
  PartsForward call;
  call.draw(s, draw_malformed_features(s, random), kept, false, random);
  const int64_t P = random.integer(1, 3);
  draw_parts_states(s, P, &call.entering_rows, &call.entering_state, random);
  call.rows = Buffer(draw_index_type(random), {P, 2});
  draw_any_indices(call.rows, s.N() - 1, random, [&](int64_t p, int64_t) { return p % s.N(); });
  draw_flags(call.leaves, P, random);
  draw_flags(call.through, P, random);
  if (call.in.cu_seqlens.present() && random.chance(0.4)) {
    call.links_offsets = call.in.cu_seqlens;
    break_offsets(call.links_offsets, s.T, random);
  }
  if (random.chance(0.7)) break_offsets(call.in.cu_seqlens, s.T, random);
  call.pieces = std::make_shared<Pieces>(pieces, pieces == Arena::Pieces::kGuarded);
  return call;
}

struct PartsBackward : BackwardCall {
  Buffer entering_rows, entering_state, leaving_rows, leaving_dht;
  NamedBuffers inputs() {
    NamedBuffers all = BackwardCall::inputs();
    for (auto [name, buffer] : NamedBuffers{{"entering_rows", &entering_rows},
                                            {"entering_state", &entering_state},
                                            {"leaving_rows", &leaving_rows},
                                            {"leaving_dht", &leaving_dht}}) {
      all.push_back({name, buffer});
    }
    return all;
  }
  template <class View>
  BackwardArguments arguments(View view) {
    BackwardArguments args = BackwardCall::arguments(view);
    args.entering_rows = view(entering_rows);
    args.entering_state = view(entering_state);
    args.leaving_rows = view(leaving_rows);
    args.leaving_dht = view(leaving_dht);
    return args;
  }
};

inline PartsBackward draw_malformed_parts_backward(const MalformedSize& size, Random& random) {
  const Shape s = draw_malformed_shape(size, random);
  Features f = draw_malformed_features(s, random);
  PartsBackward call;
  call.draw(s, f, false, random.chance(0.85), random.chance(0.6), random);
  draw_parts_states(s, random.integer(1, 3), &call.entering_rows, &call.entering_state, random);
  draw_parts_states(s, random.integer(1, 3), &call.leaving_rows, &call.leaving_dht, random);
  break_offsets(call.in.cu_seqlens, s.T, random);
  return call;
}

struct CombineCall {
  using Arguments = SummaryCombineArguments;
  Buffer S, M, kind, order, place, wanted, state, composed_S, composed_M, composed_kind;
  bool backward = false;

  NamedBuffers inputs() {
    return {{"S", &S}, {"M", &M}, {"kind", &kind}, {"order", &order}, {"place", &place}, {"wanted", &wanted}};
  }
  NamedBuffers outputs() {
    return {
        {"state", &state}, {"composed_S", &composed_S}, {"composed_M", &composed_M}, {"composed_kind", &composed_kind}};
  }
  NamedBuffers in_place() { return {}; }
  // Of five dimensions, C = 1: a Buffer has four. Strides of C do not count.
  static Tensor with_stream(Tensor t) {
    if (t.ndim == 0) return t;
    for (int i = t.ndim; i > 1; --i) {
      t.shape[i] = t.shape[i - 1];
      t.stride[i] = t.stride[i - 1];
    }
    t.shape[1] = 1;
    t.stride[1] = t.stride[0];
    ++t.ndim;
    return t;
  }
  template <class View>
  SummaryCombineArguments arguments(View view) {
    SummaryCombineArguments args;
    args.S = with_stream(view(S));
    args.M = with_stream(view(M));
    args.kind = with_stream(view(kind));
    args.order = view(order);
    args.place = view(place);
    args.wanted = view(wanted);
    args.backward = backward;
    args.state = with_stream(view(state));
    args.composed_S = view(composed_S);
    args.composed_M = view(composed_M);
    args.composed_kind = view(composed_kind);
    return args;
  }
  Status workspace_size(const SummaryCombineArguments& args, size_t* bytes) const {
    return SummaryCombine::workspace_size(args, bytes);
  }
  Status run(const SummaryCombineArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    return SummaryCombine::run(args, workspace, bytes, stream);
  }
  Status explain(const SummaryCombineArguments& args, char* text, size_t size) const {
    return flash_qla_summary_combine_explain(&args, text, size);
  }
};

inline CombineCall draw_malformed_combine(Random& random) {
  static const std::vector<int64_t> kDims = {128, 128, 128, 64, 33, 100, 256};
  const int64_t L = random.integer(1, 6), Hv = random.integer(1, 4), P = random.integer(1, 3);
  const int64_t K = random.pick(kDims), V = random.pick(kDims);
  CombineCall call;
  call.S = Buffer(DType::kFloat32, {L, Hv, K, V});
  call.M = Buffer(DType::kFloat32, {L, Hv, K, K});
  call.kind = Buffer(DType::kFloat32, {L, Hv});
  draw_any_kinds(call.kind, random);
  if (random.chance(0.6)) {
    call.order = Buffer(draw_index_type(random), {L});
    draw_any_indices(call.order, L - 1, random, [&](int64_t i, int64_t) { return L - 1 - i; });
  }
  call.place = Buffer(draw_index_type(random), {P});
  draw_any_indices(call.place, L, random, [&](int64_t i, int64_t) { return i % L; });
  if (random.chance(0.7)) draw_flags(call.wanted, P, random);
  call.backward = random.chance(0.5);
  call.state = Buffer(DType::kFloat32, {P, Hv, K, V});
  if (random.chance(0.4)) {
    call.composed_S = Buffer(DType::kFloat32, {1, Hv, K, V});
    call.composed_M = Buffer(DType::kFloat32, {1, Hv, K, K});
    call.composed_kind = Buffer(DType::kFloat32, {1, Hv});
  }
  return call;
}

struct CutCall {
  using Arguments = SequenceCutArguments;
  Buffer cu_seqlens, bounds, local_cu_seqlens, sequences, starts, ends, row_counts, rows, enters, leaves, through,
      entering_rows, leaving_rows, halo_tokens;
  int64_t last_part = -1;
  bool all_rows = false;

  NamedBuffers inputs() { return {{"cu_seqlens", &cu_seqlens}, {"bounds", &bounds}}; }
  NamedBuffers outputs() {
    return {{"local_cu_seqlens", &local_cu_seqlens},
            {"sequences", &sequences},
            {"starts_here", &starts},
            {"ends_here", &ends},
            {"row_counts", &row_counts},
            {"rows", &rows},
            {"enters", &enters},
            {"leaves", &leaves},
            {"through", &through},
            {"entering_rows", &entering_rows},
            {"leaving_rows", &leaving_rows},
            {"halo_tokens", &halo_tokens}};
  }
  NamedBuffers in_place() { return {}; }
  template <class View>
  SequenceCutArguments arguments(View view) {
    SequenceCutArguments args;
    args.cu_seqlens = view(cu_seqlens);
    args.bounds = view(bounds);
    args.last_part = last_part;
    args.all_rows = all_rows;
    args.local_cu_seqlens = view(local_cu_seqlens);
    args.sequences = view(sequences);
    args.starts_here = view(starts);
    args.ends_here = view(ends);
    args.row_counts = view(row_counts);
    args.rows = view(rows);
    args.enters = view(enters);
    args.leaves = view(leaves);
    args.through = view(through);
    args.entering_rows = view(entering_rows);
    args.leaving_rows = view(leaving_rows);
    args.halo_tokens = view(halo_tokens);
    return args;
  }
  Status workspace_size(const SequenceCutArguments& args, size_t* bytes) const {
    return SequenceCut::workspace_size(args, bytes);
  }
  Status run(const SequenceCutArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    return SequenceCut::run(args, workspace, bytes, stream);
  }
  Status explain(const SequenceCutArguments& args, char* text, size_t size) const {
    return flash_qla_sequence_cut_explain(&args, text, size);
  }
};

inline CutCall draw_malformed_cut(Random& random) {
  const int64_t tokens = random.integer(0, 5000), N = random.integer(1, random.chance(0.2) ? 400 : 8);
  const int64_t P = random.integer(1, 3);
  CutCall call;
  call.cu_seqlens = Buffer(draw_index_type(random), {N + 1});
  call.cu_seqlens.fill([&](int64_t n, int64_t, int64_t, int64_t) { return static_cast<double>(n * tokens / N); });
  break_offsets(call.cu_seqlens, tokens, random);
  call.bounds = Buffer(draw_index_type(random), {P, 2});
  draw_any_indices(call.bounds, tokens, random, [&](int64_t p, int64_t i) { return (p + i) * tokens / P; });
  call.last_part = random.integer(-1, P - 1);
  call.all_rows = random.chance(0.4);
  // N + P rows are always enough; fewer may be, which depends on the offsets.
  const int64_t R = call.all_rows ? P * N : random.chance(0.8) ? N + P : random.integer(1, N + P);
  call.local_cu_seqlens = Buffer(draw_index_type(random), {R + 1});
  const auto index = [&](std::vector<int64_t> shape) {
    return random.chance(0.9) ? Buffer(draw_index_type(random), std::move(shape)) : Buffer();
  };
  const auto flags = [&](int64_t count) { return random.chance(0.9) ? Buffer(DType::kBool, {count}) : Buffer(); };
  call.sequences = index({R});
  call.starts = flags(R);
  call.ends = flags(R);
  call.row_counts = index({P});
  call.rows = index({P, 2});
  call.enters = flags(P);
  call.leaves = flags(P);
  call.through = flags(P);
  call.entering_rows = index({P});
  call.leaving_rows = index({P});
  call.halo_tokens = index({P});
  return call;
}

inline void draw_malformed_numbers(PartsForward& call, Random& random) {
  draw_malformed_numbers(static_cast<ForwardCall&>(call), random);
  fill_malformed(call.entering_state, -0.8f, 0.8f, random);
}
inline void draw_malformed_numbers(PartsBackward& call, Random& random) {
  draw_malformed_numbers(static_cast<BackwardCall&>(call), random);
  fill_malformed(call.entering_state, -0.8f, 0.8f, random);
  fill_malformed(call.leaving_dht, -1.7f, 1.7f, random);
}
inline void draw_malformed_numbers(CombineCall& call, Random& random) {
  fill_malformed(call.S, -0.8f, 0.8f, random);
  fill_malformed(call.M, -0.2f, 0.2f, random);
}
inline void draw_malformed_numbers(CutCall&, Random&) {}

// Well-formed links behind each malformed call.
inline std::unique_ptr<Probe> links_probe(const Settings& settings, Checker& checker, int seconds) {
  Random random(107);
  Shape s;
  s.dtype = DType::kBFloat16;
  s.Hv = 2;
  s.K = s.V = 128;
  s.cu_seqlens = {0, 60, 60, 360};
  s.T = 370;
  Features f;
  f.initial_state = true;
  LinksCall call;
  call.draw_links(s, f, {0, 0, 2, 2}, random);
  call.in.g.fill(
      [&](int64_t, int64_t, int64_t head, int64_t) { return head == 0 ? 0.0 : -0.3 - 0.1 * random.uniform(); });
  call.carries = true;
  call.pieces =
      std::make_shared<Pieces>(settings.small ? Arena::Pieces::kExact : Arena::Pieces::kGuarded, !settings.small);
  return std::make_unique<CallProbe<LinksCall>>("links", call, "sm90", checker, seconds);
}

// The operations of streams that are cut over ranks: links with and without a carry, forwards that go on from one,
// calls with states of parts, combine and cut.
inline int64_t test_malformed_links(const Settings& settings, Arena& arena) {
  Checker checker("malformed device data, links", settings, arena);
  MalformedGroup group(settings, checker);
  const int seconds = group.seconds();
  const Arena::Pieces pieces = settings.small ? Arena::Pieces::kExact : Arena::Pieces::kGuarded;
  const std::unique_ptr<Probe> links = links_probe(settings, checker, seconds),
                               forward = forward_probe("sm90", 128, FLASH_QLA_CP_AUTO, true, checker, seconds),
                               backward = backward_probe("sm90", 128, checker, seconds);
  MalformedSize size;
  if (settings.small) size.most = 20000;
  for (int64_t i = 0; i < 3 * settings.cases; ++i) {
    if (!settings.only_cases.empty() && settings.only_cases.count(i) == 0) continue;
    Random random(settings.seed * 1000003 + static_cast<uint64_t>(i));
    const double kind = random.uniform();
    const std::string number = "case " + std::to_string(i);
    if (kind < 0.4) {
      LinksCall call = draw_malformed_links(size, pieces, random);
      const std::string what = describe_malformed("links", i, call);
      group.run(what, call, nullptr, *links, random);
      if (!call.pieces->intact()) checker.fail(what, "links", "memory beside scratch was written");
    } else if (kind < 0.65) {
      PartsForward call = draw_malformed_parts_forward(size, pieces, random);
      const std::string what = describe_malformed("forward of a rank", i, call);
      group.run(what, call, nullptr, *forward, random);
      if (!call.pieces->intact()) checker.fail(what, "forward", "memory beside scratch was written");
    } else if (kind < 0.8) {
      PartsBackward call = draw_malformed_parts_backward(size, random);
      group.run(describe_malformed("backward of a rank", i, call), call, nullptr, *backward, random);
    } else if (kind < 0.9) {
      CombineCall call = draw_malformed_combine(random);
      group.run(number + ", combine", call, nullptr, *links, random);
    } else {
      CutCall call = draw_malformed_cut(random);
      group.run(number + ", cut", call, nullptr, *links, random);
    }
  }
  return checker.finish();
}

}  // namespace flash_qla::testing
