#define Eigen Eigen_avx512
#define FLASH_QLA_ISA avx512
#include "cpu/layer/isa/layer.inc"

namespace flash_qla::cpu {
const LayerKernelTable kLayerKernelsAvx512 = {avx512::make_layer_kernels<float>(),
                                              avx512::make_layer_kernels<double>()};
}
