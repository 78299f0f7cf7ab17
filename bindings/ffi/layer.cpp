// Exports of the layer's operations: convolution and gated norm. They make the parts of a convolution out of whole
// tensors, so that Python makes no views.
#include <algorithm>

#include "call.h"

namespace flash_qla::python {
namespace {

// How the channels of a convolution lie in x.
enum class Layout : int64_t {
  kChannelsLast = 0,   // x [B, T, C]: the first normalised heads, then the rest
  kChannelsFirst = 1,  // x [B, C, T]
  kInterleaved = 2,    // x [B, T, Hq (2 K + 2 V r)]: q, k, v and something else by key head, r = Hv / Hq
  kSeparate = 3,       // three tensors [B, T, Hq K], [B, T, Hq K] and [B, T, Hv V]
};

// The heads of a call. In the first two layouts `normalised` heads of K channels come first, which are q's and k's
// where they are twice the key heads.
struct Heads {
  int64_t normalised, key_heads, value_heads, K, V;
  int64_t channels() const { return 2 * key_heads * K + value_heads * V; }
};

// Where the channels of a part lie: from `first` on in weights, states and outputs.
struct Part {
  int64_t heads, dim, first;
  bool l2norm;
};

[[noreturn]] void refuse(const ffi::String& operation, const std::string& text) {
  TVM_FFI_THROW(ValueError) << operation << ": " << text;
  TVM_FFI_UNREACHABLE();
}

// `count` channels of dimension `axis`, from `first` on.
flash_qla_tensor slice(flash_qla_tensor t, int32_t axis, int64_t first, int64_t count) {
  if (t.ndim <= axis) return t;
  const int64_t bytes = t.dtype == FLASH_QLA_FLOAT64                                    ? 8
                        : t.dtype == FLASH_QLA_FLOAT32 || t.dtype == FLASH_QLA_INT32    ? 4
                        : t.dtype == FLASH_QLA_BFLOAT16 || t.dtype == FLASH_QLA_FLOAT16 ? 2
                                                                                        : 1;
  t.data = static_cast<char*>(t.data) + first * t.stride[axis] * bytes;
  t.shape[axis] = count;
  return t;
}

// [B, T, C] (or [B, C, T]) as [B, T, H, D]; other ranks are left for the library to refuse.
flash_qla_tensor as_heads(flash_qla_tensor t, bool channels_first, int64_t heads, int64_t dim) {
  if (t.ndim != 3) return t;
  if (channels_first) {
    std::swap(t.shape[1], t.shape[2]);
    std::swap(t.stride[1], t.stride[2]);
  }
  t.ndim = 4;
  t.shape[2] = heads;
  t.shape[3] = dim;
  t.stride[3] = t.stride[2];
  t.stride[2] = dim * t.stride[3];
  return t;
}

// The parts of one call, and its tensors cut into them.
class Parts {
 public:
  Parts(const ffi::String& operation, Layout layout, const Heads& heads, const flash_qla_tensor& x)
      : layout_(layout), heads_(heads) {
    if (x.ndim != 3) refuse(operation, "x.ndim (" + std::to_string(x.ndim) + ") must be 3");
    const int64_t channels = x.shape[channel_axis()];
    if (layout == Layout::kChannelsLast || layout == Layout::kChannelsFirst) {
      const int64_t normed = heads.normalised * heads.K, rest = channels - normed;
      if (heads.normalised < 0 || (heads.normalised > 0 && heads.K < 1) || rest < 0) {
        refuse(operation, "l2norm_heads * head_dim (" + std::to_string(heads.normalised) + " * " +
                              std::to_string(heads.K) + ") must be from 0 to the channels of x (" +
                              std::to_string(channels) + ")");
      }
      if (normed > 0 && heads.normalised == 2 * heads.key_heads) {
        add({heads.key_heads, heads.K, 0, true});
        add({heads.key_heads, heads.K, normed / 2, true});
      } else if (normed > 0) {
        add({heads.normalised, heads.K, 0, true});
      }
      if (rest > 0 || normed == 0) add({1, rest, normed, false});
      return;
    }
    const int64_t keys = heads.key_heads * heads.K;
    add({heads.key_heads, heads.K, 0, heads.normalised > 0});
    add({heads.key_heads, heads.K, keys, heads.normalised > 0});
    if (layout == Layout::kInterleaved) {
      const int64_t group = heads.value_heads / std::max<int64_t>(heads.key_heads, 1);
      add({heads.key_heads, group * heads.V, 2 * keys, false});
      if (channels != heads.channels() + heads.value_heads * heads.V) {
        refuse(operation, "x.shape[2] (" + std::to_string(channels) + ") must be 2 Hq K + 2 Hv V (" +
                              std::to_string(heads.channels() + heads.value_heads * heads.V) + ")");
      }
    } else {
      add({heads.value_heads, heads.V, 2 * keys, false});
    }
  }

