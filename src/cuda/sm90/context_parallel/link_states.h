// The launch of the kernel that makes the matrices of links' segments (link_states.cuh).
#pragma once

#include "cuda/sm90/chunk_fwd/args.h"
#include "cuda/sm90/context_parallel/links.h"

namespace flash_qla::cuda::sm90::fwd {

// Last states and transitions of a list's items, a matrix each, by rows of V, or of K where `keys_first`. Of `args`
// what says of tokens, gates and initial states.
cudaError_t launch_link_states(const Args& args, const cp::LinkWorkspace& workspace, bool keys_first,
                               cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::fwd
