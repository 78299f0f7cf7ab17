// The exports of the verification of draft tokens for Python.
#include <algorithm>
#include <initializer_list>

#include "call.h"

namespace flash_qla::python {
namespace {

// flash_qla_verify_*: members as in verify.h.
ffi::Any verify(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path, ffi::Optional<double> scale,
                bool state_v_first, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
                bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode, bool force_intra_cp,
                ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::TensorView q, ffi::TensorView k,
                ffi::TensorView v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log, OptionalTensor dt_bias,
                OptionalTensor state_pool, OptionalTensor initial_state_indices, OptionalTensor parents,
                OptionalTensor states_out, OptionalTensor states_out_indices, int64_t null_index, OptionalTensor o,
                OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_verify_arguments args;
  flash_qla_verify_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, q);
  args.q = call.tensor("q", q, kInputs);
  args.k = call.tensor("k", k, kInputs);
  args.v = call.tensor("v", v, kInputs);
  args.g = call.tensor("g", g);
  args.beta = call.tensor("beta", beta);
  args.A_log = call.tensor("A_log", A_log);
  args.dt_bias = call.tensor("dt_bias", dt_bias);
  args.state_pool = call.tensor("state_pool", state_pool);
  args.initial_state_indices = call.tensor("initial_state_indices", initial_state_indices, kIndices);
  args.parents = call.tensor("parents", parents, kIndices);
  args.states_out = call.tensor("states_out", states_out);
  args.states_out_indices = call.tensor("states_out_indices", states_out_indices, kIndices);
  args.null_index = null_index;
  args.o = call.tensor("o", o);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_verify_workspace_size,
                        flash_qla_verify_run, flash_qla_verify_explain);
}

// Scratch bytes of a call that does not exist yet, of max_seqs sequences and max_tokens tokens at most: one sequence
// may have all that a call takes.
int64_t verify_workspace_size(ffi::String operation, ffi::Optional<ffi::String> path, ffi::Optional<double> scale,
                              bool state_v_first, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
                              bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode,
                              bool force_intra_cp, ffi::Optional<double> cp_tolerance, int64_t num_threads, bool cuda,
                              int64_t device_index, DLDataType dtype, DLDataType gate_dtype, DLDataType state_dtype,
                              int64_t max_tokens, int64_t max_seqs, int64_t Hq, int64_t Hv, int64_t K, int64_t V) {
  const OptionalName path_name(path);
  const auto shape_only = [](int32_t type, std::initializer_list<int64_t> shape) {
    return flash_qla::tensor(nullptr, static_cast<flash_qla::DType>(type), shape);
  };
  const int32_t type = dtype_of(operation.c_str(), "dtype", dtype, kInputs);
  const int32_t gate_type = dtype_of(operation.c_str(), "gate_dtype", gate_dtype, kInputs);
  const int32_t state_type = dtype_of(operation.c_str(), "state_dtype", state_dtype, kInputs);
  flash_qla_verify_arguments args;
  flash_qla_verify_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  args.options.device_type = cuda ? FLASH_QLA_CUDA : FLASH_QLA_CPU;
  args.options.device_index = static_cast<int32_t>(device_index);
  const int64_t T = std::min<int64_t>(max_tokens, FLASH_QLA_MAX_DRAFT_TOKENS);
  args.q = args.k = shape_only(type, {max_seqs, T, Hq, K});
  args.v = args.o = shape_only(type, {max_seqs, T, Hv, V});
  args.g = args.beta = shape_only(gate_type, {max_seqs, T, Hv});
  if (use_gate_in_kernel) args.A_log = args.dt_bias = shape_only(FLASH_QLA_FLOAT32, {Hv});
  const int64_t rows = state_v_first ? V : K, columns = state_v_first ? K : V;
  args.state_pool = shape_only(state_type, {max_seqs, Hv, rows, columns});
  args.states_out = shape_only(state_type, {max_seqs, T, Hv, rows, columns});
  args.initial_state_indices = shape_only(FLASH_QLA_INT32, {max_seqs});
  args.parents = shape_only(FLASH_QLA_INT32, {max_seqs, T});
  size_t bytes = 0;
  raise_if_refused(flash_qla_verify_workspace_size(&args, &bytes));
  return static_cast<int64_t>(bytes);
}

}  // namespace
}  // namespace flash_qla::python

TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify, flash_qla::python::verify)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(verify_workspace_size, flash_qla::python::verify_workspace_size)
