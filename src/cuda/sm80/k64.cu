#include "cuda/sm80/kernels.cuh"

template const flash_qla::cuda::sm80::Kernels& flash_qla::cuda::sm80::kernels_of<64>(flash_qla::DType);
