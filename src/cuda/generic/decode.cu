// Path "cuda_decode": a few tokens a sequence at the speed of memory. The state is read once and written once, 16 bytes
// a thread and access, all of a thread's loads in flight before the first is used, and stays in registers as it was
// read: nothing turns it round. A [V, K] state goes to warps that know nothing of each other, each with some columns; a
// [K, V] state to blocks that add up over their warps' keys. Activations and l2 norm are computed on the way.
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pool.cuh"
#include "cuda/generic/state_columns.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

struct DecodeParams {
  DeviceTensor q, k, v, o;  // [N, T, heads, dim]
  Gates gates;
  PoolIndices pool;
  DeviceStates source;       // the pool, or initial_state, or absent: zero
  DeviceStates destination;  // the pool, or final_state, or absent: not kept
  Divisor slices;            // blocks that share a (row, value head)
  Divisor heads;             // value heads
  Divisor group;             // value heads of a key head
  int32_t T, V;
  int32_t l2norm;
  int32_t per_block;  // slices of columns that a block takes one after another; one token, [V, K] states
  float scale;
};
static_assert(std::is_trivially_copyable_v<DecodeParams>);

// A block takes more slices, for which the tokens are then staged once, as long as so many blocks are left: three to
// each of 132 multiprocessors.
constexpr int64_t kFewestBlocks = 396;

// The row of `source` that row n starts from, or kNoSlot: from zero.
__device__ inline int64_t source_row(const DecodeParams& p, int64_t n, int64_t slot) {
  return p.source.data == nullptr ? kNoSlot : p.pool.used ? slot : n;
}

// The row of `destination` that gets the state after a call's last token, or kNoSlot: none. Its index was read early.
__device__ inline RawIndex load_last_row(const DecodeParams& p, int64_t n) {
  return p.pool.used && !p.pool.per_token ? load_raw_index(p.pool.final, index_address(p.pool.final, n)) : RawIndex{};
}
__device__ inline int64_t last_row(const DecodeParams& p, int64_t n, RawIndex raw) {
  if (p.destination.data == nullptr || p.pool.per_token) return kNoSlot;
  return p.pool.used ? slot_or_none(p.pool, unpack(p.pool.final, raw)) : n;
}

// The update of every kernel below needs two sums over the keys, both of the state before the token, so that one pass
// serves u and o:
//   u = beta (v - e^g S^T k),  o = scale (e^g S^T q + <k, q> u),  S <- e^g S + k u^T

template <class State, int kKeys, bool kOneToken, class Use>
__global__ void __launch_bounds__(Use::kThreads, Use::kBlocks)
    decode_columns_kernel(const __grid_constant__ DecodeParams p) {
  using Block = Columns<State, kKeys, Use>;
  constexpr int kVector = Block::kVector, kLanes = Block::kLanes, kGroups = Block::kGroups;
  constexpr int kAccesses = Block::kAccesses, kColumns = Block::kColumns;
  const int tokens = kOneToken ? 1 : p.T;
  SharedToken<kKeys>* s_tokens = dynamic_shared<SharedToken<kKeys>>();
  float* s_values = reinterpret_cast<float*>(s_tokens + tokens);  // [T][kColumns]

  const Place place = place_of(p);
  const int64_t n = place.n;
  const int slices = kOneToken && Block::kSlices > 1 ? p.per_block : 1;
  const int head = place.head, column0 = place.slice * slices * kColumns;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  const int warp_column = static_cast<int>(threadIdx.x) / 32 * Block::kWarpColumns;
  const auto inside = [&](int slice) { return column0 + slice * kColumns + warp_column < p.V; };
  const int key0 = lane * kVector;
  // The column whose sums the lane ends up with, and whether it is the one of several such that stores o.
  constexpr int kPerColumn = kLanes / kAccesses;
  const int own = warp_column + lane / kPerColumn * kGroups + group;
  const auto store_output = [&](int t, int slice, float o) {
    if (inside(slice) && lane % kPerColumn == 0) {
      store<float>(p.o, offset_of(p.o, n, t, head, column0 + slice * kColumns + own), o);
    }
  };
  constexpr int kStep = kGroups * kKeys;  // between accesses
  const int64_t place_in_state = static_cast<int64_t>(column0 + warp_column + group) * kKeys + key0;

  TokenStage<DecodeParams, kKeys, kOneToken, Use::kThreads, kColumns> stage(p, n, head, column0, slices * kColumns);
  FirstAddresses at = {index_address(p.pool.initial, n), state_address<State>(p.source, head, place_in_state),
                       state_address<State>(p.destination, head, place_in_state)};
  stage.find_first(at);
  begin_after_predecessors(at);
  // The state waits for the slot's index: that goes first, and the tokens fill the time.
  const RawSlot raw_slot = load_raw_slot(p.pool, n, at.index);
  stage.load_first(at);
  const int64_t slot = read_slot(p.pool, raw_slot);
  if (slot == kSkipRow) {
    for (int t = 0; t < tokens; ++t) {
      for (int slice = 0; slice < slices; ++slice) store_output(t, slice, 0.f);
    }
    return;
  }
  Vector<State> raw[kAccesses] = {};
  const int64_t from_row = source_row(p, n, slot);
  const auto load_state = [&](int slice) {
    if (from_row < 0 || !inside(slice)) return;
    const State* from = reinterpret_cast<const State*>(at.source) + from_row * p.source.row + slice * kColumns * kKeys;
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      raw[a] = load_vector<State, Use::kStreams>(from + a * kStep);
    }
  };
  load_state(0);
  const RawIndex raw_last = load_last_row(p, n);
  stage.store_all(s_tokens, s_values);
  __syncthreads();

