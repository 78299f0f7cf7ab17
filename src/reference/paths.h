// The fp64 token recurrence on the host: slow, obvious, taken only when it is named. It is what every other path is
// measured against.
#pragma once

#include "core/context_parallel.h"
#include "core/registry.h"

namespace flash_qla {

extern const ForwardPath kReferenceChunkForward;
extern const ForwardPath kReferenceRecurrent;
extern const BackwardPath kReferenceChunkBackward;
extern const ChunkSummaryPath kReferenceChunkSummary;
extern const ChunkSummaryBackwardPath kReferenceChunkSummaryBackward;
extern const SummaryCombinePath kReferenceSummaryCombine;
extern const VerifyPath kReferenceVerify;

}  // namespace flash_qla
