// What the calls of both directions have in common on the host: what they take, their kernels, and their rows as the
// kernels read and write them, the caller's own where these suit, else copies.
#pragma once

#include <string>

#include "cuda/common/prepare.cuh"
#include "cuda/sm80/params.h"
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

// A [B, T, heads, size] tensor of a call, and its rows as the kernels read or write them: its own, or those of a copy
// of 16-bit elements in the workspace. Absent: null and without pieces.
struct TokenRows {
  Tensor tensor{};
  bool copied = false;
  DeviceTensor copy{};
  int64_t columns = 0;  // of a row
  Rows rows{};

  TokenRows() = default;
  // Copied where rows do not suit, or `always`. `whole`: the tensor with the heads that are computed at other times as
  // well; either all of them are copied or none.
  TokenRows(const Problem& p, const Tensor& whole, const Tensor& t, bool always, int64_t grain, Workspace* workspace)
      : tensor(t) {
    if (!present(t)) return;
    copied = always || dtype(whole) != p.dtype || !rows_fit(whole, grain);
    columns = copied ? ceil_div(t.shape[3], grain) * grain : t.shape[3];
    if (copied) {
      uint16_t* data = workspace->take<uint16_t>(p.B * p.T * t.shape[2] * columns);
      copy = workspace_tensor(data, p.dtype, p.B, p.T, t.shape[2], columns);
    }
    rows = copied ? rows_of(copy.data, copy.stride) : rows_of(t.data, t.stride);
  }
  Rows rows_of(const void* data, const int64_t* stride) const {
    return {data, stride[0], stride[1], stride[2], static_cast<int32_t>(columns / kCopyGrain)};
  }

  // Fills the copy. `normalizes`: with rows divided by their norms.
  Status fill(const Problem& p, cudaStream_t stream, bool normalizes = false, float* inverse_norms = nullptr) const {
    if (!copied) return Status();
    const DeviceTensor from = device_tensor(tensor);
    return normalizes ? launch_normalize<float>(p, from, copy, inverse_norms, stream, columns)
                      : launch_copy_rows(p, tensor.shape[2], tensor.shape[3], from, copy, stream, columns);
  }
  // What the kernels have left, to where the caller wants it; zero for tokens outside all sequences.
  Status hand_out(const Problem& p, const SequenceTable& sequences, cudaStream_t stream) const {
    const DeviceTensor to = device_tensor(tensor);
    const int64_t heads = tensor.shape[2], size = tensor.shape[3];
    if (copied) FLASH_QLA_RETURN_IF_ERROR(launch_copy_rows(p, heads, size, copy, to, stream));
    return launch_zero_outside(p, sequences, to, heads, size, stream);
  }
};

// ---- a call

// [rows, Hv] states that kernels leave for each other: fp32, keys beside each other and padded as the kernels have
// them, values to whole strips.
inline DeviceStates take_padded_states(const Problem& p, int64_t rows, int64_t values, Workspace* workspace) {
  const int64_t keys = padded_keys(p.K), state = padded_values(values) * keys;
  return {workspace->take<float>(rows * p.Hv * state), p.Hv * state, state, 1, keys, rows,
          static_cast<int32_t>(DType::kFloat32)};
}

// The parameters of a pass without what is kept on the way.
inline PassParams states_alone(const PassParams& params) {
  PassParams alone = params;
  alone.h = alone.checkpoints = alone.listed_states = {};
  alone.checkpoint_every = 0;
  alone.listed = {};
  alone.keeps_states = false;
  return alone;
}

// What a call of either direction begins with.
template <class Arguments>
class Call {
 protected:
  // `whole`: the call of which these are some heads.
  Call(const Arguments& whole, const Arguments& args, const Problem& p, Workspace* workspace)
      : args_(args),
        p_(p),
        kernels_(kernels_for(p.dtype, p.K)),
        normalizes_(args.options.use_qk_l2norm_in_kernel != 0),
        sms_(device_attribute(cudaDevAttrMultiProcessorCount, args.options.device_index)),
        sequences_(take_sequences(p, workspace)),
        records_(workspace->take<StepRecord>(p.chunk_bound * p.Hv * kStepsPerChunk)),
        q_(p, whole.q, args.q, normalizes_, kCopyGrain, workspace),
        k_(p, whole.k, args.k, normalizes_, kCopyGrain, workspace),
        v_(p, whole.v, args.v, false, kCopyGrain, workspace) {}

  DeviceStates states(const Tensor& t) const { return device_states(t, args_.options.state_v_first != 0); }

  // What a kernel wants to know of the call.
  template <class Params>
  Params params_of() const {
    Params params{};
    params.sequences = sequences_;
    params.K = static_cast<int32_t>(p_.K);
    params.Hv = static_cast<int32_t>(p_.Hv);
    params.group = static_cast<int32_t>(p_.group);
    if constexpr (requires { params.V; }) params.V = static_cast<int32_t>(p_.V);
    if constexpr (requires { params.Hq; }) params.Hq = static_cast<int32_t>(p_.Hq);
    if constexpr (requires { params.scale; }) params.scale = static_cast<float>(p_.scale);
    if constexpr (std::is_same_v<decltype(params.q), Rows>) {
      params.q = q_.rows;
      params.k = k_.rows;
    }
    return params;
  }

  // Of `prepare`, but for outputs. prepare_blocks(): of a call's chunks, or of as many parts.
  PrepareParams prepare_params(const Gates& gates) const {
    auto params = params_of<PrepareParams>();
    params.gates = gates;
    params.records = records_;
    params.heads_per_block = static_cast<int32_t>(prepared_heads(p_.chunk_bound, p_.Hq, p_.group, sms_));
    return params;
  }
  int64_t prepare_blocks(const PrepareParams& params, int64_t chunks) const {
    return chunks * p_.Hq * ceil_div(p_.group, params.heads_per_block);
  }

  // Of the forward pass, over whole sequences.
  PassParams pass_params(int strips) const {
    auto params = params_of<PassParams>();
    params.v = v_.rows;
    params.initial_state = states(args_.initial_state);
    params.records = records_;
    params.strips = strips;
    params.blocks_per_head = static_cast<int32_t>(ceil_div(p_.V, strips * kStrip));
    params.first_transition = INT64_MAX;
    return params;
  }

  const Arguments& args_;
  const Problem& p_;
  const Kernels& kernels_;
  const bool normalizes_;
  const int sms_;
  const SequenceTable sequences_;
  StepRecord* const records_;
  const TokenRows q_, k_, v_;
};

}  // namespace flash_qla::cuda::sm80
