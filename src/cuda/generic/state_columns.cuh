// How a [V, K] state is spread over the threads of a block.
#pragma once

#include "cuda/generic/token_stage.cuh"

namespace flash_qla::cuda {

constexpr int kValueQuantum = 16;  // V is a multiple of it, so that columns of 16-bit states fill 16-byte accesses

// How a state is spread over threads; each as measured (docs/design/cuda_generic.md).
// kSlices: of columns that a block may take one after another.
template <int kOfThreads, int kOfBlocks, int kOfAccesses, bool kOfStreams, int kOfSlices = 1>
struct ColumnsUse {
  static constexpr int kThreads = kOfThreads, kBlocks = kOfBlocks, kAccesses = kOfAccesses, kSlices = kOfSlices;
  static constexpr bool kStreams = kOfStreams;
};

// The keys of a column lie side by side. A warp has all keys of some columns, and needs no other warp.
template <class State, int kKeys, class Use>
struct Columns {
  static constexpr int kVector = Vector<State>::kSize;  // keys of a lane
  static constexpr int kLanes = kKeys / kVector;        // lanes of a column
  static constexpr int kGroups = 32 / kLanes;           // columns of an access of a warp
  static constexpr int kAccesses = Use::kAccesses;
  static constexpr int kWarpColumns = kAccesses * kGroups;
  static constexpr int kColumns = Use::kThreads / 32 * kWarpColumns;  // of a slice
  // One after another in a block, at most: a thread stages one value.
  static constexpr int kSlices = Use::kSlices < Use::kThreads / kColumns ? Use::kSlices : Use::kThreads / kColumns;
  static_assert(kValueQuantum % kWarpColumns == 0, "a warp has all of its columns or none");
  static_assert(kLanes % kAccesses == 0, "a lane ends up with one column's sums");

  // In shared memory: the tokens and their values (float).
  static size_t shared_bytes(int T, int slices = 1) {
    return static_cast<size_t>(T) * (sizeof(SharedToken<kKeys>) + sizeof(float) * kColumns * slices);
  }
};

}  // namespace flash_qla::cuda
