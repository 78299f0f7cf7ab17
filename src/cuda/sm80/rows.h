// A call's rows as the kernels of path sm80 read and write them: the caller's own where these suit, else copies.
#pragma once

#include "cuda/common/prepare.cuh"
#include "cuda/sm80/params.h"

namespace flash_qla::cuda::sm80 {

inline constexpr int64_t kCopyGrain = 8;   // 16-bit elements of one cp.async
inline constexpr int64_t kStoreGrain = 4;  // of one store of outputs

// Whether all rows of [B, T, heads, size] have their elements side by side, begin on a boundary of `grain` elements and
// are a multiple of it long. The stride of a dimension of one index means nothing.
inline bool rows_fit(const Tensor& t, int64_t grain) {
  for (int i = 0; i < 3; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % grain != 0) return false;
  }
  return t.stride[3] == 1 && t.shape[3] % grain == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(grain * 2) == 0;
}

inline Rows rows_of(const Tensor& t) {
  return {t.data, t.stride[0], t.stride[1], t.stride[2], static_cast<int32_t>(t.shape[3] / kCopyGrain)};
}

// A [B, T, heads, size] copy of 16-bit elements in the workspace, in rows of `row` elements.
struct RowCopy {
  uint16_t* data = nullptr;
  int64_t heads = 0, size = 0, row = 0;

  RowCopy() = default;
  RowCopy(const Problem& p, int64_t of_heads, int64_t of_size, int64_t grain, Workspace* workspace)
      : heads(of_heads), size(of_size), row(ceil_div(of_size, grain) * grain) {
    data = workspace->take<uint16_t>(p.B * p.T * heads * row);
  }
  bool used() const { return row > 0; }
  DeviceTensor tensor(const Problem& p) const { return workspace_tensor(data, p.dtype, p.B, p.T, heads, row); }
  Rows rows(const Problem& p) const {
    return {data, p.T * heads * row, heads * row, row, static_cast<int32_t>(row / kCopyGrain)};
  }
};

}  // namespace flash_qla::cuda::sm80
