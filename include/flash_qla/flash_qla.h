// The C++ interface of flash_qla: a thin, header-only C++17 layer over c_api.h.
//
//   flash_qla::ForwardArguments args;
//   args.q = flash_qla::tensor(q, flash_qla::DType::kBFloat16, {B, T, Hq, K});
//   ...
//   if (auto s = flash_qla::ChunkForward::can_implement(args); !s.ok()) return fail(s.message());
//   size_t bytes = 0;
//   flash_qla::ChunkForward::workspace_size(args, &bytes);
//   flash_qla::ChunkForward::run(args, workspace, bytes, stream);
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "flash_qla/c_api.h"

namespace flash_qla {

enum class DType : int32_t {
  kFloat32 = FLASH_QLA_FLOAT32,
  kBFloat16 = FLASH_QLA_BFLOAT16,
  kFloat16 = FLASH_QLA_FLOAT16,
  kFloat64 = FLASH_QLA_FLOAT64,
  kInt32 = FLASH_QLA_INT32,
  kInt64 = FLASH_QLA_INT64,
  kBool = FLASH_QLA_BOOL,
};

// Outcome of a call; message() is "operation: argument rule (what was given)" when it is not ok().
class [[nodiscard]] Status {
 public:
  Status() : status_{} {}
  Status(const flash_qla_status& status) : status_(status) {}  // implicit on purpose: it wraps every C return value
  bool ok() const { return status_.code == FLASH_QLA_OK; }
  flash_qla_code code() const { return static_cast<flash_qla_code>(status_.code); }
  const char* message() const { return status_.message; }
  const flash_qla_status& c_status() const { return status_; }

 private:
  flash_qla_status status_;
};

using Tensor = flash_qla_tensor;

// A contiguous (row-major) view of `data`. A shape of more than FLASH_QLA_MAX_DIMS dimensions gives ndim beyond the
// maximum, which every call refuses.
inline Tensor tensor(const void* data, DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = static_cast<int32_t>(dtype);
  t.ndim = static_cast<int32_t>(shape.size());
  if (t.ndim > FLASH_QLA_MAX_DIMS) return t;
  int32_t i = 0;
  for (int64_t n : shape) t.shape[i++] = n;
  uint64_t stride = 1;  // unsigned: a shape that is too large wraps here, and is refused by the call
  for (i = t.ndim - 1; i >= 0; --i) {
    t.stride[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(t.shape[i]);
  }
  return t;
}

// Arguments start from the defaults of the C structures; see c_api.h for each member's shape and unit.
struct ForwardArguments : flash_qla_forward_arguments {
  ForwardArguments() { flash_qla_forward_arguments_init(this); }
};
struct BackwardArguments : flash_qla_backward_arguments {
  BackwardArguments() { flash_qla_backward_arguments_init(this); }
};

// Prefill and training forward.
struct ChunkForward {
  static Status can_implement(const ForwardArguments& args) { return flash_qla_chunk_forward_can_implement(&args); }
  static Status workspace_size(const ForwardArguments& args, size_t* bytes) {
    return flash_qla_chunk_forward_workspace_size(&args, bytes);
  }
  static Status run(const ForwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_chunk_forward_run(&args, workspace, bytes, stream);
  }
};

// Decode: one or a few tokens per sequence.
struct Recurrent {
  static Status can_implement(const ForwardArguments& args) { return flash_qla_recurrent_can_implement(&args); }
  static Status workspace_size(const ForwardArguments& args, size_t* bytes) {
    return flash_qla_recurrent_workspace_size(&args, bytes);
  }
  static Status run(const ForwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_recurrent_run(&args, workspace, bytes, stream);
  }
};

// Gradients of the chunked forward.
struct ChunkBackward {
  static Status can_implement(const BackwardArguments& args) { return flash_qla_chunk_backward_can_implement(&args); }
  static Status workspace_size(const BackwardArguments& args, size_t* bytes) {
    return flash_qla_chunk_backward_workspace_size(&args, bytes);
  }
  static Status run(const BackwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_chunk_backward_run(&args, workspace, bytes, stream);
  }
};

inline std::string build_info() {
  char text[4096];
  const Status status = flash_qla_build_info(text, sizeof(text));
  return status.ok() ? std::string(text) : std::string(status.message());
}

}  // namespace flash_qla
