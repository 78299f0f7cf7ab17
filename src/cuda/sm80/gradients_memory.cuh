// Shapes and shared memory of a block of the gradients (gradients.cuh), and where its matrices lie in it.
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/params.h"

namespace flash_qla::cuda::sm80 {

inline constexpr int kGradientsWarps = 8, kGradientsThreads = 32 * kGradientsWarps;
inline constexpr int kTokenStrips = kGradientsWarps / 2;  // of 16 tokens
inline constexpr int kValueSlice = 32;                    // value columns at once
static_assert(kTokenStrips * kStrip == kChunkSize);

template <int kKeys>
struct GradientsTraits {
  static constexpr int kSlices = kKeys <= 128 ? 1 : 2, kSlice = kKeys / kSlices;  // of the keys
  static constexpr int kTiles = kSlice / 16;                                      // of a warp: half of the slice
  // A stage: 32 value columns of dO, E, Z, S and dS. dP and D take its place once it has been read.
  static constexpr int kTokensBytes = kChunk * kValueSlice * 2, kStateBytes = kSlice * kValueSlice * 2;
  static constexpr int kErrorsAt = kTokensBytes, kDErrorsAt = 2 * kTokensBytes, kStatesAt = 3 * kTokensBytes,
                       kGradientsAt = kStatesAt + kStateBytes, kStageBytes = kGradientsAt + kStateBytes;
  static constexpr int kScoresBytes = kChunkBlocks * kChunkBlocks * kBlockBytes;
  static_assert(2 * kScoresBytes <= kStageBytes);
  static constexpr int kRowsBytes = kChunk * kSlice * 2;
};

struct GradientsMemory {
  // What the block works on. It is read where it is needed, and takes no registers in between.
  const char *errors, *d_errors, *states, *gradients;  // of the chunk and the group's first head
  const uint16_t* d_o;                                 // of its first token and the first head
  const ChunkGates* gates;
  float *d_beta, *d_log_decay;  // likewise
  int64_t row;                  // the first token's, of B * T
  int key_head, b, token;       // the first token in its batch row
  int count;                    // tokens of the chunk
  int slice;                    // of the keys
  bool starts;                  // a sequence, without a state before it

  // Of the last head, this one and the next: with one value slice to a head the next ones are on their way while a warp
  // still reads those of the last.
  alignas(16) ChunkGates of_heads[3];
  float by_token[2][kChunkSize];     // of each half of the keys: gradients of c
  float from_end[2][kChunkSize];     // their part through dS1
  float of_minus[2][kChunkSize];     // <k, minus>
  float of_states[kGradientsWarps];  // <dS1, S0>
};

template <int kKeys>
constexpr size_t gradients_shared_bytes() {
  using Tr = GradientsTraits<kKeys>;
  return 2 * Tr::kRowsBytes + 2 * Tr::kStageBytes + sizeof(GradientsMemory);
}
static_assert(gradients_shared_bytes<128>() <= kMostSharedBytes && gradients_shared_bytes<256>() <= kMostSharedBytes);

// Whether dbeta is <k, minus> / beta, which has the rounding of E alone, or <Z, E>, which has that of Z as well
// (docs/numerics.md). minus has beta as a factor of its 16-bit operands: in bf16, with the range of fp32, they are
// normal numbers from 2^-30 on, but for products below 1e-29. In fp16 they soon would not be; it rounds eight times as
// finely.
template <class T>
__device__ __forceinline__ bool from_minus(float beta) {
  constexpr float kLeastBeta = 0x1p-30f;
  return std::is_same_v<T, __nv_bfloat16> && fabsf(beta) >= kLeastBeta;
}

// A lane's address in four 8x8 blocks of a matrix of blocks, `row` of them side by side: blocks (down, right), (down +
// 1, right), (down, right + 1), (down + 1, right + 1), or the second and third changed.
__device__ __forceinline__ uint32_t four_blocks(uint32_t blocks, int row, int down, int right, int lane,
                                                bool right_first = false) {
  const int matrix = lane / 8, low = matrix & 1, high = matrix >> 1;
  const int i = down + (right_first ? high : low), j = right + (right_first ? low : high);
  return blocks + static_cast<uint32_t>((i * row + j) * kBlockBytes + lane % 8 * 16);
}

}  // namespace flash_qla::cuda::sm80
