// The gated norm: its rules and its C entry points.
#include "core/norm.h"

#include "core/operation.h"
#include "core/tensor_checks.h"
#include "flash_qla/norm.h"

namespace flash_qla {
namespace {

class NormRules : public TensorChecks {
 public:
  using TensorChecks::TensorChecks;

  // Rules that forward and backward share; Arguments is either's structure.
  template <class Arguments>
  Status common(const Arguments& args, NormProblem* p) const {
    FLASH_QLA_RETURN_IF_ERROR(device_options());
    if (args.activation != FLASH_QLA_ACTIVATION_SILU && args.activation != FLASH_QLA_ACTIVATION_SIGMOID) {
      return value_error("activation (%d) must be 1 (silu) or 2 (sigmoid)", args.activation);
    }
    if (!(args.eps >= 0.0)) return value_error("eps (%g) must be at least 0", args.eps);
    const Named x{"x", args.x}, weight{"weight", args.weight}, bias{"bias", args.bias};
    FLASH_QLA_RETURN_IF_ERROR(require(x));
    if (!is_float(dtype(x.tensor)) && dtype(x.tensor) != DType::kFloat64) {
      return type_error("x.dtype (%s) must be float32, bfloat16, float16 or float64", dtype_name(x.tensor));
    }
    const int32_t dims = x.tensor.ndim;
    if (dims < 1 || dims > 4) return value_error("x.ndim (%d) must be from 1 to 4", dims);
    FLASH_QLA_RETURN_IF_ERROR(rank(x, dims));
    FLASH_QLA_RETURN_IF_ERROR(memory(x, Role::kInput));
    p->dtype = dtype(x.tensor);
    p->V = x.tensor.shape[dims - 1];
    if (p->V < 1 || p->V > FLASH_QLA_MAX_TOKENS) {
      return value_error("x.shape[%d] (%lld) must be from 1 to %d", dims - 1, as_ll(p->V), FLASH_QLA_MAX_TOKENS);
    }
    p->rows = 1;
    for (int32_t i = 0; i + 1 < dims; ++i) p->rows *= x.tensor.shape[i];
    FLASH_QLA_RETURN_IF_ERROR(like_x({"z", args.z}, args.x, Role::kInput));
    for (const Named& t : {weight, bias}) FLASH_QLA_RETURN_IF_ERROR(vector(t, Role::kInput, *p));
    return Status();
  }

  // As x, or absent.
  Status like_x(const Named& t, const Tensor& x, Role role) const {
    if (!present(t.tensor)) return Status();
    FLASH_QLA_RETURN_IF_ERROR(rank(t, x.ndim));
    for (int32_t i = 0; i < x.ndim; ++i) {
      if (t.tensor.shape[i] != x.shape[i]) {
        return value_error("%s.shape[%d] (%lld) must be x.shape[%d] (%lld)", t.name, i, as_ll(t.tensor.shape[i]), i,
                           as_ll(x.shape[i]));
      }
    }
    FLASH_QLA_RETURN_IF_ERROR(memory(t, role));
    return dtype_is(t, dtype(x), "that of x");
  }

  // [V] float, or absent.
  Status vector(const Named& t, Role role, const NormProblem& p) const {
    if (!present(t.tensor)) return Status();
    FLASH_QLA_RETURN_IF_ERROR(shape(t, role, {{p.V, "the last of x"}}));
    return dtype_float(t, p.dtype, "x");
  }
};

Status validate(const flash_qla_norm_gated_arguments& args, const char* operation, bool need_data, NormProblem* p) {
  const NormRules check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.common(args, p));
  const Named y{"y", args.y}, inverse_rms{"inverse_rms", args.inverse_rms};
  FLASH_QLA_RETURN_IF_ERROR(check.require(y));
  FLASH_QLA_RETURN_IF_ERROR(check.like_x(y, args.x, Role::kOutput));
  if (present(inverse_rms.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.shape(inverse_rms, Role::kOutput, {{p->rows, "the rows of x"}}));
    const bool wide = p->dtype == DType::kFloat64;
    FLASH_QLA_RETURN_IF_ERROR(
        check.dtype_is(inverse_rms, wide ? DType::kFloat64 : DType::kFloat32, wide ? "float64, as x is" : "float32"));
  }
  const Named written[] = {y, inverse_rms};
  const Named others[] = {{"x", args.x}, {"z", args.z}, {"weight", args.weight}, {"bias", args.bias}};
  return check.apart(written, others);
}

Status validate(const flash_qla_norm_gated_backward_arguments& args, const char* operation, bool need_data,
                NormProblem* p) {
  const NormRules check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.common(args, p));
  const Named dy{"dy", args.dy}, dz{"dz", args.dz};
  FLASH_QLA_RETURN_IF_ERROR(check.require(dy));
  FLASH_QLA_RETURN_IF_ERROR(check.like_x(dy, args.x, Role::kInput));
  FLASH_QLA_RETURN_IF_ERROR(check.like_x({"dx", args.dx}, args.x, Role::kOutput));
  FLASH_QLA_RETURN_IF_ERROR(check.like_x(dz, args.x, Role::kOutput));
  if (present(dz.tensor)) FLASH_QLA_RETURN_IF_ERROR(check.require({"z", args.z}));
  FLASH_QLA_RETURN_IF_ERROR(check.vector({"dweight", args.dweight}, Role::kOutput, *p));
  return check.vector({"dbias", args.dbias}, Role::kOutput, *p);
}

