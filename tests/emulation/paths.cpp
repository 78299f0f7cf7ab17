// The table of paths of the emulated library: what is compiled into it.
#include "cuda/paths.h"
#include "core/commit.h"
#include "core/registry.h"
#include "reference/paths.h"

namespace flash_qla {

const char* source_commit() { return "emulated"; }

const std::vector<const ForwardPath*>& chunk_forward_paths() {
  static const std::vector<const ForwardPath*> paths = {&kCudaGenericChunkForward, &kCudaOracleChunkForward,
                                                        &kReferenceChunkForward};
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

const std::vector<const DeviceAccess*>& device_accesses() {
  static const std::vector<const DeviceAccess*> none;
  return none;
}

}  // namespace flash_qla
