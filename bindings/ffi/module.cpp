// The delta rule's exports for Python: they check devices and dtypes, fill the C structures and call the C ABI.
// Everything about shapes and options is refused by the library itself; nothing is computed here.
#include <algorithm>
#include <initializer_list>
#include <string>

#include "inputs.h"

namespace flash_qla::python {
namespace {

// h as the front ends make it, contiguous [B, chunks, Hv, K, V], as the C interface takes it: the chunks of all batch
// rows one after another.
flash_qla_tensor merge_batch(flash_qla_tensor h) {
  if (h.ndim != 5) return h;
  h.shape[0] *= h.shape[1];
  h.stride[0] = h.stride[1];
  for (int32_t i = 1; i < 4; ++i) {
    h.shape[i] = h.shape[i + 1];
    h.stride[i] = h.stride[i + 1];
  }
  h.ndim = 4;
  return h;
}

// flash_qla_chunk_forward_* and flash_qla_recurrent_*: one argument list, members as in flash_qla.h.
ffi::Any forward(int64_t action, bool recurrent, ffi::String operation, ffi::Optional<ffi::String> path,
                 ffi::Optional<double> scale, bool state_v_first, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
                 bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode, bool force_intra_cp,
                 ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::TensorView q, ffi::TensorView k,
                 ffi::TensorView v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log, OptionalTensor dt_bias,
                 OptionalTensor cu_seqlens, OptionalTensor initial_state, OptionalTensor state_pool,
                 OptionalTensor initial_state_indices, OptionalTensor final_state_indices,
                 OptionalTensor has_initial_state, OptionalTensor num_accepted_tokens, int64_t null_index,
                 int64_t checkpoint_every, OptionalTensor checkpoints, OptionalTensor checkpoint_cu_starts,
                 OptionalTensor checkpoint_offsets, OptionalTensor checkpoint_indices, OptionalTensor o,
                 OptionalTensor final_state, OptionalTensor g_cumsum, OptionalTensor A, OptionalTensor h,
                 OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_forward_arguments args;
  flash_qla_forward_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, q);
  fill_inputs(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, &args);
  args.state_pool = call.tensor("state_pool", state_pool);
  args.initial_state_indices = call.tensor("initial_state_indices", initial_state_indices, kIndices);
  args.final_state_indices = call.tensor("final_state_indices", final_state_indices, kIndices);
  args.has_initial_state = call.tensor("has_initial_state", has_initial_state, "bool");
  args.num_accepted_tokens = call.tensor("num_accepted_tokens", num_accepted_tokens, kIndices);
  args.null_index = null_index;
  args.checkpoint_every = checkpoint_every;
  args.checkpoints = call.tensor("checkpoints", checkpoints);
  args.checkpoint_cu_starts = call.tensor("checkpoint_cu_starts", checkpoint_cu_starts, kIndices);
  args.checkpoint_offsets = call.tensor("checkpoint_offsets", checkpoint_offsets, kIndices);
  args.checkpoint_indices = call.tensor("checkpoint_indices", checkpoint_indices, kIndices);
  args.o = call.tensor("o", o);
  args.final_state = call.tensor("final_state", final_state);
  args.g_cumsum = call.tensor("g_cumsum", g_cumsum);
  args.A = call.tensor("A", A);
  args.h = merge_batch(call.tensor("h", h));
  return recurrent
             ? run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_recurrent_workspace_size,
                              flash_qla_recurrent_run, flash_qla_recurrent_explain)
             : run_or_explain(static_cast<Action>(action), args, call, workspace,
                              flash_qla_chunk_forward_workspace_size, flash_qla_chunk_forward_run,
                              flash_qla_chunk_forward_explain);
}

