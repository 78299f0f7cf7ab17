#include "cuda/sm90/links/link_states.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel link_states(DType type) {
  return type == DType::kFloat16 ? links::describe_link_kernel<cp::SegmentStateTraits<__half, true>>()
                                 : links::describe_link_kernel<cp::SegmentStateTraits<__nv_bfloat16, true>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
