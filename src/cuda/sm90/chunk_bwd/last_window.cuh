// Which of a sequence's last tokens want dbeta and dg in fp32 (last_tokens.cuh).
#pragma once

#include "cuda/common/few_tokens.h"
#include "cuda/sm90/chunk_bwd/device.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kWindow = kLastTokens;

// A token with less than e^-5 of the final state's gradient is not reached by it, nor are those beyond a chunk's worth.
constexpr float kLeastReach = 6.7e-3f;

struct WindowSums {  // by warps
  float reached[kWindow / 32], kept[kWindow / 32];
  int first[kWindow / 32];
};

// Where a window lies in its sequence: its first chunk, and the tokens from there to the end; none: nothing is to be
// corrected.
struct LastWindow {
  int chunk, tokens;
};

__device__ __forceinline__ const float* gates_of_chunk(const Args& p, const SequenceInfo& sequence, int chunk,
                                                       int head) {
  return p.gates + (static_cast<int64_t>(sequence.first_slot + chunk) * p.Hv + head) * p.gate_stride;
}

// Cumulated log2 decay at token t of the chunks from `chunk` on, past the end that of the last token.
__device__ __forceinline__ float decay_at(const Args& p, const SequenceInfo& sequence, int chunk, int head, int t) {
  const bool two = chunk + 1 < sequence.chunks();
  const float first = gates_of_chunk(p, sequence, chunk, head)[t < kChunk ? t : kChunk - 1];
  return t < kChunk || !two ? first : first + gates_of_chunk(p, sequence, chunk + 1, head)[t - kChunk];
}

// By all threads of a block, 128 or more.
__device__ __forceinline__ LastWindow find_window(const Args& p, const SequenceInfo& sequence, int head,
                                                  WindowSums& memory) {
  const int thread = threadIdx.x, chunk = max(0, sequence.chunks() - 2), tokens = sequence.length - chunk * kChunk;
  float reach = 0.0f, kept = 0.0f;
  if (thread < tokens) {
    const float decay = decay_at(p, sequence, chunk, head, thread);
    reach = exp2_approx(decay_at(p, sequence, chunk, head, tokens - 1) - decay);
    kept = exp2_approx(thread > 0 ? decay - decay_at(p, sequence, chunk, head, thread - 1) : decay);
  }
  const float reached = warp_sum(reach * reach), all_kept = warp_sum(kept * kept);
  const uint32_t out_of_reach = __ballot_sync(0xffffffffu, thread < tokens && !(reach >= kLeastReach));
  if (thread % 32 == 0 && thread < kWindow) {
    memory.reached[thread / 32] = reached;
    memory.kept[thread / 32] = all_kept;
    memory.first[thread / 32] = out_of_reach == 0 ? 0 : thread + 32 - __clz(static_cast<int>(out_of_reach));
  }
  __syncthreads();
  float sums[2] = {};
  int first = max(0, tokens - kChunk);  // of those that it reaches
#pragma unroll
  for (int warp = 0; warp < kWindow / 32; ++warp) {
    sums[0] += memory.reached[warp];
    sums[1] += memory.kept[warp];
    first = max(first, memory.first[warp]);
  }
  __syncthreads();  // they are read before another item's are written
  const bool given = p.dht.data != nullptr;
  if (sequence.length <= kWindow && p.exact_short && (given || sums[1] < kFewKept)) return {0, tokens};
  if (!given || !(sums[0] < kFewReached)) return {0, 0};
  // The last pair of chunks, as the sums that it has in common are what dg has been rounded with. Where it is a chunk
  // alone, and fewer tokens than are reached, the one before it too.
  const int before = sequence.chunks() % 2 == 0 ? 0 : first / kChunk;
  return {chunk + before, tokens - before * kChunk};
}

}  // namespace flash_qla::cuda::sm90::bwd
