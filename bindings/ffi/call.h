// What the exports of all operations share: tensors as the C structures' views, options, scratch, and statuses as
// exceptions.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>
#include <flash_qla/flash_qla.hpp>

#include <cmath>
#include <string>

namespace flash_qla::python {

namespace ffi = tvm::ffi;
using OptionalTensor = ffi::Optional<ffi::TensorView>;

// Longest text that explain() and build_info() return: a line per path, and there are few.
constexpr size_t kTextSize = 8192;

// Raises the Python exception that belongs to a status; the kinds are those of the contract.
inline void raise_if_refused(const flash_qla_status& status) {
  switch (status.code) {
    case FLASH_QLA_OK:
      return;
    case FLASH_QLA_INVALID_VALUE:
      TVM_FFI_THROW(ValueError) << status.message;
    case FLASH_QLA_INVALID_TYPE:
      TVM_FFI_THROW(TypeError) << status.message;
    case FLASH_QLA_NOT_IMPLEMENTED:
      TVM_FFI_THROW(NotImplementedError) << status.message;
    default:
      TVM_FFI_THROW(RuntimeError) << status.message;
  }
}

inline bool on_cpu(DLDevice device) { return device.device_type == kDLCPU || device.device_type == kDLCUDAHost; }
inline bool on_cuda(DLDevice device) { return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged; }

inline bool same_device(DLDevice a, DLDevice b) {
  return (on_cpu(a) && on_cpu(b)) || (on_cuda(a) && on_cuda(b) && a.device_id == b.device_id);
}

inline std::string describe(DLDevice device) {
  if (on_cpu(device)) return "cpu";
  if (on_cuda(device)) return "cuda:" + std::to_string(device.device_id);
  return "DLPack device type " + std::to_string(static_cast<int>(device.device_type));
}

// The name of a dtype. tvm-ffi's own function throws for complex numbers, which must not happen while a message is
// built.
inline std::string dtype_text(DLDataType type) {
  if (type.code == kDLComplex) return "complex" + std::to_string(type.bits);
  return ffi::DLDataTypeToString(type);
}

// What an argument's dtype must be, in the words of the refusal. The library refuses what it knows and this argument
// does not take; here what it does not know at all.
constexpr const char* kInputs = "float32, bfloat16, float16 or float64";
constexpr const char* kFloats = "float32, bfloat16 or float16";
constexpr const char* kIndices = "int32 or int64";

inline int32_t dtype_of(const char* operation, const char* name, DLDataType type, const char* rule) {
  if (type.lanes == 1) {
    if (type.code == kDLFloat && type.bits == 32) return FLASH_QLA_FLOAT32;
    if (type.code == kDLFloat && type.bits == 16) return FLASH_QLA_FLOAT16;
    if (type.code == kDLFloat && type.bits == 64) return FLASH_QLA_FLOAT64;
    if (type.code == kDLBfloat && type.bits == 16) return FLASH_QLA_BFLOAT16;
    if (type.code == kDLInt && type.bits == 32) return FLASH_QLA_INT32;
    if (type.code == kDLInt && type.bits == 64) return FLASH_QLA_INT64;
    if (type.code == kDLBool && type.bits == 8) return FLASH_QLA_BOOL;
  }
  const std::string given = dtype_text(type);
  TVM_FFI_THROW(TypeError) << operation << ": " << name << ".dtype (" << given << ") must be " << rule;
  TVM_FFI_UNREACHABLE();
}

// Turns the tensors of one call into the C structures' views, and holds each of them to the device of the first, which
// callers know as `first`.
class Call {
 public:
  Call(const char* operation, flash_qla_options* options, const ffi::TensorView& q, const char* first = "q")
      : operation_(operation), first_(first), device_(q.device()) {
    if (on_cpu(device_)) {
      options->device_type = FLASH_QLA_CPU;
    } else if (on_cuda(device_)) {
      options->device_type = FLASH_QLA_CUDA;
      options->device_index = device_.device_id;
      stream_ = TVMFFIEnvGetStream(kDLCUDA, device_.device_id);
    } else {
      TVM_FFI_THROW(NotImplementedError) << operation_ << ": " << first_ << "'s device (" << describe(device_)
                                         << ") must be the CPU or a CUDA device: move the tensors there";
    }
  }

  flash_qla_tensor tensor(const char* name, const ffi::TensorView& view, const char* rule = kFloats) const {
    if (!same_device(view.device(), device_)) {
      TVM_FFI_THROW(TypeError) << operation_ << ": " << name << "'s device (" << describe(view.device())
                               << ") must be that of " << first_ << " (" << describe(device_) << ")";
    }
    flash_qla_tensor t{};
    if (view.ndim() < 1 || view.ndim() > FLASH_QLA_MAX_DIMS) {
      TVM_FFI_THROW(ValueError) << operation_ << ": " << name << ".ndim (" << view.ndim() << ") must be from 1 to "
                                << FLASH_QLA_MAX_DIMS;
    }
    t.data = static_cast<char*>(view.data_ptr()) + view.byte_offset();
    t.ndim = view.ndim();
    t.dtype = dtype_of(operation_, name, view.dtype(), rule);
    for (int32_t i = 0; i < t.ndim; ++i) {
      t.shape[i] = view.size(i);
      t.stride[i] = view.stride(i);
    }
    return t;
  }

