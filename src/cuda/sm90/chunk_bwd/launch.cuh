// Starts the backward's kernels for one element type. Included by the instantiations alone.
#pragma once

#include <algorithm>

#include "cuda/sm90/chunk_bwd/exact_products.cuh"
#include "cuda/sm90/chunk_bwd/gradients/kernel.cuh"
#include "cuda/sm90/chunk_bwd/last_tokens.cuh"
#include "cuda/sm90/chunk_bwd/launch.h"
#include "cuda/sm90/chunk_bwd/make_a.cuh"
#include "cuda/sm90/chunk_bwd/passes/kernel.cuh"
#include "cuda/sm90/chunk_bwd/prepare.cuh"
#include "cuda/sm90/chunk_bwd/small_betas.cuh"

namespace flash_qla::cuda::sm90::bwd {

template <typename T>
cudaError_t launch_make_a(const Args& p, const Maps& maps, cudaStream_t stream) {
  return launch_chained(sm90_chunk_bwd_make_a_kernel<T>, static_cast<unsigned>(p.chunk_bound) * p.Hq, kInverseThreads,
                        ChunkInverse<T>::kBytes, stream, p, maps);
}

template <typename T>
cudaError_t launch_prepare(const Args& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  using Traits = PrepareTraits;
  // Places in the order of find_prepare_work(): its segments may be a chunk longer than there are chunks for.
  const int64_t pieces = (static_cast<int64_t>(p.chunk_bound) + (p.segment_chunks > 0 ? p.segment_bound : 0)) * p.Hq;
  // With segments a pair is left for the rounds kernel (scan.cuh).
  const int64_t most = multiprocessors - (p.beside ? states_blocks(p) : p.segment_chunks > 0 ? 2 : 0);
  const unsigned pairs =
      static_cast<unsigned>(std::min(most, (pieces + Traits::kGroups - 1) / Traits::kGroups) + 1) / 2;
  // In clusters of two, as all that is to fit beside clusters of two.
  return launch_chained<2>(sm90_chunk_bwd_prepare_kernel<T>, 2 * pairs, Traits::kThreads, Traits::kBytes, stream, p,
                           maps);
}

template <typename T, Variant kVariant>
cudaError_t launch_states(const Args& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  using Traits = PassTraits<kVariant>;
  const auto kernel = sm90_chunk_bwd_passes_kernel<T, kVariant>;
  auto launch = [&](unsigned blocks, bool second_round) {
    // In clusters of two (the halves of V), so that the multiprocessors left over are clusters of two as well.
    return launch_chained<2>(kernel, blocks, Traits::kThreads, Traits::kBytes, stream, p, maps, second_round);
  };
  if (p.segment_chunks == 0) return launch(static_cast<unsigned>(states_blocks(p)), false);
  const unsigned pieces = static_cast<unsigned>(p.segment_bound) * p.Hv;
  FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_rounds(p, multiprocessors, stream));
  FLASH_QLA_RETURN_IF_CUDA_ERROR(launch(6 * pieces, false));
  FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_scan(p, maps, multiprocessors, stream));
  return launch(4 * pieces, true);
}

template <typename T>
cudaError_t launch_gradients(const Args& p, const Maps& maps, int multiprocessors, cudaStream_t stream) {
  using Traits = GradientsTraits;
  // dv and dh0 come from the passes, and from the small betas alone.
  if (p.dq.data != nullptr || p.dk.data != nullptr || p.dg.data != nullptr || p.dbeta.data != nullptr) {
    const auto kernel = p.q_inverse_norms == nullptr ? sm90_chunk_bwd_gradients_kernel<T, false>
                                                     : sm90_chunk_bwd_gradients_kernel<T, true>;
    const int64_t items = static_cast<int64_t>(p.pair_bound) * p.Hq, most = std::max(1, multiprocessors / 2);
    const unsigned clusters = static_cast<unsigned>(std::min(items, most));
    FLASH_QLA_RETURN_IF_CUDA_ERROR(
        launch_chained<2>(kernel, 2 * clusters, Traits::kThreads, Traits::kBytes, stream, p, maps));
  }
  FLASH_QLA_RETURN_IF_CUDA_ERROR(
      launch_chained(sm90_chunk_bwd_small_betas_kernel<T>, kSmallBetasBlocks, kSmallBetasThreads, 0, stream, p));
  if (p.keeps_exact) {
    FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_chained(sm90_chunk_bwd_exact_products_kernel<T>,
                                                  static_cast<unsigned>(p.pair_bound) * p.Hv, kExactProductsThreads, 0,
                                                  stream, p));
  }
  if (!p.corrects_last) return cudaSuccess;
  constexpr uint32_t kBytes = sizeof(LastTokensMemory<T>);
  const int clusters = std::min(p.N * p.Hv, std::max(1, multiprocessors / kSlices));
  return launch_chained<kSlices>(sm90_chunk_bwd_last_tokens_kernel<T>, static_cast<unsigned>(kSlices * clusters),
                                 kLastTokensThreads, kBytes, stream, p);
}

template <typename T>
cudaError_t launch_chunk_backward_typed(const Args& p, const Maps& maps, const Parts& stage, int multiprocessors,
                                        cudaStream_t stream) {
  if (stage.prepare && p.makes_A) FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_make_a<T>(p, maps, stream));
  if (stage.prepare && !p.whole_values)
    FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_prepare<T>(p, maps, multiprocessors, stream));
  if (stage.states) {
    const auto states = p.whole_values  ? launch_states<T, kBothVariant>
                        : p.keeps_exact ? launch_states<T, kExactVariant>
                                        : launch_states<T, kHalfVariant>;
    FLASH_QLA_RETURN_IF_CUDA_ERROR(states(p, maps, multiprocessors, stream));
  }
  if (stage.gradients) FLASH_QLA_RETURN_IF_CUDA_ERROR(launch_gradients<T>(p, maps, multiprocessors, stream));
  return cudaSuccess;
}

}  // namespace flash_qla::cuda::sm90::bwd
