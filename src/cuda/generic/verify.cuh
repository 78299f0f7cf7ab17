// Where the sequences of a verify call start, what their draft tokens continue, and where their states go. All of it
// lies on the device; whatever values it has, nothing outside of the tensors is named.
#pragma once

#include "core/verify.h"
#include "cuda/common/pool.cuh"

namespace flash_qla::cuda {

struct DraftPlaces {
  PoolIndices pool;      // initial, slots, null_index
  DeviceStates source;   // [slots, Hv, K, V]
  DeviceTensor parents;  // [N, T]; absent: chains
  DeviceTensor rows;     // [N] rows of states_out; absent: n
  DeviceStates states;   // [rows, Hv, K, V] after token 0; absent: not wanted
  int64_t token_stride;  // between the states after two tokens
};

inline DraftPlaces draft_places(const flash_qla_verify_arguments& args) {
  const bool v_first = args.options.state_v_first != 0;
  DraftPlaces places{};
  places.pool.initial = device_tensor(args.initial_state_indices);
  places.pool.columns = 1;
  places.pool.slots = args.state_pool.shape[0];
  places.pool.null_index = args.null_index;
  places.pool.used = true;
  places.source = device_states(args.state_pool, v_first);
  places.parents = device_tensor(args.parents);
  places.rows = device_tensor(args.states_out_indices);
  if (present(args.states_out)) {
    places.states = device_states(states_after(args.states_out, 0), v_first);
    places.token_stride = args.states_out.stride[1];
  }
  return places;
}

// The token that token t of row n continues, or -1: the pool's state.
__device__ inline int draft_parent(const DraftPlaces& places, int64_t n, int t) {
  const int64_t parent = places.parents.data == nullptr ? t - 1 : load_index(places.parents, n, t);
  return parent >= 0 && parent < t ? static_cast<int>(parent) : -1;
}

// The row of states_out that row n has, or kNoSlot.
__device__ inline int64_t draft_row(const DraftPlaces& places, int64_t n) {
  if (places.states.data == nullptr) return kNoSlot;
  const int64_t row = places.rows.data == nullptr ? n : load_index(places.rows, n);
  return row >= 0 && row < places.states.rows ? row : kNoSlot;
}

}  // namespace flash_qla::cuda
