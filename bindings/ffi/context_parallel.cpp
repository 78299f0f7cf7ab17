// Exports for streams that are cut over ranks: the four operations of docs/several_cards.md, and the chunked calls with
// states of parts. Members are those of the C structures.
#include <string>

#include "inputs.h"

namespace flash_qla::python {
namespace {

constexpr const char* kLinks = "float32 or float64";
// chunk_summary's third action, beside those of every export: floats of a part's carry.
constexpr int64_t kCarrySize = 2;

// Options of an operation that has no others.
void fill_plain_options(flash_qla_options* options, const ffi::String& operation, const OptionalName& path,
                        int64_t num_threads) {
  options->operation = operation.c_str();
  options->path = path.given ? path.text.c_str() : nullptr;
  options->num_threads = static_cast<int32_t>(num_threads);
}

ffi::Any sequence_cut(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path, int64_t num_threads,
                      ffi::TensorView cu_seqlens, ffi::TensorView bounds, int64_t last_part, bool all_rows,
                      ffi::TensorView local_cu_seqlens, OptionalTensor sequences, OptionalTensor starts_here,
                      OptionalTensor ends_here, OptionalTensor row_counts, OptionalTensor rows, OptionalTensor enters,
                      OptionalTensor leaves, OptionalTensor through, OptionalTensor entering_rows,
                      OptionalTensor leaving_rows, OptionalTensor halo_tokens, OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_sequence_cut_arguments args;
  flash_qla_sequence_cut_arguments_init(&args);
  fill_plain_options(&args.options, operation, path_name, num_threads);
  const Call call(operation.c_str(), &args.options, cu_seqlens);
  args.cu_seqlens = call.tensor("cu_seqlens", cu_seqlens, kIndices);
  args.bounds = call.tensor("bounds", bounds, kIndices);
  args.last_part = last_part;
  args.all_rows = all_rows;
  args.local_cu_seqlens = call.tensor("local_cu_seqlens", local_cu_seqlens, kIndices);
  args.sequences = call.tensor("sequences", sequences, kIndices);
  args.starts_here = call.tensor("starts_here", starts_here, "bool");
  args.ends_here = call.tensor("ends_here", ends_here, "bool");
  args.row_counts = call.tensor("row_counts", row_counts, kIndices);
  args.rows = call.tensor("rows", rows, kIndices);
  args.enters = call.tensor("enters", enters, "bool");
  args.leaves = call.tensor("leaves", leaves, "bool");
  args.through = call.tensor("through", through, "bool");
  args.entering_rows = call.tensor("entering_rows", entering_rows, kIndices);
  args.leaving_rows = call.tensor("leaving_rows", leaving_rows, kIndices);
  args.halo_tokens = call.tensor("halo_tokens", halo_tokens, kIndices);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_sequence_cut_workspace_size,
                        flash_qla_sequence_cut_run, flash_qla_sequence_cut_explain);
}

ffi::Any chunk_summary(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path,
                       ffi::Optional<double> scale, bool state_v_first, bool use_qk_l2norm_in_kernel,
                       bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode,
                       bool force_intra_cp, ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::TensorView k,
                       ffi::TensorView v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                       OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                       ffi::TensorView rows, ffi::TensorView leaves, ffi::TensorView through, ffi::TensorView S,
                       ffi::TensorView M, ffi::TensorView kind, OptionalTensor carry, OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_chunk_summary_arguments args;
  flash_qla_chunk_summary_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, k);
  args.k = call.tensor("k", k, kInputs);
  args.v = call.tensor("v", v, kInputs);
  args.g = call.tensor("g", g);
  args.beta = call.tensor("beta", beta);
  args.A_log = call.tensor("A_log", A_log);
  args.dt_bias = call.tensor("dt_bias", dt_bias);
  args.cu_seqlens = call.tensor("cu_seqlens", cu_seqlens, kIndices);
  args.initial_state = call.tensor("initial_state", initial_state);
  args.rows = call.tensor("rows", rows, kIndices);
  args.leaves = call.tensor("leaves", leaves, "bool");
  args.through = call.tensor("through", through, "bool");
  args.S = call.tensor("S", S, kLinks);
  args.M = call.tensor("M", M, kLinks);
  args.kind = call.tensor("kind", kind, kLinks);
  args.carry = call.tensor("carry", carry, kLinks);
  if (action == kCarrySize) {
    int64_t floats = 0;
    raise_if_refused(flash_qla_chunk_summary_carry_size(&args, &floats));
    return floats;
  }
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_chunk_summary_workspace_size,
                        flash_qla_chunk_summary_run, flash_qla_chunk_summary_explain);
}

