#include "cuda/generic/recurrent_backward.cuh"

#include "cuda/common/dynamic_shared.cuh"

namespace flash_qla::cuda {
namespace {

template <int kKeysPerLane>
__global__ void __launch_bounds__(kRecurrenceThreads, blocks_per_multiprocessor(kKeysPerLane))
    recurrent_backward_kernel(const __grid_constant__ ReverseParams p) {
  using Tile = TokenTile<kKeysPerLane>;
  Tile* s_tiles = dynamic_shared<Tile>();  // two: one is stepped through, one is filled

  const BlockPlace place = block_place(p.in.Hv, p.in.V);
  const DeviceSequence sequence = sequence_at(p.sequences, place.n);
  const int64_t first_token = sequence.b * p.sequences.T + sequence.begin;  // among B * T
  const bool steps = threadIdx.x < kStepThreads;
  const int stage_thread = static_cast<int>(threadIdx.x) - kStepThreads;
  const int lane = threadIdx.x % kLanes;
  const int s_column = (threadIdx.x % kStepThreads) / kLanes, column = place.column0 + s_column;
  const bool valid = steps && column < p.in.V;

  float gradient[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) gradient[i] = 0.f;
  if (valid && p.dht.data != nullptr) load_column(gradient, p.dht, place.n, place.head, column, lane, p.in.K);

  const int64_t tiles = ceil_div(sequence.length, kTileTokens);
  const auto tile_count = [&](int64_t tile) {
    const int64_t left = sequence.length - tile * kTileTokens;
    return static_cast<int>(left < kTileTokens ? left : kTileTokens);
  };
  const auto stage = [&](int64_t tile) {
    stage_tile(s_tiles[tile % 2], p.in, place, sequence.b, sequence.begin + tile * kTileTokens, tile_count(tile),
               stage_thread);
  };
  const float scale = static_cast<float>(p.scale);
  if (!steps && tiles > 0) stage(tiles - 1);
  __syncthreads();
  for (int64_t tile = tiles - 1; tile >= 0; --tile) {
    if (!steps) {
      if (tile > 0) stage(tile - 1);
    } else {
      const Tile& s_tile = s_tiles[tile % 2];
      const int count = tile_count(tile);
      const int64_t t0 = tile * kTileTokens, t1 = t0 + count;
      if (valid && p.gradients.data != nullptr && t1 % kChunkSize == 0 && t1 < sequence.length) {
        store_boundary(gradient, boundary_column(p.gradients, first_token + t1, p.in.Hv, place.head, p.in.V, column),
                       lane);
      }
      const int64_t du_step = static_cast<int64_t>(p.in.Hv) * p.in.V;
      int64_t du_offset = ((first_token + t1 - 1) * p.in.Hv + place.head) * p.in.V + column;
      int64_t dv_offset =
          p.dv.data == nullptr ? 0 : offset_of(p.dv, sequence.b, sequence.begin + t1 - 1, place.head, column);
#pragma unroll 2
      for (int i = count - 1; i >= 0; --i) {
        float row[kKeysPerLane];
        read_row(row, s_tile.q[i], lane);
        const float d_o = scale * s_tile.x[i][s_column];
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) gradient[j] = fmaf(row[j], d_o, gradient[j]);
        read_row(row, s_tile.k[i], lane);
        const float du = lane_sum(lane_dot(gradient, row));
        const float dv = s_tile.beta[i] * du;
        const float decay = s_tile.decay[i];
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) gradient[j] = decay * fmaf(-row[j], dv, gradient[j]);
        if (valid && lane == 0 && p.du != nullptr) p.du[du_offset] = du;
        if (valid && lane == 1 && p.dv.data != nullptr) store<float>(p.dv, dv_offset, dv);
        du_offset -= du_step;
        dv_offset -= p.dv.stride[1];
      }
    }
    __syncthreads();
  }
  if (valid && p.dh0.data != nullptr) store_column(gradient, p.dh0, place.n, place.head, column, lane, p.in.K);
}

template <int kKeysPerLane>
Status launch_for(const Problem& p, const ReverseParams& params, cudaStream_t stream) {
  return launch("recurrent_backward", recurrent_backward_kernel<kKeysPerLane>, recurrence_blocks(p), kRecurrenceThreads,
                2 * sizeof(TokenTile<kKeysPerLane>), stream, params);
}

}  // namespace

Status launch_recurrent_backward(const Problem& p, const ReverseParams& params, cudaStream_t stream) {
  switch (keys_per_lane(p.K)) {
#define FLASH_QLA_CASE(n) \
  case n:                 \
    return launch_for<n>(p, params, stream);
    FLASH_QLA_FOR_EACH_KEYS_PER_LANE(FLASH_QLA_CASE)
#undef FLASH_QLA_CASE
  }
  return Status();  // validation keeps K within what is compiled
}

}  // namespace flash_qla::cuda
