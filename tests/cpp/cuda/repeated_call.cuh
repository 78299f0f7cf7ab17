// A call that is run again and again, and compared on the device.
#pragma once

#include "calls.h"

namespace flash_qla::testing {

// Adds the number of 32-bit words in which a and b differ.
__global__ void count_different_kernel(const uint32_t* a, const uint32_t* b, int64_t words, unsigned long long* count) {
  unsigned long long different = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += gridDim.x * blockDim.x) {
    different += a[i] != b[i];
  }
  if (different > 0) atomicAdd(count, different);
}

// Keeps `gridDim.x` blocks busy for `clocks` clocks.
__global__ void spin_kernel(int64_t clocks) {
  const int64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
}

__global__ void fill_words_kernel(uint32_t* data, int64_t words, uint32_t word) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < words;
       i += gridDim.x * blockDim.x) {
    data[i] = word;
  }
}

// A block has the whole shared memory of a multiprocessor and leaves it full of `word`.
__global__ void __launch_bounds__(1024, 1) fill_shared_kernel(uint32_t word, uint32_t words) {
  extern __shared__ volatile uint32_t left_behind[];
  for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) left_behind[i] = word;
  // Blocks begin within a microsecond of each other: none is done before the last one has found a multiprocessor, so
  // that all of them are filled.
  const int64_t begin = clock64();
  while (clock64() - begin < 4000) {
  }
}

// What the next kernels of the stream find in shared memory, which nobody clears between kernels.
inline void fill_shared_memory(uint32_t word, cudaStream_t stream) {
  int device = 0, multiprocessors = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  check_cuda(cudaFuncSetAttribute(fill_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "cudaFuncSetAttribute");
  fill_shared_kernel<<<static_cast<unsigned>(multiprocessors), 1024, static_cast<size_t>(bytes), stream>>>(
      word, static_cast<uint32_t>(bytes) / 4);
  check_cuda(cudaGetLastError(), "fill_shared_kernel");
}

// What a call reads: where it lies, and a copy.
struct Reading {
  char* data;
  size_t bytes;
  const char* copy;
};

// A call on the device whose outputs are compared there, again and again, with what they were before. The call must
// outlive it.
template <class Call>
class RepeatedCall {
 public:
  RepeatedCall(Call& call, Arena& arena, const char* path = "sm90") : call_(&call) {
    for (auto [name, buffer] : call.inputs()) {
      buffer->upload(arena);
      if (buffer->present()) inputs_.push_back({static_cast<char*>(buffer->device().data), buffer->bytes().size()});
    }
    for (auto [name, buffer] : call.outputs()) {
      if (!buffer->present()) continue;
      buffer->upload(arena);
      const size_t bytes = buffer->bytes().size();
      outputs_.push_back({static_cast<char*>(buffer->device().data), bytes / 4 * 4});
    }
    for (auto [name, buffer] : call.in_place()) {
      if (!buffer->present()) continue;
      buffer->upload(arena);
      const size_t bytes = buffer->bytes().size();
      char* given = static_cast<char*>(arena.take(bytes));
      check_cuda(cudaMemcpy(given, buffer->device().data, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
      outputs_.push_back({static_cast<char*>(buffer->device().data), bytes / 4 * 4});
      in_place_.push_back({outputs_.size() - 1, given});
    }
    args_ = call.arguments([](Buffer& b) { return b.present() ? b.device() : Tensor{}; });
    args_.options.path = path;
    args_.options.device_type = FLASH_QLA_CUDA;
    check_cuda(cudaGetDevice(&args_.options.device_index), "cudaGetDevice");
    status_ = call.workspace_size(args_, &workspace_bytes_);
    workspace_ = arena.take(workspace_bytes_);
    count_ = static_cast<unsigned long long*>(arena.take(sizeof(*count_)));
    check_cuda(cudaMemset(count_, 0, sizeof(*count_)), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // other streams do not wait for the copies
  }
  const Status& status() const { return status_; }
  const void* workspace() const { return workspace_; }

  // What the call only reads.
  std::vector<Reading> take_inputs(Arena& arena) const {
    std::vector<Reading> readings;
    for (const auto& [data, bytes] : inputs_) {
      char* copy = static_cast<char*>(arena.take(bytes));
      check_cuda(cudaMemcpy(copy, data, bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
      readings.push_back({data, bytes, copy});
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // as in the constructor
    return readings;
  }
  // What it changes in place, with a copy of what that was.
  std::vector<Reading> given() const {
    std::vector<Reading> readings;
    for (const auto& [i, copy] : in_place_) readings.push_back({outputs_[i].first, outputs_[i].second, copy});
    return readings;
  }
  // What it changes in place is from now on given as it is on the device.
  void give_anew() const {
    for (const auto& [i, copy] : in_place_) {
      check_cuda(cudaMemcpy(copy, outputs_[i].first, outputs_[i].second, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    }
  }
  // Room for one set of results.
  std::vector<char*> take_results(Arena& arena) const {
    std::vector<char*> results;
    for (const auto& [data, bytes] : outputs_) results.push_back(static_cast<char*>(arena.take(bytes)));
    return results;
  }
  void keep(const std::vector<char*>& results, cudaStream_t stream) const {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      check_cuda(cudaMemcpyAsync(results[i], outputs_[i].first, outputs_[i].second, cudaMemcpyDeviceToDevice, stream),
                 "cudaMemcpyAsync");
    }
  }
  // Outputs as NaN; what is changed in place as it was given.
  void poison(cudaStream_t stream) const {
    for (const auto& [data, bytes] : outputs_) {
      check_cuda(cudaMemsetAsync(data, 0xff, bytes, stream), "cudaMemsetAsync");
    }
    for (const auto& [i, given] : in_place_) {
      const auto& [data, bytes] = outputs_[i];
      check_cuda(cudaMemcpyAsync(data, given, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
    }
  }
  // What the call finds in its scratch.
  void fill_scratch(uint32_t word, cudaStream_t stream) const {
    fill_words_kernel<<<1024, 256, 0, stream>>>(static_cast<uint32_t*>(workspace_),
                                                static_cast<int64_t>(workspace_bytes_ / 4), word);
  }
  void run(cudaStream_t stream) { status_ = call_->run(args_, workspace_, workspace_bytes_, stream); }
  void compare(const std::vector<char*>& results, cudaStream_t stream) const {
    for (size_t i = 0; i < outputs_.size(); ++i) {
      count_different_kernel<<<512, 256, 0, stream>>>(reinterpret_cast<const uint32_t*>(outputs_[i].first),
                                                      reinterpret_cast<const uint32_t*>(results[i]),
                                                      static_cast<int64_t>(outputs_[i].second / 4), count_);
    }
  }
  // Words that have differed so far. Waits for the device.
  unsigned long long different() const {
    unsigned long long count = 0;
    check_cuda(cudaDeviceSynchronize(), "sm90, again and again");
    check_cuda(cudaMemcpy(&count, count_, sizeof(count), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return count;
  }
  const typename Call::Arguments& arguments() const { return args_; }

 private:
  Call* call_;
  typename Call::Arguments args_;
  Status status_;
  size_t workspace_bytes_ = 0;
  void* workspace_ = nullptr;
  unsigned long long* count_ = nullptr;
  std::vector<std::pair<char*, size_t>> inputs_, outputs_;
  std::vector<std::pair<size_t, char*>> in_place_;  // which of the outputs, and a copy of what it was
};

}  // namespace flash_qla::testing
