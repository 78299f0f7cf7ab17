// Path "cuda_verify": draft tokens at the speed of memory, for [V, K] states. As in decode.cu a warp has all keys of
// some columns, and their state stays in registers from token to token. A token that does not continue the one before
// it begins again from the pool's state and repeats the updates of its ancestors, whose u have stayed in shared memory
// in the place of their values: the same operations in the same order as where it was the next of a chain.
#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/generic/state_columns.cuh"
#include "cuda/generic/verify.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_verify_arguments;

struct VerifyColumnsParams {
  DeviceTensor q, k, v, o;  // [N, T, heads, dim]
  Gates gates;
  DraftPlaces places;
  Divisor slices;  // blocks that share a (row, value head)
  Divisor heads;   // value heads
  Divisor group;   // value heads of a key head
  int32_t T, V;
  int32_t l2norm;
  float scale;
};
static_assert(std::is_trivially_copyable_v<VerifyColumnsParams>);

// Up to so many blocks of 32 columns a call takes the time of one warp's instructions, and is spread over more warps.
// An H200 is 1.0 to 1.4 times as fast so with 64 blocks, and up to 1.3 times slower with 128.
constexpr int64_t kFewBlocks = 64;

// In shared memory: the tokens, their values or u (float), and which token each continues.
template <class Block>
size_t shared_bytes(int T) {
  return Block::shared_bytes(T) + sizeof(int) * static_cast<size_t>(T);
}

// S <- e^g S + k u^T
template <int kAccesses, int kVector>
__device__ void update(float (&state)[kAccesses][kVector], float decay, const float (&k)[kVector],
                       const float (&u)[kAccesses]) {
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) state[a][i] = fmaf(k[i], u[a], decay * state[a][i]);
  }
}

// The loop's instructions count: store() works the address out again, and branches.
__device__ inline void store_raw_at(const DeviceTensor& t, uint64_t address, float x) {
  const bool is_half = t.dtype == static_cast<int32_t>(DType::kFloat16);
  const uint16_t narrow = is_half ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
  if (is_wide(t)) {
    *reinterpret_cast<float*>(address) = x;
  } else {
    *reinterpret_cast<uint16_t*>(address) = narrow;
  }
}

// What a token's u takes, of the column whose sums a lane ends up with.
template <int kKeys, int kVector>
struct TokenOfLane {
  float k[kVector], decay, beta, value;

  __device__ void read(const SharedToken<kKeys>& s_token, int key0, float of_column) {
    load_shared(k, s_token.k + key0);
    decay = s_token.decay;
    beta = s_token.beta;
    value = of_column;
  }
};

