// summary_combine on a device. A block takes 16 columns of one (part, stream, value head) and applies one link after
// another: its columns of the state stay in shared memory, and M comes through it 32 columns at a time. Sums are in
// Real, in the order of M's columns. The composed link's S is what enters a place behind all links, and its M the same
// of the identity's columns.
#include "core/link_chain.h"
#include "cuda/common/device_tensor.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_summary_combine_arguments;

constexpr int kThreads = 256;
constexpr int kSlice = 16;  // columns of a block: 8 blocks a head of 128 columns, 256 of 32 heads
constexpr int kRowGroups = kThreads / kSlice;
constexpr int kRowsPerThread = FLASH_QLA_MAX_HEAD_DIM / kRowGroups;
constexpr int kTile = 32;  // columns of M in shared memory at once

// Strides of links [L, C, Hv, rows, columns], or of results, whose first may be parts.
struct LinkTensor {
  void* data;
  int64_t first, stream, head, row, column;
};

enum class Columns : int32_t { kState, kComposedState, kComposedTransition };

struct CombineParams {
  LinkTensor S, M, kind, out, out_kind;
  DeviceTensor order, place, wanted;
  int64_t L, C, Hv;
  int32_t K, columns;
  int32_t backward;
  Columns what;
};
static_assert(std::is_trivially_copyable_v<CombineParams>);

LinkTensor link_tensor(const Tensor& t, bool has_first) {
  LinkTensor view{};
  view.data = t.data;
  const int64_t* stride = t.stride;
  if (has_first) view.first = *stride++;
  view.stream = stride[0];
  view.head = stride[1];
  if (t.ndim > (has_first ? 3 : 2)) {
    view.row = stride[2];
    view.column = stride[3];
  }
  return view;
}

template <class Real>
__device__ Real* at(const LinkTensor& t, int64_t first, int64_t stream, int64_t head) {
  return static_cast<Real*>(t.data) + first * t.first + stream * t.stream + head * t.head;
}

template <class Real>
struct Memory {
  Real state[FLASH_QLA_MAX_HEAD_DIM][kSlice];
  Real M[kTile]
        [FLASH_QLA_MAX_HEAD_DIM + 1];  // by column of M (M^T): the rows lie side by side, one more against conflicts
};

// One block's links.
template <class Real>
struct Chain {
  const CombineParams& p;
  int64_t stream;
  int head;

  __device__ int64_t link(int64_t place) const {
    if (p.order.data == nullptr) return place;
    const int64_t row = load_index(p.order, place);
    return row < 0 ? 0 : row < p.L ? row : p.L - 1;
  }
  __device__ double kind(int64_t place) const { return *at<const Real>(p.kind, link(place), stream, head); }
};

// state <- [S +] M state, or M^T state: columns [column0, column0 + kSlice) of the block.
template <class Real>
__device__ void apply_link(const Chain<Real>& chain, int64_t place, bool transposed, bool adds, bool is_zero,
                           int column0, Memory<Real>& memory) {
  const CombineParams& p = chain.p;
  const int column = threadIdx.x % kSlice, group = threadIdx.x / kSlice;
  const bool valid = column0 + column < p.columns;
  Real sum[kRowsPerThread];
  const Real* S = at<const Real>(p.S, chain.link(place), chain.stream, chain.head);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = group + r * kRowGroups;
    sum[r] = adds && valid && row < p.K ? S[row * p.S.row + (column0 + column) * p.S.column] : Real(0);
  }
  if (!is_zero) {
    const Real* M = at<const Real>(p.M, chain.link(place), chain.stream, chain.head);
    for (int base = 0; base < p.K; base += kTile) {
      __syncthreads();  // the tile before has been read
      for (int i = threadIdx.x; i < kTile * p.K; i += kThreads) {
        // Rows of M lie along its columns: neighbours read neighbours either way round.
        const int inner = transposed ? i / p.K : i % kTile, outer = transposed ? i % p.K : i / kTile;
        const int row = transposed ? base + inner : outer, col = transposed ? outer : base + inner;
        if (base + inner < p.K) memory.M[inner][outer] = M[row * p.M.row + col * p.M.column];
      }
      __syncthreads();
      const int count = p.K - base < kTile ? p.K - base : kTile;
      for (int i = 0; i < count; ++i) {
        const Real x = memory.state[base + i][column];
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          const int row = group + r * kRowGroups;
          if (row < p.K) sum[r] += memory.M[i][row] * x;
        }
      }
    }
  }
  __syncthreads();  // all have read the state
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = group + r * kRowGroups;
    if (row < p.K) memory.state[row][column] = sum[r];
  }
  __syncthreads();
}

