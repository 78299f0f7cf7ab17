// One call of the fused Hopper forward on the caller's tensors: what the kernels read of them, and what of copies in
// the workspace. Links (links/links.cu) have no q and o.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include "cuda/common/launch.h"
#include "cuda/sm90/chunk_fwd/launch.h"
#include "cuda/sm90/chunk_fwd/listed.h"
#include "cuda/sm90/chunk_fwd/prepare.h"
#include "cuda/sm90/common/sizes.h"

namespace flash_qla::cuda::sm90::fwd {

inline constexpr int64_t kMatrix = int64_t{kHeadDim} * kHeadDim;  // elements of a state

inline bool on_16_bytes(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

// Whether dimensions 0 and 1 of [B, T, ..] are one dimension of B * T rows in memory; their stride then.
inline bool one_token_stride(const Tensor& t, int64_t* stride) {
  const int64_t B = t.shape[0], T = t.shape[1];
  *stride = T > 1 ? t.stride[1] : t.stride[0];
  return B == 1 || T == 1 || t.stride[0] == T * t.stride[1];
}

// A [B, T, H, 128] tensor as the kernel addresses it.
struct TokenRows {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
};

// Rows of 128 elements side by side, every row on a 16-byte boundary, tokens at one distance, nothing repeated: what
// the copy engine takes.
inline bool copy_engine_takes(const Tensor& t, TokenRows* rows) {
  constexpr int64_t kMostStride = int64_t{1} << 39;  // elements: the engine's strides are below 2^40 bytes
  const int64_t heads = t.shape[2];
  rows->data = t.data;
  if (!one_token_stride(t, &rows->token_stride)) return false;
  rows->head_stride = t.stride[2];
  // The stride of a dimension of one index means nothing and may be anything: the engine wants a legal one.
  if (t.shape[0] * t.shape[1] <= 1) rows->token_stride = heads * kHeadDim;
  if (heads == 1) rows->head_stride = kHeadDim;
  for (const int64_t stride : {rows->token_stride, rows->head_stride}) {
    if (stride % 8 != 0 || stride <= 0 || stride >= kMostStride) return false;
  }
  return t.stride[3] == 1 && on_16_bytes(t);
}

// g or beta as the kernel reads it: float32, tokens at one distance, no stride beyond its limit.
inline bool reads_gates(const Tensor& t, int64_t* token_stride) {
  return dtype(t) == DType::kFloat32 && one_token_stride(t, token_stride) &&
         std::max(std::abs(*token_stride), std::abs(t.stride[2])) <= kLargestGateStride;
}

// [.., 128, 128] matrices, each contiguous and on a 16-byte boundary.
inline bool takes_states(const Tensor& t) {
  const int64_t grain = 16 / size_of(dtype(t));
  for (int i = 0; i < 2; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % grain != 0) return false;
  }
  return t.stride[3] == 1 && t.stride[2] == kHeadDim && on_16_bytes(t);
}

inline bool contiguous(const Tensor& t) {
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.stride[i] != expected) return false;
    expected *= t.shape[i];
  }
  return on_16_bytes(t);
}

// The places of `carry` in the arguments of either call: [P, n] floats.
inline cp::Carry carry_of(const Tensor& carry, int64_t heads) {
  if (!present(carry)) return {};
  return cp::carry_at(carry.data, carry.shape[0] * carry.shape[1] * 4, carry.shape[0], heads);
}

// Zero where there is no such device: no sequence is cut then.
inline int multiprocessors(int device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); }

// One call: what the kernel reads of the caller's tensors and what of copies. The constructor lays out the workspace.
class Call {
 public:
  using Arguments = flash_qla_forward_arguments;

  Call(const Arguments& args, const Problem& p, Workspace* workspace) : p_(p) {
    set_sizes(args);
    take_offsets(args, workspace);
    // Without tensors a size is asked for that is to serve smaller calls as well.
    const bool smaller_too = args.q.data == nullptr;
    carry_ = carry_of(args.carry, p.Hv);
    kernel_.workspace = workspace->take<char>(static_cast<int64_t>(
        chunk_forward_workspace_size(kernel_, multiprocessors(args.options.device_index), smaller_too, carry_)));
    take_rows(args, workspace);
    take_gates(args, workspace);
    take_states(args, workspace);
    set_kept(args, workspace);
    kernel_.prepared = prepares(gates_, before_);
  }

