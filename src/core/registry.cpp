#include "core/registry.h"

#include "reference/paths.h"
#ifdef FLASH_QLA_WITH_CUDA
#include "cuda/paths.h"
#endif

namespace flash_qla {

// Order is preference: the first path of the call's device that does not reject it.

const std::vector<const ForwardPath*>& chunk_forward_paths() {
  static const std::vector<const ForwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaGenericChunkForward,
      &kCudaOracleChunkForward,
#endif
      &kReferenceChunkForward,
  };
  return paths;
}

const std::vector<const ForwardPath*>& recurrent_paths() {
  static const std::vector<const ForwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaDecode,
      &kCudaGenericRecurrent,
      &kCudaOracleRecurrent,
#endif
      &kReferenceRecurrent,
  };
  return paths;
}

const std::vector<const BackwardPath*>& chunk_backward_paths() {
  static const std::vector<const BackwardPath*> paths = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaGenericChunkBackward,
      &kCudaOracleChunkBackward,
#endif
      &kReferenceChunkBackward,
  };
  return paths;
}

const std::vector<const DeviceAccess*>& device_accesses() {
  static const std::vector<const DeviceAccess*> accesses = {
#ifdef FLASH_QLA_WITH_CUDA
      &kCudaAccess,
#endif
  };
  return accesses;
}

}  // namespace flash_qla
