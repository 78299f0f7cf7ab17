// What the benchmarks of the device share: memory filled with numbers, and times of captured graphs.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "buffers.h"
#include "core/half.h"

namespace flash_qla::testing {

// Uniform numbers in [low, high), so that timings are not those of zeros. 16-bit types are truncated.
static __global__ void fill_kernel(void* data, int64_t n, int32_t type, float low, float high, uint32_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ull + seed;
    x ^= x >> 31;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    const float value = low + (high - low) * static_cast<float>(x >> 40) * 0x1p-24f;
    if (type == static_cast<int32_t>(DType::kFloat32)) {
      static_cast<float*>(data)[i] = value;
    } else if (type == static_cast<int32_t>(DType::kBFloat16)) {
      static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
    } else {
      static_cast<__half*>(data)[i] = __float2half_rz(value);
    }
  }
}

class DeviceBench {
 public:
  explicit DeviceBench(int reps) : reps_(reps), arena_(size_t{24} << 30) {
    check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate");
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }

 protected:
  Tensor draw(DType type, std::initializer_list<int64_t> shape, float low, float high) {
    Tensor t = tensor(nullptr, type, shape);
    int64_t n = 1;
    for (int64_t size : shape) n *= size;
    t.data = arena_.take(static_cast<size_t>(n * size_of(type)));
    fill_kernel<<<1024, 256, 0, stream_>>>(t.data, n, t.dtype, low, high, seed_++);
    return t;
  }

  // Median time of one call. `calls` of them make one captured graph, so that gaps between launches stay out.
  double time(const std::function<Status()>& call, int calls) { return time_in_turn({call}, calls)[0]; }

  // The same of several calls, replayed in turn: clocks that fall as the card warms up fall for all of them alike.
  std::vector<double> time_in_turn(const std::vector<std::function<Status()>>& all, int calls) {
    std::vector<cudaGraphExec_t> graphs;
    for (const auto& call : all) graphs.push_back(capture(call, calls));
    std::vector<std::vector<float>> times(all.size());
    for (int i = 0; i < reps_ + 2; ++i) {
      for (size_t c = 0; c < all.size(); ++c) {
        check_cuda(cudaEventRecord(begin_, stream_), "cudaEventRecord");
        check_cuda(cudaGraphLaunch(graphs[c], stream_), "cudaGraphLaunch");
        check_cuda(cudaEventRecord(end_, stream_), "cudaEventRecord");
        check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float ms = 0.f;
        check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
        if (i >= 2) times[c].push_back(ms / static_cast<float>(calls));  // the first two warm up
      }
    }
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
    std::vector<double> medians;
    for (std::vector<float>& t : times) {
      std::sort(t.begin(), t.end());
      medians.push_back(t[t.size() / 2]);
    }
    return medians;
  }

  cudaGraphExec_t capture(const std::function<Status()>& call, int calls) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < calls; ++i) {
      if (const Status status = call(); !status.ok()) {
        std::fprintf(stderr, "%s\n", status.message());
        std::exit(2);
      }
    }
    check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
    return executable;
  }

  // A call of `args`, with scratch of its own. `args` must outlive it.
  template <class Op, class Arguments>
  std::function<Status()> prepare(Arguments& args) {
    args.options.device_type = FLASH_QLA_CUDA;
    check_cuda(cudaGetDevice(&args.options.device_index), "cudaGetDevice");
    size_t bytes = 0;
    if (const Status status = Op::workspace_size(args, &bytes); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.message());
      std::exit(2);
    }
    void* workspace = arena_.take(bytes);
    return [&args, workspace, bytes, this] { return Op::run(args, workspace, bytes, stream_); };
  }

  template <class Op, class Arguments>
  double time_op(Arguments& args, int calls) {
    return time(prepare<Op>(args), calls);
  }

  int reps_;
  Arena arena_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  uint32_t seed_ = 1;
};

}  // namespace flash_qla::testing
