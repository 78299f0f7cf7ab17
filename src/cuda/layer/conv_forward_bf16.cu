#include "cuda/layer/conv_forward_launch.cuh"

template flash_qla::Status flash_qla::cuda::launch_conv_forward<__nv_bfloat16>(const ConvParams&, const ConvGrid&,
                                                                               int64_t, cudaStream_t);
