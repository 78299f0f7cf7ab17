// Path "cuda_decode": a few tokens a sequence at the speed of memory. The state is read once and written once, 16 bytes a
// thread and access, all of a thread's loads in flight before the first is used; activations and l2 norm are computed on
// the way. One block has a few dozen columns of one (row, value head).
#include "cuda/generic/gates.cuh"
#include "cuda/generic/pool.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

constexpr int kThreads = 128;
constexpr int kLanes = 8;  // lanes per column: a sum over the keys is three shuffles
constexpr int kGroups = kThreads / kLanes;
constexpr int kValueQuantum = 16;  // V is a multiple of it, so that columns of 16-bit states fill 16-byte accesses

// State elements per thread: 128 bytes of float32 in flight from each thread (640 threads keep 80 KiB per multiprocessor
// in flight, and 4.8 TB/s at 700 ns need 25). Twice as many would spill beside q and k.
constexpr int kStatePerThread = 32;

struct DecodeParams {
  DeviceTensor q, k, v, o;  // [N, T, heads, dim]
  Gates gates;
  PoolIndices pool;
  DeviceStates source;       // the pool, or initial_state, or absent: zero
  DeviceStates destination;  // the pool, or final_state, or absent: not kept
  int32_t T, V, Hv, group;
  int32_t l2norm;
  float scale;
};
static_assert(std::is_trivially_copyable_v<DecodeParams>);

__device__ float lane_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Elements of State in 16 bytes, to and from float.
template <class State>
struct Vector {
  static constexpr int kSize = 16 / sizeof(State);
  State x[kSize];
};
__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ void assign(float& to, float x) { to = x; }
__device__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16_rn(x); }
__device__ void assign(__half& to, float x) { to = __float2half_rn(x); }

template <class State>
__device__ Vector<State> load_vector(const void* data, int64_t offset) {
  const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const State*>(data) + offset);
  Vector<State> result;
  static_assert(sizeof(result) == sizeof(raw));
  memcpy(&result, &raw, sizeof(raw));
  return result;
}

template <class State>
__device__ void store_vector(void* data, int64_t offset, const Vector<State>& vector) {
  uint4 raw;
  memcpy(&raw, &vector, sizeof(raw));
  *reinterpret_cast<uint4*>(static_cast<State*>(data) + offset) = raw;
}

// A block's columns of one state in registers: thread (group, lane) has of column `column0 + c * kGroups + group` the keys
// kVector * (lane + 8 j) + i, at state[c][kVector * j + i].
template <class State, int kKeys, bool kValueFirst>
struct Columns {
  static constexpr int kVector = Vector<State>::kSize;
  static constexpr int kPerLane = kKeys / kLanes;
  static constexpr int kColumns = kStatePerThread / kPerLane;
  static constexpr int kBlockColumns = kColumns * kGroups;
  // [K, V] states pass through shared memory, which turns rows of values into columns of keys. One word of padding keeps
  // keys in different banks.
  static constexpr int kPitch = kBlockColumns + 1;
  static constexpr int kSharedFloats = kValueFirst ? 1 : kKeys * kPitch;

  static __device__ int key(int lane, int j) { return kVector * (lane + kLanes * j); }

  static __device__ void load(float (&state)[kColumns][kPerLane], const DeviceStates& t, int64_t base, int column0,
                              int V, float* s_turn) {
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
    if constexpr (kValueFirst) {
      constexpr int kVectors = kPerLane / kVector;
      Vector<State> raw[kColumns][kVectors];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = column0 + c * kGroups + group;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (column < V) {
            raw[c][j] = load_vector<State>(t.data, base + static_cast<int64_t>(column) * kKeys + key(lane, j));
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const bool valid = column0 + c * kGroups + group < V;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) state[c][i] = valid ? to_float(raw[c][i / kVector].x[i % kVector]) : 0.f;
      }
    } else {
      constexpr int kChunks = kBlockColumns / kVector;  // 16-byte accesses per key
      constexpr int kKeyStep = kThreads / kChunks;
      const int chunk = threadIdx.x % kChunks, column = chunk * kVector, key0 = threadIdx.x / kChunks;
      const bool valid = column0 + column < V;
      Vector<State> raw[kKeys / kKeyStep];
#pragma unroll
      for (int j = 0; j < kKeys / kKeyStep; ++j) {
        if (valid) raw[j] = load_vector<State>(t.data, base + static_cast<int64_t>(key0 + j * kKeyStep) * V + column0 + column);
      }
#pragma unroll
      for (int j = 0; j < kKeys / kKeyStep; ++j) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          s_turn[(key0 + j * kKeyStep) * kPitch + column + i] = valid ? to_float(raw[j].x[i]) : 0.f;
        }
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          state[c][i] = s_turn[(key(lane, i / kVector) + i % kVector) * kPitch + c * kGroups + group];
        }
      }
      __syncthreads();
    }
  }

  static __device__ void store(const float (&state)[kColumns][kPerLane], const DeviceStates& t, int64_t base,
                               int column0, int V, float* s_turn) {
    const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
    if constexpr (kValueFirst) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = column0 + c * kGroups + group;
        if (column >= V) continue;
#pragma unroll
        for (int j = 0; j < kPerLane / kVector; ++j) {
          Vector<State> raw;
#pragma unroll
          for (int i = 0; i < kVector; ++i) assign(raw.x[i], state[c][j * kVector + i]);
          store_vector(t.data, base + static_cast<int64_t>(column) * kKeys + key(lane, j), raw);
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          s_turn[(key(lane, i / kVector) + i % kVector) * kPitch + c * kGroups + group] = state[c][i];
        }
      }
      __syncthreads();
      constexpr int kChunks = kBlockColumns / kVector;
      constexpr int kKeyStep = kThreads / kChunks;
      const int column = threadIdx.x % kChunks * kVector;
      for (int at = threadIdx.x / kChunks; column0 + column < V && at < kKeys; at += kKeyStep) {
        Vector<State> raw;
#pragma unroll
        for (int i = 0; i < kVector; ++i) assign(raw.x[i], s_turn[at * kPitch + column + i]);
        store_vector(t.data, base + static_cast<int64_t>(at) * V + column0 + column, raw);
      }
      __syncthreads();
    }
  }
};