// flash_qla_chunk_backward_*: members as in flash_qla.h.
ffi::Any backward(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path, ffi::Optional<double> scale,
                  bool state_v_first, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
                  bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode, bool force_intra_cp,
                  ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::TensorView q, ffi::TensorView k,
                  ffi::TensorView v, OptionalTensor g, OptionalTensor beta, OptionalTensor A_log,
                  OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor initial_state, bool g_is_cumsum,
                  OptionalTensor A, OptionalTensor o, OptionalTensor d_o, OptionalTensor dht, OptionalTensor dq,
                  OptionalTensor dk, OptionalTensor dv, OptionalTensor dg, OptionalTensor dbeta, OptionalTensor dh0,
                  OptionalTensor dA_log, OptionalTensor ddt_bias, OptionalTensor inverse_norms,
                  OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_backward_arguments args;
  flash_qla_backward_arguments_init(&args);
  fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel,
               use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance, num_threads);
  const Call call(operation.c_str(), &args.options, q);
  fill_inputs(call, q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, &args);
  args.g_is_cumsum = g_is_cumsum;
  args.A = call.tensor("A", A);
  args.o = call.tensor("o", o);
  args.d_o = call.tensor("do", d_o);
  args.dht = call.tensor("dht", dht);
  fill_gradients(call, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias, &args);
  // [2, B, T, Hq]: of q's rows, then of k's.
  const flash_qla_tensor norms = call.tensor("inverse_norms", inverse_norms, kInputs);
  if (norms.ndim == 4 && norms.shape[0] == 2) {
    args.q_inverse_norm = plane(norms, 0);
    args.k_inverse_norm = plane(norms, 1);
  }
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_chunk_backward_workspace_size,
                        flash_qla_chunk_backward_run, flash_qla_chunk_backward_explain);
}

// A view of no memory: shapes are all that workspace_size looks at.
flash_qla_tensor shape_only(int32_t dtype, std::initializer_list<int64_t> shape) {
  return flash_qla::tensor(nullptr, static_cast<flash_qla::DType>(dtype), shape);
}

// An input as no path reads it in place: nothing side by side, and every stride beyond all limits.
flash_qla_tensor far_apart(flash_qla_tensor t) {
  for (int32_t i = 0; i < t.ndim; ++i) t.stride[i] = int64_t{1} << 40;
  return t;
}

// An output likewise, whose elements have memory of their own.
flash_qla_tensor with_gaps(flash_qla_tensor t) {
  for (int32_t i = 0; i < t.ndim; ++i) t.stride[i] *= 2;
  return t;
}

// The largest scratch of calls that the arguments of workspace_size() below leave open.
class LargestWorkspace {
 public:
  // One more call. The first is refused with an exception. Of others it is the path chosen by name that may not take
  // them.
  template <class Arguments>
  void add(const Arguments& args, flash_qla_status (*workspace_size)(const Arguments*, size_t*)) {
    size_t bytes = 0;
    const flash_qla_status status = workspace_size(&args, &bytes);
    if (status.code != FLASH_QLA_NOT_IMPLEMENTED || !asked_) raise_if_refused(status);
    asked_ = true;
    bytes_ = std::max(bytes_, bytes);
  }
  int64_t bytes() const { return static_cast<int64_t>(bytes_); }

 private:
  bool asked_ = false;
  size_t bytes_ = 0;
};

