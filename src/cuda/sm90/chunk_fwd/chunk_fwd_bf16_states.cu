#include "states.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_bf16_states() { return describe_state_kernel<StateKernelTraits<__nv_bfloat16>>(); }

}  // namespace flash_qla::cuda::sm90
