#include "cuda/sm90/chunk_fwd_2cta/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel two_cta(DType type) {
  return type == DType::kFloat16 ? fwd_2cta::describe_kernel<fwd_2cta::TwoCtaTraits<__half, false>>()
                                 : fwd_2cta::describe_kernel<fwd_2cta::TwoCtaTraits<__nv_bfloat16, false>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
