// Paths "cuda_generic" and "cuda_reference" of the two summaries.
#include "cuda/generic/links.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using ForwardArguments = flash_qla_chunk_summary_arguments;
using BackwardArguments = flash_qla_chunk_summary_backward_arguments;

// In float32 unless a head has few keys; `oracle`: in double, and nothing is forgotten.
bool in_double(const SummaryProblem& p, bool oracle) { return oracle || computes_in_double(p); }

template <class Arguments>
bool forgets(const Arguments& args, const SummaryProblem& p, bool oracle) {
  return !in_double(p, oracle) && may_forget(args.options, p.dtype);
}

template <class Real, class Arguments>
Status run_in(const Arguments& args, const SummaryProblem& p, bool oracle, void* memory, cudaStream_t stream) {
  constexpr bool kBackward = std::is_same_v<Arguments, BackwardArguments>;
  Workspace workspace(memory);
  const LinkCall<Real> call(args, p, forgets(args, p, oracle), &workspace);
  LinkParams params{};
  fill_link_params(args, &params);
  FLASH_QLA_RETURN_IF_ERROR(call.prepare(values_of(args), args.rows, &params, stream));
  FLASH_QLA_RETURN_IF_ERROR(launch_plan_links(p, params, kBackward, stream));
  if constexpr (std::is_same_v<Real, double>) {
    return kBackward ? launch_oracle_link_gradients(p, params, stream) : launch_oracle_link_states(p, params, stream);
  } else {
    return kBackward ? launch_link_gradients(p, params, stream) : launch_link_states(p, params, stream);
  }
}

template <class Arguments, bool kOracle>
Status run(const Arguments& args, const SummaryProblem& p, void* memory, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return in_double(p, kOracle) ? run_in<double>(args, p, kOracle, memory, cuda_stream)
                               : run_in<float>(args, p, kOracle, memory, cuda_stream);
}

template <class Arguments, bool kOracle>
size_t workspace_size(const Arguments& args, const SummaryProblem& p) {
  Workspace workspace(nullptr);
  if (in_double(p, kOracle)) {
    LinkCall<double>(args, p, false, &workspace);
  } else {
    LinkCall<float>(args, p, forgets(args, p, kOracle), &workspace);
  }
  return workspace.bytes();
}

template <class Arguments>
std::string reject(const Arguments&, const SummaryProblem& p) {
  return p.dtype == DType::kFloat64 ? "computes in float32 (float64 needs path cuda_reference)" : std::string();
}
template <class Arguments>
std::string accept(const Arguments&, const SummaryProblem&) {
  return {};
}

template <class Arguments, bool kOracle>
constexpr Path<Arguments, SummaryProblem> path() {
  return {kOracle ? "cuda_reference" : "cuda_generic",
          FLASH_QLA_CUDA,
          kOracle,
          kOracle ? accept<Arguments> : reject<Arguments>,
          workspace_size<Arguments, kOracle>,
          run<Arguments, kOracle>};
}

}  // namespace
}  // namespace cuda

const ChunkSummaryPath kCudaGenericChunkSummary = cuda::path<flash_qla_chunk_summary_arguments, false>();
const ChunkSummaryPath kCudaOracleChunkSummary = cuda::path<flash_qla_chunk_summary_arguments, true>();
const ChunkSummaryBackwardPath kCudaGenericChunkSummaryBackward =
    cuda::path<flash_qla_chunk_summary_backward_arguments, false>();
const ChunkSummaryBackwardPath kCudaOracleChunkSummaryBackward =
    cuda::path<flash_qla_chunk_summary_backward_arguments, true>();

}  // namespace flash_qla
