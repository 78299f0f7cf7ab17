// Links between ranks' parts, backward: reverse passes over the segments of links (links/link_items.h), from
// zero or a given matrix, each to a matrix of its own. What a reverse pass takes of its chunks is made before, by the
// kernels that make it for the backward, of the (chunk, value head) pairs that links want alone. Nothing else is kept.
#pragma once

#include <algorithm>

#include "cuda/sm90/chunk_bwd/launch.h"
#include "cuda/sm90/chunk_bwd/links.h"
#include "cuda/sm90/chunk_bwd/make_a.cuh"
#include "cuda/sm90/chunk_bwd/passes/kernel.cuh"
#include "cuda/sm90/chunk_bwd/prepare.cuh"

namespace flash_qla::cuda::sm90::bwd {

// Blocks: items x half of V.
template <typename T>
__global__ __launch_bounds__(PassTraits<kHalfVariant>::kThreads,
                             1) void sm90_chunk_bwd_link_passes_kernel(const Args p, const __grid_constant__ Maps maps,
                                                                       const cp::WorkItem* items,
                                                                       const int32_t* item_count) {
  wait_for_predecessors();
  launch_dependents();
  using Traits = PassTraits<kHalfVariant>;
  extern __shared__ uint8_t raw[];
  const int index = blockIdx.x / 2;
  if (index >= *item_count) return;
  const uint32_t smem = __shfl_sync(0xffffffffu, (smem_address(raw) + 1023u) & ~1023u, 0);
  const PassBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  // The item as a sequence of its own: its chunks are whole ones of the sequence, but for the last.
  const cp::WorkItem item = items[index];
  PassWork work;
  work.sequence = {item.row, item.tokens, item.chunk, 0, 0};
  work.n = item.slot;  // the cell that "dh0" of this item is
  work.head = item.head;
  work.key_head = work.head / p.group;
  work.half = blockIdx.x % 2;
  work.reverse = true;
  work.steps = work.sequence.chunks();
  work.first = work.steps - 1;
  work.warmup = work.steps;  // nobody wants its tiles
  work.start = item.position >= 0 ? item.position : kStateZero;
  work.finish = kStateGiven;

  if (threadIdx.x == 0) init_pass<Traits>(smem, bars);
  __syncthreads();
  run_states<T, kHalfVariant, true>(p, maps, work, smem, bars, warp, lane);
}

template <typename T>
cudaError_t launch_link_gradients_typed(const Args& p, const Maps& maps, const LinkGradients& links,
                                        cudaStream_t stream) {
  int multiprocessors = 0;
  FLASH_QLA_RETURN_IF_CUDA_ERROR(count_multiprocessors(&multiprocessors));
  if (links.A.data == nullptr) {
    const auto make_a = sm90_chunk_bwd_make_a_kernel<T, true>;
    FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_chained(make_a, static_cast<unsigned>(links.most_tiles), kInverseThreads,
                                                  ChunkInverse<T>::kBytes, stream, p, maps));
  }
  const auto prepare = sm90_chunk_bwd_prepare_kernel<T, true>;
  const int64_t blocks = std::min<int64_t>(multiprocessors, ceil_div(links.most_tiles, PrepareTraits::kGroups));
  FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_chained(prepare, static_cast<unsigned>(blocks), PrepareTraits::kThreads,
                                                PrepareTraits::kBytes, stream, p, maps));
  using Traits = PassTraits<kHalfVariant>;
  const auto passes = sm90_chunk_bwd_link_passes_kernel<T>;
  return launch_chained(passes, static_cast<unsigned>(2 * links.most_items), Traits::kThreads, Traits::kBytes, stream,
                        p, maps, links.items, links.item_count);
}

}  // namespace flash_qla::cuda::sm90::bwd
