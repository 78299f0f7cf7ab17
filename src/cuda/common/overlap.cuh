// Kernels that start beside the end of those before them in the stream.
#pragma once

#include "cuda/common/bulk.cuh"

namespace flash_qla::cuda {

// Before a kernel's first access to memory, where it was launched to overlap: waits for the kernels before it, and lets
// the next one start as early. Before Hopper there is no such launch.
__device__ __forceinline__ void begin_after_predecessors() {
#if __CUDA_ARCH__ >= 900
  wait_for_predecessors();
  launch_dependents();
#endif
}

}  // namespace flash_qla::cuda
