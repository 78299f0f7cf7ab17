// sequence_cut on a device: one block, which finds each part by bisection and then writes its rows side by side.
#include "core/stream_cut.h"
#include "cuda/common/device_tensor.cuh"
#include "cuda/common/launch.h"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_sequence_cut_arguments;

constexpr int kThreads = 256;

struct CutParams {
  DeviceTensor cu_seqlens, bounds;
  DeviceTensor local_cu_seqlens, sequences, starts_here, ends_here;
  DeviceTensor row_counts, rows, enters, leaves, through, entering_rows, leaving_rows, halo_tokens;
  int64_t N, P, R, last_part;
  int32_t all_rows;
};
static_assert(std::is_trivially_copyable_v<CutParams>);

__device__ void put(const DeviceTensor& t, int64_t value, int64_t i, int64_t j = 0) {
  if (t.data == nullptr) return;
  const int64_t offset = i * t.stride[0] + j * t.stride[1];
  switch (static_cast<DType>(t.dtype)) {
    case DType::kInt32:
      static_cast<int32_t*>(t.data)[offset] = static_cast<int32_t>(value);
      break;
    case DType::kInt64:
      static_cast<int64_t*>(t.data)[offset] = value;
      break;
    default:
      static_cast<uint8_t*>(t.data)[offset] = value != 0;
  }
}

__device__ void put_row(const CutParams& p, int64_t row, int64_t end, int64_t n, bool starts, bool ends) {
  if (row >= p.R) return;
  put(p.local_cu_seqlens, end, row + 1);
  put(p.sequences, n, row);
  put(p.starts_here, starts, row);
  put(p.ends_here, ends, row);
}

__device__ void put_part(const CutParams& p, int64_t part, const PartCut& cut, int64_t first_row, int64_t count) {
  const int64_t of_zero = first_row - (p.all_rows ? 0 : cut.first);  // where the row of sequence 0 would be
  const bool has_tokens = cut.left >= 0;
  const int64_t left = has_tokens ? of_zero + cut.left : -1, right = has_tokens ? of_zero + cut.right : -1;
  put(p.row_counts, count, part);
  put(p.rows, left, part, 0);
  put(p.rows, right, part, 1);
  put(p.enters, cut.enters, part);
  put(p.leaves, cut.leaves, part);
  put(p.through, cut.through, part);
  put(p.entering_rows, cut.enters ? left : -1, part);
  put(p.leaving_rows, cut.leaves ? right : -1, part);
  put(p.halo_tokens, cut.halo, part);
}

__global__ void __launch_bounds__(kThreads) sequence_cut_kernel(const __grid_constant__ CutParams p) {
  const auto offset = [&p](int64_t n) { return load_index(p.cu_seqlens, n); };
  int64_t row = 0, local = 0;  // the same in every thread: each makes the same bisections
  if (threadIdx.x == 0) put(p.local_cu_seqlens, 0, 0);
  for (int64_t part = 0; part < p.P; ++part) {
    const PartCut cut =
        cut_part(load_index(p.bounds, part, 0), load_index(p.bounds, part, 1), part == p.last_part, p.N, offset);
    const int64_t first = p.all_rows ? 0 : cut.first, behind = p.all_rows ? p.N : cut.behind;
    const int64_t base = local - cut.inside(offset(first));
    for (int64_t n = first + threadIdx.x; n < behind; n += kThreads) {
      const bool in_part = n >= cut.first && n < cut.behind;
      put_row(p, row + n - first, base + cut.inside(offset(n + 1)), n, in_part && offset(n) >= cut.begin,
              in_part && offset(n + 1) <= cut.end);
    }
    if (threadIdx.x == 0) put_part(p, part, cut, row, behind - first);
    local = base + cut.inside(offset(behind));
    row += behind - first;
  }
  for (int64_t i = row + threadIdx.x; i < p.R; i += kThreads) put_row(p, i, local, -1, false, false);
}

std::string accept(const Arguments&, const CutProblem&) { return {}; }
size_t no_workspace(const Arguments&, const CutProblem&) { return 0; }

Status run(const Arguments& args, const CutProblem& p, void*, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  CutParams params{};
  params.cu_seqlens = device_tensor(args.cu_seqlens);
  params.bounds = device_tensor(args.bounds);
  params.local_cu_seqlens = device_tensor(args.local_cu_seqlens);
  params.sequences = device_tensor(args.sequences);
  params.starts_here = device_tensor(args.starts_here);
  params.ends_here = device_tensor(args.ends_here);
  params.row_counts = device_tensor(args.row_counts);
  params.rows = device_tensor(args.rows);
  params.enters = device_tensor(args.enters);
  params.leaves = device_tensor(args.leaves);
  params.through = device_tensor(args.through);
  params.entering_rows = device_tensor(args.entering_rows);
  params.leaving_rows = device_tensor(args.leaving_rows);
  params.halo_tokens = device_tensor(args.halo_tokens);
  params.N = p.N;
  params.P = p.P;
  params.R = p.R;
  params.last_part = args.last_part;
  params.all_rows = args.all_rows;
  return launch("sequence_cut", sequence_cut_kernel, 1, kThreads, 0, static_cast<cudaStream_t>(stream), params);
}

}  // namespace
}  // namespace cuda

const SequenceCutPath kCudaSequenceCut = {"cuda_generic", FLASH_QLA_CUDA,     false,
                                          cuda::accept,   cuda::no_workspace, cuda::run};

}  // namespace flash_qla
