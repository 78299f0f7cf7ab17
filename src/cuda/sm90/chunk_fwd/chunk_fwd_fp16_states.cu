#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_states() { return describe_kernel<ChunkForwardTraits<__half, 2, false, true>>(); }

}  // namespace flash_qla::cuda::sm90
