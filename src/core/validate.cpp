#include "core/validate.h"

#include <cmath>
#include <string>

#include "core/status.h"
#include "core/tensor_checks.h"

namespace flash_qla {
namespace {

// The delta rule's own rules, beside those of any tensor.
class Validator : public TensorChecks {
 public:
  using TensorChecks::dtype_float;
  using TensorChecks::TensorChecks;

  Status sizes(const Named& q, const Named& k, const Named& v, const Tensor& cu_seqlens, Problem* p) const;
  Status gates(const Tensor& g, const Tensor& beta, const Tensor& A_log, const Tensor& dt_bias, const Problem& p) const;

  // float32, bfloat16 or float16; float64 beside float64 inputs.
  Status dtype_float(const Named& t, const Problem& p) const { return dtype_float(t, p.dtype, "q, k, v"); }

  // The dtype of results that are kept in full precision.
  Status dtype_accumulator(const Named& t, const Problem& p) const {
    return p.dtype == DType::kFloat64 ? dtype_is(t, DType::kFloat64, "float64, as q is")
                                      : dtype_is(t, DType::kFloat32, "float32");
  }

  // [rows, Hv, K, V], or [rows, Hv, V, K] with state_v_first.
  Status state_shape(const Named& t, Role role, const Extent& rows, const Problem& p) const {
    const Extent key{p.K, "q.shape[3]"}, value{p.V, "v.shape[3]"}, heads{p.Hv, "v.shape[2]"};
    if (options().state_v_first) return shape(t, role, {rows, heads, value, key});
    return shape(t, role, {rows, heads, key, value});
  }

  Status token_shape(const Named& t, Role role, const Problem& p) const {
    return shape(t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}});
  }

  Status vector_of_sequences(const Named& t, const Problem& p, int64_t extra) const {
    FLASH_QLA_RETURN_IF_ERROR(
        shape(t, Role::kInput, {{p.N + extra, extra ? "the number of sequences + 1" : "the number of sequences"}}));
    return dtype_index(t);
  }

  Status check_options() const {
    FLASH_QLA_RETURN_IF_ERROR(device_options());
    const flash_qla_options& o = options();
    if (o.cp_mode < FLASH_QLA_CP_OFF || o.cp_mode > FLASH_QLA_CP_INVARIANT) {
      return value_error("cp_mode (%d) must be 0 (off), 1 (auto) or 2 (invariant)", o.cp_mode);
    }
    if (!(o.cp_tolerance <= kLargestTolerance)) {
      return value_error("cp_tolerance (%g) must be at most %g", o.cp_tolerance, kLargestTolerance);
    }
    if (o.allow_neg_eigval && !o.use_beta_sigmoid_in_kernel) {
      return value_error("allow_neg_eigval (True) must come with use_beta_sigmoid_in_kernel (False)");
    }
    return Status();
  }
};

