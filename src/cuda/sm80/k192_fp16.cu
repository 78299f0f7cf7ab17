#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK192Fp16;
const Kernels kK192Fp16 = kKernels<__half, 192>;

}  // namespace flash_qla::cuda::sm80
