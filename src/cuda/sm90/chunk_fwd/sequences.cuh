// Sequences from the caller's offsets, the slots of their states, and zeros in what no sequence writes.
#pragma once

#include <cstdint>

#include "cuda/common/block_scan.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::fwd {

// kFromL2: what blocks may read while the kernels before may still write it, and then again.
template <bool kFromL2 = false>
__device__ __forceinline__ int64_t load_index(const void* data, bool is_64_bit, int64_t i) {
  if constexpr (kFromL2) {
    return is_64_bit ? __ldcg(static_cast<const long long*>(data) + i) : __ldcg(static_cast<const int*>(data) + i);
  } else {
    return is_64_bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
}

__device__ __forceinline__ int64_t load_offset(const Args& args, int64_t i) {
  return load_index<true>(args.cu_seqlens, args.cu_seqlens_are_64_bit, i);
}

// Tokens of sequence i, kept inside the tensors whatever the offsets say: nothing is ever written out of bounds.
__device__ __forceinline__ SequenceSpan sequence_at(const Args& args, int32_t i) {
  if (args.cu_seqlens == nullptr) {
    const int32_t room = static_cast<int32_t>(args.dense_length);
    return {i * room, args.lengths != nullptr ? args.lengths[i] : room, i, i * ((room + kChunk - 1) / kChunk)};
  }
  int64_t start = load_offset(args, i), end = load_offset(args, int64_t{i} + 1);
  start = min(max(start, int64_t{0}), args.num_tokens);
  end = min(max(end, start), args.num_tokens);
  return {static_cast<int32_t>(start), static_cast<int32_t>(end - start), i, 0};
}

// The last sequence that starts at or before a token; 0 if none does. By a whole warp.
__device__ __forceinline__ int32_t sequence_before(const Args& args, int32_t token, int lane) {
  if (args.cu_seqlens == nullptr) {
    return min(token / static_cast<int32_t>(args.dense_length), args.num_sequences - 1);
  }
  int32_t first = 0, count = args.num_sequences;  // it is one of these
  while (count > 1) {
    const int32_t step = (count + 31) / 32, at = first + lane * step;
    const bool before = lane * step < count && load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, at) <= token;
    const uint32_t found = __ballot_sync(0xffffffffu, before);
    const int32_t last = found != 0 ? 31 - __clz(found) : 0;
    count = min(step, count - last * step);
    first += last * step;
  }
  return first;
}

inline constexpr int kNoSlot = -1;
// `slot` where the set has it.
__device__ __forceinline__ int64_t usable_slot(const StateSet& set, int64_t slot) {
  return slot <= set.null_index || slot < 0 || slot >= set.slots ? kNoSlot : slot;
}

template <bool kFromL2 = false>
__device__ __forceinline__ int64_t resolve_slot(const StateSet& set, int64_t sequence) {
  if (set.data == nullptr) return kNoSlot;
  if (set.indices == nullptr) return sequence;
  return usable_slot(set, load_index<kFromL2>(set.indices, set.indices_are_64_bit, sequence * set.index_stride));
}

// The slot to start from; kNoSlot: zero; kSkipSequence: the sequence is skipped.
inline constexpr int64_t kSkipSequence = -2;
template <bool kFromL2 = false>
__device__ __forceinline__ int64_t initial_slot(const Args& args, int64_t sequence) {
  if (args.initial.data == nullptr) return kNoSlot;
  if constexpr (kFromL2) {
    const uint8_t* has = args.has_initial_state;
    if (has != nullptr && __ldcg(has + sequence * args.has_initial_state_stride) == 0) return kNoSlot;
  } else if (args.has_initial_state != nullptr &&
             args.has_initial_state[sequence * args.has_initial_state_stride] == 0) {
    return kNoSlot;
  }
  const int64_t slot = resolve_slot<kFromL2>(args.initial, sequence);
  return slot < 0 ? kSkipSequence : slot;
}

// Whether anything but their numbers says where sequences' states are.
__host__ __device__ __forceinline__ bool has_slots(const Args& args) {
  return args.initial.indices != nullptr || args.final_state.indices != nullptr || args.has_initial_state != nullptr;
}

__device__ __forceinline__ int64_t element_size(DType type) { return type == DType::kFloat32 ? 4 : 2; }

__device__ __forceinline__ char* state_matrix(const StateSet& set, int64_t slot, int32_t head) {
  return static_cast<char*>(set.data) + (slot * set.slot_stride + head * set.head_stride) * element_size(set.type);
}

// Zeros in what no sequence writes: rows of tokens outside all sequences, those of skipped sequences, rows of h that no
// chunk has. Usually there are none, and all that is left is reading the offsets.
inline constexpr int kZeroFillThreads = 1024;
inline constexpr int kZeroFillBlocks = 32;  // a quarter of the card: enough for the speed of memory

// A thread among all that share the work, over all blocks.
struct Sharer {
  int64_t first;  // its number
  int64_t step;   // how many there are
};

// Zeros `bytes` bytes, a multiple of 16 from a 16-byte boundary.
__device__ __forceinline__ void zero_bytes(void* data, int64_t bytes, Sharer share) {
  for (int64_t i = share.first; i < bytes / 16; i += share.step) {
    static_cast<uint4*>(data)[i] = make_uint4(0, 0, 0, 0);
  }
}

