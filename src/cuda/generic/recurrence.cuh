// What the forward and the reverse token recurrence share: how a state is spread over threads, and how tokens reach
// them.
//
// The columns of a state (one per value dimension) do not depend on each other. A block takes kColumns columns of one
// (sequence, value head); each column is spread over kLanes lanes of a warp, so that a sum over the keys is a few
// multiplications and three shuffles. Half of the block's warps step the recurrence; the other half stages the next
// kTileTokens tokens in shared memory, converted to float, and so hides the latency of global memory behind the steps.
#pragma once

#include "cuda/common/gates.cuh"

namespace flash_qla::cuda {

constexpr int kLanes = 8;     // lanes per column: 3 shuffles a sum; 4 would need twice the registers at K = 256
constexpr int kColumns = 16;  // columns per block: 32 heads of 128 columns are 256 blocks, two for each of 132 SMs
constexpr int kStepThreads = kLanes * kColumns;
constexpr int kStageThreads = 128;
constexpr int kRecurrenceThreads = kStepThreads + kStageThreads;
constexpr int kTileTokens = 16;  // divides a chunk, so that chunk boundaries are tile boundaries
static_assert(kChunkSize % kTileTokens == 0);

// The numbers of keys per lane that kernels are compiled for: K up to 32, 64, 96, 128, 192, 256.
#define FLASH_QLA_FOR_EACH_KEYS_PER_LANE(apply) apply(4) apply(8) apply(12) apply(16) apply(24) apply(32)

inline int keys_per_lane(int64_t K) {
  int result = 0;
#define FLASH_QLA_SMALLEST(n) \
  if (result == 0 && K <= (n) * kLanes) result = (n);
  FLASH_QLA_FOR_EACH_KEYS_PER_LANE(FLASH_QLA_SMALLEST)
#undef FLASH_QLA_SMALLEST
  return result;
}

// K with the padding of the kernel that computes it: the row length of states in the workspace.
inline int64_t padded_keys(int64_t K) { return static_cast<int64_t>(keys_per_lane(K)) * kLanes; }

// Tokens of one (sequence, head), as both recurrences read them.
struct TokenInputs {
  DeviceTensor q, k;     // [B, T, Hq, K]; q absent: not needed
  DeviceTensor x;        // [B, T, Hv, V]: v forward, the gradient of o in reverse; absent: zero
  DeviceTensor g, beta;  // [B, T, Hv] log decay before the clamp, effective beta; absent: no decay, ones
  int32_t K, V, Hv, group;
};

template <int kKeysPerLane>
struct TokenTile {
  static constexpr int kKeys = kLanes * kKeysPerLane;
  float q[kTileTokens][kKeys];
  float k[kTileTokens][kKeys];
  float x[kTileTokens][kColumns];
  float decay[kTileTokens];
  float beta[kTileTokens];
};

// Where a block works: columns [column0, column0 + kColumns) of value head `head` in sequence `n`.
struct BlockPlace {
  int64_t n;
  int head, column0;
};

__device__ inline BlockPlace block_place(int Hv, int V) {
  const int slices = static_cast<int>(ceil_div(V, kColumns));
  const unsigned rest = blockIdx.x / slices;
  return {rest / Hv, static_cast<int>(rest % Hv), static_cast<int>(blockIdx.x % slices) * kColumns};
}

inline int64_t recurrence_blocks(const Problem& p) { return p.N * p.Hv * ceil_div(p.V, kColumns); }

// Stages tokens [token, token + count) of batch row b; thread counts from 0 to kStageThreads - 1.
template <int kKeysPerLane>
__device__ void stage_tile(TokenTile<kKeysPerLane>& tile, const TokenInputs& in, const BlockPlace& place, int64_t b,
                           int64_t token, int count, int thread) {
  using Tile = TokenTile<kKeysPerLane>;
  constexpr int kQuadsPerRow = Tile::kKeys / 4;
  constexpr int kQuads = kTileTokens * kQuadsPerRow / kStageThreads;  // per thread, all of them in flight at once
  static_assert(kQuads * kStageThreads == kTileTokens * kQuadsPerRow);
  const int key_head = place.head / in.group;
  const int64_t q_row = offset_of(in.q, b, token, key_head), k_row = offset_of(in.k, b, token, key_head);
  RawQuad q[kQuads], k[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int index = thread + i * kStageThreads, row = index / kQuadsPerRow, key = 4 * (index % kQuadsPerRow);
    const int size = row < count ? in.K : 0;
    q[i] = load_raw_quad(in.q, q_row + row * in.q.stride[1], key, in.q.data == nullptr ? 0 : size);
    k[i] = load_raw_quad(in.k, k_row + row * in.k.stride[1], key, size);
  }
  constexpr int kValues = kTileTokens * kColumns / kStageThreads;
  static_assert(kValues * kStageThreads == kTileTokens * kColumns);
  uint32_t x[kValues] = {}, g = 0, beta = 0;  // the bits of zero are zero in every dtype
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int index = thread + i * kStageThreads, row = index / kColumns, column = place.column0 + index % kColumns;
    if (in.x.data != nullptr && row < count && column < in.V) {
      x[i] = load_raw(in.x, offset_of(in.x, b, token + row, place.head, column));
    }
  }
  if (thread < count && in.g.data != nullptr) g = load_raw(in.g, offset_of(in.g, b, token + thread, place.head));
  if (thread < count && in.beta.data != nullptr) {
    beta = load_raw(in.beta, offset_of(in.beta, b, token + thread, place.head));
  }
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int index = thread + i * kStageThreads, row = index / kQuadsPerRow, key = 4 * (index % kQuadsPerRow);
    *reinterpret_cast<float4*>(&tile.q[row][key]) = unpack(in.q, q[i]);
    *reinterpret_cast<float4*>(&tile.k[row][key]) = unpack(in.k, k[i]);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int index = thread + i * kStageThreads;
    tile.x[index / kColumns][index % kColumns] = unpack(in.x, x[i]);
  }
  if (thread < count) {
    tile.decay[thread] = in.g.data == nullptr ? 1.f : expf(clamp_log_decay(unpack(in.g, g)));
    tile.beta[thread] = in.beta.data == nullptr ? 1.f : unpack(in.beta, beta);
  }
}

