// Path "cuda_layer", backward: one pass with vectors where channels lie side by side and no state is concerned, else
// the kernels for anything; then the sums over tokens.
#include <algorithm>

#include "cuda/layer/conv_backward.cuh"
#include "cuda/layer/conv_backward_any.cuh"
#include "cuda/layer/conv_grid.h"
#include "cuda/layer/conv_launch.h"
#include "cuda/layer/conv_params.cuh"
#include "cuda/layer/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_conv_backward_arguments;

// Whether the gradients of u are wanted in memory, or a tensor is not laid out for vectors.
bool takes_vectors(const Arguments& args, const ConvProblem& p) {
  if (p.W > 4 || present(args.seq_idx)) return false;
  for (int i = 0; i < args.num_parts; ++i) {
    const flash_qla_conv_backward_part& part = args.parts[i];
    if (!present(part.dy) || present(part.dfinal_state) || present(part.dinitial_state)) return false;
    if (present(part.dresidual)) return false;
    if (present(part.initial_state) && dtype(part.initial_state) != p.dtype) return false;
    for (const Tensor* t : {&part.x, &part.dy, &part.dx}) {
      if (present(*t) && !allows_token_vectors(*t)) return false;
    }
  }
  return true;
}

// Tokens of a run, from shapes alone: sums over runs have the same bits on every GPU. So many that three blocks for
// each multiprocessor of a large GPU go through a call of usual length in one round; of long ones each sum ends after
// kMost.
int32_t backward_tokens(const ConvProblem& p, int64_t columns) {
  constexpr int64_t kBlocks = 3 * 132, kLeast = 16, kMost = 1024;
  return static_cast<int32_t>(std::clamp(ceil_div(p.B * p.T * columns, kBlocks), kLeast, kMost));
}

// The call's scratch and how it is computed.
struct Plan {
  bool vectors;
  ConvGrid grid{};
  int64_t runs, runs_of_row;
  float *du = nullptr, *sums;

  Plan(const Arguments& args, const ConvProblem& p, Workspace* workspace) : vectors(takes_vectors(args, p)) {
    const ConvBackwardParams params = conv_backward_params_of(args, p);
    grid = conv_grid(params.parts, params.num_parts);
    grid.run_tokens = backward_tokens(p, grid.first_column[FLASH_QLA_MAX_CONV_PARTS]);
    runs_of_row = ceil_div(p.T, vectors ? grid.run_tokens : kSumTokens);
    grid.runs_of_row = static_cast<int32_t>(runs_of_row);
    runs = p.B * runs_of_row;
    if (!vectors) du = workspace->take<float>(p.B * p.T * p.channels);
    sums = workspace->take<float>(runs * p.channels * (p.W + 1));
  }
};

std::string reject(const Arguments&, const ConvProblem& p) {
  return p.dtype == DType::kFloat64 ? "needs fp32, bf16 or fp16" : "";
}

Status run_any(const ConvBackwardParams& params, const ConvProblem& p, const Plan& plan, cudaStream_t stream) {
  const int32_t units = units_of<kUnitChannels>(params.parts, params.num_parts);
  const bool states = std::any_of(params.parts, params.parts + params.num_parts,
                                  [](const auto& part) { return part.dinitial_state.data != nullptr; });
  const int64_t blocks = ceil_div(p.B * p.T * units, kAnyThreads / 32), columns = ceil_div(p.channels, kStateThreads);
  FLASH_QLA_RETURN_IF_ERROR(launch("conv_du", conv_du_kernel, blocks, kAnyThreads, 0, stream, params, units));
  FLASH_QLA_RETURN_IF_ERROR(launch("conv_dx_any", conv_dx_any_kernel, blocks, kAnyThreads, 0, stream, params, units));
  FLASH_QLA_RETURN_IF_ERROR(launch("conv_sums_any", conv_sums_any_kernel, plan.runs * columns, kStateThreads, 0, stream,
                                   params, columns, plan.runs_of_row));
  if (!states) return Status();
  return launch("conv_dinitial", conv_dinitial_kernel, p.N * columns, kStateThreads, 0, stream, params, columns);
}

Status run(const Arguments& args, const ConvProblem& p, void* memory, void* raw_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  Workspace workspace(memory);
  Plan plan(args, p, &workspace);
  ConvBackwardParams params = conv_backward_params_of(args, p);
  params.du = plan.du;
  params.sums = plan.sums;
  params.runs = plan.runs;
  if (plan.vectors) {
    for (int i = 0; i < args.num_parts; ++i) {
      if (has_vector_weights(args.parts[i].weight, p.dtype)) plan.grid.vector_weights |= 1 << i;
    }
    const auto launch_typed = p.dtype == DType::kBFloat16  ? launch_conv_backward<__nv_bfloat16>
                              : p.dtype == DType::kFloat16 ? launch_conv_backward<__half>
                                                           : launch_conv_backward<float>;
    FLASH_QLA_RETURN_IF_ERROR(
        launch_typed(params, plan.grid, plan.runs * plan.grid.first_column[FLASH_QLA_MAX_CONV_PARTS], stream));
  } else {
    FLASH_QLA_RETURN_IF_ERROR(run_any(params, p, plan, stream));
  }
  const bool sums = std::any_of(args.parts, args.parts + args.num_parts,
                                [](const auto& part) { return present(part.dweight) || present(part.dbias); });
  if (!sums) return Status();
  const int64_t blocks = ceil_div(p.channels * (p.W + 1), kSumColumns);
  return launch_kernel("conv_add_sums", conv_add_sums_kernel, blocks, kSumThreads, 0, stream,
                       allows_overlap(args.options.device_index), params);
}

}  // namespace
}  // namespace cuda

const ConvBackwardPath kCudaConvBackward = {
    "cuda_layer", FLASH_QLA_CUDA, false, cuda::reject, cuda::workspace_bytes<cuda::Plan>, cuda::run};

}  // namespace flash_qla
