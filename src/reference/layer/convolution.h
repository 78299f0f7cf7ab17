// One channel's inputs and one head's outputs in fp64, as the formulas of flash_qla/convolution.h have them.
#pragma once

#include "core/convolution_host.h"
#include "reference/tokens.h"

namespace flash_qla::reference {

// Input `source` of channel `channel` = (head, dim) of a part.
template <class Part>
double load_source(const Part& part, const ConvSequence& s, const ConvSource& source, int64_t head, int64_t dim) {
  const int64_t channel = head * part.x.shape[3] + dim;
  switch (source.kind) {
    case ConvSource::Kind::kInput:
      return load(part.x, offset_of(part.x, s.b, s.begin + source.index, head, dim));
    case ConvSource::Kind::kState:
      return load(part.initial_state, offset_of(part.initial_state, s.read_row, channel, source.index));
    default:
      return 0.0;
  }
}

// The source of term j of token t: none where seq_idx parts the two.
template <class Arguments>
ConvSource term(const Arguments& args, const ConvSequence& s, int64_t t, int64_t j, const ConvProblem& p) {
  const int64_t from = t - (p.W - 1) + j;
  if (present(args.seq_idx) &&
      (from < 0 || sequence_index(args.seq_idx, s.b, from) != sequence_index(args.seq_idx, s.b, t))) {
    return {};
  }
  return s.input(from, p);
}

// Whether token t of a sequence has an output.
template <class Arguments>
bool has_output(const Arguments& args, const ConvSequence& s, int64_t t) {
  return !s.skipped && (!present(args.seq_idx) || sequence_index(args.seq_idx, s.b, s.begin + t) >= 0);
}

// u of one head's row.
template <class Arguments, class Part>
Vector convolve_row(const Arguments& args, const Part& part, const ConvSequence& s, int64_t t, int64_t head,
                    const ConvProblem& p) {
  const int64_t D = part.x.shape[3];
  Vector u(static_cast<size_t>(D), 0.0);
  for (int64_t i = 0; i < D; ++i) {
    const int64_t channel = head * D + i;
    double sum = present(part.bias) ? load(part.bias, offset_of(part.bias, channel)) : 0.0;
    for (int64_t j = 0; j < p.W; ++j) {
      sum +=
          load(part.weight, offset_of(part.weight, channel, j)) * load_source(part, s, term(args, s, t, j, p), head, i);
    }
    u[static_cast<size_t>(i)] = sum;
  }
  return u;
}

inline double activate(int32_t activation, double u) {
  return activation == FLASH_QLA_ACTIVATION_SILU      ? u * sigmoid(u)
         : activation == FLASH_QLA_ACTIVATION_SIGMOID ? sigmoid(u)
                                                      : u;
}
inline double activation_slope(int32_t activation, double u) {
  const double s = sigmoid(u);
  return activation == FLASH_QLA_ACTIVATION_SILU      ? s + u * s * (1.0 - s)
         : activation == FLASH_QLA_ACTIVATION_SIGMOID ? s * (1.0 - s)
                                                      : 1.0;
}

}  // namespace flash_qla::reference
