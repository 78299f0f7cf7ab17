// What the two planning kernels share.
#pragma once

#include "cuda/common/warp.cuh"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::cp {

using fwd::Args, fwd::load_offset, fwd::sequence_at;

// Of all lengths, by all threads of a block. Up to a warp's worth of sequences needs no barrier, and leaves each lane
// with the one of its number in `own` (which is else left alone). Where offsets go back sequences may overlap, and the
// lists have room for each token once: such lengths count as none, so that nothing is cut.
template <int kThreads>
__device__ LengthSummary summarise_lengths(const Args& args, SequenceSpan* own) {
  if (args.cu_seqlens == nullptr) {
    const int32_t chunks = chunks_in(static_cast<int32_t>(args.dense_length));
    return {static_cast<int64_t>(chunks) * args.num_sequences, chunks > 0 ? args.num_sequences : 0, chunks};
  }
  const bool one_warp = args.num_sequences <= 32;
  int32_t chunks = 0, sequences = 0, longest = 0;
  bool in_order = true;
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(one_warp ? threadIdx.x % 32 : threadIdx.x); i < args.num_sequences;
       i += kThreads) {
    const SequenceSpan s = sequence_at(args, i);
    const int32_t count = chunks_in(s.length);
    if (one_warp) *own = s;
    in_order &= load_offset(args, i) <= load_offset(args, int64_t{i} + 1);
    chunks += count;
    sequences += count > 0;
    longest = max(longest, count);
  }
  chunks = __reduce_add_sync(0xffffffffu, chunks);
  sequences = __reduce_add_sync(0xffffffffu, sequences);
  longest = __reduce_max_sync(0xffffffffu, longest);
  in_order = __all_sync(0xffffffffu, in_order);
  if (one_warp) return in_order ? LengthSummary{chunks, sequences, longest} : LengthSummary{};
  __shared__ int32_t totals[3];
  if (threadIdx.x < 3) totals[threadIdx.x] = 0;
  in_order = __syncthreads_and(in_order);
  if (threadIdx.x % 32 == 0 && sequences > 0) {
    atomicAdd(&totals[0], chunks);
    atomicAdd(&totals[1], sequences);
    atomicMax(&totals[2], longest);
  }
  __syncthreads();
  return in_order ? LengthSummary{totals[0], totals[1], totals[2]} : LengthSummary{};
}

inline constexpr int kClassifyThreads = fwd::kZeroFillThreads;
// A round looks at eight chunks of four value heads that share a key head: a warp each.
inline constexpr int kRoundChunks = 8;
inline constexpr int kRoundHeads = 4;
// Bounds the blocks: a unit takes a few microseconds, and the card's SMs share them.
inline constexpr int kClassifyBlocksPerSm = 2;
// A warp for each part of a choice; more threads would have too few registers.
inline constexpr int kListThreads = 64 * kJoins;
// Warps that hold the state's rows of half of V: what reads an initial state counts once for each.
inline constexpr uint32_t kWarpsOfHalf = 4;

// The kernels: their addresses, for the launcher.
const void* classify_kernel(DType type);
const void* list_kernel();

__device__ __forceinline__ CutSpacing choose_cut_spacing(const PlanArgs& p, const LengthSummary& lengths) {
  if (lengths.sequences == 0) return {};
  if (p.least_longest != 0) return even_cut_spacing(lengths, p.args.num_value_heads, p.sms, kMinSpacing);
  if (lengths == p.expected_lengths) return p.expected_cut_spacing;
  return choose_cut_spacing(p.args.split, p.args.force_split != 0, lengths, p.args.num_value_heads, p.sms, p.costs);
}

}  // namespace flash_qla::cuda::sm90::cp