Status Validator::sizes(const Named& q, const Named& k, const Named& v, const Tensor& cu_seqlens, Problem* p) const {
  FLASH_QLA_RETURN_IF_ERROR(check_options());
  for (const Named& t : {q, k, v}) {
    FLASH_QLA_RETURN_IF_ERROR(require(t));
    if (!is_float(dtype(t.tensor)) && dtype(t.tensor) != DType::kFloat64) {
      return type_error("%s.dtype (%s) must be float32, bfloat16, float16 or float64", t.name, dtype_name(t.tensor));
    }
    if (t.tensor.dtype != q.tensor.dtype) {
      return type_error("%s.dtype (%s) must be that of q (%s)", t.name, dtype_name(t.tensor), dtype_name(q.tensor));
    }
    FLASH_QLA_RETURN_IF_ERROR(rank(t, 4));
  }
  p->dtype = dtype(q.tensor);
  p->B = q.tensor.shape[0];
  p->T = q.tensor.shape[1];
  if (p->B > 0 && p->T > FLASH_QLA_MAX_TOKENS / p->B) {
    return value_error("q.shape[0] * q.shape[1] (%lld * %lld) must be at most %d tokens", as_ll(p->B), as_ll(p->T),
                       FLASH_QLA_MAX_TOKENS);
  }
  p->Hq = q.tensor.shape[2];
  p->K = q.tensor.shape[3];
  p->Hv = v.tensor.shape[2];
  p->V = v.tensor.shape[3];
  if (p->Hq < 1) return value_error("q.shape[2] (%lld) must be at least 1", as_ll(p->Hq));
  FLASH_QLA_RETURN_IF_ERROR(memory(q, Role::kInput));
  FLASH_QLA_RETURN_IF_ERROR(shape(k, Role::kInput,
                                  {{p->B, "q.shape[0]"},
                                   {p->T, "q.shape[1]"},
                                   {p->Hq, "q.shape[2]: q and k have equal head counts"},
                                   {p->K, "q.shape[3]"}}));
  FLASH_QLA_RETURN_IF_ERROR(shape(v, Role::kInput, {{p->B, "q.shape[0]"}, {p->T, "q.shape[1]"}, {-1, ""}, {-1, ""}}));
  if (p->Hv < 1 || p->Hv % p->Hq != 0) {
    return value_error("v.shape[2] (%lld) must be a multiple of k.shape[2] (%lld)", as_ll(p->Hv), as_ll(p->Hq));
  }
  p->group = p->Hv / p->Hq;
  if (p->K < 1 || p->K > FLASH_QLA_MAX_HEAD_DIM) {
    return value_error("q.shape[3] (%lld) must be from 1 to %d", as_ll(p->K), FLASH_QLA_MAX_HEAD_DIM);
  }
  if (p->V < 1 || p->V > FLASH_QLA_MAX_HEAD_DIM) {
    return value_error("v.shape[3] (%lld) must be from 1 to %d", as_ll(p->V), FLASH_QLA_MAX_HEAD_DIM);
  }
  p->scale = std::isnan(options().scale) ? 1.0 / std::sqrt(static_cast<double>(p->K)) : options().scale;
  p->varlen = present(cu_seqlens);
  if (p->varlen) {
    const Named cu{"cu_seqlens", cu_seqlens};
    FLASH_QLA_RETURN_IF_ERROR(rank(cu, 1));
    FLASH_QLA_RETURN_IF_ERROR(dtype_index(cu));
    if (cu_seqlens.shape[0] < 1) {
      return value_error("cu_seqlens.shape[0] (0) must be at least 1: the number of sequences + 1");
    }
    if (p->B != 1) return value_error("q.shape[0] (%lld) must be 1 with cu_seqlens", as_ll(p->B));
    FLASH_QLA_RETURN_IF_ERROR(memory(cu, Role::kInput));
  }
  p->N = p->varlen ? cu_seqlens.shape[0] - 1 : p->B;
  if (p->N > FLASH_QLA_MAX_TOKENS) {
    return value_error("%s (%lld) must be at most %d sequences", p->varlen ? "cu_seqlens.shape[0] - 1" : "q.shape[0]",
                       as_ll(p->N), FLASH_QLA_MAX_TOKENS);
  }
  p->chunk_bound = p->varlen ? p->T / kChunkSize + p->N : p->B * ceil_div(p->T, kChunkSize);
  // What every size that a path works out is a small multiple of.
  constexpr int64_t kMostElements = int64_t{1} << 56;
  if (p->Hv > kMostElements / (p->K * p->V * (p->B * p->T + p->N + 1))) {
    return value_error("v.shape[2] (%lld) must not be above 2^56 / (K V (tokens + sequences + 1))", as_ll(p->Hv));
  }
  return Status();
}

