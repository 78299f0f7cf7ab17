// The layer's kernels on the CPU, against the formulas in double precision (path "reference"), on drawn calls.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "core/convolution.h"
#include "core/half.h"
#include "core/host_tensor.h"
#include "core/norm.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {
namespace {

// Memory between canaries, with a view of it; values are drawn.
class Memory {
 public:
  Memory() = default;
  Memory(DType type, std::vector<int64_t> shape, std::mt19937* random, double scale = 1.0, int64_t gap = 0)
      : type_(type), shape_(std::move(shape)) {
    // `gap`: elements behind each innermost row.
    strides_.assign(shape_.size(), 1);
    for (size_t i = shape_.size() - 1; i > 0; --i) {
      strides_[i - 1] = strides_[i] * shape_[i] + (i + 1 == shape_.size() ? gap : 0);
    }
    const int64_t count = shape_.empty() ? 0 : strides_[0] * shape_[0];
    bytes_.assign(static_cast<size_t>((count + 2 * kGuard) * size_of(type)), 0x7f);
    if (random == nullptr) return;
    std::normal_distribution<double> normal;
    const Tensor t = view();
    for (int64_t i = 0; i < count; ++i) {
      Tensor flat = t;
      store(flat, i, scale * normal(*random));
    }
  }

  Tensor view() {
    Tensor t{};
    if (shape_.empty()) return t;
    t.data = bytes_.data() + kGuard * size_of(type_);
    t.dtype = static_cast<int32_t>(type_);
    t.ndim = static_cast<int32_t>(shape_.size());
    for (int32_t i = 0; i < t.ndim; ++i) {
      t.shape[i] = shape_[static_cast<size_t>(i)];
      t.stride[i] = strides_[static_cast<size_t>(i)];
    }
    return t;
  }

  // The last dimension becomes the outer one of the last two: channels of a state side by side.
  void transpose() {
    const size_t last = shape_.size() - 1;
    strides_[last] = shape_[last - 1];
    strides_[last - 1] = 1;
  }

