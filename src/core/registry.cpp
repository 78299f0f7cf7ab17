#include "core/registry.h"

#include "core/convolution.h"
#include "core/norm.h"
#include "cpu/layer/paths.h"
#include "cpu/paths.h"
#include "reference/layer/paths.h"
#include "reference/paths.h"
#ifdef FLASH_QLA_WITH_CUDA
#include "cuda/layer/paths.h"
#include "cuda/paths.h"
#endif

namespace flash_qla {

// Order is preference: the first path of the call's device that does not reject it.

const std::vector<const ForwardPath*>& chunk_forward_paths() {
  static const std::vector<const ForwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kSm90ChunkForwardWithParts,
      &kSm80ChunkForwardWithParts,
      &kCudaGenericChunkForwardWithParts,
      &kCudaOracleChunkForwardWithParts,
#endif
      &kCpuChunkForward,
      &kReferenceChunkForward,
  };
  return paths;
}

const std::vector<const ForwardPath*>& recurrent_paths() {
  static const std::vector<const ForwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaDecode,   &kCudaGenericRecurrent, &kCudaOracleRecurrent,
#endif
      &kCpuRecurrent, &kReferenceRecurrent,
  };
  return paths;
}

const std::vector<const BackwardPath*>& chunk_backward_paths() {
  static const std::vector<const BackwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kSm90ChunkBackwardWithParts,
      &kSm80ChunkBackwardWithParts,
      &kCudaGenericChunkBackwardWithParts,
      &kCudaOracleChunkBackwardWithParts,
#endif
      &kCpuChunkBackward,
      &kReferenceChunkBackward,
  };
  return paths;
}

const std::vector<const VerifyPath*>& verify_paths() {
  static const std::vector<const VerifyPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaVerify, &kCudaGenericVerify, &kCudaOracleVerify,
#endif
      &kCpuVerify,  &kReferenceVerify,
  };
  return paths;
}

const std::vector<const SequenceCutPath*>& sequence_cut_paths() {
  static const std::vector<const SequenceCutPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaSequenceCut,
#endif
      &kCpuSequenceCut,
  };
  return paths;
}

const std::vector<const ChunkSummaryPath*>& chunk_summary_paths() {
  static const std::vector<const ChunkSummaryPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kSm90ChunkSummary, &kSm80ChunkSummary,      &kCudaGenericChunkSummary, &kCudaOracleChunkSummary,
#endif
      &kCpuChunkSummary,  &kReferenceChunkSummary,
  };
  return paths;
}

const std::vector<const ChunkSummaryBackwardPath*>& chunk_summary_backward_paths() {
  static const std::vector<const ChunkSummaryBackwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kSm90ChunkSummaryBackward,        &kSm80ChunkSummaryBackward,
      &kCudaGenericChunkSummaryBackward, &kCudaOracleChunkSummaryBackward,
#endif
      &kCpuChunkSummaryBackward,         &kReferenceChunkSummaryBackward,
  };
  return paths;
}

const std::vector<const SummaryCombinePath*>& summary_combine_paths() {
  static const std::vector<const SummaryCombinePath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaGenericSummaryCombine,
#endif
      &kCpuSummaryCombine,
      &kReferenceSummaryCombine,
  };
  return paths;
}

const std::vector<const ConvPath*>& conv_forward_paths() {
  static const std::vector<const ConvPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaConvForward,
#endif
      &kCpuConvForward,
      &kReferenceConvForward,
  };
  return paths;
}

const std::vector<const ConvPath*>& conv_update_paths() {
  static const std::vector<const ConvPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaConvUpdate,
#endif
      &kCpuConvUpdate,
      &kReferenceConvUpdate,
  };
  return paths;
}

const std::vector<const ConvBackwardPath*>& conv_backward_paths() {
  static const std::vector<const ConvBackwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaConvBackward,
#endif
      &kCpuConvBackward,
      &kReferenceConvBackward,
  };
  return paths;
}

const std::vector<const NormPath*>& norm_gated_paths() {
  static const std::vector<const NormPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaNormGated,
#endif
      &kCpuNormGated,
      &kReferenceNormGated,
  };
  return paths;
}

const std::vector<const NormBackwardPath*>& norm_gated_backward_paths() {
  static const std::vector<const NormBackwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaNormGatedBackward,
#endif
      &kCpuNormGatedBackward,
      &kReferenceNormGatedBackward,
  };
  return paths;
}

const std::vector<const DeviceAccess*>& device_accesses() {
  static const std::vector<const DeviceAccess*> accesses = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaAccess,
#endif
      &kCpuAccess,
  };
  return accesses;
}

}  // namespace flash_qla
