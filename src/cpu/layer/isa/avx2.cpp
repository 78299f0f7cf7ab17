#define Eigen Eigen_avx2
#define FLASH_QLA_ISA avx2
#include "cpu/layer/isa/layer.inc"

namespace flash_qla::cpu {
const LayerKernelTable kLayerKernelsAvx2 = {avx2::make_layer_kernels<float>(), avx2::make_layer_kernels<double>()};
}
