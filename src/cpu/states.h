// Where the state of a (sequence, value head) comes from and goes to: initial_state, an entering state, a pool slot, or
// zero; final_state, pool slots.
#pragma once

#include "core/host_tensor.h"
#include "core/problem.h"
#include "cpu/kernels.h"
#include "cpu/tensors.h"

namespace flash_qla::cpu {

class StateIo {
 public:
  StateIo(const flash_qla_forward_arguments& args, int64_t n);

  // The row reads a null slot: its outputs are zero and nothing is written.
  bool skipped() const { return skipped_; }

  // Whether each token's state goes to a slot of its own.
  bool per_token() const { return per_token_; }

  // Reads the initial state as [K, V], or as [V, K] with `as_v_first`.
  template <class T>
  void read(const Problem& p, int64_t head, bool as_v_first, T* S) const {
    if (read_slot_ >= 0) return load(args_.state_pool, v_first(), p, read_slot_, head, as_v_first, S);
    if (const int64_t part = part_of_row(args_.entering_rows, n_); part >= 0) {
      return load(args_.entering_state, false, p, part, head, as_v_first, S);
    }
    if (present(args_.initial_state)) return load(args_.initial_state, v_first(), p, n_, head, as_v_first, S);
    for (int64_t i = 0; i < p.K * p.V; ++i) S[i] = T(0);
  }

  // Stores the state after the sequence's last token.
  template <class T>
  void write_final(const Problem& p, int64_t head, bool as_v_first, const T* S) const {
    if (present(args_.final_state)) store(args_.final_state, p, n_, head, as_v_first, S);
    if (present(args_.state_pool) && !per_token_) write_slot(p, load_index(final_indices(), n_), head, as_v_first, S);
  }

  // Stores the state after token t, where each token has a slot.
  template <class T>
  void write_token(const Problem& p, int64_t t, int64_t head, bool as_v_first, const T* S) const {
    write_slot(p, load_index(final_indices(), n_, t), head, as_v_first, S);
  }

  // Stores into the pool slot of an index, unless the index is null or past the pool.
  template <class T>
  void write_slot(const Problem& p, int64_t index, int64_t head, bool as_v_first, const T* S) const {
    const int64_t slot = slot_or_skip(index, args_.null_index, args_.state_pool.shape[0]);
    if (slot >= 0) store(args_.state_pool, p, slot, head, as_v_first, S);
  }

  // Stores into row `row` of a tensor of states.
  template <class T>
  void store(const Tensor& t, const Problem& p, int64_t row, int64_t head, bool as_v_first, const T* S) const {
    const View view = state_view(t, v_first(), row, head);
    as_v_first ? kernels<T>().store(S, p.V, p.K, transposed(view)) : kernels<T>().store(S, p.K, p.V, view);
  }

 private:
  template <class T>
  void load(const Tensor& t, bool v_first, const Problem& p, int64_t row, int64_t head, bool as_v_first, T* S) const {
    const View view = state_view(t, v_first, row, head);
    as_v_first ? kernels<T>().load(transposed(view), p.V, p.K, S) : kernels<T>().load(view, p.K, p.V, S);
  }

  bool v_first() const { return args_.options.state_v_first != 0; }
  const Tensor& final_indices() const {
    return present(args_.final_state_indices) ? args_.final_state_indices : args_.initial_state_indices;
  }

  const flash_qla_forward_arguments& args_;
  int64_t n_;
  int64_t read_slot_ = -1;
  bool skipped_ = false;
  bool per_token_ = false;
};

}  // namespace flash_qla::cpu
