#include "cuda/sm80/launch.h"

#include "cuda/sm80/traits.h"

namespace flash_qla::cuda::sm80 {

// Each in a source of its own, so that they compile side by side.
extern const Kernels kK64Bf16, kK96Bf16, kK128Bf16, kK192Bf16, kK256Bf16;
extern const Kernels kK64Fp16, kK96Fp16, kK128Fp16, kK192Fp16, kK256Fp16;

const Kernels& kernels_for(DType type, int64_t K) {
  const bool bf16 = type == DType::kBFloat16;
  switch (padded_keys(K)) {
    case 64:
      return bf16 ? kK64Bf16 : kK64Fp16;
    case 96:
      return bf16 ? kK96Bf16 : kK96Fp16;
    case 128:
      return bf16 ? kK128Bf16 : kK128Fp16;
    case 192:
      return bf16 ? kK192Bf16 : kK192Fp16;
    default:
      return bf16 ? kK256Bf16 : kK256Fp16;
  }
}

}  // namespace flash_qla::cuda::sm80
