// The layer's operations on NVIDIA GPUs from sm_80 on: path "cuda_layer".
#pragma once

#include "core/convolution.h"
#include "core/norm.h"

namespace flash_qla {

extern const ConvPath kCudaConvForward;
extern const ConvPath kCudaConvUpdate;
extern const ConvBackwardPath kCudaConvBackward;
extern const NormPath kCudaNormGated;
extern const NormBackwardPath kCudaNormGatedBackward;

}  // namespace flash_qla
