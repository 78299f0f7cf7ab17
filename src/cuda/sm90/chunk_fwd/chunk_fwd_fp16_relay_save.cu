#include "relay_kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_fp16_relay_save() { return describe_relay_kernel<RelayForwardTraits<__half, true>>(); }

}  // namespace flash_qla::cuda::sm90
