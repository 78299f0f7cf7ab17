#include "cuda/layer/conv_backward_launch.cuh"

template flash_qla::Status flash_qla::cuda::launch_conv_backward<__nv_bfloat16>(const ConvBackwardParams&,
                                                                                const ConvGrid&, int64_t, cudaStream_t);
