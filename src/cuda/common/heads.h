// Some heads of a backward call as a call of their own.
#pragma once

#include "core/problem.h"

namespace flash_qla::cuda {

// Key heads [first, first + count) of a call, with the value heads of their groups.
inline flash_qla_backward_arguments heads_of(const flash_qla_backward_arguments& args, const Problem& p, int64_t first,
                                             int64_t count) {
  flash_qla_backward_arguments part = args;
  const auto cut = [](Tensor* t, int dimension, int64_t begin, int64_t size) {
    if (!present(*t)) return;
    if (t->data != nullptr) {
      t->data = static_cast<char*>(t->data) + begin * t->stride[dimension] * size_of(dtype(*t));
    }
    t->shape[dimension] = size;
  };
  for (Tensor* t : {&part.q, &part.k, &part.dq, &part.dk, &part.q_inverse_norm, &part.k_inverse_norm}) {
    cut(t, 2, first, count);
  }
  const int64_t first_value = first * p.group, values = count * p.group;
  for (Tensor* t : {&part.v, &part.A, &part.d_o, &part.dv, &part.g, &part.beta, &part.dg, &part.dbeta}) {
    cut(t, 2, first_value, values);
  }
  for (Tensor* t : {&part.initial_state, &part.dht, &part.dh0}) cut(t, 1, first_value, values);
  for (Tensor* t : {&part.A_log, &part.dt_bias, &part.dA_log, &part.ddt_bias}) cut(t, 0, first_value, values);
  return part;
}

inline Problem problem_of(const Problem& p, int64_t key_heads) {
  Problem part = p;
  part.Hq = key_heads;
  part.Hv = key_heads * p.group;
  return part;
}

}  // namespace flash_qla::cuda
