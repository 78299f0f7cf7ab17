// Path "sm80", chunked forward: bf16 and fp16, every head dimension from 5 on, on every GPU from compute
// capability 8.0.
#include <algorithm>
#include <string>

#include "cuda/common/prepare.cuh"
#include "cuda/paths.h"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/listed.h"
#include "cuda/sm80/plan.h"
#include "cuda/sm80/rows.h"
#include "cuda/sm80/scan.h"

namespace flash_qla {
namespace cuda::sm80 {
namespace {

using Arguments = flash_qla_forward_arguments;

std::string reject(const Arguments& args, const Problem& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "needs bf16 or fp16";
  if (p.K <= kFewKeys) return "needs more than 4 key dimensions";
  if (p.dtype == DType::kBFloat16 && p.K < kLeastBf16Keys) return "needs at least 32 key dimensions in bf16";
  // Numbers of blocks are 32-bit.
  constexpr int64_t kMost = INT32_MAX;
  if ((p.N + p.chunk_bound) * p.Hv > kMost / ceil_div(FLASH_QLA_MAX_HEAD_DIM, kStrip) / 2) {
    return "needs fewer than 2^26 sequences and chunks times value heads";
  }
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, args.options.device_index) < 8) {
    return "needs a GPU of compute capability 8.0 or newer";
  }
  return {};
}

// One call. The constructor lays out the workspace.
class Call {
 public:
  Call(const Arguments& args, const Problem& p, Workspace* workspace)
      : args_(args),
        p_(p),
        kernels_(kernels_for(p.dtype, p.K)),
        keys_(padded_keys(p.K)),
        columns_(ceil_div(p.V, kStrip) * kStrip) {
    sms_ = device_attribute(cudaDevAttrMultiProcessorCount, args.options.device_index);
    // Without tensors a size is asked for that is to serve smaller calls as well.
    split_ = plan_split(p, args.options, sms_, args.q.data == nullptr);
    sequences_ = take_sequences(p, workspace);
    records_ = workspace->take<StepRecord>(p.chunk_bound * p.Hv * kStepsPerChunk);
    if (split_.rule.least_chunks > 0) {
      decays_ = workspace->take<float>(p.chunk_bound * p.Hv);
      starts_ = workspace->take<float>(split_.rows * p.Hv * columns_ * keys_);
      transitions_ = workspace->take<float>(split_.rows * p.Hv * keys_ * keys_);
    }
    listed_ = take_listed(args, p, workspace);
    const bool normalizes = args.options.use_qk_l2norm_in_kernel != 0;
    if (normalizes || !rows_fit(args.q, kCopyGrain)) q_ = RowCopy(p, p.Hq, p.K, kCopyGrain, workspace);
    if (normalizes || !rows_fit(args.k, kCopyGrain)) k_ = RowCopy(p, p.Hq, p.K, kCopyGrain, workspace);
    if (!rows_fit(args.v, kCopyGrain)) v_ = RowCopy(p, p.Hv, p.V, kCopyGrain, workspace);
    if (!rows_fit(args.o, kStoreGrain)) o_ = RowCopy(p, p.Hv, p.V, kStoreGrain, workspace);
  }

  static size_t workspace_size(const Arguments& args, const Problem& p) {
    Workspace workspace(nullptr);
    Call(args, p, &workspace);
    return workspace.bytes();
  }

  static std::string notes(const Arguments& args, const Problem& p) {
    Workspace workspace(nullptr);
    const Call call(args, p, &workspace);
    const bool splits = call.split_.rule.least_chunks > 0;
    return "strips of 16 value columns: " + std::to_string(p.N * p.Hv * ceil_div(p.V, kStrip)) + ", " +
           std::to_string(call.split_.strips) +
           " in a block\nsequence split: " + (splits ? "planned on the device" : "none") + " (" + call.split_.reason +
           ")\n";
  }

