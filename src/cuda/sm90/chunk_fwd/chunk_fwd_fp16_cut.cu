#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_cut() {
  return describe_kernel<ChunkForwardTraits<__half, 2, false, false, true>>();
}

}  // namespace flash_qla::cuda::sm90
