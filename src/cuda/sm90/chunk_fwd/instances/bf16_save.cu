#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel one_cta_save_bf16() { return describe_kernel<SaveTraits<__nv_bfloat16>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
