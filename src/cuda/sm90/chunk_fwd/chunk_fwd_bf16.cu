#include "kernel.cuh"

namespace flash_qla::cuda::sm90 {
template __global__ void sm90_chunk_forward_kernel<ChunkForwardTraits<__nv_bfloat16, 2, false>>(const __grid_constant__ ChunkForwardKernelParams);
}  // namespace flash_qla::cuda::sm90
