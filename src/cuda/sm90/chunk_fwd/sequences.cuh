// Sequences from the caller's offsets, and the slots of their states.
#pragma once

#include <cstdint>

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

}  // namespace flash_qla::cuda::sm90::fwd
