#include "cuda/sm80/kernels.cuh"

namespace flash_qla::cuda::sm80 {

template const Kernels& kernels_of<256>(DType type);

}  // namespace flash_qla::cuda::sm80
