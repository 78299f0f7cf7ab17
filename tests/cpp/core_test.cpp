// The C interface's rules, seen from C++: defaults, refusals and their words, workspace.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "call_case.h"

namespace flash_qla {
namespace {

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

TEST(TensorView, StridesAreTakenAsTheyAreGiven) {
  const Tensor t = tensor(nullptr, DType::kInt64, {2, 3}, {0, -5});
  EXPECT_EQ(t.ndim, 2);
  EXPECT_EQ(t.dtype, FLASH_QLA_INT64);
  EXPECT_EQ(t.shape[0], 2);
  EXPECT_EQ(t.shape[1], 3);
  EXPECT_EQ(t.stride[0], 0);
  EXPECT_EQ(t.stride[1], -5);
  EXPECT_EQ(t.shape[2], 0);
}

// Whether tensor() takes a shape of kDims extents with kStrides strides.
template <size_t kDims, size_t kStrides>
constexpr bool is_a_view(decltype(tensor(nullptr, DType::kFloat32, std::declval<const int64_t (&)[kDims]>(),
                                         std::declval<const int64_t (&)[kStrides]>()))*) {
  return true;
}
template <size_t, size_t>
constexpr bool is_a_view(const void*) {
  return false;
}
static_assert(is_a_view<3, 3>(static_cast<Tensor*>(nullptr)));
static_assert(!is_a_view<3, 2>(static_cast<Tensor*>(nullptr)));

// Heads before tokens in memory, read through strides, give the bits of the packed call.
TEST(TensorView, StridedInputsGiveTheSameResult) {
  Case c(2, 70, 1, 2, 3, 4);
  ASSERT_TRUE(run<ChunkForward>(c.forward()).ok());
  const std::vector<double> expected = c.o.data;
  Buffer<double> heads_first({c.B, c.Hv, c.T, c.V});
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t t = 0; t < c.T; ++t) {
      for (int64_t h = 0; h < c.Hv; ++h) {
        for (int64_t j = 0; j < c.V; ++j) {
          heads_first.data[static_cast<size_t>(((b * c.Hv + h) * c.T + t) * c.V + j)] =
              c.v.data[static_cast<size_t>(((b * c.T + t) * c.Hv + h) * c.V + j)];
        }
      }
    }
  }
  ForwardArguments args = c.forward();
  args.v =
      tensor(heads_first.data.data(), DType::kFloat64, {c.B, c.T, c.Hv, c.V}, {c.Hv * c.T * c.V, c.V, c.T * c.V, 1});
  c.o.data.assign(c.o.data.size(), kCanary);
  const Status s = run<ChunkForward>(args);
  ASSERT_TRUE(s.ok()) << s.message();
  EXPECT_EQ(c.o.data, expected);
}

TEST(Options, TypedSettersWriteTheFieldsOfC) {
  ForwardArguments forward;
  forward.set_cp_mode(CpMode::kInvariant);
  forward.set_device(DeviceType::kCuda, 3);
  EXPECT_EQ(forward.options.cp_mode, FLASH_QLA_CP_INVARIANT);
  EXPECT_EQ(forward.options.device_type, FLASH_QLA_CUDA);
  EXPECT_EQ(forward.options.device_index, 3);
  BackwardArguments backward;
  backward.set_cp_mode(CpMode::kOff);
  EXPECT_EQ(backward.options.cp_mode, FLASH_QLA_CP_OFF);
  backward.set_cp_mode(CpMode::kAuto);
  EXPECT_EQ(backward.options.cp_mode, FLASH_QLA_CP_AUTO);
  backward.set_device(DeviceType::kCpu);
  EXPECT_EQ(backward.options.device_type, FLASH_QLA_CPU);
  EXPECT_EQ(backward.options.device_index, 0);
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

TEST(Explain, OfEveryOperationAsAString) {
  Case c;
  const std::string head = "path: reference\nworkspace: ";
  EXPECT_EQ(ChunkForward::explain(c.forward()).rfind(head, 0), 0u);
  EXPECT_EQ(Recurrent::explain(c.forward()).rfind(head, 0), 0u);
  EXPECT_EQ(ChunkBackward::explain(c.backward()).rfind(head, 0), 0u);
  EXPECT_TRUE(c.o.untouched());
  EXPECT_TRUE(c.dq.untouched());
}

TEST(Explain, OfARefusedCallIsTheRefusal) {
  Case c;
  ForwardArguments args = c.forward();
  args.k.shape[3] = 2;
  EXPECT_EQ(ChunkForward::explain(args), ChunkForward::can_implement(args).message());
  EXPECT_EQ(ChunkForward::explain(args), "chunk_forward: k.shape[3] (2) must be q.shape[3] (3)");
}

// Text of any length comes whole, also where its length is one of the sizes that are tried.
TEST(Explain, TextIsNotCut) {
  for (const size_t length : {0u, 1u, 1022u, 1023u, 1024u, 2047u, 5000u}) {
    const std::string long_text(length, 'x');
    const std::string got = detail::whole_text([&](char* text, size_t size) {
      const size_t n = std::min(size - 1, long_text.size());
      std::memcpy(text, long_text.data(), n);
      text[n] = '\0';
      return Status();
    });
    EXPECT_EQ(got, long_text);
  }
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

}  // namespace
}  // namespace flash_qla
