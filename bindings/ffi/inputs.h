// The inputs that the delta rule's operations share, from Python's tensors to an arguments structure.
#pragma once

#include "call.h"

namespace flash_qla::python {

template <class Arguments>
void fill_inputs(const Call& call, const ffi::TensorView& q, const ffi::TensorView& k, const ffi::TensorView& v,
                 const OptionalTensor& g, const OptionalTensor& beta, const OptionalTensor& A_log,
                 const OptionalTensor& dt_bias, const OptionalTensor& cu_seqlens, const OptionalTensor& initial_state,
                 Arguments* args) {
  args->q = call.tensor("q", q, kInputs);
  args->k = call.tensor("k", k, kInputs);
  args->v = call.tensor("v", v, kInputs);
  args->g = call.tensor("g", g);
  args->beta = call.tensor("beta", beta);
  args->A_log = call.tensor("A_log", A_log);
  args->dt_bias = call.tensor("dt_bias", dt_bias);
  args->cu_seqlens = call.tensor("cu_seqlens", cu_seqlens, kIndices);
  args->initial_state = call.tensor("initial_state", initial_state);
}

inline void fill_gradients(const Call& call, const OptionalTensor& dq, const OptionalTensor& dk,
                           const OptionalTensor& dv, const OptionalTensor& dg, const OptionalTensor& dbeta,
                           const OptionalTensor& dh0, const OptionalTensor& dA_log, const OptionalTensor& ddt_bias,
                           flash_qla_backward_arguments* args) {
  args->dq = call.tensor("dq", dq);
  args->dk = call.tensor("dk", dk);
  args->dv = call.tensor("dv", dv);
  args->dg = call.tensor("dg", dg);
  args->dbeta = call.tensor("dbeta", dbeta);
  args->dh0 = call.tensor("dh0", dh0);
  args->dA_log = call.tensor("dA_log", dA_log);
  args->ddt_bias = call.tensor("ddt_bias", ddt_bias);
}

}  // namespace flash_qla::python
