// Paths "cuda_generic" and "cuda_reference" of the verification of draft tokens: every shape and option, in float32 and
// in float64. The chunk form of a tree (docs/math.md): every token's state is the pool's, decayed, and the writes of
// its ancestors, so that the pool's state is read once for all tokens and no state of another token is needed.
//   u_t = beta_t (v_t - w_t S0^T k_t - sum_a w_ta <k_a, k_t> u_a)      a: the ancestors of t
//   o_t = scale (w_t S0^T q_t + sum_a w_ta <k_a, q_t> u_a)             a: t and its ancestors
//   S_t = w_t S0 + sum_a w_ta k_a u_a^T
// with w_t the decay of the path up to t and w_ta that of the path behind a.
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/generic/forward_call.cuh"
#include "cuda/generic/verify.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_verify_arguments;

constexpr int kDrafts = FLASH_QLA_MAX_DRAFT_TOKENS;
constexpr int kThreads = FLASH_QLA_MAX_HEAD_DIM;  // a thread a column of the state; and one for each pair of tokens
static_assert(kDrafts * kDrafts <= kThreads);
constexpr int kTileKeys = 32;  // keys of all tokens that are in shared memory at once

struct VerifyParams {
  TokenInputs in;  // q, k, v of [N, T, heads, size], log decay and effective beta
  DeviceTensor o;
  DraftPlaces places;
  double scale;
  int32_t T;
};
static_assert(std::is_trivially_copyable_v<VerifyParams>);

template <class Real>
struct DraftTile {
  Real k[kDrafts][kTileKeys], q[kDrafts][kTileKeys];
  Real kk[kDrafts][kDrafts], kq[kDrafts][kDrafts];  // [t][a]: <k_t, k_a>, <q_t, k_a>
  Real path_decay[kDrafts];                         // w_t
  Real behind[kDrafts][kDrafts];                    // [t][a]: w_ta, where a is on the path of t
  Real decay[kDrafts], beta[kDrafts];
  uint32_t path[kDrafts];  // the ancestors of t, a bit each, and t itself
  int parent[kDrafts];
};

// Keys [key0, key0 + kTileKeys) of all tokens; zero past K and past T.
template <class Real>
__device__ void stage_keys(DraftTile<Real>& tile, const VerifyParams& p, int64_t n, int key_head, int key0) {
  for (int i = threadIdx.x; i < kDrafts * kTileKeys; i += kThreads) {
    const int t = i / kTileKeys, key = key0 + i % kTileKeys;
    const bool inside = t < p.T && key < p.in.K;
    tile.k[t][i % kTileKeys] = inside ? load<Real>(p.in.k, offset_of(p.in.k, n, t, key_head, key)) : Real(0);
    tile.q[t][i % kTileKeys] = inside ? load<Real>(p.in.q, offset_of(p.in.q, n, t, key_head, key)) : Real(0);
  }
}

// Paths and their decays: one warp, token after token, a lane an ancestor.
template <class Real>
__device__ void follow_paths(DraftTile<Real>& tile, int T) {
  const int a = threadIdx.x % 32;
  for (int t = 0; t < T; ++t) {
    const int parent = tile.parent[t];
    const Real decay = tile.decay[t];
    if (a < kDrafts) {
      tile.behind[t][a] = a == t ? Real(1) : parent >= 0 ? tile.behind[parent][a] * decay : Real(0);
    }
    if (a == 0) {
      tile.path[t] = (parent >= 0 ? tile.path[parent] : 0u) | 1u << t;
      tile.path_decay[t] = parent >= 0 ? tile.path_decay[parent] * decay : decay;
    }
    __syncwarp();
  }
}

// sum of w_ta of_a u_a over the tokens of a path below `before`. Others are left out and not multiplied by zero: they
// may be NaN.
template <class Real>
__device__ Real along_path(const Real (&behind)[kDrafts], const Real (&of)[kDrafts], const Real (&u)[kDrafts],
                           uint32_t path, int before) {
  Real sum = 0;
#pragma unroll
  for (int a = 0; a < kDrafts; ++a) {
    if (a < before && (path >> a & 1) != 0) sum += behind[a] * of[a] * u[a];
  }
  return sum;
}