#pragma unroll 1
  for (int slice = 0; slice < slices && inside(slice); ++slice) {
    float state[kAccesses][kVector];
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) unpack<State>(state[a], raw[a]);
    if (slice + 1 < slices) load_state(slice + 1);
    const auto keep = [&](int64_t row) {
      if (row < 0) return;
      State* to = reinterpret_cast<State*>(at.destination) + row * p.destination.row + slice * kColumns * kKeys;
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
        store_vector<State, Use::kStreams>(to + a * kStep, pack<State>(state[a]));
      }
    };
    for (int t = 0; t < tokens; ++t) {
      const SharedToken<kKeys>& s_token = s_tokens[t];
      const float decay = s_token.decay;
      float k[kVector], along_k[kAccesses], along_q[kAccesses];
      load_shared(k, s_token.k + key0);
      {
        float q[kVector];
        load_shared(q, s_token.q + key0);
#pragma unroll
        for (int a = 0; a < kAccesses; ++a) {
          along_k[a] = dot(state[a], k);
          along_q[a] = dot(state[a], q);
        }
      }
      scatter_sums<kLanes, 1>(along_k);
      scatter_sums<kLanes, 1>(along_q);
      const float value = s_values[(t + slice) * kColumns + own];  // one of the two is zero
      const float own_u = s_token.beta * fmaf(-decay, along_k[0], value);
      store_output(t, slice, p.scale * fmaf(decay, along_q[0], own_u * s_token.kq));
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
        const float u = __shfl_sync(0xffffffffu, own_u, a * kPerColumn, kLanes);
#pragma unroll
        for (int i = 0; i < kVector; ++i) state[a][i] = fmaf(k[i], u, decay * state[a][i]);
      }
      if (p.pool.per_token) keep(write_slot(p.pool, n, t));
    }
    keep(last_row(p, n, raw_last));
  }
}

// [K, V] states: the values of a key lie side by side. A block has some columns, and its warps share the keys.
template <class State, int kKeys, class Use>
struct Rows {
  static constexpr int kVector = Vector<State>::kSize;  // columns of a lane
  static constexpr int kColumns = Use::kColumns;
  static constexpr int kRowLanes = kColumns / kVector;  // lanes of a row
  static constexpr int kGroups = 32 / kRowLanes;        // rows of an access of a warp
  static constexpr int kWarps = Use::kThreads / 32;
  static constexpr int kAccesses = kKeys / kWarps / kGroups;  // a lane's rows, one below the other
  // Columns whose sums over its warp's rows a lane ends up with.
  static constexpr int kLeft = kVector / kGroups;
  static_assert(kLeft >= 1 && kAccesses >= 1 && kColumns <= Use::kThreads);

  // In shared memory: the tokens, their values (float), u and the sums over each warp's keys.
  static size_t shared_bytes(int T) {
    return static_cast<size_t>(T) * (sizeof(SharedToken<kKeys>) + sizeof(float) * kColumns) +
           sizeof(float) * (2 * kWarps + 1) * kColumns;
  }
};