template <class State, int kKeys, class Use>
__global__ void __launch_bounds__(Use::kThreads, Use::kBlocks)
    verify_columns_kernel(const __grid_constant__ VerifyColumnsParams p) {
  using Block = Columns<State, kKeys, Use>;
  constexpr int kVector = Block::kVector, kLanes = Block::kLanes, kGroups = Block::kGroups;
  constexpr int kAccesses = Block::kAccesses, kColumns = Block::kColumns;
  const int tokens = p.T;
  SharedToken<kKeys>* s_tokens = dynamic_shared<SharedToken<kKeys>>();
  float* s_values = reinterpret_cast<float*>(s_tokens + tokens);          // [T][kColumns]: v, and u behind it
  int* s_parents = reinterpret_cast<int*>(s_values + tokens * kColumns);  // [T]

  const Place place = place_of(p);
  const int64_t n = place.n;
  const int head = place.head, column0 = place.slice * kColumns;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  const int warp_column = static_cast<int>(threadIdx.x) / 32 * Block::kWarpColumns;
  const bool inside = column0 + warp_column < p.V;
  const int key0 = lane * kVector;
  // The column whose sums the lane ends up with, and whether it is the one of several such that stores o and u.
  constexpr int kPerColumn = kLanes / kAccesses;
  const int own = warp_column + lane / kPerColumn * kGroups + group;
  const bool stores = inside && lane % kPerColumn == 0;
  const auto store_output = [&](int t, float o) {
    if (stores) store<float>(p.o, offset_of(p.o, n, t, head, column0 + own), o);
  };
  constexpr int kStep = kGroups * kKeys;  // between accesses
  const int64_t place_in_state = static_cast<int64_t>(column0 + warp_column + group) * kKeys + key0;

  TokenStage<VerifyColumnsParams, kKeys, false, Use::kThreads, kColumns> stage(p, n, head, column0);
  FirstAddresses at{};
  at.index = index_address(p.places.pool.initial, n);
  at.source = state_address<State>(p.places.source, head, place_in_state);
  at.destination = state_address<State>(p.places.states, head, place_in_state);
  stage.find_first(at);
  begin_after_predecessors(at);
  // The state waits for the slot's index: that goes first, and the tokens fill the time.
  const RawSlot raw_slot = load_raw_slot(p.places.pool, n, at.index);
  stage.load_first(at);
  const int64_t slot = read_slot(p.places.pool, raw_slot);
  if (slot < 0) {
    for (int t = 0; t < tokens; ++t) store_output(t, 0.f);
    return;
  }
  const State* from = reinterpret_cast<const State*>(at.source) + slot * p.places.source.row;
  Vector<State> raw[kAccesses] = {};
  const auto load_state = [&] {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) raw[a] = load_vector<State, Use::kStreams>(from + a * kStep);
  };
  if (inside) load_state();
  const int64_t row = draft_row(p.places, n);
  if (threadIdx.x < tokens) s_parents[threadIdx.x] = draft_parent(p.places, n, threadIdx.x);
  stage.store_all(s_tokens, s_values);
  __syncthreads();
  if (!inside) return;

  float state[kAccesses][kVector];
  const auto unpack_state = [&] {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) unpack<State>(state[a], raw[a]);
  };
  // The state after token `last`, from the pool's. Every earlier token of the row has its u in s_values.
  const auto rebuild = [&](int last) {
    load_state();
    unpack_state();
    uint32_t path = 0;
    for (int a = last; a >= 0; a = s_parents[a]) path |= 1u << a;
    for (; path != 0; path &= path - 1) {
      const int token = __ffs(static_cast<int>(path)) - 1;
      float k[kVector], u[kAccesses];
      load_shared(k, s_tokens[token].k + key0);
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) u[a] = s_values[token * kColumns + warp_column + a * kGroups + group];
      update(state, s_tokens[token].decay, k, u);
    }
  };

  unpack_state();
  const bool is_tree = p.places.parents.data != nullptr, keeps = row >= 0;
  uint64_t output = address_of(p.o, offset_of(p.o, n, 0, head, column0 + own));
  const uint64_t output_step = static_cast<uint64_t>(p.o.stride[1]) * (is_wide(p.o) ? 4 : 2);
  State* to = reinterpret_cast<State*>(at.destination) + (keeps ? row : 0) * p.places.states.row;
  TokenOfLane<kKeys, kVector> token, next;
  token.read(s_tokens[0], key0, s_values[own]);
  for (int t = 0; t < tokens; ++t) {
    float q[kVector];
    load_shared(q, s_tokens[t].q + key0);
    const float kq = s_tokens[t].kq;
    // The next token comes out of shared memory beside this one's sums.
    const int after = min(t + 1, tokens - 1);
    next.read(s_tokens[after], key0, s_values[after * kColumns + own]);
    if (is_tree) {
      if (const int parent = s_parents[t]; parent != t - 1) rebuild(parent);
    }
    float along_k[kAccesses], along_q[kAccesses];
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      along_k[a] = dot(state[a], token.k);
      along_q[a] = dot(state[a], q);
    }
    scatter_sums<kLanes, 1>(along_k);
    scatter_sums<kLanes, 1>(along_q);
    // u = beta (v - e^g S^T k),  o = scale (e^g S^T q + <k, q> u)
    const float own_u = token.beta * fmaf(-token.decay, along_k[0], token.value);
    float u[kAccesses];
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      u[a] = kAccesses == 1 ? own_u : __shfl_sync(0xffffffffu, own_u, a * kPerColumn, kLanes);
    }
    update(state, token.decay, token.k, u);
    if (stores) store_raw_at(p.o, output, p.scale * fmaf(token.decay, along_q[0], own_u * kq));
    output += output_step;
    if (is_tree) {
      __syncwarp();  // the lanes that share a column have read its value
      if (stores) s_values[t * kColumns + own] = own_u;
      __syncwarp();
    }
    if (keeps) {
#pragma unroll
      for (int a = 0; a < kAccesses; ++a) store_vector<State, true>(to + a * kStep, pack<State>(state[a]));
    }
    to += p.places.token_stride;
    token = next;
  }
}

