#include "cuda/sm90/chunk_fwd_2cta/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel two_cta_save_fp16() { return fwd_2cta::describe_kernel<fwd_2cta::TwoCtaTraits<__half, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
