// Host side of a launch: the call's device, scratch cut out of the caller's workspace, kernel launches as a Status.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "core/status.h"

namespace flash_qla::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return Status();
  return make_status(FLASH_QLA_RUNTIME_ERROR, "cuda: %s failed (%s: %s)", what, cudaGetErrorName(error),
                     cudaGetErrorString(error));
}

// 0 where it is not known.
inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// Of the current device.
inline cudaError_t count_multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// Makes a device current for as long as the object lives. Its context too: a thread that has made no call of the
// runtime yet (a framework's own for the backward pass, say) has none, and the driver's encoder of tensor maps wants
// one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess) error_ = cudaSetDevice(device);
    changed_ = error_ == cudaSuccess && previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  Status status() const { return cuda_status(error_, "selecting the device"); }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t error_ = cudaSuccess;
};

// Cuts arrays out of the workspace. With a NULL base it only counts, so that the size that a path reports and what it
// uses come from the same lines.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t elements) {
    char* p = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (static_cast<size_t>(elements) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(p);
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 256;  // what cudaMalloc gives, and more than any load needs
  char* base_;
  size_t bytes_ = 0;
};

// Bytes that the constructor of a Call takes from its last argument.
template <class Call, class... Arguments>
size_t workspace_bytes(const Arguments&... arguments) {
  Workspace workspace(nullptr);
  Call(arguments..., &workspace);
  return workspace.bytes();
}

// Runs a Call, whose constructor lays out the workspace, on its device.
template <class Call, class Arguments, class Sizes>
Status run_call(const Arguments& args, const Sizes& p, void* memory, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  Workspace workspace(memory);
  return Call(args, p, &workspace).run(static_cast<cudaStream_t>(stream));
}

// The shape of a launch. overlaps: the kernel waits by itself for the results of the kernels before it, and may be
// started before their end (from Hopper on). cluster: so many blocks at a time see each other's shared memory.
struct LaunchConfig {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2] = {};

  LaunchConfig(int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream, bool overlaps,
               unsigned cluster = 1) {
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (overlaps) {
      cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& blocks_together = attributes[config.numAttrs++];
      blocks_together.id = cudaLaunchAttributeClusterDimension;
      blocks_together.val.clusterDim = {cluster, 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;  // the configuration points into itself
  LaunchConfig& operator=(const LaunchConfig&) = delete;
};

// Starts a kernel that is known by its address and has one parameter.
template <class Parameter>
cudaError_t launch_function(const void* kernel, const LaunchConfig& shape, const Parameter& parameter) {
  Parameter copy = parameter;
  void* arguments[] = {&copy};
  return cudaLaunchKernelExC(&shape.config, kernel, arguments);
}

// Starts kernel<<<blocks, threads, shared_bytes, stream>>>(args...). No blocks: nothing to do.
template <class... Parameters, class... Arguments>
Status launch_kernel(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
                     cudaStream_t stream, bool overlaps, const Arguments&... args) {
  if (blocks == 0) return Status();
  // The x dimension of a grid holds 2^31 - 1 blocks.
  if (blocks > 0x7fffffffLL) {
    return make_status(FLASH_QLA_NOT_IMPLEMENTED, "cuda: %s would need %lld blocks (at most 2147483647)", name,
                       static_cast<long long>(blocks));
  }
  // Without the attribute a block gets at most 48 KiB.
  if (shared_bytes > 48 * 1024) {
    FLASH_QLA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
        name));
  }
  const LaunchConfig shape(blocks, threads, shared_bytes, stream, overlaps);
  return cuda_status(cudaLaunchKernelEx(&shape.config, kernel, args...), name);
}

// The same in the order of the stream.
template <class... Parameters, class... Arguments>
Status launch(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
              cudaStream_t stream, const Arguments&... args) {
  return launch_kernel(name, kernel, blocks, threads, shared_bytes, stream, false, args...);
}

// Whether a device can start a kernel beside the end of the one before it.
inline bool allows_overlap(int device) {
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

// Where a kernel goes, and whether it may start beside the end of the one before it there.
struct Queue {
  cudaStream_t stream;
  bool overlaps;
};

// Blocks for `items` at one thread each, in grid-stride loops: no more than keep a large GPU busy.
inline int64_t blocks_for(int64_t items, int threads) {
  constexpr int64_t kMostBlocks = 4096;
  const int64_t blocks = ceil_div(items, threads);
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

}  // namespace flash_qla::cuda
