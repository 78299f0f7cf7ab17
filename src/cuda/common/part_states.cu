#include "cuda/common/part_states.cuh"

#include "cuda/common/device_tensor.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// One block a (row, value head).
template <class Real>
__global__ void __launch_bounds__(kThreads)
    rows_of_states_kernel(DeviceTensor rows, int64_t parts, DeviceStates of_parts, DeviceStates given, DeviceStates to,
                          int Hv, int K, int V) {
  const int64_t n = blockIdx.x / Hv, head = blockIdx.x % Hv;
  int64_t part = parts;
  for (int64_t i = parts - 1; i >= 0; --i) {
    if (load_index(rows, i) == n) part = i;  // the first of them, as on the host
  }
  const DeviceStates& from = part < parts ? of_parts : given;
  const int64_t row = part < parts ? part : n;
  for (int i = threadIdx.x; i < K * V; i += kThreads) {
    const int64_t key = i / V, value = i % V;
    const Real x = from.data == nullptr
                       ? Real(0)
                       : load<Real>(from, row * from.row + head * from.head + key * from.key + value * from.value);
    store<Real>(to, n * to.row + head * to.head + key * to.key + value * to.value, x);
  }
}

}  // namespace

RowsOfStates::RowsOfStates(const Tensor& rows, const Tensor& of_parts, bool v_first, const Problem& p,
                           Workspace* workspace)
    : rows_(rows), of_parts_(of_parts), v_first_(v_first) {
  if (!present(rows)) return;
  const bool wide = p.dtype == DType::kFloat64;
  const int64_t count = p.N * p.Hv * p.K * p.V;
  void* data = wide ? static_cast<void*>(workspace->take<double>(count)) : workspace->take<float>(count);
  const int64_t inner[2] = {v_first ? p.V : p.K, v_first ? p.K : p.V};
  states_ = tensor(data, wide ? DType::kFloat64 : DType::kFloat32, {p.N, p.Hv, inner[0], inner[1]});
}

Status RowsOfStates::fill(const Tensor& given, const Problem& p, cudaStream_t stream) const {
  if (!present(states_)) return Status();
  const auto kernel = p.dtype == DType::kFloat64 ? rows_of_states_kernel<double> : rows_of_states_kernel<float>;
  return launch("rows_of_states", kernel, p.N * p.Hv, kThreads, 0, stream, device_tensor(rows_), rows_.shape[0],
                device_states(of_parts_, false), device_states(given, v_first_), device_states(states_, v_first_),
                static_cast<int>(p.Hv), static_cast<int>(p.K), static_cast<int>(p.V));
}

// The path around `kPath`. Name and choice are that path's own, which are not known before the program runs.
template <const auto* kPath, class Call>
constexpr Path<typename Call::Arguments> with_parts(const char* name, bool only_by_name) {
  using Functions = WithPartStates<kPath, Call>;
  return {name,           FLASH_QLA_CUDA,  only_by_name, Functions::reject, Functions::workspace_size,
          Functions::run, Functions::notes};
}

}  // namespace cuda

using cuda::BackwardOfRows, cuda::ForwardOfRows;

const ForwardPath kSm90ChunkForwardWithParts = cuda::with_parts<&kSm90ChunkForward, ForwardOfRows>("sm90", false);
const ForwardPath kSm80ChunkForwardWithParts = cuda::with_parts<&kSm80ChunkForward, ForwardOfRows>("sm80", false);
const ForwardPath kCudaGenericChunkForwardWithParts =
    cuda::with_parts<&kCudaGenericChunkForward, ForwardOfRows>("cuda_generic", false);
const ForwardPath kCudaOracleChunkForwardWithParts =
    cuda::with_parts<&kCudaOracleChunkForward, ForwardOfRows>("cuda_reference", true);

const BackwardPath kSm90ChunkBackwardWithParts = cuda::with_parts<&kSm90ChunkBackward, BackwardOfRows>("sm90", false);
const BackwardPath kSm80ChunkBackwardWithParts = cuda::with_parts<&kSm80ChunkBackward, BackwardOfRows>("sm80", false);
const BackwardPath kCudaGenericChunkBackwardWithParts =
    cuda::with_parts<&kCudaGenericChunkBackward, BackwardOfRows>("cuda_generic", false);
const BackwardPath kCudaOracleChunkBackwardWithParts =
    cuda::with_parts<&kCudaOracleChunkBackward, BackwardOfRows>("cuda_reference", true);

}  // namespace flash_qla
