#include "pair_kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_split() { return describe_pair_kernel<PairForwardTraits<__half, false>>(); }

}  // namespace flash_qla::cuda::sm90
