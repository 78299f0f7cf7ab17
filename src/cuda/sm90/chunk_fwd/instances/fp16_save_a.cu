#include "cuda/sm90/chunk_fwd/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_fp16_fast_a() { return describe_kernel<KeepingForwardTraits<__half>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
