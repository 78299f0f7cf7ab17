// Within how many chunks from either end of its row each head of a part forgets what has entered.
//
// A chunk's norm is sum g + sum log max(1, |1 - beta |k|^2|), whose second sum is never negative. So gates come first:
// of a head whose gates alone do not get there no key is read, and of the others a few chunks' keys at a time, until
// they have.
#include "cuda/common/overlap.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/generic/link_pass.cuh"
#include "cuda/sm90/common/key_squares.cuh"
#include "cuda/sm90/links/links.h"

namespace flash_qla::cuda::sm90::links {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 512, kWarps = kThreads / kWarp;
// Value heads of a key head that a block looks at, and chunks whose keys it reads at a time: a usual decay of 3 a chunk
// forgets in six.
constexpr int kHeads = 4, kRound = 8;
constexpr int kKeysAtOnce = kThreads / kThreadsPerKey;
static_assert(kRound * kChunk % kKeysAtOnce == 0 && kRound * kHeads % kWarps == 0 && kMostLinkWindow % kWarps == 0);
constexpr int kTokensPerLane = kChunk / kWarp;

// The first chunks, of `seen`, whose norms' sum is at most the threshold; 0: there are none. A warp.
__device__ int window_of(const float (*norms)[kHeads], int head, int seen, float threshold) {
  return first_below(seen, threshold, [&](int i) { return norms[i][head]; });
}

// One block an (end, part, key head, up to four of its value heads).
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    link_windows_kernel(const __grid_constant__ LinkParams p, bool backward, int32_t* windows) {
  __shared__ float s_norms[kMostLinkWindow][kHeads];  // of gates, and of keys too where these have been read
  __shared__ float s_squares[kRound * kChunk];
  __shared__ int s_windows[kHeads];
  __shared__ bool s_open[kHeads];  // keys decide
  launch_dependents();
  wait_for_predecessors();
  const int group = p.in.group, key_heads = p.in.Hv / group, pieces = (group + kHeads - 1) / kHeads;
  const int block = static_cast<int>(blockIdx.x);
  const int piece = block % pieces, key_head = block / pieces % key_heads, place = block / pieces / key_heads;
  const int parts = static_cast<int>(p.P), part = place % parts, end = place / parts;
  const int first_head = key_head * group + piece * kHeads, heads = min(kHeads, group - piece * kHeads);
  const int64_t row = row_of_part(p, part, backward ? 0 : 1);
  if (row < 0 || !flag_of_part(p.crosses, part)) return;  // nobody asks
  const DeviceSequence sequence = sequence_at(p.sequences, row);
  const bool from_end = end == 0 && !backward;
  const int chunks = static_cast<int>(ceil_div(sequence.length, kChunkSize)), most = min(kMostLinkWindow, chunks);
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  // A token of the i-th chunk from that end, -1: there is none.
  const auto token_of = [&](int i, int in_chunk) -> int64_t {
    if (i >= most) return -1;
    const int64_t token = static_cast<int64_t>(from_end ? chunks - 1 - i : i) * kChunk + in_chunk;
    return token < sequence.length ? sequence.begin + token : -1;
  };
  const auto number_at = [&](const DeviceTensor& t, int64_t token, int head) {
    return static_cast<const float*>(t.data)[offset_of(t, sequence.b, token, first_head + head)];
  };

  constexpr int kChunks = kMostLinkWindow / kWarps;  // of a warp
  float gates[kChunks][kTokensPerLane][kHeads];
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int n = 0; n < kTokensPerLane; ++n) {
      const int64_t token = token_of(warp + j * kWarps, lane + n * kWarp);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        gates[j][n][h] = 0.f;
        if (token >= 0 && h < heads && p.in.g.data != nullptr) gates[j][n][h] = number_at(p.in.g, token, h);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kChunks; ++j) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kTokensPerLane; ++n) sum += clamp_log_decay(gates[j][n][h]);
      sum = warp_sum(sum);
      if (lane == 0) s_norms[warp + j * kWarps][h] = sum;
    }
  }
  __syncthreads();
  if (warp < kHeads) {
    const bool may = warp < heads && window_of(s_norms, warp, most, p.threshold) > 0;
    if (lane == 0) {
      s_windows[warp] = 0;
      s_open[warp] = may;
    }
  }
  __syncthreads();
  const auto open = [&] {
    bool any = false;
    for (int h = 0; h < kHeads; ++h) any |= s_open[h];
    return any;
  };
