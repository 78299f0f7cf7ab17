// The C interface's rules, seen from C++: defaults, refusals and their words, workspace, and the reference path against
// results that are known in closed form.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/host_tensor.h"
#include "core/registry.h"
#include "flash_qla/flash_qla.h"

namespace flash_qla {
namespace {

constexpr double kCanary = -12345.0;

// Memory and a view of it. Elements are doubles or floats; a fresh buffer holds canaries.
template <class T>
struct Buffer {
  std::vector<T> data;
  std::vector<int64_t> shape;

  explicit Buffer(std::vector<int64_t> extents = {}) : shape(std::move(extents)) {
    int64_t count = shape.empty() ? 0 : 1;
    for (int64_t n : shape) count *= n;
    data.assign(static_cast<size_t>(count), static_cast<T>(kCanary));
  }
  Tensor view() {
    Tensor t{};
    t.data = data.data();
    t.dtype = static_cast<int32_t>(std::is_same_v<T, double>    ? DType::kFloat64
                                   : std::is_same_v<T, int32_t> ? DType::kInt32
                                                                : DType::kFloat32);
    t.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int32_t i = t.ndim - 1; i >= 0; --i) {
      t.shape[i] = shape[static_cast<size_t>(i)];
      t.stride[i] = stride;
      stride *= t.shape[i];
    }
    return t;
  }
  bool untouched() const {
    for (const T& x : data) {
      if (x != static_cast<T>(kCanary)) return false;
    }
    return true;
  }
};

// A legal double-precision call of every operand, small enough to be read in a debugger.
struct Case {
  int64_t B, T, Hq, Hv, K, V, N;
  Buffer<double> q, k, v, g, beta, h0, o, final_state, d_o, dht, dq, dk, dv, dg, dbeta, dh0;
  Buffer<int32_t> cu_seqlens;

  explicit Case(int64_t B = 1, int64_t T = 5, int64_t Hq = 1, int64_t Hv = 2, int64_t K = 3, int64_t V = 4,
                std::vector<int32_t> offsets = {})
      : B(B),
        T(T),
        Hq(Hq),
        Hv(Hv),
        K(K),
        V(V),
        N(offsets.empty() ? B : static_cast<int64_t>(offsets.size()) - 1),
        q({B, T, Hq, K}),
        k({B, T, Hq, K}),
        v({B, T, Hv, V}),
        g({B, T, Hv}),
        beta({B, T, Hv}),
        h0({N, Hv, K, V}),
        o({B, T, Hv, V}),
        final_state({N, Hv, K, V}),
        d_o({B, T, Hv, V}),
        dht({N, Hv, K, V}),
        dq({B, T, Hq, K}),
        dk({B, T, Hq, K}),
        dv({B, T, Hv, V}),
        dg({B, T, Hv}),
        dbeta({B, T, Hv}),
        dh0({N, Hv, K, V}) {
    std::mt19937 engine(1);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    for (Buffer<double>* x : {&q, &k, &v, &h0, &d_o, &dht}) {
      for (double& value : x->data) value = 0.5 * normal(engine);
    }
    for (double& value : g.data) value = -uniform(engine);
    for (double& value : beta.data) value = uniform(engine);
    if (!offsets.empty()) {
      cu_seqlens = Buffer<int32_t>({N + 1});
      cu_seqlens.data = std::move(offsets);
    }
  }

  ForwardArguments forward(const char* path = "reference") {
    ForwardArguments args;
    args.options.path = path;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.g = g.view();
    args.beta = beta.view();
    args.initial_state = h0.view();
    args.cu_seqlens = cu_seqlens.view();
    args.o = o.view();
    args.final_state = final_state.view();
    return args;
  }

