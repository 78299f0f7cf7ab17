// The forward token recurrence (docs/math.md), any K and V up to 256: state in registers, one block per 16 columns.
#pragma once

#include "cuda/common/pool.cuh"
#include "cuda/generic/recurrence.cuh"

namespace flash_qla::cuda {

// Positions whose state goes to a pool slot: a list for each token, the state after which is wanted.
struct CheckpointLists {
  DeviceTensor indices;  // [M] slots
  int32_t* first;        // [B * T] an entry of `indices`, or -1; NULL: no lists
  int32_t* next;         // [M] the next entry of the same token, or -1
};

struct ForwardParams : ForwardStates {
  SequenceTable sequences;
  TokenInputs in;
  DeviceTensor o;  // [B, T, Hv, V]; absent in a backward pass
  double scale;
  CheckpointLists lists;

  // What a backward pass keeps: v - S~^T k of each token, [B * T, Hv, V], and the states inside sequences.
  float* errors;
  BoundaryStates boundaries;
};
static_assert(std::is_trivially_copyable_v<ForwardParams>);

// Fills `lists` from the listed positions. A position p stands for the token p - 1.
Status launch_checkpoint_lists(const Tensor& offsets, int64_t tokens, const CheckpointLists& lists,
                               cudaStream_t stream);

Status launch_recurrent_forward(const Problem& p, const ForwardParams& params, cudaStream_t stream);

}  // namespace flash_qla::cuda
