#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK128Bf16;
const BackwardKernels kBackwardK128Bf16 = kBackwardKernels<__nv_bfloat16, 128>;

}  // namespace flash_qla::cuda::sm80
