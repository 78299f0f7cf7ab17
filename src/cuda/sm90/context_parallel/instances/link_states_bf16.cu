#include "cuda/sm90/context_parallel/link_states.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel link_states_bf16() { return cp::describe_link_kernel<cp::SegmentStateTraits<__nv_bfloat16, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
