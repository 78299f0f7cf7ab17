#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK64Fp16;
const Kernels kK64Fp16 = kKernels<__half, 64>;

}  // namespace flash_qla::cuda::sm80
