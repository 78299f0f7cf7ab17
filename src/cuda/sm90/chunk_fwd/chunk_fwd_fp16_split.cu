#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_split() { return describe_kernel<ChunkForwardTraits<__half, 1, false>>(); }

}  // namespace flash_qla::cuda::sm90
