// The states that a sequence leaves: after its last token, at listed positions and after draft tokens.
#pragma once

#include "cpu/layer/conv_rows.h"

namespace flash_qla::cpu {

// One thread's scratch for the states of a task.
template <class T>
struct ConvStateRows {
  T* before;  // [L, stride] the state that the sequence starts from
  T* after;   // [L, stride]

  ConvStateRows(Arena* arena, const ConvProblem& p, int64_t most) {
    before = arena->take<T>(p.L * most);
    after = arena->take<T>(p.L * most);
  }
};

template <class T>
void load_state(const flash_qla_conv_part& part, const ChannelBlock& block, const ConvSequence& s, const ConvProblem& p,
                int64_t stride, const ConvStateRows<T>& rows) {
  if (s.read_row < 0) return;
  load_rows(state_rows(part.initial_state, block, s.read_row, 0), p.L, block.columns, stride, rows.before);
}

// Writes the state after `tokens` tokens into row `row` of final_state. `input(t)` is the sequence's input t, a row.
template <class T, class Input>
void store_state(const flash_qla_conv_part& part, const ChannelBlock& block, const ConvSequence& s, int64_t tokens,
                 int64_t row, const ConvProblem& p, int64_t stride, const ConvStateRows<T>& rows, Input&& input) {
  for (int64_t l = 0; l < p.L; ++l) {
    T* to = rows.after + l * stride;
    const ConvSource source = s.after(l, tokens, p);
    switch (source.kind) {
      case ConvSource::Kind::kInput:
        input(source.index, to);
        break;
      case ConvSource::Kind::kState:
        std::copy_n(rows.before + source.index * stride, stride, to);
        break;
      default:
        std::fill_n(to, stride, T(0));
    }
  }
  store_rows(rows.after, p.L, block.columns, stride, state_rows(part.final_state, block, row, 0));
}

}  // namespace flash_qla::cpu
