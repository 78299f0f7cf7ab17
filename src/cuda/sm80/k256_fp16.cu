#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK256Fp16;
const Kernels kK256Fp16 = kKernels<__half, 256>;

}  // namespace flash_qla::cuda::sm80
