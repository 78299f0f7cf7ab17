// A verify call as host code reads it: where a sequence starts, which token a draft token continues, where its states
// go.
#pragma once

#include "core/host_tensor.h"

namespace flash_qla {

// The pool slot that sequence n starts from, or -1: it is skipped.
inline int64_t verify_slot(const flash_qla_verify_arguments& args, int64_t n) {
  return slot_or_skip(load_index(args.initial_state_indices, n), args.null_index, args.state_pool.shape[0]);
}

// The row of states_out that sequence n has, or -1: its states are not wanted.
inline int64_t verify_row(const flash_qla_verify_arguments& args, int64_t n) {
  if (!present(args.states_out)) return -1;
  return slot_or_skip(present(args.states_out_indices) ? load_index(args.states_out_indices, n) : n, -1,
                      args.states_out.shape[0]);
}

// The token that token t of sequence n continues, or -1: the pool's state.
inline int64_t verify_parent(const flash_qla_verify_arguments& args, int64_t n, int64_t t) {
  const int64_t parent = present(args.parents) ? load_index(args.parents, n, t) : t - 1;
  return parent >= 0 && parent < t ? parent : -1;
}

// The states after token t: [rows, Hv, K, V] of [rows, T, Hv, K, V].
inline Tensor states_after(const Tensor& states_out, int64_t t) {
  Tensor states = states_out;
  states.data = static_cast<char*>(states.data) + t * states.stride[1] * size_of(dtype(states));
  for (int i = 1; i < 4; ++i) {
    states.shape[i] = states_out.shape[i + 1];
    states.stride[i] = states_out.stride[i + 1];
  }
  states.ndim = 4;
  return states;
}

}  // namespace flash_qla
