#include "cuda/sm90/chunk_bwd/launch.cuh"

namespace flash_qla::cuda::sm90::bwd {

cudaError_t launch_chunk_backward_fp16(const Args& params, const Maps& maps, const Parts& stage, int multiprocessors,
                                       cudaStream_t stream) {
  return launch_chunk_backward_typed<__half>(params, maps, stage, multiprocessors, stream);
}

}  // namespace flash_qla::cuda::sm90::bwd
