// Path "sm80", chunked backward: bf16 and fp16, every head dimension from 5 on, on every GPU from compute capability
// 8.0. Key heads go through in groups where all at once would take too much scratch.
#include <algorithm>

#include "cuda/common/few_tokens.h"
#include "cuda/common/heads.h"
#include "cuda/generic/last_tokens.cuh"
#include "cuda/paths.h"
#include "cuda/sm80/call.h"

namespace flash_qla {
namespace cuda::sm80 {

namespace {

using Arguments = flash_qla_backward_arguments;

std::string reject(const Arguments& args, const Problem& p) {
  if (std::string reason = reject_any(args.options, p); !reason.empty()) return reason;
  if (p.T == 0 || p.N == 0) return "needs tokens and sequences";
  // Numbers of blocks and tokens are 32-bit.
  constexpr int64_t kMost = INT32_MAX;
  if (p.B * p.T > kMost || 2 * p.N * p.Hv > kMost / ceil_div(p.V, kStrip) || p.chunk_bound * p.Hv > kMost) {
    return "needs fewer than 2^31 tokens, chunks times value heads, and sequences times value heads and an eighth of "
           "the value columns";
  }
  for (const Tensor* t : {&args.g, &args.beta, &args.initial_state, &args.dht, &args.dh0, &args.dg, &args.dbeta}) {
    if (present(*t) && !is_float(dtype(*t))) return "needs gates, states and their gradients in fp32, bf16 or fp16";
  }
  if (wants_float32(args.options, p)) return "needs more than 64 tokens";
  return {};
}

// The backward of some heads.
class HeadsBackward : Call<Arguments> {
 public:
  // Lays out the workspace. `whole`: the call, which decides what is copied, so that all of its groups have the same
  // scratch.
  HeadsBackward(const Arguments& whole, const Arguments& args, const Problem& p, Workspace* workspace)
      : Call(whole, args, p, workspace),
        d_o_(p, whole.d_o, args.d_o, false, kCopyGrain, workspace),
        dv_(p, whole.dv, args.dv, false, kStoreGrain, workspace),
        prepare_(prepare_params(device_gates(args, args.g_is_cumsum != 0))),
        passes_(pass_params(best_strips(p, 2 * p.N * p.Hv, 0, true, sms_).of_a_block)),
        gradients_(params_of<GradientsParams>()) {
    const int64_t items = p.chunk_bound * p.Hv, columns = padded_values(p.V), tokens = p.B * p.T;
    passes_.reverse_records = prepare_.reverse_records = workspace->take<ReverseRecord>(items * kStepsPerChunk);
    gradients_.gates = prepare_.chunk_gates = workspace->take<ChunkGates>(items);
    gradients_.d_o = passes_.d_o = d_o_.rows;
    passes_.dv = dv_.rows;
    passes_.dv_columns = static_cast<int32_t>(dv_.columns);
    passes_.dht = states(args.dht);
    passes_.dh0 = states(args.dh0);
    passes_.reverse_blocks = static_cast<uint32_t>(p.N * p.Hv * passes_.blocks_per_head);
    for (const Tensor* t : {&args.dq, &args.dk, &args.dg, &args.dbeta, &args.dA_log, &args.ddt_bias}) {
      wants_parts_ |= present(*t);
    }
    if (!wants_parts_) return;
    ChunkMatrices& matrices = passes_.matrices;
    for (char** states : {&matrices.states, &matrices.gradients}) {
      *states = workspace->take<char>(items * padded_keys(p.K) * columns * 2);
    }
    for (char** errors : {&matrices.errors, &matrices.d_errors}) {
      *errors = workspace->take<char>(items * kChunkSize * columns * 2);
    }
    gradients_.matrices = matrices;
    // Through the norm in place, or with more keys than a block has at once from fp32 parts.
    const bool by_parts = (normalizes_ || present(whole.q_inverse_norm)) && padded_keys(p.K) > kMostKeysAtOnce;
    const auto take_keys = [&](const Tensor& of_whole, const Tensor& t, const Tensor& norms, TokenRows* rows) {
      KeyGradients keys{};
      if (!by_parts) *rows = TokenRows(p, of_whole, t, false, kPairGrain, workspace);
      keys.rows = rows->rows;
      if (by_parts && present(t)) keys.parts = workspace->take<float>(tokens * p.Hq * p.K);
      keys.inverse_norms = !normalizes_ || by_parts ? device_tensor(norms)
                                                    : workspace_tensor(workspace->take<float>(tokens * p.Hq),
                                                                       DType::kFloat32, p.B, p.T, p.Hq, 1);
      return keys;
    };
    gradients_.dq = take_keys(whole.dq, args.dq, args.q_inverse_norm, &dq_);
    gradients_.dk = take_keys(whole.dk, args.dk, args.k_inverse_norm, &dk_);
    gradients_.d_log_decay = workspace->take<float>(tokens * p.Hv);
    gradients_.d_beta = workspace->take<float>(tokens * p.Hv);
    gradients_.value_blocks = static_cast<int32_t>(columns / 8);
    gradients_.starts_from_zero = !present(args.initial_state);
    gate_sums_ = workspace->take<double>(gate_sum_scratch(p));
    if (has_last_tokens(p, args.dht)) last_tokens_ = workspace->take<float>(last_tokens_scratch(p));
  }

