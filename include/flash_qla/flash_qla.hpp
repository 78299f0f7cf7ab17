// The C++ interface of flash_qla: a thin, header-only C++17 layer over flash_qla.h.
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
#include <cstring>
#include <initializer_list>
#include <string>

#include "flash_qla/flash_qla.h"

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

// How one sequence may be cut into segments that are computed beside each other.
enum class CpMode : int32_t {
  kOff = FLASH_QLA_CP_OFF,              // a sequence's bits depend on nothing but the sequence
  kAuto = FLASH_QLA_CP_AUTO,            // planned from the whole batch
  kInvariant = FLASH_QLA_CP_INVARIANT,  // planned from each sequence's own length alone
};

enum class DeviceType : int32_t {
  kCpu = FLASH_QLA_CPU,
  kCuda = FLASH_QLA_CUDA,
};

// Outcome of a call; message() is "operation: argument rule (what was given)" when it is not ok().
class [[nodiscard]] Status {
 public:
  // The rest of the message stays as it is: a call makes some hundred of these, each half a kilobyte.
  Status() {
    status_.code = FLASH_QLA_OK;
    status_.message[0] = '\0';
  }
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

// A view of `data` with strides in elements; 0 repeats (inputs only). Shape and strides of different lengths do not
// compile: tensor(data, DType::kFloat32, {B, T, H, K}, {T * row, row, K, 1}).
template <size_t kDims>
Tensor tensor(const void* data, DType dtype, const int64_t (&shape)[kDims], const int64_t (&strides)[kDims]) {
  static_assert(kDims <= FLASH_QLA_MAX_DIMS, "a tensor has at most FLASH_QLA_MAX_DIMS dimensions");
  Tensor t{};
  t.data = const_cast<void*>(data);
  t.dtype = static_cast<int32_t>(dtype);
  t.ndim = static_cast<int32_t>(kDims);
  for (size_t i = 0; i < kDims; ++i) {
    t.shape[i] = shape[i];
    t.stride[i] = strides[i];
  }
  return t;
}

// A C structure of arguments with typed setters for the options that C keeps as integers.
template <class CArguments>
struct ArgumentsOf : CArguments {
  void set_cp_mode(CpMode mode) { this->options.cp_mode = static_cast<int32_t>(mode); }
  // Where every tensor of the call lies; `index` is the CUDA ordinal.
  void set_device(DeviceType type, int32_t index = 0) {
    this->options.device_type = static_cast<int32_t>(type);
    this->options.device_index = index;
  }
};

// Arguments start from the defaults of the C structures; see flash_qla.h for each member's shape and unit.
struct ForwardArguments : ArgumentsOf<flash_qla_forward_arguments> {
  ForwardArguments() { flash_qla_forward_arguments_init(this); }
};
struct BackwardArguments : ArgumentsOf<flash_qla_backward_arguments> {
  BackwardArguments() { flash_qla_backward_arguments_init(this); }
};

namespace detail {

// All that a C function writes as text, or the message of its failure. `write` takes (char*, size_t).
template <class Write>
std::string whole_text(Write&& write) {
  for (size_t size = 1024;; size *= 2) {
    std::string text(size, '\0');
    const Status status = write(text.data(), size);
    if (!status.ok()) return status.message();
    text.resize(std::strlen(text.c_str()));
    if (text.size() + 1 < size) return text;  // else it may have been cut
  }
}

}  // namespace detail

// Every operation has the three calls of flash_qla.h, and explain(): which path a call takes and why others do not
// ("path: NAME" is its first line), or the message of the refusal where the call is refused.

// Prefill and training forward.
struct ChunkForward {
  static Status can_implement(const ForwardArguments& args) { return flash_qla_chunk_forward_can_implement(&args); }
  static Status workspace_size(const ForwardArguments& args, size_t* bytes) {
    return flash_qla_chunk_forward_workspace_size(&args, bytes);
  }
  static Status run(const ForwardArguments& args, void* workspace, size_t bytes, void* stream = nullptr) {
    return flash_qla_chunk_forward_run(&args, workspace, bytes, stream);
  }
  static std::string explain(const ForwardArguments& args) {
    return detail::whole_text(
        [&](char* text, size_t size) { return flash_qla_chunk_forward_explain(&args, text, size); });
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
  static std::string explain(const ForwardArguments& args) {
    return detail::whole_text([&](char* text, size_t size) { return flash_qla_recurrent_explain(&args, text, size); });
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
  static std::string explain(const BackwardArguments& args) {
    return detail::whole_text(
        [&](char* text, size_t size) { return flash_qla_chunk_backward_explain(&args, text, size); });
  }
};

// Version, commit, compiled-in paths and the instruction sets and GPUs found, as "key: value" lines.
inline std::string build_info() { return detail::whole_text(flash_qla_build_info); }

}  // namespace flash_qla

#include "flash_qla/context_parallel.hpp"
#include "flash_qla/layer.hpp"
#include "flash_qla/verify.hpp"
