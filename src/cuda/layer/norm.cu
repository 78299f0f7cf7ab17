// Path "cuda_layer": the gated norm.
#include <algorithm>

#include "cuda/common/launch.h"
#include "cuda/layer/norm.cuh"
#include "cuda/layer/norm_any.cuh"
#include "cuda/layer/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

NormRows norm_rows(const Tensor& t) {
  if (!present(t)) return {};
  const RowView view = row_view(t);
  return {t.data, view.outer, view.middle, view.inner, view.column};
}

template <class Arguments>
NormParams common_params(const Arguments& args, const NormProblem& p) {
  NormParams params{};
  params.x = norm_rows(args.x);
  params.z = norm_rows(args.z);
  params.weight = device_tensor(args.weight);
  params.bias = device_tensor(args.bias);
  const RowShape shape = row_shape(args.x);
  params.middle = Divisor::by(std::max<int64_t>(1, shape.middle));
  params.inner = Divisor::by(std::max<int64_t>(1, shape.inner));
  params.rows = p.rows;
  params.eps = static_cast<float>(args.eps);
  params.per_value = 1.0f / static_cast<float>(p.V);
  params.V = static_cast<int32_t>(p.V);
  params.gate_first = args.gate_first != 0;
  params.silu = args.activation == FLASH_QLA_ACTIVATION_SILU;
  while (params.lane_bits < 5 && (kVector << params.lane_bits) < p.V) ++params.lane_bits;
  return params;
}

// Whether the rows are short enough for a warp; numbers of rows have 31 bits then.
bool has_short_rows(const NormProblem& p) { return p.V <= kLongestRow && p.rows < int64_t{1} << 31; }

template <NormForm kForm>
using FormConstant = std::integral_constant<NormForm, kForm>;

// Calls f with the form of kernels whose tensors of rows are these, as a constant.
template <class Function>
Status with_form(std::initializer_list<const Tensor*> rows, Function&& f) {
  const bool vectors =
      std::all_of(rows.begin(), rows.end(), [](auto* t) { return !present(*t) || allows_vectors(*t); });
  return vectors ? f(FormConstant<NormForm::kVectors>()) : f(FormConstant<NormForm::kAny>());
}

bool is_plain(const flash_qla_norm_gated_arguments& args) {
  return present(args.z) && args.activation == FLASH_QLA_ACTIVATION_SILU && args.gate_first == 0 &&
         !present(args.bias) && present(args.weight) && args.weight.dtype == args.x.dtype &&
         allows_vectors(args.weight);
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
  params.y = norm_rows(args.y);
  params.inverse_rms = device_tensor(args.inverse_rms);
  const bool overlaps = allows_overlap(args.options.device_index);
  return with_dtype(p.dtype, [&](auto value) {
    using T = decltype(value);
    if (!has_short_rows(p)) {
      return launch("norm_gated_any", norm_gated_any_kernel<T>, ceil_div(p.rows, kNormThreads / 32), kNormThreads, 0,
                    stream, params, false);
    }
    const auto launch_rows = [&](auto form, auto rows) {
      const int64_t of_block = rows * int64_t{kForwardThreads >> params.lane_bits};
      return launch_kernel("norm_gated", norm_gated_kernel<T, form, rows>, ceil_div(p.rows, of_block), kForwardThreads,
                           0, stream, overlaps, params);
    };
    // A step of a few sequences waits for its own instructions alone: each row to a group of its own.
    const auto launch_form = [&](auto form) {
      return p.rows < kFewRows ? launch_rows(form, std::integral_constant<int, 1>())
                               : launch_rows(form, std::integral_constant<int, kForwardRows>());
    };
    return with_form({&args.x, &args.z, &args.y}, [&](auto form) {
      if (form == NormForm::kVectors && is_plain(args)) return launch_form(FormConstant<NormForm::kPlain>());
      return launch_form(form);
    });
  });
}

// Sums that a part holds.
int64_t sum_columns(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p) {
  return present(args.dbias) ? 2 * p.V : p.V;
}

