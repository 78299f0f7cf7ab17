#include "relay_kernel.cuh"

namespace flash_qla::cuda::sm90 {

ChunkForwardKernel chunk_forward_bf16_relay_save() {
  return describe_relay_kernel<RelayForwardTraits<__nv_bfloat16, true>>();
}

}  // namespace flash_qla::cuda::sm90
