// Path "cuda_layer", update.
#include "cuda/layer/conv_update.cuh"

#include <algorithm>

#include "cuda/layer/conv_params.cuh"
#include "cuda/layer/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_conv_arguments;

size_t no_workspace(const Arguments&, const ConvProblem&) { return 0; }

Status run(const Arguments& args, const ConvProblem& p, void*, void* raw_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  const ConvParams params = conv_params_of(args, p);
  const int32_t units = units_of<kUpdateChannels>(params.parts, params.num_parts);
  const bool is_short = p.W <= kShortWindow && p.L <= kShortWindow && !present(args.num_accepted_tokens) &&
                        !present(args.cache_seqlens) && !present(args.draft_states);
  int most = 0;  // channels of a unit
  for (int i = 0; i < params.num_parts; ++i) {
    const ConvPart& part = params.parts[i];
    most = std::max(most, part.l2norm ? part.dim : std::min(part.dim, kUpdateChannels));
  }
  const auto blocks_of = [&](int64_t rows) { return ceil_div(rows * units, kUpdateThreads / 32); };
  const int64_t blocks = blocks_of(p.N);
  const bool is_narrow = most <= kUpdateChannels;
  const auto kernel = is_short && is_narrow              ? conv_update_kernel<4, kShortWindow, true>
                      : is_short                         ? conv_update_kernel<8, kShortWindow, true>
                      : is_narrow && p.W <= kShortWindow ? conv_update_kernel<4, kShortWindow, false>
                                                         : conv_update_kernel<8, FLASH_QLA_MAX_CONV_WIDTH, false>;
  // In blocks of their own, which run beside the others: a step of one sequence waits for each access to memory.
  const int64_t of_gates = ceil_div(p.B * p.T * p.gate_heads, kUpdateThreads);
  FLASH_QLA_RETURN_IF_ERROR(launch_kernel("conv_update", kernel, blocks + of_gates, kUpdateThreads, 0, stream,
                                          allows_overlap(args.options.device_index), params, units, blocks));
  if (!p.varlen) return Status();
  return launch("conv_zero_outside", conv_zero_outside_kernel, blocks_of(p.T), kUpdateThreads, 0, stream, params,
                units);
}

}  // namespace
}  // namespace cuda

const ConvPath kCudaConvUpdate = {"cuda_layer",      FLASH_QLA_CUDA,     false,
                                  cuda::reject_conv, cuda::no_workspace, cuda::run};

}  // namespace flash_qla