  Status run(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args_.cu_seqlens, p_, sequences_, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_list_tokens(p_, sequences_, pool_indices(args_), listed_, stream));
    PrepareParams prepare = prepare_params();
    FLASH_QLA_RETURN_IF_ERROR(take_keys(args_.q, q_, &prepare.q, &prepare.normal_q, stream));
    FLASH_QLA_RETURN_IF_ERROR(take_keys(args_.k, k_, &prepare.k, &prepare.normal_k, stream));
    const int64_t blocks_per_chunk = p_.Hq * ceil_div(p_.group, prepare.heads_per_block);
    FLASH_QLA_RETURN_IF_ERROR(kernels_.prepare(prepare, p_.chunk_bound * blocks_per_chunk, stream));

    ForwardParams forward = forward_params();
    forward.q = prepare.normal_q != nullptr ? q_.rows(p_) : prepare.q;
    forward.k = prepare.normal_k != nullptr ? k_.rows(p_) : prepare.k;
    if (v_.used()) {
      FLASH_QLA_RETURN_IF_ERROR(
          launch_copy_rows(p_, p_.Hv, p_.V, device_tensor(args_.v), v_.tensor(p_), stream, v_.row));
    }
    const int64_t blocks_per_part = p_.Hv * forward.blocks_per_head;
    if (split_.rule.least_chunks > 0) {
      // States at the segments' ends and transitions beside each other; then the states at their starts.
      const ForwardParams local = for_segments(forward);
      const int64_t transitions = split_.parts * p_.Hv * local.transition_blocks_per_head;
      FLASH_QLA_RETURN_IF_ERROR(kernels_.states(local, local.first_transition + transitions, stream));
      FLASH_QLA_RETURN_IF_ERROR(launch_scan(p_, local, stream));
    }
    FLASH_QLA_RETURN_IF_ERROR(kernels_.forward(forward, split_.parts * blocks_per_part, stream));
    if (listed_.entries > 0) {
      PrepareParams parts = for_parts(prepare, listed_);
      parts.q = forward.q;
      parts.k = forward.k;
      FLASH_QLA_RETURN_IF_ERROR(kernels_.prepare(parts, listed_.entries * blocks_per_chunk, stream));
      FLASH_QLA_RETURN_IF_ERROR(
          kernels_.states(for_parts(forward, listed_, p_), listed_.entries * blocks_per_part, stream));
    }

    const DeviceTensor o = device_tensor(args_.o);
    if (o_.used()) FLASH_QLA_RETURN_IF_ERROR(launch_copy_rows(p_, p_.Hv, p_.V, o_.tensor(p_), o, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences_, o, p_.Hv, p_.V, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences_, prepare.A, p_.Hv, kChunkSize, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences_, prepare.g_cumsum, p_.Hv, 1, stream));
    return launch_zero_unused_h(p_, sequences_, forward.pool_indices, forward.h, stream);
  }

 private:
  PrepareParams prepare_params() const {
    PrepareParams params{};
    params.sequences = sequences_;
    params.pool_indices = pool_indices(args_);
    params.gates = device_gates(args_, false);
    params.g_cumsum = device_tensor(args_.g_cumsum);
    params.A = device_tensor(args_.A);
    params.records = records_;
    params.decays = decays_;
    params.scale = static_cast<float>(p_.scale);
    params.K = static_cast<int32_t>(p_.K);
    params.Hq = static_cast<int32_t>(p_.Hq);
    params.Hv = static_cast<int32_t>(p_.Hv);
    params.group = static_cast<int32_t>(p_.group);
    params.row_elements = static_cast<int32_t>(ceil_div(p_.K, kCopyGrain) * kCopyGrain);
    params.heads_per_block = static_cast<int32_t>(prepared_heads(p_.chunk_bound, p_.Hq, p_.group, sms_));
    return params;
  }

