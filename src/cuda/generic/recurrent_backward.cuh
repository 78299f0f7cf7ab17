// The reverse token recurrence: the gradient of the state, from the last token to the first. It needs no states: with D
// the gradient of the state after a token,
//     D += scale q do^T,   du = D^T k,   dv = beta du,   D <- e^g (D - k dv^T)
// which is the forward recurrence run backwards, with the same place for everything.
#pragma once

#include "cuda/generic/recurrence.cuh"

namespace flash_qla::cuda {

struct ReverseParams {
  SequenceTable sequences;
  TokenInputs in;            // x is the gradient of o
  DeviceTensor dv;           // [B, T, Hv, V]; absent: not wanted
  DeviceStates dht;          // [N, Hv, K, V]; absent: zero
  DeviceStates dh0;          // [N, Hv, K, V]; absent: not wanted
  float* du;                 // [B * T, Hv, V] gradient of u = beta (v - S~^T k); NULL: not wanted
  BoundaryStates gradients;  // of the states at chunk boundaries inside sequences; NULL: not wanted
  double scale;
};
static_assert(std::is_trivially_copyable_v<ReverseParams>);

Status launch_recurrent_backward(const Problem& p, const ReverseParams& params, cudaStream_t stream);

}  // namespace flash_qla::cuda
