#include "cuda/sm90/chunk_fwd_2cta/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel two_cta_save_bf16() { return fwd_2cta::describe_kernel<fwd_2cta::TwoCtaTraits<__nv_bfloat16, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
