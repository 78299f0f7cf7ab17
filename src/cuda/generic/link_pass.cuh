// What makes the link of one (part, value head), once it is known within how many chunks of either end the head
// forgets.
#pragma once

#include "cuda/common/warp.cuh"
#include "cuda/generic/links.cuh"

namespace flash_qla::cuda {

// The part's row at one end, or -1 where it has none.
__device__ inline int64_t row_of_part(const LinkParams& p, int64_t part, int end) {
  const int64_t row = load_index(p.rows, part, end);
  return row >= 0 && row < p.sequences.N && sequence_at(p.sequences, row).length > 0 ? row : -1;
}

__device__ inline bool flag_of_part(const DeviceTensor& flags, int64_t part) {
  return static_cast<const uint8_t*>(flags.data)[part * flags.stride[0]] != 0;
}

// How many of `count` numbers at(0), at(1), .. have the first sum that is at most the threshold, which a NaN never is;
// 0: there is none. Summed in this order, 32 at a time, by a warp.
template <class Int, class At>
__device__ __forceinline__ Int first_below(Int count, float threshold, At at) {
  const int lane = threadIdx.x % 32;
  float before = 0.0f;
  for (Int base = 0; base < count; base += 32) {
    const Int i = base + lane;
    const float sum = prefix_sum(i < count ? at(i) : 0.0f, lane) + before;
    const unsigned found = __ballot_sync(0xffffffffu, i < count && sum <= threshold);
    if (found != 0) return base + __ffs(static_cast<int>(found));
    before = __shfl_sync(0xffffffffu, sum, 31);
  }
  return 0;
}

// window(row, from_end): so many chunks at one end of a row are enough, 0: none are. may_forget: whether it is asked.
// By all threads that answer together; `kind` is what the link says of itself.
template <class Window>
__device__ LinkPass link_pass(const LinkParams& p, int64_t part, int head, bool backward, bool may_forget,
                              const Window& window, float* kind) {
  const int64_t row = row_of_part(p, part, backward ? 0 : 1);
  const bool crosses = row >= 0 && flag_of_part(p.crosses, part), through = crosses && flag_of_part(p.through, part);
  LinkPass pass{-1, 0, 0, 0, 0};
  *kind = row < 0 ? static_cast<float>(FLASH_QLA_LINK_NONE) : static_cast<float>(FLASH_QLA_LINK_CONSTANT);
  if (!crosses) return pass;
  const DeviceSequence sequence = sequence_at(p.sequences, row);
  const int64_t chunks = ceil_div(sequence.length, kChunkSize);
  // Going backward, a part that is gone through forgets where the forward has said so.
  const bool was_constant =
      backward && is_constant(load<double>(p.forward_kind, offset_of(p.forward_kind, part, head)));
  const bool asks = may_forget && !(backward && through && !was_constant);
  int64_t length = asks ? window(sequence, !backward) : 0;
  // One decision for both directions: the state and its gradient must both be forgotten.
  if (length > 0 && !backward && through && window(sequence, false) == 0) length = 0;
  const bool forgets = length > 0;
  const bool affine = through && !(backward ? was_constant : forgets);
  pass.row = static_cast<int32_t>(row);
  pass.from = forgets && !backward ? static_cast<int32_t>((chunks - length) * kChunkSize) : 0;
  const int64_t end = length * kChunkSize;
  pass.to = static_cast<int32_t>(forgets && backward && end < sequence.length ? end : sequence.length);
  pass.starts = !through && !forgets;
  pass.is_affine = affine;
  if (affine) *kind = static_cast<float>(FLASH_QLA_LINK_AFFINE);
  return pass;
}

}  // namespace flash_qla::cuda
