// O of a chunk at a sequence's end, row by row: a tile's store would write past it.
#pragma once

#include <cstdint>

#include "cuda/common/fragment.cuh"
#include "cuda/sm90/chunk_fwd/chunk_descriptor.cuh"

namespace flash_qla::cuda::sm90::fwd_2cta {

using fwd::Args, fwd::ChunkDescriptor;

// From a stage of 64 columns of V, rows of 128 B, swizzled, by a warp. stage(): its address. The caller sees to it that
// O is there, and that the stage is not written before all lanes have read it.
template <typename Element, typename Stage>
__device__ __forceinline__ void store_output_rows(const Args& args, const ChunkDescriptor& c, Stage&& stage, int lane) {
  Element* out =
      static_cast<Element*>(args.o) + c.row * args.o_token_stride + c.head * args.o_head_stride + c.half * 64;
  for (int i = lane; i < c.valid * 8; i += 32) {
    const int row = i >> 3, piece = i & 7;
    *reinterpret_cast<uint4*>(out + row * args.o_token_stride + piece * 8) =
        load_shared_u4(stage() + row * 128 + ((piece ^ (row & 7)) << 4));
  }
}

}  // namespace flash_qla::cuda::sm90::fwd_2cta
