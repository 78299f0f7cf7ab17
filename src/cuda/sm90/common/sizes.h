// Sizes that all Hopper kernels share, and where a sequence lies.
#pragma once

#include <cstdint>

namespace flash_qla::cuda::sm90 {

inline constexpr int kChunk = 64;     // tokens of a chunk: one wgmma M, and the UT inverse grows with its cube
inline constexpr int kHeadDim = 128;  // K = V
// e^-80 is nothing in fp32; a larger step would ruin the differences of the gates' sum.
inline constexpr float kGateFloor = -80.0f;

// One sequence.
struct SequenceSpan {
  int32_t start;        // first token
  int32_t length;       // tokens
  int32_t index;        // position in cu_seqlens
  int32_t first_chunk;  // chunks of all sequences before it
};

}  // namespace flash_qla::cuda::sm90
