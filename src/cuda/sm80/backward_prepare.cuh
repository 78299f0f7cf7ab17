// What the serial passes and the gradients need of a chunk and does not depend on a state: both triangular inverses,
// the products of queries and keys, and the gates. As prepare.cuh, one value head of the group after another: two
// inverses are four substitutions of 32 columns, one a warp.
#pragma once

#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/prepare.cuh"

namespace flash_qla::cuda::sm80 {

template <int kStep>
__device__ __forceinline__ ReverseRecord<kStep>* reverse_record_at(const BackwardPrepareParams& p, int64_t chunk,
                                                                   int head, int step) {
  constexpr int kSteps = kChunk / kStep;
  return reinterpret_cast<ReverseRecord<kStep>*>(p.reverse_records) + (chunk * p.common.Hv + head) * kSteps + step;
}

// Gates as the reverse pass and the gradients take them, a token a thread.
template <int kStep>
__device__ void write_gates(const BackwardPrepareParams& p, const HeadGates& s, int64_t chunk, int head) {
  const int t = threadIdx.x, step = t / kStep, at = t % kStep, last = (step + 1) * kStep - 1;
  if (t >= kChunk) return;
  const float high = s.sum_high[t], low = s.sum_low[t], beta = s.beta[t], gamma = __expf(high);
  ReverseRecord<kStep>& record = *reverse_record_at<kStep>(p, chunk, head, step);
  record.to_end[at] = __expf((s.sum_high[last] - high) + (s.sum_low[last] - low));
  record.scaled_gamma[at] = p.common.scale * gamma;
  record.minus_gamma[at] = -gamma;
  record.beta[at] = beta;
  if (at < 4) record.decay[at] = __expf(s.sum_high[last]);
  double sum = static_cast<double>(high) + static_cast<double>(low);
  if (step > 0) sum += static_cast<double>(s.sum_high[kStep - 1]) + static_cast<double>(s.sum_low[kStep - 1]);
  ChunkGates& gates = p.gates[chunk * p.common.Hv + head];
  gates.sum_high[t] = static_cast<float>(sum);
  gates.sum_low[t] = static_cast<float>(sum - static_cast<double>(gates.sum_high[t]));
  gates.beta[t] = beta;
}

// strict(G o T) for the forward pass, strict(G o A) and P, transposed, for the reverse one. s.inverse: T and A.
template <class T, int kStep>
__device__ void write_both_triangles(const BackwardPrepareParams& p, const PrepareMemory& s, int64_t chunk, int head) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const HeadGates& gates = s.gates[0];
  const auto decay = [&](int i, int j) {  // above the diagonal the exponent may be large
    return i < j ? 0.f : __expf((gates.sum_high[i] - gates.sum_high[j]) + (gates.sum_low[i] - gates.sum_low[j]));
  };
  for (int step = 0; step < kChunk / kStep; ++step) {
    StepRecord<kStep>& record = *record_at<kStep>(p.common, chunk, head, step);
    ReverseRecord<kStep>& reverse = *reverse_record_at<kStep>(p, chunk, head, step);
    int row = 0, before = 0;  // blocks of the rows before
    for (int block = warp; block < triangle_blocks(kStep); block += kPrepareWarps) {
      while (before + row + 1 <= block) before += ++row;
      const int column = block - before, first = step * kStep;
      const int down = lane / 4, right = lane % 4 * 2;  // the lane's place in a block
      float transform[2], inverse[2], score[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = first + 8 * row + down, j = first + 8 * column + right + e;
        transform[e] = j < i ? decay(i, j) * s.inverse[0][lower_index(i, j)] : 0.f;
        const int i_t = first + 8 * row + right + e, j_t = first + 8 * column + down;
        const float G = decay(i_t, j_t);
        inverse[e] = j_t < i_t ? G * s.inverse[1][lower_index(i_t, j_t)] : 0.f;
        score[e] = j_t <= i_t ? p.common.scale * G * s.qk[lower_index(i_t, j_t)] : 0.f;
      }
      const int at = triangle_block(kStep, row, column) * kBlockBytes + lane * 4;
      *reinterpret_cast<uint32_t*>(record.transform + at) = pack2<T>(transform[0], transform[1]);
      const int at_t = transposed_block(kStep, row, column) * kBlockBytes + lane * 4;
      *reinterpret_cast<uint32_t*>(reverse.inverse + at_t) = pack2<T>(inverse[0], inverse[1]);
      *reinterpret_cast<uint32_t*>(reverse.scores + at_t) = pack2<T>(score[0], score[1]);
    }
  }
}

template <class T, int kKeys>
__global__ void __launch_bounds__(kPrepareThreads, 4)
    sm80_backward_prepare_kernel(const __grid_constant__ BackwardPrepareParams p) {
  constexpr int kStep = step_tokens(kKeys);
  char* memory = dynamic_shared<char>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PreparePlace place;
  if (!find_place(p.common, &place)) return;
  load_rows<kKeys>(p.common, place, smem_address(memory));
  multiply_rows<T, kKeys>(memory, false);
  PrepareMemory& s = *reinterpret_cast<PrepareMemory*>(memory);
  if (threadIdx.x < kChunk) s.ones[threadIdx.x] = 1.f;
  for (int head = place.first_head; head < place.last_head; ++head) {
    if (warp == 0) sum_gates<kStep>(p.common, place, head, s.gates[0]);
    __syncthreads();
    write_gates<kStep>(p, s.gates[0], place.chunk, head);
    const int which = warp / 2, part = warp % 2 * 2;  // T or A, and the first of the warp's blocks of columns
    const float* beta = s.gates[0].beta;
    substitute(s.kk, which == 0 ? s.ones : beta, which == 0 ? beta : s.ones, s.inverse[which], part,
               kStep == kChunk ? kSides : part + kSides / 2, lane);
    __syncthreads();
    write_both_triangles<T, kStep>(p, s, place.chunk, head);
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm80
