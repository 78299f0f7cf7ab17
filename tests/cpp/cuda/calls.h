// One forward or backward call with all its tensors: drawn at random, run by any path, compared.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "buffers.h"
#include "tails.h"

namespace flash_qla::testing {

// What a call is made of; the seed draws the rest.
struct Shape {
  int64_t B = 1, T = 64, Hq = 1, Hv = 1, K = 16, V = 16;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> cu_seqlens;  // empty: dense
  int64_t N() const { return cu_seqlens.empty() ? B : static_cast<int64_t>(cu_seqlens.size()) - 1; }
  // Sequences of these lengths side by side, and tokens behind them that belong to none.
  void pack(const std::vector<int64_t>& lengths, int64_t behind) {
    cu_seqlens = {0};
    for (const int64_t n : lengths) cu_seqlens.push_back(cu_seqlens.back() + n);
    T = cu_seqlens.back() + behind;
  }
};

// Which options and tensors a call may have beside q, k, v and o.
struct Features {
  bool g = true, beta = true, l2norm = false, gate = false, dt_bias = false, sigmoid = false, negative = false;
  bool v_first = false, strided = false, strong_decay = false;
  bool initial_state = false, final_state = false;
  bool any_length = false;  // keys and queries of any norm around 1, not of norm 1
  // q, k, v, do and states are left to who runs the call, who draws them on the device: here millions take seconds.
  bool drawn_on_device = false;
  DType gate_dtype = DType::kFloat32, state_dtype = DType::kFloat32;
  double scale = NAN;
  flash_qla_cp_mode cp_mode = FLASH_QLA_CP_AUTO;
  bool force_intra_cp = false;
};

using NamedBuffers = std::vector<std::pair<std::string, Buffer*>>;

inline Layout any_layout(Random& random, bool strided) {
  static const std::vector<Layout> kAll = {Layout::kContiguous, Layout::kPadded, Layout::kTransposed,
                                           Layout::kReversed};
  return strided ? random.pick(kAll) : Layout::kContiguous;
}

inline std::vector<int64_t> state_shape(const Shape& s, bool v_first, int64_t rows) {
  return v_first ? std::vector<int64_t>{rows, s.Hv, s.V, s.K} : std::vector<int64_t>{rows, s.Hv, s.K, s.V};
}

// What forward and backward calls have in common.
struct Inputs {
  Shape shape;
  Features features;
  Buffer q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state;

  void draw(const Shape& s, const Features& f, Random& random) {
    shape = s;
    features = f;
    const auto token = [&](int64_t heads, int64_t size) {
      return Buffer(s.dtype, {s.B, s.T, heads, size}, any_layout(random, f.strided));
    };
    const auto normal = [&](double scale) {
      return [&random, scale](int64_t, int64_t, int64_t, int64_t) { return scale * random.normal(); };
    };
    q = token(s.Hq, s.K);
    k = token(s.Hq, s.K);
    v = token(s.Hv, s.V);
    // Keys of unit norm, as the models have them, or near it: much longer ones make the recurrence itself unstable.
    const double element = f.any_length && !f.l2norm ? 1.0 / std::sqrt(static_cast<double>(s.K)) : 1.0;
    if (!f.drawn_on_device) {
      q.fill(normal(element));
      k.fill(normal(element));
      if (!f.l2norm && !f.any_length) {
        scale_rows(q);
        scale_rows(k);
      }
      v.fill(normal(1.0));
    }
    if (f.g) {
      g = Buffer(f.gate_dtype, {s.B, s.T, s.Hv}, any_layout(random, f.strided));
      g.fill([&](int64_t, int64_t, int64_t, int64_t) {
        if (f.gate) return random.normal();
        if (random.chance(0.1)) return 0.0;
        if (f.strong_decay && random.chance(0.1)) return random.chance(0.3) ? -1e4 : -60.0 * random.uniform();
        return -0.3 * random.uniform();
      });
    }
    if (f.beta) {
      beta = Buffer(f.gate_dtype, {s.B, s.T, s.Hv}, any_layout(random, f.strided));
      beta.fill([&](int64_t, int64_t, int64_t, int64_t) {
        if (f.sigmoid) return random.normal();
        return random.chance(0.05) ? 0.0 : random.uniform();
      });
    }
    if (f.gate) {
      A_log = Buffer(DType::kFloat32, {s.Hv});
      A_log.fill([&](int64_t, int64_t, int64_t, int64_t) { return random.uniform(-4.0, 1.0); });
      if (f.dt_bias) {
        dt_bias = Buffer(f.gate_dtype, {s.Hv});
        dt_bias.fill(normal(0.5));
      }
    }
    if (!s.cu_seqlens.empty()) {
      cu_seqlens = Buffer(random.chance(0.5) ? DType::kInt32 : DType::kInt64, {s.N() + 1});
      cu_seqlens.fill([&](int64_t i, int64_t, int64_t, int64_t) {
        return static_cast<double>(s.cu_seqlens[static_cast<size_t>(i)]);
      });
    }
    if (f.initial_state) {
      initial_state = Buffer(f.state_dtype, state_shape(s, f.v_first, s.N()), any_layout(random, f.strided));
      if (!f.drawn_on_device) initial_state.fill(normal(0.5));
    }
  }

