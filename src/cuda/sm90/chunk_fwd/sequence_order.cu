#include "cuda/sm90/chunk_fwd/sequence_order.h"

#include <cstdint>

#include "cuda/common/block_scan.cuh"
#include "cuda/common/bulk.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/warp.cuh"
#include "cuda/sm90/chunk_fwd/launch.h"
#include "cuda/sm90/chunk_fwd/sequences.cuh"

namespace flash_qla::cuda::sm90::fwd {
namespace {

constexpr int kPlanThreads = kZeroFillThreads;
constexpr int kPlanBuckets = 256;   // of chunk counts: exact below 8, then eight to each doubling
constexpr size_t kPlanOffset = 16;  // the workspace starts with the ticket

__device__ int chunks_of(const SequenceSpan& s) { return (s.length + kChunk - 1) / kChunk; }

// Bucket 0 holds the longest.
__device__ int bucket_of(int chunks) {
  if (chunks < 8) return kPlanBuckets - 1 - chunks;
  const int magnitude = 31 - __clz(chunks);
  return kPlanBuckets - 1 - (8 * (magnitude - 2) + ((chunks >> (magnitude - 3)) & 7));
}

// The sequences sorted by length, roughly, longest first, by one block.
__device__ void sort_sequences(const Args& args) {
  const int thread = threadIdx.x, n = args.num_sequences;
  __shared__ int next[kPlanBuckets];
  __shared__ int32_t warp_chunks[1][kPlanThreads / 32];
  if (thread < kPlanBuckets) next[thread] = 0;
  if (thread == 0) *static_cast<uint32_t*>(args.workspace) = 0;
  __syncthreads();
  for (int i = thread; i < n; i += kPlanThreads) atomicAdd(&next[bucket_of(chunks_of(sequence_at(args, i)))], 1);
  __syncthreads();
  // Exclusive sums of the buckets, eight to a lane.
  if (thread < 32) {
    int counts[kPlanBuckets / 32], sum = 0;
    for (int i = 0; i < kPlanBuckets / 32; ++i) {
      counts[i] = next[thread * (kPlanBuckets / 32) + i];
      sum += counts[i];
    }
    int before = prefix_sum(sum, thread) - sum;
    for (int i = 0; i < kPlanBuckets / 32; ++i) {
      next[thread * (kPlanBuckets / 32) + i] = before;
      before += counts[i];
    }
  }
  __syncthreads();
  SequenceSpan* plan = reinterpret_cast<SequenceSpan*>(static_cast<char*>(args.workspace) + kPlanOffset);
  for (int first = 0, chunks_before = 0; first < n; first += kPlanThreads) {
    const int i = first + thread;
    SequenceSpan s{0, 0, i, 0};
    if (i < n) s = sequence_at(args, i);
    const int chunks = chunks_of(s);
    int32_t before[1] = {chunks}, all[1];
    sum_before(before, all, warp_chunks);
    s.first_chunk = chunks_before + before[0];
    chunks_before += all[0];
    if (i < n) plan[atomicAdd(&next[bucket_of(chunks)], 1)] = s;
  }
}

// Block 0 sorts the sequences; the others clear what no sequence writes.
__global__ void __launch_bounds__(kPlanThreads) sort_sequences_kernel(const __grid_constant__ Args args) {
  launch_dependents();
  wait_for_predecessors();
  if (blockIdx.x == 0) {
    sort_sequences(args);
  } else {
    zero_outside(args, static_cast<int>(blockIdx.x) - 1, kZeroFillBlocks);
  }
}

// Of a cut call whose lengths are looked at first: the answer, and what the kernels of a cut call find before there is
// a plan, by one warp, and in few instructions, which all come for the first time. The uncut kernel that follows has
// its items if nothing is to be cut, and has none otherwise. If it does not find its sequences and clear by itself, the
// first block sorts them, and others clear, as above.
__global__ void __launch_bounds__(kPlanThreads) read_lengths_kernel(const __grid_constant__ cp::PlanArgs p) {
  launch_dependents();
  wait_for_predecessors();
  if (blockIdx.x > 0) {
    zero_outside(p.args, static_cast<int>(blockIdx.x) - 1, kZeroFillBlocks);
    return;
  }
  if (threadIdx.x < 32) {
    static_assert(cp::kMostByLengths <= 32);
    const int32_t lane = static_cast<int32_t>(threadIdx.x);
    const int32_t chunks = lane < p.args.num_sequences ? cp::chunks_in(sequence_at(p.args, lane).length) : 0;
    const bool cut = __any_sync(0xffffffffu, chunks >= p.least_longest);
    if (lane == 0) {
      *p.workspace.cut = cut;
      cp::reset_plan_start(p.workspace, cut);
    }
  }
  if (gridDim.x > 1) sort_sequences(p.args);
}

__global__ void __launch_bounds__(kZeroFillThreads) zero_fill_kernel(const __grid_constant__ Args args) {
  zero_outside(args, static_cast<int>(blockIdx.x), kZeroFillBlocks);
}

}  // namespace

size_t chunk_forward_workspace_size(int32_t num_sequences) {
  return kPlanOffset + sizeof(SequenceSpan) * static_cast<size_t>(num_sequences > 0 ? num_sequences : 0);
}

void place_sorted_sequences(void* workspace, KernelArgs* params) {
  params->ticket = static_cast<uint32_t*>(workspace);
  params->plan = reinterpret_cast<const SequenceSpan*>(static_cast<const char*>(workspace) + kPlanOffset);
}

cudaError_t launch_sequence_order(const Args& args, cudaStream_t stream) {
  const LaunchConfig shape(1 + kZeroFillBlocks, kPlanThreads, 0, stream, true);
  return cudaLaunchKernelEx(&shape.config, &sort_sequences_kernel, args);
}

cudaError_t launch_read_lengths(const cp::PlanArgs& params, bool sorts, cudaStream_t stream) {
  const LaunchConfig shape(sorts ? 1 + kZeroFillBlocks : 1, sorts ? kPlanThreads : 32, 0, stream, true);
  return cudaLaunchKernelEx(&shape.config, &read_lengths_kernel, params);
}

cudaError_t launch_zero_fill(const Args& args, cudaStream_t stream) {
  zero_fill_kernel<<<kZeroFillBlocks, kZeroFillThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace flash_qla::cuda::sm90::fwd
