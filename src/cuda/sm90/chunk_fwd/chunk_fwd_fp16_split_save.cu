#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_split_save() { return describe_kernel<ChunkForwardTraits<__half, 1, true>>(); }

}  // namespace flash_qla::cuda::sm90
