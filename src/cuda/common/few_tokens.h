// Gradients that are those of a few tokens: where 16-bit operands do not keep their bounds (docs/numerics.md).
#pragma once

#include "core/problem.h"

namespace flash_qla::cuda {

// Tokens that the final state's gradient reaches, each counted by the square of its decay. The relative error of n such
// inner products is 3.3e-3 (by emulation) over the root of the mean square of n normal numbers: past the bound only
// where that is a fifth, which for six is one head in two thousand.
constexpr float kFewReached = 6.0f;
// Decays of a token, likewise by their squares: dg is in proportion to them, and where they add up to so few it is that
// of a few tokens.
constexpr float kFewKept = kFewReached;
// The last tokens that are computed once more where they are few: so short a sequence has no others.
constexpr int kLastTokens = 2 * static_cast<int>(kChunkSize);

// Sequences of at most kLastTokens tokens, times value heads, up to which these take fp32 for dbeta and dg: two for
// each multiprocessor, some 0.1 ms. A call whose sequences must not depend on what is computed beside them takes it
// always.
constexpr int64_t kMostExactShort = 264;

inline bool has_exact_short(const flash_qla_options& options, const Problem& p) {
  return options.cp_mode != FLASH_QLA_CP_AUTO || p.N * p.Hv <= kMostExactShort;
}

// dq and dk of one token have a single inner product of rounded operands for a factor, and a few percent of these are
// past the bound. So calls of one chunk are left to float32: 0.11 ms on the device in place of 0.04 to 0.05, beside
// about 0.07 that a call takes on the host. Not where a caller names a path, nor where a sequence's bits must not
// depend on what is computed beside it.
inline bool wants_float32(const flash_qla_options& options, const Problem& p) {
  return options.path == nullptr && options.cp_mode == FLASH_QLA_CP_AUTO && p.B * p.T <= kChunkSize;
}

}  // namespace flash_qla::cuda
