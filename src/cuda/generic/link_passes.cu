// The passes of links: the forward recurrence without outputs, on columns of S and then of M, and the reverse one. A
// block takes 16 columns of one (part, value head), as recurrence.cuh lays them out.
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/generic/links.cuh"

namespace flash_qla::cuda {
namespace {

// Where a block works, and what stages the tokens of its pass.
template <int kKeysPerLane>
struct PassPlace {
  using Tile = TokenTile<kKeysPerLane>;

  BlockPlace place;  // n is the part
  LinkPass pass;
  DeviceSequence sequence;
  bool steps, valid;
  int stage_thread, lane, s_column, column;

  __device__ PassPlace(const LinkParams& p, int columns) : place(block_place(p.in.Hv, columns)) {
    pass = p.passes[place.n * p.in.Hv + place.head];
    if (pass.row >= 0) sequence = sequence_at(p.sequences, pass.row);
    steps = threadIdx.x < kStepThreads;
    stage_thread = static_cast<int>(threadIdx.x) - kStepThreads;
    lane = threadIdx.x % kLanes;
    s_column = (threadIdx.x % kStepThreads) / kLanes;
    column = place.column0 + s_column;
    valid = steps && column < columns;
  }

  __device__ int64_t tiles() const { return ceil_div(pass.to - pass.from, kTileTokens); }
  __device__ int count(int64_t tile) const {
    const int64_t left = pass.to - pass.from - tile * kTileTokens;
    return static_cast<int>(left < kTileTokens ? left : kTileTokens);
  }
  __device__ void stage(Tile* s_tiles, const TokenInputs& in, int64_t tile) const {
    stage_tile(s_tiles[tile % 2], in, place, sequence.b, sequence.begin + pass.from + tile * kTileTokens, count(tile),
               stage_thread);
  }
};

// Columns of S, or of M with kTransition: `in` then has no values, and is as wide as the keys.
template <int kKeysPerLane, bool kTransition>
__global__ void __launch_bounds__(kRecurrenceThreads, blocks_per_multiprocessor(kKeysPerLane))
    link_states_kernel(const __grid_constant__ LinkParams p) {
  using Tile = TokenTile<kKeysPerLane>;
  Tile* s_tiles = dynamic_shared<Tile>();  // two: one is stepped through, one is filled
  const PassPlace<kKeysPerLane> at(p, p.in.V);
  const DeviceStates& out = kTransition ? p.M : p.S;

  float state[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    // The identity, for M.
    state[i] = kTransition && key_of(at.lane, i / 4) + i % 4 == at.column ? 1.f : 0.f;
  }
  if (at.pass.row < 0 || (kTransition && !at.pass.is_affine)) {
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) state[i] = 0.f;
    if (at.valid) store_column(state, out, at.place.n, at.place.head, at.column, at.lane, p.in.K);
    return;
  }
  if (!kTransition && at.valid && at.pass.starts && p.given.data != nullptr) {
    load_column(state, p.given, at.pass.row, at.place.head, at.column, at.lane, p.in.K);
  }

  const int64_t tiles = at.tiles();
  if (!at.steps && tiles > 0) at.stage(s_tiles, p.in, 0);
  __syncthreads();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    if (!at.steps) {
      if (tile + 1 < tiles) at.stage(s_tiles, p.in, tile + 1);
    } else {
      const Tile& s_tile = s_tiles[tile % 2];
      const int count = at.count(tile);
      for (int i = 0; i < count; ++i) {
        float k[kKeysPerLane];
        read_row(k, s_tile.k[i], at.lane);
        // u = beta (v - e^g S^T k), S <- e^g S + k u^T
        const float decay = s_tile.decay[i], along_k = lane_sum(lane_dot(state, k));
        const float u = s_tile.beta[i] * fmaf(-decay, along_k, s_tile.x[i][at.s_column]);
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) state[j] = fmaf(k[j], u, decay * state[j]);
      }
    }
    __syncthreads();
  }
  if (at.valid) store_column(state, out, at.place.n, at.place.head, at.column, at.lane, p.in.K);
}

