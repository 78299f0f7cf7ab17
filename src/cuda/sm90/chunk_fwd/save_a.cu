// A of every chunk, and the sums of its gates, for the backward: by a kernel of their own, so that the forward of a
// training step is that of any other call.
//
// A = (I + lower(diag(beta) K K^T))^-1 depends on nothing but a chunk's keys and betas, so no chunk waits for another:
// what the forward's kernels hide beside the chain of states in two warps of each SM, all warps of the card do here in
// some microseconds. It is launched after the forward, whose blocks let it start when they have started themselves: it
// takes the SMs that the forward leaves idle, and those that become free.
#include "cuda/sm90/chunk_fwd/save_a.h"

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/common/chunk_inverse.cuh"
#include "cuda/sm90/common/device.cuh"

namespace flash_qla::cuda::sm90::fwd {
namespace {

// Rows of a chunk; valid 0: none.
struct ChunkRows {
  int32_t row, valid;
};

// The chunks that start in a window of 64 tokens, one after another; by a whole warp.
struct ChunksOfWindow {
  const Args& args;
  int32_t begin;         // of the window
  int32_t sequence;      // to look at next
  ChunkRows rest{0, 0};  // of the sequence looked at: its next chunk, and all of its tokens from there on

  __device__ ChunksOfWindow(const Args& arguments, int32_t window, int lane)
      : args(arguments), begin(window), sequence(sequence_before(arguments, window, lane)) {}

  __device__ ChunkRows take() {
    while (rest.valid <= 0 && sequence < args.num_sequences) {
      const SequenceSpan s = sequence_at(args, sequence);
      if (s.start - begin >= kChunk) return {0, 0};
      // Of the sequence's tokens, where the first chunk starts that is within the window.
      const int32_t first = s.start >= begin ? 0 : (begin - s.start + kChunk - 1) / kChunk * kChunk;
      if (first < s.length && initial_slot(args, sequence) != kSkipSequence) rest = {s.start + first, s.length - first};
      ++sequence;
    }
    if (rest.valid <= 0 || rest.row - begin >= kChunk) return {0, 0};
    const ChunkRows chunk{rest.row, min(rest.valid, kChunk)};
    rest.row += chunk.valid;
    rest.valid -= chunk.valid;
    return chunk;
  }
};

// The gates' sums of a chunk, a head a thread: so that a row of heads is whole sectors.
__device__ void sum_gates(const Args& args, int32_t row, int valid, int head) {
  if (head >= args.num_value_heads) return;
  const float* g = args.g + row * args.g_token_stride + head * args.g_head_stride;
  float* out = args.g_cumsum + int64_t{row} * args.num_value_heads + head;
  float sum = 0.0f;
  constexpr int kAtOnce = 16;  // loads under way
#pragma unroll 1
  for (int t = 0; t < valid; t += kAtOnce) {
    float x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      x[i] = args.g != nullptr && t + i < valid ? __ldg(g + (t + i) * args.g_token_stride) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum += x[i] < kGateFloor ? kGateFloor : x[i];  // keeps NaN
      if (t + i < valid) out[int64_t{t + i} * args.num_value_heads] = sum;
    }
  }
}

// What a launch has to do: for each window of 64 tokens a block for each key head makes A, and so many the gates' sums,
// a head a thread. So nobody needs to know before how many chunks there are: a block takes those that start in its
// window.
struct WindowBlocks {
  uint32_t inverses, sums;
  __host__ __device__ explicit WindowBlocks(const Args& args)
      : inverses(args.a != nullptr ? args.num_key_heads : 0),
        sums(args.g_cumsum != nullptr ? (args.num_value_heads + kInverseThreads - 1) / kInverseThreads : 0) {}
};

template <typename Element>
__global__ void __launch_bounds__(kInverseThreads) sm90_chunk_inverse_kernel(const __grid_constant__ SaveAArgs p) {
  const Args& args = p.args;
  const int lane = threadIdx.x % 32;
  const WindowBlocks blocks(args);
  const uint32_t window = blockIdx.x / (blocks.inverses + blocks.sums);
  const int part = static_cast<int>(blockIdx.x - window * (blocks.inverses + blocks.sums));
  ChunksOfWindow chunks(args, static_cast<int32_t>(window) * kChunk, lane);
  if (part < static_cast<int>(blocks.inverses)) {
    const ChunkInverse<Element> inverse(shared_memory());
    inverse.start();
    const int group = args.num_value_heads / args.num_key_heads;
    uint32_t phase = 0;
#pragma unroll 1
    for (ChunkRows chunk = chunks.take(); chunk.valid > 0; chunk = chunks.take(), phase ^= 1) {
      if (threadIdx.x == 0) {
        mbarrier_arrive_expect(inverse.keys_there(), kChunk * kHeadDim * 2);
        tma_load_4d(inverse.keys(), &p.k, inverse.keys_there(), 0, chunk.row, 0, part);
      }
      const auto beta = [&](int token, int head) {
        return args.beta == nullptr ? 1.0f
                                    : __ldg(args.beta + int64_t{chunk.row + token} * args.beta_token_stride +
                                            head * args.beta_head_stride);
      };
      const auto row = [&](int token, int head) {
        return static_cast<uint16_t*>(args.a) +
               (int64_t{chunk.row + token} * args.num_value_heads + head) * int64_t{kChunk};
      };
      inverse.make(phase, chunk.valid, part * group, group, beta, row);
    }
  } else {
    const int head = (part - static_cast<int>(blocks.inverses)) * kInverseThreads + static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (ChunkRows chunk = chunks.take(); chunk.valid > 0; chunk = chunks.take()) {
      sum_gates(args, chunk.row, chunk.valid, head);
    }
  }
  // It must not end before the forward that it was started beside: who comes next waits for this kernel alone. The last
  // block, so that none is held up by a waiting one's place.
  if (blockIdx.x == gridDim.x - 1) wait_for_predecessors();
}

template <typename Element>
cudaError_t launch(const SaveAArgs& params, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<Element>);
  constexpr int kBytes = ChunkInverse<Element>::kBytes;
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
      error != cudaSuccess) {
    return error;
  }
  const WindowBlocks blocks(params.args);
  const int64_t windows = (params.args.num_tokens + kChunk - 1) / kChunk;
  const LaunchConfig shape(windows * (blocks.inverses + blocks.sums), kInverseThreads, kBytes, stream, true);
  return launch_function(kernel, shape, params);
}

}  // namespace

cudaError_t launch_save_a(const SaveAArgs& params, cudaStream_t stream) {
  return params.args.type == DType::kFloat16 ? launch<__half>(params, stream) : launch<__nv_bfloat16>(params, stream);
}

}  // namespace flash_qla::cuda::sm90::fwd
