// What a call needs before and after the fused forward where its tensors are not as the kernel reads them: gates as
// float32, rows as the copy engine takes them, q and k normalised.
#pragma once

#include "cuda/common/gates.cuh"
#include "cuda/common/launch.h"

namespace flash_qla::cuda::sm90::fwd {

// Rows of 128 elements to be copied, [d0, d1, heads, 128]; absent (no data): none.
struct RowCopy {
  DeviceTensor from, to;  // `to` in a 16- or 32-bit type
  int64_t d0 = 0, d1 = 0, heads = 0;
  bool normalize = false;  // to rows of norm one, rounded to `to`'s type
};

// The gates of a call, to be written as contiguous [B, T, Hv] float32; null: not wanted.
struct GateCopy {
  Gates gates;
  float* log_decay = nullptr;
  float* beta = nullptr;
  int64_t B = 0, T = 0, Hv = 0;
};

inline constexpr int kMostRowCopies = 4;

// Does all of it with one kernel; nothing where there is nothing to do.
// Whether it launches anything.
bool prepares(const GateCopy& gates, const RowCopy (&copies)[kMostRowCopies]);
Status launch_prepare(const GateCopy& gates, const RowCopy (&copies)[kMostRowCopies], cudaStream_t stream);

}  // namespace flash_qla::cuda::sm90::fwd
