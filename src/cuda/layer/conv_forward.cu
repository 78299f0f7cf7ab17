// Path "cuda_layer", forward: the kernel with vectors where the channels lie side by side, else the one for anything;
// then the states that the sequences leave.
#include <algorithm>

#include "cuda/layer/conv_forward.cuh"
#include "cuda/layer/conv_forward_any.cuh"
#include "cuda/layer/conv_grid.h"
#include "cuda/layer/conv_launch.h"
#include "cuda/layer/conv_params.cuh"
#include "cuda/layer/conv_states.cuh"
#include "cuda/layer/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_conv_arguments;

bool takes_vectors(const Arguments& args, const ConvProblem& p) {
  if (p.W > 4 || present(args.seq_idx)) return false;
  for (int i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_part& part = args.parts[i];
    for (const Tensor* t : {&part.x, &part.y, &part.residual}) {
      if (present(*t) && !allows_token_vectors(*t)) return false;
    }
    if (present(part.inverse_norm) && !has_near_tokens(part.inverse_norm)) return false;
  }
  return true;
}

Status run_forward(const Arguments& args, const ConvProblem& p, cudaStream_t stream) {
  const ConvParams params = conv_params_of(args, p);
  if (takes_vectors(args, p)) {
    ConvGrid grid = conv_grid(params.parts, params.num_parts);
    for (int i = 0; i < args.num_parts; ++i) {
      if (has_vector_weights(args.parts[i].weight, p.dtype)) grid.vector_weights |= 1 << i;
    }
    const int64_t columns = grid.first_column[FLASH_QLA_MAX_CONV_PARTS];
    deal_out(p, columns, args.options.device_index, &grid);
    const auto launch_typed = p.dtype == DType::kBFloat16  ? launch_conv_forward<__nv_bfloat16>
                              : p.dtype == DType::kFloat16 ? launch_conv_forward<__half>
                                                           : launch_conv_forward<float>;
    const int64_t blocks = grid.gate_blocks + p.B * grid.runs_of_row * columns;
    FLASH_QLA_RETURN_IF_ERROR(launch_typed(params, grid, blocks, stream));
  } else {
    const int32_t units = units_of<kUnitChannels>(params.parts, params.num_parts);
    const int64_t blocks = ceil_div(p.B * p.T * units, kAnyThreads / 32);
    FLASH_QLA_RETURN_IF_ERROR(
        launch("conv_forward_any", conv_forward_any_kernel, blocks, kAnyThreads, 0, stream, params, units));
  }
  if (!params.sequences.writes_states) return Status();
  const int64_t blocks = ceil_div(p.channels, kStateThreads);
  return launch("conv_states", conv_states_kernel, p.N * blocks, kStateThreads, 0, stream, params, p.channels, blocks);
}

size_t no_workspace(const Arguments&, const ConvProblem&) { return 0; }

Status run(const Arguments& args, const ConvProblem& p, void*, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  return run_forward(args, p, static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace cuda

const ConvPath kCudaConvForward = {"cuda_layer",      FLASH_QLA_CUDA,     false,
                                   cuda::reject_conv, cuda::no_workspace, cuda::run};

}  // namespace flash_qla