  int32_t count() const { return count_; }
  const Part& operator[](int32_t i) const { return parts_[i]; }

  // Part i of x, or of a tensor that lies as it does: with three tensors, `t` is the part's own.
  flash_qla_tensor input(const flash_qla_tensor& t, int32_t i) const {
    const Part& part = parts_[i];
    if (t.ndim != 3) return t;
    if (layout_ == Layout::kSeparate) return as_heads(t, false, part.heads, part.dim);
    if (layout_ != Layout::kInterleaved) return output(t, i);
    const int64_t group = heads_.value_heads / heads_.key_heads;
    const int64_t pitch = 2 * heads_.K + 2 * group * heads_.V, first = std::min(i, 2) * heads_.K;
    flash_qla_tensor view = as_heads(slice(t, 2, first, part.dim), false, part.heads, part.dim);
    view.stride[2] = pitch * view.stride[3];
    return view;
  }

  // Part i of [B, T, C], with x's order of dimensions in the first two layouts.
  flash_qla_tensor output(const flash_qla_tensor& t, int32_t i) const {
    const Part& part = parts_[i];
    return as_heads(slice(t, channel_axis(), part.first, part.heads * part.dim), channel_axis() == 1, part.heads,
                    part.dim);
  }

  // Part i of a tensor whose dimension `axis` is the channels.
  flash_qla_tensor channels(const flash_qla_tensor& t, int32_t i, int32_t axis) const {
    return slice(t, axis, parts_[i].first, parts_[i].heads * parts_[i].dim);
  }

  // Part i of [B, T, normalised heads], or of [2, B, T, Hq]: q's, then k's.
  flash_qla_tensor norms(const flash_qla_tensor& t, int32_t i) const {
    if (!parts_[i].l2norm) return {};
    return t.ndim == 4 ? plane(t, i) : t;
  }

 private:
  int32_t channel_axis() const { return layout_ == Layout::kChannelsFirst ? 1 : 2; }
  void add(const Part& part) { parts_[count_++] = part; }

