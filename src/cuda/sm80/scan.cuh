// States at the starts of segments, from one to the next: the serial part of a sequence that is cut. Row j + 1 of
// `starts` holds what segment j has made from a start of zero (the first one, of the state that it really started
// from), and becomes the state at the start of segment j + 1: S(j + 1) += M(j) S(j).
#pragma once

#include "cuda/sm80/block.cuh"
#include "cuda/sm80/forward_step.cuh"

namespace flash_qla::cuda::sm80 {

// A number as a sum of two of 16 bits: 2^-17 of it is left, and no range is lost. Of a product of two such sums three
// of four terms are made, so that 2^-16 of it is lost; operands of the pass itself lose 2^-9 (bf16) or 2^-12 (fp16).
using Piece = __nv_bfloat16;

__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack2<Piece>(x, y);
  const float2 kept = unpack2<Piece>(high);
  low = pack2<Piece>(x - kept.x, y - kept.y);
}

// A block has a strip of a sequence and head, and a warp for every 16 keys, which makes these keys of all S(j + 1): so
// that a block reads M(j) once. What a warp needs of the next transitions is on its way meanwhile.
//
// A lane's four keys of a tile lie beside each other in memory. Of an instruction's 16 left columns, 2 q, 2 q + 1 of
// the left eight are keys 4 q, 4 q + 1, and those of the right eight 4 q + 2, 4 q + 3, q = lane % 4; of results, column
// i of product t is key 2 i + t.
template <int kKeys>
__global__ void __launch_bounds__(2 * kKeys) sm80_scan_kernel(const __grid_constant__ PassParams p) {
  constexpr int kTiles = kKeys / 16;
  // Tiles [16 columns x 16 keys] of transitions on their way: those of a segment, or as many as registers allow.
  constexpr int kAhead = kTiles <= 8 ? kTiles : kTiles / 2 > 6 ? 4 : 6;
  static_assert(kTiles % kAhead == 0);
  __shared__ uint4 s_left[kTiles][2][32];  // S(j) as left operands: high and low pieces, a lane's numbers of a tile
  const int strips = (p.V + kStrip - 1) / kStrip, strip = static_cast<int>(blockIdx.x % strips);
  const unsigned rest = blockIdx.x / strips;
  const int64_t n = rest / p.Hv;
  const int head = static_cast<int>(rest % p.Hv), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const DeviceSequence sequence = sequence_at(p.sequences, n);
  const int64_t at_least = segment_chunks(p.rule, total_chunks(p.sequences));
  const int64_t segments = segments_of(p.rule, ceil_div(sequence.length, kChunkSize), at_least);
  if (segments <= 2) return;
  const int64_t row = sequence.first_chunk / at_least + 1;

  // The lane's two keys of columns 4 q to 4 q + 3 of a tile: of this transition, or behind its tiles of the next one.
  const float* from = static_cast<const float*>(p.transitions.data) + row * p.transitions.row +
                      head * p.transitions.head + lane % 4 * 4 * kKeys + 16 * warp + lane / 4 * 2;
  const auto load_tile = [&](float2(&m)[4], int tile) {
    const float* at = from + tile / kTiles * p.transitions.row + tile % kTiles * 16 * kKeys;
#pragma unroll
    for (int r = 0; r < 4; ++r) m[r] = *reinterpret_cast<const float2*>(at + r * kKeys);
  };
  float2 ahead[kAhead][4];
#pragma unroll
  for (int tile = 0; tile < kAhead; ++tile) load_tile(ahead[tile], tile);

  float* start = static_cast<float*>(p.starts.data) + row * p.starts.row + head * p.starts.head +
                 (strip * kStrip + lane / 4) * kKeys + 16 * warp + lane % 4 * 4;
  Sums<2> own, sums;  // the lane's four keys of both columns, as two products have them
  const auto load_own = [&](const float* at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = *reinterpret_cast<const float4*>(at + 8 * half * kKeys);
      const int e = 2 * half;
      own.x[0][e] = four.x;
      own.x[1][e] = four.y;
      own.x[0][e + 1] = four.z;
      own.x[1][e + 1] = four.w;
    }
  };
  load_own(start);
  sums = own;
  load_own(start + p.starts.row);
  for (int64_t j = segments - 2; j > 0; --j) {
    uint4 high, low;
    split_pair(sums.x[0][0], sums.x[1][0], high.x, low.x);
    split_pair(sums.x[0][2], sums.x[1][2], high.y, low.y);
    split_pair(sums.x[0][1], sums.x[1][1], high.z, low.z);
    split_pair(sums.x[0][3], sums.x[1][3], high.w, low.w);
    s_left[warp][0][lane] = high;
    s_left[warp][1][lane] = low;
    sums = own;
    start += p.starts.row;
    if (j > 1) load_own(start + p.starts.row);
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float2(&m)[4] = ahead[tile % kAhead];
      uint32_t right[2][2], right_low[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split_pair(m[2 * i].x, m[2 * i + 1].x, right[0][i], right_low[0][i]);
        split_pair(m[2 * i].y, m[2 * i + 1].y, right[1][i], right_low[1][i]);
      }
      if ((tile + kAhead) / kTiles < j) load_tile(m, tile + kAhead);
      const uint4 left = s_left[tile][0][lane], left_low = s_left[tile][1][lane];
      const auto add = [&](const uint4& a, const uint32_t (&b)[2][2]) {
#pragma unroll
        for (int t = 0; t < 2; ++t) mma_m16n8k16<Piece>(sums.x[t], a.x, a.y, a.z, a.w, b[t][0], b[t][1]);
      };
      add(left_low, right);
      add(left, right_low);
      add(left, right);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int e = 2 * half;
      *reinterpret_cast<float4*>(start + 8 * half * kKeys) =
          make_float4(sums.x[0][e], sums.x[1][e], sums.x[0][e + 1], sums.x[1][e + 1]);
    }
    from += p.transitions.row;
    __syncthreads();  // the state before has been read
  }
}

}  // namespace flash_qla::cuda::sm80
