#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_fast_h_a() { return describe_kernel<KeepingForwardTraits<__half, true>>(); }

}  // namespace flash_qla::cuda::sm90