Status Validator::gates(const Tensor& g, const Tensor& beta, const Tensor& A_log, const Tensor& dt_bias,
                        const Problem& p) const {
  for (const Named& t : {Named{"g", g}, Named{"beta", beta}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(token_shape(t, Role::kInput, p));
    FLASH_QLA_RETURN_IF_ERROR(dtype_float(t, p));
  }
  if (options().use_gate_in_kernel) {
    if (!present(g)) return value_error("g (None) must be given with use_gate_in_kernel=True");
    if (!present(A_log)) return value_error("A_log (None) must be given with use_gate_in_kernel=True");
  } else {
    FLASH_QLA_RETURN_IF_ERROR(forbid({"A_log", A_log}, "must come with use_gate_in_kernel=True"));
    FLASH_QLA_RETURN_IF_ERROR(forbid({"dt_bias", dt_bias}, "must come with use_gate_in_kernel=True"));
  }
  if (options().use_beta_sigmoid_in_kernel && !present(beta)) {
    return value_error("beta (None) must be given with use_beta_sigmoid_in_kernel=True");
  }
  for (const Named& t : {Named{"A_log", A_log}, Named{"dt_bias", dt_bias}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(shape(t, Role::kInput, {{p.Hv, "v.shape[2]"}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_float(t, p));
  }
  return Status();
}

Status validate_pool(const Validator& check, const flash_qla_forward_arguments& args, ForwardKind kind,
                     const Problem& p) {
  const Named pool{"state_pool", args.state_pool}, initial{"initial_state_indices", args.initial_state_indices},
      final{"final_state_indices", args.final_state_indices}, has{"has_initial_state", args.has_initial_state},
      accepted{"num_accepted_tokens", args.num_accepted_tokens};
  if (!present(pool.tensor)) {
    for (const Named& t : {initial, final, has, accepted}) {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid(t, "must come with state_pool"));
    }
    return Status();
  }
  FLASH_QLA_RETURN_IF_ERROR(check.forbid({"initial_state", args.initial_state}, "must not come with state_pool"));
  FLASH_QLA_RETURN_IF_ERROR(check.forbid({"final_state", args.final_state}, "must not come with state_pool"));
  FLASH_QLA_RETURN_IF_ERROR(check.state_shape(pool, Role::kOutput, {-1, ""}, p));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(pool, p));
  int64_t expected = 1;
  for (int i = 3; i > 0; expected *= pool.tensor.shape[i], --i) {
    if (pool.tensor.shape[i] > 1 && pool.tensor.stride[i] != expected) {
      return check.value_error("state_pool.stride[%d] (%lld) must be %lld: each slot is contiguous", i,
                               Validator::as_ll(pool.tensor.stride[i]), Validator::as_ll(expected));
    }
  }

  const bool drafts = kind == ForwardKind::kRecurrent && !p.varlen;
  if (drafts && p.T > FLASH_QLA_MAX_DRAFT_TOKENS) {
    return check.value_error("q.shape[1] (%lld) must be at most %d draft tokens", Validator::as_ll(p.T),
                             FLASH_QLA_MAX_DRAFT_TOKENS);
  }
  FLASH_QLA_RETURN_IF_ERROR(check.require(initial));
  for (const Named& t : {initial, final}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(t));
    if (drafts && t.tensor.ndim == 2) {
      FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kInput, {{p.N, "the number of sequences"}, {-1, ""}}));
    } else {
      FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kInput, {{p.N, "the number of sequences"}}));
    }
  }
  const bool columns = initial.tensor.ndim == 2;
  if (columns && !present(accepted.tensor)) {
    return check.value_error("num_accepted_tokens (None) must be given with initial_state_indices of two dimensions");
  }
  if (present(accepted.tensor)) {
    if (!columns) {
      return check.value_error("initial_state_indices.ndim (%d) must be 2 with num_accepted_tokens",
                               initial.tensor.ndim);
    }
    FLASH_QLA_RETURN_IF_ERROR(check.vector_of_sequences(accepted, p, 0));
  }
  if (present(final.tensor) && final.tensor.ndim == 2 && final.tensor.shape[1] != p.T) {
    return check.value_error("final_state_indices.shape[1] (%lld) must be q.shape[1] (%lld)",
                             Validator::as_ll(final.tensor.shape[1]), Validator::as_ll(p.T));
  }
  if (!present(final.tensor) && columns && initial.tensor.shape[1] < p.T) {
    return check.value_error(
        "initial_state_indices.shape[1] (%lld) must be at least q.shape[1] (%lld) without final_state_indices",
        Validator::as_ll(initial.tensor.shape[1]), Validator::as_ll(p.T));
  }
  if (present(has.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.shape(has, Role::kInput, {{p.N, "the number of sequences"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(has, DType::kBool, "bool"));
  }
  return Status();
}

Status validate_checkpoints(const Validator& check, const flash_qla_forward_arguments& args, const Problem& p) {
  const Named packed{"checkpoints", args.checkpoints}, starts{"checkpoint_cu_starts", args.checkpoint_cu_starts},
      offsets{"checkpoint_offsets", args.checkpoint_offsets}, slots{"checkpoint_indices", args.checkpoint_indices};
  if (args.checkpoint_every < 0 || args.checkpoint_every % kChunkSize != 0) {
    return check.value_error("checkpoint_every (%lld) must be 0 or a multiple of %d",
                             Validator::as_ll(args.checkpoint_every), FLASH_QLA_CHUNK_SIZE);
  }
  if (args.checkpoint_every > 0) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(packed));
    FLASH_QLA_RETURN_IF_ERROR(check.require(starts));
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(packed, Role::kOutput, {-1, ""}, p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(packed, p));
    FLASH_QLA_RETURN_IF_ERROR(check.vector_of_sequences(starts, p, 1));
  } else {
    FLASH_QLA_RETURN_IF_ERROR(check.forbid(packed, "must come with checkpoint_every"));
    FLASH_QLA_RETURN_IF_ERROR(check.forbid(starts, "must come with checkpoint_every"));
  }
  if (present(offsets.tensor) || present(slots.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(offsets));
    FLASH_QLA_RETURN_IF_ERROR(check.require(slots));
    FLASH_QLA_RETURN_IF_ERROR(check.require({"state_pool", args.state_pool}));
    FLASH_QLA_RETURN_IF_ERROR(check.shape(offsets, Role::kInput, {{-1, ""}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(offsets));
    FLASH_QLA_RETURN_IF_ERROR(
        check.shape(slots, Role::kInput, {{offsets.tensor.shape[0], "checkpoint_offsets.shape[0]"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(slots));
  }
  return Status();
}

// What a caller hands over to be written shares no memory with what is read, nor with each other.
Status validate_memory(const Validator& check, const flash_qla_forward_arguments& args) {
  const Named written[] = {{"state_pool", args.state_pool}, {"checkpoints", args.checkpoints}, {"o", args.o}};
  const Named others[] = {{"q", args.q},
                          {"k", args.k},
                          {"v", args.v},
                          {"g", args.g},
                          {"beta", args.beta},
                          {"A_log", args.A_log},
                          {"dt_bias", args.dt_bias},
                          {"cu_seqlens", args.cu_seqlens},
                          {"initial_state", args.initial_state},
                          {"initial_state_indices", args.initial_state_indices},
                          {"final_state_indices", args.final_state_indices},
                          {"has_initial_state", args.has_initial_state},
                          {"num_accepted_tokens", args.num_accepted_tokens},
                          {"checkpoint_cu_starts", args.checkpoint_cu_starts},
                          {"checkpoint_offsets", args.checkpoint_offsets},
                          {"checkpoint_indices", args.checkpoint_indices},
                          {"final_state", args.final_state},
                          {"g_cumsum", args.g_cumsum},
                          {"A", args.A},
                          {"h", args.h}};
  return check.apart(written, others);
}

Status validate_A(const Validator& check, const Tensor& A, const Tensor& k, Role role, const Problem& p) {
  const Named t{"A", A};
  FLASH_QLA_RETURN_IF_ERROR(check.shape(
      t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}, {kChunkSize, "the chunk size"}}));
  return check.dtype_is(t, dtype(k), "that of k");
}

Status validate_values(const Validator& check, const Named& t, Role role, const Problem& p) {
  return check.shape(t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}, {p.V, "v.shape[3]"}});
}

}  // namespace

