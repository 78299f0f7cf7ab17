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
  Status (*scan)(const ForwardParams& params, int64_t strips, cudaStream_t stream);
  Status (*backward_prepare)(const PrepareParams& params, int64_t blocks, cudaStream_t stream);
  Status (*passes)(const PassesParams& params, int64_t blocks, cudaStream_t stream);
  Status (*gradients)(const GradientsParams& params, int64_t blocks, cudaStream_t stream);
};

// In a source for each number of keys, so that these compile side by side.
template <int kKeys>
const Kernels& kernels_of(DType type);

}  // namespace flash_qla::cuda::sm80
