#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK96Fp16;
const Kernels kK96Fp16 = kKernels<__half, 96>;

}  // namespace flash_qla::cuda::sm80