// A lane's keys of a row of q or k, normalised where asked.
template <int kVector, int kPerLane>
__device__ void load_key_row(float (&part)[kPerLane], const DeviceTensor& x, int64_t row) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 4) {
    const int key = kVector * (lane + kLanes * (i / kVector)) + i % kVector;
    const float4 quad = load_quad(x, row, key, kPerLane * kLanes);
    part[i] = quad.x;
    part[i + 1] = quad.y;
    part[i + 2] = quad.z;
    part[i + 3] = quad.w;
  }
}

template <int kPerLane>
__device__ float lane_dot(const float (&a)[kPerLane], const float (&b)[kPerLane]) {
  float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum[i % 4] = fmaf(a[i], b[i], sum[i % 4]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <int kPerLane>
__device__ void normalize(float (&part)[kPerLane], int32_t dtype) {
  const float r = 1.f / sqrtf(lane_sum(lane_dot(part, part)) + static_cast<float>(kL2NormEps));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) part[i] = round_to<float>(dtype, part[i] * r);
}

// Five blocks a multiprocessor leave a thread 102 registers: state, q and k take 64.
template <class State, int kKeys, bool kValueFirst>
__global__ void __launch_bounds__(kThreads, 5) decode_kernel(const __grid_constant__ DecodeParams p) {
  using Block = Columns<State, kKeys, kValueFirst>;
  __shared__ float s_turn[Block::kSharedFloats];
  const int slices = (p.V + Block::kBlockColumns - 1) / Block::kBlockColumns;
  const unsigned rest = blockIdx.x / slices;
  const int column0 = static_cast<int>(blockIdx.x % slices) * Block::kBlockColumns;
  const int head = static_cast<int>(rest % p.Hv), group = threadIdx.x / kLanes;
  const int64_t n = rest / p.Hv;

  float q[Block::kPerLane], k[Block::kPerLane], v[Block::kColumns];
  float decay, beta;
  const auto load_token = [&](int t) {
    load_key_row<Block::kVector>(q, p.q, offset_of(p.q, n, t, head / p.group));
    load_key_row<Block::kVector>(k, p.k, offset_of(p.k, n, t, head / p.group));
#pragma unroll
    for (int c = 0; c < Block::kColumns; ++c) {
      const int column = column0 + c * kGroups + group;
      v[c] = column < p.V ? load<float>(p.v, offset_of(p.v, n, t, head, column)) : 0.f;
    }
    decay = expf(clamp_log_decay(log_decay<float>(p.gates, n, t, head, false)));
    beta = effective_beta<float>(p.gates, n, t, head);
  };
  const auto store_output = [&](int t, int c, float o) {
    const int column = column0 + c * kGroups + group;
    if (threadIdx.x % kLanes == 0 && column < p.V) store<float>(p.o, offset_of(p.o, n, t, head, column), o);
  };

  const int64_t slot = read_slot(p.pool, n);
  if (slot == kSkipRow) {
    for (int t = 0; t < p.T; ++t) {
#pragma unroll
      for (int c = 0; c < Block::kColumns; ++c) store_output(t, c, 0.f);
    }
    return;
  }
  float state[Block::kColumns][Block::kPerLane] = {};
  if (p.source.data != nullptr && (slot >= 0 || !p.pool.used)) {
    const int64_t row = p.pool.used ? slot : n;
    Block::load(state, p.source, row * p.source.row + head * p.source.head, column0, p.V, s_turn);
  }
  const auto keep = [&](int64_t row) {
    if (p.destination.data == nullptr || row < 0) return;
    Block::store(state, p.destination, row * p.destination.row + head * p.destination.head, column0, p.V, s_turn);
  };

  for (int t = 0; t < p.T; ++t) {
    load_token(t);
    if (p.l2norm) {
      normalize(q, p.q.dtype);
      normalize(k, p.k.dtype);
    }
    // Both sums are taken of the state before the token, so that one pass over it serves u and o:
    // u = beta (v - e^g S^T k), o = scale (e^g S^T q + <k, q> u), S <- e^g S + k u^T
    const float kq = lane_sum(lane_dot(k, q));
#pragma unroll
    for (int c = 0; c < Block::kColumns; ++c) {
      const float along_k = lane_sum(lane_dot(state[c], k)), along_q = lane_sum(lane_dot(state[c], q));
      const float u = beta * fmaf(-decay, along_k, v[c]);
      store_output(t, c, p.scale * fmaf(decay, along_q, u * kq));
#pragma unroll
      for (int i = 0; i < Block::kPerLane; ++i) state[c][i] = fmaf(k[i], u, decay * state[c][i]);
    }
    if (p.pool.per_token) keep(write_slot(p.pool, n, t));
  }
  if (!p.pool.per_token) keep(p.pool.used ? write_slot(p.pool, n, 0) : n);
}

// Whether states can be moved 16 bytes at a time: one (row, head) is contiguous and begins on a 16-byte boundary.
bool moves_in_vectors(const Tensor& t) {
  if (!present(t)) return true;
  const int64_t vector = 16 / size_of(dtype(t));
  return t.stride[3] == 1 && t.stride[2] == t.shape[3] && t.stride[0] % vector == 0 && t.stride[1] % vector == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
}

std::string reject(const Arguments& args, const Problem& p) {
  if (p.varlen) return "takes no cu_seqlens";
  if (p.dtype == DType::kFloat64) return "computes in float32";
  if (p.K != 64 && p.K != 128) return "needs K = 64 or 128";
  if (p.V % kValueQuantum != 0) return "needs V to be a multiple of 16";
  if (p.T > FLASH_QLA_MAX_DRAFT_TOKENS) return "takes at most 16 tokens a sequence";
  if (present(args.initial_state) && present(args.final_state) &&
      args.initial_state.dtype != args.final_state.dtype) {
    return "needs initial_state and final_state of one dtype";
  }
  for (const Tensor* t : {&args.state_pool, &args.initial_state, &args.final_state}) {
    if (!moves_in_vectors(*t)) return "needs contiguous states on 16-byte boundaries";
  }
  return {};
}

size_t workspace_size(const Arguments&, const Problem&) { return 0; }

template <class State, int kKeys, bool kValueFirst>
Status launch_for(const Problem& p, const DecodeParams& params, cudaStream_t stream) {
  using Block = Columns<State, kKeys, kValueFirst>;
  return launch("decode", decode_kernel<State, kKeys, kValueFirst>, p.N * p.Hv * ceil_div(p.V, Block::kBlockColumns),
                kThreads, 0, stream, params);
}

template <class State>
Status launch_with(const Problem& p, bool v_first, const DecodeParams& params, cudaStream_t stream) {
  if (p.K == 64) {
    return v_first ? launch_for<State, 64, true>(p, params, stream) : launch_for<State, 64, false>(p, params, stream);
  }
  return v_first ? launch_for<State, 128, true>(p, params, stream) : launch_for<State, 128, false>(p, params, stream);
}

Status run(const Arguments& args, const Problem& p, void*, void* cuda_stream) {
  const DeviceGuard guard(args.options.device_index);
  FLASH_QLA_RETURN_IF_ERROR(guard.status());
  const cudaStream_t stream = static_cast<cudaStream_t>(cuda_stream);
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
  params.Hv = static_cast<int32_t>(p.Hv);
  params.group = static_cast<int32_t>(p.group);
  params.l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  params.scale = static_cast<float>(p.scale);

  const Tensor& states = pooled ? args.state_pool : (present(args.initial_state) ? args.initial_state : args.final_state);
  switch (present(states) ? dtype(states) : DType::kFloat32) {
    case DType::kBFloat16:
      return launch_with<__nv_bfloat16>(p, v_first, params, stream);
    case DType::kFloat16:
      return launch_with<__half>(p, v_first, params, stream);
    default:
      return launch_with<float>(p, v_first, params, stream);
  }
}

}  // namespace
}  // namespace cuda

const ForwardPath kCudaDecode = {"cuda_decode", FLASH_QLA_CUDA, false, cuda::reject, cuda::workspace_size, cuda::run};

}  // namespace flash_qla
