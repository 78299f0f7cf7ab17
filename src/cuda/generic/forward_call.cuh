// A forward call around its recurrence: scratch, the inputs as the recurrence uses them, and what is handed out beside
// it. The generic path (Real = float) and the oracle (double) differ in the recurrence alone.
#pragma once

#include "cuda/common/prepare.cuh"
#include "cuda/generic/chunk_outputs.cuh"
#include "cuda/generic/recurrent_forward.cuh"

namespace flash_qla::cuda {

template <class Real>
constexpr DType dtype_of() {
  return std::is_same_v<Real, double> ? DType::kFloat64 : DType::kFloat32;
}

// What normalised rows of q and k are rounded to where a call is computed in Real: the inputs' dtype, but float32
// inputs that are computed in double keep the double.
template <class Real>
DType key_dtype(const Problem& p) {
  return std::is_same_v<Real, double> && p.dtype == DType::kFloat32 ? DType::kFloat64 : p.dtype;
}

// q, k, g and beta as the recurrence uses them: the caller's own tensors where no option is on, else copies. q may be
// absent.
template <class Real>
class PreparedInputs {
 public:
  template <class Arguments>
  PreparedInputs(const Arguments& args, bool g_is_cumsum, const Problem& p, Workspace* workspace) {
    l2norm_ = args.options.use_qk_l2norm_in_kernel != 0;
    has_q_ = present(args.q);
    activates_ = args.options.use_gate_in_kernel || args.options.use_beta_sigmoid_in_kernel || g_is_cumsum;
    gates_ = device_gates(args, g_is_cumsum);
    sequences_ = take_sequences(p, workspace);
    if (l2norm_) {
      const int64_t bytes = p.B * p.T * p.Hq * p.K * size_of(key_dtype<Real>(p));
      if (has_q_) q_ = workspace->take<char>(bytes);
      k_ = workspace->take<char>(bytes);
    }
    if (activates_) {
      log_decay_ = workspace->take<Real>(p.B * p.T * p.Hv);
      beta_ = workspace->take<Real>(p.B * p.T * p.Hv);
    }
  }

  // Fills the copies. `x` is what the recurrence takes beside them: v, or the gradient of o.
  template <class Arguments>
  Status prepare(const Arguments& args, const Tensor& x, const Problem& p, cudaStream_t stream, TokenInputs* in) const {
    FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args.cu_seqlens, p, sequences_, stream));
    *in = {device_tensor(args.q),
           device_tensor(args.k),
           device_tensor(x),
           gates_.g,
           gates_.beta,
           static_cast<int32_t>(p.K),
           static_cast<int32_t>(p.V),
           static_cast<int32_t>(p.Hv),
           static_cast<int32_t>(p.group)};
    if (l2norm_) {
      const DeviceTensor k = workspace_tensor(k_, key_dtype<Real>(p), p.B, p.T, p.Hq, p.K);
      FLASH_QLA_RETURN_IF_ERROR(launch_normalize<Real>(p, in->k, k, nullptr, stream));
      in->k = k;
      if (has_q_) {
        const DeviceTensor q = workspace_tensor(q_, key_dtype<Real>(p), p.B, p.T, p.Hq, p.K);
        FLASH_QLA_RETURN_IF_ERROR(launch_normalize<Real>(p, in->q, q, nullptr, stream));
        in->q = q;
      }
    }
    if (activates_) {
      FLASH_QLA_RETURN_IF_ERROR(launch_prepare_gates<Real>(p, sequences_, gates_, log_decay_, beta_, stream));
      in->g = workspace_tensor(log_decay_, dtype_of<Real>(), p.B, p.T, p.Hv, 1);
      in->beta = workspace_tensor(beta_, dtype_of<Real>(), p.B, p.T, p.Hv, 1);
    }
    return Status();
  }

  const Gates& gates() const { return gates_; }
  const SequenceTable& sequences() const { return sequences_; }

 private:
  bool l2norm_, has_q_, activates_;
  Gates gates_;
  SequenceTable sequences_;
  char *q_ = nullptr, *k_ = nullptr;             // [B, T, Hq, K] in key_dtype()
  Real *log_decay_ = nullptr, *beta_ = nullptr;  // [B, T, Hv]
};

// One forward call. The constructor lays out the workspace.
template <class Real>
class ForwardCall {
 public:
  using Arguments = flash_qla_forward_arguments;

  ForwardCall(const Arguments& args, const Problem& p, Workspace* workspace)
      : args_(args), p_(p), inputs_(args, false, p, workspace) {
    if (present(args.checkpoint_offsets)) {
      lists_.indices = device_tensor(args.checkpoint_indices);
      lists_.first = workspace->take<int32_t>(p.B * p.T);
      lists_.next = workspace->take<int32_t>(args.checkpoint_offsets.shape[0]);
    }
  }

  template <class Recurrence>
  Status run(Recurrence recurrence, cudaStream_t stream) const {
    ForwardParams params{};
    static_cast<ForwardStates&>(params) = forward_states(args_);
    FLASH_QLA_RETURN_IF_ERROR(inputs_.prepare(args_, args_.v, p_, stream, &params.in));
    params.sequences = inputs_.sequences();
    params.o = device_tensor(args_.o);
    params.scale = p_.scale;
    params.lists = lists_;
    FLASH_QLA_RETURN_IF_ERROR(launch_checkpoint_lists(args_.checkpoint_offsets, p_.B * p_.T, lists_, stream));
    FLASH_QLA_RETURN_IF_ERROR(recurrence(p_, params, stream));

    const SequenceTable& sequences = params.sequences;
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p_, sequences, params.o, p_.Hv, p_.V, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_zero_unused_h(p_, sequences, params.pool_indices, params.h, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_gate_cumsum<Real>(p_, sequences, params.pool_indices, inputs_.gates(),
                                                       device_tensor(args_.g_cumsum), stream));
    return launch_chunk_inverse<Real>(p_, sequences, params.pool_indices, params.in.k, params.in.beta,
                                      device_tensor(args_.A), stream);
  }

 private:
  const Arguments& args_;
  const Problem& p_;
  PreparedInputs<Real> inputs_;
  CheckpointLists lists_{};
};

}  // namespace flash_qla::cuda
