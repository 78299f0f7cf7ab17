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
        dv_(p, whole.dv, args.dv, false, kStoreGrain, workspace) {
    for (const Tensor* t : {&args.dq, &args.dk, &args.dg, &args.dbeta, &args.dA_log, &args.ddt_bias}) {
      wants_parts_ |= present(*t);
    }
    const int64_t items = p.chunk_bound * p.Hv;
    const int64_t columns = padded_values(p.V);
    reverse_records_ = workspace->take<ReverseRecord>(items * kStepsPerChunk);
    gates_ = workspace->take<ChunkGates>(items);
    if (!wants_parts_) return;
    // Through the norm in place, or with more keys than a block has at once from fp32 parts.
    const bool by_parts = (normalizes_ || present(whole.q_inverse_norm)) && padded_keys(p.K) > kMostKeysAtOnce;
    const auto take_rows = [&](const Tensor& of_whole, const Tensor& t, TokenRows* rows, float** parts) {
      if (!by_parts) *rows = TokenRows(p, of_whole, t, false, kPairGrain, workspace);
      if (by_parts && present(t)) *parts = workspace->take<float>(p.B * p.T * p.Hq * p.K);
    };
    take_rows(whole.dq, args.dq, &dq_, &dq_parts_);
    take_rows(whole.dk, args.dk, &dk_, &dk_parts_);
    const auto norms = [&](const Tensor& given) {
      if (!normalizes_ || by_parts) return device_tensor(given);
      return workspace_tensor(workspace->take<float>(p.B * p.T * p.Hq), DType::kFloat32, p.B, p.T, p.Hq, 1);
    };
    q_inverse_norms_ = norms(args.q_inverse_norm);
    k_inverse_norms_ = norms(args.k_inverse_norm);
    for (char** states : {&states_, &gradients_}) {
      *states = workspace->take<char>(items * padded_keys(p.K) * columns * 2);
    }
    for (char** errors : {&errors_, &d_errors_}) *errors = workspace->take<char>(items * kChunkSize * columns * 2);
    d_log_decay_ = workspace->take<float>(p.B * p.T * p.Hv);
    d_beta_ = workspace->take<float>(p.B * p.T * p.Hv);
    gate_sums_ = workspace->take<double>(gate_sum_scratch(p));
    if (has_last_tokens(p, args.dht)) last_tokens_ = workspace->take<float>(last_tokens_scratch(p));
  }

  Status run(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args_.cu_seqlens, p_, sequences_, stream));
    FLASH_QLA_RETURN_IF_ERROR(q_.fill(p_, stream, normalizes_, static_cast<float*>(q_inverse_norms_.data)));
    FLASH_QLA_RETURN_IF_ERROR(k_.fill(p_, stream, normalizes_, static_cast<float*>(k_inverse_norms_.data)));
    FLASH_QLA_RETURN_IF_ERROR(v_.fill(p_, stream));
    FLASH_QLA_RETURN_IF_ERROR(d_o_.fill(p_, stream));

    PrepareParams prepare = prepare_params(gates());
    prepare.reverse_records = reverse_records_;
    prepare.chunk_gates = gates_;
    FLASH_QLA_RETURN_IF_ERROR(kernels_.backward_prepare(prepare, prepare_blocks(prepare, p_.chunk_bound), stream));
    FLASH_QLA_RETURN_IF_ERROR(run_passes(stream));
    if (wants_parts_) FLASH_QLA_RETURN_IF_ERROR(run_gradients(stream));
    if (last_tokens_ != nullptr) FLASH_QLA_RETURN_IF_ERROR(run_last_tokens(stream));
    return finish(stream);
  }

 private:
  static constexpr int64_t kPairGrain = 2;  // elements of one store of dq and dk
  static constexpr int64_t kMostKeysAtOnce = 128;

  Gates gates() const { return device_gates(args_, args_.g_is_cumsum != 0); }

  Status run_passes(cudaStream_t stream) const {
    PassParams params = pass_params(best_strips(p_, 2 * p_.N * p_.Hv, 0, true, sms_).of_a_block);
    params.states = states_;
    params.errors = errors_;
    params.reverse_records = reverse_records_;
    params.d_o = d_o_.rows;
    params.dv = dv_.rows;
    params.gradients = gradients_;
    params.d_errors = d_errors_;
    params.dht = states(args_.dht);
    params.dh0 = states(args_.dh0);
    params.dv_columns = static_cast<int32_t>(dv_.columns);
    const int64_t blocks = p_.N * p_.Hv * params.blocks_per_head;
    params.reverse_blocks = static_cast<uint32_t>(blocks);
    return kernels_.passes(params, wants_parts_ ? 2 * blocks : blocks, stream);
  }

  Status run_gradients(cudaStream_t stream) const {
    auto params = params_of<GradientsParams>();
    params.d_o = d_o_.rows;
    params.dq = dq_.rows;
    params.dk = dk_.rows;
    params.states = states_;
    params.gradients = gradients_;
    params.errors = errors_;
    params.d_errors = d_errors_;
    params.gates = gates_;
    params.q_inverse_norms = q_inverse_norms_;
    params.k_inverse_norms = k_inverse_norms_;
    params.dq_parts = dq_parts_;
    params.dk_parts = dk_parts_;
    params.d_log_decay = d_log_decay_;
    params.d_beta = d_beta_;
    params.value_blocks = static_cast<int32_t>(padded_values(p_.V) / 8);
    params.starts_from_zero = !present(args_.initial_state);
    return kernels_.gradients(params, p_.chunk_bound * p_.Hq, stream);
  }

  Status run_last_tokens(cudaStream_t stream) const {
    auto params = params_of<LastTokensParams>();
    params.q = q_.copied ? q_.copy : device_tensor(args_.q);
    params.k = k_.copied ? k_.copy : device_tensor(args_.k);
    params.v = device_tensor(args_.v);
    params.d_o = device_tensor(args_.d_o);
    params.gates = gates();
    params.initial_state = states(args_.initial_state);
    params.dht = states(args_.dht);
    params.states = {reinterpret_cast<const uint16_t*>(states_), static_cast<int32_t>(padded_values(p_.V) / 8),
                     padded_keys(p_.K) / 8};
    params.scratch = last_tokens_;
    params.d_log_decay = d_log_decay_;
    params.d_beta = d_beta_;
    params.type = static_cast<int32_t>(p_.dtype);
    params.exact_short = has_exact_short(args_.options, p_);
    return launch_last_tokens(p_, params, stream);
  }

  // Gradients to where and as the caller wants them.
  Status finish(cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(dv_.hand_out(p_, sequences_, stream));
    if (!wants_parts_) return Status();
    Problem keys = p_;  // the sums over a group are there already
    keys.Hv = p_.Hq;
    keys.group = 1;
    const auto finish_keys = [&](const Tensor& t, const TokenRows& rows, const float* parts, const Tensor& x,
                                 const Tensor& norm) {
      if (parts == nullptr) return rows.hand_out(p_, sequences_, stream);
      return launch_finish_keys<float>(keys, sequences_, parts, device_tensor(x), normalizes_, device_tensor(norm),
                                       device_tensor(t), stream);
    };
    FLASH_QLA_RETURN_IF_ERROR(finish_keys(args_.dq, dq_, dq_parts_, args_.q, args_.q_inverse_norm));
    FLASH_QLA_RETURN_IF_ERROR(finish_keys(args_.dk, dk_, dk_parts_, args_.k, args_.k_inverse_norm));
    const GateGradients gradients{device_tensor(args_.dg), device_tensor(args_.dbeta), device_tensor(args_.dA_log),
                                  device_tensor(args_.ddt_bias)};
    return launch_finish_gates<float>(p_, sequences_, gates(), d_log_decay_, d_beta_, gradients, gate_sums_, stream);
  }

  TokenRows d_o_, dv_, dq_, dk_;
  bool wants_parts_ = false;
  ReverseRecord* reverse_records_;
  ChunkGates* gates_;
  char *states_ = nullptr, *gradients_ = nullptr, *errors_ = nullptr, *d_errors_ = nullptr;
  DeviceTensor q_inverse_norms_{}, k_inverse_norms_{};
  float *dq_parts_ = nullptr, *dk_parts_ = nullptr;
  float *d_log_decay_ = nullptr, *d_beta_ = nullptr;
  double* gate_sums_ = nullptr;
  float* last_tokens_ = nullptr;
};

size_t bytes_for(const Arguments& args, const Problem& p, int64_t key_heads) {
  return workspace_bytes<HeadsBackward>(args, heads_of(args, p, 0, key_heads), problem_of(p, key_heads));
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
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const int64_t at_once = heads_at_once(args, p);
  for (int64_t first = 0; first < p.Hq; first += at_once) {
    const int64_t count = std::min(at_once, p.Hq - first);
    const Arguments part = heads_of(args, p, first, count);
    const Problem of_part = problem_of(p, count);
    Workspace workspace(memory);
    FLASH_QLA_RETURN_IF_ERROR(HeadsBackward(args, part, of_part, &workspace).run(static_cast<cudaStream_t>(stream)));
  }
  return Status();
}

}  // namespace
}  // namespace cuda::sm80

const BackwardPath kSm80ChunkBackward = {
    "sm80", FLASH_QLA_CUDA, false, cuda::sm80::reject, cuda::sm80::workspace_size, cuda::sm80::run};

}  // namespace flash_qla
