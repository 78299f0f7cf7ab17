#include "cuda/sm80/scan.h"

#include "cuda/sm80/block.cuh"

namespace flash_qla::cuda::sm80 {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// Value columns of a block: few, so that many multiprocessors take part.
constexpr int kColumns = 8;
// Elements of a transition that a thread loads at once, so that it waits for memory once a segment up to 128 keys.
constexpr int kBatch = 32;

// A block takes kColumns value columns of a sequence and head: S(j + 1) = M(j) S(j) + what is already in its place.
// A thread sums over a part of the columns of M for one key.
template <int kKeyThreads>
__global__ void __launch_bounds__(kThreads) sm80_scan_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kParts = kThreads / kKeyThreads, kOwn = kKeyThreads / kParts;  // of the sum
  constexpr int kLoads = kOwn < kBatch ? kOwn : kBatch, kElements = kKeyThreads * kColumns / kThreads;
  __shared__ float4 s_state[kKeyThreads][kColumns / 4];  // S(j), a row a key
  __shared__ float s_sums[kParts][kColumns][kKeyThreads];
  __shared__ bool s_forgets[kWarps];
  const int column_blocks = (p.V + kColumns - 1) / kColumns;
  const unsigned rest = blockIdx.x / column_blocks;
  const int64_t n = rest / p.Hv;
  const int head = static_cast<int>(rest % p.Hv), column = static_cast<int>(blockIdx.x % column_blocks) * kColumns;
  const int thread = threadIdx.x, warp = thread / 32;
  const int key = thread % kKeyThreads, part = thread / kKeyThreads;
  const DeviceSequence sequence = sequence_at(p.sequences, n);
  const int64_t at_least = segment_chunks(p.rule, total_chunks(p.sequences));
  const int64_t chunks = ceil_div(sequence.length, kChunkSize), segments = segments_of(p.rule, chunks, at_least);
  if (segments == 1) return;
  const int64_t first_row = sequence.first_chunk / at_least;
  // Elements of S that a thread stores; null: past K or V.
  const auto start = [&](int64_t segment, int i) -> float* {
    const int column_of = column + (thread + i * kThreads) / kKeyThreads;  // the key is `key`
    if (key >= p.K || column_of >= p.V) return nullptr;
    return static_cast<float*>(p.starts.data) + (first_row + segment) * p.starts.row + head * p.starts.head +
           key * p.starts.key + column_of * p.starts.value;
  };
  const auto load_start = [&](int64_t segment, int i) {
    const float* at = start(segment, i);
    return at != nullptr ? *at : 0.f;
  };
  const auto keep = [&](int i, float x) {
    reinterpret_cast<float*>(s_state[key])[(thread + i * kThreads) / kKeyThreads] = key < p.K ? x : 0.f;
  };
#pragma unroll
  for (int i = 0; i < kElements; ++i) keep(i, load_start(1, i));
  for (int64_t j = 1; j < segments - 1; ++j) {
    if ((j - 1) % kWarps == 0) {  // a warp a segment
      __syncthreads();
      const int64_t other = j + warp;
      if (other < segments - 1) {
        const int64_t begin = other * chunks / segments, end = (other + 1) * chunks / segments;
        const bool nothing = forgets(p, static_cast<int>(sequence.first_chunk + begin),
                                     static_cast<int>((end - begin) * kChunkSize), head);
        if (thread % 32 == 0) s_forgets[warp] = nothing;
      }
      __syncthreads();
    }
    float own[kElements];  // of the state at the end, what the segment itself leaves
#pragma unroll
    for (int i = 0; i < kElements; ++i) own[i] = load_start(j + 1, i);
    const bool nothing = s_forgets[(j - 1) % kWarps];  // then the end is right as it is
    if (!nothing) {
      const float* transition = static_cast<const float*>(p.transitions.data) + (first_row + j) * p.transitions.row +
                                head * p.transitions.head + min(key, p.K - 1) * p.transitions.key;
      float x[kColumns] = {};
#pragma unroll 1
      for (int first = part * kOwn; first < (part + 1) * kOwn; first += kLoads) {
        float m[kLoads];
#pragma unroll
        for (int c = 0; c < kLoads; ++c) {
          m[c] = transition[min(first + c, p.K - 1) * p.transitions.value];  // past the last: times zero
        }
        if (first == part * kOwn) __syncthreads();  // the state is there: what is loaded does not wait for it
#pragma unroll
        for (int c = 0; c < kLoads; ++c) {
#pragma unroll
          for (int i = 0; i < kColumns; i += 4) {
            const float4 s = s_state[first + c][i / 4];
            x[i] = fmaf(m[c], s.x, x[i]);
            x[i + 1] = fmaf(m[c], s.y, x[i + 1]);
            x[i + 2] = fmaf(m[c], s.z, x[i + 2]);
            x[i + 3] = fmaf(m[c], s.w, x[i + 3]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kColumns; ++i) s_sums[part][i][key] = x[i];
    }
    __syncthreads();  // sums are there, and the state before has been read
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (!nothing) {
#pragma unroll
        for (int other = 0; other < kParts; ++other) {
          own[i] += s_sums[other][(thread + i * kThreads) / kKeyThreads][key];
        }
        float* at = start(j + 1, i);
        if (at != nullptr) *at = own[i];
      }
      keep(i, own[i]);
    }
  }
}

}  // namespace

Status launch_scan(const Problem& p, const ForwardParams& params, cudaStream_t stream) {
  const int64_t blocks = p.N * p.Hv * ceil_div(p.V, kColumns);
  const auto kernel = p.K <= 64 ? sm80_scan_kernel<64> : p.K <= 128 ? sm80_scan_kernel<128> : sm80_scan_kernel<256>;
  return launch("sm80_scan", kernel, blocks, kThreads, 0, stream, params);
}

}  // namespace flash_qla::cuda::sm80
