// What the core needs of CUDA devices and cannot do itself.
#include <cuda_runtime.h>

#include <string>

#include "cuda/common/launch.h"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

Status copy_to_host(void* host, const void* device, int64_t pitch, int64_t width, int64_t rows, int device_index,
                    void* cuda_stream) {
  const DeviceGuard guard(device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  // One copy takes rows that do not overlap, up to a largest pitch. Others (repeated ones) go one by one.
  constexpr int64_t kLargestPitch = INT32_MAX;
  const int64_t at_once = pitch >= width && pitch <= kLargestPitch ? rows : 1;
  for (int64_t row = 0; row < rows; row += at_once) {
    FLASH_QLA_RETURN_IF_ERROR(
        cuda_status(cudaMemcpy2DAsync(static_cast<char*>(host) + row * width, static_cast<size_t>(width),
                                      static_cast<const char*>(device) + row * pitch,
                                      static_cast<size_t>(at_once == 1 ? width : pitch), static_cast<size_t>(width),
                                      static_cast<size_t>(at_once), cudaMemcpyDeviceToHost, stream),
                    "cudaMemcpy2DAsync"));
  }
  return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess ||
         status != cudaStreamCaptureStatusNone;
}

// 13000 -> "13.0"
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string describe() {
  std::string text = "cuda_runtime: " + version_text(CUDART_VERSION) + "\n";
  int driver = 0, devices = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return text + "cuda_driver: none\n";
  text += "cuda_driver: " + version_text(driver) + "\n";
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  for (int i = 0; i < devices; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    text += "gpu_" + std::to_string(i) + ": " + properties.name + ", sm_" +
            std::to_string(properties.major * 10 + properties.minor) + ", " +
            std::to_string(properties.multiProcessorCount) + " multiprocessors, " +
            std::to_string(properties.totalGlobalMem >> 20) + " MiB\n";
  }
  return text;
}

}  // namespace
}  // namespace cuda

const DeviceAccess kCudaAccess = {FLASH_QLA_CUDA, cuda::copy_to_host, cuda::is_capturing, cuda::describe};

}  // namespace flash_qla
