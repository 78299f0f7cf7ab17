#include "cuda/sm80/scan.h"

#include "cuda/sm80/block.cuh"

namespace flash_qla::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

// A block takes 16 value columns of a sequence and head: a thread a key and kColumns of them.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) sm80_scan_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kKeyThreads = kThreads * kColumns / kStrip;
  __shared__ float4 s_state[kKeyThreads][kStrip / 4];  // S(j), a row a key
  const int strips = (p.V + kStrip - 1) / kStrip;
  const unsigned rest = blockIdx.x / strips;
  const int64_t n = rest / p.Hv;
  const int head = static_cast<int>(rest % p.Hv);
  const int key = threadIdx.x % kKeyThreads, own = threadIdx.x / kKeyThreads * kColumns;  // among the 16 columns
  const int column = static_cast<int>(blockIdx.x % strips) * kStrip + own;
  const DeviceSequence sequence = sequence_at(p.sequences, n);
  const int64_t at_least = segment_chunks(p.rule, total_chunks(p.sequences));
  const int64_t chunks = ceil_div(sequence.length, kChunkSize), segments = segments_of(p.rule, chunks, at_least);
  if (segments == 1) return;
  const int64_t first_row = sequence.first_chunk / at_least;
  const bool valid = key < p.K;
  const auto start = [&](int64_t segment, int i) {
    return static_cast<float*>(p.starts.data) + (first_row + segment) * p.starts.row + head * p.starts.head +
           key * p.starts.key + (column + i) * p.starts.value;
  };
  float x[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) x[i] = valid && column + i < p.V ? *start(1, i) : 0.f;
  for (int64_t j = 1; j < segments - 1; ++j) {
    const int64_t begin = j * chunks / segments, end = (j + 1) * chunks / segments;
    const bool whole =
        !forgets(p, static_cast<int>(sequence.first_chunk + begin), static_cast<int>((end - begin) * kChunkSize), head);
    if (whole) {
      __syncthreads();  // the state before has been read
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        s_state[key][(own + i) / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = valid && column + i < p.V ? *start(j + 1, i) : 0.f;
    if (!whole) continue;
    const float* transition =
        static_cast<const float*>(p.transitions.data) + (first_row + j) * p.transitions.row + head * p.transitions.head;
#pragma unroll 4
    for (int c = 0; c < p.K; ++c) {
      const float m = valid ? transition[key * p.transitions.key + c * p.transitions.value] : 0.f;
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        const float4 s = s_state[c][(own + i) / 4];
        x[i] = fmaf(m, s.x, x[i]);
        x[i + 1] = fmaf(m, s.y, x[i + 1]);
        x[i + 2] = fmaf(m, s.z, x[i + 2]);
        x[i + 3] = fmaf(m, s.w, x[i + 3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      if (valid && column + i < p.V) *start(j + 1, i) = x[i];
    }
  }
}

}  // namespace

Status launch_scan(const Problem& p, const ForwardParams& params, cudaStream_t stream) {
  const int64_t blocks = p.N * p.Hv * ceil_div(p.V, kStrip);
  const auto kernel = p.K <= 64 ? sm80_scan_kernel<4> : p.K <= 128 ? sm80_scan_kernel<8> : sm80_scan_kernel<16>;
  return launch("sm80_scan", kernel, blocks, kThreads, 0, stream, params);
}

}  // namespace flash_qla::cuda::sm80
