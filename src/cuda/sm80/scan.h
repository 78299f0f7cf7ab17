// States at the starts of segments, from one to the next: the serial part of a sequence split.
#pragma once

#include "cuda/common/launch.h"
#include "cuda/sm80/params.h"

namespace flash_qla::cuda::sm80 {

// Row j + 1 of `starts` holds what segment j of a sequence has made from a start of zero (the first one, of the state
// that it really started from), and becomes the state at the start of segment j + 1: S(j + 1) += M(j) S(j), in fp32.
Status launch_scan(const Problem& p, const ForwardParams& params, cudaStream_t stream);

}  // namespace flash_qla::cuda::sm80
