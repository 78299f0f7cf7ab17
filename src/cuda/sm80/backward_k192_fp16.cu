#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK192Fp16;
const BackwardKernels kBackwardK192Fp16 = kBackwardKernels<__half, 192>;

}  // namespace flash_qla::cuda::sm80
