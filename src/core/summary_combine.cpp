// summary_combine: its rules, and its C entry points.
#include "core/context_parallel.h"
#include "core/operation.h"

namespace flash_qla {
namespace {

using Arguments = flash_qla_summary_combine_arguments;

Status validate_outputs(const Validator& check, const Arguments& args, CombineProblem* p) {
  const Named place{"place", args.place}, wanted{"wanted", args.wanted}, state{"state", args.state};
  const Extent streams{p->C, "S.shape[1]"}, heads{p->Hv, "S.shape[2]"}, key{p->K, "S.shape[3]"},
      value{p->V, "S.shape[4]"};
  const auto output = [&](const Named& t, std::initializer_list<Extent> extents) -> Status {
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, extents));
    return check.dtype_is(t, p->dtype, "that of S");
  };
  if (present(state.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(place));
    FLASH_QLA_RETURN_IF_ERROR(check.shape(place, Role::kInput, {{-1, ""}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(place));
    p->P = place.tensor.shape[0];
    const Extent parts{p->P, "place.shape[0]"};
    if (present(wanted.tensor)) {
      FLASH_QLA_RETURN_IF_ERROR(check.shape(wanted, Role::kInput, {parts}));
      FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(wanted, DType::kBool, "bool"));
    }
    FLASH_QLA_RETURN_IF_ERROR(output(state, {parts, streams, heads, key, value}));
  }
  const Named composed_S{"composed_S", args.composed_S}, composed_M{"composed_M", args.composed_M},
      composed_kind{"composed_kind", args.composed_kind};
  const bool composes = present(args.composed_S) || present(args.composed_M) || present(args.composed_kind);
  if (!composes && !present(state.tensor)) return check.value_error("state (None) must be given, or composed_S");
  if (!composes) return Status();
  for (const Named& t : {composed_S, composed_M, composed_kind}) FLASH_QLA_RETURN_IF_ERROR(check.require(t));
  FLASH_QLA_RETURN_IF_ERROR(output(composed_S, {streams, heads, key, value}));
  FLASH_QLA_RETURN_IF_ERROR(output(composed_M, {streams, heads, key, key}));
  return output(composed_kind, {streams, heads});
}

Status validate_combine(const Arguments& args, const char* operation, bool need_data, CombineProblem* p) {
  const Validator check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.options());
  const Named S{"S", args.S}, M{"M", args.M}, kind{"kind", args.kind}, order{"order", args.order};
  FLASH_QLA_RETURN_IF_ERROR(check.require(S));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(S, Role::kInput, {{-1, ""}, {-1, ""}, {-1, ""}, {-1, ""}, {-1, ""}}));
  p->dtype = dtype(args.S);
  if (p->dtype != DType::kFloat32 && p->dtype != DType::kFloat64) {
    return check.type_error("S.dtype (%s) must be float32 or float64", dtype_name(args.S));
  }
  p->L = args.S.shape[0];
  p->C = args.S.shape[1];
  p->Hv = args.S.shape[2];
  p->K = args.S.shape[3];
  p->V = args.S.shape[4];
  for (int i = 3; i < 5; ++i) {
    if (args.S.shape[i] < 1 || args.S.shape[i] > FLASH_QLA_MAX_HEAD_DIM) {
      return check.value_error("S.shape[%d] (%lld) must be from 1 to %d", i, Validator::as_ll(args.S.shape[i]),
                               FLASH_QLA_MAX_HEAD_DIM);
    }
  }
  const Extent links{p->L, "S.shape[0]"}, streams{p->C, "S.shape[1]"}, heads{p->Hv, "S.shape[2]"},
      key{p->K, "S.shape[3]"};
  FLASH_QLA_RETURN_IF_ERROR(check.require(M));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(M, Role::kInput, {links, streams, heads, key, key}));
  FLASH_QLA_RETURN_IF_ERROR(check.require(kind));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(kind, Role::kInput, {links, streams, heads}));
  for (const Named& t : {M, kind}) FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(t, p->dtype, "that of S"));
  if (present(order.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.shape(order, Role::kInput, {links}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(order));
  }
  return validate_outputs(check, args, p);
}

struct SummaryCombineOp {
  using Arguments = flash_qla_summary_combine_arguments;
  using Problem = CombineProblem;
  static constexpr const char* kName = "summary_combine";
  static const std::vector<const SummaryCombinePath*>& paths() { return summary_combine_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.S.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_combine(a, name, need_data, p);
  }
  static Status check_data(const Arguments&, const char*, const Problem&, void*) { return Status(); }
};

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_summary_combine_arguments_init(flash_qla_summary_combine_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_summary_combine_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
}

flash_qla_status flash_qla_summary_combine_can_implement(const flash_qla_summary_combine_arguments* args) {
  return can_implement<SummaryCombineOp>(args);
}
flash_qla_status flash_qla_summary_combine_workspace_size(const flash_qla_summary_combine_arguments* args,
                                                          size_t* bytes) {
  return workspace_size<SummaryCombineOp>(args, bytes);
}
flash_qla_status flash_qla_summary_combine_run(const flash_qla_summary_combine_arguments* args, void* workspace,
                                               size_t bytes, void* stream) {
  return run<SummaryCombineOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_summary_combine_explain(const flash_qla_summary_combine_arguments* args, char* text,
                                                   size_t size) {
  return explain<SummaryCombineOp>(args, text, size);
}

}  // extern "C"
