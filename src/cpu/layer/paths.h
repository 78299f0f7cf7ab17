// The layer's operations on the CPU, multi-threaded and vectorised, for every call of the contract.
#pragma once

#include "core/convolution.h"
#include "core/norm.h"

namespace flash_qla {

extern const ConvPath kCpuConvForward;
extern const ConvPath kCpuConvUpdate;
extern const ConvBackwardPath kCpuConvBackward;
extern const NormPath kCpuNormGated;
extern const NormBackwardPath kCpuNormGatedBackward;

}  // namespace flash_qla
