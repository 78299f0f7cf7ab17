#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK64Bf16;
const BackwardKernels kBackwardK64Bf16 = kBackwardKernels<__nv_bfloat16, 64>;

}  // namespace flash_qla::cuda::sm80
