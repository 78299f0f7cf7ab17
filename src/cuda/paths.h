// The paths that run on NVIDIA GPUs, as the table in core/registry.cpp lists them.
#pragma once

#include "core/context_parallel.h"
#include "core/registry.h"

namespace flash_qla {

extern const ForwardPath kCudaGenericChunkForward;
extern const ForwardPath kCudaGenericRecurrent;
extern const BackwardPath kCudaGenericChunkBackward;

extern const ForwardPath kCudaDecode;

extern const VerifyPath kCudaVerify;
extern const VerifyPath kCudaGenericVerify;
extern const VerifyPath kCudaOracleVerify;

extern const ForwardPath kCudaOracleChunkForward;
extern const ForwardPath kCudaOracleRecurrent;
extern const BackwardPath kCudaOracleChunkBackward;

extern const ForwardPath kSm80ChunkForward;
extern const BackwardPath kSm80ChunkBackward;

extern const ForwardPath kSm90ChunkForward;
extern const BackwardPath kSm90ChunkBackward;

// The same for calls with states of ranks' parts as well (cuda/common/part_states.cuh): these are in the table.
extern const ForwardPath kSm90ChunkForwardWithParts;
extern const ForwardPath kSm80ChunkForwardWithParts;
extern const ForwardPath kCudaGenericChunkForwardWithParts;
extern const ForwardPath kCudaOracleChunkForwardWithParts;
extern const BackwardPath kSm90ChunkBackwardWithParts;
extern const BackwardPath kSm80ChunkBackwardWithParts;
extern const BackwardPath kCudaGenericChunkBackwardWithParts;
extern const BackwardPath kCudaOracleChunkBackwardWithParts;

extern const SequenceCutPath kCudaSequenceCut;
extern const ChunkSummaryPath kSm90ChunkSummary;
extern const ChunkSummaryPath kSm80ChunkSummary;
extern const ChunkSummaryPath kCudaGenericChunkSummary;
extern const ChunkSummaryPath kCudaOracleChunkSummary;
extern const ChunkSummaryBackwardPath kSm90ChunkSummaryBackward;
extern const ChunkSummaryBackwardPath kSm80ChunkSummaryBackward;
extern const ChunkSummaryBackwardPath kCudaGenericChunkSummaryBackward;
extern const ChunkSummaryBackwardPath kCudaOracleChunkSummaryBackward;
extern const SummaryCombinePath kCudaGenericSummaryCombine;

extern const DeviceAccess kCudaAccess;

}  // namespace flash_qla
