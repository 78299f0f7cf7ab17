// Links of parts on a device: which tokens of which sequence make each part's link, and what it is to be. Every (part,
// value head) has a LinkPass, which one kernel writes and the passes read; nothing of it comes to the host.
#pragma once

#include "core/context_parallel.h"
#include "cuda/generic/forward_call.cuh"

namespace flash_qla::cuda {

// The pass of one (part, value head): tokens [from, to) of a row, in one direction or the other.
struct LinkPass {
  int32_t row;        // -1: no tokens at all, or nobody reads the link: it is zero
  int32_t from, to;   // tokens of the row, from its first
  int16_t starts;     // from the caller's state of the row, else from zero
  int16_t is_affine;  // forward: M is wanted
};

struct LinkParams {
  SequenceTable sequences;
  TokenInputs in;             // forward: x is v; backward: x is the gradient of o
  DeviceTensor rows;          // [P, 2]
  DeviceTensor crosses;       // [P] bool: leaves, or enters going backward
  DeviceTensor through;       // [P] bool
  DeviceTensor forward_kind;  // [P, Hv], backward
  DeviceStates given;         // [R, Hv, K, V] initial_state or dht; absent: zero
  DeviceTensor kind;          // [P, Hv] out
  DeviceStates S;             // [P, Hv, K, V] out: S, or R
  DeviceStates M;             // [P, Hv, K, K] out, forward
  LinkPass* passes;           // [P, Hv]
  // Of each chunk, sum g + sum log max(1, |1 - beta |k|^2|): [chunks, Hv]. NULL: nothing is forgotten.
  const float* log_norms;
  float threshold;
  int64_t P;
  double scale;
};
static_assert(std::is_trivially_copyable_v<LinkParams>);

// The log norms of the chunks of the parts' rows, which serve both directions.
Status launch_chunk_log_norms(const Problem& p, const LinkParams& params, float* log_norms, cudaStream_t stream);
// Kinds, and the passes.
Status launch_plan_links(const Problem& p, const LinkParams& params, bool backward, cudaStream_t stream);

// S, then M, by the recurrence in float32.
Status launch_link_states(const Problem& p, const LinkParams& params, cudaStream_t stream);
// R, by the reverse recurrence.
Status launch_link_gradients(const Problem& p, const LinkParams& params, cudaStream_t stream);

// The same in double (oracle/links.cu).
Status launch_oracle_link_states(const Problem& p, const LinkParams& params, cudaStream_t stream);
Status launch_oracle_link_gradients(const Problem& p, const LinkParams& params, cudaStream_t stream);

// What PreparedInputs reads of either operation's arguments.
struct LinkInputs {
  flash_qla_options options;
  Tensor q, k, g, beta, A_log, dt_bias, cu_seqlens;
};

inline LinkInputs link_inputs(const flash_qla_chunk_summary_arguments& a) {
  return {a.options, Tensor{}, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu_seqlens};
}
inline LinkInputs link_inputs(const flash_qla_chunk_summary_backward_arguments& a) {
  return {a.options, a.q, a.k, a.g, a.beta, a.A_log, a.dt_bias, a.cu_seqlens};
}

inline void fill_link_params(const flash_qla_chunk_summary_arguments& args, LinkParams* params) {
  params->crosses = device_tensor(args.leaves);
  params->through = device_tensor(args.through);
  params->given = device_states(args.initial_state, args.options.state_v_first != 0);
  params->kind = device_tensor(args.kind);
  params->S = device_states(args.S, false);
  params->M = device_states(args.M, false);
}
inline void fill_link_params(const flash_qla_chunk_summary_backward_arguments& args, LinkParams* params) {
  params->crosses = device_tensor(args.enters);
  params->through = device_tensor(args.through);
  params->forward_kind = device_tensor(args.forward_kind);
  params->given = device_states(args.dht, args.options.state_v_first != 0);
  params->kind = device_tensor(args.kind);
  params->S = device_states(args.R, false);
}

// What the recurrence takes beside keys, forward and backward.
inline const Tensor& values_of(const flash_qla_chunk_summary_arguments& args) { return args.v; }
inline const Tensor& values_of(const flash_qla_chunk_summary_backward_arguments& args) { return args.d_o; }

// One call of either operation; the constructor lays out the workspace. Real: what it is computed in.
template <class Real>
class LinkCall {
 public:
  template <class Arguments>
  LinkCall(const Arguments& args, const SummaryProblem& p, bool forgets, Workspace* workspace)
      : args_(link_inputs(args)), p_(p), inputs_(args_, false, p, workspace) {
    passes_ = workspace->take<LinkPass>(p.P * p.Hv);
    if (forgets) log_norms_ = workspace->take<float>(p.chunk_bound * p.Hv);
    forgets_ = forgets;
  }

  // Fills what does not depend on the direction, and the log norms. `x`: v, or the gradient of o.
  Status prepare(const Tensor& x, const Tensor& rows, LinkParams* params, cudaStream_t stream) const {
    FLASH_QLA_RETURN_IF_ERROR(inputs_.prepare(args_, x, p_, stream, &params->in));
    params->sequences = inputs_.sequences();
    params->rows = device_tensor(rows);
    params->passes = passes_;
    params->threshold = decay_threshold(args_.options);
    params->P = p_.P;
    params->scale = p_.scale;
    if (!forgets_) return Status();
    FLASH_QLA_RETURN_IF_ERROR(launch_chunk_log_norms(p_, *params, log_norms_, stream));
    params->log_norms = log_norms_;
    return Status();
  }

 private:
  LinkInputs args_;
  const SummaryProblem& p_;
  PreparedInputs<Real> inputs_;
  LinkPass* passes_ = nullptr;
  float* log_norms_ = nullptr;
  bool forgets_ = false;
};

}  // namespace flash_qla::cuda