template <class Real>
__global__ void __launch_bounds__(kThreads) summary_combine_kernel(const __grid_constant__ CombineParams p) {
  Memory<Real>& memory = *dynamic_shared<Memory<Real>>();
  const int slices = static_cast<int>(ceil_div(p.columns, kSlice));
  const int64_t rest = blockIdx.x / slices;
  const int column0 = static_cast<int>(blockIdx.x % slices) * kSlice;
  const int64_t part = rest / (p.C * p.Hv);
  const Chain<Real> chain{p, rest / p.Hv % p.C, static_cast<int>(rest % p.Hv)};
  const int column = threadIdx.x % kSlice, group = threadIdx.x / kSlice;
  const bool transition = p.what == Columns::kComposedTransition;
  // M of the composed link is a product in the stream's order, whatever the direction.
  const bool backward = p.backward && !transition;

  int64_t place = backward ? -1 : p.L;  // behind all links
  bool wanted = true;
  if (p.what == Columns::kState) {
    place = load_index(p.place, part);
    wanted = is_place(place, p.L, backward) &&
             (p.wanted.data == nullptr || static_cast<const uint8_t*>(p.wanted.data)[part * p.wanted.stride[0]] != 0);
  }
  for (int row = group; row < p.K; row += kRowGroups) {
    memory.state[row][column] = transition && row == column0 + column ? Real(1) : Real(0);
  }
  __syncthreads();
  const auto kind_at = [&chain](int64_t i) { return chain.kind(i); };
  double composed = FLASH_QLA_LINK_NONE;
  bool is_zero = !transition;
  if (wanted && p.L > 0) {
    const LinkChain links = chain_to(place, p.L, backward, kind_at);
    for (int64_t i = 0; i < links.steps; ++i) {
      const int64_t link = backward ? links.first - i : links.first + i;
      const double kind = chain.kind(link);
      if (is_none(kind)) continue;
      if (is_constant(kind)) {
        composed = FLASH_QLA_LINK_CONSTANT;
        is_zero = true;
      } else if (!is_constant(composed)) {
        composed = FLASH_QLA_LINK_AFFINE;
      }
      apply_link(chain, link, backward, !transition, is_zero, column0, memory);
      if (!transition) is_zero = false;
    }
  }
  // A composed link that is not affine has no M.
  const bool zero = transition && composed != static_cast<double>(FLASH_QLA_LINK_AFFINE);
  Real* out = at<Real>(p.out, part, chain.stream, chain.head);
  for (int row = group; row < p.K && column0 + column < p.columns; row += kRowGroups) {
    out[row * p.out.row + (column0 + column) * p.out.column] = zero ? Real(0) : memory.state[row][column];
  }
  if (p.out_kind.data != nullptr && blockIdx.x % slices == 0 && threadIdx.x == 0) {
    *at<Real>(p.out_kind, 0, chain.stream, chain.head) = static_cast<Real>(composed);
  }
}

template <class Real>
Status run_in(const Arguments& args, const CombineProblem& p, cudaStream_t stream) {
  CombineParams params{};
  params.S = link_tensor(args.S, true);
  params.M = link_tensor(args.M, true);
  params.kind = link_tensor(args.kind, true);
  params.order = device_tensor(args.order);
  params.L = p.L;
  params.C = p.C;
  params.Hv = p.Hv;
  params.K = static_cast<int32_t>(p.K);
  params.backward = args.backward;
  const auto start = [&](const char* name, int64_t parts, int64_t columns) {
    params.columns = static_cast<int32_t>(columns);
    return launch(name, summary_combine_kernel<Real>, parts * p.C * p.Hv * ceil_div(columns, kSlice), kThreads,
                  sizeof(Memory<Real>), stream, params);
  };
  if (present(args.state)) {
    params.place = device_tensor(args.place);
    params.wanted = device_tensor(args.wanted);
    params.out = link_tensor(args.state, true);
    params.what = Columns::kState;
    FLASH_QLA_RETURN_IF_ERROR(start("summary_combine", p.P, p.V));
  }
  if (!present(args.composed_S)) return Status();
  params.out = link_tensor(args.composed_S, false);
  params.out_kind = link_tensor(args.composed_kind, false);
  params.what = Columns::kComposedState;
  FLASH_QLA_RETURN_IF_ERROR(start("compose_states", 1, p.V));
  params.out = link_tensor(args.composed_M, false);
  params.out_kind = LinkTensor{};
  params.what = Columns::kComposedTransition;
  return start("compose_transitions", 1, p.K);
}

std::string accept(const Arguments&, const CombineProblem&) { return {}; }
size_t no_workspace(const Arguments&, const CombineProblem&) { return 0; }

Status run(const Arguments& args, const CombineProblem& p, void*, void* stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return p.dtype == DType::kFloat64 ? run_in<double>(args, p, cuda_stream) : run_in<float>(args, p, cuda_stream);
}

}  // namespace
}  // namespace cuda

// Links in float32 are combined in float32, links in float64 in float64: one kernel for both, so the oracle has no
// other.
const SummaryCombinePath kCudaGenericSummaryCombine = {"cuda_generic", FLASH_QLA_CUDA,     false,
                                                       cuda::accept,   cuda::no_workspace, cuda::run};

}  // namespace flash_qla
