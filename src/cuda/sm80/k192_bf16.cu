#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK192Bf16;
const Kernels kK192Bf16 = kKernels<__nv_bfloat16, 192>;

}  // namespace flash_qla::cuda::sm80