  Status run(cudaStream_t stream) const {
    const auto fill_keys = [&](const TokenRows& rows, const KeyGradients& keys) {
      return rows.fill(p_, stream, normalizes_, static_cast<float*>(keys.inverse_norms.data));
    };
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args_.cu_seqlens, p_, sequences_, stream));
    FLASH_QLA_RETURN_IF_ERROR(fill_keys(q_, gradients_.dq));
    FLASH_QLA_RETURN_IF_ERROR(fill_keys(k_, gradients_.dk));
    FLASH_QLA_RETURN_IF_ERROR(v_.fill(p_, stream));
    FLASH_QLA_RETURN_IF_ERROR(d_o_.fill(p_, stream));
    FLASH_QLA_RETURN_IF_ERROR(kernels_.backward_prepare(prepare_, prepare_blocks(prepare_, p_.chunk_bound), stream));
    const int64_t blocks = passes_.reverse_blocks;
    FLASH_QLA_RETURN_IF_ERROR(kernels_.passes(passes_, wants_parts_ ? 2 * blocks : blocks, stream));
    if (wants_parts_) FLASH_QLA_RETURN_IF_ERROR(kernels_.gradients(gradients_, p_.chunk_bound * p_.Hq, stream));
    if (last_tokens_ != nullptr) FLASH_QLA_RETURN_IF_ERROR(run_last_tokens(stream));
    return finish(stream);
  }

 private:
  static constexpr int64_t kPairGrain = 2;  // elements of one store of dq and dk
  static constexpr int64_t kMostKeysAtOnce = 128;

  Status run_last_tokens(cudaStream_t stream) const {
    auto params = params_of<LastTokensParams>();
    params.q = q_.copied ? q_.copy : device_tensor(args_.q);
    params.k = k_.copied ? k_.copy : device_tensor(args_.k);
    params.v = device_tensor(args_.v);
    params.d_o = device_tensor(args_.d_o);
    params.gates = prepare_.gates;
    params.initial_state = passes_.initial_state;
    params.dht = passes_.dht;
    params.states = {reinterpret_cast<const uint16_t*>(passes_.matrices.states), gradients_.value_blocks,
                     padded_keys(p_.K) / 8};
    params.scratch = last_tokens_;
    params.d_log_decay = gradients_.d_log_decay;
    params.d_beta = gradients_.d_beta;
    params.type = static_cast<int32_t>(p_.dtype);
    params.exact_short = has_exact_short(args_.options, p_);
    return launch_last_tokens(p_, params, stream);
  }

  // Gradients to where and as the caller wants them.
  Status finish(cudaStream_t stream) const {
    for (const TokenRows* rows : {&dq_, &dk_, &dv_}) {
      FLASH_QLA_RETURN_IF_ERROR(rows->hand_out(p_, sequences_, stream));
    }
    if (!wants_parts_) return Status();
    Problem keys = p_;  // the sums over a group are there already
    keys.Hv = p_.Hq;
    keys.group = 1;
    FLASH_QLA_RETURN_IF_ERROR(
        finish_keys<float>(args_, keys, sequences_, gradients_.dq.parts, gradients_.dk.parts, stream));
    const GateGradients gates{device_tensor(args_.dg), device_tensor(args_.dbeta), device_tensor(args_.dA_log),
                              device_tensor(args_.ddt_bias)};
    return launch_finish_gates<float>(p_, sequences_, prepare_.gates, gradients_.d_log_decay, gradients_.d_beta, gates,
                                      gate_sums_, stream);
  }

  TokenRows d_o_, dv_, dq_, dk_;
  PrepareParams prepare_;
  PassParams passes_;
  GradientsParams gradients_;
  bool wants_parts_ = false;
  double* gate_sums_ = nullptr;
  float* last_tokens_ = nullptr;
};

size_t bytes_for(const Arguments& args, const Problem& p, int64_t key_heads) {
  return heads_bytes<HeadsBackward>(args, args, p, key_heads);
}

// Where all heads together would take more scratch than that they go in groups, one after another in the same scratch,
// of as many key heads as fit, but of no fewer than give both passes of one sequence 256 strips together.
constexpr int64_t kLeastStrips = 128;

int64_t least_heads(const Problem& p) {
  return std::min(p.Hq, ceil_div(kLeastStrips, p.group * ceil_div(p.V, kStrip)));
}

int64_t heads_at_once(const Arguments& args, const Problem& p) {
  if (bytes_for(args, p, p.Hq) <= most_scratch) return p.Hq;
  int64_t heads = least_heads(p);
  while (heads < p.Hq && bytes_for(args, p, heads + 1) <= most_scratch) ++heads;
  return ceil_div(p.Hq, ceil_div(p.Hq, heads));  // groups alike
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  const size_t all = bytes_for(args, p, p.Hq);
  // Not less than a smaller call that takes more of its heads together.
  return all <= most_scratch ? all : std::max(most_scratch, bytes_for(args, p, least_heads(p)));
}

Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
  return run_heads<HeadsBackward>(args, args, p, heads_at_once(args, p), memory, stream);
}

}  // namespace
}  // namespace cuda::sm80

const BackwardPath kSm80ChunkBackward = {
    "sm80", FLASH_QLA_CUDA, false, cuda::sm80::reject, cuda::sm80::workspace_size, cuda::sm80::run};

}  // namespace flash_qla
