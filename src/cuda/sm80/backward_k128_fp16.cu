#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK128Fp16;
const BackwardKernels kBackwardK128Fp16 = kBackwardKernels<__half, 128>;

}  // namespace flash_qla::cuda::sm80
