// What the two planning kernels share.
#pragma once

#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/context_parallel/lengths.cuh"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::cp {

inline constexpr int kClassifyThreads = fwd::kZeroFillThreads;
// A round looks at eight chunks of four value heads that share a key head: a warp each.
inline constexpr int kRoundChunks = 8;
inline constexpr int kRoundHeads = 4;
// Bounds the blocks: a unit takes a few microseconds, and the card's SMs share them.
inline constexpr int kClassifyBlocksPerSm = 2;
inline constexpr int kMostUnitBlocks = 512;  // of 256 SMs; the planner looks at one with each thread
// A warp for each part of a choice; more threads would have too few registers.
inline constexpr int kListThreads = 64 * kJoins;

// The kernels: their addresses, for the launcher.
const void* classify_kernel(DType type);
const void* list_kernel();

__device__ __forceinline__ CutSpacing choose_cut_spacing(const PlanArgs& p, const LengthSummary& lengths) {
  if (lengths.sequences == 0) return {};
  if (p.least_longest != 0) return even_cut_spacing(lengths, p.args.num_value_heads, p.sms, kMinSpacing);
  if (lengths == p.expected_lengths) return p.expected_cut_spacing;
  return choose_cut_spacing(p.args.split, p.args.force_split != 0, lengths, p.args.num_value_heads, p.sms, p.costs);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

}  // namespace flash_qla::cuda::sm90::cp
