// The convolution's calls, validated: what every path reads instead of working it out again.
#pragma once

#include "core/problem.h"
#include "core/registry.h"
#include "flash_qla/flash_qla.hpp"

namespace flash_qla {

// Sizes of one call, forward, update or backward.
struct ConvProblem {
  int64_t B = 0, T = 0;  // of x: [B, T, H, D]
  int64_t N = 0;         // sequences: B, or length of cu_seqlens - 1
  int64_t W = 0;         // weights of a channel
  int64_t L = 0;         // inputs that a state holds; 0: no states
  int64_t channels = 0;  // of all parts
  int64_t slots = 0;     // of states in a pool; 0: states are [N, ..]
  int64_t gate_heads = 0;
  bool varlen = false;            // cu_seqlens is given, B = 1
  DType dtype = DType::kFloat32;  // of x
};

using ConvPath = Path<flash_qla_conv_arguments, ConvProblem>;
using ConvBackwardPath = Path<flash_qla_conv_backward_arguments, ConvProblem>;

const std::vector<const ConvPath*>& conv_forward_paths();
const std::vector<const ConvPath*>& conv_update_paths();
const std::vector<const ConvBackwardPath*>& conv_backward_paths();

enum class ConvKind { kForward, kUpdate };

// `need_data`: also refuse tensors that have elements and no memory.
Status validate_conv(const flash_qla_conv_arguments& args, ConvKind kind, const char* operation, bool need_data,
                     ConvProblem* problem);
Status validate_conv_backward(const flash_qla_conv_backward_arguments& args, const char* operation, bool need_data,
                              ConvProblem* problem);

// Reads cu_seqlens and indices from the device and waits: offsets never fall and end at or before T. Of sequences that
// are not skipped, slots are inside the pool, none is written twice, or written by one sequence and read by another.
Status check_conv_data(const flash_qla_conv_arguments& args, const char* operation, const ConvProblem& problem,
                       void* stream);
Status check_conv_backward_data(const flash_qla_conv_backward_arguments& args, const char* operation,
                                const ConvProblem& problem, void* stream);

// Gates as [B, T, Hv], whichever of the two shapes they were given in: strides of batch row, token, key head and value
// head within it. Head h is key head h / group.
struct GateView {
  Tensor tensor;
  int64_t batch = 0, token = 0, key_head = 0, head = 0, group = 1;
  int64_t offset(int64_t b, int64_t t, int64_t h) const {
    return b * batch + t * token + h / group * key_head + h % group * head;
  }
};
GateView gate_view(const Tensor& raw, const ConvProblem& problem);

}  // namespace flash_qla
