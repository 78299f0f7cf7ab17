// Lines on their way into L2.
#pragma once

namespace flash_qla::cuda {

// The line at an address. A hint: nothing is read, so that it may come before what lies there is written.
__device__ __forceinline__ void l2_prefetch_line([[maybe_unused]] const void* global) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
#endif
}

}  // namespace flash_qla::cuda
