#include "cuda/sm90/context_parallel/segment_state.cuh"

namespace flash_qla::cuda::sm90::fwd {

Kernel segment_states(DType type) {
  return type == DType::kFloat16 ? cp::describe_kernel<cp::SegmentStateTraits<__half>>()
                                 : cp::describe_kernel<cp::SegmentStateTraits<__nv_bfloat16>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
