// The CPU backend: the chunk algorithm of docs/math.md, multi-threaded and vectorised, for every call of the contract.
#pragma once

#include "core/context_parallel.h"
#include "core/registry.h"

namespace flash_qla {

extern const ForwardPath kCpuChunkForward;
extern const ForwardPath kCpuRecurrent;
extern const BackwardPath kCpuChunkBackward;
extern const SequenceCutPath kCpuSequenceCut;
extern const ChunkSummaryPath kCpuChunkSummary;
extern const ChunkSummaryBackwardPath kCpuChunkSummaryBackward;
extern const SummaryCombinePath kCpuSummaryCombine;
extern const VerifyPath kCpuVerify;
extern const DeviceAccess kCpuAccess;

}  // namespace flash_qla