  bool intact() const {
    const size_t guard = static_cast<size_t>(kGuard * size_of(type_));
    for (size_t i = 0; i < guard; ++i) {
      if (bytes_[i] != 0x7f || bytes_[bytes_.size() - 1 - i] != 0x7f) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;
  DType type_ = DType::kFloat32;
  std::vector<int64_t> shape_, strides_;
  std::vector<unsigned char> bytes_;
};

template <class Function>
void for_elements(const Tensor& t, Function&& fn) {
  int64_t shape[4] = {1, 1, 1, 1};
  for (int32_t i = 0; i < t.ndim; ++i) shape[i] = t.shape[i];
  for (int64_t a = 0; a < shape[0]; ++a) {
    for (int64_t b = 0; b < shape[1]; ++b) {
      for (int64_t c = 0; c < shape[2]; ++c) {
        for (int64_t d = 0; d < shape[3]; ++d) fn(offset_of(t, a, b, c, d));
      }
    }
  }
}

// Relative L2 of `got` against `want`, which has its strides.
double difference(const Tensor& got, const Tensor& want) {
  double error = 0.0, norm = 0.0;
  for_elements(want, [&](int64_t at) {
    const double a = load(got, at), b = load(want, at);
    error += std::isfinite(a) ? (a - b) * (a - b) : HUGE_VAL;
    norm += b * b;
  });
  return std::sqrt(error / std::max(norm, 1e-12));
}

double bound(DType type) { return type == DType::kBFloat16 ? 2e-3 : type == DType::kFloat16 ? 3e-4 : 1e-6; }

struct Drawn {
  std::mt19937 random;
  explicit Drawn(uint32_t seed) : random(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
  bool chance(int64_t of = 2) { return below(of) == 0; }
  DType dtype() { return std::vector{DType::kBFloat16, DType::kFloat16, DType::kFloat32}[below(3)]; }
};

Tensor indices(std::vector<int32_t>* values) {
  return tensor(values->data(), DType::kInt32, {static_cast<int64_t>(values->size())});
}

struct ConvCall {
  Drawn draw;
  DType type;
  int64_t B, T, W, L = 0, N, slots = 0;
  int parts;
  bool varlen, pool = false, update;
  std::vector<int32_t> offsets, initial, final, accepted, ring, seq_idx, listed, listed_slots;
  std::vector<uint8_t> has;
  Memory x[3], weight[3], bias[3], residual[3], initial_state[3], y[3], norm[3], a, b, A_log, dt_bias, g, beta, drafts;
  Memory dy[3], dfinal[3], dx[3], dweight[3], dbias[3], dinitial[3], dresidual[3];
  int64_t heads[3], dims[3], channels = 0;
  bool l2norm[3];
  int activation;

  // step: an update of one token, of the layout that a model's decode step has.
  ConvCall(uint32_t seed, bool is_update, bool step = false) : draw(seed), update(is_update) {
    type = draw.dtype();
    W = step ? 4 : 1 + draw.below(draw.chance(5) ? 8 : 4);
    parts = 1 + static_cast<int>(draw.below(3));
    activation = static_cast<int>(draw.below(2));
    varlen = !step && draw.chance();
    B = varlen ? 1 : 1 + draw.below(3);
    T = step ? 1 : update ? 1 + draw.below(4) : 1 + draw.below(200);
    N = B;
    if (varlen) {
      N = 1 + draw.below(6);
      T = update ? N * 3 : T;
      std::vector<int64_t> cuts;
      for (int64_t n = 0; n <= N; ++n) cuts.push_back(draw.below(T + 1));
      std::sort(cuts.begin(), cuts.end());
      if (draw.chance()) cuts[0] = 0;
      offsets.assign(cuts.begin(), cuts.end());
    }
    const bool vectors = draw.chance();  // what the fast kernels take, or anything
    const bool states = update || draw.chance();
    pool = states && draw.chance();
    L = states ? std::max<int64_t>(W - 1, 1) + draw.below(3) : 0;
    if (step) {
      L = W;
    } else if (update && draw.chance(3)) {
      L = std::max<int64_t>(1, W - 2 + T + draw.below(2));
      if (L < W - 1) L = W - 1;
      for (int64_t n = 0; n < N; ++n) accepted.push_back(1 + static_cast<int32_t>(draw.below(L - (W - 1) + 1)));
      if (W < 2) accepted.clear();
    } else if (update && draw.chance(3)) {
      for (int64_t n = 0; n < N; ++n) ring.push_back(static_cast<int32_t>(draw.below(100)));
    }
    slots = pool ? N + 4 : N;
    if (pool) {
      std::vector<int32_t> all;
      for (int32_t i = 0; i < slots; ++i) all.push_back(i);
      std::shuffle(all.begin(), all.end(), draw.random);
      initial.assign(all.begin(), all.begin() + N);
      if (draw.chance(3)) initial[static_cast<size_t>(draw.below(N))] = draw.chance() ? -1 : 1000;
      if (draw.chance(3)) {
        final = initial;
        final[0] = all[static_cast<size_t>(N)];
      }
      if (draw.chance(3)) {
        for (int64_t n = 0; n < N; ++n) has.push_back(draw.chance());
      }
      if (!update && draw.chance(3)) {
        listed = {static_cast<int32_t>(1 + draw.below(B * T)), static_cast<int32_t>(1 + draw.below(B * T))};
        listed_slots = {all[static_cast<size_t>(N) + 1], all[static_cast<size_t>(N) + 2]};
      }
    }
    if (!update && !varlen && !states && draw.chance(3)) {
      for (int64_t i = 0; i < B * T; ++i) seq_idx.push_back(static_cast<int32_t>(i / (3 + draw.below(9))) - 1);
    }
    auto* random = &draw.random;
    const DType other = !step && draw.chance(3) ? DType::kFloat32 : type;
    for (int i = 0; i < parts; ++i) {
      l2norm[i] = !step && draw.chance();
      heads[i] = 1 + draw.below(3);
      dims[i] = vectors ? 8 * (1 + draw.below(16)) : 1 + draw.below(70);
      if (draw.chance(6)) dims[i] = 256;
      const int64_t gap = vectors ? 8 * draw.below(3) : draw.below(4);
      const std::vector<int64_t> shape{B, T, heads[i], dims[i]};
      x[i] = Memory(type, shape, random, 1.0, gap);
      weight[i] = Memory(other, {heads[i] * dims[i], W}, random, 0.6);
      if (draw.chance()) bias[i] = Memory(other, {heads[i] * dims[i]}, random);
      if (!step && !l2norm[i] && draw.chance(4)) residual[i] = Memory(type, shape, random);
      if (states)
        initial_state[i] =
            Memory(!step && draw.chance() ? DType::kFloat32 : type, {slots, heads[i] * dims[i], L}, random);
      channels += heads[i] * dims[i];
    }
    if (draw.chance()) {
      const int64_t Hv = draw.chance(4) ? 65 + draw.below(70) : 1 + draw.below(5);  // more than a block has threads
      a = Memory(type, {B, T, Hv}, random);
      b = Memory(type, {B, T, Hv}, random);
      A_log = Memory(DType::kFloat32, {Hv}, random);
      dt_bias = Memory(DType::kFloat32, {Hv}, random);
      g = Memory(DType::kFloat32, {B, T, Hv}, nullptr);
      beta = Memory(DType::kFloat32, {B, T, Hv}, nullptr);
    }
    if (update && !step && !varlen && W > 1 && draw.chance())
      drafts = Memory(type, {N + 1, T, channels, W - 1}, random);
    for (int i = 0; i < parts; ++i) {
      const std::vector<int64_t> shape{B, T, heads[i], dims[i]};
      y[i] = Memory(type, shape, nullptr);
      if (l2norm[i]) norm[i] = Memory(DType::kFloat32, {B, T, heads[i]}, nullptr);
      dy[i] = Memory(type, shape, random);
      if (states) dfinal[i] = Memory(DType::kFloat32, {N, heads[i] * dims[i], L}, random);
      dx[i] = Memory(type, shape, nullptr);
      dweight[i] = Memory(DType::kFloat32, {heads[i] * dims[i], W}, nullptr);
      dbias[i] = Memory(DType::kFloat32, {heads[i] * dims[i]}, nullptr);
      if (states) dinitial[i] = Memory(DType::kFloat32, {N, heads[i] * dims[i], L}, nullptr);
      if (!l2norm[i]) dresidual[i] = Memory(type, shape, nullptr);
    }
    if (states && draw.chance(3)) {
      for (int i = 0; i < parts; ++i) initial_state[i].transpose();
    }
  }

  void fill(ConvArguments* args) {
    args->num_parts = parts;
    args->activation = activation;
    for (int i = 0; i < parts; ++i) {
      flash_qla_conv_part& part = args->parts[i];
      part.x = x[i].view();
      part.weight = weight[i].view();
      part.bias = bias[i].view();
      part.residual = residual[i].view();
      part.initial_state = part.final_state = initial_state[i].view();
      part.y = y[i].view();
      part.l2norm = l2norm[i];
      if (l2norm[i]) part.inverse_norm = norm[i].view();
    }
    if (varlen) args->cu_seqlens = indices(&offsets);
    if (!seq_idx.empty()) args->seq_idx = tensor(seq_idx.data(), DType::kInt32, {B, T});
    if (pool) args->initial_state_indices = indices(&initial);
    if (!final.empty()) args->final_state_indices = indices(&final);
    if (!has.empty()) args->has_initial_state = tensor(has.data(), DType::kBool, {N});
    if (!accepted.empty()) args->num_accepted_tokens = indices(&accepted);
    if (!ring.empty()) args->cache_seqlens = indices(&ring);
    if (!listed.empty()) {
      args->checkpoint_offsets = indices(&listed);
      args->checkpoint_indices = indices(&listed_slots);
    }
    args->draft_states = drafts.view();
    if (a.view().ndim != 0) {
      args->a = a.view();
      args->b = b.view();
      args->A_log = A_log.view();
      args->dt_bias = dt_bias.view();
      args->g = g.view();
      args->beta = beta.view();
    }
  }

  void fill(ConvBackwardArguments* args) {
    args->num_parts = parts;
    args->activation = activation;
    for (int i = 0; i < parts; ++i) {
      flash_qla_conv_backward_part& part = args->parts[i];
      part.x = x[i].view();
      part.weight = weight[i].view();
      part.bias = bias[i].view();
      if (!pool) part.initial_state = initial_state[i].view();
      part.l2norm = l2norm[i];
      part.dy = dy[i].view();
      if (draw.chance()) part.dfinal_state = dfinal[i].view();
      part.dx = dx[i].view();
      part.dweight = dweight[i].view();
      part.dbias = dbias[i].view();
      if (draw.chance()) part.dresidual = dresidual[i].view();
      if (!pool) part.dinitial_state = dinitial[i].view();
    }
    if (varlen) args->cu_seqlens = indices(&offsets);
    if (!seq_idx.empty()) args->seq_idx = tensor(seq_idx.data(), DType::kInt32, {B, T});
  }
};

template <class Operation, class Arguments>
void run_on(Arguments* args, const char* path, DeviceType device) {
  args->options.path = path;
  args->set_device(device);
  size_t bytes = 0;
  const Status sized = Operation::workspace_size(*args, &bytes);
  ASSERT_TRUE(sized.ok()) << sized.message();
  std::vector<unsigned char> memory(bytes, 0xff);
  const Status status = Operation::run(*args, memory.data(), bytes);
  ASSERT_TRUE(status.ok()) << status.message();
}

template <class Operation>
void check_forward(uint32_t seed, bool update, bool step = false) {
  ConvCall call(seed, update, step), reference(seed, update, step);
  ConvArguments args, wanted;
  call.fill(&args);
  reference.fill(&wanted);
  run_on<Operation>(&args, "cuda_layer", DeviceType::kCuda);
  run_on<Operation>(&wanted, "reference", DeviceType::kCpu);
  if (testing::Test::HasFatalFailure()) return;
  for (int i = 0; i < call.parts; ++i) {
    EXPECT_LE(difference(args.parts[i].y, wanted.parts[i].y), bound(call.type)) << "y of part " << i;
    if (call.L > 0) EXPECT_EQ(difference(args.parts[i].final_state, wanted.parts[i].final_state), 0.0) << "state";
    if (call.l2norm[i]) EXPECT_LE(difference(args.parts[i].inverse_norm, wanted.parts[i].inverse_norm), 1e-6);
    for (Memory* memory : {&call.x[i], &call.y[i], &call.norm[i], &call.initial_state[i]}) {
      EXPECT_TRUE(memory->view().ndim == 0 || memory->intact());
    }
  }
  if (args.g.ndim != 0) {
    EXPECT_LE(difference(args.g, wanted.g), 1e-6);
    EXPECT_LE(difference(args.beta, wanted.beta), 1e-6);
  }
  if (args.draft_states.ndim != 0) EXPECT_EQ(difference(args.draft_states, wanted.draft_states), 0.0) << "drafts";
}

constexpr uint32_t kCases = 120;

TEST(Layer, DrawnConvForward) {
  for (uint32_t seed = 0; seed < kCases && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_forward<ConvForward>(seed, false);
  }
}

TEST(Layer, DrawnConvUpdate) {
  for (uint32_t seed = 0; seed < kCases && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_forward<ConvUpdate>(1000 + seed, true);
  }
}

TEST(Layer, DrawnConvStep) {
  for (uint32_t seed = 0; seed < kCases && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_forward<ConvUpdate>(2000 + seed, true, true);
  }
}

void check_backward(uint32_t seed) {
  ConvCall call(seed, false), reference(seed, false);
  ConvBackwardArguments args, wanted;
  call.fill(&args);
  reference.fill(&wanted);
  run_on<ConvBackward>(&args, "cuda_layer", DeviceType::kCuda);
  run_on<ConvBackward>(&wanted, "reference", DeviceType::kCpu);
  if (testing::Test::HasFatalFailure()) return;
  for (int i = 0; i < call.parts; ++i) {
    const auto &got = args.parts[i], &want = wanted.parts[i];
    const double sums = call.type == DType::kFloat32 ? 1e-5 : 1e-4;  // stored in float32
    // One or two channels are normalised to little more than their sign: what is left of their gradient is rounding.
    const bool degenerate = call.l2norm[i] && call.dims[i] < 3;
    if (!degenerate) {
      EXPECT_LE(difference(got.dx, want.dx), bound(call.type)) << "dx of part " << i;
      EXPECT_LE(difference(got.dweight, want.dweight), sums) << "dweight of part " << i;
      EXPECT_LE(difference(got.dbias, want.dbias), sums) << "dbias of part " << i;
    }
    if (got.dresidual.ndim != 0) EXPECT_EQ(difference(got.dresidual, want.dresidual), 0.0);
    if (got.dinitial_state.ndim != 0 && !degenerate) {
      EXPECT_LE(difference(got.dinitial_state, want.dinitial_state), sums) << "dinitial of part " << i;
    }
    for (Memory* memory : {&call.dx[i], &call.dweight[i], &call.dbias[i], &call.dinitial[i], &call.dresidual[i]}) {
      EXPECT_TRUE(memory->view().ndim == 0 || memory->intact());
    }
  }
}

TEST(Layer, DrawnConvBackward) {
  for (uint32_t seed = 0; seed < kCases && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_backward(2000 + seed);
  }
}

// Packed sequences that begin and end around the borders of runs (16 tokens in calls as small) and inside what a thread
// has under way, with empty ones between: one part of vectors, its first sequence from a state.
struct Borders {
  std::mt19937 random;
  std::vector<int32_t> offsets{2, 3, 3, 5, 15, 16, 17, 19, 19, 31, 34, 48, 48, 63, 65};
  const int64_t T = 67, N = static_cast<int64_t>(offsets.size()) - 1, H = 2, D = 24;
  Memory x, weight, bias, state, y, norm, dy, dx, dweight, dbias;
  bool l2norm;

  Borders(DType type, int64_t W, bool normalised) : random(static_cast<uint32_t>(W)), l2norm(normalised) {
    x = Memory(type, {1, T, H, D}, &random, 1.0, 8);
    weight = Memory(type, {H * D, W}, &random, 0.6);
    if (W % 2 == 0) bias = Memory(DType::kFloat32, {H * D}, &random);
    state = Memory(type, {N, H * D, std::max<int64_t>(1, W - 1)}, &random);
    y = Memory(type, {1, T, H, D}, nullptr);
    norm = Memory(DType::kFloat32, {1, T, H}, nullptr);
    dy = Memory(type, {1, T, H, D}, &random);
    dx = Memory(type, {1, T, H, D}, nullptr);
    dweight = Memory(DType::kFloat32, {H * D, W}, nullptr);
    dbias = Memory(DType::kFloat32, {H * D}, nullptr);
  }

  template <class Arguments>
  void fill(Arguments* args) {
    args->num_parts = 1;
    args->activation = FLASH_QLA_ACTIVATION_SILU;
    args->cu_seqlens = indices(&offsets);
    auto& part = args->parts[0];
    part.x = x.view();
    part.weight = weight.view();
    part.bias = bias.view();
    part.initial_state = state.view();
    part.l2norm = l2norm;
  }
};

TEST(Layer, SequencesAroundBordersOfRuns) {
  for (const DType type : {DType::kBFloat16, DType::kFloat32}) {
    for (int64_t W = 1; W <= 4; ++W) {
      for (const bool l2norm : {false, true}) {
        SCOPED_TRACE(testing::Message() << "W " << W << ", l2norm " << l2norm << ", dtype " << static_cast<int>(type));
        Borders call(type, W, l2norm), reference(type, W, l2norm);
        ConvArguments args, wanted;
        ConvBackwardArguments back, wanted_back;
        for (auto& [of, to, to_back] :
             {std::tuple{&call, &args, &back}, std::tuple{&reference, &wanted, &wanted_back}}) {
          of->fill(to);
          to->parts[0].y = of->y.view();
          if (l2norm) to->parts[0].inverse_norm = of->norm.view();
          of->fill(to_back);
          to_back->parts[0].dy = of->dy.view();
          to_back->parts[0].dx = of->dx.view();
          to_back->parts[0].dweight = of->dweight.view();
          to_back->parts[0].dbias = of->dbias.view();
        }
        run_on<ConvForward>(&args, "cuda_layer", DeviceType::kCuda);
        run_on<ConvForward>(&wanted, "reference", DeviceType::kCpu);
        run_on<ConvBackward>(&back, "cuda_layer", DeviceType::kCuda);
        run_on<ConvBackward>(&wanted_back, "reference", DeviceType::kCpu);
        if (HasFatalFailure()) return;
        EXPECT_LE(difference(args.parts[0].y, wanted.parts[0].y), bound(type));
        if (l2norm) EXPECT_LE(difference(args.parts[0].inverse_norm, wanted.parts[0].inverse_norm), 1e-6);
        const auto &got = back.parts[0], &want = wanted_back.parts[0];
        const double sums = type == DType::kFloat32 ? 1e-5 : 1e-4;
        EXPECT_LE(difference(got.dx, want.dx), bound(type));
        EXPECT_LE(difference(got.dweight, want.dweight), sums);
        EXPECT_LE(difference(got.dbias, want.dbias), sums);
        for (Memory* memory : {&call.y, &call.norm, &call.dx, &call.dweight, &call.dbias}) {
          EXPECT_TRUE(memory->intact());
        }
      }
    }
  }
}

// One norm, drawn.
struct NormCall {
  Drawn draw;
  DType type;
  Memory x, z, weight, bias, y, r, dy, dx, dz, dweight, dbias;
  int activation;
  bool gate_first, plain;

  // is_plain: of the kind that models have.
  explicit NormCall(uint32_t seed, std::vector<int64_t> fixed = {}, bool is_plain = false)
      : draw(seed), plain(is_plain) {
    type = draw.dtype();
    int64_t V = std::vector<int64_t>{1, 7, 16, 64, 96, 128, 200, 256, 300, 1000}[static_cast<size_t>(draw.below(10))];
    std::vector<int64_t> shape;
    int64_t rows = 1;
    for (int64_t i = draw.below(4); i > 0; --i) {
      shape.push_back(1 + draw.below(7));
      rows *= shape.back();
    }
    if (!shape.empty() && draw.chance(8)) rows = shape[0] = 0;  // sums over no rows are zero
    shape.push_back(V);
    if (plain) shape.back() = V = std::max<int64_t>(8, std::min<int64_t>(V, 256) / 8 * 8);
    if (!fixed.empty()) {
      shape = fixed;
      rows = shape[0];
      V = shape[1];
    }
    auto* random = &draw.random;
    x = Memory(type, shape, random, 1.0, shape.size() > 1 && draw.chance() ? 8 : 0);
    const int64_t gap = shape.size() > 1 && draw.chance() ? (plain ? 16 : 3) : 0;
    if (plain || !draw.chance(4)) z = Memory(type, shape, random, 2.0, gap);
    if (plain || !draw.chance(4)) weight = Memory(!plain && draw.chance() ? DType::kFloat32 : type, {V}, random);
    if (!plain && draw.chance(3)) bias = Memory(DType::kFloat32, {V}, random);
    y = Memory(type, shape, nullptr);
    r = Memory(DType::kFloat32, {rows}, nullptr);
    dy = Memory(type, shape, random);
    dx = Memory(type, shape, nullptr);
    dz = Memory(type, shape, nullptr);
    dweight = Memory(DType::kFloat32, {V}, nullptr);
    dbias = Memory(DType::kFloat32, {V}, nullptr);
    activation = plain ? 1 : 1 + static_cast<int>(draw.below(2));
    gate_first = !plain && draw.chance(3);
  }

  template <class Arguments>
  void fill(Arguments* args) {
    args->x = x.view();
    args->z = z.view();
    args->weight = weight.view();
    args->bias = bias.view();
    args->activation = activation;
    args->gate_first = gate_first;
    args->eps = 1e-5;
  }
};

void check_norm(uint32_t seed, const std::vector<int64_t>& fixed = {}, bool plain = false) {
  NormCall call(seed, fixed, plain), reference(seed, fixed, plain);
  NormGatedArguments args, wanted;
  for (auto& [of, to] : {std::pair{&call, &args}, std::pair{&reference, &wanted}}) {
    of->fill(to);
    to->y = of->y.view();
    to->inverse_rms = of->r.view();
  }
  run_on<NormGated>(&args, "cuda_layer", DeviceType::kCuda);
  run_on<NormGated>(&wanted, "reference", DeviceType::kCpu);
  EXPECT_LE(difference(args.y, wanted.y), bound(call.type));
  EXPECT_LE(difference(args.inverse_rms, wanted.inverse_rms), 1e-6);
  EXPECT_TRUE(call.y.intact() && call.r.intact());
  NormGatedBackwardArguments back, wanted_back;
  for (auto& [of, to] : {std::pair{&call, &back}, std::pair{&reference, &wanted_back}}) {
    of->fill(to);
    to->dy = of->dy.view();
    to->dx = of->dx.view();
    if (to->z.ndim != 0) to->dz = of->dz.view();
    to->dweight = of->dweight.view();
    if (!plain) to->dbias = of->dbias.view();
  }
  run_on<NormGatedBackward>(&back, "cuda_layer", DeviceType::kCuda);
  run_on<NormGatedBackward>(&wanted_back, "reference", DeviceType::kCpu);
  const double sums = call.type == DType::kFloat32 ? 1e-5 : 1e-4;
  if (back.x.shape[back.x.ndim - 1] > 1) EXPECT_LE(difference(back.dx, wanted_back.dx), 2 * bound(call.type));
  if (back.z.ndim != 0 && back.x.shape[back.x.ndim - 1] > 1) {
    EXPECT_LE(difference(back.dz, wanted_back.dz), bound(call.type));
  }
  EXPECT_LE(difference(back.dweight, wanted_back.dweight), sums);
  if (!plain) EXPECT_LE(difference(back.dbias, wanted_back.dbias), sums);
  EXPECT_TRUE(call.dx.intact() && call.dz.intact() && call.dweight.intact() && call.dbias.intact());
}

TEST(Layer, DrawnNorm) {
  for (uint32_t seed = 0; seed < 2 * kCases && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_norm(seed);
  }
}

TEST(Layer, DrawnPlainNorm) {
  for (uint32_t seed = 0; seed < kCases && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_norm(seed, {}, true);
  }
}

// More rows than the blocks of the backward take in one round (264 of at most eight groups of two), and a rest.
TEST(Layer, NormOfManyRows) {
  for (uint32_t seed = 0; seed < 6 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_norm(seed, {4611, 256}, seed % 2 == 1);
  }
  check_norm(6, {34000, 256}, true);  // the backward has more blocks than a GPU holds at once
}

}  // namespace
}  // namespace flash_qla
