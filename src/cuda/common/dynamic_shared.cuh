// The shared memory that a launch asks for.
#pragma once

#include <cuda_runtime.h>

namespace flash_qla::cuda {

// Where it begins, on a boundary of 16 bytes at least.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  extern __shared__ uint4 s_memory[];
  return reinterpret_cast<T*>(s_memory);
}

}  // namespace flash_qla::cuda
