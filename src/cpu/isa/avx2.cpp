#define Eigen Eigen_avx2
#define FLASH_QLA_ISA avx2
#include "cpu/isa/table.inc"

namespace flash_qla::cpu {
const KernelTable kKernelsAvx2 = {"avx2", avx2::make_kernels<float>(), avx2::make_kernels<double>()};
}
