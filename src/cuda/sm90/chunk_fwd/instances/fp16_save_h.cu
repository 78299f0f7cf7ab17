#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel one_cta_save_h_fp16() { return describe_kernel<SaveHTraits<__half>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
