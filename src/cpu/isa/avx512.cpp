#define Eigen Eigen_avx512
#define FLASH_QLA_ISA avx512
#include "cpu/isa/table.inc"

namespace flash_qla::cpu {
const KernelTable kKernelsAvx512 = {"avx512", avx512::make_kernels<float>(), avx512::make_kernels<double>()};
}
