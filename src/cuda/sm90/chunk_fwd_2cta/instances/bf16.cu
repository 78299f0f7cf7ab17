#include "cuda/sm90/chunk_fwd_2cta/kernel.cuh"

namespace flash_qla::cuda::sm90::fwd {

ChunkForwardKernel chunk_forward_bf16_split() {
  return fwd_2cta::describe_pair_kernel<fwd_2cta::PairForwardTraits<__nv_bfloat16, false>>();
}

}  // namespace flash_qla::cuda::sm90::fwd
