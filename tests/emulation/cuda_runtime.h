// Stands before CUDA's own header of this name where kernels are compiled for the host: the runtime's types are CUDA's,
// its functions those of runtime.cpp, and a launch runs the kernel before it returns.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <tuple>
#include <utility>

#undef __shared__
#define __shared__ static  // one block at a time, in one host thread
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__ inline

#include "device.h"

namespace cuda_emulation {
cudaError_t check_launch(const cudaLaunchConfig_t& config, const void* kernel);
void allow_shared_bytes(const void* kernel, int bytes);
}  // namespace cuda_emulation

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const cudaError_t error = cuda_emulation::check_launch(*config, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const std::tuple<std::decay_t<Parameters>...> kept(std::forward<Arguments>(arguments)...);
  cuda_emulation::run_grid(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                           [&] { std::apply(kernel, kept); });
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || static_cast<size_t>(value) > cuda_emulation::kMostSharedBytes) return cudaErrorInvalidValue;
    cuda_emulation::allow_shared_bytes(reinterpret_cast<const void*>(kernel), value);
  }
  return cudaSuccess;
}

template <class T>
cudaError_t cudaMalloc(T** p, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
