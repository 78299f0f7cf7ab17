#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_bf16_fast_a() { return describe_kernel<KeepingForwardTraits<__nv_bfloat16>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
