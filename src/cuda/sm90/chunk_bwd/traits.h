// Sizes and layouts that the backward's kernels share.
#pragma once

#include <cstdint>

#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::bwd {

// 64 rows of 64 16-bit elements: rows of 128 bytes, their 16-byte pieces permuted by (piece ^ row % 8), the 128-byte
// swizzle that the copy engine and wgmma share. Every operand is made of these.
constexpr uint32_t kTileBytes = 64 * 128;

constexpr uint32_t kStateBytes = 4 * kTileBytes;      // 128 x 128
constexpr uint32_t kStateHalfBytes = 2 * kTileBytes;  // all of V, 64 of K
constexpr uint32_t kTokensBytes = 2 * kTileBytes;     // 64 tokens x 128

// cumsum, gamma, gC / gamma, beta of a chunk.
constexpr int kGateVectors = 4;
constexpr uint32_t kGateBytes = kGateVectors * kChunk * sizeof(float);
constexpr uint32_t kGammaOffset = kChunk * 4, kRatioOffset = 2 * kChunk * 4, kBetaOffset = 3 * kChunk * 4;

// What the passes take of a chunk's gates: cumsum, and in the order in which a thread of a warpgroup wants its columns
// of an accumulator (gates.cuh) gC / gamma, -gamma beta, beta, beta of dv (1 where it is small: below), scale gamma.
constexpr int kPassVectors = 6;
constexpr uint32_t kPassGateBytes = kPassVectors * kChunk * sizeof(float);
constexpr uint32_t kAllGateBytes = kGateBytes + kPassGateBytes;
constexpr uint32_t kPassRatio = kChunk * 4, kPassStep = 2 * kChunk * 4, kPassBeta = 3 * kChunk * 4;
constexpr uint32_t kPassGiven = 4 * kChunk * 4, kPassFactor = 5 * kChunk * 4;

// What Args::progress counts of a pair and value head: two chunks, two passes, two halves of V.
constexpr uint32_t kPairCount = 8;

constexpr int32_t pairs_of(int32_t chunks) { return (chunks + 1) / 2; }

// Pairs of a sequence up to which the passes may leave its states in fp32 for dg: errors that the passes add up
// outweigh those of the tiles in sequences beyond some 1,000 tokens. Sequences of one pair have dg from
// last_tokens.cuh.
constexpr int32_t kExactPairs = 8;
constexpr bool wants_exact(int32_t pairs) { return pairs >= 2 && pairs <= kExactPairs; }

// The longest warm-up, in chunks. Beyond it a head costs less the exact way (the first round is three passes over a
// segment).
constexpr int kMostWarmup = 8;

// States that the first round over segments leaves of each (segments.cuh).
constexpr int kEdgesOfSegment = 3;

// dv = beta Z is stored as Z where |beta| is below this, so that the gradient of beta, <dv, V'> / beta^2, needs no
// division by it; such rows take the slow form of small_betas.cuh. What a small beta costs is range, not digits: both
// factors are beta times something. fp16: 2^-6 keeps V' = beta * error among its normal numbers for errors down to
// 4e-3. bf16 has the range of fp32: at 2^-30 the sum of products, beta^2 times an inner product, is a normal number for
// inner products down to 1e-20, and what is left below are zeros.
constexpr float small_beta(DType type) { return type == DType::kFloat16 ? 0x1p-6f : 0x1p-30f; }

}  // namespace flash_qla::cuda::sm90::bwd
