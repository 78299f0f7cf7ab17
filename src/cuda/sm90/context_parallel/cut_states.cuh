// How states at cuts and transitions lie in memory.
#pragma once

#include <cuda_bf16.h>
#include <cstdint>
#include <type_traits>

#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::cp {

// Of a state at a cut of one head, where the float4 j of 16 of a state group's thread lies: its values 4j .. 4j + 3 of
// S^T. What 16 neighbouring lanes have, eight rows of V, lies together: so much the combination takes at a time
// (scan.cuh). group: which 64 rows of V.
__device__ __forceinline__ int cut_state_position(int group, int warp, int j, int lane) {
  return (((group * 4 + warp) * 2 + lane / 16) * 16 + j) * 16 + lane % 16;
}
inline constexpr int64_t kCutStateVectors = kHeadDim * kHeadDim / 4;

// A transition is kept by 16 rows, as the left operands of the products that apply it (scan.cuh), 16 columns each,
// and its diagonal in fp32. What is off the diagonal is a sum of products of 16-bit operands and known to 2^-9 of
// itself in bf16: one bf16 holds it. In fp16 it is known better, and kept in two parts (pack_two_parts()). The diagonal
// may be 1 and nearly all that there is of M.
inline constexpr int kTransitionSteps = kHeadDim / 16;
template <typename Element>
inline constexpr int kTransitionParts = std::is_same_v<Element, __nv_bfloat16> ? 1 : 2;
template <int kParts>
struct TransitionRows {
  uint4 columns[kTransitionSteps][kParts][32];  // by lanes
  float diagonal[16];
};

}  // namespace flash_qla::cuda::sm90::cp
