// What a call of the convolution may look like: shapes, dtypes and combinations. Reads no tensor memory.
#include <string>

#include "core/convolution.h"
#include "core/tensor_checks.h"

namespace flash_qla {
namespace {

bool same_view(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int32_t i = 0; i < a.ndim; ++i) {
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.stride[i] != b.stride[i])) return false;
  }
  return true;
}

class ConvRules : public TensorChecks {
 public:
  using TensorChecks::TensorChecks;

  // Rules that forward and backward share; Arguments is either's structure.
  template <class Arguments>
  Status common(const Arguments& args, ConvProblem* p) const {
    FLASH_QLA_RETURN_IF_ERROR(device_options());
    if (args.num_parts < 1 || args.num_parts > FLASH_QLA_MAX_CONV_PARTS) {
      return value_error("num_parts (%d) must be from 1 to %d", args.num_parts, FLASH_QLA_MAX_CONV_PARTS);
    }
    if (args.activation != FLASH_QLA_ACTIVATION_NONE && args.activation != FLASH_QLA_ACTIVATION_SILU) {
      return value_error("activation (%d) must be 0 (none) or 1 (silu)", args.activation);
    }
    const Named x{"x", args.parts[0].x};
    FLASH_QLA_RETURN_IF_ERROR(require(x));
    FLASH_QLA_RETURN_IF_ERROR(rank(x, 4));
    if (!is_float(dtype(x.tensor)) && dtype(x.tensor) != DType::kFloat64) {
      return type_error("x.dtype (%s) must be float32, bfloat16, float16 or float64", dtype_name(x.tensor));
    }
    p->dtype = dtype(x.tensor);
    p->B = x.tensor.shape[0];
    p->T = x.tensor.shape[1];
    if (p->B > 0 && p->T > FLASH_QLA_MAX_TOKENS / p->B) {
      return value_error("x.shape[0] * x.shape[1] (%lld * %lld) must be at most %d tokens", as_ll(p->B), as_ll(p->T),
                         FLASH_QLA_MAX_TOKENS);
    }
    FLASH_QLA_RETURN_IF_ERROR(sequences(args.cu_seqlens, p));
    for (int32_t i = 0; i < args.num_parts; ++i) FLASH_QLA_RETURN_IF_ERROR(inputs(args.parts[i], p));
    if (p->channels > FLASH_QLA_MAX_TOKENS) {
      return value_error("x (%lld channels in all parts) must have at most %d", as_ll(p->channels),
                         FLASH_QLA_MAX_TOKENS);
    }
    if (present(args.seq_idx)) {
      const Named t{"seq_idx", args.seq_idx};
      if (p->varlen) return value_error("seq_idx (given) must not come with cu_seqlens");
      FLASH_QLA_RETURN_IF_ERROR(shape(t, Role::kInput, {{p->B, "x.shape[0]"}, {p->T, "x.shape[1]"}}));
      FLASH_QLA_RETURN_IF_ERROR(dtype_index(t));
    }
    return Status();
  }

  Status dtype_accumulator(const Named& t, const ConvProblem& p) const {
    return p.dtype == DType::kFloat64 ? dtype_is(t, DType::kFloat64, "float64, as x is")
                                      : dtype_is(t, DType::kFloat32, "float32");
  }

  Status dtype_float(const Named& t, const ConvProblem& p) const { return TensorChecks::dtype_float(t, p.dtype, "x"); }

  // A [B, T, H, D] tensor of a part, in x's dtype.
  template <class Part>
  Status like_x(const Named& t, const Part& part, Role role, const ConvProblem& p) const {
    if (!present(t.tensor)) return Status();
    FLASH_QLA_RETURN_IF_ERROR(shape(
        t, role,
        {{p.B, "x.shape[0]"}, {p.T, "x.shape[1]"}, {part.x.shape[2], "x.shape[2]"}, {part.x.shape[3], "x.shape[3]"}}));
    return dtype_is(t, p.dtype, "that of x");
  }

  // [rows, H * D, L]: the first one settles L and, in a pool, the slots.
  template <class Part>
  Status state(const Named& t, const Part& part, Role role, bool pool, ConvProblem* p) const {
    if (!present(t.tensor)) return Status();
    FLASH_QLA_RETURN_IF_ERROR(rank(t, 3));
    const int64_t entries = t.tensor.shape[2], rows = t.tensor.shape[0];
    if (p->L == 0) {
      p->L = entries;
      p->slots = pool ? rows : 0;
      if (entries < p->W - 1 || entries < 1) {
        return value_error("%s.shape[2] (%lld) must be at least 1 and weight.shape[1] - 1 (%lld)", t.name,
                           as_ll(entries), as_ll(p->W - 1));
      }
    }
    const Extent wanted =
        pool ? Extent{p->slots, "the slots of the other states"} : Extent{p->N, "the number of sequences"};
    FLASH_QLA_RETURN_IF_ERROR(shape(
        t, role,
        {wanted, {part.x.shape[2] * part.x.shape[3], "x.shape[2] * x.shape[3]"}, {p->L, "that of the other states"}}));
    return dtype_float(t, *p);
  }

