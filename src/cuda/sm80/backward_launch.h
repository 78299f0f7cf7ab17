// Starts the kernels of the backward that are compiled for a dtype and number of keys.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/backward_params.h"

namespace flash_qla::cuda::sm80 {

// Kernels of one dtype and padded number of keys.
struct BackwardKernels {
  Status (*prepare)(const BackwardPrepareParams& params, int64_t blocks, cudaStream_t stream);
  Status (*passes)(const PassesParams& params, int64_t blocks, cudaStream_t stream);
  Status (*gradients)(const GradientsParams& params, int64_t blocks, cudaStream_t stream);
  int keys;  // padded
};

const BackwardKernels& backward_kernels_for(DType type, int64_t K);

}  // namespace flash_qla::cuda::sm80