// One lane's part of a column: state[4 j + i] belongs to key key_of(lane, j) + i.
__device__ inline int key_of(int lane, int j) { return 4 * (lane + kLanes * j); }

// Blocks that share a multiprocessor. Three of them take the 384 blocks of 32 heads of 192 values at once.
constexpr int blocks_per_multiprocessor(int keys_per_lane) {
  return keys_per_lane <= 12 ? 3 : keys_per_lane <= 24 ? 2 : 1;
}

// Sum over the lanes of a column, in all of them.
__device__ inline float lane_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// This lane's part of <state, row>. Four sums side by side shorten the chain of dependent additions.
template <int kKeysPerLane>
__device__ float lane_dot(const float (&state)[kKeysPerLane], const float (&row)[kKeysPerLane]) {
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) sum[i % 4] = fmaf(state[i], row[i], sum[i % 4]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// A lane's part of a row of q or k in shared memory.
template <int kKeysPerLane>
__device__ void read_row(float (&part)[kKeysPerLane], const float* row, int lane) {
#pragma unroll
  for (int j = 0; j < kKeysPerLane / 4; ++j) {
    const float4 quad = *reinterpret_cast<const float4*>(row + key_of(lane, j));
    part[4 * j] = quad.x;
    part[4 * j + 1] = quad.y;
    part[4 * j + 2] = quad.z;
    part[4 * j + 3] = quad.w;
  }
}

// Column `column` of state (row, head) of a caller's tensor. Keys past K are zero and are not written.
template <int kKeysPerLane>
__device__ void load_column(float (&state)[kKeysPerLane], const DeviceStates& t, int64_t row, int head, int column,
                            int lane, int K) {
  const int64_t base = row * t.row + head * t.head + column * t.value;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const int key = key_of(lane, i / 4) + i % 4;
    state[i] = key < K ? load<float>(t, base + key * t.key) : 0.f;
  }
}

template <int kKeysPerLane>
__device__ void store_column(const float (&state)[kKeysPerLane], const DeviceStates& t, int64_t row, int head,
                             int column, int lane, int K) {
  const int64_t base = row * t.row + head * t.head + column * t.value;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const int key = key_of(lane, i / 4) + i % 4;
    if (key < K) store<float>(t, base + key * t.key, state[i]);
  }
}

// States at chunk boundaries inside sequences, which the backward pass keeps in the workspace: [slots, Hv, V, padded K]
// float32. A boundary at token t (64, 128, .. after its sequence's start) has slot t / 64: two boundaries of one
// sequence are 64 tokens apart, and those of different sequences have a whole chunk between them, so no two share a
// slot.
struct BoundaryStates {
  float* data;
  int64_t padded_keys;
};

inline int64_t boundary_slots(const Problem& p) { return ceil_div(p.B * p.T, kChunkSize); }

__device__ inline float* boundary_column(const BoundaryStates& states, int64_t token, int Hv, int head, int V,
                                         int column) {
  return states.data + (((token / kChunkSize) * Hv + head) * V + column) * states.padded_keys;
}

template <int kKeysPerLane>
__device__ void store_boundary(const float (&state)[kKeysPerLane], float* column, int lane) {
#pragma unroll
  for (int j = 0; j < kKeysPerLane / 4; ++j) {
    *reinterpret_cast<float4*>(column + key_of(lane, j)) =
        make_float4(state[4 * j], state[4 * j + 1], state[4 * j + 2], state[4 * j + 3]);
  }
}

}  // namespace flash_qla::cuda