ffi::Any chunk_summary_backward(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path,
                                ffi::Optional<double> scale, bool state_v_first, bool use_qk_l2norm_in_kernel,
                                bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval,
                                int64_t cp_mode, bool force_intra_cp, ffi::Optional<double> cp_tolerance,
                                int64_t num_threads, ffi::TensorView q, ffi::TensorView k, OptionalTensor g,
                                OptionalTensor beta, OptionalTensor A_log, OptionalTensor dt_bias,
                                OptionalTensor cu_seqlens, OptionalTensor d_o, OptionalTensor dht, OptionalTensor A,
                                ffi::TensorView rows, ffi::TensorView enters, ffi::TensorView through,
                                ffi::TensorView forward_kind, ffi::TensorView R, ffi::TensorView kind,
                                OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_chunk_summary_backward_arguments args;
  flash_qla_chunk_summary_backward_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, q);
  args.q = call.tensor("q", q, kInputs);
  args.k = call.tensor("k", k, kInputs);
  args.g = call.tensor("g", g);
  args.beta = call.tensor("beta", beta);
  args.A_log = call.tensor("A_log", A_log);
  args.dt_bias = call.tensor("dt_bias", dt_bias);
  args.cu_seqlens = call.tensor("cu_seqlens", cu_seqlens, kIndices);
  args.d_o = call.tensor("do", d_o);
  args.dht = call.tensor("dht", dht);
  args.A = call.tensor("A", A);
  args.rows = call.tensor("rows", rows, kIndices);
  args.enters = call.tensor("enters", enters, "bool");
  args.through = call.tensor("through", through, "bool");
  args.forward_kind = call.tensor("forward_kind", forward_kind, kLinks);
  args.R = call.tensor("R", R, kLinks);
  args.kind = call.tensor("kind", kind, kLinks);
  return run_or_explain(static_cast<Action>(action), args, call, workspace,
                        flash_qla_chunk_summary_backward_workspace_size, flash_qla_chunk_summary_backward_run,
                        flash_qla_chunk_summary_backward_explain);
}

ffi::Any summary_combine(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path, int64_t num_threads,
                         ffi::TensorView S, ffi::TensorView M, ffi::TensorView kind, OptionalTensor order,
                         OptionalTensor place, OptionalTensor wanted, bool backward, OptionalTensor state,
                         OptionalTensor composed_S, OptionalTensor composed_M, OptionalTensor composed_kind,
                         OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_summary_combine_arguments args;
  flash_qla_summary_combine_arguments_init(&args);
  fill_plain_options(&args.options, operation, path_name, num_threads);
  const Call call(operation.c_str(), &args.options, S);
  args.S = call.tensor("S", S, kLinks);
  args.M = call.tensor("M", M, kLinks);
  args.kind = call.tensor("kind", kind, kLinks);
  args.order = call.tensor("order", order, kIndices);
  args.place = call.tensor("place", place, kIndices);
  args.wanted = call.tensor("wanted", wanted, "bool");
  args.backward = backward;
  args.state = call.tensor("state", state, kLinks);
  args.composed_S = call.tensor("composed_S", composed_S, kLinks);
  args.composed_M = call.tensor("composed_M", composed_M, kLinks);
  args.composed_kind = call.tensor("composed_kind", composed_kind, kLinks);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_summary_combine_workspace_size,
                        flash_qla_summary_combine_run, flash_qla_summary_combine_explain);
}

// flash_qla_chunk_forward_* with states that entered parts.
ffi::Any part_forward(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path,
                      ffi::Optional<double> scale, bool state_v_first, bool use_qk_l2norm_in_kernel,
                      bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode,
                      bool force_intra_cp, ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::TensorView q,
                      ffi::TensorView k, ffi::TensorView v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                      OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state,
                      OptionalTensor entering_rows, OptionalTensor entering_state, OptionalTensor carry,
                      OptionalTensor o, OptionalTensor final_state, OptionalTensor A, OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_forward_arguments args;
  flash_qla_forward_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, q);
  fill_inputs(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, &args);
  args.entering_rows = call.tensor("entering_rows", entering_rows, kIndices);
  args.entering_state = call.tensor("entering_state", entering_state, kLinks);
  args.carry = call.tensor("carry", carry, kLinks);
  args.o = call.tensor("o", o);
  args.final_state = call.tensor("final_state", final_state);
  args.A = call.tensor("A", A);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_chunk_forward_workspace_size,
                        flash_qla_chunk_forward_run, flash_qla_chunk_forward_explain);
}

// flash_qla_chunk_backward_* with states that entered parts and gradients of those that left them.
ffi::Any part_backward(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path,
                       ffi::Optional<double> scale, bool state_v_first, bool use_qk_l2norm_in_kernel,
                       bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode,
                       bool force_intra_cp, ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::TensorView q,
                       ffi::TensorView k, ffi::TensorView v, OptionalTensor g, OptionalTensor beta,
                       OptionalTensor A_log, OptionalTensor dt_bias, OptionalTensor cu_seqlens,
                       OptionalTensor initial_state, OptionalTensor entering_rows, OptionalTensor entering_state,
                       OptionalTensor leaving_rows, OptionalTensor leaving_dht, OptionalTensor A, OptionalTensor d_o,
                       OptionalTensor dht, OptionalTensor dq, OptionalTensor dk, OptionalTensor dv, OptionalTensor dg,
                       OptionalTensor dbeta, OptionalTensor dh0, OptionalTensor dA_log, OptionalTensor ddt_bias,
                       OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_backward_arguments args;
  flash_qla_backward_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, q);
  fill_inputs(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, &args);
  args.entering_rows = call.tensor("entering_rows", entering_rows, kIndices);
  args.entering_state = call.tensor("entering_state", entering_state, kLinks);
  args.leaving_rows = call.tensor("leaving_rows", leaving_rows, kIndices);
  args.leaving_dht = call.tensor("leaving_dht", leaving_dht, kLinks);
  args.A = call.tensor("A", A);
  args.d_o = call.tensor("do", d_o);
  args.dht = call.tensor("dht", dht);
  fill_gradients(call, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias, &args);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_chunk_backward_workspace_size,
                        flash_qla_chunk_backward_run, flash_qla_chunk_backward_explain);
}

}  // namespace
}  // namespace flash_qla::python

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequence_cut, flash_qla::python::sequence_cut)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chunk_summary, flash_qla::python::chunk_summary)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(chunk_summary_backward, flash_qla::python::chunk_summary_backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(summary_combine, flash_qla::python::summary_combine)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(part_forward, flash_qla::python::part_forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(part_backward, flash_qla::python::part_backward)