Status validate_forward(const flash_qla_forward_arguments& args, ForwardKind kind, const char* operation,
                        bool need_data, Problem* p) {
  const Validator check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.sizes({"q", args.q}, {"k", args.k}, {"v", args.v}, args.cu_seqlens, p));
  FLASH_QLA_RETURN_IF_ERROR(check.gates(args.g, args.beta, args.A_log, args.dt_bias, *p));
  const Extent sequences{p->N, "the number of sequences"};
  if (present(args.initial_state)) {
    const Named t{"initial_state", args.initial_state};
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(t, Role::kInput, sequences, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  FLASH_QLA_RETURN_IF_ERROR(validate_pool(check, args, kind, *p));

  const Named o{"o", args.o}, final_state{"final_state", args.final_state}, g_cumsum{"g_cumsum", args.g_cumsum},
      A{"A", args.A}, h{"h", args.h};
  FLASH_QLA_RETURN_IF_ERROR(check.require(o));
  FLASH_QLA_RETURN_IF_ERROR(validate_values(check, o, Role::kOutput, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(o, p->dtype, "that of q"));
  if (present(final_state.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(final_state, Role::kOutput, sequences, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_accumulator(final_state, *p));
  }
  if (kind == ForwardKind::kRecurrent) {
    for (const Named& t :
         {g_cumsum, A, h, Named{"checkpoints", args.checkpoints},
          Named{"checkpoint_cu_starts", args.checkpoint_cu_starts},
          Named{"checkpoint_offsets", args.checkpoint_offsets}, Named{"checkpoint_indices", args.checkpoint_indices}}) {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid(t, "must be left to the chunked forward"));
    }
    if (args.checkpoint_every != 0) {
      return check.value_error("checkpoint_every (%lld) must be left to the chunked forward",
                               Validator::as_ll(args.checkpoint_every));
    }
    return validate_memory(check, args);
  }
  FLASH_QLA_RETURN_IF_ERROR(
      check.forbid({"num_accepted_tokens", args.num_accepted_tokens}, "must be left to the recurrent forward"));
  FLASH_QLA_RETURN_IF_ERROR(validate_checkpoints(check, args, *p));
  if (present(g_cumsum.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.token_shape(g_cumsum, Role::kOutput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_accumulator(g_cumsum, *p));
  }
  if (present(A.tensor)) FLASH_QLA_RETURN_IF_ERROR(validate_A(check, args.A, args.k, Role::kOutput, *p));
  if (present(h.tensor)) {
    const Extent rows = p->varlen ? Extent{-1, ""} : Extent{p->chunk_bound, "the number of chunks"};
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(h, Role::kOutput, rows, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(h, dtype(args.k), "that of k"));
  }
  return validate_memory(check, args);
}

Status validate_backward(const flash_qla_backward_arguments& args, const char* operation, bool need_data, Problem* p) {
  const Validator check(operation, args.options, need_data);
  FLASH_QLA_RETURN_IF_ERROR(check.sizes({"q", args.q}, {"k", args.k}, {"v", args.v}, args.cu_seqlens, p));
  FLASH_QLA_RETURN_IF_ERROR(check.gates(args.g, args.beta, args.A_log, args.dt_bias, *p));
  if (args.g_is_cumsum) {
    if (args.options.use_gate_in_kernel) {
      return check.value_error("use_gate_in_kernel (True) must not come with a cumsum of the gate");
    }
    FLASH_QLA_RETURN_IF_ERROR(check.require({"g", args.g}));
  }
  const Extent sequences{p->N, "the number of sequences"};
  for (const Named& t : {Named{"initial_state", args.initial_state}, Named{"dht", args.dht}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(t, Role::kInput, sequences, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  if (present(args.A)) FLASH_QLA_RETURN_IF_ERROR(validate_A(check, args.A, args.k, Role::kInput, *p));
  for (const Named& t : {Named{"o", args.o}, Named{"do", args.d_o}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(validate_values(check, t, Role::kInput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  for (const Named& t : {Named{"dq", args.dq}, Named{"dk", args.dk}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.shape(
        t, Role::kOutput, {{p->B, "q.shape[0]"}, {p->T, "q.shape[1]"}, {p->Hq, "q.shape[2]"}, {p->K, "q.shape[3]"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(t, p->dtype, "that of q"));
  }
  if (present(args.dv)) {
    const Named dv{"dv", args.dv};
    FLASH_QLA_RETURN_IF_ERROR(validate_values(check, dv, Role::kOutput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(dv, p->dtype, "that of q"));
  }
  for (const Named& t : {Named{"dg", args.dg}, Named{"dbeta", args.dbeta}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.token_shape(t, Role::kOutput, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  if (present(args.dh0)) {
    const Named dh0{"dh0", args.dh0};
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(dh0, Role::kOutput, sequences, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(dh0, *p));
  }
  for (const Named& t : {Named{"dA_log", args.dA_log}, Named{"ddt_bias", args.ddt_bias}}) {
    if (!present(t.tensor)) continue;
    if (!args.options.use_gate_in_kernel) {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid(t, "must come with use_gate_in_kernel=True"));
    }
    FLASH_QLA_RETURN_IF_ERROR(check.shape(t, Role::kOutput, {{p->Hv, "v.shape[2]"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_float(t, *p));
  }
  if (present(args.ddt_bias)) FLASH_QLA_RETURN_IF_ERROR(check.require({"dt_bias", args.dt_bias}));
  const Named q_norm{"q_inverse_norm", args.q_inverse_norm}, k_norm{"k_inverse_norm", args.k_inverse_norm};
  if (!present(q_norm.tensor) && !present(k_norm.tensor)) return Status();
  for (const Named& t : {q_norm, k_norm}) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(t));
    if (args.options.use_qk_l2norm_in_kernel) {
      FLASH_QLA_RETURN_IF_ERROR(check.forbid(t, "must not come with use_qk_l2norm_in_kernel=True"));
    }
    FLASH_QLA_RETURN_IF_ERROR(
        check.shape(t, Role::kInput, {{p->B, "q.shape[0]"}, {p->T, "q.shape[1]"}, {p->Hq, "q.shape[2]"}}));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_accumulator(t, *p));
  }
  return Status();
}

}  // namespace flash_qla
