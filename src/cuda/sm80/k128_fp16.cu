#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK128Fp16;
const Kernels kK128Fp16 = kKernels<__half, 128>;

}  // namespace flash_qla::cuda::sm80
