// What the backward needs of the forward beside its inputs: A and the gates' sums.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"

namespace flash_qla::cuda::sm90 {

// Enqueues the kernel that writes args' a and g_cumsum, where they are not null, for all tokens of all sequences that
// are not skipped. Behind the kernels of the call's forward: it may start as soon as their blocks allow, and does not
// wait for their results.
cudaError_t launch_chunk_inverse(const ChunkForwardArgs& args, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90
