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
  static const std::vector<const ForwardPath*> paths = {&kSm80ChunkForward, &kCudaGenericChunkForward,
                                                        &kCudaOracleChunkForward, &kReferenceChunkForward};
  return paths;
}

const std::vector<const ForwardPath*>& recurrent_paths() {
  static const std::vector<const ForwardPath*> paths = {&kCudaGenericRecurrent, &kCudaOracleRecurrent,
                                                        &kReferenceRecurrent};
  return paths;
}

const std::vector<const BackwardPath*>& chunk_backward_paths() {
  static const std::vector<const BackwardPath*> paths = {&kCudaGenericChunkBackward, &kCudaOracleChunkBackward,
                                                         &kReferenceChunkBackward};
  return paths;
}

const std::vector<const VerifyPath*>& verify_paths() {
  static const std::vector<const VerifyPath*> paths = {&kCudaVerify, &kCudaGenericVerify, &kCudaOracleVerify,
                                                       &kReferenceVerify};
  return paths;
}

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
