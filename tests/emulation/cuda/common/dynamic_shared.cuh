// The shared memory of an emulated block.
#pragma once

#include <cuda_runtime.h>

namespace flash_qla::cuda {

template <class T>
T* dynamic_shared() {
  return static_cast<T*>(cuda_emulation::dynamic_shared_memory());
}

}  // namespace flash_qla::cuda
