#include "cuda/generic/recurrent_forward.cuh"

#include "cuda/common/dynamic_shared.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kListThreads = 256;

__global__ void __launch_bounds__(kListThreads)
    checkpoint_lists_kernel(DeviceTensor offsets, int64_t M, int64_t tokens, CheckpointLists lists) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kListThreads;
  for (int64_t m = static_cast<int64_t>(blockIdx.x) * kListThreads + threadIdx.x; m < M; m += step) {
    const int64_t position = load_index(offsets, m);
    if (position < 1 || position > tokens) continue;
    // The order of a list varies from run to run; what is written does not, as every entry has its own slot.
    lists.next[m] = atomicExch(&lists.first[position - 1], static_cast<int32_t>(m));
  }
}

// Zero output for a row that is skipped.
__device__ void skip_row(const ForwardParams& p, const BlockPlace& place, const DeviceSequence& sequence) {
  for (int64_t i = threadIdx.x; i < sequence.length * kColumns; i += kRecurrenceThreads) {
    const int column = place.column0 + static_cast<int>(i % kColumns);
    if (column < p.in.V) {
      store<float>(p.o, offset_of(p.o, sequence.b, sequence.begin + i / kColumns, place.head, column), 0.f);
    }
  }
}

template <int kKeysPerLane>
__global__ void __launch_bounds__(kRecurrenceThreads, blocks_per_multiprocessor(kKeysPerLane))
    recurrent_forward_kernel(const __grid_constant__ ForwardParams p) {
  using Tile = TokenTile<kKeysPerLane>;
  Tile* s_tiles = dynamic_shared<Tile>();  // two: one is stepped through, one is filled

  const BlockPlace place = block_place(p.in.Hv, p.in.V);
  const DeviceSequence sequence = sequence_at(p.sequences, place.n);
  const int64_t first_token = sequence.b * p.sequences.T + sequence.begin;  // among B * T
  const int64_t slot = read_slot(p.pool_indices, place.n);
  if (slot == kSkipRow) {
    skip_row(p, place, sequence);
    return;
  }
  const bool steps = threadIdx.x < kStepThreads;
  const int stage_thread = static_cast<int>(threadIdx.x) - kStepThreads;
  const int lane = threadIdx.x % kLanes;
  const int s_column = (threadIdx.x % kStepThreads) / kLanes, column = place.column0 + s_column;
  const bool valid = steps && column < p.in.V;

  float state[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) state[i] = 0.f;
  if (valid && slot >= 0) load_column(state, p.pool, slot, place.head, column, lane, p.in.K);
  if (valid && p.initial_state.data != nullptr) {
    load_column(state, p.initial_state, place.n, place.head, column, lane, p.in.K);
  }

  const auto store_to_slot = [&](int64_t to) {
    if (valid && to >= 0) store_column(state, p.pool, to, place.head, column, lane, p.in.K);
  };
  // What is kept of the state before token t of the sequence, a multiple of kTileTokens.
  const auto keep_before = [&](int64_t t) {
    if (!valid || t % kChunkSize != 0) return;
    const int64_t chunk = sequence.first_chunk + t / kChunkSize;
    if (p.h.data != nullptr && chunk < p.h.rows) store_column(state, p.h, chunk, place.head, column, lane, p.in.K);
    if (p.boundaries.data != nullptr && t > 0) {
      store_boundary(state, boundary_column(p.boundaries, first_token + t, p.in.Hv, place.head, p.in.V, column), lane);
    }
  };
  // What is kept of the state after the first t tokens, the end of a tile.
  const auto keep_after = [&](int64_t t) {
    if (!valid || p.checkpoint_every == 0 || t % p.checkpoint_every != 0) return;
    const int64_t row = load_index(p.checkpoint_starts, place.n) + t / p.checkpoint_every - 1;
    if (row >= 0 && row < p.checkpoints.rows) {
      store_column(state, p.checkpoints, row, place.head, column, lane, p.in.K);
    }
  };
  const float scale = static_cast<float>(p.scale);
  const bool per_token = p.pool_indices.per_token, listed = p.lists.first != nullptr;

  const int64_t tiles = ceil_div(sequence.length, kTileTokens);
  const auto tile_count = [&](int64_t tile) {
    const int64_t left = sequence.length - tile * kTileTokens;
    return static_cast<int>(left < kTileTokens ? left : kTileTokens);
  };
  if (!steps && tiles > 0) {
    stage_tile(s_tiles[0], p.in, place, sequence.b, sequence.begin, tile_count(0), stage_thread);
  }
  __syncthreads();
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t t0 = tile * kTileTokens;
    if (!steps) {
      if (tile + 1 < tiles) {
        stage_tile(s_tiles[(tile + 1) % 2], p.in, place, sequence.b, sequence.begin + t0 + kTileTokens,
                   tile_count(tile + 1), stage_thread);
      }
    } else {
      const Tile& s_tile = s_tiles[tile % 2];
      const int count = tile_count(tile);
      keep_before(t0);
      const int64_t token = first_token + t0;
      int64_t o_offset = p.o.data == nullptr ? 0 : offset_of(p.o, sequence.b, sequence.begin + t0, place.head, column);
      int64_t error_offset = (token * p.in.Hv + place.head) * p.in.V + column;
      // A token's output is summed over the lanes beside the next token's error, so that the shuffles of one hide
      // behind those of the other; likewise the next key is read before it is needed.
      float o_part = 0.f, k[kKeysPerLane];
      read_row(k, s_tile.k[0], lane);
      const auto store_output = [&](float o) {
        if (valid && lane == 0) store<float>(p.o, o_offset, scale * o);
        o_offset += p.o.stride[1];
      };
      // Tokens [from, to) of the tile. What is kept of the states between them is stored outside of this loop: that
      // code is long, and would push the steps out of the instruction cache.
      const auto step_tokens = [&](int from, int to) {
        for (int i = from; i < to; ++i) {
          const float decay = s_tile.decay[i];
          const float along_k = lane_sum(lane_dot(state, k)), o = lane_sum(o_part);
          // u = beta (v - e^g S^T k), S <- e^g S + k u^T
          const float error = fmaf(-decay, along_k, s_tile.x[i][s_column]);
          const float u = s_tile.beta[i] * error;
#pragma unroll
          for (int j = 0; j < kKeysPerLane; ++j) state[j] = fmaf(k[j], u, decay * state[j]);
          read_row(k, s_tile.k[i + 1 < kTileTokens ? i + 1 : i], lane);
          if (p.o.data != nullptr) {
            float q[kKeysPerLane];
            read_row(q, s_tile.q[i], lane);
            if (i > 0) store_output(o);
            o_part = lane_dot(state, q);
          }
          if (p.errors != nullptr) {
            if (valid && lane == 0) p.errors[error_offset] = error;
            error_offset += static_cast<int64_t>(p.in.Hv) * p.in.V;
          }
        }
      };
      for (int from = 0; from < count;) {
        int to = per_token ? from + 1 : count;
        for (int i = from; listed && i < to; ++i) {
          if (p.lists.first[token + i] >= 0) to = i + 1;
        }
        step_tokens(from, to);
        if (per_token) store_to_slot(write_slot(p.pool_indices, place.n, t0 + to - 1));
        if (listed) {
          for (int32_t m = p.lists.first[token + to - 1]; m >= 0; m = p.lists.next[m]) {
            store_to_slot(slot_or_none(p.pool_indices, load_index(p.lists.indices, m)));
          }
        }
        from = to;
      }
      if (p.o.data != nullptr) store_output(lane_sum(o_part));
      keep_after(t0 + count);
    }
    __syncthreads();
  }

  if (valid && p.final_state.data != nullptr) {
    store_column(state, p.final_state, place.n, place.head, column, lane, p.in.K);
  }
  if (!per_token) store_to_slot(write_slot(p.pool_indices, place.n, 0));
}

template <int kKeysPerLane>
Status launch_for(const Problem& p, const ForwardParams& params, cudaStream_t stream) {
  return launch("recurrent_forward", recurrent_forward_kernel<kKeysPerLane>, recurrence_blocks(p), kRecurrenceThreads,
                2 * sizeof(TokenTile<kKeysPerLane>), stream, params);
}

}  // namespace

Status launch_checkpoint_lists(const Tensor& offsets, int64_t tokens, const CheckpointLists& lists,
                               cudaStream_t stream) {
  if (lists.first == nullptr) return Status();
  // Every byte 0xff: -1.
  FLASH_QLA_RETURN_IF_ERROR(cuda_status(
      cudaMemsetAsync(lists.first, 0xff, static_cast<size_t>(tokens) * sizeof(int32_t), stream), "cudaMemsetAsync"));
  return launch("checkpoint_lists", checkpoint_lists_kernel, blocks_for(offsets.shape[0], kListThreads), kListThreads,
                0, stream, device_tensor(offsets), offsets.shape[0], tokens, lists);
}

Status launch_recurrent_forward(const Problem& p, const ForwardParams& params, cudaStream_t stream) {
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
