#include "cuda/sm90/context_parallel/segment_state.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel segment_states_bf16() { return cp::describe_kernel<cp::SegmentStateTraits<__nv_bfloat16>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
