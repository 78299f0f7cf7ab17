#include "cuda/sm90/common/tensor_map.h"

namespace flash_qla::cuda::sm90 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, found at run time so that the library does not link against the driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult found;
    // 12000: the version that introduced it.
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      pointer = nullptr;
    }
    return reinterpret_cast<EncodeTiled>(pointer);
  }();
  return function;
}

CUtensorMapDataType map_type(DType type) {
  return type == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
         : type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

}  // namespace

bool is_hopper(int device) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

cudaError_t encode_tensor_map(CUtensorMap* map, DType type, void* data, int rank, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box) {
  if (encode_tiled() == nullptr) return cudaErrorNotSupported;
  constexpr cuuint32_t kSteps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode_tiled()(map, map_type(type), static_cast<cuuint32_t>(rank), data, sizes, strides, box,
                                         kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flash_qla::cuda::sm90
