#include "core/validator.h"

#include <cmath>

namespace flash_qla {

Status Validator::sizes(const Named& q, const Named& k, const Named& v, const Tensor& cu_seqlens, Problem* p) const {
  FLASH_QLA_RETURN_IF_ERROR(options());
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
  p->scale = std::isnan(call_options().scale) ? 1.0 / std::sqrt(static_cast<double>(p->K)) : call_options().scale;
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
  if (call_options().use_gate_in_kernel) {
    if (!present(g)) return value_error("g (None) must be given with use_gate_in_kernel=True");
    if (!present(A_log)) return value_error("A_log (None) must be given with use_gate_in_kernel=True");
  } else {
    FLASH_QLA_RETURN_IF_ERROR(forbid({"A_log", A_log}, "must come with use_gate_in_kernel=True"));
    FLASH_QLA_RETURN_IF_ERROR(forbid({"dt_bias", dt_bias}, "must come with use_gate_in_kernel=True"));
  }
  if (call_options().use_beta_sigmoid_in_kernel && !present(beta)) {
    return value_error("beta (None) must be given with use_beta_sigmoid_in_kernel=True");
  }
  for (const Named& t : {Named{"A_log", A_log}, Named{"dt_bias", dt_bias}}) {
    if (!present(t.tensor)) continue;
    FLASH_QLA_RETURN_IF_ERROR(shape(t, Role::kInput, {{p.Hv, "v.shape[2]"}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_float(t, p));
  }
  return Status();
}

}  // namespace flash_qla