  flash_qla_tensor tensor(const char* name, const OptionalTensor& view, const char* rule = kFloats) const {
    return view.has_value() ? tensor(name, view.value(), rule) : flash_qla_tensor{};
  }

  void* stream() const { return stream_; }
  DLDevice device() const { return device_; }

 private:
  const char *operation_, *first_;
  DLDevice device_;
  void* stream_ = nullptr;
};

// Element i of a tensor's first dimension.
inline flash_qla_tensor plane(flash_qla_tensor t, int64_t i) {
  const int64_t bytes = t.dtype == FLASH_QLA_FLOAT64 ? 8 : t.dtype == FLASH_QLA_FLOAT32 ? 4 : 2;
  t.data = static_cast<char*>(t.data) + i * t.stride[0] * bytes;
  for (int32_t d = 1; d < t.ndim; ++d) {
    t.shape[d - 1] = t.shape[d];
    t.stride[d - 1] = t.stride[d];
  }
  --t.ndim;
  return t;
}

// What a call is made for.
enum class Action : int64_t { kRun = 0, kExplain = 1 };

// Explains a call, or makes it. Scratch comes from the allocator of the framework that the tensors are from. Where
// tvm-ffi knows none, nothing is done and the missing bytes are returned: the caller allocates them and calls again. 0:
// the call was made.
template <class Arguments>
ffi::Any run_or_explain(Action action, const Arguments& args, const Call& call, const OptionalTensor& workspace,
                        flash_qla_status (*workspace_size)(const Arguments*, size_t*),
                        flash_qla_status (*run)(const Arguments*, void*, size_t, void*),
                        flash_qla_status (*explain)(const Arguments*, char*, size_t)) {
  if (action == Action::kExplain) {
    std::string text(kTextSize, '\0');
    raise_if_refused(explain(&args, text.data(), text.size()));
    return ffi::String(text.c_str());
  }
  void* scratch = nullptr;
  size_t bytes = 0;
  ffi::Tensor
      allocated;  // given back to the framework at the end: what is queued on the stream comes before its next use
  if (workspace.has_value()) {
    scratch = workspace.value().data_ptr();
    bytes = static_cast<size_t>(workspace.value().numel());
  } else {
    raise_if_refused(workspace_size(&args, &bytes));
    if (bytes > 0) {
      if (TVMFFIEnvGetDLPackManagedTensorAllocator() == nullptr) return static_cast<int64_t>(bytes);
      allocated = ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {static_cast<int64_t>(bytes)},
                                            DLDataType{kDLUInt, 8, 1}, call.device());
      scratch = allocated.data_ptr();
    }
  }
  raise_if_refused(run(&args, scratch, bytes, call.stream()));
  return static_cast<int64_t>(0);
}

// An optional name by value. ffi::Optional::value() returns a copy, whose characters are gone with it.
struct OptionalName {
  explicit OptionalName(const ffi::Optional<ffi::String>& name)
      : given(name.has_value()), text(given ? name.value() : ffi::String()) {}
  bool given;
  ffi::String text;
};

// `operation` and `path` must outlive the call: the options point to their characters, which short strings keep in
// themselves.
inline void fill_options(flash_qla_options* options, const ffi::String& operation, const OptionalName& path,
                         ffi::Optional<double> scale, bool state_v_first, bool use_qk_l2norm_in_kernel,
                         bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval,
                         int64_t cp_mode, bool force_intra_cp, ffi::Optional<double> cp_tolerance,
                         int64_t num_threads) {
  options->operation = operation.c_str();
  options->path = path.given ? path.text.c_str() : nullptr;
  options->scale = scale.has_value() ? scale.value() : std::nan("");
  options->state_v_first = state_v_first;
  options->use_qk_l2norm_in_kernel = use_qk_l2norm_in_kernel;
  options->use_gate_in_kernel = use_gate_in_kernel;
  options->use_beta_sigmoid_in_kernel = use_beta_sigmoid_in_kernel;
  options->allow_neg_eigval = allow_neg_eigval;
  options->cp_mode = static_cast<int32_t>(cp_mode);
  options->force_intra_cp = force_intra_cp;
  options->cp_tolerance = cp_tolerance.has_value() ? cp_tolerance.value() : 0.0;
  options->num_threads = static_cast<int32_t>(num_threads);
}

}  // namespace flash_qla::python