// Tokens [begin, end) of o, A and the cumsum.
__device__ __forceinline__ void zero_tokens(const Args& args, int64_t begin, int64_t end, Sharer share) {
  constexpr int kPieces = kHeadDim / 8;  // of 16 bytes, in a row of one head
  const int64_t heads = (end - begin) * args.num_value_heads;
  for (int64_t i = share.first; i < heads * kPieces; i += share.step) {
    const int64_t row = i / kPieces / args.num_value_heads, head = i / kPieces % args.num_value_heads;
    char* out = static_cast<char*>(args.o) +
                2 * ((begin + row) * args.o_token_stride + head * args.o_head_stride + i % kPieces * 8);
    *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
  }
  const int64_t first = begin * args.num_value_heads;
  if (args.a != nullptr) {
    constexpr int64_t kBytes = kChunk * 2;
    zero_bytes(static_cast<char*>(args.a) + first * kBytes, heads * kBytes, share);
  }
  if (args.g_cumsum != nullptr) {
    for (int64_t i = share.first; i < heads; i += share.step) {
      args.g_cumsum[first + i] = 0.0f;
    }
  }
}

// Rows [begin, end) of h, as far as it has them.
__device__ __forceinline__ void zero_h(const Args& args, int64_t begin, int64_t end, Sharer share) {
  const int64_t row_bytes = static_cast<int64_t>(args.num_value_heads) * kHeadDim * kHeadDim * 2;
  begin = max(begin, int64_t{0});
  end = min(end, args.h_rows);
  if (begin < end) zero_bytes(static_cast<char*>(args.h) + begin * row_bytes, (end - begin) * row_bytes, share);
}

// Tokens before the first offset and after the last.
__device__ __forceinline__ void zero_around(const Args& args, Sharer share) {
  const auto offset = [&](int64_t i) {
    return min(max(load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, i), int64_t{0}), args.num_tokens);
  };
  zero_tokens(args, 0, offset(0), share);
  zero_tokens(args, offset(args.num_sequences), args.num_tokens, share);
}

// By `threads` threads of each block of a kernel of items when they have nothing else left to do.
__device__ __forceinline__ void finish_items(const KernelArgs& p, int thread, int threads) {
  if (p.list != nullptr) return;  // the planner has cleared, and lets the kernels start
  // The next call's blocks take the SMs that become free. Not earlier: they hold what another queue might use.
  launch_dependents();
  if (p.plan == nullptr && p.args.cu_seqlens != nullptr) {
    zero_around(p.args,
                {static_cast<int64_t>(blockIdx.x) * threads + thread, static_cast<int64_t>(gridDim.x) * threads});
  }
}

// Rows of skipped sequences, likewise. Not inlined: the role before it would spill.
static __device__ __noinline__ void zero_skipped(const KernelArgs& p, int thread, int threads) {
  const Args& args = p.args;
  if (p.list != nullptr || p.plan != nullptr || args.cu_seqlens == nullptr || args.initial.indices == nullptr) return;
#pragma unroll 1
  for (int32_t i = 0; i < args.num_sequences; ++i) {
    if (initial_slot(args, i) != kSkipSequence) continue;
    const SequenceSpan s = sequence_at(args, i);
    zero_tokens(args, s.start, int64_t{s.start} + s.length,
                {static_cast<int64_t>(blockIdx.x) * threads + thread, static_cast<int64_t>(gridDim.x) * threads});
  }
}

// One of `blocks` blocks of kZeroFillThreads threads.
__device__ __forceinline__ void zero_outside(const Args& args, int block, int blocks) {
  const int n = args.num_sequences, thread = threadIdx.x;
  const Sharer share{static_cast<int64_t>(block) * kZeroFillThreads + thread,
                     static_cast<int64_t>(blocks) * kZeroFillThreads};
  if (args.cu_seqlens != nullptr) zero_around(args, share);
  const bool may_skip = args.initial.data != nullptr && args.initial.indices != nullptr;
  if (!may_skip && args.h == nullptr) return;
  // Every block looks at all sequences, a thread at one, and clears its share of each skipped one.
  __shared__ int64_t skipped[kZeroFillThreads][4];  // first token, tokens, first row of h, rows
  __shared__ int32_t warp_chunks[1][kZeroFillThreads / 32];
  __shared__ int skipped_count;
  int64_t chunks_before = 0;
  for (int64_t first = 0; first < n; first += kZeroFillThreads) {
    if (thread == 0) skipped_count = 0;
    const int64_t i = first + thread;
    const SequenceSpan sequence = i < n ? sequence_at(args, static_cast<int32_t>(i)) : SequenceSpan{};
    const int32_t chunks = (sequence.length + kChunk - 1) / kChunk;
    int32_t before[1] = {chunks}, all[1];
    sum_before(before, all, warp_chunks);
    if (may_skip && i < n && initial_slot(args, i) == kSkipSequence) {
      int64_t (&entry)[4] = skipped[atomicAdd(&skipped_count, 1)];
      entry[0] = sequence.start;
      entry[1] = sequence.length;
      entry[2] = chunks_before + before[0];
      entry[3] = chunks;
    }
    chunks_before += all[0];
    __syncthreads();
    for (int s = 0; s < skipped_count; ++s) {
      zero_tokens(args, skipped[s][0], skipped[s][0] + skipped[s][1], share);
      if (args.h != nullptr) zero_h(args, skipped[s][2], skipped[s][2] + skipped[s][3], share);
    }
    __syncthreads();
  }
  if (args.h != nullptr) zero_h(args, chunks_before, args.h_rows, share);
}

}  // namespace flash_qla::cuda::sm90::fwd
