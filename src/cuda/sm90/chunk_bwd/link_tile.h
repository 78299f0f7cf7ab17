// A piece of work of the backward's kernels where they serve links (links.cuh).
#pragma once

#include <cstdint>

namespace flash_qla::cuda::sm90::bwd {

// A (chunk, value head).
struct alignas(16) LinkTile {
  int32_t token, valid;
  int32_t tile;  // slot * Hv + head
};

}  // namespace flash_qla::cuda::sm90::bwd
