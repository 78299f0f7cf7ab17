// The launches of the convolution's kernels with vectors, one file of code a dtype.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/layer/conv_params.h"

namespace flash_qla::cuda {

struct ConvGrid;

template <class T>
Status launch_conv_forward(const ConvParams& params, const ConvGrid& grid, int64_t blocks, cudaStream_t stream);
template <class T>
Status launch_conv_backward(const ConvBackwardParams& params, const ConvGrid& grid, int64_t blocks,
                            cudaStream_t stream);

}  // namespace flash_qla::cuda
