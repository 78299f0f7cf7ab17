#include "pair_kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_bf16_split() {
  return describe_pair_kernel<PairForwardTraits<__nv_bfloat16, false>>();
}

}  // namespace flash_qla::cuda::sm90