template <class State, int kKeys, bool kOneToken, class Use>
__global__ void __launch_bounds__(Use::kThreads, Use::kBlocks)
    decode_rows_kernel(const __grid_constant__ DecodeParams p) {
  using Block = Rows<State, kKeys, Use>;
  constexpr int kVector = Block::kVector, kAccesses = Block::kAccesses, kColumns = Block::kColumns;
  constexpr int kWarps = Block::kWarps, kLeft = Block::kLeft;
  const int tokens = kOneToken ? 1 : p.T;
  SharedToken<kKeys>* s_tokens = dynamic_shared<SharedToken<kKeys>>();
  float* s_values = reinterpret_cast<float*>(s_tokens + tokens);  // [T][kColumns]
  float* s_u = s_values + tokens * kColumns;                      // [kColumns]
  float* s_sums = s_u + kColumns;                                 // [2][warp][kColumns]: along k, along q

  const Place place = place_of(p);
  const int64_t n = place.n;
  const int head = place.head, column0 = place.slice * kColumns, warp = threadIdx.x / 32;
  const int lane = threadIdx.x % Block::kRowLanes, group = threadIdx.x % 32 / Block::kRowLanes;
  const int key0 = (warp * Block::kGroups + group) * kAccesses;
  const bool inside = column0 + lane * kVector < p.V;
  const auto store_output = [&](int t, float o) {
    const int column = column0 + static_cast<int>(threadIdx.x);
    if (threadIdx.x < kColumns && column < p.V) store<float>(p.o, offset_of(p.o, n, t, head, column), o);
  };
  const int64_t place_in_state = static_cast<int64_t>(key0) * p.V + column0 + lane * kVector;

  TokenStage<DecodeParams, kKeys, kOneToken, Use::kThreads, kColumns> stage(p, n, head, column0);
  FirstAddresses at = {index_address(p.pool.initial, n), state_address<State>(p.source, head, place_in_state),
                       state_address<State>(p.destination, head, place_in_state)};
  stage.find_first(at);
  begin_after_predecessors(at);
  // The state waits for the slot's index: that goes first, and the tokens fill the time.
  const RawSlot raw_slot = load_raw_slot(p.pool, n, at.index);
  stage.load_first(at);
  const int64_t slot = read_slot(p.pool, raw_slot);
  if (slot == kSkipRow) {
    for (int t = 0; t < tokens; ++t) store_output(t, 0.f);
    return;
  }
  Vector<State> raw[kAccesses] = {};
  if (const int64_t row = source_row(p, n, slot); row >= 0 && inside) {
    const State* from = reinterpret_cast<const State*>(at.source) + row * p.source.row;
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      raw[a] = load_vector<State, Use::kStreams>(from + static_cast<int64_t>(a) * p.V);
    }
  }
  const RawIndex raw_last = load_last_row(p, n);
  stage.store_all(s_tokens, s_values);
  __syncthreads();

  float state[kAccesses][kVector];
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) unpack<State>(state[a], raw[a]);
  const auto keep = [&](int64_t row) {
    if (row < 0 || !inside) return;
    State* to = reinterpret_cast<State*>(at.destination) + row * p.destination.row;
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      store_vector<State, Use::kStreams>(to + static_cast<int64_t>(a) * p.V, pack<State>(state[a]));
    }
  };
  for (int t = 0; t < tokens; ++t) {
    const SharedToken<kKeys>& s_token = s_tokens[t];
    const float decay = s_token.decay;
    float k[kAccesses], along_k[kVector] = {}, along_q[kVector] = {};
    load_shared(k, s_token.k + key0);
    {
      float q[kAccesses];
      load_shared(q, s_token.q + key0);
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          along_k[i] = fmaf(state[a][i], k[a], along_k[i]);
          along_q[i] = fmaf(state[a][i], q[a], along_q[i]);
        }
      }
    }
    scatter_sums<Block::kGroups, Block::kRowLanes>(along_k);
    scatter_sums<Block::kGroups, Block::kRowLanes>(along_q);
    const int own = lane * kVector + group * kLeft;
    store_shared<kLeft>(s_sums + warp * kColumns + own, along_k);
    store_shared<kLeft>(s_sums + (kWarps + warp) * kColumns + own, along_q);
    __syncthreads();
    if (threadIdx.x < kColumns) {
      float of_k = 0.f, of_q = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        of_k += s_sums[w * kColumns + threadIdx.x];
        of_q += s_sums[(kWarps + w) * kColumns + threadIdx.x];
      }
      const float u = s_token.beta * fmaf(-decay, of_k, s_values[t * kColumns + threadIdx.x]);
      s_u[threadIdx.x] = u;
      store_output(t, p.scale * fmaf(decay, of_q, u * s_token.kq));
    }
    __syncthreads();
    float u[kVector];
    load_shared(u, s_u + lane * kVector);
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[a][i] = fmaf(k[a], u[i], decay * state[a][i]);
    }
    if (p.pool.per_token) keep(write_slot(p.pool, n, t));
  }
  keep(last_row(p, n, raw_last));
}

std::string reject(const Arguments& args, const Problem& p) {
  if (p.varlen) return "takes no cu_seqlens";
  if (p.dtype == DType::kFloat64) return "computes in float32";
  if (p.K != 64 && p.K != 128) return "needs K = 64 or 128";
  if (p.V % kValueQuantum != 0) return "needs V to be a multiple of 16";
  if (p.T > FLASH_QLA_MAX_DRAFT_TOKENS) return "takes at most 16 tokens a sequence";
  if (present(args.initial_state) && present(args.final_state) && args.initial_state.dtype != args.final_state.dtype) {
    return "needs initial_state and final_state of one dtype";
  }
  for (const Tensor* t : {&args.state_pool, &args.initial_state, &args.final_state}) {
    if (!moves_in_vectors(*t)) return "needs contiguous states on 16-byte boundaries";
  }
  return {};
}

