#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel one_cta_fp16() { return describe_kernel<ForwardTraits<__half>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
