// A set of states in memory.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace flash_qla::cuda::sm90 {

// A set of states, one [K, V] (or [V, K]) matrix per slot and value head. The matrix itself is contiguous and starts on
// a 16-byte boundary.
struct StateSet {
  void* data = nullptr;           // [slots, Hv, K, V], or [slots, Hv, V, K]; null: there is none
  int64_t slot_stride = 0;        // elements from slot to slot
  int64_t head_stride = 0;        // elements from head to head
  int64_t slots = 0;              // a slot index at or past it is skipped
  const void* indices = nullptr;  // [N] slot of each sequence, int32 or int64; null: sequence i uses slot i
  int64_t index_stride = 1;       // elements from index to index
  int64_t null_index = -1;        // an index at or below it is skipped
  DType type = DType::kFloat32;
  int32_t indices_are_64_bit = 0;
};

}  // namespace flash_qla::cuda::sm90
