// The backward of one dtype, by the number of weights.
#pragma once

#include "cuda/layer/conv_backward.cuh"
#include "cuda/layer/conv_launch.h"

namespace flash_qla::cuda {

template <class T, bool kNorms>
Status launch_conv_backward_with(const ConvBackwardParams& params, const ConvGrid& grid, int64_t blocks,
                                 cudaStream_t stream) {
  const auto kernel = params.width == 1   ? conv_backward_kernel<T, 1, kNorms>
                      : params.width == 2 ? conv_backward_kernel<T, 2, kNorms>
                      : params.width == 3 ? conv_backward_kernel<T, 3, kNorms>
                                          : conv_backward_kernel<T, 4, kNorms>;
  return launch("conv_backward", kernel, blocks, kConvThreads, sizeof(TokenRing<T, 2>), stream, params, grid);
}

template <class T>
Status launch_conv_backward(const ConvBackwardParams& params, const ConvGrid& grid, int64_t blocks,
                            cudaStream_t stream) {
  bool norms = false;
  for (int i = 0; i < params.num_parts; ++i) norms |= params.parts[i].l2norm != 0;
  return norms ? launch_conv_backward_with<T, true>(params, grid, blocks, stream)
               : launch_conv_backward_with<T, false>(params, grid, blocks, stream);
}

}  // namespace flash_qla::cuda
