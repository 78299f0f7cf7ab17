// Starts the kernels of path sm80 that are compiled for a dtype and number of keys.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/backward_params.h"

namespace flash_qla::cuda::sm80 {

// Kernels of one dtype and padded number of keys.
struct Kernels {
  Status (*prepare)(const PrepareParams& params, int64_t blocks, cudaStream_t stream);
  Status (*forward)(const ForwardParams& params, int64_t blocks, cudaStream_t stream);
  // The same without outputs: states alone.
  Status (*states)(const ForwardParams& params, int64_t blocks, cudaStream_t stream);
  Status (*backward_prepare)(const BackwardPrepareParams& params, int64_t blocks, cudaStream_t stream);
  Status (*passes)(const PassesParams& params, int64_t blocks, cudaStream_t stream);
  Status (*gradients)(const GradientsParams& params, int64_t blocks, cudaStream_t stream);
};

const Kernels& kernels_for(DType type, int64_t K);

}  // namespace flash_qla::cuda::sm80
