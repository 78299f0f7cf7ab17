#include "core/validate.h"

#include <string>

#include "core/validator.h"

namespace flash_qla {
namespace {

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
  FLASH_QLA_RETURN_IF_ERROR(check.whole_states(pool));

  const bool drafts = kind == ForwardKind::kRecurrent && !p.varlen;
  if (drafts) FLASH_QLA_RETURN_IF_ERROR(check.draft_tokens(p));
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

// States of parts beside those of rows (entering_*, leaving_*): both of a pair or neither.
Status validate_parts_states(const Validator& check, const Named& rows, const Named& states, const Problem& p) {
  if (!present(rows.tensor) && !present(states.tensor)) return Status();
  FLASH_QLA_RETURN_IF_ERROR(check.require(rows));
  FLASH_QLA_RETURN_IF_ERROR(check.require(states));
  FLASH_QLA_RETURN_IF_ERROR(check.shape(rows, Role::kInput, {{-1, ""}}));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_index(rows));
  const std::string parts = std::string(rows.name) + ".shape[0]";
  FLASH_QLA_RETURN_IF_ERROR(check.shape(
      states, Role::kInput,
      {{rows.tensor.shape[0], parts.c_str()}, {p.Hv, "v.shape[2]"}, {p.K, "q.shape[3]"}, {p.V, "v.shape[3]"}}));
  return check.dtype_accumulator(states, p);
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
                          {"entering_rows", args.entering_rows},
                          {"entering_state", args.entering_state},
                          {"carry", args.carry},
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
  const Named entering_rows{"entering_rows", args.entering_rows}, entering_state{"entering_state", args.entering_state};
  FLASH_QLA_RETURN_IF_ERROR(validate_parts_states(check, entering_rows, entering_state, *p));
  if (present(args.state_pool)) FLASH_QLA_RETURN_IF_ERROR(check.forbid(entering_rows, "must not come with state_pool"));
  const Named carry{"carry", args.carry};
  if (present(carry.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.require(entering_rows));
    FLASH_QLA_RETURN_IF_ERROR(
        check.carry(carry, Role::kInput, {entering_rows.tensor.shape[0], "entering_rows.shape[0]"}));
  }

  const Named o{"o", args.o}, final_state{"final_state", args.final_state}, g_cumsum{"g_cumsum", args.g_cumsum},
      A{"A", args.A}, h{"h", args.h};
  FLASH_QLA_RETURN_IF_ERROR(check.require(o));
  FLASH_QLA_RETURN_IF_ERROR(check.value_rows(o, Role::kOutput, *p));
  FLASH_QLA_RETURN_IF_ERROR(check.dtype_is(o, p->dtype, "that of q"));
  if (present(final_state.tensor)) {
    FLASH_QLA_RETURN_IF_ERROR(check.state_shape(final_state, Role::kOutput, sequences, *p));
    FLASH_QLA_RETURN_IF_ERROR(check.dtype_accumulator(final_state, *p));
  }
  if (kind == ForwardKind::kRecurrent) {
    for (const Named& t :
         {g_cumsum, A, h, entering_rows, carry, Named{"checkpoints", args.checkpoints},
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
  FLASH_QLA_RETURN_IF_ERROR(
      validate_parts_states(check, {"entering_rows", args.entering_rows}, {"entering_state", args.entering_state}, *p));
  FLASH_QLA_RETURN_IF_ERROR(
      validate_parts_states(check, {"leaving_rows", args.leaving_rows}, {"leaving_dht", args.leaving_dht}, *p));
  if (present(args.A)) FLASH_QLA_RETURN_IF_ERROR(validate_A(check, args.A, args.k, Role::kInput, *p));
  for (const Named& t : {Named{"o", args.o}, Named{"do", args.d_o}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(check.value_rows(t, Role::kInput, *p));
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
    FLASH_QLA_RETURN_IF_ERROR(check.value_rows(dv, Role::kOutput, *p));
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
