// Sizes that all Hopper kernels share, and where a sequence lies.
#pragma once

#include <cstdint>

#include "flash_qla/flash_qla.hpp"

namespace flash_qla::cuda::sm90 {

// Tokens of a chunk: one wgmma M, and the UT transform grows with its cube.
inline constexpr int kChunk = FLASH_QLA_CHUNK_SIZE;
inline constexpr int kHeadDim = 128;  // K = V
// e^-80 is nothing in fp32; a larger step would ruin the differences of the gates' sum.
inline constexpr float kGateFloor = -80.0f;
inline constexpr float kLog2e = 1.4426950408889634f;

// One sequence.
struct SequenceSpan {
  int32_t start;        // first token
  int32_t length;       // tokens
  int32_t index;        // position in cu_seqlens
  int32_t first_chunk;  // chunks of all sequences before it
};

}  // namespace flash_qla::cuda::sm90
