// What the calls of both directions have in common on the host: what they take, their kernels, and their rows as the
// kernels read and write them, the caller's own where these suit, else copies.
#pragma once

#include <string>

#include "cuda/common/prepare.cuh"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/plan.h"

namespace flash_qla::cuda::sm80 {

inline const Kernels& kernels_for(DType type, int64_t K) {
  const int keys = padded_keys(K);
  return keys == 64    ? kernels_of<64>(type)
         : keys == 96  ? kernels_of<96>(type)
         : keys == 128 ? kernels_of<128>(type)
         : keys == 192 ? kernels_of<192>(type)
                       : kernels_of<256>(type);
}

// Why a call of either direction is not taken; empty: it may be.
inline std::string reject_any(const flash_qla_options& options, const Problem& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "needs bf16 or fp16";
  if (p.K <= kFewKeys) return "needs more than 4 key dimensions";
  if (p.dtype == DType::kBFloat16 && p.K < kLeastBf16Keys) return "needs at least 32 key dimensions in bf16";
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, options.device_index) < 8) {
    return "needs a GPU of compute capability 8.0 or newer";
  }
  return {};
}

// ---- rows

inline constexpr int64_t kCopyGrain = 8;   // 16-bit elements of one cp.async
inline constexpr int64_t kStoreGrain = 4;  // of one store of O or dV

// Whether all rows of [B, T, heads, size] have their elements side by side, begin on a boundary of `grain` elements and
// are a multiple of it long. The stride of a dimension of one index means nothing.
inline bool rows_fit(const Tensor& t, int64_t grain) {
  for (int i = 0; i < 3; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % grain != 0) return false;
  }
  return t.stride[3] == 1 && t.shape[3] % grain == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(grain * 2) == 0;
}

// Absent: null and without pieces.
inline Rows rows_of(const Tensor& t) {
  if (!present(t)) return {};
  return {t.data, t.stride[0], t.stride[1], t.stride[2], static_cast<int32_t>(t.shape[3] / kCopyGrain)};
}

// A [B, T, heads, size] copy of 16-bit elements in the workspace, in rows of `row` elements; or none, where the kernels
// read or write the caller's tensor.
struct RowCopy {
  uint16_t* data = nullptr;
  int64_t heads = 0, size = 0, row = 0;

  RowCopy() = default;
  // Of `t` where its rows do not suit, or `always`. `of_heads`: those that are computed together.
  RowCopy(const Problem& p, const Tensor& t, bool always, int64_t of_heads, int64_t grain, Workspace* workspace) {
    if (!present(t) || (!always && dtype(t) == p.dtype && rows_fit(t, grain))) return;
    heads = of_heads;
    size = t.shape[3];
    row = ceil_div(size, grain) * grain;
    data = workspace->take<uint16_t>(p.B * p.T * heads * row);
  }
  bool used() const { return row > 0; }
  DeviceTensor tensor(const Problem& p) const { return workspace_tensor(data, p.dtype, p.B, p.T, heads, row); }
  // Those that stand for the caller's `t`.
  Rows rows(const Problem& p, const Tensor& t) const {
    if (!used()) return rows_of(t);
    return {data, p.T * heads * row, heads * row, row, static_cast<int32_t>(row / kCopyGrain)};
  }
  int32_t columns(const Tensor& t) const { return static_cast<int32_t>(used() ? row : t.shape[3]); }

  // Fills the copy. `normalizes`: with rows divided by their norms.
  Status take(const Problem& p, const Tensor& t, bool normalizes, float* inverse_norms, cudaStream_t stream) const {
    if (!used()) return Status();
    const DeviceTensor from = device_tensor(t);
    return normalizes ? launch_normalize<float>(p, from, tensor(p), inverse_norms, stream, row)
                      : launch_copy_rows(p, heads, size, from, tensor(p), stream, row);
  }
  // What the kernels have left, to where the caller wants it; zero for tokens outside all sequences.
  Status hand_out(const Problem& p, const SequenceTable& sequences, const Tensor& t, cudaStream_t stream) const {
    const DeviceTensor out = device_tensor(t);
    if (used()) FLASH_QLA_RETURN_IF_ERROR(launch_copy_rows(p, heads, size, tensor(p), out, stream));
    return launch_zero_outside(p, sequences, out, t.shape[2], t.shape[3], stream);
  }
};

// ---- parameters that both directions fill alike

// What a kernel wants to know of the call.
template <class Params>
Params params_of(const Problem& p, const SequenceTable& sequences) {
  Params params{};
  params.sequences = sequences;
  params.K = static_cast<int32_t>(p.K);
  params.Hv = static_cast<int32_t>(p.Hv);
  params.group = static_cast<int32_t>(p.group);
  if constexpr (requires { params.V; }) params.V = static_cast<int32_t>(p.V);
  if constexpr (requires { params.Hq; }) params.Hq = static_cast<int32_t>(p.Hq);
  if constexpr (requires { params.scale; }) params.scale = static_cast<float>(p.scale);
  return params;
}

// Of `prepare`, but for rows and outputs. prepare_blocks(): of a call's chunks, or of as many parts.
inline PrepareParams prepare_params(const Problem& p, const SequenceTable& sequences, const Gates& gates,
                                    StepRecord* records, int multiprocessors) {
  auto params = params_of<PrepareParams>(p, sequences);
  params.gates = gates;
  params.records = records;
  params.heads_per_block = static_cast<int32_t>(prepared_heads(p.chunk_bound, p.Hq, p.group, multiprocessors));
  return params;
}
inline int64_t prepare_blocks(const PrepareParams& params, int64_t chunks) {
  return chunks * params.Hq * ceil_div(params.group, params.heads_per_block);
}

// [rows, Hv] states that kernels leave for each other: fp32, keys beside each other and padded as the kernels have
// them, values to whole strips.
inline DeviceStates take_padded_states(const Problem& p, int64_t rows, int64_t values, Workspace* workspace) {
  const int64_t keys = padded_keys(p.K), state = padded_values(values) * keys;
  return {workspace->take<float>(rows * p.Hv * state), p.Hv * state, state, 1, keys, rows,
          static_cast<int32_t>(DType::kFloat32)};
}

// Of the forward pass, over whole sequences from zero.
inline ForwardParams forward_params(const Problem& p, const SequenceTable& sequences, const StepRecord* records,
                                    int strips) {
  auto params = params_of<ForwardParams>(p, sequences);
  params.records = records;
  params.strips = strips;
  params.blocks_per_head = static_cast<int32_t>(ceil_div(p.V, strips * kStrip));
  params.first_transition = INT64_MAX;
  return params;
}

// The same without what is kept on the way.
inline ForwardParams states_alone(const ForwardParams& params) {
  ForwardParams alone = params;
  alone.h = alone.checkpoints = alone.listed_states = {};
  alone.checkpoint_every = 0;
  alone.listed = {};
  alone.keeps_states = false;
  return alone;
}

}  // namespace flash_qla::cuda::sm80
