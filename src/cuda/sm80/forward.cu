// Path "sm80", chunked forward: bf16 and fp16, every head dimension from 5 on, on every GPU from compute
// capability 8.0.
#include "cuda/paths.h"
#include "cuda/sm80/call.h"
#include "cuda/sm80/listed.cuh"

namespace flash_qla {
namespace cuda::sm80 {
namespace {

using Arguments = flash_qla_forward_arguments;

std::string reject(const Arguments& args, const Problem& p) {
  // Numbers of blocks are 32-bit.
  constexpr int64_t kMost = INT32_MAX;
  if ((p.N + p.chunk_bound) * p.Hv > kMost / ceil_div(FLASH_QLA_MAX_HEAD_DIM, kStrip) / 2) {
    return "needs fewer than 2^26 sequences and chunks times value heads";
  }
  return reject_any(args.options, p);
}

class ForwardCall : Call<Arguments> {
 public:
  // Lays out the workspace.
  ForwardCall(const Arguments& args, const Problem& p, Workspace* workspace)
      : Call(args, args, p, workspace),
        o_(p, args.o, args.o, false, kStoreGrain, workspace),
        // Without tensors a size is asked for that is to serve smaller calls as well.
        split_(plan_split(p, args.options, sms_, args.q.data == nullptr)),
        listed_(take_listed(args, p, workspace)),
        prepare_(prepare_params(device_gates(args, false))),
        pass_(pass_params(split_.strips)) {
    static_cast<ForwardStates&>(pass_) = forward_states(args);
    prepare_.pool_indices = pass_.pool_indices;
    prepare_.g_cumsum = device_tensor(args.g_cumsum);
    prepare_.A = device_tensor(args.A);
    // Rows of q and k that suit are normalised by `prepare`; others are copied before, and normalised on that occasion.
    const auto normalize = [&](const TokenRows& keys, Rows* rows, uint16_t** normal) {
      if (!keys.copied || !rows_fit(keys.tensor, kCopyGrain)) return;
      *rows = keys.rows_of(keys.tensor.data, keys.tensor.stride);
      *normal = static_cast<uint16_t*>(keys.copy.data);
    };
    normalize(q_, &prepare_.q, &prepare_.normal_q);
    normalize(k_, &prepare_.k, &prepare_.normal_k);
    prepare_.row_elements = static_cast<int32_t>(q_.columns);  // of both copies
    pass_.o = o_.rows;
    pass_.o_columns = static_cast<int32_t>(o_.columns);
    pass_.listed = listed_.lists;
    pass_.listed_states = listed_.states;
    pass_.keeps_states = present(args.h) || args.checkpoint_every > 0 || listed_.entries > 0;
    pass_.rule = split_.rule;
    if (split_.rule.least_chunks == 0) return;
    prepare_.decays = workspace->take<float>(p.chunk_bound * p.Hv);
    pass_.starts = take_padded_states(p, split_.rows, p.V, workspace);
    transitions_ = take_padded_states(p, split_.rows, padded_keys(p.K), workspace);
  }

  static std::string notes(const Arguments& args, const Problem& p) {
    Workspace workspace(nullptr);
    const SplitPlan split = ForwardCall(args, p, &workspace).split_;
    return "strips of 16 value columns: " + std::to_string(p.N * p.Hv * ceil_div(p.V, kStrip)) + ", " +
           std::to_string(split.strips) +
           " in a block\nsequence split: " + (split.rule.least_chunks > 0 ? "planned on the device" : "none") + " (" +
           split.reason + ")\n";
  }

  Status run(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args_.cu_seqlens, p_, sequences_, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_list_tokens(p_, sequences_, pass_.pool_indices, listed_, stream));
    if (prepare_.normal_q == nullptr) FLASH_QLA_RETURN_IF_ERROR(q_.fill(p_, stream, normalizes_));
    if (prepare_.normal_k == nullptr) FLASH_QLA_RETURN_IF_ERROR(k_.fill(p_, stream, normalizes_));
    FLASH_QLA_RETURN_IF_ERROR(kernels_.prepare(prepare_, prepare_blocks(prepare_, p_.chunk_bound), stream));

    FLASH_QLA_RETURN_IF_ERROR(v_.fill(p_, stream));
    const int64_t blocks_per_part = p_.Hv * pass_.blocks_per_head;
    if (split_.rule.least_chunks > 0) {
      // States at the segments' ends and transitions beside each other; then the states at their starts.
      const PassParams local = for_segments();
      const int64_t transitions = split_.parts * p_.Hv * local.transition_blocks_per_head;
      FLASH_QLA_RETURN_IF_ERROR(kernels_.states(local, local.first_transition + transitions, stream));
      FLASH_QLA_RETURN_IF_ERROR(kernels_.scan(local, p_.N * p_.Hv * ceil_div(p_.V, kStrip), stream));
    }
    FLASH_QLA_RETURN_IF_ERROR(kernels_.forward(pass_, split_.parts * blocks_per_part, stream));
    if (listed_.entries > 0) {
      PrepareParams parts = for_parts(prepare_, listed_);
      parts.q = q_.rows;
      parts.k = k_.rows;
      FLASH_QLA_RETURN_IF_ERROR(kernels_.prepare(parts, prepare_blocks(parts, listed_.entries), stream));
      FLASH_QLA_RETURN_IF_ERROR(kernels_.states(for_parts(pass_, listed_), listed_.entries * blocks_per_part, stream));
    }

    FLASH_QLA_RETURN_IF_ERROR(o_.hand_out(p_, sequences_, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences_, prepare_.A, p_.Hv, kChunkSize, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences_, prepare_.g_cumsum, p_.Hv, 1, stream));
    return launch_zero_unused_h(p_, sequences_, pass_.pool_indices, pass_.h, stream);
  }

 private:
  // The parameters of the pass over segments for their states alone.
  PassParams for_segments() const {
    PassParams params = states_alone(pass_);
    params.transitions = transitions_;
    params.decays = prepare_.decays;
    params.decay_threshold = decay_threshold(args_.options);
    params.strips = split_.state_strips;
    params.blocks_per_head = static_cast<int32_t>(ceil_div(p_.V, params.strips * kStrip));
    params.transition_blocks_per_head = static_cast<int32_t>(ceil_div(padded_keys(p_.K), params.strips * kStrip));
    params.first_transition = split_.parts * p_.Hv * params.blocks_per_head;
    return params;
  }

  TokenRows o_;
  SplitPlan split_;
  ListedTokens listed_;
  PrepareParams prepare_;
  PassParams pass_;
  DeviceStates transitions_{};
};

}  // namespace
}  // namespace cuda::sm80

using cuda::run_call, cuda::workspace_bytes, cuda::sm80::ForwardCall;
const ForwardPath kSm80ChunkForward = {"sm80",
                                       FLASH_QLA_CUDA,
                                       false,
                                       cuda::sm80::reject,
                                       workspace_bytes<ForwardCall>,
                                       run_call<ForwardCall>,
                                       ForwardCall::notes};

}  // namespace flash_qla
