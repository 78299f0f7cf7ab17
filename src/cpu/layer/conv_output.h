// From u to the outputs of some tokens in scratch: activation, norm of a head, residual.
#pragma once

#include "cpu/layer/conv_rows.h"

namespace flash_qla::cpu {

inline std::vector<ChannelBlock> channel_blocks(const flash_qla_conv_arguments& args) {
  std::vector<ChannelBlock> blocks;
  int64_t before = 0;
  for (int32_t i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_part& part = args.parts[i];
    append_blocks(&blocks, i, part.x, part.l2norm != 0, {&part.x, &part.y, &part.residual}, before);
    before += part.x.shape[2] * part.x.shape[3];
  }
  return blocks;
}

template <class T>
struct ConvOutput {
  T* u;         // [tokens, stride] u, then y
  T* r;         // [tokens] inverse norms
  T* residual;  // [tokens, stride]

  ConvOutput(Arena* arena, int64_t tokens, int64_t most, bool has_residual) {
    u = arena->take<T>(tokens * most);
    r = arena->take<T>(tokens);
    residual = has_residual ? arena->take<T>(tokens * most) : nullptr;
  }

  // Tokens [begin, end) of batch row b, whose u is there, as y; row 0 of the scratch is token `at`.
  void finish(const flash_qla_conv_part& part, int32_t activation, const ChannelBlock& block, int64_t b, int64_t begin,
              int64_t end, int64_t at, int64_t stride) {
    T* y = u + (begin - at) * stride;
    const int64_t rows = end - begin;
    if (activation == FLASH_QLA_ACTIVATION_SILU) layer_kernels<T>().silu(y, rows * stride, y);
    if (part.l2norm) {
      layer_kernels<T>().normalise(y, rows, block.columns, stride, T(1), static_cast<T>(kL2NormEps), r + (begin - at));
    }
    if (!present(part.residual)) return;
    load_rows(block_rows(part.residual, block, b, begin), rows, block.columns, stride, residual);
    kernels<T>().add(residual, rows * stride, y);
  }

  // Tokens that have no output.
  void zero(int64_t begin, int64_t end, int64_t at, int64_t stride) {
    std::fill(u + (begin - at) * stride, u + (end - at) * stride, T(0));
    std::fill(r + (begin - at), r + (end - at), static_cast<T>(1.0 / std::sqrt(kL2NormEps)));
  }

  void store(const flash_qla_conv_part& part, const ChannelBlock& block, int64_t b, int64_t begin, int64_t end,
             int64_t stride) const {
    store_rows(u, end - begin, block.columns, stride, block_rows(part.y, block, b, begin));
    for (int64_t t = begin; present(part.inverse_norm) && t < end; ++t) {
      flash_qla::store(part.inverse_norm, offset_of(part.inverse_norm, b, t, block.head), r[t - begin]);
    }
  }
};

// Zeroes the rows of tokens that seq_idx gives to no sequence.
template <class T>
void zero_negative(const Tensor& seq_idx, int64_t b, int64_t begin, int64_t end, int64_t at, int64_t stride,
                   ConvOutput<T>* out) {
  for (int64_t t = begin; present(seq_idx) && t < end; ++t) {
    if (sequence_index(seq_idx, b, t) < 0) out->zero(t, t + 1, at, stride);
  }
}

// g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), for all tokens.
void conv_gates(const flash_qla_conv_arguments& args, const ConvProblem& p);

}  // namespace flash_qla::cpu
