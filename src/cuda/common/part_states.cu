#include "cuda/common/part_states.cuh"

#include "cuda/common/device_tensor.cuh"
#include "cuda/common/overlap.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSlice = 1024;  // elements of a block: 16 blocks a state of 128 x 128, 16 bytes of float32 a thread

// One block a slice of a (row, value head). `to` is contiguous: its elements are taken in their order.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    rows_of_states_kernel(const __grid_constant__ DeviceTensor rows, int parts,
                          const __grid_constant__ DeviceStates of_parts, const __grid_constant__ DeviceStates given,
                          Real* to, int Hv, int K, int V, bool v_first) {
  constexpr int kVector = 16 / sizeof(Real);
  struct alignas(16) Vector {
    Real x[kVector];
  };
  begin_after_predecessors();
  const int size = K * V, slices = static_cast<int>(ceil_div(size, kSlice));
  const int state = static_cast<int>(blockIdx.x) / slices, n = state / Hv, head = state % Hv;
  int part = parts;
  for (int i = parts - 1; i >= 0; --i) {
    if (load_index(rows, i) == n) part = i;  // the first of them, as on the host
  }
  const DeviceStates& from = part < parts ? of_parts : given;
  const int64_t start = (part < parts ? part : n) * from.row + head * from.head;
  const int64_t outer = v_first ? from.value : from.key, inner = v_first ? from.key : from.value;
  const int length = v_first ? K : V;
  const int begin = static_cast<int>(blockIdx.x) % slices * kSlice, end = min(begin + kSlice, size);
  to += static_cast<int64_t>(state) * size;

  const Real* same = static_cast<const Real*>(from.data) + start;  // of the same type and order
  constexpr DType kType = std::is_same_v<Real, double> ? DType::kFloat64 : DType::kFloat32;
  if (from.data != nullptr && from.dtype == static_cast<int32_t>(kType) && inner == 1 && outer == length &&
      size % kVector == 0 && reinterpret_cast<uintptr_t>(same) % sizeof(Vector) == 0) {
    for (int i = begin + kVector * threadIdx.x; i < end; i += kVector * kThreads) {
      *reinterpret_cast<Vector*>(to + i) = *reinterpret_cast<const Vector*>(same + i);
    }
    return;
  }
  for (int i = begin + threadIdx.x; i < end; i += kThreads) {
    to[i] = from.data == nullptr ? Real(0) : load<Real>(from, start + i / length * outer + i % length * inner);
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

Status RowsOfStates::fill(const Tensor& given, const Problem& p, const Queue& queue) const {
  if (!present(states_)) return Status();
  const auto run =
      [&]<class Real>(void (*kernel)(DeviceTensor, int, DeviceStates, DeviceStates, Real*, int, int, int, bool)) {
        return launch_kernel("rows_of_states", kernel, p.N * p.Hv * ceil_div(p.K * p.V, kSlice), kThreads, 0,
                             queue.stream, queue.overlaps, device_tensor(rows_), static_cast<int>(rows_.shape[0]),
                             device_states(of_parts_, false), device_states(given, v_first_),
                             static_cast<Real*>(states_.data), static_cast<int>(p.Hv), static_cast<int>(p.K),
                             static_cast<int>(p.V), v_first_);
      };
  return p.dtype == DType::kFloat64 ? run(rows_of_states_kernel<double>) : run(rows_of_states_kernel<float>);
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
