#include "cuda/common/sequences.cuh"

#include <algorithm>

#include "cuda/common/block_scan.cuh"
#include "cuda/common/overlap.cuh"

namespace flash_qla::cuda {
namespace {

// One block walks the offsets in steps of its width, no wider than they need; a step is two scans (running maximum,
// running sum).
constexpr int kMostThreads = 1024, kWarp = 32;

__global__ void __launch_bounds__(kMostThreads)
    plan_sequences_kernel(DeviceTensor cu_seqlens, int64_t N, int64_t T, int64_t* bounds, int64_t* first_chunk) {
  __shared__ int64_t s_scan[kMostThreads / kWarp];
  __shared__ int64_t s_bound, s_chunks;  // of the last offset so far
  const int threads = static_cast<int>(blockDim.x);
  launch_dependents();
  const auto clamp = [T](int64_t x) { return x < 0 ? 0 : (x > T ? T : x); };
  if (threadIdx.x == 0) {
    s_bound = clamp(load_index(cu_seqlens, 0));
    s_chunks = 0;
    bounds[0] = s_bound;
    first_chunk[0] = 0;
  }
  __syncthreads();
  for (int64_t base = 1; base <= N; base += threads) {
    const int64_t i = base + threadIdx.x;
    const int64_t offset = i <= N ? clamp(load_index(cu_seqlens, i)) : 0;
    const auto [before, bound] =
        block_scan(offset, s_bound, s_scan, [](int64_t a, int64_t b) { return a > b ? a : b; });
    const int64_t chunks = i <= N ? ceil_div(bound - before, kChunkSize) : 0;
    const int64_t sum = block_scan(chunks, s_chunks, s_scan, [](int64_t a, int64_t b) { return a + b; }).through;
    if (i <= N) {
      bounds[i] = bound;
      first_chunk[i] = sum;
    }
    __syncthreads();
    if (threadIdx.x == threads - 1) {
      s_bound = bound;
      s_chunks = sum;
    }
    __syncthreads();
  }
}

}  // namespace

SequenceTable take_sequences(const Problem& p, Workspace* workspace) {
  SequenceTable table{nullptr, nullptr, p.N, p.T};
  if (!p.varlen) return table;
  table.bounds = workspace->take<int64_t>(p.N + 1);
  table.first_chunk = workspace->take<int64_t>(p.N + 1);
  return table;
}

Status plan_sequences(const Tensor& cu_seqlens, const Problem& p, const SequenceTable& table, cudaStream_t stream) {
  if (!p.varlen) return Status();
  const auto threads = static_cast<int>(std::clamp<int64_t>(ceil_div(p.N, kWarp) * kWarp, kWarp, kMostThreads));
  return launch("plan_sequences", plan_sequences_kernel, 1, threads, 0, stream, device_tensor(cu_seqlens), p.N, p.T,
                const_cast<int64_t*>(table.bounds), const_cast<int64_t*>(table.first_chunk));
}

}  // namespace flash_qla::cuda
