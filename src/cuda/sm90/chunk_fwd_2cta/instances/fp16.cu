#include "cuda/sm90/chunk_fwd_2cta/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_fp16_split() {
  return fwd_2cta::describe_pair_kernel<fwd_2cta::PairForwardTraits<__half, false>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
