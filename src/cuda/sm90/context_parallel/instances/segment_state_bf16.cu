#include "cuda/sm90/context_parallel/segment_state.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_bf16_states() {
  return cp::describe_state_kernel<cp::StateKernelTraits<__nv_bfloat16>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
