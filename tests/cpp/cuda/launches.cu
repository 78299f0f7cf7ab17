#include "launches.h"

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdlib>
#include <map>
#include <mutex>

// Calls of SYMBOL in this program go to __wrap_SYMBOL, and __real_SYMBOL is the runtime's (--wrap of the linker). Those
// that only some versions of the CUDA toolkit have are weak.
extern "C" {
void __real___cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*);
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**);
__attribute__((weak)) cudaError_t __real_cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
__attribute__((weak)) cudaError_t __real___cudaGetKernel(cudaKernel_t*, const void*);
__attribute__((weak)) cudaError_t __real___cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);
}

namespace flash_qla::testing {
namespace {

// Filled before main() by the compiler's own initialisers, so made when it is first used.
struct Record {
  std::mutex mutex;
  std::map<const void*, std::string> names;  // by the host's side of a kernel, and by its handle
  std::set<std::string> launched;
};
Record& record() {
  static Record the_record;
  return the_record;
}

std::string readable(const char* mangled) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  for (const char* part : {"flash_qla::cuda::", "(anonymous namespace)::", "void "}) {
    for (size_t at; (at = name.find(part)) != std::string::npos;) name.erase(at, std::string(part).size());
  }
  // Up to the parameters: a template argument may have parentheses too, as "(Form)1".
  int depth = 0;
  size_t end = 0;
  while (end < name.size() && (depth > 0 || name[end] != '(')) {
    depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
    ++end;
  }
  return name.substr(0, end);
}

bool of_the_library(const char* mangled) { return std::string(mangled).find("9flash_qla4cuda") != std::string::npos; }

void launched(const void* kernel) {
  const std::lock_guard<std::mutex> lock(record().mutex);
  const auto found = record().names.find(kernel);
  if (found != record().names.end()) record().launched.insert(found->second);
}

}  // namespace

std::set<std::string> kernels_of_the_program() {
  const std::lock_guard<std::mutex> lock(record().mutex);
  std::set<std::string> all;
  for (const auto& [kernel, name] : record().names) all.insert(name);
  return all;
}

std::set<std::string> launched_kernels() {
  const std::lock_guard<std::mutex> lock(record().mutex);
  return record().launched;
}

void forget_launches() {
  const std::lock_guard<std::mutex> lock(record().mutex);
  record().launched.clear();
}

}  // namespace flash_qla::testing

extern "C" {

void __wrap___cudaRegisterFunction(void** binary, const char* host, char* device, const char* name, int threads,
                                   uint3* thread, uint3* block, dim3* block_size, dim3* grid_size, int* warp_size) {
  using namespace flash_qla::testing;
  if (of_the_library(name)) {
    const std::lock_guard<std::mutex> lock(record().mutex);
    record().names[host] = readable(name);
  }
  __real___cudaRegisterFunction(binary, host, device, name, threads, thread, block, block_size, grid_size, warp_size);
}

cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  flash_qla::testing::launched(kernel);
  return __real_cudaLaunchKernelExC(config, kernel, arguments);
}

// kernel<<<..>>>(..): one call up to CUDA 12, two from CUDA 13 on.
cudaError_t __wrap_cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                    cudaStream_t stream) {
  flash_qla::testing::launched(kernel);
  return __real_cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
cudaError_t __wrap___cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  using namespace flash_qla::testing;
  const cudaError_t error = __real___cudaGetKernel(handle, kernel);
  const std::lock_guard<std::mutex> lock(record().mutex);
  const auto found = record().names.find(kernel);
  if (error == cudaSuccess && found != record().names.end()) record().names[*handle] = std::string(found->second);
  return error;
}
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t handle, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                                      cudaStream_t stream) {
  flash_qla::testing::launched(handle);
  return __real___cudaLaunchKernel(handle, grid, block, arguments, shared_bytes, stream);
}
}