  Layout layout_;
  Heads heads_;
  Part parts_[FLASH_QLA_MAX_CONV_PARTS];
  int32_t count_ = 0;
};

// The channels of a whole tensor, which parts are cut from without looking.
void hold_channels(const ffi::String& operation, const char* name, const flash_qla_tensor& t, int32_t axis,
                   int64_t channels) {
  if (t.ndim == 0 || (t.ndim > axis && t.shape[axis] == channels)) return;
  const std::string given = t.ndim > axis ? std::to_string(t.shape[axis]) : std::to_string(t.ndim) + " dimensions";
  refuse(operation, std::string(name) + ".shape[" + std::to_string(axis) + "] (" + given + ") must be the channels (" +
                        std::to_string(channels) + ")");
}

int64_t all_channels(const Parts& parts) {
  int64_t sum = 0;
  for (int32_t i = 0; i < parts.count(); ++i) sum += parts[i].heads * parts[i].dim;
  return sum;
}

// Raw gates that lie beside each other by key head, [B, T, Hq 2 r] with b first, as [B * T, Hq, r].
flash_qla_tensor interleaved_gate(const flash_qla_tensor& t, const Heads& heads, bool second) {
  if (t.ndim != 3) return t;
  const int64_t group = heads.value_heads / std::max<int64_t>(heads.key_heads, 1);
  flash_qla_tensor view = slice(t, 2, second ? group : 0, group);
  view.shape[0] = t.shape[0] * t.shape[1];
  view.shape[1] = heads.key_heads;
  view.stride[0] = t.stride[1];
  view.stride[1] = 2 * group * t.stride[2];
  view.stride[2] = t.stride[2];
  return view;
}

void fill_layer_options(flash_qla_options* options, const ffi::String& operation, const OptionalName& path,
                        bool allow_neg_eigval, int64_t num_threads) {
  options->operation = operation.c_str();
  options->path = path.given ? path.text.c_str() : nullptr;
  options->allow_neg_eigval = allow_neg_eigval;
  options->num_threads = static_cast<int32_t>(num_threads);
}

// flash_qla_conv_forward_* and flash_qla_conv_update_*. With interleaved channels a and b are one tensor, given as
// both.
ffi::Any conv(int64_t action, bool update, ffi::String operation, ffi::Optional<ffi::String> path, int64_t num_threads,
              int64_t activation, int64_t layout, int64_t normalised, int64_t key_heads, int64_t value_heads, int64_t K,
              int64_t V, bool allow_neg_eigval, ffi::TensorView x, OptionalTensor x2, OptionalTensor x3,
              ffi::TensorView weight, OptionalTensor bias, OptionalTensor residual, OptionalTensor initial_state,
              OptionalTensor final_state, OptionalTensor cu_seqlens, OptionalTensor seq_idx,
              OptionalTensor initial_state_indices, OptionalTensor final_state_indices,
              OptionalTensor has_initial_state, int64_t null_index, OptionalTensor num_accepted_tokens,
              OptionalTensor cache_seqlens, OptionalTensor draft_states, OptionalTensor draft_state_indices,
              OptionalTensor checkpoint_offsets, OptionalTensor checkpoint_indices, OptionalTensor a, OptionalTensor b,
              OptionalTensor A_log, OptionalTensor dt_bias, ffi::TensorView y, OptionalTensor inverse_norm,
              OptionalTensor g, OptionalTensor beta, OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_conv_arguments args;
  flash_qla_conv_arguments_init(&args);
  fill_layer_options(&args.options, operation, path_name, allow_neg_eigval, num_threads);
  const Call call(operation.c_str(), &args.options, x, "x");
  const flash_qla_tensor inputs[] = {call.tensor("x", x, kInputs), call.tensor("k", x2, kInputs),
                                     call.tensor("v", x3, kInputs)};
  const Heads heads{normalised, key_heads, value_heads, K, V};
  const Layout lies = static_cast<Layout>(layout);
  const Parts parts(operation, lies, heads, inputs[0]);
  const flash_qla_tensor w = call.tensor("weight", weight), bias_of = call.tensor("bias", bias),
                         added = call.tensor("residual", residual),
                         initial = call.tensor("initial_state", initial_state),
                         final = call.tensor("final_state", final_state), out = call.tensor("y", y, kInputs),
                         norms = call.tensor("inverse_norm", inverse_norm);
  const int64_t channels = all_channels(parts);
  hold_channels(operation, "weight", w, 0, channels);
  hold_channels(operation, "bias", bias_of, 0, channels);
  hold_channels(operation, "initial_state", initial, 1, channels);
  hold_channels(operation, "final_state", final, 1, channels);
  hold_channels(operation, "out", out, lies == Layout::kChannelsFirst ? 1 : 2, channels);
  hold_channels(operation, "residual", added, lies == Layout::kChannelsFirst ? 1 : 2, channels);
  args.num_parts = parts.count();
  args.activation = static_cast<int32_t>(activation);
  for (int32_t i = 0; i < parts.count(); ++i) {
    flash_qla_conv_part& part = args.parts[i];
    part.x = parts.input(inputs[lies == Layout::kSeparate ? i : 0], i);
    part.weight = parts.channels(w, i, 0);
    part.bias = parts.channels(bias_of, i, 0);
    part.residual = parts.output(added, i);
    part.initial_state = parts.channels(initial, i, 1);
    part.final_state = parts.channels(final, i, 1);
    part.y = parts.output(out, i);
    part.inverse_norm = parts.norms(norms, i);
    part.l2norm = parts[i].l2norm;
  }
  args.cu_seqlens = call.tensor("cu_seqlens", cu_seqlens, kIndices);
  args.seq_idx = call.tensor("seq_idx", seq_idx, kIndices);
  args.initial_state_indices = call.tensor("initial_state_indices", initial_state_indices, kIndices);
  args.final_state_indices = call.tensor("final_state_indices", final_state_indices, kIndices);
  args.has_initial_state = call.tensor("has_initial_state", has_initial_state, "bool");
  args.null_index = null_index;
  args.num_accepted_tokens = call.tensor("num_accepted_tokens", num_accepted_tokens, kIndices);
  args.cache_seqlens = call.tensor("cache_seqlens", cache_seqlens, kIndices);
  args.draft_states = call.tensor("draft_states", draft_states);
  args.draft_state_indices = call.tensor("draft_state_indices", draft_state_indices, kIndices);
  args.checkpoint_offsets = call.tensor("checkpoint_offsets", checkpoint_offsets, kIndices);
  args.checkpoint_indices = call.tensor("checkpoint_indices", checkpoint_indices, kIndices);
  args.a = call.tensor("a", a);
  args.b = call.tensor("b", b);
  if (lies == Layout::kInterleaved) {
    args.a = interleaved_gate(args.a, heads, true);
    args.b = interleaved_gate(args.b, heads, false);
  }
  args.A_log = call.tensor("A_log", A_log);
  args.dt_bias = call.tensor("dt_bias", dt_bias);
  args.g = call.tensor("g", g);
  args.beta = call.tensor("beta", beta);
  return update
             ? run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_conv_update_workspace_size,
                              flash_qla_conv_update_run, flash_qla_conv_update_explain)
             : run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_conv_forward_workspace_size,
                              flash_qla_conv_forward_run, flash_qla_conv_forward_explain);
}

