// How the blocks of a launch with vectors are dealt out.
#pragma once

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/layer/conv_forward.cuh"

namespace flash_qla::cuda {

// The columns of channels of each part.
template <class Part>
ConvGrid conv_grid(const Part* parts, int num_parts) {
  ConvGrid grid{};
  int32_t column = 0;
  for (int i = 0; i < FLASH_QLA_MAX_CONV_PARTS; ++i) {
    // A part that is not there begins past all columns.
    grid.first_column[i] = i < num_parts ? column : INT32_MAX;
    if (i >= num_parts) continue;
    int64_t lanes = parts[i].dim / kVector;
    if (parts[i].l2norm) {
      while ((lanes & (lanes - 1)) != 0) ++lanes;  // heads do not share a group of lanes
    }
    column += static_cast<int32_t>(ceil_div(parts[i].heads * lanes, kConvThreads));
  }
  grid.first_column[FLASH_QLA_MAX_CONV_PARTS] = column;
  return grid;
}

// [C, W] without gaps in x's dtype, on a 16-byte boundary.
inline bool has_vector_weights(const Tensor& weight, DType type) {
  return dtype(weight) == type && weight.stride[1] == 1 && weight.stride[0] == weight.shape[1] &&
         reinterpret_cast<uintptr_t>(weight.data) % 16 == 0;
}

// Deals a forward out to as many blocks as a GPU holds at once. Some are for the gates alone: in front of its run, a
// block would have to compute them while nothing of its run is loaded, and all blocks would at the same time. A gate
// takes a thread about as long as a token of twelve channels, so both have blocks in proportion, and gates those that
// are left. Each run reads W - 1 tokens before it once more. Past kMost that is nothing, and more rounds even out what
// some blocks take longer.
inline void deal_out(const ConvProblem& p, int64_t columns, int device, ConvGrid* grid) {
  constexpr int64_t kLeast = 16, kMost = 256, kRunStep = 4;  // kRunStep: what the forward takes at a time
  constexpr int64_t kChannelsOfGate = 12;
  const int64_t places = std::max(1, 4 * device_attribute(cudaDevAttrMultiProcessorCount, device));
  const int64_t gates = p.B * p.T * p.gate_heads;
  const int64_t share =
      gates == 0 ? 0 : std::max<int64_t>(1, places * p.gate_heads / (p.gate_heads + p.channels / kChannelsOfGate));
  const int64_t runs = std::max<int64_t>(1, (places - share) / (std::max<int64_t>(1, p.B) * columns));
  const int64_t tokens = std::clamp(ceil_div(p.T, runs), kLeast, kMost);
  grid->run_tokens = static_cast<int32_t>(ceil_div(tokens, kRunStep) * kRunStep);
  grid->runs_of_row = static_cast<int32_t>(ceil_div(p.T, grid->run_tokens));
  const int64_t left = places - p.B * grid->runs_of_row * columns;
  grid->gate_blocks = static_cast<int32_t>(std::min(ceil_div(gates, kConvThreads), std::max(share, left)));
}

}  // namespace flash_qla::cuda
