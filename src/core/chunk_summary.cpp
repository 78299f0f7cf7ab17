// chunk_summary: its rules, those that it shares with its backward, and its C entry points.
#include "core/context_parallel.h"
#include "core/operation.h"

namespace flash_qla {

Status validate_parts(const Validator& check, const Named& rows, const Named& first_flag, const Named& second_flag,
                      SummaryProblem* p) {
  FLASH_QLA_RETURN_IF_ERROR(check.require(rows));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(rows, Role::kInput, {{-1, ""}, {2, "2: first and last"}}));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(rows));
  p->P = rows.tensor.shape[0];
  for (const Named& t : {first_flag, second_flag}) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(t));
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kInput, {{p->P, "rows.shape[0]"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(t, DType::kBool, "bool"));
  }
  return Status();
}

Status validate_link(const Validator& check, const Named& link, std::initializer_list<Extent> extents,
                     const Problem& p) {
  FLASH_QLA_RETURN_IF_ERROR(check.require(link));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(link, Role::kOutput, extents));
  return p.dtype == DType::kFloat64 ? check.dtype_is(link, DType::kFloat64, "float64, as k is")
                                    : check.dtype_is(link, DType::kFloat32, "float32");
}

Status check_offsets(const flash_qla_options& options, const Tensor& cu_seqlens, const char* operation,
                     const Problem& p, void* stream) {
  flash_qla_backward_arguments args;
  flash_qla_backward_arguments_init(&args);
  args.options = options;
  args.cu_seqlens = cu_seqlens;
  return check_backward_data(args, operation, p, stream);
}

namespace {

using Arguments = flash_qla_chunk_summary_arguments;

Status validate_summary(const Arguments& args, const char* operation, bool need_data, SummaryProblem* p) {
  const Validator check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.sizes({"k", args.k}, {"k", args.k}, {"v", args.v}, args.cu_seqlens, p));
  FLASH_QLA_RETURN_IF_ERROR(check.gates(args.g, args.beta, args.A_log, args.dt_bias, *p));
  if (present(args.initial_state)) {
    const Named t{"initial_state", args.initial_state};
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(t, Role::kInput, {p->N, "the number of sequences"}, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  FLASH_QLA_RETURN_IF_ERROR(
      validate_parts(check, {"rows", args.rows}, {"leaves", args.leaves}, {"through", args.through}, p));
  const Extent parts{p->P, "rows.shape[0]"}, heads{p->Hv, "v.shape[2]"}, key{p->K, "k.shape[3]"};
  FLASH_QLA_RETURN_IF_ERROR(validate_link(check, {"S", args.S}, {parts, heads, key, {p->V, "v.shape[3]"}}, *p));
  FLASH_QLA_RETURN_IF_ERROR(validate_link(check, {"M", args.M}, {parts, heads, key, key}, *p));
  FLASH_QLA_RETURN_IF_ERROR(validate_link(check, {"kind", args.kind}, {parts, heads}, *p));
  if (!present(args.carry)) return Status();
  return check.carry({"carry", args.carry}, Role::kOutput, parts);
}

struct ChunkSummaryOp {
  using Arguments = flash_qla_chunk_summary_arguments;
  using Problem = SummaryProblem;
  static constexpr const char* kName = "chunk_summary";
  static const std::vector<const ChunkSummaryPath*>& paths() { return chunk_summary_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.k.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_summary(a, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_offsets(a.options, a.cu_seqlens, name, p, stream);
  }
};

// Floats of a part's carry on the path that computes the call.
Status carry_floats(const Arguments& args, const char* name, int64_t* floats) {
  SummaryProblem problem;
  FLASH_QLA_RETURN_IF_ERROR(validate_summary(args, name, false, &problem));
  const ChunkSummaryPath* path;
  FLASH_QLA_RETURN_IF_ERROR(choose<ChunkSummaryOp>(args, name, problem, &path, nullptr));
  *floats = path->carry_floats == nullptr ? 0 : path->carry_floats(args, problem);
  return Status();
}

// A carry that nobody writes would be taken for one.
Status check_carry(const Arguments& args, const char* name) {
  if (!present(args.carry)) return Status();
  int64_t floats = 0;
  FLASH_QLA_RETURN_IF_ERROR(carry_floats(args, name, &floats));
  if (args.carry.ndim == 2 && args.carry.shape[1] == floats && floats > 0) return Status();
  return make_status(FLASH_QLA_INVALID_VALUE,
                     "%s: carry.shape[1] (%lld) must be what flash_qla_chunk_summary_carry_size says (%lld; 0: none)",
                     name, static_cast<long long>(args.carry.ndim == 2 ? args.carry.shape[1] : -1),
                     static_cast<long long>(floats));
}

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_chunk_summary_arguments_init(flash_qla_chunk_summary_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_chunk_summary_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
}

flash_qla_status flash_qla_chunk_summary_can_implement(const flash_qla_chunk_summary_arguments* args) {
  return can_implement<ChunkSummaryOp>(args);
}
flash_qla_status flash_qla_chunk_summary_workspace_size(const flash_qla_chunk_summary_arguments* args, size_t* bytes) {
  return workspace_size<ChunkSummaryOp>(args, bytes);
}
flash_qla_status flash_qla_chunk_summary_run(const flash_qla_chunk_summary_arguments* args, void* workspace,
                                             size_t bytes, void* stream) {
  const flash_qla_status status =
      guarded_call<ChunkSummaryOp>(args, [&](const char* name) { return check_carry(*args, name); });
  return status.code != FLASH_QLA_OK ? status : run<ChunkSummaryOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_chunk_summary_carry_size(const flash_qla_chunk_summary_arguments* args, int64_t* floats) {
  return guarded_call<ChunkSummaryOp>(args, [&](const char* name) -> Status {
    if (floats == nullptr) return make_status(FLASH_QLA_INVALID_VALUE, "%s: floats (NULL) must be given", name);
    return carry_floats(*args, name, floats);
  });
}
flash_qla_status flash_qla_chunk_summary_explain(const flash_qla_chunk_summary_arguments* args, char* text,
                                                 size_t size) {
  return explain<ChunkSummaryOp>(args, text, size);
}

}  // extern "C"
