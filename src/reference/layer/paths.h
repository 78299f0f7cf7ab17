// The layer's operations in fp64 on the host, token by token: slow, obvious, taken only when it is named.
#pragma once

#include "core/convolution.h"
#include "core/norm.h"

namespace flash_qla {

extern const ConvPath kReferenceConvForward;
extern const ConvPath kReferenceConvUpdate;
extern const ConvBackwardPath kReferenceConvBackward;
extern const NormPath kReferenceNormGated;
extern const NormBackwardPath kReferenceNormGatedBackward;

}  // namespace flash_qla
