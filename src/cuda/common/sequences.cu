#include "cuda/common/sequences.cuh"

#include <algorithm>

#include "cuda/common/overlap.cuh"

namespace flash_qla::cuda {
namespace {

// One block walks the offsets in steps of its width, no wider than they need; a step is two scans (running maximum,
// running sum).
constexpr int kMostThreads = 1024, kWarp = 32;

// Inclusive scan over the block of x by `combine`. `shared` has one element a warp.
template <class Combine>
__device__ int64_t block_scan(int64_t x, int64_t* shared, Combine combine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, x, distance);
    if (lane >= distance) x = combine(x, other);
  }
  __syncthreads();  // the previous scan's sums have been read
  if (lane == 31) shared[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x = combine(x, shared[w]);
  return x;
}

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
    const int64_t before = s_bound, chunks_before = s_chunks;
    int64_t bound = block_scan(offset, s_scan, [](int64_t a, int64_t b) { return a > b ? a : b; });
    bound = bound > before ? bound : before;
    if (i <= N) bounds[i] = bound;
    __syncthreads();  // bounds[i - 1] of the neighbour is read next
    const int64_t previous = threadIdx.x == 0 ? before : (i <= N ? bounds[i - 1] : bound);
    const int64_t chunks = i <= N ? ceil_div(bound - previous, kChunkSize) : 0;
    const int64_t sum = chunks_before + block_scan(chunks, s_scan, [](int64_t a, int64_t b) { return a + b; });
    if (i <= N) first_chunk[i] = sum;
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