template <class Real>
__global__ void __launch_bounds__(kThreads) verify_kernel(const __grid_constant__ VerifyParams p) {
  DraftTile<Real>& tile = *dynamic_shared<DraftTile<Real>>();
  const int64_t n = blockIdx.x / p.in.Hv;
  const int head = static_cast<int>(blockIdx.x % p.in.Hv), key_head = head / p.in.group, T = p.T;
  const int column = threadIdx.x;
  const bool valid = column < p.in.V;
  const int64_t slot = read_slot(p.places.pool, n);
  if (slot < 0) {
    for (int t = 0; t < T && valid; ++t) store<Real>(p.o, offset_of(p.o, n, t, head, column), Real(0));
    return;
  }
  if (threadIdx.x < T) {
    const int t = threadIdx.x;
    tile.parent[t] = draft_parent(p.places, n, t);
    const Real g = p.in.g.data == nullptr ? Real(0) : load<Real>(p.in.g, offset_of(p.in.g, n, t, head));
    tile.decay[t] = exp(clamp_log_decay(g));
    tile.beta[t] = p.in.beta.data == nullptr ? Real(1) : load<Real>(p.in.beta, offset_of(p.in.beta, n, t, head));
  }
  __syncthreads();
  if (threadIdx.x < 32) follow_paths(tile, T);

  const DeviceStates& source = p.places.source;
  const int64_t from = slot * source.row + head * source.head + column * source.value;
  const int of_t = threadIdx.x / kDrafts, of_a = threadIdx.x % kDrafts;
  Real along_k[kDrafts] = {}, along_q[kDrafts] = {}, kk = 0, kq = 0;
  for (int key0 = 0; key0 < p.in.K; key0 += kTileKeys) {
    __syncthreads();  // the tile before has been read
    stage_keys(tile, p, n, key_head, key0);
    __syncthreads();
    for (int i = 0; i < kTileKeys; ++i) {
      if (of_t < kDrafts) {
        kk += tile.k[of_t][i] * tile.k[of_a][i];
        kq += tile.q[of_t][i] * tile.k[of_a][i];
      }
      if (!valid || key0 + i >= p.in.K) continue;
      const Real s = load<Real>(source, from + (key0 + i) * source.key);
#pragma unroll
      for (int t = 0; t < kDrafts; ++t) {
        along_k[t] += s * tile.k[t][i];
        along_q[t] += s * tile.q[t][i];
      }
    }
  }
  if (of_t < kDrafts) {
    tile.kk[of_t][of_a] = kk;
    tile.kq[of_t][of_a] = kq;
  }
  __syncthreads();

  Real u[kDrafts] = {};
#pragma unroll
  for (int t = 0; t < kDrafts; ++t) {
    if (t >= T || !valid) continue;
    const uint32_t path = tile.path[t];
    const Real v = load<Real>(p.in.x, offset_of(p.in.x, n, t, head, column));
    const Real read = tile.path_decay[t] * along_k[t] + along_path(tile.behind[t], tile.kk[t], u, path, t);
    u[t] = tile.beta[t] * (v - read);
    const Real o = tile.path_decay[t] * along_q[t] + along_path(tile.behind[t], tile.kq[t], u, path, t + 1);
    store<Real>(p.o, offset_of(p.o, n, t, head, column), static_cast<Real>(p.scale) * o);
  }

  const int64_t row = draft_row(p.places, n);
  if (row < 0) return;
  const DeviceStates& states = p.places.states;
  const int64_t to = row * states.row + head * states.head + column * states.value;
  for (int key0 = 0; key0 < p.in.K; key0 += kTileKeys) {
    __syncthreads();
    stage_keys(tile, p, n, key_head, key0);
    __syncthreads();
    for (int i = 0; i < kTileKeys && key0 + i < p.in.K && valid; ++i) {
      const Real s = load<Real>(source, from + (key0 + i) * source.key);
      Real k[kDrafts];
#pragma unroll
      for (int a = 0; a < kDrafts; ++a) k[a] = tile.k[a][i];
      for (int t = 0; t < T; ++t) {
        const Real after = tile.path_decay[t] * s + along_path(tile.behind[t], k, u, tile.path[t], kDrafts);
        store<Real>(states, to + t * p.places.token_stride + (key0 + i) * states.key, after);
      }
    }
  }
}

// The call as PreparedInputs takes one.
flash_qla_forward_arguments as_forward(const Arguments& args) {
  flash_qla_forward_arguments forward{};
  forward.options = args.options;
  forward.q = args.q;
  forward.k = args.k;
  forward.v = args.v;
  forward.g = args.g;
  forward.beta = args.beta;
  forward.A_log = args.A_log;
  forward.dt_bias = args.dt_bias;
  return forward;
}

template <class Real>
size_t size_for(const Arguments& args, const Problem& p) {
  return workspace_bytes<PreparedInputs<Real>>(as_forward(args), false, p);
}

template <class Real>
Status run_in(const Arguments& args, const Problem& p, void* memory, cudaStream_t stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  if (p.T == 0) return Status();
  Workspace workspace(memory);
  const flash_qla_forward_arguments forward = as_forward(args);
  const PreparedInputs<Real> inputs(forward, false, p, &workspace);
  VerifyParams params{};
  FLASH_QLA_RETURN_IF_ERROR(inputs.prepare(forward, args.v, p, stream, &params.in));
  params.o = device_tensor(args.o);
  params.places = draft_places(args);
  params.scale = p.scale;
  params.T = static_cast<int32_t>(p.T);
  return launch("verify", verify_kernel<Real>, p.N * p.Hv, kThreads, sizeof(DraftTile<Real>), stream, params);
}

std::string reject(const Arguments&, const Problem& p) {
  return p.dtype == DType::kFloat64 ? "computes in float32 (float64 needs path cuda_reference)" : std::string();
}
std::string accept(const Arguments&, const Problem&) { return {}; }

size_t workspace_size(const Arguments& args, const Problem& p) {
  return computes_in_double(p) ? size_for<double>(args, p) : size_for<float>(args, p);
}

Status run(const Arguments& args, const Problem& p, void* memory, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return computes_in_double(p) ? run_in<double>(args, p, memory, cuda_stream)
                               : run_in<float>(args, p, memory, cuda_stream);
}

Status run_reference(const Arguments& args, const Problem& p, void* memory, void* stream) {
  return run_in<double>(args, p, memory, static_cast<cudaStream_t>(stream));
}

}  // namespace
}  // namespace cuda

const VerifyPath kCudaGenericVerify = {"cuda_generic", FLASH_QLA_CUDA,       false,
                                       cuda::reject,   cuda::workspace_size, cuda::run};
const VerifyPath kCudaOracleVerify = {"cuda_reference", FLASH_QLA_CUDA,         true,
                                      cuda::accept,     cuda::size_for<double>, cuda::run_reference};

}  // namespace flash_qla
