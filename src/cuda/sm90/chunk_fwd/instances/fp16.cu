#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_fp16_fast() { return describe_kernel<ChunkForwardTraits<__half, false, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
