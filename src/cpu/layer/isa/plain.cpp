#define Eigen Eigen_plain
#define FLASH_QLA_ISA plain
#include "cpu/layer/isa/layer.inc"

namespace flash_qla::cpu {
const LayerKernelTable kLayerKernelsPlain = {plain::make_layer_kernels<float>(), plain::make_layer_kernels<double>()};
}
