// Some heads of a backward call as a call of their own, where all together would take too much scratch.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"

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

// Scratch of a call's first key heads, `whole` being what all of its heads have in common.
template <class Heads, class Whole>
size_t heads_bytes(const Whole& whole, const flash_qla_backward_arguments& args, const Problem& p, int64_t key_heads) {
  return workspace_bytes<Heads>(whole, heads_of(args, p, 0, key_heads), problem_of(p, key_heads));
}

// All heads in groups of `at_once` key heads, one after another in the same scratch.
template <class Heads, class Whole>
Status run_heads(const Whole& whole, const flash_qla_backward_arguments& args, const Problem& p, int64_t at_once,
                 void* memory, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  for (int64_t first = 0; first < p.Hq; first += at_once) {
    const int64_t count = std::min(at_once, p.Hq - first);
    const flash_qla_backward_arguments part = heads_of(args, p, first, count);
    const Problem of_part = problem_of(p, count);
    Workspace workspace(memory);
    FLASH_QLA_RETURN_IF_ERROR(Heads(whole, part, of_part, &workspace).run(static_cast<cudaStream_t>(stream)));
  }
  return Status();
}

}  // namespace flash_qla::cuda