template <class ArgumentsType, const std::vector<const Path<ArgumentsType, NormProblem>*>& (*kPaths)()>
struct NormOp {
  using Arguments = ArgumentsType;
  using Problem = NormProblem;
  static constexpr const char* kName =
      std::is_same_v<Arguments, flash_qla_norm_gated_arguments> ? "norm_gated" : "norm_gated_backward";
  static const std::vector<const Path<Arguments, NormProblem>*>& paths() { return kPaths(); }
  static bool shapes_alone(const Arguments& a) { return a.x.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return flash_qla::validate(a, name, need_data, p);
  }
  static Status check_data(const Arguments&, const char*, const Problem&, void*) { return Status(); }
};
using NormGatedOp = NormOp<flash_qla_norm_gated_arguments, norm_gated_paths>;
using NormGatedBackwardOp = NormOp<flash_qla_norm_gated_backward_arguments, norm_gated_backward_paths>;

constexpr double kDefaultEps = 1e-6;

template <class Arguments>
void fill_defaults(Arguments* args) {
  if (args == nullptr) return;
  *args = Arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
  args->eps = kDefaultEps;
  args->activation = FLASH_QLA_ACTIVATION_SILU;
}

}  // namespace

RowShape row_shape(const Tensor& x) {
  RowShape shape;
  int64_t* const extents[] = {&shape.inner, &shape.middle, &shape.outer};
  for (int32_t i = 0; i + 1 < x.ndim; ++i) *extents[i] = x.shape[x.ndim - 2 - i];
  return shape;
}

RowView row_view(const Tensor& t) {
  RowView view{t.data, dtype(t), 0, 0, 0, t.ndim > 0 ? t.stride[t.ndim - 1] : 0, row_shape(t)};
  int64_t* const strides[] = {&view.inner, &view.middle, &view.outer};
  for (int32_t i = 0; i + 1 < t.ndim; ++i) *strides[i] = t.stride[t.ndim - 2 - i];
  return view;
}

}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_norm_gated_arguments_init(flash_qla_norm_gated_arguments* args) { fill_defaults(args); }
void flash_qla_norm_gated_backward_arguments_init(flash_qla_norm_gated_backward_arguments* args) {
  fill_defaults(args);
}

flash_qla_status flash_qla_norm_gated_can_implement(const flash_qla_norm_gated_arguments* args) {
  return can_implement<NormGatedOp>(args);
}
flash_qla_status flash_qla_norm_gated_workspace_size(const flash_qla_norm_gated_arguments* args, size_t* bytes) {
  return workspace_size<NormGatedOp>(args, bytes);
}
flash_qla_status flash_qla_norm_gated_run(const flash_qla_norm_gated_arguments* args, void* workspace, size_t bytes,
                                          void* stream) {
  return run<NormGatedOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_norm_gated_explain(const flash_qla_norm_gated_arguments* args, char* text, size_t size) {
  return explain<NormGatedOp>(args, text, size);
}

flash_qla_status flash_qla_norm_gated_backward_can_implement(const flash_qla_norm_gated_backward_arguments* args) {
  return can_implement<NormGatedBackwardOp>(args);
}
flash_qla_status flash_qla_norm_gated_backward_workspace_size(const flash_qla_norm_gated_backward_arguments* args,
                                                              size_t* bytes) {
  return workspace_size<NormGatedBackwardOp>(args, bytes);
}
flash_qla_status flash_qla_norm_gated_backward_run(const flash_qla_norm_gated_backward_arguments* args, void* workspace,
                                                   size_t bytes, void* stream) {
  return run<NormGatedBackwardOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_norm_gated_backward_explain(const flash_qla_norm_gated_backward_arguments* args, char* text,
                                                       size_t size) {
  return explain<NormGatedBackwardOp>(args, text, size);
}

}  // extern "C"