std::string reject(const Arguments& args, const Problem& p) {
  if (p.dtype == DType::kFloat64) return "computes in float32";
  if (!args.options.state_v_first) return "needs states of [V, K]";
  if (p.K != 64 && p.K != 128) return "needs K = 64 or 128";
  if (p.V % kValueQuantum != 0) return "needs V to be a multiple of 16";
  const bool wanted = present(args.states_out);
  const int64_t vector = 16 / size_of(dtype(args.state_pool));
  if (!moves_in_vectors(args.state_pool) ||
      (wanted && (!moves_in_vectors(states_after(args.states_out, 0)) || args.states_out.stride[1] % vector != 0))) {
    return "needs contiguous states on 16-byte boundaries";
  }
  return {};
}

size_t workspace_size(const Arguments&, const Problem&) { return 0; }

template <class State, int kKeys, class Use>
Status launch_columns(const Problem& p, VerifyColumnsParams params, const Queue& queue) {
  using Block = Columns<State, kKeys, Use>;
  const int64_t slices = ceil_div(p.V, Block::kColumns);
  params.slices = Divisor::by(slices);
  return launch_kernel("verify", verify_columns_kernel<State, kKeys, Use>, p.N * p.Hv * slices, Use::kThreads,
                       shared_bytes<Block>(params.T), queue.stream, queue.overlaps, params);
}

template <class State, int kKeys>
Status launch_use(const Problem& p, const VerifyColumnsParams& params, const Queue& queue) {
  constexpr bool kHalf = sizeof(State) == 2;
  // Decode's, with as many blocks as leave each thread the registers that this kernel takes, on each GPU.
  using Many = std::conditional_t<kHalf, ColumnsUse<128, kKeys == 64 ? 4 : 5, 4, true>, ColumnsUse<128, 4, 8, false>>;
  // A quarter of the columns a warp: a token takes a third of the instructions, and its sums less of their time. Two
  // blocks a multiprocessor leave registers enough on each GPU, and so few are all there at once.
  using Few = std::conditional_t<kHalf, ColumnsUse<256, 2, 1, true>, ColumnsUse<256, 2, 2, false>>;
  return p.N * p.Hv * ceil_div(p.V, int64_t{32}) <= kFewBlocks ? launch_columns<State, kKeys, Few>(p, params, queue)
                                                               : launch_columns<State, kKeys, Many>(p, params, queue);
}

template <class State>
Status launch_with(const Problem& p, const VerifyColumnsParams& params, const Queue& queue) {
  return p.K == 64 ? launch_use<State, 64>(p, params, queue) : launch_use<State, 128>(p, params, queue);
}

Status run(const Arguments& args, const Problem& p, void*, void* cuda_stream) {
  if (p.T == 0) return Status();
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const Queue queue = {static_cast<cudaStream_t>(cuda_stream), allows_overlap(args.options.device_index)};
  VerifyColumnsParams params{};
  params.q = device_tensor(args.q);
  params.k = device_tensor(args.k);
  params.v = device_tensor(args.v);
  params.o = device_tensor(args.o);
  params.gates = device_gates(args, false);
  params.places = draft_places(args);
  params.T = static_cast<int32_t>(p.T);
  params.V = static_cast<int32_t>(p.V);
  params.heads = Divisor::by(p.Hv);
  params.group = Divisor::by(p.group);
  params.l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  params.scale = static_cast<float>(p.scale);
  switch (dtype(args.state_pool)) {
    case DType::kBFloat16:
      return launch_with<__nv_bfloat16>(p, params, queue);
    case DType::kFloat16:
      return launch_with<__half>(p, params, queue);
    default:
      return launch_with<float>(p, params, queue);
  }
}

}  // namespace
}  // namespace cuda

const VerifyPath kCudaVerify = {"cuda_verify", FLASH_QLA_CUDA, false, cuda::reject, cuda::workspace_size, cuda::run};

}  // namespace flash_qla
