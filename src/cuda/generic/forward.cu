// Path "cuda_generic", forward: every shape and option of the contract, by the token recurrence.
#include "cuda/generic/chunk_outputs.cuh"
#include "cuda/generic/prepare.cuh"
#include "cuda/generic/recurrent_forward.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

std::string reject(const Arguments&, const Problem& p) {
  return p.dtype == DType::kFloat64 ? "computes in float32 (float64 needs path cuda_reference)" : std::string();
}

// The arrays that a call keeps in its workspace.
struct Scratch {
  Scratch(const Arguments& args, const Problem& p, Workspace* workspace) {
    sequences = take_sequences(p, workspace);
    if (args.options.use_qk_l2norm_in_kernel) {
      const int64_t bytes = p.B * p.T * p.Hq * p.K * size_of(p.dtype);
      q = workspace->take<char>(bytes);
      k = workspace->take<char>(bytes);
    }
    if (prepares_gates(args)) {
      log_decay = workspace->take<float>(p.B * p.T * p.Hv);
      beta = workspace->take<float>(p.B * p.T * p.Hv);
    }
    if (present(args.checkpoint_offsets)) {
      lists.indices = device_tensor(args.checkpoint_indices);
      lists.first = workspace->take<int32_t>(p.B * p.T);
      lists.next = workspace->take<int32_t>(args.checkpoint_offsets.shape[0]);
    }
  }

  static bool prepares_gates(const Arguments& args) {
    return args.options.use_gate_in_kernel || args.options.use_beta_sigmoid_in_kernel;
  }

  SequenceTable sequences{};
  char *q = nullptr, *k = nullptr;  // normalised, [B, T, Hq, K] in the inputs' dtype
  float *log_decay = nullptr, *beta = nullptr;  // [B, T, Hv]
  CheckpointLists lists{};
};

size_t workspace_size(const Arguments& args, const Problem& p) {
  Workspace workspace(nullptr);
  Scratch(args, p, &workspace);
  return workspace.bytes();
}

Status run(const Arguments& args, const Problem& p, void* memory, void* cuda_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
  Workspace workspace(memory);
  const Scratch scratch(args, p, &workspace);
  FLASH_QLA_RETURN_IF_ERROR(plan_sequences(args.cu_seqlens, p, scratch.sequences, stream));

  const Gates gates = device_gates(args, false);
  TokenInputs in{device_tensor(args.q),
                 device_tensor(args.k),
                 device_tensor(args.v),
                 gates.g,
                 gates.beta,
                 static_cast<int32_t>(p.K),
                 static_cast<int32_t>(p.V),
                 static_cast<int32_t>(p.Hv),
                 static_cast<int32_t>(p.group)};
  if (args.options.use_qk_l2norm_in_kernel) {
    const DeviceTensor q = workspace_tensor(scratch.q, p.dtype, p.B, p.T, p.Hq, p.K);
    const DeviceTensor k = workspace_tensor(scratch.k, p.dtype, p.B, p.T, p.Hq, p.K);
    FLASH_QLA_RETURN_IF_ERROR(launch_normalize<float>(p, in.q, q, stream));
    FLASH_QLA_RETURN_IF_ERROR(launch_normalize<float>(p, in.k, k, stream));
    in.q = q;
    in.k = k;
  }
  if (Scratch::prepares_gates(args)) {
    FLASH_QLA_RETURN_IF_ERROR(
        launch_prepare_gates<float>(p, scratch.sequences, gates, scratch.log_decay, scratch.beta, stream));
    in.g = workspace_tensor(scratch.log_decay, DType::kFloat32, p.B, p.T, p.Hv, 1);
    in.beta = workspace_tensor(scratch.beta, DType::kFloat32, p.B, p.T, p.Hv, 1);
  }

  const bool v_first = args.options.state_v_first != 0;
  ForwardParams params{};
  params.sequences = scratch.sequences;
  params.in = in;
  params.o = device_tensor(args.o);
  params.scale = static_cast<float>(p.scale);
  params.pool_indices = pool_indices(args);
  params.pool = device_states(args.state_pool, v_first);
  params.initial_state = device_states(args.initial_state, v_first);
  params.final_state = device_states(args.final_state, v_first);
  params.h = device_states(args.h, v_first);
  params.checkpoint_every = args.checkpoint_every;
  params.checkpoints = device_states(args.checkpoints, v_first);
  params.checkpoint_starts = device_tensor(args.checkpoint_cu_starts);
  params.lists = scratch.lists;
  FLASH_QLA_RETURN_IF_ERROR(launch_checkpoint_lists(args.checkpoint_offsets, p.B * p.T, scratch.lists, stream));
  FLASH_QLA_RETURN_IF_ERROR(launch_recurrent_forward(p, params, stream));

  FLASH_QLA_RETURN_IF_ERROR(launch_zero_outside(p, scratch.sequences, params.o, p.Hv, p.V, stream));
  FLASH_QLA_RETURN_IF_ERROR(launch_zero_unused_h(p, scratch.sequences, params.pool_indices, params.h, stream));
  FLASH_QLA_RETURN_IF_ERROR(launch_gate_cumsum<float>(p, scratch.sequences, params.pool_indices, gates,
                                                      device_tensor(args.g_cumsum), stream));
  return launch_chunk_inverse<float>(p, scratch.sequences, params.pool_indices, in.k, in.beta, device_tensor(args.A),
                                     stream);
}

}  // namespace
}  // namespace cuda

const ForwardPath kCudaGenericChunkForward = {"cuda_generic", FLASH_QLA_CUDA,       false,
                                              cuda::reject,   cuda::workspace_size, cuda::run};
const ForwardPath kCudaGenericRecurrent = kCudaGenericChunkForward;

}  // namespace flash_qla
