// Path "cuda_layer", update.
#include "cuda/layer/conv_update.cuh"

#include <algorithm>

#include "cuda/layer/conv_params.cuh"
#include "cuda/layer/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_conv_arguments;

template <int kPer>
auto kernel_for(int width) {
  return width == 1   ? conv_update_kernel<kPer, 1>
         : width == 2 ? conv_update_kernel<kPer, 2>
         : width == 3 ? conv_update_kernel<kPer, 3>
         : width == 4 ? conv_update_kernel<kPer, 4>
                      : conv_update_kernel<kPer, FLASH_QLA_MAX_CONV_WIDTH>;
}

std::string reject(const Arguments&, const ConvProblem& p) {
  return p.dtype == DType::kFloat64 ? "needs fp32, bf16 or fp16" : "";
}
size_t no_workspace(const Arguments&, const ConvProblem&) { return 0; }

Status run(const Arguments& args, const ConvProblem& p, void*, void* raw_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  const ConvParams params = conv_params_of(args, p);
  int64_t units = 0;
  int most = 0;  // channels of a unit
  for (int i = 0; i < params.num_parts; ++i) {
    const ConvPart& part = params.parts[i];
    units += update_units_of(part);
    most = std::max(most, part.l2norm ? part.dim : std::min(part.dim, kUpdateChannels));
  }
  const int64_t blocks = ceil_div(p.N * units, kUpdateThreads / 32);
  const auto kernel = most <= 64    ? kernel_for<2>(params.width)
                      : most <= 128 ? kernel_for<4>(params.width)
                                    : kernel_for<8>(params.width);
  FLASH_QLA_RETURN_IF_ERROR(launch("conv_update", kernel, blocks + gate_blocks(params.gates), kUpdateThreads, 0, stream,
                                   params, units, blocks));
  if (!p.varlen) return Status();
  return launch("conv_zero_outside", conv_zero_outside_kernel, ceil_div(p.T * units, kStateThreads / 32), kStateThreads,
                0, stream, params, units, int64_t{0});
}

}  // namespace
}  // namespace cuda

const ConvPath kCudaConvUpdate = {"cuda_layer", FLASH_QLA_CUDA, false, cuda::reject, cuda::no_workspace, cuda::run};

}  // namespace flash_qla
