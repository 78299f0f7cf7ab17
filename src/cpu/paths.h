// The CPU backend: the chunk algorithm of docs/math.md, multi-threaded and vectorised, for every call of the contract.
#pragma once

#include "core/registry.h"

namespace flash_qla {

extern const ForwardPath kCpuChunkForward;
extern const ForwardPath kCpuRecurrent;
extern const BackwardPath kCpuChunkBackward;
extern const VerifyPath kCpuVerify;
extern const DeviceAccess kCpuAccess;

}  // namespace flash_qla