  Status gates(const flash_qla_conv_arguments& args, ConvProblem* p) const;
  Status pools(const flash_qla_conv_arguments& args, ConvKind kind, const ConvProblem& p) const;
  Status drafts(const flash_qla_conv_arguments& args, ConvKind kind, const ConvProblem& p) const;
  Status memory_apart(const flash_qla_conv_arguments& args, ConvKind kind) const;

  Status vector_of_sequences(const Named& t, const ConvProblem& p) const {
    FLASH_QLA_RETURN_IF_ERROR(shape(t, Role::kInput, {{p.N, "the number of sequences"}}));
    return dtype_index(t);
  }

 private:
  Status sequences(const Tensor& cu_seqlens, ConvProblem* p) const {
    p->varlen = present(cu_seqlens);
    p->N = p->B;
    if (!p->varlen) return Status();
    const Named cu{"cu_seqlens", cu_seqlens};
    FLASH_QLA_RETURN_IF_ERROR(rank(cu, 1));
    FLASH_QLA_RETURN_IF_ERROR(dtype_index(cu));
    if (cu_seqlens.shape[0] < 1) {
      return value_error("cu_seqlens.shape[0] (0) must be at least 1: the number of sequences + 1");
    }
    if (p->B != 1) return value_error("x.shape[0] (%lld) must be 1 with cu_seqlens", as_ll(p->B));
    p->N = cu_seqlens.shape[0] - 1;
    if (p->N > FLASH_QLA_MAX_TOKENS) {
      return value_error("cu_seqlens.shape[0] - 1 (%lld) must be at most %d sequences", as_ll(p->N),
                         FLASH_QLA_MAX_TOKENS);
    }
    return memory(cu, Role::kInput);
  }

