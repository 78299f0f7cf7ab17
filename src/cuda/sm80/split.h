// How sequences are cut into segments that are computed beside each other (docs/kernels/sm80.md): by each sequence's
// number of chunks, and with cp_mode AUTO by that of the whole call. Counted on the device, from clamped lengths; the
// host knows bounds.
#pragma once

#include "core/problem.h"
#include "cuda/common/host_device.h"

namespace flash_qla::cuda::sm80 {

// Few chunks are not worth a cut: a segment's first pass, its transition and the scan come on top.
inline constexpr int kLeastChunks = 16;
// Segments of INVARIANT, whose bits may depend on a sequence's length alone.
inline constexpr int kInvariantChunks = 32;
// With two segments the second pass waits for the whole of the first one: nothing is gained.
inline constexpr int kLeastSegments = 3;

struct SegmentRule {
  int32_t least_chunks;    // of a segment; 0: nothing is cut
  int32_t least_segments;  // a sequence that would have fewer stays whole
  int32_t strips;          // of a sequence
  int32_t quarters;  // of the device: segments are longer where more strips than these would work; 0: they are not
};

// Chunks of a segment at least, in a call of `chunks` of them. A sequence's segments are of equal length, but for a
// chunk.
FLASH_QLA_HOST_DEVICE inline int64_t segment_chunks(const SegmentRule& rule, int64_t chunks) {
  const int64_t wanted = rule.quarters > 0 ? ceil_div(chunks * rule.strips, rule.quarters) : 0;
  return wanted > rule.least_chunks ? wanted : rule.least_chunks;
}

FLASH_QLA_HOST_DEVICE inline int64_t segments_of(const SegmentRule& rule, int64_t sequence_chunks, int64_t at_least) {
  const int64_t segments = sequence_chunks / at_least;
  return segments < rule.least_segments ? 1 : segments;
}

// Segments are numbered with gaps, so that a block finds its own without a list: those of sequence n from here on. Rows
// of states are numbered likewise without the n, which only sequences that are cut have.
FLASH_QLA_HOST_DEVICE inline int64_t first_segment(int64_t n, int64_t first_chunk, int64_t at_least) {
  return first_chunk / at_least + n;
}

}  // namespace flash_qla::cuda::sm80
