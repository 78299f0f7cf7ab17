// The oracle on the device: the token recurrence of docs/math.md in fp64, forward and reverse, a few lines a step. It
// is slow and obvious; checks of benchmark sizes use it where the host would take hours. As a path it is taken only
// when it is named. The generic path has it compute the calls whose few keys need double (computes_in_double()).
#pragma once

#include "cuda/common/warp.cuh"
#include "cuda/generic/backward_call.cuh"
#include "cuda/generic/forward_call.cuh"

namespace flash_qla::cuda {

// `boundaries`: NULL, or where to keep the states at chunk boundaries inside sequences (see generic/recurrence.cuh),
// [slots, Hv, K, V]. `float_at_chunks`: round the state to float32 at the end of each chunk, as a float32 final state
// would hand it over, so that a sequence cut there goes on with the same bits.
Status launch_oracle_forward(const Problem& p, const ForwardParams& params, double* boundaries, bool float_at_chunks,
                             cudaStream_t stream);

size_t oracle_backward_workspace(const flash_qla_backward_arguments& args, const Problem& p);
Status run_oracle_backward(const flash_qla_backward_arguments& args, const Problem& p, void* memory, void* stream);

// e^g and beta of a token.
__device__ inline double oracle_decay(const TokenInputs& in, int64_t b, int64_t t, int head) {
  return in.g.data == nullptr ? 1.0 : exp(clamp_log_decay(load<double>(in.g, offset_of(in.g, b, t, head))));
}
__device__ inline double oracle_beta(const TokenInputs& in, int64_t b, int64_t t, int head) {
  return in.beta.data == nullptr ? 1.0 : load<double>(in.beta, offset_of(in.beta, b, t, head));
}

}  // namespace flash_qla::cuda
