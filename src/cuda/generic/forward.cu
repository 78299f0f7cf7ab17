// Path "cuda_generic", forward: every shape and option of the contract, by the token recurrence.
#include "cuda/generic/forward_call.cuh"
#include "cuda/oracle/recurrence.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

std::string reject(const Arguments&, const Problem& p) {
  return p.dtype == DType::kFloat64 ? "computes in float32 (float64 needs path cuda_reference)" : std::string();
}

Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  Workspace workspace(memory);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!computes_in_double(p)) {
    return ForwardCall<float>(args, p, &workspace).run(launch_recurrent_forward, cuda_stream);
  }
  const auto in_double = [](const Problem& problem, const ForwardParams& params, cudaStream_t s) {
    return launch_oracle_forward(problem, params, nullptr, true, s);
  };
  return ForwardCall<double>(args, p, &workspace).run(in_double, cuda_stream);
}

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? workspace_bytes<ForwardCall<double>>(args, p)
                               : workspace_bytes<ForwardCall<float>>(args, p);
}

}  // namespace
}  // namespace cuda

const ForwardPath kCudaGenericChunkForward = {"cuda_generic", FLASH_QLA_CUDA,       false,
                                              cuda::reject,   cuda::workspace_size, cuda::run};
const ForwardPath kCudaGenericRecurrent = kCudaGenericChunkForward;

}  // namespace flash_qla
