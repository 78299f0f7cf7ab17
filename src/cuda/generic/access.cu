// What the core needs of CUDA devices and cannot do itself.
#include <cuda_runtime.h>

#include <string>

#include "cuda/generic/launch.h"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

Status copy_to_host(void* host, const void* device, size_t bytes, int device_index, void* cuda_stream) {
  const DeviceGuard guard(device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  FLASH_QLA_RETURN_IF_ERROR(
      cuda_status(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync"));
  return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
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

const DeviceAccess kCudaAccess = {FLASH_QLA_CUDA, cuda::copy_to_host, cuda::describe};

}  // namespace flash_qla