  static void scale_rows(Buffer& x) {
    const Tensor t = x.host();
    double row_norm = 0.0;
    x.fill([&](int64_t i, int64_t j, int64_t head, int64_t l) {
      if (l == 0) {
        row_norm = 0.0;
        for (int64_t m = 0; m < t.shape[3]; ++m) row_norm += std::pow(load(t, offset_of(t, i, j, head, m)), 2);
      }
      return load(t, offset_of(t, i, j, head, l)) / std::sqrt(std::max(row_norm, 1e-6));
    });
  }

  NamedBuffers buffers() {
    return {{"q", &q},
            {"k", &k},
            {"v", &v},
            {"g", &g},
            {"beta", &beta},
            {"A_log", &A_log},
            {"dt_bias", &dt_bias},
            {"cu_seqlens", &cu_seqlens},
            {"initial_state", &initial_state}};
  }

  template <class Arguments, class View>
  void set(Arguments& args, View view) {
    args.options.scale = features.scale;
    args.options.cp_mode = features.cp_mode;
    args.options.force_intra_cp = features.force_intra_cp;
    args.options.state_v_first = features.v_first;
    args.options.use_qk_l2norm_in_kernel = features.l2norm;
    args.options.use_gate_in_kernel = features.gate;
    args.options.use_beta_sigmoid_in_kernel = features.sigmoid;
    args.options.allow_neg_eigval = features.negative;
    args.options.cp_mode = features.cp_mode;
    args.q = view(q);
    args.k = view(k);
    args.v = view(v);
    args.g = view(g);
    args.beta = view(beta);
    args.A_log = view(A_log);
    args.dt_bias = view(dt_bias);
    args.cu_seqlens = view(cu_seqlens);
    args.initial_state = view(initial_state);
  }

  DType accumulator() const { return shape.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
};

// The parts of a forward call that have to do with pools and checkpoints.
struct PoolFeatures {
  bool pool = false, skip_rows = false, has_initial = false, drafts = false, accepted = false;
  bool packed_checkpoints = false, listed_checkpoints = false;
  bool h = false, A = false, g_cumsum = false;
};

struct ForwardCall {
  using Arguments = ForwardArguments;
  bool recurrent = false;
  Inputs in;
  Buffer pool, initial_indices, final_indices, has_initial, accepted, checkpoints, checkpoint_starts,
      checkpoint_offsets, checkpoint_indices;
  Buffer o, final_state, g_cumsum, A, h;
  int64_t checkpoint_every = 0;

