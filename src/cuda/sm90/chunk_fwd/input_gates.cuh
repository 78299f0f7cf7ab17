// g and beta of a chunk on their way into shared memory.
#pragma once

#include "cuda/common/bulk.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {

// Every beta of a call without any.
static __device__ const float kOne = 1.0f;

// g and beta of a chunk into their stage, zeros past the end, by 128 threads, all of which `barrier` counts: half of
// them fetch g, the others beta.
template <typename Traits>
__device__ __forceinline__ void load_gates(const Args& args, const ChunkDescriptor& chunk, uint32_t raw,
                                           uint32_t barrier, int thread) {
  const int4 place = *reinterpret_cast<const int4*>(&chunk);  // row, valid, flags, head
  const int token = thread % kChunk;
  const bool is_beta = thread >= kChunk;
  const float* data = is_beta ? args.beta : args.g;
  const bool given = data != nullptr;
  // Strides below 2^29 elements: the launcher has looked.
  const int token_bytes = 4 * static_cast<int>(is_beta ? args.beta_token_stride : args.g_token_stride);
  const int head_bytes = 4 * static_cast<int>(is_beta ? args.beta_head_stride : args.g_head_stride);
  const void* base = given ? static_cast<const void*>(data) : is_beta ? static_cast<const void*>(&kOne) : args.q;
  // With nothing to read, any mapped address does: zero bytes are taken from it.
  const bool have = token < place.y && (given || is_beta);
  const bool moves = have && given;
  const void* head = advance(base, moves ? place.w : 0, head_bytes);
  copy_async_4(raw + (is_beta ? Traits::kInputBeta : Traits::kInputG) + 4 * token,
               advance(head, moves ? place.x + token : 0, token_bytes), have);
  copy_async_arrive(barrier);
}

}  // namespace flash_qla::cuda::sm90::fwd
