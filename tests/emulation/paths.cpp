// The table of paths of the emulated library: what is compiled into it.
#include "cuda/layer/paths.h"
#include "core/commit.h"
#include "core/registry.h"
#include "cuda/paths.h"
#include "reference/layer/paths.h"
#include "reference/paths.h"

namespace flash_qla {

const char* source_commit() { return "emulated"; }

const std::vector<const ForwardPath*>& chunk_forward_paths() {
  static const std::vector<const ForwardPath*> paths = {&kSm80ChunkForwardWithParts, &kCudaGenericChunkForwardWithParts,
                                                        &kCudaOracleChunkForwardWithParts, &kReferenceChunkForward};
  return paths;
}

const std::vector<const ForwardPath*>& recurrent_paths() {
  static const std::vector<const ForwardPath*> paths = {&kCudaDecode, &kCudaGenericRecurrent, &kCudaOracleRecurrent,
                                                        &kReferenceRecurrent};
  return paths;
}

const std::vector<const BackwardPath*>& chunk_backward_paths() {
  static const std::vector<const BackwardPath*> paths = {&kSm80ChunkBackwardWithParts,
                                                         &kCudaGenericChunkBackwardWithParts,
                                                         &kCudaOracleChunkBackwardWithParts, &kReferenceChunkBackward};
  return paths;
}

const std::vector<const VerifyPath*>& verify_paths() {
  static const std::vector<const VerifyPath*> paths = {&kCudaVerify, &kCudaGenericVerify, &kCudaOracleVerify,
                                                       &kReferenceVerify};
  return paths;
}

const std::vector<const SequenceCutPath*>& sequence_cut_paths() {
  static const std::vector<const SequenceCutPath*> paths = {&kCudaSequenceCut};
  return paths;
}

const std::vector<const ChunkSummaryPath*>& chunk_summary_paths() {
  static const std::vector<const ChunkSummaryPath*> paths = {&kSm90ChunkSummary, &kSm80ChunkSummary,
                                                             &kCudaGenericChunkSummary, &kCudaOracleChunkSummary,
                                                             &kReferenceChunkSummary};
  return paths;
}

const std::vector<const ChunkSummaryBackwardPath*>& chunk_summary_backward_paths() {
  static const std::vector<const ChunkSummaryBackwardPath*> paths = {
      &kSm90ChunkSummaryBackward, &kSm80ChunkSummaryBackward, &kCudaGenericChunkSummaryBackward,
      &kCudaOracleChunkSummaryBackward, &kReferenceChunkSummaryBackward};
  return paths;
}

const std::vector<const SummaryCombinePath*>& summary_combine_paths() {
  static const std::vector<const SummaryCombinePath*> paths = {&kCudaGenericSummaryCombine, &kReferenceSummaryCombine};
  return paths;
}

// Hopper's kernels are not emulated: what names their paths finds one that takes nothing. Of links all but one kernel
// is (sm90_links.cpp): they ask what the forward takes.
namespace {
template <class Arguments>
constexpr Path<Arguments> no_path() {
  return {"sm90",
          FLASH_QLA_CUDA,
          false,
          [](const Arguments& args, const Problem& p) {
            if constexpr (!std::is_same_v<Arguments, flash_qla_forward_arguments>)
              return std::string("is not emulated");
            else
              return std::string(present(args.o) || p.K != 128 || p.V != 128 ? "is not emulated" : "");
          },
          [](const Arguments&, const Problem&) { return size_t{0}; },
          [](const Arguments&, const Problem&, void*, void*) { return Status(); }};
}
}  // namespace
extern const ForwardPath kSm90ChunkForward = no_path<flash_qla_forward_arguments>();
extern const BackwardPath kSm90ChunkBackward = no_path<flash_qla_backward_arguments>();

const std::vector<const ConvPath*>& conv_forward_paths() {
  static const std::vector<const ConvPath*> paths = {&kCudaConvForward, &kReferenceConvForward};
  return paths;
}

const std::vector<const ConvPath*>& conv_update_paths() {
  static const std::vector<const ConvPath*> paths = {&kCudaConvUpdate, &kReferenceConvUpdate};
  return paths;
}

const std::vector<const ConvBackwardPath*>& conv_backward_paths() {
  static const std::vector<const ConvBackwardPath*> paths = {&kCudaConvBackward, &kReferenceConvBackward};
  return paths;
}

const std::vector<const NormPath*>& norm_gated_paths() {
  static const std::vector<const NormPath*> paths = {&kCudaNormGated, &kReferenceNormGated};
  return paths;
}

const std::vector<const NormBackwardPath*>& norm_gated_backward_paths() {
  static const std::vector<const NormBackwardPath*> paths = {&kCudaNormGatedBackward, &kReferenceNormGatedBackward};
  return paths;
}

const std::vector<const DeviceAccess*>& device_accesses() {
  static const std::vector<const DeviceAccess*> none;
  return none;
}

}  // namespace flash_qla
