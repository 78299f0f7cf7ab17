// What the host asks and tells a Hopper GPU: whether it is one, and what the copy engine knows of a tensor.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/problem.h"

namespace flash_qla::cuda::sm90 {

// Of compute capability 9.0: what these kernels are for.
bool is_hopper(int device);

// The innermost dimension is contiguous; strides of the others in bytes. A box arrives as rows of 128 bytes, swizzled.
// Elements outside the tensor arrive as zeros.
cudaError_t encode_tensor_map(CUtensorMap* map, DType type, void* data, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box);

template <size_t kRank>
cudaError_t encode_tensor_map(CUtensorMap* map, DType type, void* data, const cuuint64_t (&sizes)[kRank],
                              const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  return encode_tensor_map(map, type, data, static_cast<int>(kRank), sizes, strides, box);
}

}  // namespace flash_qla::cuda::sm90
