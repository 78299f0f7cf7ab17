#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16() { return describe_kernel<ChunkForwardTraits<__half, false>>(); }

}  // namespace flash_qla::cuda::sm90
