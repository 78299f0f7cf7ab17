#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK96Bf16;
const BackwardKernels kBackwardK96Bf16 = kBackwardKernels<__nv_bfloat16, 96>;

}  // namespace flash_qla::cuda::sm80
