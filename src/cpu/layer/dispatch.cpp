// The layer's kernels of the instruction set that the backend has chosen.
#include "cpu/layer/kernels.h"

namespace flash_qla::cpu {

const LayerKernelTable& layer_kernel_table() {
#if defined(__x86_64__)
  if (&kernel_table() == &kKernelsAvx512) return kLayerKernelsAvx512;
  if (&kernel_table() == &kKernelsAvx2) return kLayerKernelsAvx2;
#endif
  return kLayerKernelsPlain;
}

}  // namespace flash_qla::cpu
