#include "cuda/sm80/backward_kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const BackwardKernels kBackwardK256Fp16;
const BackwardKernels kBackwardK256Fp16 = kBackwardKernels<__half, 256>;

}  // namespace flash_qla::cuda::sm80
