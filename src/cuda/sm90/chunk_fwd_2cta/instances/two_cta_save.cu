#include "cuda/sm90/chunk_fwd_2cta/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel two_cta_save(DType type) {
  return type == DType::kFloat16 ? fwd_2cta::describe_kernel<fwd_2cta::TwoCtaTraits<__half, true>>()
                                 : fwd_2cta::describe_kernel<fwd_2cta::TwoCtaTraits<__nv_bfloat16, true>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