  void draw(const Shape& s, const Features& f, const PoolFeatures& pf, bool is_recurrent, Random& random) {
    recurrent = is_recurrent;
    Features features = f;
    if (pf.pool) features.initial_state = features.final_state = false;
    in.draw(s, features, random);
    const int64_t N = s.N();
    o = Buffer(s.dtype, {s.B, s.T, s.Hv, s.V}, any_layout(random, f.strided));
    if (features.final_state) {
      final_state = Buffer(in.accumulator(), state_shape(s, f.v_first, N), any_layout(random, f.strided));
    }
    if (pf.pool) draw_pool(s, f, pf, random);
    if (recurrent) return;
    if (pf.h) {
      int64_t rows = s.B * ceil_div(s.T, kChunkSize);
      if (!s.cu_seqlens.empty()) rows = s.T / kChunkSize + N;
      h = Buffer(s.dtype, state_shape(s, f.v_first, rows), any_layout(random, f.strided));
    }
    if (pf.A) A = Buffer(s.dtype, {s.B, s.T, s.Hv, kChunkSize}, any_layout(random, f.strided));
    if (pf.g_cumsum) g_cumsum = Buffer(in.accumulator(), {s.B, s.T, s.Hv}, any_layout(random, f.strided));
  }

  NamedBuffers inputs() {
    NamedBuffers all = in.buffers();
    for (auto [name, buffer] : NamedBuffers{{"initial_state_indices", &initial_indices},
                                            {"final_state_indices", &final_indices},
                                            {"has_initial_state", &has_initial},
                                            {"num_accepted_tokens", &accepted},
                                            {"checkpoint_cu_starts", &checkpoint_starts},
                                            {"checkpoint_offsets", &checkpoint_offsets},
                                            {"checkpoint_indices", &checkpoint_indices}}) {
      all.push_back({name, buffer});
    }
    return all;
  }
  // The pool is both: it keeps what the call was given.
  NamedBuffers outputs() {
    return {{"o", &o}, {"final_state", &final_state}, {"g_cumsum", &g_cumsum}, {"A", &A},
            {"h", &h}, {"checkpoints", &checkpoints}};
  }
  NamedBuffers in_place() { return {{"state_pool", &pool}}; }
  double least_norm(const std::string&) const { return 0.0; }

  template <class View>
  ForwardArguments arguments(View view) {
    ForwardArguments args;
    in.set(args, view);
    args.state_pool = view(pool);
    args.initial_state_indices = view(initial_indices);
    args.final_state_indices = view(final_indices);
    args.has_initial_state = view(has_initial);
    args.num_accepted_tokens = view(accepted);
    args.checkpoint_every = checkpoint_every;
    args.checkpoints = view(checkpoints);
    args.checkpoint_cu_starts = view(checkpoint_starts);
    args.checkpoint_offsets = view(checkpoint_offsets);
    args.checkpoint_indices = view(checkpoint_indices);
    args.o = view(o);
    args.final_state = view(final_state);
    args.g_cumsum = view(g_cumsum);
    args.A = view(A);
    args.h = view(h);
    return args;
  }
  Status workspace_size(const ForwardArguments& args, size_t* bytes) const {
    return recurrent ? Recurrent::workspace_size(args, bytes) : ChunkForward::workspace_size(args, bytes);
  }
  Status run(const ForwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    return recurrent ? Recurrent::run(args, workspace, bytes, stream)
                     : ChunkForward::run(args, workspace, bytes, stream);
  }
  Status explain(const ForwardArguments& args, char* text, size_t size) const {
    return recurrent ? flash_qla_recurrent_explain(&args, text, size)
                     : flash_qla_chunk_forward_explain(&args, text, size);
  }

