// A kernel launch that may overlap the one before it in the stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace flash_qla::cuda::sm90 {

// after_previous: the kernel may start as soon as the one before it allows; it waits for that one's results itself.
// cluster: so many blocks at a time see each other's shared memory.
template <typename Params>
cudaError_t launch_kernel(const void* kernel, int blocks, int threads, size_t smem_bytes, const Params& params,
                          bool after_previous, cudaStream_t stream, unsigned cluster = 1) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  if (after_previous) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& blocks_together = attributes[config.numAttrs++];
    blocks_together.id = cudaLaunchAttributeClusterDimension;
    blocks_together.val.clusterDim = {cluster, 1, 1};
  }
  config.attrs = attributes;
  Params copy = params;
  void* arguments[] = {&copy};
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace flash_qla::cuda::sm90
