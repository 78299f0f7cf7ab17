#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK96Bf16;
const Kernels kK96Bf16 = kKernels<__nv_bfloat16, 96>;

}  // namespace flash_qla::cuda::sm80
