#define Eigen Eigen_plain
#define FLASH_QLA_ISA plain
#include "cpu/isa/table.inc"

namespace flash_qla::cpu {
const KernelTable kKernelsPlain = {"plain", plain::make_kernels<float>(), plain::make_kernels<double>()};
}
