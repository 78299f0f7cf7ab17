// Path "cuda_generic", backward: the forward recurrence leaves errors and states at chunk boundaries, the reverse one
// gradients of them, and one kernel over all chunks makes the gradients of q, k, the gates and beta
// (chunk_gradients.cuh).
#include "cuda/generic/backward_call.cuh"
#include "cuda/generic/chunk_gradients.cuh"
#include "cuda/generic/recurrent_backward.cuh"
#include "cuda/oracle/recurrence.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_backward_arguments;

class GenericBackward {
 public:
  using Real = float;

  GenericBackward(const Problem& p, Workspace* workspace) {
    const int64_t values = p.B * p.T * p.Hv * p.V;
    const int64_t states = boundary_slots(p) * p.Hv * p.V * padded_keys(p.K);
    errors_ = workspace->take<float>(values);
    du_ = workspace->take<float>(values);
    states_ = {workspace->take<float>(states), padded_keys(p.K)};
    gradients_ = {workspace->take<float>(states), padded_keys(p.K)};
  }

  Status run(const Problem& p, const BackwardParams<float>& params, cudaStream_t stream) const {
    const bool wants_parts = params.dq != nullptr;
    ReverseParams reverse{};
    reverse.sequences = params.sequences;
    reverse.in = params.in;
    reverse.in.x = params.d_o;
    reverse.dv = params.dv;
    reverse.dht = params.dht;
    reverse.dh0 = params.dh0;
    reverse.scale = params.scale;
    if (wants_parts) {
      reverse.du = du_;
      reverse.gradients = gradients_;
    }
    FLASH_QLA_RETURN_IF_ERROR(launch_recurrent_backward(p, reverse, stream));
    if (!wants_parts) return Status();

    ForwardParams forward{};
    forward.sequences = params.sequences;
    forward.in = params.in;
    forward.in.q = DeviceTensor{};  // only o needs it
    forward.initial_state = params.initial_state;
    forward.errors = errors_;
    forward.boundaries = states_;
    FLASH_QLA_RETURN_IF_ERROR(launch_recurrent_forward(p, forward, stream));

    GradientParams gradients{};
    gradients.sequences = params.sequences;
    gradients.in = reverse.in;
    gradients.initial_state = params.initial_state;
    gradients.dht = params.dht;
    gradients.states = states_;
    gradients.gradients = gradients_;
    gradients.errors = workspace_tensor(errors_, DType::kFloat32, p.B, p.T, p.Hv, p.V);
    gradients.du = workspace_tensor(du_, DType::kFloat32, p.B, p.T, p.Hv, p.V);
    gradients.dq = params.dq;
    gradients.dk = params.dk;
    gradients.d_log_decay = params.d_log_decay;
    gradients.d_beta = params.d_beta;
    gradients.scale = params.scale;
    return launch_chunk_gradients(p, gradients, stream);
  }

 private:
  float *errors_, *du_;  // [B * T, Hv, V]
  BoundaryStates states_, gradients_;
};

std::string reject(const Arguments&, const Problem& p) {
  return p.dtype == DType::kFloat64 ? "computes in float32 (float64 needs path cuda_reference)" : std::string();
}

Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
  if (computes_in_double(p)) return run_oracle_backward(args, p, memory, stream);
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  Workspace workspace(memory);
  return BackwardCall<GenericBackward>(args, p, &workspace).run(static_cast<cudaStream_t>(stream));
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? oracle_backward_workspace(args, p)
                               : workspace_bytes<BackwardCall<GenericBackward>>(args, p);
}

}  // namespace
}  // namespace cuda

const BackwardPath kCudaGenericChunkBackward = {"cuda_generic", FLASH_QLA_CUDA,       false,
                                                cuda::reject,   cuda::workspace_size, cuda::run};

}  // namespace flash_qla