  ForwardParams forward_params() const {
    const bool v_first = args_.options.state_v_first != 0;
    ForwardParams params{};
    params.sequences = sequences_;
    params.pool_indices = pool_indices(args_);
    params.v = v_.used() ? v_.rows(p_) : rows_of(args_.v);
    params.o = o_.used() ? o_.rows(p_) : rows_of(args_.o);
    params.records = records_;
    params.pool = device_states(args_.state_pool, v_first);
    params.initial_state = device_states(args_.initial_state, v_first);
    params.final_state = device_states(args_.final_state, v_first);
    params.h = device_states(args_.h, v_first);
    params.checkpoints = device_states(args_.checkpoints, v_first);
    params.checkpoint_starts = device_tensor(args_.checkpoint_cu_starts);
    params.checkpoint_every = args_.checkpoint_every;
    params.listed = listed_.lists;
    params.listed_states = listed_.start_states(p_);
    params.K = static_cast<int32_t>(p_.K);
    params.V = static_cast<int32_t>(p_.V);
    params.Hv = static_cast<int32_t>(p_.Hv);
    params.group = static_cast<int32_t>(p_.group);
    params.o_columns = static_cast<int32_t>(o_.used() ? o_.row : p_.V);
    params.strips = split_.strips;
    params.blocks_per_head = static_cast<int32_t>(ceil_div(p_.V, params.strips * kStrip));
    params.keeps_states = present(args_.h) || args_.checkpoint_every > 0 || listed_.entries > 0;
    params.first_transition = INT64_MAX;
    if (split_.rule.least_chunks > 0) {
      params.rule = split_.rule;
      params.starts = {starts_, p_.Hv * columns_ * keys_, columns_ * keys_, 1, keys_, split_.rows, kFloat};
    }
    return params;
  }

  // The parameters of the pass over segments for their states alone.
  ForwardParams for_segments(const ForwardParams& forward) const {
    ForwardParams params = forward;
    // Those of a head one behind the other.
    params.transitions = {transitions_, keys_ * keys_, split_.rows * keys_ * keys_, 1, keys_, split_.rows, kFloat};
    params.decays = decays_;
    params.decay_threshold = decay_threshold(args_.options);
    params.strips = split_.state_strips;
    params.blocks_per_head = static_cast<int32_t>(ceil_div(p_.V, params.strips * kStrip));
    params.transition_blocks_per_head = static_cast<int32_t>(ceil_div(keys_, params.strips * kStrip));
    params.first_transition = split_.parts * p_.Hv * params.blocks_per_head;
    params.h = params.checkpoints = params.listed_states = {};
    params.checkpoint_every = 0;
    params.listed = {};
    params.keeps_states = false;
    return params;
  }

  // Rows of q or k as `prepare` reads them, and where it leaves them normalised. Rows that do not suit are copied
  // before, and then normalised on that occasion.
  Status take_keys(const Tensor& t, const RowCopy& copy, Rows* rows, uint16_t** normal, cudaStream_t stream) const {
    *rows = rows_of(t);
    if (!copy.used()) return Status();
    const bool normalizes = args_.options.use_qk_l2norm_in_kernel != 0;
    if (rows_fit(t, kCopyGrain)) {
      *normal = copy.data;
      return Status();
    }
    *rows = copy.rows(p_);
    return normalizes ? launch_normalize<float>(p_, device_tensor(t), copy.tensor(p_), nullptr, stream, copy.row)
                      : launch_copy_rows(p_, p_.Hq, p_.K, device_tensor(t), copy.tensor(p_), stream, copy.row);
  }

  static constexpr int32_t kFloat = static_cast<int32_t>(DType::kFloat32);

  const Arguments& args_;
  const Problem& p_;
  const Kernels& kernels_;
  int64_t keys_, columns_;  // of states of segments: padded
  int sms_;
  SplitPlan split_;
  SequenceTable sequences_;
  StepRecord* records_;
  float *decays_ = nullptr, *starts_ = nullptr, *transitions_ = nullptr;
  ListedTokens listed_;
  RowCopy q_, k_, v_, o_;  // not used: the caller's rows
};

Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  Workspace workspace(memory);
  return Call(args, p, &workspace).run(static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace cuda::sm80

const ForwardPath kSm80ChunkForward = {
    "sm80",          FLASH_QLA_CUDA,         false, cuda::sm80::reject, cuda::sm80::Call::workspace_size,
    cuda::sm80::run, cuda::sm80::Call::notes};

}  // namespace flash_qla
