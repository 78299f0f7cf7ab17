// Path "cuda_layer": the gated norm.
#include "cuda/layer/norm.cuh"

#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/layer/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

constexpr int kLongestRow = 32 * kVector;  // that stays in a group's registers

NormRows norm_rows(const Tensor& t, const NormProblem& p) {
  if (!present(t)) return {};
  const RowView view = row_view(t);
  NormRows rows{t.data,      view.outer, view.middle, view.inner,
                view.column, 0,          1,           allows_vectors(t) && p.V % kVector == 0};
  // From the inside outwards: the step is that of the first dimension with several rows, and the others continue it.
  int64_t inside = 1;
  const auto add = [&](int64_t extent, int64_t stride) {
    if (extent == 1) return;
    if (inside == 1) rows.step = stride;
    if (stride != inside * rows.step) rows.is_even = 0;
    inside *= extent;
  };
  add(view.shape.inner, view.inner);
  add(view.shape.middle, view.middle);
  add(view.shape.outer, view.outer);
  return rows;
}

template <class Arguments>
NormParams common_params(const Arguments& args, const NormProblem& p) {
  NormParams params{};
  params.x = norm_rows(args.x, p);
  params.z = norm_rows(args.z, p);
  params.weight = device_tensor(args.weight);
  params.bias = device_tensor(args.bias);
  const RowShape shape = row_shape(args.x);
  params.extent_middle = std::max<int64_t>(1, shape.middle);
  params.extent_inner = std::max<int64_t>(1, shape.inner);
  params.rows = p.rows;
  params.eps = static_cast<float>(args.eps);
  params.V = static_cast<int32_t>(p.V);
  params.gate_first = args.gate_first != 0;
  params.silu = args.activation == FLASH_QLA_ACTIVATION_SILU;
  params.lanes = 1;
  while (params.lanes < 32 && params.lanes * kVector < p.V) params.lanes *= 2;
  return params;
}

// Calls f with a value of the dtype.
template <class Function>
Status with_dtype(DType type, Function&& f) {
  return type == DType::kBFloat16 ? f(__nv_bfloat16()) : type == DType::kFloat16 ? f(__half()) : f(float());
}

template <class Arguments>
std::string reject(const Arguments&, const NormProblem& p) {
  return p.dtype == DType::kFloat64 ? "needs fp32, bf16 or fp16" : "";
}
size_t no_workspace(const flash_qla_norm_gated_arguments&, const NormProblem&) { return 0; }

Status run(const flash_qla_norm_gated_arguments& args, const NormProblem& p, void*, void* raw_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  NormParams params = common_params(args, p);
  params.y = norm_rows(args.y, p);
  params.inverse_rms = device_tensor(args.inverse_rms);
  return with_dtype(p.dtype, [&](auto value) {
    using T = decltype(value);
    if (p.V > kLongestRow) {
      return launch("norm_gated_long", norm_gated_long_kernel<T>, ceil_div(p.rows, kNormThreads / 32), kNormThreads, 0,
                    stream, params, false);
    }
    // Four rows a group: enough for its loads to overlap those of the next block.
    const int64_t blocks = ceil_div(p.rows, int64_t{4} * (kNormThreads / params.lanes));
    return launch("norm_gated", norm_gated_kernel<T>, blocks, kNormThreads, 0, stream, params);
  });
}

// Blocks of the backward, each of which leaves a part of the sums: from shapes alone, so that bits are the same on
// every GPU; eight for each multiprocessor of a large one. Without rows one block leaves sums of zero.
int64_t backward_blocks(const NormProblem& p, int64_t rows_at_once) {
  constexpr int64_t kMost = 1056;
  return std::clamp(ceil_div(p.rows, rows_at_once), int64_t{1}, kMost);
}

struct BackwardPlan {
  bool is_long;
  int64_t blocks, step;  // parts of the sums over rows; rows of a part of long ones
  float *sums, *rms;     // NULL: not wanted
};

BackwardPlan plan_backward(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p, int lanes,
                           Workspace* workspace) {
  const bool is_long = p.V > kLongestRow, wants_sums = present(args.dweight) || present(args.dbias);
  const int64_t step = std::max<int64_t>(1, ceil_div(p.rows, 256));
  const int64_t blocks =
      is_long ? std::max<int64_t>(1, ceil_div(p.rows, step)) : backward_blocks(p, kNormThreads / lanes);
  float* const sums = wants_sums ? workspace->take<float>(blocks * 2 * p.V) : nullptr;
  float* const rms = wants_sums && is_long ? workspace->take<float>(p.rows) : nullptr;
  return {is_long, blocks, step, sums, rms};
}

size_t workspace_size(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p) {
  Workspace workspace(nullptr);
  plan_backward(args, p, common_params(args, p).lanes, &workspace);
  return workspace.bytes();
}

template <class T>
Status run_long(const NormParams& params, const NormProblem& p, const BackwardPlan& plan, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.rows, kNormThreads / 32);
  FLASH_QLA_RETURN_IF_ERROR(
      launch("norm_gated_long", norm_gated_long_kernel<T>, blocks, kNormThreads, 0, stream, params, true));
  if (plan.sums == nullptr) return Status();
  NormParams forward = params;  // for r alone
  forward.y = {};
  forward.inverse_rms = workspace_tensor(plan.rms, DType::kFloat32, 1, 1, 1, p.rows);
  forward.inverse_rms.stride[0] = 1;
  FLASH_QLA_RETURN_IF_ERROR(
      launch("norm_gated_long", norm_gated_long_kernel<T>, blocks, kNormThreads, 0, stream, forward, false));
  const int64_t columns = ceil_div(p.V, kNormThreads);
  return launch("norm_gated_long_sums", norm_gated_long_sums_kernel<T>, plan.blocks * columns, kNormThreads, 0, stream,
                params, static_cast<const float*>(plan.rms), columns, plan.step);
}

Status run_backward(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p, void* memory,
                    void* raw_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  NormParams params = common_params(args, p);
  params.dy = norm_rows(args.dy, p);
  params.dx = norm_rows(args.dx, p);
  params.dz = norm_rows(args.dz, p);
  params.dweight = device_tensor(args.dweight);
  params.dbias = device_tensor(args.dbias);
  Workspace workspace(memory);
  const BackwardPlan plan = plan_backward(args, p, params.lanes, &workspace);
  params.sums = plan.sums;
  params.blocks = plan.blocks;
  FLASH_QLA_RETURN_IF_ERROR(with_dtype(p.dtype, [&](auto value) {
    using T = decltype(value);
    if (plan.is_long) return run_long<T>(params, p, plan, stream);
    return launch("norm_gated_backward", norm_gated_backward_kernel<T>, plan.blocks, kNormThreads, 0, stream, params);
  }));
  if (plan.sums == nullptr) return Status();
  return launch("norm_add_sums", norm_add_sums_kernel, ceil_div(2 * p.V, kNormThreads), kNormThreads, 0, stream,
                params);
}

}  // namespace
}  // namespace cuda

const NormPath kCudaNormGated = {
    "cuda_layer", FLASH_QLA_CUDA, false, cuda::reject<flash_qla_norm_gated_arguments>, cuda::no_workspace, cuda::run};
const NormBackwardPath kCudaNormGatedBackward = {
    "cuda_layer",         FLASH_QLA_CUDA,    false, cuda::reject<flash_qla_norm_gated_backward_arguments>,
    cuda::workspace_size, cuda::run_backward};

}  // namespace flash_qla
