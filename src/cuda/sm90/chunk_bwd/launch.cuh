// Starts the backward's kernels for one element type. Included by the instantiations alone.
#pragma once

#include "cuda/sm90/chunk_bwd/gradients.cuh"
#include "cuda/sm90/chunk_bwd/launch.h"
#include "cuda/sm90/chunk_bwd/prepare.cuh"
#include "cuda/sm90/chunk_bwd/small_betas.cuh"
#include "cuda/sm90/chunk_bwd/states.cuh"

namespace flash_qla::cuda::sm90 {

template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, uint32_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

template <typename T, bool kHasA>
cudaError_t launch_prepare(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, cudaStream_t stream) {
  constexpr uint32_t kBytes = PrepareSmem::bytes(kHasA);
  FLASH_QLA_RETURN_IF_CUDA_ERROR(allow_shared(sm90_chunk_bwd_prepare_kernel<T, kHasA>, kBytes));
  return launch_chained(sm90_chunk_bwd_prepare_kernel<T, kHasA>, static_cast<unsigned>(p.chunk_bound) * p.Hq,
                        kPrepareThreads, kBytes, stream, p, maps);
}

template <typename T, int kGroups>
cudaError_t launch_states(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, cudaStream_t stream) {
  using Traits = StatesTraits<kGroups>;
  FLASH_QLA_RETURN_IF_CUDA_ERROR(allow_shared(sm90_chunk_bwd_states_kernel<T, kGroups>, Traits::kBytes));
  const unsigned blocks = 2u * static_cast<unsigned>(p.N) * p.Hv * (2 / kGroups);
  return launch_chained(sm90_chunk_bwd_states_kernel<T, kGroups>, blocks, Traits::kThreads, Traits::kBytes, stream, p,
                        maps);
}

template <typename T>
cudaError_t launch_gradients(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps, int multiprocessors,
                             cudaStream_t stream) {
  using Traits = GradientsTraits;
  FLASH_QLA_RETURN_IF_CUDA_ERROR(allow_shared(sm90_chunk_bwd_gradients_kernel<T>, Traits::kBytes));
  const int64_t items = static_cast<int64_t>(p.chunk_bound) * p.Hq;
  const unsigned blocks = static_cast<unsigned>(items < multiprocessors ? items : multiprocessors);
  FLASH_QLA_RETURN_IF_CUDA_ERROR(
      launch_chained(sm90_chunk_bwd_gradients_kernel<T>, blocks, Traits::kThreads, Traits::kBytes, stream, p, maps));
  return launch_chained(sm90_chunk_bwd_small_betas_kernel<T>, kSmallBetasBlocks, kSmallBetasThreads, 0, stream, p);
}

template <typename T>
cudaError_t launch_chunk_backward_typed(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                        const ChunkBackwardStage& stage, cudaStream_t stream) {
  int device = 0, multiprocessors = 0;
  FLASH_QLA_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  FLASH_QLA_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));

  if (stage.prepare) {
    FLASH_QLA_RETURN_IF_CUDA_ERROR(p.A.data != nullptr ? launch_prepare<T, true>(p, maps, stream)
                                                       : launch_prepare<T, false>(p, maps, stream));
  }
  if (stage.states) {
    // Two passes, two halves of V each: a block for each while there are multiprocessors for them.
    const bool split = 4 * static_cast<int64_t>(p.N) * p.Hv <= multiprocessors;
    FLASH_QLA_RETURN_IF_CUDA_ERROR(split ? launch_states<T, 1>(p, maps, stream) : launch_states<T, 2>(p, maps, stream));
  }
  if (stage.gradients) FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_gradients<T>(p, maps, multiprocessors, stream));
  return cudaSuccess;
}

}  // namespace flash_qla::cuda::sm90
