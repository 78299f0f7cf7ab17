// What the serial passes and the gradients need of a chunk and does not depend on a state: both triangular inverses,
// the products of queries and keys, and the gates. As prepare.cuh, with one inverse after the other.
#pragma once

#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/prepare.cuh"

namespace flash_qla::cuda::sm80 {

// Gates of a value head as the reverse pass and the gradients take them, a token a thread.
__device__ inline void write_gates(const BackwardPrepareParams& p, const HeadGates& s, int64_t chunk, int head, int t) {
  const int step = t / kStep, at = t % kStep, last = (step + 1) * kStep - 1;
  const float high = s.high[t], low = s.low[t], beta = s.beta[t], gamma = exp2_approx(high);
  ReverseRecord& record = p.reverse_records[(chunk * p.common.Hv + head) * kStepsPerChunk + step];
  record.to_end[at] = exp2_approx((s.high[last] - high) + (s.low[last] - low));
  record.scaled_gamma[at] = p.common.scale * gamma;
  record.minus_gamma[at] = -gamma;
  record.beta[at] = beta;
  if (at < 4) record.decay[at] = exp2_approx(s.high[last]);
  double sum = static_cast<double>(high) + static_cast<double>(low);
  if (step > 0) sum += static_cast<double>(s.high[kStep - 1]) + static_cast<double>(s.low[kStep - 1]);
  ChunkGates& gates = p.gates[chunk * p.common.Hv + head];
  const float rounded = static_cast<float>(sum);
  gates.high[t] = rounded;
  gates.low[t] = static_cast<float>(sum - static_cast<double>(rounded));
  gates.beta[t] = beta;
}

// strict(G o A) and P, transposed, for the reverse pass. s.inverse: A.
template <class T>
__device__ void write_transposed(const BackwardPrepareParams& p, const PrepareMemory& s, int64_t chunk, int first,
                                 int heads) {
  visit_blocks<true>([&](int step, int row, int column, int i, int j, int at) {
    at += transposed_block(row, column) * kBlockBytes;
    for (int h = 0; h < heads; ++h) {
      const HeadGates& gates = s.gates[h];
      float inverse[2], score[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float G = decay_between(j > i + e, gates.high[i + e], gates.high[j], gates.low[i + e], gates.low[j]);
        const int element = lower_index(i + e, j);
        inverse[e] = j < i + e ? G * s.inverse(h)[element] : 0.f;
        score[e] = j <= i + e ? p.common.scale * G * s.qk()[element] : 0.f;
      }
      ReverseRecord& record = p.reverse_records[(chunk * p.common.Hv + first + h) * kStepsPerChunk + step];
      *reinterpret_cast<uint32_t*>(record.inverse + at) = pack2<T>(inverse[0], inverse[1]);
      *reinterpret_cast<uint32_t*>(record.scores + at) = pack2<T>(score[0], score[1]);
    }
  });
}

template <class T, int kKeys>
__global__ void __launch_bounds__(kPrepareThreads, 4)
    sm80_backward_prepare_kernel(const __grid_constant__ BackwardPrepareParams p) {
  const PrepareMemory s(dynamic_shared<char>(), false);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0 && !find_place(p.common, s.place)) s.place->count = 0;
  __syncthreads();
  const PreparePlace& place = *s.place;
  if (place.count == 0) return;
  copy_tiles<kKeys>(p.common, place, smem_address(s.tiles));
#pragma unroll 1
  for (int first = place.first_head; first < place.last_head; first += kHeadsAtOnce) {
    const int heads = min(kHeadsAtOnce, place.last_head - first);
    load_gates(p.common, place, first, heads, s.gates);
    if (first == place.first_head) {
      cp_async_wait<0>();
      __syncthreads();
      multiply_rows<T, kKeys>(s, false);
    }
    __syncthreads();
    const int sums_of = short_columns_head(warp);
    if (sums_of < heads) sum_gates(p.common, place, first + sums_of, s.gates[sums_of]);
    const int slot = min(lane / kSide, heads - 1), last = (warp / 2 + 1) * 2;
    substitute<false>(s.kk(), s.gates[slot].beta, s.inverse(slot), warp, last, lane % kSide);
    __syncthreads();
    const int of = threadIdx.x / kChunk;
    if (of < heads) write_gates(p, s.gates[of], place.chunk, first + of, threadIdx.x % kChunk);
    write_triangles<T, false>(p.common, s, place.chunk, first, heads);
    __syncthreads();
    substitute<true>(s.kk(), s.gates[slot].beta, s.inverse(slot), warp, last, lane % kSide);
    __syncthreads();
    write_transposed<T>(p, s, place.chunk, first, heads);
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm80
