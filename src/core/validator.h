// The delta rule's rules, beside those of any tensor. Each refusal names operation, argument, rule and what was given.
// Reads no tensor memory.
#pragma once

#include "core/tensor_checks.h"

namespace flash_qla {

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
    if (call_options().state_v_first) return shape(t, role, {rows, heads, value, key});
    return shape(t, role, {rows, heads, key, value});
  }

  // Each state, the last three dimensions, is contiguous.
  Status whole_states(const Named& t) const {
    int64_t expected = 1;
    const int32_t first = t.tensor.ndim - 3;
    for (int32_t i = t.tensor.ndim - 1; i >= first; expected *= t.tensor.shape[i], --i) {
      if (t.tensor.shape[i] > 1 && t.tensor.stride[i] != expected) {
        return value_error("%s.stride[%d] (%lld) must be %lld: each slot is contiguous", t.name, i,
                           as_ll(t.tensor.stride[i]), as_ll(expected));
      }
    }
    return Status();
  }

  Status token_shape(const Named& t, Role role, const Problem& p) const {
    return shape(t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}});
  }

  // [B, T, Hv, V]
  Status value_rows(const Named& t, Role role, const Problem& p) const {
    return shape(t, role, {{p.B, "q.shape[0]"}, {p.T, "q.shape[1]"}, {p.Hv, "v.shape[2]"}, {p.V, "v.shape[3]"}});
  }

  // [P, n] float32 as flash_qla/chunk_summary.h has it.
  Status carry(const Named& t, Role role, const Extent& parts) const {
    FLASH_QLA_RETURN_IF_ERROR(shape(t, role, {parts, {-1, ""}}));
    FLASH_QLA_RETURN_IF_ERROR(dtype_is(t, DType::kFloat32, "float32"));
    const Tensor& x = t.tensor;
    const bool side_by_side = x.stride[1] == 1 && (x.shape[0] <= 1 || x.stride[0] == x.shape[1]);
    if (side_by_side && reinterpret_cast<uintptr_t>(x.data) % 16 == 0) return Status();
    return value_error("%s must be contiguous and on a 16-byte boundary", t.name);
  }

  // T of a call that takes the tokens of one row as drafts.
  Status draft_tokens(const Problem& p) const {
    if (p.T <= FLASH_QLA_MAX_DRAFT_TOKENS) return Status();
    return value_error("q.shape[1] (%lld) must be at most %d draft tokens", as_ll(p.T), FLASH_QLA_MAX_DRAFT_TOKENS);
  }

  Status vector_of_sequences(const Named& t, const Problem& p, int64_t extra) const {
    FLASH_QLA_RETURN_IF_ERROR(
        shape(t, Role::kInput, {{p.N + extra, extra ? "the number of sequences + 1" : "the number of sequences"}}));
    return dtype_index(t);
  }

  Status options() const {
    FLASH_QLA_RETURN_IF_ERROR(device_options());
    const flash_qla_options& o = call_options();
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

}  // namespace flash_qla