  // x, weight and bias of a part.
  template <class Part>
  Status inputs(const Part& part, ConvProblem* p) const {
    const Named x{"x", part.x}, weight{"weight", part.weight}, bias{"bias", part.bias};
    FLASH_QLA_RETURN_IF_ERROR(require(x));
    FLASH_QLA_RETURN_IF_ERROR(shape(
        x, Role::kInput, {{p->B, "that of the other parts"}, {p->T, "that of the other parts"}, {-1, ""}, {-1, ""}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_is(x, p->dtype, "that of the other parts"));
    const int64_t heads = x.tensor.shape[2], dim = x.tensor.shape[3];
    if (heads < 1 || dim < 1) {
      return value_error("x.shape[2] * x.shape[3] (%lld * %lld) must be at least 1", as_ll(heads), as_ll(dim));
    }
    if (part.l2norm != 0 && dim > FLASH_QLA_MAX_HEAD_DIM) {
      return value_error("x.shape[3] (%lld) must be at most %d with l2norm", as_ll(dim), FLASH_QLA_MAX_HEAD_DIM);
    }
    const Extent channels{heads * dim, "x.shape[2] * x.shape[3]"};
    FLASH_QLA_RETURN_IF_ERROR(require(weight));
    FLASH_QLA_RETURN_IF_ERROR(rank(weight, 2));
    if (p->W == 0) p->W = weight.tensor.shape[1];
    if (p->W < 1 || p->W > FLASH_QLA_MAX_CONV_WIDTH) {
      return value_error("weight.shape[1] (%lld) must be from 1 to %d", as_ll(p->W), FLASH_QLA_MAX_CONV_WIDTH);
    }
    FLASH_QLA_RETURN_IF_ERROR(shape(weight, Role::kInput, {channels, {p->W, "that of the other parts"}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_float(weight, *p));
    if (present(bias.tensor)) {
      FLASH_QLA_RETURN_IF_ERROR(shape(bias, Role::kInput, {channels}));
      FLASH_QLA_RETURN_IF_ERROR(dtype_float(bias, *p));
    }
    p->channels += heads * dim;
    return Status();
  }
};

Status ConvRules::gates(const flash_qla_conv_arguments& args, ConvProblem* p) const {
  const Named a{"a", args.a}, b{"b", args.b}, A_log{"A_log", args.A_log}, dt_bias{"dt_bias", args.dt_bias},
      g{"g", args.g}, beta{"beta", args.beta};
  if (present(a.tensor) != present(g.tensor)) return value_error("a and g must both be given, or neither");
  if (present(b.tensor) != present(beta.tensor)) return value_error("b and beta must both be given, or neither");
  if (!present(a.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(forbid(A_log, "must come with a"));
    FLASH_QLA_RETURN_IF_ERROR(forbid(dt_bias, "must come with a"));
  } else {
    FLASH_QLA_RETURN_IF_ERROR(require(A_log));
  }
  for (const Named& out : {g, beta}) {
    if (!present(out.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(rank(out, 3));
    if (p->gate_heads == 0) p->gate_heads = out.tensor.shape[2];
    FLASH_QLA_RETURN_IF_ERROR(shape(
        out, Role::kOutput, {{p->B, "x.shape[0]"}, {p->T, "x.shape[1]"}, {p->gate_heads, "that of the other gate"}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_accumulator(out, *p));
    const Named raw = &out.tensor == &args.g ? a : b;
    FLASH_QLA_RETURN_IF_ERROR(rank(raw, 3));
    const int64_t* s = raw.tensor.shape;
    const bool as_heads = s[0] == p->B && s[1] == p->T && s[2] == p->gate_heads;
    if (!as_heads && !(s[0] == p->B * p->T && s[1] > 0 && s[1] * s[2] == p->gate_heads)) {
      return value_error("%s.shape (%lld, %lld, %lld) must be that of %s, or [tokens, key heads, value heads of each]",
                         raw.name, as_ll(s[0]), as_ll(s[1]), as_ll(s[2]), out.name);
    }
    FLASH_QLA_RETURN_IF_ERROR(memory(raw, Role::kInput));
    FLASH_QLA_RETURN_IF_ERROR(dtype_float(raw, *p));
  }
  for (const Named& t : {A_log, dt_bias}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(shape(t, Role::kInput, {{p->gate_heads, "g.shape[2]"}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_float(t, *p));
  }
  return Status();
}

Status ConvRules::pools(const flash_qla_conv_arguments& args, ConvKind kind, const ConvProblem& p) const {
  const Named initial{"initial_state_indices", args.initial_state_indices},
      final{"final_state_indices", args.final_state_indices}, has{"has_initial_state", args.has_initial_state};
  for (const Named& t : {initial, final}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(require({"initial_state", args.parts[0].initial_state}));
    FLASH_QLA_RETURN_IF_ERROR(vector_of_sequences(t, p));
  }
  if (present(final.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(require(initial));
    FLASH_QLA_RETURN_IF_ERROR(require({"final_state", args.parts[0].final_state}));
  }
  if (present(has.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(require({"initial_state", args.parts[0].initial_state}));
    FLASH_QLA_RETURN_IF_ERROR(shape(has, Role::kInput, {{p.N, "the number of sequences"}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_is(has, DType::kBool, "bool"));
  }
  if (kind == ConvKind::kUpdate) FLASH_QLA_RETURN_IF_ERROR(require({"initial_state", args.parts[0].initial_state}));
  const Named offsets{"checkpoint_offsets", args.checkpoint_offsets},
      slots{"checkpoint_indices", args.checkpoint_indices};
  if (!present(offsets.tensor) && !present(slots.tensor)) return Status();
  for (const Named& t : {offsets, slots}) {
    if (kind == ConvKind::kUpdate) FLASH_QLA_RETURN_IF_ERROR(forbid(t, "must be left to conv_forward"));
    FLASH_QLA_RETURN_IF_ERROR(require(t));
  }
  FLASH_QLA_RETURN_IF_ERROR(require(initial));
  FLASH_QLA_RETURN_IF_ERROR(require({"final_state", args.parts[0].final_state}));
  FLASH_QLA_RETURN_IF_ERROR(shape(offsets, Role::kInput, {{-1, ""}}));
  FLASH_QLA_RETURN_IF_ERROR(shape(slots, Role::kInput, {{offsets.tensor.shape[0], "checkpoint_offsets.shape[0]"}}));
  FLASH_QLA_RETURN_IF_ERROR(dtype_index(offsets));
  return dtype_index(slots);
}

Status ConvRules::drafts(const flash_qla_conv_arguments& args, ConvKind kind, const ConvProblem& p) const {
  const Named accepted{"num_accepted_tokens", args.num_accepted_tokens}, ring{"cache_seqlens", args.cache_seqlens},
      states{"draft_states", args.draft_states}, rows{"draft_state_indices", args.draft_state_indices};
  if (kind == ConvKind::kForward) {
    for (const Named& t : {accepted, ring, states, rows}) {
      FLASH_QLA_RETURN_IF_ERROR(forbid(t, "must be left to conv_update"));
    }
    return Status();
  }
  if (present(accepted.tensor)) {
    if (present(ring.tensor)) return value_error("cache_seqlens (given) must not come with num_accepted_tokens");
    FLASH_QLA_RETURN_IF_ERROR(vector_of_sequences(accepted, p));
    const int64_t needed = p.W - 2 + (p.varlen ? 1 : p.T);
    if (p.L < needed) {
      return value_error("initial_state.shape[2] (%lld) must be at least weight.shape[1] - 2 + the tokens (%lld)",
                         as_ll(p.L), as_ll(needed));
    }
  }
  if (present(ring.tensor)) FLASH_QLA_RETURN_IF_ERROR(vector_of_sequences(ring, p));
  if (!present(states.tensor)) return forbid(rows, "must come with draft_states");
  FLASH_QLA_RETURN_IF_ERROR(shape(states, Role::kOutput,
                                  {{-1, ""},
                                   {p.varlen ? -1 : p.T, "x.shape[1]"},
                                   {p.channels, "the channels of all parts"},
                                   {p.W - 1, "weight.shape[1] - 1"}}));
  FLASH_QLA_RETURN_IF_ERROR(dtype_float(states, p));
  if (present(rows.tensor)) return vector_of_sequences(rows, p);
  if (states.tensor.shape[0] < p.N) {
    return value_error(
        "draft_states.shape[0] (%lld) must be at least the number of sequences (%lld) without "
        "draft_state_indices",
        as_ll(states.tensor.shape[0]), as_ll(p.N));
  }
  return Status();
}

// What is written shares no memory with anything else, but for states that are updated in place, and in an update the
// outputs that replace the inputs.
Status ConvRules::memory_apart(const flash_qla_conv_arguments& args, ConvKind kind) const {
  constexpr size_t kMost = 8 * FLASH_QLA_MAX_CONV_PARTS + 16;
  alignas(Named) unsigned char room[2][kMost * sizeof(Named)];
  Named *written = reinterpret_cast<Named*>(room[0]), *others = reinterpret_cast<Named*>(room[1]);
  size_t writes = 0, reads = 0;
  const auto write = [&](const char* name, const Tensor& t) { new (&written[writes++]) Named{name, t}; };
  const auto read = [&](const char* name, const Tensor& t) { new (&others[reads++]) Named{name, t}; };
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_part& part = args.parts[i];
    if (kind == ConvKind::kForward || !same_view(part.x, part.y)) read("x", part.x);
    read("weight", part.weight);
    read("bias", part.bias);
    read("residual", part.residual);
    if (!same_view(part.initial_state, part.final_state)) read("initial_state", part.initial_state);
    write("y", part.y);
    write("final_state", part.final_state);
    write("inverse_norm", part.inverse_norm);
  }
  const Named inputs[] = {{"cu_seqlens", args.cu_seqlens},
                          {"seq_idx", args.seq_idx},
                          {"initial_state_indices", args.initial_state_indices},
                          {"final_state_indices", args.final_state_indices},
                          {"has_initial_state", args.has_initial_state},
                          {"num_accepted_tokens", args.num_accepted_tokens},
                          {"cache_seqlens", args.cache_seqlens},
                          {"draft_state_indices", args.draft_state_indices},
                          {"checkpoint_offsets", args.checkpoint_offsets},
                          {"checkpoint_indices", args.checkpoint_indices},
                          {"a", args.a},
                          {"b", args.b},
                          {"A_log", args.A_log},
                          {"dt_bias", args.dt_bias}};
  for (const Named& t : inputs) read(t.name, t.tensor);
  write("draft_states", args.draft_states);
  write("g", args.g);
  write("beta", args.beta);
  return apart(written, writes, others, reads);
}

}  // namespace

Status validate_conv(const flash_qla_conv_arguments& args, ConvKind kind, const char* operation, bool need_data,
                     ConvProblem* p) {
  const ConvRules check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.common(args, p));
  const bool pool = present(args.initial_state_indices);
  const flash_qla_conv_part& first = args.parts[0];
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_part& part = args.parts[i];
    const Named y{"y", part.y}, residual{"residual", part.residual}, inverse_norm{"inverse_norm", part.inverse_norm};
    FLASH_QLA_RETURN_IF_ERROR(check.require(y));
    FLASH_QLA_RETURN_IF_ERROR(check.like_x(y, part, Role::kOutput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.like_x(residual, part, Role::kInput, *p));
    if (part.l2norm) {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid(residual, "must not come with l2norm"));
    } else {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid(inverse_norm, "must come with l2norm"));
    }
    if (present(part.inverse_norm)) {
      FLASH_QLA_RETURN_IF_ERROR(check.shape(
          inverse_norm, Role::kOutput, {{p->B, "x.shape[0]"}, {p->T, "x.shape[1]"}, {part.x.shape[2], "x.shape[2]"}}));
      FLASH_QLA_RETURN_IF_ERROR(check.dtype_accumulator(inverse_norm, *p));
    }
    if (present(part.initial_state) != present(first.initial_state) ||
        present(part.final_state) != present(first.final_state)) {
      return check.value_error("initial_state and final_state must be given in all parts, or in none");
    }
    FLASH_QLA_RETURN_IF_ERROR(check.state({"initial_state", part.initial_state}, part, Role::kInput, pool, p));
    FLASH_QLA_RETURN_IF_ERROR(check.state({"final_state", part.final_state}, part, Role::kOutput, pool, p));
  }
  if (present(args.seq_idx)) {
    FLASH_QLA_RETURN_IF_ERROR(check.forbid({"initial_state", first.initial_state}, "must not come with seq_idx"));
    FLASH_QLA_RETURN_IF_ERROR(check.forbid({"final_state", first.final_state}, "must not come with seq_idx"));
  }
  FLASH_QLA_RETURN_IF_ERROR(check.pools(args, kind, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.drafts(args, kind, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.gates(args, p));
  return check.memory_apart(args, kind);
}

Status validate_conv_backward(const flash_qla_conv_backward_arguments& args, const char* operation, bool need_data,
                              ConvProblem* p) {
  const ConvRules check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.common(args, p));
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_backward_part& part = args.parts[i];
    const Named dresidual{"dresidual", part.dresidual}, dinitial{"dinitial_state", part.dinitial_state};
    FLASH_QLA_RETURN_IF_ERROR(check.like_x({"dy", part.dy}, part, Role::kInput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.like_x({"dx", part.dx}, part, Role::kOutput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.like_x(dresidual, part, Role::kOutput, *p));
    if (part.l2norm) FLASH_QLA_RETURN_IF_ERROR(check.forbid(dresidual, "must not come with l2norm"));
    FLASH_QLA_RETURN_IF_ERROR(check.state({"initial_state", part.initial_state}, part, Role::kInput, false, p));
    FLASH_QLA_RETURN_IF_ERROR(check.state({"dfinal_state", part.dfinal_state}, part, Role::kInput, false, p));
    FLASH_QLA_RETURN_IF_ERROR(check.state(dinitial, part, Role::kOutput, false, p));
    if (present(part.dinitial_state)) FLASH_QLA_RETURN_IF_ERROR(check.require({"initial_state", part.initial_state}));
    if (present(args.seq_idx)) {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid({"initial_state", part.initial_state}, "must not come with seq_idx"));
      FLASH_QLA_RETURN_IF_ERROR(check.forbid({"dfinal_state", part.dfinal_state}, "must not come with seq_idx"));
    }
    const Extent channels{part.x.shape[2] * part.x.shape[3], "x.shape[2] * x.shape[3]"};
    if (present(part.dweight)) {
      const Named dweight{"dweight", part.dweight};
      FLASH_QLA_RETURN_IF_ERROR(check.shape(dweight, Role::kOutput, {channels, {p->W, "weight.shape[1]"}}));
      FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(dweight, *p));
    }
    if (present(part.dbias)) {
      const Named dbias{"dbias", part.dbias};
      FLASH_QLA_RETURN_IF_ERROR(check.shape(dbias, Role::kOutput, {channels}));
      FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(dbias, *p));
    }
  }
  return Status();
}

GateView gate_view(const Tensor& raw, const ConvProblem& p) {
  GateView view;
  view.tensor = raw;
  if (!present(raw)) return view;
  if (raw.shape[0] == p.B && raw.shape[1] == p.T && raw.shape[2] == p.gate_heads) {
    view.batch = raw.stride[0];
    view.token = raw.stride[1];
    view.key_head = raw.stride[2];
    return view;
  }
  view.token = raw.stride[0];
  view.batch = p.T * raw.stride[0];
  view.key_head = raw.stride[1];
  view.head = raw.stride[2];
  view.group = raw.shape[2];
  return view;
}

}  // namespace flash_qla
