// chunk_summary_backward: its rules, and its C entry points.
#include "core/context_parallel.h"
#include "core/operation.h"

namespace flash_qla {
namespace {

using Arguments = flash_qla_chunk_summary_backward_arguments;

// v itself is not needed, and stands for its sizes: heads and values are those of R.
Tensor shape_of_v(const Arguments& args) {
  Tensor v{};
  v.dtype = args.q.dtype;
  v.ndim = 4;
  v.shape[0] = args.q.shape[0];
  v.shape[1] = args.q.shape[1];
  v.shape[2] = args.R.shape[1];
  v.shape[3] = args.R.shape[3];
  return v;
}

Status validate_backward_summary(const Arguments& args, const char* operation, bool need_data, SummaryProblem* p) {
  const Validator check(operation, args.options, need_data);
  const Named R{"R", args.R};
  FLASH_QLA_RETURN_IF_ERROR(check.require(R));
  FLASH_QLA_RETURN_IF_ERROR(check.rank(R, 4));
  FLASH_QLA_RETURN_IF_ERROR(check.require({"q", args.q}));
  const Tensor v = shape_of_v(args);
  FLASH_QLA_RETURN_IF_ERROR(
      Validator(operation, args.options, false).sizes({"q", args.q}, {"k", args.k}, {"R", v}, args.cu_seqlens, p));
  for (const Named& t : {Named{"q", args.q}, Named{"k", args.k}}) {
    FLASH_QLA_RETURN_IF_ERROR(check.memory(t, Role::kInput));
  }
  if (p->varlen) FLASH_QLA_RETURN_IF_ERROR(check.memory({"cu_seqlens", args.cu_seqlens}, Role::kInput));
  FLASH_QLA_RETURN_IF_ERROR(check.gates(args.g, args.beta, args.A_log, args.dt_bias, *p));
  if (present(args.d_o)) {
    const Named t{"do", args.d_o};
    FLASH_QLA_RETURN_IF_ERROR(check.value_rows(t, Role::kInput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  if (present(args.dht)) {
    const Named t{"dht", args.dht};
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(t, Role::kInput, {p->N, "the number of sequences"}, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  if (present(args.A)) {
    const Named t{"A", args.A};
    const Extent chunk{kChunkSize, "the chunk size"};
    FLASH_QLA_RETURN_IF_ERROR(
        check.shape(t, Role::kInput, {{p->B, "q.shape[0]"}, {p->T, "q.shape[1]"}, {p->Hv, "R.shape[1]"}, chunk}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(t, dtype(args.k), "that of k"));
  }
  FLASH_QLA_RETURN_IF_ERROR(
      validate_parts(check, {"rows", args.rows}, {"enters", args.enters}, {"through", args.through}, p));
  const Extent parts{p->P, "rows.shape[0]"}, heads{p->Hv, "R.shape[1]"};
  const Named forward_kind{"forward_kind", args.forward_kind};
  FLASH_QLA_RETURN_IF_ERROR(check.require(forward_kind));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(forward_kind, Role::kInput, {parts, heads}));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_accumulator(forward_kind, *p));
  FLASH_QLA_RETURN_IF_ERROR(validate_link(check, R, {parts, heads, {p->K, "q.shape[3]"}, {-1, ""}}, *p));
  return validate_link(check, {"kind", args.kind}, {parts, heads}, *p);
}

struct ChunkSummaryBackwardOp {
  using Arguments = flash_qla_chunk_summary_backward_arguments;
  using Problem = SummaryProblem;
  static constexpr const char* kName = "chunk_summary_backward";
  static const std::vector<const ChunkSummaryBackwardPath*>& paths() { return chunk_summary_backward_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.q.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_backward_summary(a, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_offsets(a.options, a.cu_seqlens, name, p, stream);
  }
};

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_chunk_summary_backward_arguments_init(flash_qla_chunk_summary_backward_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_chunk_summary_backward_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
}

flash_qla_status flash_qla_chunk_summary_backward_can_implement(
    const flash_qla_chunk_summary_backward_arguments* args) {
  return can_implement<ChunkSummaryBackwardOp>(args);
}
flash_qla_status flash_qla_chunk_summary_backward_workspace_size(const flash_qla_chunk_summary_backward_arguments* args,
                                                                 size_t* bytes) {
  return workspace_size<ChunkSummaryBackwardOp>(args, bytes);
}
flash_qla_status flash_qla_chunk_summary_backward_run(const flash_qla_chunk_summary_backward_arguments* args,
                                                      void* workspace, size_t bytes, void* stream) {
  return run<ChunkSummaryBackwardOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_chunk_summary_backward_explain(const flash_qla_chunk_summary_backward_arguments* args,
                                                          char* text, size_t size) {
  return explain<ChunkSummaryBackwardOp>(args, text, size);
}

}  // extern "C"
