#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_fast_a() {
  return describe_kernel<ChunkForwardTraits<__half, false, true, false, true>>();
}

}  // namespace flash_qla::cuda::sm90