#pragma unroll 1
  for (int seen = 0; seen < most && open();) {
    constexpr int kPairs = kRound * kHeads / kWarps;  // of a chunk and a head, a warp's
    const auto pair_of = [&](int j) { return warp + j * kWarps; };
    float beta[kPairs][kTokensPerLane];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int chunk = pair_of(j) / kHeads, h = pair_of(j) % kHeads;
#pragma unroll
      for (int n = 0; n < kTokensPerLane; ++n) {
        const int64_t token = token_of(seen + chunk, lane + n * kWarp);
        beta[j][n] = 1.f;
        if (token >= 0 && h < heads && p.in.beta.data != nullptr) beta[j][n] = number_at(p.in.beta, token, h);
      }
    }
    float parts_of_squares[kRound * kChunk / kKeysAtOnce];
#pragma unroll
    for (int i = 0; i < kRound * kChunk / kKeysAtOnce; ++i) {
      const int t = thread / kThreadsPerKey + i * kKeysAtOnce;
      const int64_t token = token_of(seen + t / kChunk, t % kChunk);
      parts_of_squares[i] = 0.f;
      if (token >= 0) {
        parts_of_squares[i] = own_part_of_square(static_cast<const Element*>(p.in.k.data) +
                                                 offset_of(p.in.k, sequence.b, token, key_head));
      }
    }
#pragma unroll
    for (int i = 0; i < kRound * kChunk / kKeysAtOnce; ++i) {
      const float square = quad_sum(parts_of_squares[i]);
      if (thread % kThreadsPerKey == 0) s_squares[thread / kThreadsPerKey + i * kKeysAtOnce] = square;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int chunk = pair_of(j) / kHeads, h = pair_of(j) % kHeads;
      float growth = 0.f;
#pragma unroll
      for (int n = 0; n < kTokensPerLane; ++n) {
        // Without a token the key is zero.
        const float factor = fabsf(1.f - beta[j][n] * s_squares[chunk * kChunk + lane + n * kWarp]);
        if (!(factor <= 1.f)) growth += logf(factor);  // a NaN stays one, and forgets nothing
      }
      growth = warp_sum(growth);
      if (lane == 0 && seen + chunk < most) s_norms[seen + chunk][h] += growth;
    }
    __syncthreads();
    seen = min(seen + kRound, most);
    if (warp < kHeads && s_open[warp]) {
      const int found = window_of(s_norms, warp, seen, p.threshold);
      if (lane == 0 && found > 0) {
        s_windows[warp] = found;
        s_open[warp] = false;
      }
    }
    __syncthreads();
  }
  if (thread < heads) {
    windows[(static_cast<int64_t>(end) * parts + part) * p.in.Hv + first_head + thread] = s_windows[thread];
  }
}

}  // namespace

Status launch_link_windows(const LinkParams& params, bool backward, int32_t* windows, cudaStream_t stream) {
  const int64_t key_heads = params.in.Hv / params.in.group;
  const int64_t blocks = (backward ? 1 : kLinkEnds) * params.P * key_heads * ceil_div(params.in.group, kHeads);
  const bool half = params.in.k.dtype == static_cast<int32_t>(DType::kFloat16);
  return launch_kernel("link_windows", half ? link_windows_kernel<__half> : link_windows_kernel<__nv_bfloat16>, blocks,
                       kThreads, 0, stream, true, params, backward, windows);
}

}  // namespace flash_qla::cuda::sm90::links
