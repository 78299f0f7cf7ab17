// States that a forward keeps on its way: lists of the tokens after which one is wanted, and the rows of h that no
// chunk has.
#pragma once

#include "cuda/common/pool.cuh"
#include "cuda/common/sequences.cuh"

namespace flash_qla::cuda {

// Positions whose state goes to a pool slot: a list for each token, the state after which is wanted.
struct CheckpointLists {
  DeviceTensor indices;  // [M] slots
  int32_t* first;        // [B * T] an entry of `indices`, or -1; NULL: no lists
  int32_t* next;         // [M] the next entry of the same token, or -1
};

// Takes the lists' arrays from the workspace where a call has listed tokens.
CheckpointLists take_checkpoint_lists(const flash_qla_forward_arguments& args, const Problem& p, Workspace* workspace);

// Fills `lists` from the listed positions. A position p stands for the token p - 1.
Status launch_checkpoint_lists(const Tensor& offsets, int64_t tokens, const CheckpointLists& lists,
                               cudaStream_t stream);

// Zero to the rows of h that no chunk has, and to those of skipped rows of the batch.
Status launch_zero_unused_h(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                            const DeviceStates& h, cudaStream_t stream);

}  // namespace flash_qla::cuda
