#include "cuda/sm90/chunk_bwd/links.cuh"

namespace flash_qla::cuda::sm90::bwd {

cudaError_t launch_link_gradients_bf16(const Args& p, const Maps& maps, const LinkGradients& links,
                                       cudaStream_t stream) {
  return launch_link_gradients_typed<__nv_bfloat16>(p, maps, links, stream);
}

}  // namespace flash_qla::cuda::sm90::bwd
