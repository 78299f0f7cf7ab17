// Counters in memory, of which emulated kernels need no order: they run one after another, and so do their blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/mbarrier.cuh"
#include "cuda/common/overlap.cuh"

namespace flash_qla::cuda {

inline uint32_t load_acquire(const uint32_t* counter) { return *counter; }

}  // namespace flash_qla::cuda
