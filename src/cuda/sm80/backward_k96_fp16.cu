#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK96Fp16;
const BackwardKernels kBackwardK96Fp16 = kBackwardKernels<__half, 96>;

}  // namespace flash_qla::cuda::sm80
