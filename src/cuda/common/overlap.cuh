// Kernels that run beside the end of the one before them in a stream (programmatic dependent launch, from compute
// capability 9.0 on; before it kernels run one after the other, and there is nothing to do).
#pragma once

namespace flash_qla::cuda {

// Lets the stream's next kernel start its blocks, if it was launched to do so; it waits for this one's end by itself.
__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the stream's kernels before this one have ended and their writes can be seen.
__device__ __forceinline__ void wait_for_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Before a kernel's first access to memory: both.
__device__ __forceinline__ void begin_after_predecessors() {
  wait_for_predecessors();
  launch_dependents();
}

}  // namespace flash_qla::cuda
