// The gradients of links' segments (links.cuh), for links/links.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_bwd/args.h"
#include "cuda/sm90/context_parallel/work_items.h"

namespace flash_qla::cuda::sm90::bwd {

// Reverse passes over segments: each leaves the gradient of the state that enters it, where that of the state that
// leaves it is zero, or a matrix that is given.
struct LinkGradients {
  // [1, tokens, heads, ..], as the kernels take them; g, beta and A may be absent.
  StridedTensor q, k, d_o, g, beta, A;
  int64_t tokens, Hq, Hv;
  float scale;
  const cp::WorkItem* items;  // `chunk`: slot of the first one; from cell `position`, -1: from zero, to cell `slot`
  const int32_t* item_count;
  int64_t most_items;
  const LinkTile* tiles;  // every (chunk, value head) of the items
  const int32_t* tile_count;
  int64_t most_tiles;
  float* cells;  // [.., 128 of V, 128 of K]
  uint8_t* scratch;
};
int64_t link_gradients_scratch(int64_t tokens, int64_t Hv, int64_t most_tiles, bool makes_A);
cudaError_t launch_link_gradients(const LinkGradients& links, cudaStream_t stream);

// The instantiations, one file each.
cudaError_t launch_link_gradients_bf16(const Args& p, const Maps& maps, const LinkGradients& links,
                                       cudaStream_t stream);
cudaError_t launch_link_gradients_fp16(const Args& p, const Maps& maps, const LinkGradients& links,
                                       cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::bwd