// How the backward is computed, and its scratch. The number of parts of the sums follows from shapes alone, so that
// bits are the same on every GPU: of short rows a block each, as many as a large one holds at once. Without rows one
// part leaves sums of zero.
struct BackwardPlan {
  bool short_rows;
  int64_t parts, step;  // step: rows of a part, of long ones
  float *sums, *rms;    // NULL: not wanted

  BackwardPlan(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p, int lane_bits,
               Workspace* workspace)
      : short_rows(has_short_rows(p)), step(std::max<int64_t>(1, ceil_div(p.rows, 256))) {
    constexpr int64_t kMultiprocessors = 132;
    const int64_t at_once = (p.dtype == DType::kFloat32 ? kBackwardRows<float>
                                                        : kBackwardRows<__half>)*int64_t{kBackwardThreads >> lane_bits};
    parts = short_rows ? std::clamp(ceil_div(p.rows, at_once), int64_t{1}, kBackwardBlocks * kMultiprocessors)
                       : std::max<int64_t>(1, ceil_div(p.rows, step));
    const bool wanted = present(args.dweight) || present(args.dbias);
    sums = wanted ? workspace->take<float>(parts * sum_columns(args, p)) : nullptr;
    rms = wanted && !short_rows ? workspace->take<float>(p.rows) : nullptr;
  }
};

size_t workspace_size(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p) {
  Workspace workspace(nullptr);
  BackwardPlan(args, p, common_params(args, p).lane_bits, &workspace);
  return workspace.bytes();
}

template <class T>
Status run_any(NormParams params, const NormProblem& p, const BackwardPlan& plan, cudaStream_t stream) {
  if (plan.rms != nullptr) {
    params.inverse_rms = workspace_tensor(plan.rms, DType::kFloat32, 1, 1, 1, p.rows);
    params.inverse_rms.stride[0] = 1;
  }
  const int64_t blocks = ceil_div(p.rows, kNormThreads / 32), columns = ceil_div(p.V, kNormThreads);
  FLASH_QLA_RETURN_IF_ERROR(
      launch("norm_gated_any", norm_gated_any_kernel<T>, blocks, kNormThreads, 0, stream, params, true));
  if (plan.sums == nullptr) return Status();
  return launch("norm_gated_any_sums", norm_gated_any_sums_kernel<T>, plan.parts * columns, kNormThreads, 0, stream,
                params, columns, plan.step);
}

Status run_backward(const flash_qla_norm_gated_backward_arguments& args, const NormProblem& p, void* memory,
                    void* raw_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  NormParams params = common_params(args, p);
  params.dy = norm_rows(args.dy);
  params.dx = norm_rows(args.dx);
  params.dz = norm_rows(args.dz);
  params.dweight = device_tensor(args.dweight);
  params.dbias = device_tensor(args.dbias);
  Workspace workspace(memory);
  const BackwardPlan plan(args, p, params.lane_bits, &workspace);
  params.sums = plan.sums;
  params.parts = plan.parts;
  params.sum_columns = static_cast<int32_t>(sum_columns(args, p));
  const bool overlaps = allows_overlap(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(with_dtype(p.dtype, [&](auto value) {
    using T = decltype(value);
    if (!plan.short_rows) return run_any<T>(params, p, plan, stream);
    return with_form({&args.x, &args.z, &args.dy, &args.dx, &args.dz}, [&](auto form) {
      return launch_kernel("norm_gated_backward", norm_gated_backward_kernel<T, form>, plan.parts, kBackwardThreads, 0,
                           stream, overlaps, params);
    });
  }));
  if (plan.sums == nullptr) return Status();
  return launch_kernel("norm_add_sums", norm_add_sums_kernel, ceil_div(sum_columns(args, p), kNormSumColumns),
                       kSumThreads, 0, stream, overlaps, params);
}

}  // namespace
}  // namespace cuda

const NormPath kCudaNormGated = {
    "cuda_layer", FLASH_QLA_CUDA, false, cuda::reject<flash_qla_norm_gated_arguments>, cuda::no_workspace, cuda::run};
const NormBackwardPath kCudaNormGatedBackward = {
    "cuda_layer",         FLASH_QLA_CUDA,    false, cuda::reject<flash_qla_norm_gated_backward_arguments>,
    cuda::workspace_size, cuda::run_backward};

}  // namespace flash_qla
