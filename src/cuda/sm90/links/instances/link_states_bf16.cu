#include "cuda/sm90/links/link_states.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel link_states_bf16() { return links::describe_link_kernel<cp::SegmentStateTraits<__nv_bfloat16, true>>(); }

}  // namespace flash_qla::cuda::sm90::fwd