 private:
  void draw_pool(const Shape& s, const Features& f, const PoolFeatures& pf, Random& random) {
    const int64_t N = s.N(), per_row = pf.drafts ? s.T : 1, columns = pf.accepted ? 3 : 1;
    const int64_t listed = pf.listed_checkpoints && !recurrent ? 5 : 0;
    // Every row has slots of its own to read and others to write, in a drawn order.
    std::vector<int64_t> slots(static_cast<size_t>(N * (columns + per_row) + listed + 2));
    std::iota(slots.begin(), slots.end(), 0);
    for (size_t i = slots.size(); i > 1; --i) {
      std::swap(slots[i - 1], slots[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    size_t next = 0;
    pool = Buffer(f.state_dtype, state_shape(s, f.v_first, static_cast<int64_t>(slots.size())), Layout::kPaddedRows);
    if (!f.drawn_on_device) pool.fill([&](int64_t, int64_t, int64_t, int64_t) { return 0.5 * random.normal(); });
    const DType index = random.chance(0.5) ? DType::kInt32 : DType::kInt64;
    const double beyond = static_cast<double>(slots.size());
    const auto slot = [&](int64_t, int64_t, int64_t, int64_t) {
      const double own = static_cast<double>(slots[next++]);
      return pf.skip_rows && random.chance(0.3) ? (random.chance(0.5) ? -1.0 : beyond) : own;
    };
    initial_indices = pf.accepted ? Buffer(index, {N, columns}) : Buffer(index, {N});
    initial_indices.fill(slot);
    // Without final indices a row writes the slot that it read.
    if (pf.drafts || random.chance(0.5) || pf.accepted) {
      final_indices = pf.drafts ? Buffer(index, {N, s.T}) : Buffer(index, {N});
      final_indices.fill(slot);
    }
    if (pf.has_initial) {
      has_initial = Buffer(DType::kBool, {N});
      has_initial.fill([&](int64_t, int64_t, int64_t, int64_t) { return random.chance(0.5) ? 1.0 : 0.0; });
    }
    if (pf.accepted) {
      accepted = Buffer(index, {N});
      accepted.fill(
          [&](int64_t, int64_t, int64_t, int64_t) { return static_cast<double>(random.integer(1, columns)); });
    }
    if (listed > 0) {
      checkpoint_offsets = Buffer(DType::kInt32, {listed});
      checkpoint_offsets.fill(
          [&](int64_t, int64_t, int64_t, int64_t) { return static_cast<double>(random.integer(0, s.B * s.T + 1)); });
      checkpoint_indices = Buffer(index, {listed});
      checkpoint_indices.fill(slot);
    }
    if (pf.packed_checkpoints && !recurrent) {
      checkpoint_every = kChunkSize * random.integer(1, 2);
      std::vector<int64_t> starts = {1};  // row 0 stays as it is
      for (int64_t n = 0; n < N; ++n) {
        const size_t i = static_cast<size_t>(n);
        const int64_t length = s.cu_seqlens.empty() ? s.T : s.cu_seqlens[i + 1] - s.cu_seqlens[i];
        starts.push_back(starts.back() + length / checkpoint_every);
      }
      checkpoint_starts = Buffer(index, {N + 1});
      checkpoint_starts.fill(
          [&](int64_t i, int64_t, int64_t, int64_t) { return static_cast<double>(starts[static_cast<size_t>(i)]); });
      checkpoints = Buffer(f.state_dtype, state_shape(s, f.v_first, starts.back() + 1), any_layout(random, f.strided));
    }
  }
};

struct BackwardCall {
  using Arguments = BackwardArguments;
  Inputs in;
  bool g_is_cumsum = false;
  Buffer A;  // of the forward; absent: the call makes it. Left to who runs the call
  Buffer d_o, dht, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias;

  void draw(const Shape& s, const Features& f, bool cumsum, bool has_d_o, bool has_dht, Random& random) {
    in.draw(s, f, random);
    g_is_cumsum = cumsum;
    if (cumsum) sum_gates(random);
    const auto like = [&](const Buffer& b) {
      std::vector<int64_t> shape(b.shape_view().shape, b.shape_view().shape + b.shape_view().ndim);
      return Buffer(dtype(b.shape_view()), shape, any_layout(random, f.strided));
    };
    dq = like(in.q);
    dk = like(in.k);
    dv = like(in.v);
    if (f.g) dg = like(in.g);
    if (f.beta) dbeta = like(in.beta);
    if (f.gate) dA_log = Buffer(DType::kFloat32, {s.Hv});
    if (f.gate && f.dt_bias) ddt_bias = like(in.dt_bias);
    if (f.initial_state) dh0 = Buffer(in.accumulator(), state_shape(s, f.v_first, s.N()));
    const auto normal = [&](int64_t, int64_t, int64_t, int64_t) { return random.normal(); };
    if (has_d_o) {
      d_o = like(in.v);
      if (!f.drawn_on_device) d_o.fill(normal);
    }
    if (has_dht) {
      dht = Buffer(in.accumulator(), state_shape(s, f.v_first, s.N()), any_layout(random, f.strided));
      if (!f.drawn_on_device) dht.fill(normal);
    }
  }

  NamedBuffers inputs() {
    NamedBuffers all = in.buffers();
    all.push_back({"do", &d_o});
    all.push_back({"dht", &dht});
    all.push_back({"A", &A});
    return all;
  }
  NamedBuffers outputs() {
    return {{"dq", &dq},       {"dk", &dk},   {"dv", &dv},         {"dg", &dg},
            {"dbeta", &dbeta}, {"dh0", &dh0}, {"dA_log", &dA_log}, {"ddt_bias", &ddt_bias}};
  }
  NamedBuffers in_place() { return {}; }

  // For a call that others are held to: dg also where it is not wanted, as least_norm() needs it.
  void complete() {
    const Tensor& g = in.g.shape_view();
    if (in.features.gate && !dg.present()) dg = Buffer(dtype(g), {g.shape, g.shape + g.ndim});
  }
  // dA_log and ddt_bias are sums over all tokens that may cancel, which no arithmetic can help: they are held to the
  // norm of their terms, which is this, from the reference's dg. 0 for other tensors.
  double least_norm(const std::string& name) {
    if ((name != "dA_log" && name != "ddt_bias") || !dg.present()) return 0.0;
    const Tensor d = dg.host(), raw = in.g.host(), bias = in.dt_bias.present() ? in.dt_bias.host() : Tensor{};
    double sum = 0.0;
    for (int64_t b = 0; b < d.shape[0]; ++b) {
      for (int64_t t = 0; t < d.shape[1]; ++t) {
        for (int64_t h = 0; h < d.shape[2]; ++h) {
          double term = load(d, offset_of(d, b, t, h));
          if (name == "dA_log") {  // log decay = rate softplus(x), and dg has the factor rate sigmoid(x)
            const double x =
                load(raw, offset_of(raw, b, t, h)) + (bias.ndim > 0 ? load(bias, offset_of(bias, h)) : 0.0);
            term *= std::log1p(std::exp(x)) * (1.0 + std::exp(-x));
          }
          sum += term * term;
        }
      }
    }
    return std::sqrt(sum);
  }

  template <class View>
  BackwardArguments arguments(View view) {
    BackwardArguments args;
    in.set(args, view);
    args.g_is_cumsum = g_is_cumsum;
    args.A = view(A);
    args.d_o = view(d_o);
    args.dht = view(dht);
    args.dq = view(dq);
    args.dk = view(dk);
    args.dv = view(dv);
    args.dg = view(dg);
    args.dbeta = view(dbeta);
    args.dh0 = view(dh0);
    args.dA_log = view(dA_log);
    args.ddt_bias = view(ddt_bias);
    return args;
  }
  Status workspace_size(const BackwardArguments& args, size_t* bytes) const {
    return ChunkBackward::workspace_size(args, bytes);
  }
  Status run(const BackwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) const {
    return ChunkBackward::run(args, workspace, bytes, stream);
  }
  Status explain(const BackwardArguments& args, char* text, size_t size) const {
    return flash_qla_chunk_backward_explain(&args, text, size);
  }

 private:
  // Replaces g by its sum from each chunk's start, clamped, as the forward hands it out.
  void sum_gates(Random& random) {
    const Shape& s = in.shape;
    Buffer sums(in.accumulator(), {s.B, s.T, s.Hv}, any_layout(random, in.features.strided));
    const Tensor g = in.g.host();
    std::vector<double> sum(static_cast<size_t>(s.Hv), 0.0);
    std::vector<bool> starts(static_cast<size_t>(s.T), false);
    const std::vector<int64_t> bounds = s.cu_seqlens.empty() ? std::vector<int64_t>{0, s.T} : s.cu_seqlens;
    for (size_t n = 0; n + 1 < bounds.size(); ++n) {
      for (int64_t t = bounds[n]; t < bounds[n + 1]; t += kChunkSize) starts[static_cast<size_t>(t)] = true;
    }
    sums.fill([&](int64_t b, int64_t t, int64_t head, int64_t) {
      double& x = sum[static_cast<size_t>(head)];
      x = (starts[static_cast<size_t>(t)] ? 0.0 : x) + std::max(kMinLogDecay, load(g, offset_of(g, b, t, head)));
      return x;
    });
    in.g = sums;
  }
};

// What explain() says of a call; without one, why not.
template <class Call>
std::string explained(const Call& call, const typename Call::Arguments& args) {
  char text[8192] = "";
  const Status status = call.explain(args, text, sizeof(text));
  return status.ok() ? text : status.message();
}

// The path that computes a call, as explain() names it ("path: NAME" is its first line); "none" where it is refused.
template <class Call>
std::string path_of(const Call& call, const typename Call::Arguments& args) {
  const std::string text = explained(call, args), label = "path: ";
  return text.compare(0, label.size(), label) == 0 ? text.substr(label.size(), text.find('\n') - label.size()) : "none";
}

// Runs a call by one path: on the host for FLASH_QLA_CPU, else on the current device with everything that is written
// poisoned first. Leaves the results in the call's host copies. Returns an empty text, or what went wrong. computed_by:
// set to the path that computes it.
template <class Call>
std::string run_call(Call& call, const char* path, flash_qla_device_type device, Arena& arena,
                     std::string* computed_by = nullptr) {
  const auto finish = [&](const Status& status) { return status.ok() ? std::string() : std::string(status.message()); };
  for (auto [name, buffer] : call.outputs()) buffer->poison();
  if (device == FLASH_QLA_CPU) {
    auto args = call.arguments([](Buffer& b) { return b.present() ? b.host() : Tensor{}; });
    args.options.path = path;
    if (computed_by != nullptr) *computed_by = path_of(call, args);
    return finish(call.run(args, nullptr, 0));
  }
  Tails::of_paths()[path == nullptr ? "the default path" : path].add(call.in);
  arena.reset();
  std::vector<std::vector<uint8_t>> before;
  for (auto [name, buffer] : call.inputs()) {
    buffer->upload(arena);
    before.push_back(buffer->bytes());
  }
  for (auto [name, buffer] : call.in_place()) buffer->upload(arena);
  for (auto [name, buffer] : call.outputs()) buffer->upload(arena);
  auto args = call.arguments([](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
  args.options.path = path;
  args.options.device_type = FLASH_QLA_CUDA;
  check_cuda(cudaGetDevice(&args.options.device_index), "cudaGetDevice");
  if (computed_by != nullptr) *computed_by = path_of(call, args);
  size_t bytes = 0;
  if (const Status status = call.workspace_size(args, &bytes); !status.ok()) return status.message();
  void* workspace = arena.take(bytes);
  check_cuda(cudaMemset(workspace, 0xff, bytes), "cudaMemset");
  if (const Status status = call.run(args, workspace, bytes); !status.ok()) return status.message();
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", path == nullptr ? "default path" : path, cudaGetErrorString(error));
    std::exit(2);  // the device is lost for this process
  }
  for (auto [name, buffer] : call.outputs()) buffer->download();
  for (auto [name, buffer] : call.in_place()) buffer->download();
  size_t i = 0;
  for (auto [name, buffer] : call.inputs()) {
    buffer->download();
    if (buffer->bytes() != before[i++]) return "input " + name + " was changed";
  }
  return arena.intact() ? std::string() : std::string("memory past the end of a tensor was written");
}

}  // namespace flash_qla::testing
