// sequence_cut: its rules, and its C entry points.
#include "core/context_parallel.h"
#include "core/operation.h"

namespace flash_qla {
namespace {

using Arguments = flash_qla_sequence_cut_arguments;

Status validate_cut(const Arguments& args, const char* operation, bool need_data, CutProblem* p) {
  const Validator check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.options());
  const Named cu{"cu_seqlens", args.cu_seqlens}, bounds{"bounds", args.bounds},
      local{"local_cu_seqlens", args.local_cu_seqlens};
  for (const Named& t : {cu, bounds, local}) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(t));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(t));
  }
  FLASH_QLA_RETURN_IF_ERROR(check.shape(cu, Role::kInput, {{-1, ""}}));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(bounds, Role::kInput, {{-1, ""}, {2, "2: begin and end"}}));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(local, Role::kOutput, {{-1, ""}}));
  for (const Named& t : {cu, local}) {
    if (t.tensor.shape[0] < 1) {
      return check.value_error("%s.shape[0] (0) must be at least 1: the number of sequences + 1", t.name);
    }
  }
  p->N = args.cu_seqlens.shape[0] - 1;
  p->P = args.bounds.shape[0];
  p->R = args.local_cu_seqlens.shape[0] - 1;
  if (p->P < 1) return check.value_error("bounds.shape[0] (0) must be at least 1: a rank holds a part or more");
  if (args.last_part < -1 || args.last_part >= p->P) {
    return check.value_error("last_part (%lld) must be from -1 to %lld", Validator::as_ll(args.last_part),
                             Validator::as_ll(p->P - 1));
  }
  // P * N without overflow: neither is above what memory holds.
  if (args.all_rows && (p->R % p->P != 0 || p->R / p->P != p->N)) {
    return check.value_error("local_cu_seqlens.shape[0] (%lld) must be %lld * %lld + 1 with all_rows",
                             Validator::as_ll(p->R + 1), Validator::as_ll(p->P), Validator::as_ll(p->N));
  }
  const Extent rows{p->R, "local_cu_seqlens.shape[0] - 1"}, parts{p->P, "bounds.shape[0]"};
  for (const Named& t : {Named{"starts_here", args.starts_here}, Named{"ends_here", args.ends_here}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, {rows}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(t, DType::kBool, "bool"));
  }
  for (const Named& t : {Named{"enters", args.enters}, Named{"leaves", args.leaves}, Named{"through", args.through}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, {parts}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(t, DType::kBool, "bool"));
  }
  for (const Named& t : {Named{"entering_rows", args.entering_rows}, Named{"leaving_rows", args.leaving_rows},
                         Named{"halo_tokens", args.halo_tokens}, Named{"row_counts", args.row_counts}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, {parts}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(t));
  }
  if (present(args.rows)) {
    const Named t{"rows", args.rows};
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, {parts, {2, "2: first and last"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(t));
  }
  if (present(args.sequences)) {
    const Named t{"sequences", args.sequences};
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, {rows}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(t));
  }
  return Status();
}

struct SequenceCutOp {
  using Arguments = flash_qla_sequence_cut_arguments;
  using Problem = CutProblem;
  static constexpr const char* kName = "sequence_cut";
  static const std::vector<const SequenceCutPath*>& paths() { return sequence_cut_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.cu_seqlens.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_cut(a, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& cut, void* stream) {
    flash_qla::Problem p;
    p.N = cut.N;
    p.T = FLASH_QLA_MAX_TOKENS;
    p.varlen = true;
    return check_offsets(a.options, a.cu_seqlens, name, p, stream);
  }
};

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_sequence_cut_arguments_init(flash_qla_sequence_cut_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_sequence_cut_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
  args->last_part = -1;
}

flash_qla_status flash_qla_sequence_cut_can_implement(const flash_qla_sequence_cut_arguments* args) {
  return can_implement<SequenceCutOp>(args);
}
flash_qla_status flash_qla_sequence_cut_workspace_size(const flash_qla_sequence_cut_arguments* args, size_t* bytes) {
  return workspace_size<SequenceCutOp>(args, bytes);
}
flash_qla_status flash_qla_sequence_cut_run(const flash_qla_sequence_cut_arguments* args, void* workspace, size_t bytes,
                                            void* stream) {
  return run<SequenceCutOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_sequence_cut_explain(const flash_qla_sequence_cut_arguments* args, char* text, size_t size) {
  return explain<SequenceCutOp>(args, text, size);
}

}  // extern "C"
