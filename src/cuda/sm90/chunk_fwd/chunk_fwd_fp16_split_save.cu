#include "pair_kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_split_save() { return describe_pair_kernel<PairForwardTraits<__half, true>>(); }

}  // namespace flash_qla::cuda::sm90
