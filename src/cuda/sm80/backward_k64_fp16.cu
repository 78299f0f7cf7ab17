#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK64Fp16;
const BackwardKernels kBackwardK64Fp16 = kBackwardKernels<__half, 64>;

}  // namespace flash_qla::cuda::sm80
