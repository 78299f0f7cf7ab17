// The backward of one dtype, by the number of weights.
#pragma once

#include "cuda/layer/conv_backward.cuh"
#include "cuda/layer/conv_launch.h"

namespace flash_qla::cuda {

template <class T>
Status launch_conv_backward(const ConvBackwardParams& params, const ConvGrid& grid, cudaStream_t stream) {
  const auto kernel = params.width == 1   ? conv_backward_kernel<T, 1>
                      : params.width == 2 ? conv_backward_kernel<T, 2>
                      : params.width == 3 ? conv_backward_kernel<T, 3>
                                          : conv_backward_kernel<T, 4>;
  return launch("conv_backward", kernel, grid.blocks, kConvThreads, 0, stream, params, grid);
}

}  // namespace flash_qla::cuda
