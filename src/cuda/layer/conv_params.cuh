// A call's arguments as the convolution's kernels are given them.
#pragma once

#include "cuda/layer/conv_params.h"
#include "cuda/layer/vector.cuh"

namespace flash_qla::cuda {

template <class Arguments>
ConvSequences conv_sequences_of(const Arguments& args, const ConvProblem& p) {
  ConvSequences s{};
  s.cu_seqlens = device_tensor(args.cu_seqlens);
  s.seq_idx = device_tensor(args.seq_idx);
  s.B = p.B;
  s.T = p.T;
  s.N = p.N;
  s.L = p.L;
  s.slots = p.slots;
  s.has_states = present(args.parts[0].initial_state);
  return s;
}

// Why no kernel here takes a forward call or an update; empty: they do.
std::string reject_conv(const flash_qla_conv_arguments& args, const ConvProblem& p);

ConvParams conv_params_of(const flash_qla_conv_arguments& args, const ConvProblem& p);
ConvBackwardParams conv_backward_params_of(const flash_qla_conv_backward_arguments& args, const ConvProblem& p);

}  // namespace flash_qla::cuda
