// Kernels before the forward of a call that is not cut, or not yet: sequences sorted by length, zeros, tickets.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/context_parallel/plan_args.h"

namespace flash_qla::cuda::sm90::fwd {

// Sequences sorted by length, roughly, longest first, and the ticket, into args.workspace; zeros in what no sequence
// writes.
cudaError_t launch_sequence_order(const Args& args, cudaStream_t stream);

// Where that leaves them.
void place_sorted_sequences(void* workspace, KernelArgs* params);

// Whether the lengths ask for a cut (PlanArgs::least_longest), and what the kernels of a cut call find before there
// is a plan. sorts: the above as well, for the uncut kernel that follows.
cudaError_t launch_read_lengths(const cp::PlanArgs& params, bool sorts, cudaStream_t stream);

// Zeros alone, in the order of the stream.
cudaError_t launch_zero_fill(const Args& args, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::fwd
