// What a rank's links leave for the forward of the same tokens (`carry` of the C interface): last states and
// transitions of segments, of heads that keep their state. The forward starts these heads' segments from them, once the
// state that enters is known, and makes no state of theirs again (carry.cu).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/sm90/common/sizes.h"
#include "cuda/sm90/context_parallel/work_items.h"

namespace flash_qla::cuda::sm90::cp {

// The segments of one (part, value head), in the order of the pass (links/link_items.h).
struct LinkChain {
  int32_t first_cell;   // its matrices: the segments' last states, then their transitions
  int32_t first_state;  // states of the chains before it
  int32_t first_tile;   // and chunks, going backward
  int32_t segments;     // 0: nobody reads the link
  int32_t is_affine;    // M is wanted, and so the first segment's transition too
  int32_t first_cut;    // cuts of the chains before it, of those that have any
  // What the forward may go on from: all tokens of a row; -1: a window of a head that forgets, or nothing.
  int32_t row = -1;
  int32_t tokens = 0;

  // Whether there are cuts that the forward has their states of.
  FLASH_QLA_HOST_DEVICE bool has_cuts() const { return row >= 0 && segments > 1; }
  FLASH_QLA_HOST_DEVICE int32_t cuts() const { return has_cuts() ? segments - 1 : 0; }
  FLASH_QLA_HOST_DEVICE int32_t transitions() const { return segments == 0 ? 0 : segments - (is_affine != 0 ? 0 : 1); }
  FLASH_QLA_HOST_DEVICE int32_t matrices() const { return segments + transitions(); }
  FLASH_QLA_HOST_DEVICE int32_t state_cell(int32_t segment) const { return first_cell + segment; }
  FLASH_QLA_HOST_DEVICE int32_t transition_cell(int32_t segment) const {
    return first_cell + segments + segment - (is_affine != 0 ? 0 : 1);
  }
};

// The chunk of `chunks` that segment `place` begins with, of `segments` in the order of tokens. Below 2^31: 2^25 chunks
// at most, times a segment's number below 64.
FLASH_QLA_HOST_DEVICE constexpr int32_t segment_start(int32_t chunks, int32_t place, int32_t segments) {
  return chunks * place / segments;
}

inline constexpr int64_t kMatrixBytes = int64_t{4} * kHeadDim * kHeadDim;

// Matrices that a carry has room for, of so many of segments: a chain with cuts has two to a segment, or one less, and
// one more to a cut.
constexpr int64_t carry_matrices(int64_t of_segments) { return of_segments + of_segments / 2; }

// Places in a carry: chains [parts, value heads], their order, then matrices of 128 x 128 floats, S^T and M^T: of
// segments, where the scan leaves S of all segments up to each in the place of the segment's own; and M of all segments
// up to each, by cuts.
struct Carry {
  LinkChain* chains = nullptr;  // null: none
  int32_t* order = nullptr;     // numbers of chains: first those with cuts
  float* cells = nullptr;
  int32_t parts = 0;
  int32_t slots = 0;  // matrices of segments that there is room for

  // M^T from the chain's start to its cut behind a segment, of a chain that is affine.
  FLASH_QLA_HOST_DEVICE int32_t entering_cell(const LinkChain& chain, int32_t segment) const {
    return segment == 0 ? chain.transition_cell(0) : slots + chain.first_cut + segment;
  }
};
constexpr int64_t carry_header_bytes(int64_t chains) {
  return (chains * static_cast<int64_t>(sizeof(LinkChain) + sizeof(int32_t)) + 255) / 256 * 256;
}
constexpr int64_t carry_bytes(int64_t chains, int64_t slots) {
  return carry_header_bytes(chains) + carry_matrices(slots) * kMatrixBytes;
}
inline Carry carry_at(void* data, int64_t bytes, int64_t parts, int64_t heads) {
  const int64_t header = carry_header_bytes(parts * heads);
  if (data == nullptr || bytes < header) return {};
  LinkChain* chains = static_cast<LinkChain*>(data);
  const int64_t matrices = (bytes - header) / kMatrixBytes;
  return {chains, reinterpret_cast<int32_t*>(chains + parts * heads),
          reinterpret_cast<float*>(static_cast<char*>(data) + header), static_cast<int32_t>(parts),
          static_cast<int32_t>(matrices - matrices / 3)};
}

}  // namespace flash_qla::cuda::sm90::cp
