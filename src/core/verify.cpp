// Verification of draft tokens: its rules, and its C entry points.
#include "core/operation.h"
#include "core/validator.h"

namespace flash_qla {
namespace {

using Arguments = flash_qla_verify_arguments;

Status validate_states_out(const Validator& check, const Arguments& args, const Problem& p) {
  const Named out{"states_out", args.states_out}, indices{"states_out_indices", args.states_out_indices};
  if (!present(out.tensor)) return check.forbid(indices, "must come with states_out");
  const Extent tokens{p.T, "q.shape[1]"}, heads{p.Hv, "v.shape[2]"};
  const Extent key{p.K, "q.shape[3]"}, value{p.V, "v.shape[3]"};
  const bool v_first = args.options.state_v_first != 0;
  FLASH_QLA_RETURN_IF_ERROR(
      check.shape(out, Role::kOutput, {{-1, ""}, tokens, heads, v_first ? value : key, v_first ? key : value}));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(out, dtype(args.state_pool), "that of state_pool"));
  FLASH_QLA_RETURN_IF_ERROR(check.whole_states(out));
  if (present(indices.tensor)) return check.vector_of_sequences(indices, p, 0);
  if (out.tensor.shape[0] < p.N) {
    return check.value_error(
        "states_out.shape[0] (%lld) must be at least %lld, the number of sequences, without "
        "states_out_indices",
        Validator::as_ll(out.tensor.shape[0]), Validator::as_ll(p.N));
  }
  return Status();
}

Status validate_verify(const Arguments& args, const char* operation, bool need_data, Problem* p) {
  const Validator check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.sizes({"q", args.q}, {"k", args.k}, {"v", args.v}, Tensor{}, p));
  FLASH_QLA_RETURN_IF_ERROR(check.gates(args.g, args.beta, args.A_log, args.dt_bias, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.draft_tokens(*p));
  const Named pool{"state_pool", args.state_pool}, initial{"initial_state_indices", args.initial_state_indices},
      parents{"parents", args.parents}, o{"o", args.o};
  FLASH_QLA_RETURN_IF_ERROR(check.require(pool));
  FLASH_QLA_RETURN_IF_ERROR(check.state_shape(pool, Role::kInput, {-1, ""}, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(pool, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.whole_states(pool));
  FLASH_QLA_RETURN_IF_ERROR(check.require(initial));
  FLASH_QLA_RETURN_IF_ERROR(check.vector_of_sequences(initial, *p, 0));
  if (present(parents.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(
        check.shape(parents, Role::kInput, {{p->N, "the number of sequences"}, {p->T, "q.shape[1]"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(parents));
  }
  FLASH_QLA_RETURN_IF_ERROR(validate_states_out(check, args, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.require(o));
  FLASH_QLA_RETURN_IF_ERROR(check.value_rows(o, Role::kOutput, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(o, p->dtype, "that of q"));
  const Named written[] = {{"states_out", args.states_out}, o};
  const Named others[] = {{"q", args.q},
                          {"k", args.k},
                          {"v", args.v},
                          {"g", args.g},
                          {"beta", args.beta},
                          {"A_log", args.A_log},
                          {"dt_bias", args.dt_bias},
                          pool,
                          initial,
                          parents,
                          {"states_out_indices", args.states_out_indices}};
  return check.apart(written, others);
}

struct VerifyOp {
  using Arguments = flash_qla_verify_arguments;
  using Problem = flash_qla::Problem;
  static constexpr const char* kName = "verify";
  static const std::vector<const VerifyPath*>& paths() { return verify_paths(); }
  static bool shapes_alone(const Arguments& a) { return a.q.data == nullptr; }
  static Status validate(const Arguments& a, const char* name, bool need_data, Problem* p) {
    return validate_verify(a, name, need_data, p);
  }
  static Status check_data(const Arguments& a, const char* name, const Problem& p, void* stream) {
    return check_verify_data(a, name, p, stream);
  }
};

}  // namespace
}  // namespace flash_qla

using namespace flash_qla;  // this file defines the C functions of that namespace, outside of it

extern "C" {

void flash_qla_verify_arguments_init(flash_qla_verify_arguments* args) {
  if (args == nullptr) return;
  *args = flash_qla_verify_arguments{};
  args->struct_size = sizeof(*args);
  args->options = default_options();
  args->null_index = -1;
}

flash_qla_status flash_qla_verify_can_implement(const flash_qla_verify_arguments* args) {
  return can_implement<VerifyOp>(args);
}
flash_qla_status flash_qla_verify_workspace_size(const flash_qla_verify_arguments* args, size_t* bytes) {
  return workspace_size<VerifyOp>(args, bytes);
}
flash_qla_status flash_qla_verify_run(const flash_qla_verify_arguments* args, void* workspace, size_t bytes,
                                      void* stream) {
  return run<VerifyOp>(args, workspace, bytes, stream);
}
flash_qla_status flash_qla_verify_explain(const flash_qla_verify_arguments* args, char* text, size_t size) {
  return explain<VerifyOp>(args, text, size);
}

}  // extern "C"
