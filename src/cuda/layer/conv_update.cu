// Path "cuda_layer", update.
#include <algorithm>

#include "cuda/layer/conv_params.cuh"
#include "cuda/layer/conv_step.cuh"
#include "cuda/layer/conv_update.cuh"
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
  int most = 0;  // channels of a unit
  bool is_short = p.W <= kShortWindow && p.L <= kShortWindow && !present(args.num_accepted_tokens) &&
                  !present(args.cache_seqlens) && !present(args.draft_states);
  bool is_step = p.T == 1 && !p.varlen && p.W == kShortWindow && p.L == kShortWindow;
  for (int i = 0; i < params.num_parts; ++i) {
    const ConvPart& part = params.parts[i];
    most = std::max(most, part.l2norm ? part.dim : std::min(part.dim, kUpdateChannels));
    for (const DeviceTensor* t : {&part.weight, &part.bias, &part.initial_state, &part.final_state, &part.y}) {
      is_short &= t->data == nullptr || t->dtype == part.x.dtype;
    }
    is_step &= is_step_part(part, size_of(p.dtype));
  }
  const bool overlaps = allows_overlap(args.options.device_index);
  // In blocks of their own, which run beside the others: a step of one sequence waits for each access to memory.
  const int64_t of_gates = ceil_div(p.B * p.T * p.gate_heads, kUpdateThreads);
  if (is_step && is_short) {
    const int64_t blocks_of_row = ceil_div(p.channels, kStepChannels * kUpdateThreads), blocks = p.N * blocks_of_row;
    return with_dtype(p.dtype, [&](auto value) {
      return launch_kernel("conv_step", conv_step_kernel<decltype(value)>, blocks + of_gates, kUpdateThreads, 0, stream,
                           overlaps, params, static_cast<int32_t>(p.channels), static_cast<int32_t>(blocks_of_row),
                           blocks);
    });
  }
  const bool is_narrow = most <= kUpdateChannels;
  const auto short_kernel = [&](auto value) {
    using T = decltype(value);
    return is_narrow ? conv_update_kernel<T, 4> : conv_update_kernel<T, 8>;
  };
  const auto kernel = is_short                           ? with_dtype(p.dtype, short_kernel)
                      : is_narrow && p.W <= kShortWindow ? conv_update_any_kernel<4, kShortWindow>
                                                         : conv_update_any_kernel<8, FLASH_QLA_MAX_CONV_WIDTH>;
  const int32_t units = units_of<kUpdateChannels>(params.parts, params.num_parts);
  const int64_t blocks = ceil_div(p.N * units, kUpdateThreads / 32);
  FLASH_QLA_RETURN_IF_ERROR(launch_kernel("conv_update", kernel, blocks + of_gates, kUpdateThreads, 0, stream, overlaps,
                                          params, units, blocks));
  if (!p.varlen) return Status();
  return launch("conv_zero_outside", conv_zero_outside_kernel, ceil_div(p.T * units, kUpdateThreads / 32),
                kUpdateThreads, 0, stream, params, units);
}

}  // namespace
}  // namespace cuda

const ConvPath kCudaConvUpdate = {"cuda_layer",      FLASH_QLA_CUDA,     false,
                                  cuda::reject_conv, cuda::no_workspace, cuda::run};

}  // namespace flash_qla
