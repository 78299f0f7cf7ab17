#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel one_cta_save_h(DType type) {
  return type == DType::kFloat16 ? describe_kernel<SaveHTraits<__half>>()
                                 : describe_kernel<SaveHTraits<__nv_bfloat16>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