// Scratch bytes of a call that does not exist yet, with max_tokens packed tokens in max_seqs sequences, of which
// checkpoint_offsets are listed. `call`: "prefill", "decode", "forward" (h and A and the cumsum saved) or "backward".
// `contiguous`: tensors have no gaps, and begin where the copy engine takes them.
int64_t workspace_size(ffi::String operation, ffi::Optional<ffi::String> path, ffi::Optional<double> scale,
                       bool state_v_first, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel,
                       bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int64_t cp_mode, bool force_intra_cp,
                       ffi::Optional<double> cp_tolerance, int64_t num_threads, ffi::String call, bool cuda,
                       int64_t device_index, DLDataType dtype, DLDataType gate_dtype, DLDataType state_dtype,
                       bool contiguous, int64_t checkpoint_every, int64_t checkpoint_offsets, int64_t max_tokens,
                       int64_t max_seqs, int64_t Hq, int64_t Hv, int64_t K, int64_t V) {
  const int32_t type = dtype_of(operation.c_str(), "dtype", dtype, kInputs);
  const int32_t gate_type = dtype_of(operation.c_str(), "gate_dtype", gate_dtype, kInputs);
  const int32_t state_type = dtype_of(operation.c_str(), "state_dtype", state_dtype, kInputs);
  const int32_t accumulator = type == FLASH_QLA_FLOAT64 ? FLASH_QLA_FLOAT64 : FLASH_QLA_FLOAT32;
  const OptionalName path_name(path);
  const auto states = [&](int32_t state, int64_t rows) {
    return state_v_first ? shape_only(state, {rows, Hv, V, K}) : shape_only(state, {rows, Hv, K, V});
  };
  LargestWorkspace largest;
  // The layouts of the caller's tensors: without gaps; with them, but for cu_seqlens, in whose gaps a path may differ.
  for (int layout = 0; layout < (contiguous ? 1 : 3); ++layout) {
    const auto input = [&](const flash_qla_tensor& t) { return layout == 0 ? t : far_apart(t); };
    const auto fill = [&](auto& args) {
      fill_options(&args.options, operation, path_name, scale, state_v_first, use_qk_l2norm_in_kernel,
                   use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cp_mode, force_intra_cp,
                   cp_tolerance, num_threads);
      args.options.device_type = cuda ? FLASH_QLA_CUDA : FLASH_QLA_CPU;
      args.options.device_index = static_cast<int32_t>(device_index);
      args.q = args.k = input(shape_only(type, {1, max_tokens, Hq, K}));
      args.v = input(shape_only(type, {1, max_tokens, Hv, V}));
      args.g = args.beta = input(shape_only(gate_type, {1, max_tokens, Hv}));
      if (use_gate_in_kernel) args.A_log = args.dt_bias = shape_only(accumulator, {Hv});
      args.cu_seqlens = shape_only(FLASH_QLA_INT32, {max_seqs + 1});
      if (layout == 2) args.cu_seqlens = far_apart(args.cu_seqlens);
    };
    const flash_qla_tensor keys = shape_only(type, {1, max_tokens, Hq, K});
    const flash_qla_tensor values = shape_only(type, {1, max_tokens, Hv, V});
    const flash_qla_tensor A = shape_only(type, {1, max_tokens, Hv, FLASH_QLA_CHUNK_SIZE});
    if (call == "backward") {
      // What is absent may take more: A is computed again, and gradients that nobody wants have no memory to use.
      for (int absent = 0; absent < 16; ++absent) {
        if ((absent & 8) != 0 && use_gate_in_kernel) continue;  // a cumsum has no raw gate
        flash_qla_backward_arguments args;
        flash_qla_backward_arguments_init(&args);
        fill(args);
        args.g_is_cumsum = (absent & 8) != 0;
        args.initial_state = args.dht = input(states(state_type, max_seqs));
        args.dh0 = states(state_type, max_seqs);
        args.d_o = input(values);
        if ((absent & 1) == 0) args.A = input(A);
        if ((absent & 2) == 0) args.dq = args.dk = keys;
        if ((absent & 4) == 0) args.dv = values;
        args.dg = args.dbeta = shape_only(gate_type, {1, max_tokens, Hv});
        args.dA_log = args.A_log;
        args.ddt_bias = args.dt_bias;
        largest.add(args, flash_qla_chunk_backward_workspace_size);
      }
      continue;
    }
    flash_qla_forward_arguments args;
    flash_qla_forward_arguments_init(&args);
    fill(args);
    args.o = layout == 0 ? values : with_gaps(values);
    if (call == "forward") {
      args.initial_state = input(states(state_type, max_seqs));
      args.final_state = states(accumulator, max_seqs);
      args.g_cumsum = shape_only(accumulator, {1, max_tokens, Hv});
      args.A = A;
      args.h = states(type, max_tokens / FLASH_QLA_CHUNK_SIZE + max_seqs);
    } else {
      args.state_pool = states(state_type, max_seqs);
      args.initial_state_indices = shape_only(FLASH_QLA_INT32, {max_seqs});
    }
    if (checkpoint_every > 0) {
      args.checkpoint_every = checkpoint_every;
      args.checkpoints = states(state_type, max_tokens / checkpoint_every);
      args.checkpoint_cu_starts = shape_only(FLASH_QLA_INT32, {max_seqs + 1});
    }
    if (checkpoint_offsets > 0) {
      args.checkpoint_offsets = args.checkpoint_indices = shape_only(FLASH_QLA_INT32, {checkpoint_offsets});
    }
    largest.add(args, call == "decode" ? flash_qla_recurrent_workspace_size : flash_qla_chunk_forward_workspace_size);
  }
  return largest.bytes();
}

ffi::String build_info() {
  std::string text(kTextSize, '\0');
  raise_if_refused(flash_qla_build_info(text.data(), text.size()));
  return ffi::String(text.c_str());
}

}  // namespace
}  // namespace flash_qla::python

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward, flash_qla::python::forward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(backward, flash_qla::python::backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_size, flash_qla::python::workspace_size)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_info, flash_qla::python::build_info)
