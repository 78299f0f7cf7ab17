#include "states.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_states() { return describe_state_kernel<StateKernelTraits<__half>>(); }

}  // namespace flash_qla::cuda::sm90
