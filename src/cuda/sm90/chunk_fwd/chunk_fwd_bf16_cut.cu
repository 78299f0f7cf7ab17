#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_bf16_cut() {
  return describe_kernel<ChunkForwardTraits<__nv_bfloat16, 2, false, false, true>>();
}

}  // namespace flash_qla::cuda::sm90