template <int kKeysPerLane>
__global__ void __launch_bounds__(kRecurrenceThreads, blocks_per_multiprocessor(kKeysPerLane))
    link_gradients_kernel(const __grid_constant__ LinkParams p) {
  using Tile = TokenTile<kKeysPerLane>;
  Tile* s_tiles = dynamic_shared<Tile>();
  const PassPlace<kKeysPerLane> at(p, p.in.V);

  float gradient[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) gradient[i] = 0.f;
  if (at.pass.row < 0) {
    if (at.valid) store_column(gradient, p.S, at.place.n, at.place.head, at.column, at.lane, p.in.K);
    return;
  }
  if (at.valid && at.pass.starts && p.given.data != nullptr) {
    load_column(gradient, p.given, at.pass.row, at.place.head, at.column, at.lane, p.in.K);
  }

  const float scale = static_cast<float>(p.scale);
  const int64_t tiles = at.tiles();
  if (!at.steps && tiles > 0) at.stage(s_tiles, p.in, tiles - 1);
  __syncthreads();
  for (int64_t tile = tiles - 1; tile >= 0; --tile) {
    if (!at.steps) {
      if (tile > 0) at.stage(s_tiles, p.in, tile - 1);
    } else {
      const Tile& s_tile = s_tiles[tile % 2];
      for (int i = at.count(tile) - 1; i >= 0; --i) {
        // D += scale q do^T, du = D^T k, D <- e^g (D - k beta du^T)
        float row[kKeysPerLane];
        read_row(row, s_tile.q[i], at.lane);
        const float d_o = scale * s_tile.x[i][at.s_column];
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) gradient[j] = fmaf(row[j], d_o, gradient[j]);
        read_row(row, s_tile.k[i], at.lane);
        const float dv = s_tile.beta[i] * lane_sum(lane_dot(gradient, row));
        const float decay = s_tile.decay[i];
#pragma unroll
        for (int j = 0; j < kKeysPerLane; ++j) gradient[j] = decay * fmaf(-row[j], dv, gradient[j]);
      }
    }
    __syncthreads();
  }
  if (at.valid) store_column(gradient, p.S, at.place.n, at.place.head, at.column, at.lane, p.in.K);
}

int64_t blocks(const Problem& p, const LinkParams& params, int64_t columns) {
  return params.P * p.Hv * ceil_div(columns, kColumns);
}

template <int kKeysPerLane>
Status launch_states_for(const Problem& p, const LinkParams& params, cudaStream_t stream) {
  constexpr size_t kShared = 2 * sizeof(TokenTile<kKeysPerLane>);
  FLASH_QLA_RETURN_IF_ERROR(launch("link_states", link_states_kernel<kKeysPerLane, false>, blocks(p, params, p.V),
                                   kRecurrenceThreads, kShared, stream, params));
  LinkParams of_keys = params;
  of_keys.in.x = DeviceTensor{};
  of_keys.in.V = of_keys.in.K;
  return launch("link_transitions", link_states_kernel<kKeysPerLane, true>, blocks(p, params, p.K), kRecurrenceThreads,
                kShared, stream, of_keys);
}

template <int kKeysPerLane>
Status launch_gradients_for(const Problem& p, const LinkParams& params, cudaStream_t stream) {
  return launch("link_gradients", link_gradients_kernel<kKeysPerLane>, blocks(p, params, p.V), kRecurrenceThreads,
                2 * sizeof(TokenTile<kKeysPerLane>), stream, params);
}

}  // namespace

Status launch_link_states(const Problem& p, const LinkParams& params, cudaStream_t stream) {
  switch (keys_per_lane(p.K)) {
#define FLASH_QLA_CASE(n) \
  case n:                 \
    return launch_states_for<n>(p, params, stream);
    FLASH_QLA_FOR_EACH_KEYS_PER_LANE(FLASH_QLA_CASE)
#undef FLASH_QLA_CASE
  }
  return Status();  // validation keeps K within what is compiled
}

Status launch_link_gradients(const Problem& p, const LinkParams& params, cudaStream_t stream) {
  switch (keys_per_lane(p.K)) {
#define FLASH_QLA_CASE(n) \
  case n:                 \
    return launch_gradients_for<n>(p, params, stream);
    FLASH_QLA_FOR_EACH_KEYS_PER_LANE(FLASH_QLA_CASE)
#undef FLASH_QLA_CASE
  }
  return Status();
}

}  // namespace flash_qla::cuda