// flash_qla_conv_backward_*.
ffi::Any conv_backward(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path, int64_t num_threads,
                       int64_t activation, int64_t layout, int64_t normalised, int64_t key_heads, int64_t value_heads,
                       int64_t K, int64_t V, ffi::TensorView x, OptionalTensor x2, OptionalTensor x3,
                       ffi::TensorView weight, OptionalTensor bias, OptionalTensor initial_state,
                       OptionalTensor cu_seqlens, OptionalTensor seq_idx, OptionalTensor dy,
                       OptionalTensor dfinal_state, OptionalTensor dx, OptionalTensor dx2, OptionalTensor dx3,
                       OptionalTensor dweight, OptionalTensor dbias, OptionalTensor dresidual,
                       OptionalTensor dinitial_state, OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_conv_backward_arguments args;
  flash_qla_conv_backward_arguments_init(&args);
  fill_layer_options(&args.options, operation, path_name, false, num_threads);
  const Call call(operation.c_str(), &args.options, x, "x");
  const flash_qla_tensor inputs[] = {call.tensor("x", x, kInputs), call.tensor("k", x2, kInputs),
                                     call.tensor("v", x3, kInputs)};
  const flash_qla_tensor gradients[] = {call.tensor("dx", dx, kInputs), call.tensor("dk", dx2, kInputs),
                                        call.tensor("dv", dx3, kInputs)};
  const Heads heads{normalised, key_heads, value_heads, K, V};
  const Layout lies = static_cast<Layout>(layout);
  const Parts parts(operation, lies, heads, inputs[0]);
  const flash_qla_tensor w = call.tensor("weight", weight), bias_of = call.tensor("bias", bias),
                         initial = call.tensor("initial_state", initial_state), d_y = call.tensor("dy", dy, kInputs),
                         dfinal = call.tensor("dfinal_state", dfinal_state), dw = call.tensor("dweight", dweight),
                         db = call.tensor("dbias", dbias), dr = call.tensor("dresidual", dresidual, kInputs),
                         dinitial = call.tensor("dinitial_state", dinitial_state);
  const int64_t channels = all_channels(parts);
  const int32_t axis = lies == Layout::kChannelsFirst ? 1 : 2;
  hold_channels(operation, "weight", w, 0, channels);
  hold_channels(operation, "bias", bias_of, 0, channels);
  hold_channels(operation, "initial_state", initial, 1, channels);
  hold_channels(operation, "dy", d_y, axis, channels);
  hold_channels(operation, "dfinal_state", dfinal, 1, channels);
  args.num_parts = parts.count();
  args.activation = static_cast<int32_t>(activation);
  for (int32_t i = 0; i < parts.count(); ++i) {
    flash_qla_conv_backward_part& part = args.parts[i];
    part.x = parts.input(inputs[lies == Layout::kSeparate ? i : 0], i);
    part.weight = parts.channels(w, i, 0);
    part.bias = parts.channels(bias_of, i, 0);
    part.initial_state = parts.channels(initial, i, 1);
    part.l2norm = parts[i].l2norm;
    part.dy = parts.output(d_y, i);
    part.dfinal_state = parts.channels(dfinal, i, 1);
    part.dx = parts.input(gradients[lies == Layout::kSeparate ? i : 0], i);
    part.dweight = parts.channels(dw, i, 0);
    part.dbias = parts.channels(db, i, 0);
    part.dresidual = parts.output(dr, i);
    part.dinitial_state = parts.channels(dinitial, i, 1);
  }
  args.cu_seqlens = call.tensor("cu_seqlens", cu_seqlens, kIndices);
  args.seq_idx = call.tensor("seq_idx", seq_idx, kIndices);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_conv_backward_workspace_size,
                        flash_qla_conv_backward_run, flash_qla_conv_backward_explain);
}