  static std::string notes(const Arguments& args, const Problem& p) {
    Workspace workspace(nullptr);
    const Call call(args, p, &workspace);
    const Decision split =
        decide(call.kernel_, multiprocessors(args.options.device_index), call.carry_.chains != nullptr);
    return std::string("sequence split: ") + (split.planned ? "planned on the device" : "none") + " (" + split.reason +
           ")\n";
  }

  // As the kernels read the call; good after prepare().
  const Args& kernel() const { return kernel_; }

  // Makes what the kernels read and the caller has not as they read it.
  Status prepare(cudaStream_t stream) const {
    if (offsets_copy_ != nullptr) {
      const size_t bytes = kernel_.cu_seqlens_are_64_bit ? sizeof(int64_t) : sizeof(int32_t);
      FLASH_QLA_RETURN_IF_ERROR(
          cuda_status(cudaMemcpy2DAsync(offsets_copy_, bytes, given_offsets_.data,
                                        static_cast<size_t>(given_offsets_.stride[0]) * bytes, bytes,
                                        static_cast<size_t>(p_.N + 1), cudaMemcpyDeviceToDevice, stream),
                      "copying cu_seqlens"));
    }
    return launch_prepare(gates_, before_, stream);
  }

  Status run(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(prepare(stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_list_starts(kernel_, listed_, stream));
    FLASH_QLA_RETURN_IF_ERROR(
        cuda_status(launch_chunk_forward(kernel_, Variant::kAuto, stream, carry_), "the sm90 chunk forward"));
    FLASH_QLA_RETURN_IF_ERROR(launch_listed_states(kernel_, listed_, stream));
    return launch_prepare(GateCopy{}, after_, stream);
  }

 private:
  void set_sizes(const Arguments& args) {
    kernel_.num_tokens = p_.B * p_.T;
    kernel_.dense_length = p_.T;
    kernel_.num_sequences = static_cast<int32_t>(p_.N);
    kernel_.num_key_heads = static_cast<int32_t>(p_.Hq);
    kernel_.num_value_heads = static_cast<int32_t>(p_.Hv);
    kernel_.state_v_first = args.options.state_v_first != 0;
    kernel_.type = p_.dtype;
    kernel_.scale = static_cast<float>(p_.scale);
    kernel_.split = static_cast<Mode>(args.options.cp_mode);
    kernel_.force_split = args.options.force_intra_cp;
    kernel_.decay_threshold = decay_threshold(args.options);
  }

  // The kernels read offsets side by side.
  void take_offsets(const Arguments& args, Workspace* workspace) {
    if (!p_.varlen) return;
    given_offsets_ = args.cu_seqlens;
    kernel_.cu_seqlens = args.cu_seqlens.data;
    kernel_.cu_seqlens_are_64_bit = dtype(args.cu_seqlens) == DType::kInt64;
    if (p_.N == 0 || args.cu_seqlens.stride[0] == 1) return;
    offsets_copy_ = workspace->take<char>((p_.N + 1) * size_of(dtype(args.cu_seqlens)));
    if (offsets_copy_ != nullptr) kernel_.cu_seqlens = offsets_copy_;
  }

  // None of an absent tensor. The rows of `t` where the copy engine takes them, else those of a copy that `copy` says
  // how to make.
  TokenRows rows_or_copy(const Tensor& t, bool normalize, bool is_output, Workspace* workspace, RowCopy* copy) {
    TokenRows rows;
    if (!present(t)) return rows;
    const bool direct = copy_engine_takes(t, &rows);
    const int64_t heads = t.shape[2];
    // Without tokens there may be no memory: any address does.
    if (kernel_.num_tokens == 0) return {kernel_.workspace, heads * kHeadDim, kHeadDim};
    if (direct && !normalize) return rows;
    void* data = workspace->take<uint16_t>(kernel_.num_tokens * heads * kHeadDim);
    const DeviceTensor made = workspace_tensor(data, p_.dtype, p_.B, p_.T, heads, kHeadDim);
    *copy = is_output ? RowCopy{made, device_tensor(t), p_.B, p_.T, heads, false}
                      : RowCopy{device_tensor(t), made, p_.B, p_.T, heads, normalize};
    return {data, heads * kHeadDim, kHeadDim};
  }

  void take_rows(const Arguments& args, Workspace* workspace) {
    const bool normalize = args.options.use_qk_l2norm_in_kernel != 0;
    const TokenRows q = rows_or_copy(args.q, normalize, false, workspace, &before_[0]);
    const TokenRows k = rows_or_copy(args.k, normalize, false, workspace, &before_[1]);
    const TokenRows v = rows_or_copy(args.v, false, false, workspace, &before_[2]);
    const TokenRows o = rows_or_copy(args.o, false, true, workspace, &after_[0]);
    kernel_.q = q.data;
    kernel_.k = k.data;
    kernel_.v = v.data;
    kernel_.o = o.data;
    kernel_.q_token_stride = q.token_stride, kernel_.q_head_stride = q.head_stride;
    kernel_.k_token_stride = k.token_stride, kernel_.k_head_stride = k.head_stride;
    kernel_.v_token_stride = v.token_stride, kernel_.v_head_stride = v.head_stride;
    kernel_.o_token_stride = o.token_stride, kernel_.o_head_stride = o.head_stride;
  }

  void take_gates(const Arguments& args, Workspace* workspace) {
    gates_ = {device_gates(args, false), nullptr, nullptr, p_.B, p_.T, p_.Hv};
    const auto take = [&](const Tensor& t, bool activated, const float** data, int64_t* token_stride,
                          int64_t* head_stride) -> float* {
      if (!present(t)) return nullptr;
      if (!activated && reads_gates(t, token_stride)) {
        *data = static_cast<const float*>(t.data);
        *head_stride = t.stride[2];
        return nullptr;
      }
      float* copy = workspace->take<float>(kernel_.num_tokens * p_.Hv);
      *data = copy;
      *token_stride = p_.Hv;
      *head_stride = 1;
      return copy;
    };
    gates_.log_decay =
        take(args.g, args.options.use_gate_in_kernel != 0, &kernel_.g, &kernel_.g_token_stride, &kernel_.g_head_stride);
    gates_.beta = take(args.beta, args.options.use_beta_sigmoid_in_kernel != 0, &kernel_.beta,
                       &kernel_.beta_token_stride, &kernel_.beta_head_stride);
  }

  // [N, Hv, 128, 128] in place, or in a contiguous copy.
  StateSet states_or_copy(const Tensor& t, bool is_output, Workspace* workspace, RowCopy* copy) {
    StateSet set;
    if (!present(t)) return set;
    set.type = dtype(t);
    set.slots = t.shape[0];
    set.data = t.data;
    set.slot_stride = t.stride[0];
    set.head_stride = t.stride[1];
    if (!sm90::fwd::takes_states(t) && t.shape[0] > 0) {
      set.data = workspace->take<char>(t.shape[0] * p_.Hv * kMatrix * size_of(dtype(t)));
      set.slot_stride = p_.Hv * kMatrix;
      set.head_stride = kMatrix;
      const DeviceTensor made = workspace_tensor(set.data, dtype(t), t.shape[0], p_.Hv, kHeadDim, kHeadDim);
      *copy = is_output ? RowCopy{made, device_tensor(t), t.shape[0], p_.Hv, kHeadDim, false}
                        : RowCopy{device_tensor(t), made, t.shape[0], p_.Hv, kHeadDim, false};
    }
    return set;
  }

  void take_states(const Arguments& args, Workspace* workspace) {
    kernel_.initial = states_or_copy(args.initial_state, false, workspace, &before_[3]);
    kernel_.final_state = states_or_copy(args.final_state, true, workspace, &after_[1]);
    if (!present(args.state_pool)) return;
    StateSet pool;
    // A pool without slots may have no memory; its rows are skipped all the same.
    pool.data = args.state_pool.data != nullptr ? args.state_pool.data : kernel_.workspace;
    pool.slot_stride = args.state_pool.stride[0];
    pool.head_stride = kMatrix;
    pool.slots = args.state_pool.shape[0];
    pool.null_index = args.null_index;
    pool.type = dtype(args.state_pool);
    kernel_.initial = kernel_.final_state = pool;
    set_indices(args.initial_state_indices, &kernel_.initial);
    set_indices(present(args.final_state_indices) ? args.final_state_indices : args.initial_state_indices,
                &kernel_.final_state);
    if (present(args.has_initial_state)) {
      kernel_.has_initial_state = static_cast<const uint8_t*>(args.has_initial_state.data);
      kernel_.has_initial_state_stride = args.has_initial_state.stride[0];
    }
  }

  static void set_indices(const Tensor& t, StateSet* set) {
    set->indices = t.data;
    set->index_stride = t.stride[0];
    set->indices_are_64_bit = dtype(t) == DType::kInt64;
  }

  // What is kept beside o and the final states.
  void set_kept(const Arguments& args, Workspace* workspace) {
    if (present(args.g_cumsum)) kernel_.g_cumsum = static_cast<float*>(args.g_cumsum.data);
    if (present(args.A)) kernel_.a = args.A.data;
    if (present(args.h)) {
      kernel_.h = args.h.data;
      kernel_.h_rows = args.h.shape[0];
      if (!contiguous(args.h)) {
        kernel_.h = workspace->take<uint16_t>(kernel_.h_rows * p_.Hv * kMatrix);
        after_[2] = {workspace_tensor(kernel_.h, p_.dtype, kernel_.h_rows, p_.Hv, kHeadDim, kHeadDim),
                     device_tensor(args.h),
                     kernel_.h_rows,
                     p_.Hv,
                     kHeadDim,
                     false};
      }
    }
    if (args.checkpoint_every > 0) {
      kernel_.checkpoints = args.checkpoints.data;
      kernel_.checkpoint_rows = args.checkpoints.shape[0];
      kernel_.checkpoint_type = dtype(args.checkpoints);
      kernel_.checkpoint_cu_starts = args.checkpoint_cu_starts.data;
      kernel_.checkpoint_starts_stride = args.checkpoint_cu_starts.stride[0];
      kernel_.checkpoint_starts_are_64_bit = dtype(args.checkpoint_cu_starts) == DType::kInt64;
      // A longer sequence than any has no such state.
      kernel_.checkpoint_every_chunks =
          static_cast<int32_t>(std::min<int64_t>(args.checkpoint_every / kChunk, INT32_MAX));
    }
    if (present(args.checkpoint_offsets)) {
      // The workspace is that of either way: it serves smaller calls as well.
      take_listed(args, kernel_, workspace, &listed_);
      const int64_t entries = args.checkpoint_offsets.shape[0];
      if (writes_listed_states(kernel_, entries, multiprocessors(args.options.device_index),
                               carry_.chains != nullptr)) {
        kernel_.num_listed = static_cast<int32_t>(entries);
        kernel_.listed_offsets = args.checkpoint_offsets.data;
        kernel_.listed_offsets_stride = args.checkpoint_offsets.stride[0];
        kernel_.listed_offsets_are_64_bit = dtype(args.checkpoint_offsets) == DType::kInt64;
        kernel_.listed_slots = args.checkpoint_indices.data;
        kernel_.listed_slots_stride = args.checkpoint_indices.stride[0];
        kernel_.listed_slots_are_64_bit = dtype(args.checkpoint_indices) == DType::kInt64;
        listed_.entries = 0;
        return;
      }
      kernel_.start_lists = listed_.lists;
      kernel_.start_next = listed_.next;
      kernel_.start_states = listed_.states;
    }
  }

  const Problem& p_;
  Args kernel_;
  cp::Carry carry_;
  Tensor given_offsets_{};
  void* offsets_copy_ = nullptr;  // null: offsets are read where they are; and where only a size is asked for
  GateCopy gates_;
  ListedStates listed_;
  RowCopy before_[kMostRowCopies], after_[kMostRowCopies];
};

}  // namespace flash_qla::cuda::sm90::fwd
