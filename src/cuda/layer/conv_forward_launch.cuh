// The forward of one dtype, by the number of weights.
#pragma once

#include "cuda/layer/conv_forward.cuh"
#include "cuda/layer/conv_launch.h"

namespace flash_qla::cuda {

template <class T>
Status launch_conv_forward(const ConvParams& params, const ConvGrid& grid, int64_t blocks, cudaStream_t stream) {
  const auto kernel = params.width == 1   ? conv_forward_kernel<T, 1>
                      : params.width == 2 ? conv_forward_kernel<T, 2>
                      : params.width == 3 ? conv_forward_kernel<T, 3>
                                          : conv_forward_kernel<T, 4>;
  return launch("conv_forward", kernel, blocks, kConvThreads, 0, stream, params, grid);
}

}  // namespace flash_qla::cuda
