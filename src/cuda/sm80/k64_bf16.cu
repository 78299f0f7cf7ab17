#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

extern const Kernels kK64Bf16;
const Kernels kK64Bf16 = kKernels<__nv_bfloat16, 64>;

}  // namespace flash_qla::cuda::sm80
