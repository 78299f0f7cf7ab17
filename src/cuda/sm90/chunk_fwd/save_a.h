// What the backward needs of the forward beside its inputs: A and the gates' sums.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/sm90/chunk_fwd/args.h"

namespace flash_qla::cuda::sm90::fwd {

struct SaveAArgs {
  CUtensorMap k;  // boxes of a chunk and head, swizzled: [2][64][64]
  Args args;
};

// Enqueues the kernel that writes args' a and g_cumsum, where they are not null, for all tokens of all sequences that
// are not skipped. Behind the kernels of the call's forward: it may start as soon as their blocks allow, and does not
// wait for their results.
cudaError_t launch_save_a(const SaveAArgs& params, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::fwd
