// summary_combine on a device. A block takes 16 columns of one (part, stream, value head) and applies one link after
// another: its columns of the state stay in shared memory, and M comes through it 32 columns at a time. Sums are in
// Real, in the order of M's columns. The composed link's S is what enters a place behind all links, and its M the same
// of the identity's columns.
#include "core/link_chain.h"
#include "cuda/common/device_tensor.cuh"
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/overlap.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_summary_combine_arguments;

constexpr int kThreads = 256;
constexpr int kSlice = 16;  // columns of a block: 8 blocks a head of 128 columns, 256 of 32 heads
constexpr int kRowGroups = kThreads / kSlice;
constexpr int kTile = 32;  // columns of M in shared memory at once: a warp's lanes
// A thread has rows four at a time, which it reads at once: those of quad q are 4 (group + q kRowGroups) and behind.
constexpr int kRowQuads = FLASH_QLA_MAX_HEAD_DIM / (4 * kRowGroups);
// And 32 elements of a tile at most on their way from memory, while it works on the tile before.
constexpr int kTileQuads = FLASH_QLA_MAX_HEAD_DIM * kTile / (4 * kThreads);
constexpr int kWarps = kThreads / kTile;

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
struct alignas(16) Quad {
  Real x[4];
};

template <class Real>
struct Memory {
  Real state[FLASH_QLA_MAX_HEAD_DIM][kSlice];
  // By column of M (M^T), whose rows lie side by side: four more keep stores of neighbouring columns' quads apart.
  alignas(16) Real M[kTile][FLASH_QLA_MAX_HEAD_DIM + 4];
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

// Tiles of M, or of M^T, one after another on their way through a thread's registers. Rows of M lie along its columns:
// a warp's lanes read neighbours either way round.
template <class Real>
class TilesOfM {
 public:
  __device__ TilesOfM(const LinkTensor& t, const Real* M, int K, bool transposed)
      : inner_stride_(transposed ? t.row : t.column),
        outer_stride_(transposed ? t.column : t.row),
        K_(K),
        transposed_(transposed) {
    next_ = M + inner(0) * inner_stride_ + outer(0, 0) * outer_stride_;
  }

  // The next tile, which begins at column `base`; zeros past K. Addresses are counted on: as many kept would spill.
  __device__ void load(int base) {
    const int64_t step = transposed_ ? kWarps * inner_stride_ : outer_stride_;
    const Real* at = next_;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
      const Real* from = at;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        quads_[q].x[n] = base + inner(n) < K_ && outer(q, n) < K_ ? *from : Real(0);
        from += step;
      }
      at += kTile * outer_stride_;
    }
    next_ += kTile * inner_stride_;
  }
  __device__ void store(Memory<Real>& memory) const {
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
      if (q * kTile >= K_) break;
      if (!transposed_) {
        *reinterpret_cast<Quad<Real>*>(&memory.M[inner(0)][outer(q, 0)]) = quads_[q];
        continue;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) memory.M[inner(n)][outer(q, n)] = quads_[q].x[n];
    }
  }

 private:
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kTile; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / kTile; }
  // Column within the tile and row of the n-th element of quad q.
  __device__ int inner(int n) const { return transposed_ ? warp() + n * kWarps : lane(); }
  __device__ int outer(int q, int n) const { return q * kTile + (transposed_ ? lane() : 4 * warp() + n); }

  Quad<Real> quads_[kTileQuads];
  const Real* next_;
  int64_t inner_stride_, outer_stride_;
  int K_;
  bool transposed_;
};

// state <- [S +] M state, or M^T state: columns [column0, column0 + kSlice) of the block.
template <class Real>
__device__ void apply_link(const Chain<Real>& chain, int64_t place, bool transposed, bool adds, bool is_zero,
                           int column0, Memory<Real>& memory) {
  const CombineParams& p = chain.p;
  const int column = threadIdx.x % kSlice, group = threadIdx.x / kSlice;
  const bool valid = column0 + column < p.columns;
  const int64_t link = chain.link(place);
  TilesOfM<Real> tiles(p.M, at<const Real>(p.M, link, chain.stream, chain.head), p.K, transposed);
  if (!is_zero) tiles.load(0);
  const auto row_of = [group](int q, int n) { return 4 * (group + q * kRowGroups) + n; };
  Quad<Real> sum[kRowQuads];
  const Real* S =
      at<const Real>(p.S, link, chain.stream, chain.head) + row_of(0, 0) * p.S.row + (column0 + column) * p.S.column;
#pragma unroll
  for (int q = 0; q < kRowQuads; ++q) {
    const Real* from = S;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      sum[q].x[n] = adds && valid && row_of(q, n) < p.K ? *from : Real(0);
      from += p.S.row;
    }
    S += 4 * kRowGroups * p.S.row;
  }
  for (int base = 0; !is_zero && base < p.K; base += kTile) {
    __syncthreads();  // the tile before has been read
    tiles.store(memory);
    __syncthreads();
    if (base + kTile < p.K) tiles.load(base + kTile);
    const int count = p.K - base < kTile ? p.K - base : kTile;
#pragma unroll 2
    for (int i = 0; i < count; ++i) {
      const Real x = memory.state[base + i][column];
#pragma unroll
      for (int q = 0; q < kRowQuads; ++q) {
        if (row_of(q, 0) >= p.K) continue;
        const auto m = *reinterpret_cast<const Quad<Real>*>(&memory.M[i][row_of(q, 0)]);
#pragma unroll
        for (int n = 0; n < 4; ++n) sum[q].x[n] += m.x[n] * x;
      }
    }
  }
  __syncthreads();  // all have read the state
#pragma unroll
  for (int q = 0; q < kRowQuads; ++q) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (row_of(q, n) < p.K) memory.state[row_of(q, n)][column] = sum[q].x[n];
    }
  }
  __syncthreads();
}

template <class Real>
__global__ void __launch_bounds__(kThreads) summary_combine_kernel(const __grid_constant__ CombineParams p) {
  launch_dependents();
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