// What the gated norm's forward and backward share.
template <class Arguments>
void fill_norm(Arguments* args, const Call& call, const ffi::TensorView& x, const OptionalTensor& z,
               const OptionalTensor& weight, const OptionalTensor& bias, double eps, int64_t activation,
               bool gate_first) {
  args->x = call.tensor("x", x, kInputs);
  args->z = call.tensor("g", z, kInputs);
  args->weight = call.tensor("weight", weight);
  args->bias = call.tensor("bias", bias);
  args->eps = eps;
  args->activation = static_cast<int32_t>(activation);
  args->gate_first = gate_first;
}

// flash_qla_norm_gated_*.
ffi::Any norm_gated(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path, int64_t num_threads,
                    double eps, int64_t activation, bool gate_first, ffi::TensorView x, OptionalTensor z,
                    OptionalTensor weight, OptionalTensor bias, ffi::TensorView y, OptionalTensor inverse_rms,
                    OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_norm_gated_arguments args;
  flash_qla_norm_gated_arguments_init(&args);
  fill_layer_options(&args.options, operation, path_name, false, num_threads);
  const Call call(operation.c_str(), &args.options, x, "x");
  fill_norm(&args, call, x, z, weight, bias, eps, activation, gate_first);
  args.y = call.tensor("y", y, kInputs);
  args.inverse_rms = call.tensor("inverse_rms", inverse_rms);
  return run_or_explain(static_cast<Action>(action), args, call, workspace, flash_qla_norm_gated_workspace_size,
                        flash_qla_norm_gated_run, flash_qla_norm_gated_explain);
}

// flash_qla_norm_gated_backward_*.
ffi::Any norm_gated_backward(int64_t action, ffi::String operation, ffi::Optional<ffi::String> path,
                             int64_t num_threads, double eps, int64_t activation, bool gate_first, ffi::TensorView x,
                             OptionalTensor z, OptionalTensor weight, OptionalTensor bias, ffi::TensorView dy,
                             OptionalTensor dx, OptionalTensor dz, OptionalTensor dweight, OptionalTensor dbias,
                             OptionalTensor workspace) {
  const OptionalName path_name(path);
  flash_qla_norm_gated_backward_arguments args;
  flash_qla_norm_gated_backward_arguments_init(&args);
  fill_layer_options(&args.options, operation, path_name, false, num_threads);
  const Call call(operation.c_str(), &args.options, x, "x");
  fill_norm(&args, call, x, z, weight, bias, eps, activation, gate_first);
  args.dy = call.tensor("dy", dy, kInputs);
  args.dx = call.tensor("dx", dx, kInputs);
  args.dz = call.tensor("dg", dz, kInputs);
  args.dweight = call.tensor("dweight", dweight);
  args.dbias = call.tensor("dbias", dbias);
  return run_or_explain(static_cast<Action>(action), args, call, workspace,
                        flash_qla_norm_gated_backward_workspace_size, flash_qla_norm_gated_backward_run,
                        flash_qla_norm_gated_backward_explain);
}

}  // namespace
}  // namespace flash_qla::python

TVM_FFI_DLL_EXPORT_TYPED_FUNC(conv, flash_qla::python::conv)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(conv_backward, flash_qla::python::conv_backward)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_gated, flash_qla::python::norm_gated)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_gated_backward, flash_qla::python::norm_gated_backward)
