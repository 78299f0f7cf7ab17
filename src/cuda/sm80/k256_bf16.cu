#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK256Bf16;
const Kernels kK256Bf16 = kKernels<__nv_bfloat16, 256>;

}  // namespace flash_qla::cuda::sm80
