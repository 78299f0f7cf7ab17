// A backward call around its core: scratch, the inputs as the core uses them, and the way of the gradients back through
// the options. The generic path and the oracle differ in the core alone.
#pragma once

#include "cuda/generic/forward_call.cuh"

namespace flash_qla::cuda {

template <class Real>
struct BackwardParams {
  SequenceTable sequences;
  TokenInputs in;              // x is v
  DeviceTensor d_o;            // [B, T, Hv, V]; absent: zero
  DeviceTensor dv;             // [B, T, Hv, V]; absent: not wanted
  DeviceStates initial_state;  // [N, Hv, K, V]; absent: zero
  DeviceStates dht;            // [N, Hv, K, V]; absent: zero
  DeviceStates dh0;            // [N, Hv, K, V]; absent: not wanted
  // The parts of each value head in the gradients of q and k, and the gradients of the clamped log decay and of the
  // effective beta. All NULL where none is wanted. Tokens outside all sequences are not written.
  Real *dq, *dk;               // [B * T, Hv, K]
  Real *d_log_decay, *d_beta;  // [B * T, Hv]
  double scale;
};

// Core: `using Real`, a constructor from (Problem, Workspace*) that takes its own scratch, and
// Status run(const Problem&, const BackwardParams<Real>&, cudaStream_t) const.
template <class Core>
class BackwardCall {
 public:
  using Arguments = flash_qla_backward_arguments;
  using Real = typename Core::Real;

  BackwardCall(const Arguments& args, const Problem& p, Workspace* workspace)
      : args_(args), p_(p), inputs_(args, args.g_is_cumsum != 0, p, workspace), core_(p, workspace) {
    const int64_t tokens = p.B * p.T;
    for (const Tensor* t : {&args.dq, &args.dk, &args.dg, &args.dbeta, &args.dA_log, &args.ddt_bias}) {
      wants_parts_ |= present(*t);
    }
    if (!wants_parts_) return;
    dq_ = workspace->take<Real>(tokens * p.Hv * p.K);
    dk_ = workspace->take<Real>(tokens * p.Hv * p.K);
    d_log_decay_ = workspace->take<Real>(tokens * p.Hv);
    d_beta_ = workspace->take<Real>(tokens * p.Hv);
    gate_sums_ = workspace->take<double>(gate_sum_scratch(p));
  }

  Status run(cudaStream_t stream) const {
    const bool v_first = args_.options.state_v_first != 0;
    BackwardParams<Real> params{};
    FLASH_QLA_RETURN_IF_ERROR(inputs_.prepare(args_, args_.v, p_, stream, &params.in));
    params.sequences = inputs_.sequences();
    params.d_o = device_tensor(args_.d_o);
    params.dv = device_tensor(args_.dv);
    params.initial_state = device_states(args_.initial_state, v_first);
    params.dht = device_states(args_.dht, v_first);
    params.dh0 = device_states(args_.dh0, v_first);
    params.dq = dq_;
    params.dk = dk_;
    params.d_log_decay = d_log_decay_;
    params.d_beta = d_beta_;
    params.scale = p_.scale;
    FLASH_QLA_RETURN_IF_ERROR(core_.run(p_, params, stream));

    const SequenceTable& sequences = params.sequences;
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences, params.dv, p_.Hv, p_.V, stream));
    if (!wants_parts_) return Status();
    FLASH_QLA_RETURN_IF_ERROR(finish_keys<Real>(args_, p_, sequences, dq_, dk_, stream));
    const GateGradients gradients{device_tensor(args_.dg), device_tensor(args_.dbeta), device_tensor(args_.dA_log),
                                  device_tensor(args_.ddt_bias)};
    return launch_finish_gates<Real>(p_, sequences, inputs_.gates(), d_log_decay_, d_beta_, gradients, gate_sums_,
                                     stream);
  }

 private:
  const Arguments& args_;
  const Problem& p_;
  PreparedInputs<Real> inputs_;
  Core core_;
  bool wants_parts_ = false;
  Real *dq_ = nullptr, *dk_ = nullptr, *d_log_decay_ = nullptr, *d_beta_ = nullptr;
  double* gate_sums_ = nullptr;
};

}  // namespace flash_qla::cuda
