#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK128Bf16;
const Kernels kK128Bf16 = kKernels<__nv_bfloat16, 128>;

}  // namespace flash_qla::cuda::sm80