  BackwardArguments backward(const char* path = "reference") {
    BackwardArguments args;
    args.options.path = path;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.g = g.view();
    args.beta = beta.view();
    args.initial_state = h0.view();
    args.cu_seqlens = cu_seqlens.view();
    args.d_o = d_o.view();
    args.dht = dht.view();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    args.dg = dg.view();
    args.dbeta = dbeta.view();
    args.dh0 = dh0.view();
    return args;
  }
};

// Runs with a workspace of exactly the size that is asked for, filled with 0xff (NaN in every float format), at an
// address that is a multiple of nothing.
template <class Op, class Arguments>
Status run(const Arguments& args) {
  size_t bytes = 0;
  if (Status s = Op::workspace_size(args, &bytes); !s.ok()) return s;
  std::vector<unsigned char> memory(bytes + 1, 0xff);
  return Op::run(args, bytes ? memory.data() + 1 : nullptr, bytes);
}

// Paths that compute on the CPU, by name.
std::vector<std::string> cpu_paths() {
  std::vector<std::string> names;
  for (const ForwardPath* path : chunk_forward_paths()) {
    if (path->device == FLASH_QLA_CPU) names.push_back(path->name);
  }
  return names;
}

TEST(Defaults, Forward) {
  flash_qla_forward_arguments args;
  std::memset(&args, 0xff, sizeof(args));
  flash_qla_forward_arguments_init(&args);
  EXPECT_TRUE(std::isnan(args.options.scale));
  EXPECT_EQ(args.options.cp_mode, FLASH_QLA_CP_AUTO);
  EXPECT_EQ(args.options.device_type, FLASH_QLA_CPU);
  EXPECT_EQ(args.options.path, nullptr);
  EXPECT_EQ(args.options.operation, nullptr);
  EXPECT_EQ(args.null_index, -1);
  EXPECT_EQ(args.checkpoint_every, 0);
  EXPECT_EQ(args.options.num_threads, 0);
  for (const Tensor* t : {&args.q, &args.g, &args.cu_seqlens, &args.state_pool, &args.checkpoints, &args.h}) {
    EXPECT_EQ(t->ndim, 0);
  }
}

TEST(Defaults, Backward) {
  flash_qla_backward_arguments args;
  std::memset(&args, 0xff, sizeof(args));
  flash_qla_backward_arguments_init(&args);
  EXPECT_TRUE(std::isnan(args.options.scale));
  EXPECT_EQ(args.g_is_cumsum, 0);
  EXPECT_EQ(args.dq.ndim, 0);
}

TEST(TensorView, RowMajorAndTooManyDimensions) {
  const Tensor t = tensor(nullptr, DType::kFloat32, {2, 3, 4});
  EXPECT_EQ(t.ndim, 3);
  EXPECT_EQ(t.stride[0], 12);
  EXPECT_EQ(t.stride[2], 1);
  Case c;
  ForwardArguments args = c.forward();
  args.q = tensor(c.q.data.data(), DType::kFloat64, {1, 1, 5, 1, 3});
  const Status s = ChunkForward::can_implement(args);
  EXPECT_EQ(s.code(), FLASH_QLA_INVALID_VALUE);
  EXPECT_STREQ(s.message(), "chunk_forward: q.ndim (5) must be 4");
}

struct Refusal {
  const char* name;
  std::function<void(Case&, ForwardArguments&)> breaks;
  flash_qla_code code;
  const char* message;
};

const Refusal kRefusals[] = {
    {"missing_q", [](Case&, ForwardArguments& a) { a.q = {}; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: q (None) must be given"},
    {"missing_o", [](Case&, ForwardArguments& a) { a.o = {}; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: o (None) must be given"},
    {"heads",
     [](Case&, ForwardArguments& a) {
       a.q.shape[2] = a.k.shape[2] = 4;
       a.v.shape[2] = 6;
     },
     FLASH_QLA_INVALID_VALUE, "chunk_forward: v.shape[2] (6) must be a multiple of k.shape[2] (4)"},
    {"key_dtype", [](Case&, ForwardArguments& a) { a.k.dtype = FLASH_QLA_FLOAT32; }, FLASH_QLA_INVALID_TYPE,
     "chunk_forward: k.dtype (float32) must be that of q (float64)"},
    {"unknown_dtype", [](Case&, ForwardArguments& a) { a.q.dtype = 99; }, FLASH_QLA_INVALID_TYPE,
     "chunk_forward: q.dtype (an unknown dtype) must be float32, bfloat16, float16 or float64"},
    {"head_dim", [](Case&, ForwardArguments& a) { a.q.shape[3] = a.k.shape[3] = 257; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: q.shape[3] (257) must be from 1 to 256"},
    {"negative_extent", [](Case&, ForwardArguments& a) { a.q.shape[1] = -5; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: q.shape[1] (-5) must not be negative"},
    {"state_layout", [](Case&, ForwardArguments& a) { a.options.state_v_first = 1; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: initial_state.shape[2] (3) must be v.shape[3] (4)"},
    {"no_memory", [](Case&, ForwardArguments& a) { a.v.data = nullptr; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: v.data (NULL) must point to memory"},
    {"output_repeats", [](Case&, ForwardArguments& a) { a.o.stride[1] = 0; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: o.stride[1] (0) must not be zero: it is written"},
    {"device", [](Case&, ForwardArguments& a) { a.options.device_type = 7; }, FLASH_QLA_INVALID_TYPE,
     "chunk_forward: device_type (7) must be FLASH_QLA_CPU or FLASH_QLA_CUDA"},
    {"cp_mode", [](Case&, ForwardArguments& a) { a.options.cp_mode = 3; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: cp_mode (3) must be 0 (off), 1 (auto) or 2 (invariant)"},
    {"threads", [](Case&, ForwardArguments& a) { a.options.num_threads = -1; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: num_threads (-1) must not be negative"},
    {"neg_eigval", [](Case&, ForwardArguments& a) { a.options.allow_neg_eigval = 1; }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: allow_neg_eigval (True) must come with use_beta_sigmoid_in_kernel (False)"},
    {"indices_alone",
     [](Case& c, ForwardArguments& a) {
       a.initial_state_indices = c.cu_seqlens.view();
       a.initial_state_indices.ndim = 1;
     },
     FLASH_QLA_INVALID_VALUE, "chunk_forward: initial_state_indices must come with state_pool (it was given)"},
    {"checkpoints_alone", [](Case& c, ForwardArguments& a) { a.checkpoints = c.h0.view(); }, FLASH_QLA_INVALID_VALUE,
     "chunk_forward: checkpoints must come with checkpoint_every (it was given)"},
    {"final_dtype", [](Case&, ForwardArguments& a) { a.final_state.dtype = FLASH_QLA_FLOAT32; }, FLASH_QLA_INVALID_TYPE,
     "chunk_forward: final_state.dtype (float32) must be float64, as q is"},
    {"operation_name",
     [](Case&, ForwardArguments& a) {
       a.options.operation = "my_layer";
       a.k.shape[3] = 2;
     },
     FLASH_QLA_INVALID_VALUE, "my_layer: k.shape[3] (2) must be q.shape[3] (3)"},
    {"path", [](Case&, ForwardArguments& a) { a.options.path = "no_such_path"; }, FLASH_QLA_INVALID_VALUE, nullptr},
};

class Refusals : public testing::TestWithParam<Refusal> {};

TEST_P(Refusals, WritesNothing) {
  Case c;
  ForwardArguments args = c.forward();
  GetParam().breaks(c, args);
  const Status s = ChunkForward::run(args, nullptr, 0);
  EXPECT_EQ(s.code(), GetParam().code);
  if (GetParam().message != nullptr) {
    EXPECT_STREQ(s.message(), GetParam().message);
  }
  EXPECT_TRUE(c.o.untouched());
  EXPECT_TRUE(c.final_state.untouched());
  if (std::string(GetParam().name) == "no_memory") return;  // can_implement looks at no memory
  EXPECT_EQ(ChunkForward::can_implement(args).code(), GetParam().code);
  size_t bytes = 77;
  EXPECT_EQ(ChunkForward::workspace_size(args, &bytes).code(), GetParam().code);
  EXPECT_EQ(bytes, 77u);
}

INSTANTIATE_TEST_SUITE_P(Forward, Refusals, testing::ValuesIn(kRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Refusal, UnknownPathNamesTheKnownOnes) {
  Case c;
  const Status s = ChunkForward::can_implement(c.forward("no_such_path"));
  EXPECT_EQ(std::string(s.message()).rfind("chunk_forward: path (no_such_path) must be one of: ", 0), 0u)
      << s.message();
  EXPECT_NE(std::string(s.message()).find("reference"), std::string::npos);
}

TEST(Refusal, BackwardWritesNothing) {
  Case c;
  BackwardArguments args = c.backward();
  args.d_o.shape[3] = 9;
  const Status s = ChunkBackward::run(args, nullptr, 0);
  EXPECT_STREQ(s.message(), "chunk_backward: do.shape[3] (9) must be v.shape[3] (4)");
  for (const Buffer<double>* x : {&c.dq, &c.dk, &c.dv, &c.dg, &c.dbeta, &c.dh0}) EXPECT_TRUE(x->untouched());
}

TEST(Refusal, NullArguments) {
  EXPECT_EQ(flash_qla_chunk_forward_can_implement(nullptr).code, FLASH_QLA_INVALID_VALUE);
  EXPECT_EQ(flash_qla_recurrent_run(nullptr, nullptr, 0, nullptr).code, FLASH_QLA_INVALID_VALUE);
  size_t bytes = 0;
  EXPECT_EQ(flash_qla_chunk_backward_workspace_size(nullptr, &bytes).code, FLASH_QLA_INVALID_VALUE);
  Case c;
  EXPECT_STREQ(ChunkForward::workspace_size(c.forward(), nullptr).message(),
               "chunk_forward: bytes (NULL) must be given");
}

TEST(Refusal, LongNamesDoNotOverflowTheMessage) {
  Case c;
  const std::string name(5000, 'x');
  ForwardArguments args = c.forward();
  args.options.operation = name.c_str();
  args.k.shape[3] = 2;
  const Status s = ChunkForward::can_implement(args);
  EXPECT_EQ(s.code(), FLASH_QLA_INVALID_VALUE);
  EXPECT_EQ(std::strlen(s.message()), sizeof(flash_qla_status::message) - 1);
}

TEST(Refusal, TooSmallAWorkspaceIsNamed) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 130, 1, 2, 16, 16);
    const ForwardArguments args = c.forward(path.c_str());
    size_t bytes = 0;
    ASSERT_TRUE(ChunkForward::workspace_size(args, &bytes).ok());
    if (bytes == 0) continue;
    std::vector<unsigned char> memory(bytes);
    for (const Status& s :
         {ChunkForward::run(args, memory.data(), bytes - 1), ChunkForward::run(args, nullptr, bytes)}) {
      EXPECT_EQ(s.code(), FLASH_QLA_INVALID_VALUE);
      EXPECT_NE(std::string(s.message()).find("workspace ("), std::string::npos) << s.message();
      EXPECT_NE(std::string(s.message()).find(std::to_string(bytes)), std::string::npos) << s.message();
    }
    EXPECT_TRUE(c.o.untouched());
  }
}

// Sizes without memory, as an engine asks for them.
template <class Arguments>
Arguments sized(int64_t T, int64_t N, DType dtype = DType::kFloat32);

template <>
ForwardArguments sized(int64_t T, int64_t N, DType dtype) {
  ForwardArguments args;
  args.q = args.k = tensor(nullptr, dtype, {1, T, 2, 64});
  args.v = args.o = tensor(nullptr, dtype, {1, T, 4, 32});
  args.g = args.beta = tensor(nullptr, DType::kFloat32, {1, T, 4});
  args.cu_seqlens = tensor(nullptr, DType::kInt32, {N + 1});
  args.final_state = tensor(nullptr, DType::kFloat32, {N, 4, 64, 32});
  return args;
}

template <>
BackwardArguments sized(int64_t T, int64_t N, DType dtype) {
  BackwardArguments args;
  args.q = args.k = args.dq = args.dk = tensor(nullptr, dtype, {1, T, 2, 64});
  args.v = args.d_o = args.dv = tensor(nullptr, dtype, {1, T, 4, 32});
  args.g = args.beta = args.dg = args.dbeta = tensor(nullptr, DType::kFloat32, {1, T, 4});
  args.cu_seqlens = tensor(nullptr, DType::kInt32, {N + 1});
  return args;
}

template <class Op, class Arguments>
size_t workspace(int64_t T, int64_t N, DType dtype) {
  size_t bytes = 0;
  const Status s = Op::workspace_size(sized<Arguments>(T, N, dtype), &bytes);
  EXPECT_TRUE(s.ok()) << s.message();
  return bytes;
}

template <class Op, class Arguments>
void expect_monotone() {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (int64_t N : {0, 1, 3, 64, 5000}) {
      size_t last = 0;
      for (int64_t T : {0, 1, 2, 63, 64, 65, 127, 128, 1000, 8191, 8192, 8193, 100000}) {
        const size_t bytes = workspace<Op, Arguments>(T, N, dtype);
        EXPECT_GE(bytes, last) << "T " << T << " N " << N;
        last = bytes;
      }
    }
    for (int64_t T : {0, 1, 64, 1000, 8192}) {
      size_t last = 0;
      for (int64_t N : {0, 1, 2, 3, 7, 64, 65, 1000, 70000}) {
        const size_t bytes = workspace<Op, Arguments>(T, N, dtype);
        EXPECT_GE(bytes, last) << "T " << T << " N " << N;
        last = bytes;
      }
    }
  }
}

TEST(Workspace, GrowsWithTokensAndSequences) {
  expect_monotone<ChunkForward, ForwardArguments>();
  expect_monotone<Recurrent, ForwardArguments>();
  expect_monotone<ChunkBackward, BackwardArguments>();
}

TEST(ClosedForm, OneToken) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 1, 1, 1, 3, 2);
    const Status s = run<ChunkForward>(c.forward(path.c_str()));
    ASSERT_TRUE(s.ok()) << s.message();
    const double decay = std::exp(c.g.data[0]), beta = c.beta.data[0];
    double o[2] = {0, 0};
    for (int j = 0; j < 2; ++j) {
      double read = 0;
      for (int i = 0; i < 3; ++i) read += decay * c.h0.data[i * 2 + j] * c.k.data[i];
      for (int i = 0; i < 3; ++i) {
        const double state = decay * c.h0.data[i * 2 + j] + c.k.data[i] * beta * (c.v.data[j] - read);
        EXPECT_NEAR(c.final_state.data[i * 2 + j], state, 1e-14) << path;
        o[j] += state * c.q.data[i] / std::sqrt(3.0);
      }
      EXPECT_NEAR(c.o.data[j], o[j], 1e-14) << path;
    }
  }
}

TEST(ClosedForm, OrthonormalKeysWithoutDecayAreADictionary) {
  // g = 0, beta = 1, key t the t-th unit vector: row t of the state is value t, and query t reads value t.
  for (const std::string& path : cpu_paths()) {
    constexpr int64_t K = 100, V = 7;
    Case c(1, K, 1, 1, K, V);
    for (int64_t t = 0; t < K; ++t) {
      for (int64_t i = 0; i < K; ++i) c.k.data[t * K + i] = c.q.data[t * K + i] = t == i ? 1.0 : 0.0;
      c.g.data[t] = 0.0;
      c.beta.data[t] = 1.0;
    }
    ForwardArguments args = c.forward(path.c_str());
    args.options.scale = 1.0;
    ASSERT_TRUE(run<ChunkForward>(args).ok());
    for (int64_t i = 0; i < K * V; ++i) {
      EXPECT_NEAR(c.final_state.data[i], c.v.data[i], 1e-13) << path;
      EXPECT_NEAR(c.o.data[i], c.v.data[i], 1e-13) << path;
    }
  }
}

TEST(ClosedForm, DecayAloneScalesTheState) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 130, 1, 1, 3, 2);
    double total = 0;
    for (int64_t t = 0; t < 130; ++t) {
      c.beta.data[t] = 0.0;
      total += c.g.data[t];
    }
    ASSERT_TRUE(run<ChunkForward>(c.forward(path.c_str())).ok());
    for (int i = 0; i < 6; ++i) {
      EXPECT_NEAR(c.final_state.data[i] / (std::exp(total) * c.h0.data[i]), 1.0, 1e-10) << path;
    }
  }
}

double loss(Case& c, const char* path) {
  EXPECT_TRUE(run<ChunkForward>(c.forward(path)).ok());
  double sum = 0;
  for (size_t i = 0; i < c.o.data.size(); ++i) sum += c.o.data[i] * c.d_o.data[i];
  for (size_t i = 0; i < c.final_state.data.size(); ++i) sum += c.final_state.data[i] * c.dht.data[i];
  return sum;
}

void expect_central_differences(Case& c, const char* path) {
  const Status s = run<ChunkBackward>(c.backward(path));
  ASSERT_TRUE(s.ok()) << s.message();
  struct Pair {
    const char* name;
    Buffer<double>* input;
    const Buffer<double>* gradient;
  };
  const Pair pairs[] = {{"q", &c.q, &c.dq}, {"k", &c.k, &c.dk},          {"v", &c.v, &c.dv},
                        {"g", &c.g, &c.dg}, {"beta", &c.beta, &c.dbeta}, {"h0", &c.h0, &c.dh0}};
  constexpr double kStep = 1e-5;  // truncation (step^2) and rounding (1e-16 / step) are both near 1e-10
  for (const Pair& pair : pairs) {
    const size_t stride = std::max<size_t>(1, pair.input->data.size() / 12);
    for (size_t i = 0; i < pair.input->data.size(); i += stride) {
      double& x = pair.input->data[i];
      const double before = x;
      x = before + kStep;
      const double above = loss(c, path);
      x = before - kStep;
      const double below = loss(c, path);
      x = before;
      EXPECT_NEAR(pair.gradient->data[i], (above - below) / (2 * kStep), 2e-8)
          << path << " d" << pair.name << "[" << i << "]";
    }
  }
}

TEST(Gradients, CentralDifferences) {
  for (const std::string& path : cpu_paths()) {
    Case dense(2, 5, 1, 2, 3, 4);
    expect_central_differences(dense, path.c_str());
    Case packed(1, 70, 1, 2, 3, 2, {0, 0, 66, 66, 69});
    expect_central_differences(packed, path.c_str());
  }
}

TEST(Gradients, OnlyWhatIsAskedForIsWritten) {
  for (const std::string& path : cpu_paths()) {
    Case c(1, 70, 1, 2, 3, 2);
    ASSERT_TRUE(run<ChunkBackward>(c.backward(path.c_str())).ok());
    const std::vector<double> dk = c.dk.data;
    Case again(1, 70, 1, 2, 3, 2);
    BackwardArguments args = again.backward(path.c_str());
    args.dq = args.dv = args.dg = args.dbeta = args.dh0 = {};
    ASSERT_TRUE(run<ChunkBackward>(args).ok());
    EXPECT_EQ(again.dk.data, dk) << path;
    for (const Buffer<double>* x : {&again.dq, &again.dv, &again.dg, &again.dbeta, &again.dh0})
      EXPECT_TRUE(x->untouched());
  }
}

TEST(Recurrent, EqualsTheChunkedForward) {
  for (const std::string& path : cpu_paths()) {
    Case a(2, 70, 1, 2, 5, 3), b(2, 70, 1, 2, 5, 3);
    ASSERT_TRUE(run<ChunkForward>(a.forward(path.c_str())).ok());
    ASSERT_TRUE(run<Recurrent>(b.forward(path.c_str())).ok());
    for (size_t i = 0; i < a.o.data.size(); ++i) EXPECT_NEAR(a.o.data[i], b.o.data[i], 1e-12);
    for (size_t i = 0; i < a.final_state.data.size(); ++i)
      EXPECT_NEAR(a.final_state.data[i], b.final_state.data[i], 1e-12);
  }
}

TEST(Paths, AgreeTo1em12) {
  // The reference and whatever else this build has for the CPU, on packed sequences with activations.
  const std::vector<int32_t> offsets = {0, 0, 66, 66, 130};
  Case truth(1, 131, 2, 4, 16, 8, offsets);
  ASSERT_TRUE(run<ChunkForward>(truth.forward()).ok());
  ASSERT_TRUE(run<ChunkBackward>(truth.backward()).ok());
  for (const std::string& path : cpu_paths()) {
    Case c(1, 131, 2, 4, 16, 8, offsets);
    ASSERT_TRUE(run<ChunkForward>(c.forward(path.c_str())).ok());
    ASSERT_TRUE(run<ChunkBackward>(c.backward(path.c_str())).ok());
    const auto expect_near = [&](const char* name, const Buffer<double>& got, const Buffer<double>& want) {
      double error = 0, norm = 0;
      for (size_t i = 0; i < got.data.size(); ++i) {
        error += (got.data[i] - want.data[i]) * (got.data[i] - want.data[i]);
        norm += want.data[i] * want.data[i];
      }
      EXPECT_LE(std::sqrt(error), 1e-12 * std::sqrt(norm)) << path << " " << name;
    };
    expect_near("o", c.o, truth.o);
    expect_near("final_state", c.final_state, truth.final_state);
    expect_near("dq", c.dq, truth.dq);
    expect_near("dk", c.dk, truth.dk);
    expect_near("dv", c.dv, truth.dv);
    expect_near("dg", c.dg, truth.dg);
    expect_near("dbeta", c.dbeta, truth.dbeta);
    expect_near("dh0", c.dh0, truth.dh0);
    EXPECT_EQ(c.o.data.back(), 0.0) << "the token after the last offset";
  }
}

TEST(Explain, NamesThePathAndTheScratch) {
  Case c;
  char text[1024];
  ForwardArguments args = c.forward();
  ASSERT_EQ(flash_qla_chunk_forward_explain(&args, text, sizeof(text)).code, FLASH_QLA_OK);
  EXPECT_EQ(std::string(text).rfind("path: reference\nworkspace: ", 0), 0u) << text;
  char tiny[8];
  ASSERT_EQ(flash_qla_chunk_forward_explain(&args, tiny, sizeof(tiny)).code, FLASH_QLA_OK);
  EXPECT_STREQ(tiny, "path: r");
  EXPECT_EQ(flash_qla_chunk_forward_explain(&args, tiny, 0).code, FLASH_QLA_INVALID_VALUE);
  EXPECT_EQ(flash_qla_chunk_forward_explain(&args, nullptr, 8).code, FLASH_QLA_INVALID_VALUE);
  EXPECT_TRUE(c.o.untouched());
}

TEST(BuildInfo, HasVersionAndPaths) {
  const std::string info = build_info();
  EXPECT_EQ(info.rfind("version: ", 0), 0u);
  for (const char* key : {"\nchunk_forward:", "\nrecurrent:", "\nchunk_backward:"}) {
    EXPECT_NE(info.find(key), std::string::npos) << info;
  }
}

TEST(Registry, NamesAreUniqueForADevice) {
  const auto expect_unique = [](const auto& paths) {
    for (size_t i = 0; i < paths.size(); ++i) {
      ASSERT_NE(paths[i], nullptr);
      for (size_t j = i + 1; j < paths.size(); ++j) {
        EXPECT_FALSE(paths[i]->device == paths[j]->device && std::strcmp(paths[i]->name, paths[j]->name) == 0);
      }
    }
  };
  expect_unique(chunk_forward_paths());
  expect_unique(recurrent_paths());
  expect_unique(chunk_backward_paths());
}

// host_sequences: offsets of any value lead to token ranges inside the call.

std::vector<Sequence> sequences_of(std::vector<int32_t> offsets, int64_t T) {
  Problem p;
  p.B = 1;
  p.T = T;
  p.N = static_cast<int64_t>(offsets.size()) - 1;
  p.varlen = true;
  return host_sequences(tensor(offsets.data(), DType::kInt32, {p.N + 1}), p);
}

TEST(HostSequences, CountsChunksSequenceBySequence) {
  const auto s = sequences_of({0, 65, 65, 129, 130}, 200);
  ASSERT_EQ(s.size(), 4u);
  EXPECT_EQ(s[0].begin, 0);
  EXPECT_EQ(s[0].length, 65);
  EXPECT_EQ(s[0].chunks(), 2);
  EXPECT_EQ(s[1].length, 0);
  EXPECT_EQ(s[1].first_chunk, 2);
  EXPECT_EQ(s[2].first_chunk, 2);
  EXPECT_EQ(s[3].first_chunk, 3);
  EXPECT_EQ(s[3].begin, 129);
}

TEST(HostSequences, ClampsWhatIsOutOfOrderOrRange) {
  const std::vector<std::vector<int32_t>> broken = {
      {-5, 10, 20}, {0, 30, 10},       {0, 1000, 20},      {500, 600, 700}, {10, 5, 0},
      {0, -1, -2},  {INT32_MIN, 0, 5}, {0, INT32_MAX, 20}, {20, 20, 20},    {0, INT32_MIN, INT32_MAX}};
  for (const auto& offsets : broken) {
    int64_t end = 0, chunks = 0;
    for (const Sequence& s : sequences_of(offsets, 20)) {
      EXPECT_GE(s.begin, end);
      EXPECT_GE(s.length, 0);
      EXPECT_LE(s.begin + s.length, 20);
      EXPECT_EQ(s.first_chunk, chunks);
      end = s.begin + s.length;
      chunks += s.chunks();
    }
    EXPECT_LE(chunks, 20 / kChunkSize + 2) << "more chunks than the bound that h is allocated with";
  }
}

TEST(HostSequences, DenseBatches) {
  Problem p;
  p.B = p.N = 3;
  p.T = 65;
  const auto s = host_sequences(Tensor{}, p);
  ASSERT_EQ(s.size(), 3u);
  EXPECT_EQ(s[2].b, 2);
  EXPECT_EQ(s[2].begin, 0);
  EXPECT_EQ(s[2].first_chunk, 4);
}

TEST(HostTensor, SlotsOutsideThePoolAreSkipped) {
  EXPECT_EQ(slot_or_skip(3, -1, 5), 3);
  EXPECT_EQ(slot_or_skip(0, -1, 5), 0);
  EXPECT_EQ(slot_or_skip(-1, -1, 5), -1);
  EXPECT_EQ(slot_or_skip(5, -1, 5), -1);
  EXPECT_EQ(slot_or_skip(3, 3, 5), -1);
  EXPECT_EQ(slot_or_skip(-2, -100, 5), -1) << "a null_index below -1 does not make negative slots real";
  EXPECT_EQ(slot_or_skip(INT64_MAX, -1, 5), -1);
}

TEST(HostTensor, LoadsAndStoresEveryDtype) {
  unsigned char memory[64] = {};
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    const Tensor t = tensor(memory, dtype, {2, 2});
    store(t, offset_of(t, 1, 1), -2.5);
    EXPECT_EQ(load(t, 3), -2.5);
  }
  const int32_t narrow[4] = {1, -2, 3, 4};
  const int64_t wide[4] = {1, -2, int64_t{1} << 40, 4};
  EXPECT_EQ(load_index(tensor(narrow, DType::kInt32, {2, 2}), 0, 1), -2);
  EXPECT_EQ(load_index(tensor(wide, DType::kInt64, {4}), 2), int64_t{1} << 40);
}

// Offsets and indices that break their rules: refused when asked to look, harmless when not.

TEST(DeviceData, IsCheckedOnRequest) {
  Case c(1, 20, 1, 2, 3, 4, {0, 30, 10});
  ForwardArguments args = c.forward();
  args.options.check_device_data = 1;
  const Status s = run<ChunkForward>(args);
  EXPECT_EQ(s.code(), FLASH_QLA_INVALID_VALUE);
  EXPECT_STREQ(s.message(), "chunk_forward: cu_seqlens[2] (10) must not be below cu_seqlens[1] (30)");
  EXPECT_TRUE(c.o.untouched());
  args.options.check_device_data = 0;
  for (const std::string& path : cpu_paths()) {
    args.options.path = path.c_str();
    EXPECT_TRUE(run<ChunkForward>(args).ok());
  }
}

TEST(DeviceData, IsCheckedByTheEnvironment) {
  Case c(1, 20, 1, 2, 3, 4, {0, 10, 21});
  ASSERT_EQ(setenv("FLASH_QLA_CHECK", "1", 1), 0);
  const Status s = run<ChunkBackward>(c.backward());
  unsetenv("FLASH_QLA_CHECK");
  EXPECT_STREQ(s.message(), "chunk_backward: cu_seqlens[2] (21) must not be above q.shape[1] (20)");
  EXPECT_TRUE(c.dq.untouched());
}

}  // namespace
}  // namespace flash_qla
