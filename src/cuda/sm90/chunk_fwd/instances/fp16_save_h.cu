#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_fp16_fast_h() { return describe_kernel<ChunkForwardTraits<__half, true, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
