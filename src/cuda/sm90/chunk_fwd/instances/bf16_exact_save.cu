#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_bf16_save() { return describe_kernel<ChunkForwardTraits<__nv_bfloat16, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