size_t workspace_size(const Arguments&, const Problem&) { return 0; }

// How a [K, V] state is spread over threads; measured likewise.
template <int kOfThreads, int kOfBlocks, int kOfColumns, bool kOfStreams>
struct RowsUse {
  static constexpr int kThreads = kOfThreads, kBlocks = kOfBlocks, kColumns = kOfColumns;
  static constexpr bool kStreams = kOfStreams;
};

template <class Kernel>
Status launch_slices(const Problem& p, Kernel kernel, int threads, size_t shared_bytes, int64_t columns,
                     DecodeParams params, const Queue& queue) {
  const int64_t slices = ceil_div(p.V, columns);
  params.slices = Divisor::by(slices);
  return launch_kernel("decode", kernel, p.N * p.Hv * slices, threads, shared_bytes, queue.stream, queue.overlaps,
                       params);
}

template <class State, int kKeys, class Use>
Status launch_columns(const Problem& p, DecodeParams params, const Queue& queue) {
  using Block = Columns<State, kKeys, Use>;
  params.per_block = 1;
  const int64_t slices = p.N * p.Hv * ceil_div(p.V, Block::kColumns);
  while (p.T == 1 && params.per_block < Block::kSlices && slices / (2 * params.per_block) >= kFewestBlocks) {
    params.per_block *= 2;
  }
  return launch_slices(
      p, p.T == 1 ? decode_columns_kernel<State, kKeys, true, Use> : decode_columns_kernel<State, kKeys, false, Use>,
      Use::kThreads, Block::shared_bytes(params.T, params.per_block), params.per_block * Block::kColumns, params,
      queue);
}

template <class State, int kKeys, class Use>
Status launch_rows(const Problem& p, const DecodeParams& params, const Queue& queue) {
  using Block = Rows<State, kKeys, Use>;
  return launch_slices(
      p, p.T == 1 ? decode_rows_kernel<State, kKeys, true, Use> : decode_rows_kernel<State, kKeys, false, Use>,
      Use::kThreads, Block::shared_bytes(params.T), Block::kColumns, params, queue);
}

template <class State, int kKeys>
Status launch_for(const Problem& p, bool v_first, const DecodeParams& params, const Queue& queue) {
  constexpr bool kHalf = sizeof(State) == 2;
  using OfColumns = std::conditional_t<kHalf, ColumnsUse<128, 5, 4, true, 4>, ColumnsUse<128, 5, 8, false>>;
  using OfRows = RowsUse<128, 4, 64, kHalf>;
  return v_first ? launch_columns<State, kKeys, OfColumns>(p, params, queue)
                 : launch_rows<State, kKeys, OfRows>(p, params, queue);
}

template <class State>
Status launch_with(const Problem& p, bool v_first, const DecodeParams& params, const Queue& queue) {
  return p.K == 64 ? launch_for<State, 64>(p, v_first, params, queue)
                   : launch_for<State, 128>(p, v_first, params, queue);
}

Status run(const Arguments& args, const Problem& p, void*, void* cuda_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const Queue queue = {static_cast<cudaStream_t>(cuda_stream), allows_overlap(args.options.device_index)};
  const bool v_first = args.options.state_v_first != 0, pooled = present(args.state_pool);
  DecodeParams params{};
  params.q = device_tensor(args.q);
  params.k = device_tensor(args.k);
  params.v = device_tensor(args.v);
  params.o = device_tensor(args.o);
  params.gates = device_gates(args, false);
  params.pool = pool_indices(args);
  params.source = device_states(pooled ? args.state_pool : args.initial_state, v_first);
  params.destination = device_states(pooled ? args.state_pool : args.final_state, v_first);
  params.T = static_cast<int32_t>(p.T);
  params.V = static_cast<int32_t>(p.V);
  params.heads = Divisor::by(p.Hv);
  params.group = Divisor::by(p.group);
  params.l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  params.scale = static_cast<float>(p.scale);

  const Tensor& states =
      pooled ? args.state_pool : (present(args.initial_state) ? args.initial_state : args.final_state);
  switch (present(states) ? dtype(states) : DType::kFloat32) {
    case DType::kBFloat16:
      return launch_with<__nv_bfloat16>(p, v_first, params, queue);
    case DType::kFloat16:
      return launch_with<__half>(p, v_first, params, queue);
    default:
      return launch_with<float>(p, v_first, params, queue);
  }
}

}  // namespace
}  // namespace cuda

const ForwardPath kCudaDecode = {"cuda_decode", FLASH_QLA_CUDA, false, cuda::reject, cuda::workspace_size, cuda::run};

}  // namespace flash_qla
