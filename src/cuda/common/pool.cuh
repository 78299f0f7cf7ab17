// The states of a forward call, and which slot of a state pool a row of the batch reads and writes. Indices lie on the
// device; one that is null or past the pool skips its read or write.
#pragma once

#include "cuda/common/device_tensor.cuh"

namespace flash_qla::cuda {

constexpr int64_t kNoSlot = -1;   // start from zero, or write nothing
constexpr int64_t kSkipRow = -2;  // the row reads a null slot: zero output, nothing written

struct PoolIndices {
  DeviceTensor initial;      // [N] or [N, columns]
  DeviceTensor final;        // [N], or [N, T] with per_token
  DeviceTensor has_initial;  // [N] bool; absent: all true
  DeviceTensor accepted;     // [N]: 1 + the column of `initial` to read; absent: column 0
  int64_t columns;
  int64_t slots;
  int64_t null_index;
  int32_t used;       // there is a pool
  int32_t per_token;  // the state after each token is kept, each in its slot
};

inline PoolIndices pool_indices(const flash_qla_forward_arguments& args) {
  PoolIndices pool{};
  if (!present(args.state_pool)) return pool;
  const Tensor& final = present(args.final_state_indices) ? args.final_state_indices : args.initial_state_indices;
  pool.initial = device_tensor(args.initial_state_indices);
  pool.final = device_tensor(final);
  pool.has_initial = device_tensor(args.has_initial_state);
  pool.accepted = device_tensor(args.num_accepted_tokens);
  pool.columns = args.initial_state_indices.ndim > 1 ? args.initial_state_indices.shape[1] : 1;
  pool.slots = args.state_pool.shape[0];
  pool.null_index = args.null_index;
  pool.used = true;
  pool.per_token = final.ndim > 1;
  return pool;
}

// The states that a forward call starts from and leaves; absent: none.
struct ForwardStates {
  PoolIndices pool_indices;
  DeviceStates pool;                        // [slots, Hv, K, V]
  DeviceStates initial_state, final_state;  // [N, Hv, K, V]
  DeviceStates h;                           // [chunks, Hv, K, V]
  DeviceStates checkpoints;                 // [rows, Hv, K, V]
  DeviceTensor checkpoint_starts;           // [N + 1]
  int64_t checkpoint_every;
};

inline ForwardStates forward_states(const flash_qla_forward_arguments& args) {
  const auto states = [&](const Tensor& t) { return device_states(t, args.options.state_v_first != 0); };
  return {pool_indices(args),
          states(args.state_pool),
          states(args.initial_state),
          states(args.final_state),
          states(args.h),
          states(args.checkpoints),
          device_tensor(args.checkpoint_cu_starts),
          args.checkpoint_every};
}

__device__ inline int64_t slot_or_none(const PoolIndices& pool, int64_t index) {
  return index > pool.null_index && index >= 0 && index < pool.slots ? index : kNoSlot;
}

// An index as it was read. A kernel loads it first and looks at it once its other loads are on their way; even making
// 64 bits of 32 would wait for it.
struct RawIndex {
  uint32_t low = 0, high = 0;
};

__device__ inline uint64_t index_address(const DeviceTensor& t, int64_t i, int64_t j = 0) {
  const int64_t offset = i * t.stride[0] + j * t.stride[1];
  return reinterpret_cast<uint64_t>(t.data) +
         static_cast<uint64_t>(offset) * (t.dtype == static_cast<int32_t>(DType::kInt32) ? 4 : 8);
}

__device__ inline RawIndex load_raw_index(const DeviceTensor& t, uint64_t address) {
  RawIndex raw;
  if (t.dtype == static_cast<int32_t>(DType::kInt32)) {
    raw.low = *reinterpret_cast<const uint32_t*>(address);
  } else {
    const uint2 words = *reinterpret_cast<const uint2*>(address);
    raw = {words.x, words.y};
  }
  return raw;
}

__device__ inline int64_t unpack(const DeviceTensor& t, RawIndex raw) {
  return t.dtype == static_cast<int32_t>(DType::kInt32)
             ? static_cast<int32_t>(raw.low)
             : static_cast<int64_t>(static_cast<uint64_t>(raw.high) << 32 | raw.low);
}

// What decides where a row starts from.
struct RawSlot {
  RawIndex index;
  uint32_t has_initial = 1;
};

// `first`: address of the row's first index.
__device__ inline RawSlot load_raw_slot(const PoolIndices& pool, int64_t n, uint64_t first) {
  RawSlot raw;
  if (!pool.used) return raw;
  if (pool.accepted.data != nullptr) {
    const int64_t column = load_index(pool.accepted, n) - 1, most = pool.columns - 1;
    first = index_address(pool.initial, n, column < 0 ? 0 : (column > most ? most : column));
  }
  raw.index = load_raw_index(pool.initial, first);
  if (pool.has_initial.data != nullptr) {
    raw.has_initial = static_cast<const uint8_t*>(pool.has_initial.data)[n * pool.has_initial.stride[0]];
  }
  return raw;
}

// The slot that a row starts from, kNoSlot or kSkipRow.
__device__ inline int64_t read_slot(const PoolIndices& pool, const RawSlot& raw) {
  if (!pool.used || raw.has_initial == 0) return kNoSlot;
  const int64_t slot = slot_or_none(pool, unpack(pool.initial, raw.index));
  return slot == kNoSlot ? kSkipRow : slot;
}
__device__ inline int64_t read_slot(const PoolIndices& pool, int64_t n) {
  return read_slot(pool, load_raw_slot(pool, n, index_address(pool.initial, n)));
}

// The slot that row n's state goes to after token t (with per_token), or at the end (t = 0).
__device__ inline int64_t write_slot(const PoolIndices& pool, int64_t n, int64_t t) {
  return pool.used ? slot_or_none(pool, load_index(pool.final, n, t)) : kNoSlot;
}

}  // namespace flash_qla::cuda
