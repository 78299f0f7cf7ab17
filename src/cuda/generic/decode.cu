// Path "cuda_decode": a few tokens a sequence at the speed of memory. The state is read once and written once, 16 bytes
// a thread and access, all of a thread's loads in flight before the first is used, and stays in registers as it was
// read: nothing turns it round. A [V, K] state goes to warps that know nothing of each other, each with some columns; a
// [K, V] state to blocks that add up over their warps' keys. Activations and l2 norm are computed on the way.
#include "cuda/common/bulk.cuh"
#include "cuda/generic/gates.cuh"
#include "cuda/generic/launch.h"
#include "cuda/generic/pool.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

constexpr int kValueQuantum = 16;  // V is a multiple of it, so that columns of 16-bit states fill 16-byte accesses

struct DecodeParams {
  DeviceTensor q, k, v, o;  // [N, T, heads, dim]
  Gates gates;
  PoolIndices pool;
  DeviceStates source;       // the pool, or initial_state, or absent: zero
  DeviceStates destination;  // the pool, or final_state, or absent: not kept
  int32_t T, V, Hv, group;
  int32_t slices;  // blocks that share a (row, value head)
  int32_t l2norm;
  int32_t overlaps;  // looked at by the launch: whether the device can start this beside the end of the kernel before
  float scale;
};
static_assert(std::is_trivially_copyable_v<DecodeParams>);

// Elements of State in a 32-bit word, and their conversion to and from float: one instruction packs both halves.
template <class State>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(State));

template <class State>
__device__ float unpack_word(uint32_t word, int i) {
  if constexpr (std::is_same_v<State, float>) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<State, __nv_bfloat16>) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    return i == 0 ? pair.x : pair.y;
  }
}

// `high` is looked at where a word holds two.
template <class State>
__device__ uint32_t pack_word(float low, float high) {
  if constexpr (std::is_same_v<State, float>) {
    return __float_as_uint(low);
  } else if constexpr (std::is_same_v<State, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// 16 bytes of states.
template <class State>
struct Vector {
  static constexpr int kSize = 4 * kPerWord<State>;
  uint32_t words[4];
};

template <class State, bool kStreams>
__device__ Vector<State> load_vector(const void* data, int64_t offset) {
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const State*>(data) + offset);
  const uint4 raw = kStreams ? __ldcs(from) : *from;
  return {raw.x, raw.y, raw.z, raw.w};
}

template <class State, bool kStreams>
__device__ void store_vector(void* data, int64_t offset, const Vector<State>& vector) {
  uint4* to = reinterpret_cast<uint4*>(static_cast<State*>(data) + offset);
  const uint4 raw = make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
  if constexpr (kStreams) {
    __stcs(to, raw);
  } else {
    *to = raw;
  }
}

template <class State>
__device__ void unpack(float (&x)[Vector<State>::kSize], const Vector<State>& vector) {
  constexpr int kWord = kPerWord<State>;
#pragma unroll
  for (int i = 0; i < Vector<State>::kSize; ++i) x[i] = unpack_word<State>(vector.words[i / kWord], i % kWord);
}

template <class State>
__device__ Vector<State> pack(const float (&x)[Vector<State>::kSize]) {
  constexpr int kWord = kPerWord<State>;
  Vector<State> vector;
#pragma unroll
  for (int w = 0; w < 4; ++w) vector.words[w] = pack_word<State>(x[w * kWord], x[w * kWord + kWord - 1]);
  return vector;
}

// A sum over kLanes lanes that lie kStride apart; all of them get it.
template <int kLanes, int kStride = 1>
__device__ float lane_sum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, distance * kStride);
  }
  return x;
}

// Sums of kSize numbers over kLanes lanes that lie kStride apart. Lanes halve among themselves what they have left to
// add, so that it takes about as many exchanges as there are numbers. In the end the l-th of the lanes has in x[0] the
// sum of number l * kSize / kLanes, and behind it those of the next ones where there are more numbers than lanes.
template <int kLanes, int kStride, int kSize>
__device__ void scatter_sums(float (&x)[kSize]) {
  const unsigned lane = threadIdx.x % 32;
  int left = kSize;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    if (left == 1) {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], distance * kStride);
      continue;
    }
    left /= 2;
    const bool high = (lane & static_cast<unsigned>(distance * kStride)) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = high ? x[i + left] : x[i], sent = high ? x[i] : x[i + left];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, distance * kStride);
    }
  }
}

// Keys or values side by side in a row of q, k or v, as they were read; `size`: of the row.
template <int kSize>
struct RawRun {
  RawQuad quads[kSize / 4];
};

template <int kSize>
__device__ RawRun<kSize> load_raw_run(const DeviceTensor& t, int64_t row, int first, int size) {
  RawRun<kSize> raw;
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) raw.quads[i] = load_raw_quad(t, row, first + 4 * i, size);
  return raw;
}

template <int kSize>
__device__ void unpack(float (&x)[kSize], const DeviceTensor& t, const RawRun<kSize>& raw) {
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    const float4 quad = unpack(t, raw.quads[i]);
    x[4 * i] = quad.x;
    x[4 * i + 1] = quad.y;
    x[4 * i + 2] = quad.z;
    x[4 * i + 3] = quad.w;
  }
}

// The l2 norm of a row that kLanes lanes hold, rounded to the row's dtype.
template <int kLanes, int kSize>
__device__ void normalize(float (&x)[kSize], int32_t dtype) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum = fmaf(x[i], x[i], sum);
  const float r = 1.f / sqrtf(lane_sum<kLanes>(sum) + static_cast<float>(kL2NormEps));
#pragma unroll
  for (int i = 0; i < kSize; i += 2) {
    const float2 pair = round_pair(dtype, make_float2(x[i] * r, x[i + 1] * r));
    x[i] = pair.x;
    x[i + 1] = pair.y;
  }
}

template <int kSize>
__device__ float dot(const float (&a)[kSize], const float (&b)[kSize]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// g and beta of a token as they were read, and with the options applied.
struct RawGates {
  uint32_t g = 0, beta = 0;
};
struct Rates {
  float decay, beta;
};

__device__ inline RawGates load_gates(const Gates& gates, int64_t n, int t, int head) {
  RawGates raw;
  if (gates.g.data != nullptr) raw.g = load_raw(gates.g, offset_of(gates.g, n, t, head));
  if (gates.beta.data != nullptr) raw.beta = load_raw(gates.beta, offset_of(gates.beta, n, t, head));
  return raw;
}

__device__ inline Rates rates_of(const Gates& gates, const RawGates& raw, int head) {
  float g = gates.g.data == nullptr ? 0.f : unpack(gates.g, raw.g);
  if (gates.use_gate) g = gate_rate<float>(gates, head) * softplus(biased_gate(gates, g, head));
  float beta = gates.beta.data == nullptr ? 1.f : unpack(gates.beta, raw.beta);
  if (gates.use_sigmoid) beta = gates.beta_range * sigmoid(beta);
  return {expf(clamp_log_decay(g)), beta};
}

// Before the first access to memory: waits for the kernels that came before in the stream, where this one was allowed
// to start beside their end, and then allows as much to the next.
__device__ inline void begin_after_predecessors() {
#if __CUDA_ARCH__ >= 900
  wait_for_predecessors();
  launch_dependents();
#endif
}

// Where a block is, and where it finds its state.
struct Place {
  int64_t n;
  int head, slice;
};

__device__ inline Place place_of(const DecodeParams& p) {
  const unsigned rest = blockIdx.x / static_cast<unsigned>(p.slices);
  return {rest / static_cast<unsigned>(p.Hv), static_cast<int>(rest % static_cast<unsigned>(p.Hv)),
          static_cast<int>(blockIdx.x % static_cast<unsigned>(p.slices))};
}

// The row of `source` that row n starts from, or kNoSlot: from zero.
__device__ inline int64_t source_row(const DecodeParams& p, int64_t n, int64_t slot) {
  return p.source.data == nullptr ? kNoSlot : p.pool.used ? slot : n;
}

// The row of `destination` that gets the state after a call's last token, or kNoSlot: none.
__device__ inline int64_t last_row(const DecodeParams& p, int64_t n) {
  if (p.destination.data == nullptr || p.pool.per_token) return kNoSlot;
  return p.pool.used ? write_slot(p.pool, n, 0) : n;
}

// The update of every kernel below needs two sums over the keys, both of the state before the token, so that one pass
// serves u and o:
//   u = beta (v - e^g S^T k),  o = scale (e^g S^T q + <k, q> u),  S <- e^g S + k u^T

// [V, K] states: the keys of a column lie side by side.
template <class State, int kKeys, class Use>
struct Columns {
  static constexpr int kVector = Vector<State>::kSize;  // keys of a lane
  static constexpr int kLanes = kKeys / kVector;        // lanes of a column
  static constexpr int kGroups = 32 / kLanes;           // columns of an access of a warp
  static constexpr int kAccesses = Use::kAccesses;
  static constexpr int kColumns = kAccesses * kGroups;  // of a warp
  static constexpr int kThreads = Use::kThreads;
  static constexpr int kBlockColumns = kThreads / 32 * kColumns;
  static_assert(kValueQuantum % kColumns == 0, "a warp has all of its columns or none");
  static_assert(kLanes % kAccesses == 0, "a lane ends up with one column's sums");
};

template <class State, int kKeys, class Use>
__global__ void __launch_bounds__(Use::kThreads, Use::kBlocks)
    decode_columns_kernel(const __grid_constant__ DecodeParams p) {
  using Warp = Columns<State, kKeys, Use>;
  constexpr int kVector = Warp::kVector, kLanes = Warp::kLanes, kGroups = Warp::kGroups, kAccesses = Warp::kAccesses;
  const Place place = place_of(p);
  const int64_t n = place.n;
  const int head = place.head, lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  const int column0 = place.slice * Warp::kBlockColumns + static_cast<int>(threadIdx.x / 32) * Warp::kColumns;
  if (column0 >= p.V) return;
  const int key0 = lane * kVector;
  // The column whose sums the lane ends up with, and whether it is the one of several such that stores o.
  constexpr int kPerColumn = kLanes / kAccesses;
  const int own_column = column0 + lane / kPerColumn * kGroups + group;
  const bool stores_output = lane % kPerColumn == 0;

  begin_after_predecessors();
  // The first token is on its way while the slot's index and then the state are.
  RawRun<kVector> raw_q, raw_k;
  uint32_t raw_v;
  RawGates raw_gates;
  const auto load_token = [&](int t) {
    raw_q = load_raw_run<kVector>(p.q, offset_of(p.q, n, t, head / p.group), key0, kKeys);
    raw_k = load_raw_run<kVector>(p.k, offset_of(p.k, n, t, head / p.group), key0, kKeys);
    raw_v = load_raw(p.v, offset_of(p.v, n, t, head, own_column));
    raw_gates = load_gates(p.gates, n, t, head);
  };
  load_token(0);
  const auto store_output = [&](int t, float o) {
    if (stores_output) store<float>(p.o, offset_of(p.o, n, t, head, own_column), o);
  };
  const int64_t slot = read_slot(p.pool, n);
  if (slot == kSkipRow) {
    for (int t = 0; t < p.T; ++t) store_output(t, 0.f);
    return;
  }
  const auto offset_in = [&](const DeviceStates& states, int64_t row, int a) {
    return row * states.row + head * states.head + static_cast<int64_t>(column0 + a * kGroups + group) * kKeys + key0;
  };
  Vector<State> raw[kAccesses] = {};
  if (const int64_t row = source_row(p, n, slot); row >= 0) {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      raw[a] = load_vector<State, Use::kStreams>(p.source.data, offset_in(p.source, row, a));
    }
  }
  const int64_t last = last_row(p, n);
  float state[kAccesses][kVector];
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) unpack<State>(state[a], raw[a]);
  const auto keep = [&](int64_t row) {
    if (row < 0) return;
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      store_vector<State, Use::kStreams>(p.destination.data, offset_in(p.destination, row, a), pack<State>(state[a]));
    }
  };

  for (int t = 0; t < p.T; ++t) {
    float q[kVector], k[kVector];
    unpack(q, p.q, raw_q);
    unpack(k, p.k, raw_k);
    const float v = unpack(p.v, raw_v);
    const Rates rates = rates_of(p.gates, raw_gates, head);
    if (t + 1 < p.T) load_token(t + 1);
    if (p.l2norm) {
      normalize<kLanes>(q, p.q.dtype);
      normalize<kLanes>(k, p.k.dtype);
    }
    const float kq = lane_sum<kLanes>(dot(k, q));
    float along_k[kAccesses], along_q[kAccesses];
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      along_k[a] = dot(state[a], k);
      along_q[a] = dot(state[a], q);
    }
    scatter_sums<kLanes, 1>(along_k);
    scatter_sums<kLanes, 1>(along_q);
    const float own_u = rates.beta * fmaf(-rates.decay, along_k[0], v);
    store_output(t, p.scale * fmaf(rates.decay, along_q[0], own_u * kq));
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      const float u = __shfl_sync(0xffffffffu, own_u, a * kPerColumn, kLanes);
#pragma unroll
      for (int i = 0; i < kVector; ++i) state[a][i] = fmaf(k[i], u, rates.decay * state[a][i]);
    }
    if (p.pool.per_token) keep(write_slot(p.pool, n, t));
  }
  keep(last);
}

// The tokens of a row in shared memory, with the options applied.
template <int kKeys>
struct SharedToken {
  alignas(16) float q[kKeys], k[kKeys];
  float decay, beta;
  float kq;  // <k, q>
};

// [K, V] states: the values of a key lie side by side. A block has some columns, and its warps share the keys.
template <class State, int kKeys, class Use>
struct Rows {
  static constexpr int kVector = Vector<State>::kSize;       // columns of a lane
  static constexpr int kRowLanes = Use::kColumns / kVector;  // lanes of a row
  static constexpr int kGroups = 32 / kRowLanes;             // rows of an access of a warp
  static constexpr int kThreads = Use::kThreads, kWarps = kThreads / 32;
  static constexpr int kAccesses = kKeys / kWarps / kGroups;  // a lane's rows, one below the other
  static constexpr int kColumns = Use::kColumns;
  static_assert(kRowLanes <= 32 && kAccesses >= 1 && kColumns <= kThreads);
  // What a lane is left with after the sums over its warp's rows.
  static constexpr int kLeft = kVector > kGroups ? kVector / kGroups : 1;

  // In shared memory: the tokens, their values (float), sums over each warp's keys and u.
  static __host__ __device__ size_t shared_bytes(int T) {
    return static_cast<size_t>(T) * (sizeof(SharedToken<kKeys>) + sizeof(float) * kColumns) +
           sizeof(float) * (2 * kWarps + 1) * kColumns;
  }
};

// kSize floats of shared memory side by side, on a boundary of as many.
template <int kSize>
__device__ void load_shared(float (&x)[kSize], const float* s_from) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    if constexpr (kSize % 4 == 0) {
      const float4 quad = *reinterpret_cast<const float4*>(s_from + i);
      x[i] = quad.x;
      x[i + 1] = quad.y;
      x[i + 2] = quad.z;
      x[i + 3] = quad.w;
    } else if constexpr (kSize == 2) {
      const float2 pair = *reinterpret_cast<const float2*>(s_from);
      x[0] = pair.x;
      x[1] = pair.y;
    } else {
      x[0] = *s_from;
    }
  }
}

template <int kLeft, int kSize>
__device__ void store_shared(float* s_to, const float (&x)[kSize]) {
  static_assert(kLeft == 1 || kLeft == 2 || kLeft % 4 == 0);
  if constexpr (kLeft % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kLeft; i += 4) {
      *reinterpret_cast<float4*>(s_to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  } else if constexpr (kLeft == 2) {
    *reinterpret_cast<float2*>(s_to) = make_float2(x[0], x[1]);
  } else {
    *s_to = x[0];
  }
}

// Fills shared memory with a row's tokens in two steps, so that the loads of the first ones run beside those of the
// state. A warp takes one row of q or k at a time, one thread the gates of a token.
template <int kKeys, int kThreads, int kColumns>
class TokenStage {
 public:
  static_assert(kKeys / 4 <= 32);

  __device__ TokenStage(const DecodeParams& p, int64_t n, int head, int column0)
      : p_(p), n_(n), head_(head), column0_(column0) {}

  __device__ void load_first() {
    row_ = load_row(threadIdx.x / 32);
    value_ = load_value(threadIdx.x);
    if (has_gates()) gates_ = load_gates(p_.gates, n_, gate_token(), head_);
  }

  __device__ void store_all(SharedToken<kKeys>* s_tokens, float* s_values) {
    store_row(s_tokens, threadIdx.x / 32, row_);
    for (int row = threadIdx.x / 32 + kThreads / 32; row < 2 * p_.T; row += kThreads / 32) {
      store_row(s_tokens, row, load_row(row));
    }
    store_value(s_values, threadIdx.x, value_);
#pragma unroll 4
    for (int i = threadIdx.x + kThreads; i < p_.T * kColumns; i += kThreads) store_value(s_values, i, load_value(i));
    if (has_gates()) {
      const Rates rates = rates_of(p_.gates, gates_, head_);
      s_tokens[gate_token()].decay = rates.decay;
      s_tokens[gate_token()].beta = rates.beta;
    }
  }

 private:
  // The last warp's threads: with one token it has no row to take.
  __device__ int gate_token() const { return static_cast<int>(threadIdx.x) - (kThreads - 32); }
  __device__ bool has_gates() const { return gate_token() >= 0 && gate_token() < p_.T; }

  // Row 2 t is q of token t, row 2 t + 1 its k.
  __device__ const DeviceTensor& row_tensor(int row) const { return row % 2 == 0 ? p_.q : p_.k; }
  __device__ RawRun<4> load_row(int row) const {
    if (row >= 2 * p_.T) return {};
    const DeviceTensor& x = row_tensor(row);
    return load_raw_run<4>(x, offset_of(x, n_, row / 2, head_ / p_.group), 4 * (threadIdx.x % 32), kKeys);
  }
  __device__ void store_row(SharedToken<kKeys>* s_tokens, int row, const RawRun<4>& raw) const {
    if (row >= 2 * p_.T) return;  // the same for a whole warp
    const DeviceTensor& x = row_tensor(row);
    float quad[4];
    unpack(quad, x, raw);
    if (p_.l2norm) normalize<32>(quad, x.dtype);
    const int key = 4 * (threadIdx.x % 32);
    SharedToken<kKeys>& token = s_tokens[row / 2];
    if (key < kKeys) store_shared<4>((row % 2 == 0 ? token.q : token.k) + key, quad);
  }

  __device__ uint32_t load_value(int i) const {
    const int column = column0_ + i % kColumns;
    return i < p_.T * kColumns && column < p_.V ? load_raw(p_.v, offset_of(p_.v, n_, i / kColumns, head_, column)) : 0;
  }
  __device__ void store_value(float* s_values, int i, uint32_t raw) const {
    if (i < p_.T * kColumns) s_values[i] = unpack(p_.v, raw);
  }

  const DecodeParams& p_;
  int64_t n_;
  int head_, column0_;
  RawRun<4> row_{};
  uint32_t value_ = 0;
  RawGates gates_;
};

template <class State, int kKeys, class Use>
__global__ void __launch_bounds__(Use::kThreads, Use::kBlocks)
    decode_rows_kernel(const __grid_constant__ DecodeParams p) {
  using Block = Rows<State, kKeys, Use>;
  constexpr int kVector = Block::kVector, kAccesses = Block::kAccesses, kColumns = Block::kColumns;
  constexpr int kWarps = Block::kWarps, kLeft = Block::kLeft;
  extern __shared__ float4 s_memory[];
  SharedToken<kKeys>* s_tokens = reinterpret_cast<SharedToken<kKeys>*>(s_memory);
  float* s_values = reinterpret_cast<float*>(s_tokens + p.T);  // [T][kColumns]
  float* s_u = s_values + p.T * kColumns;                      // [kColumns]
  float* s_sums = s_u + kColumns;                              // [2][warp][kColumns]: along k, along q

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

  begin_after_predecessors();
  // The first tokens are on their way while the slot's index and then the state are.
  TokenStage<kKeys, Block::kThreads, kColumns> stage(p, n, head, column0);
  stage.load_first();
  const int64_t slot = read_slot(p.pool, n);
  if (slot == kSkipRow) {
    for (int t = 0; t < p.T; ++t) store_output(t, 0.f);
    return;
  }
  const auto offset_in = [&](const DeviceStates& states, int64_t row, int a) {
    return row * states.row + head * states.head + static_cast<int64_t>(key0 + a) * p.V + column0 + lane * kVector;
  };
  Vector<State> raw[kAccesses] = {};
  if (const int64_t row = source_row(p, n, slot); row >= 0 && inside) {
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      raw[a] = load_vector<State, Use::kStreams>(p.source.data, offset_in(p.source, row, a));
    }
  }
  const int64_t last = last_row(p, n);
  stage.store_all(s_tokens, s_values);
  __syncthreads();
  for (int t = warp; t < p.T; t += kWarps) {
    float q[4] = {}, k[4] = {};
    const int key = 4 * (threadIdx.x % 32);
    if (key < kKeys) {
      load_shared(q, s_tokens[t].q + key);
      load_shared(k, s_tokens[t].k + key);
    }
    const float kq = lane_sum<32>(dot(k, q));
    if (threadIdx.x % 32 == 0) s_tokens[t].kq = kq;
  }

  float state[kAccesses][kVector];
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) unpack<State>(state[a], raw[a]);
  const auto keep = [&](int64_t row) {
    if (row < 0 || !inside) return;
#pragma unroll
    for (int a = 0; a < kAccesses; ++a) {
      store_vector<State, Use::kStreams>(p.destination.data, offset_in(p.destination, row, a), pack<State>(state[a]));
    }
  };

  for (int t = 0; t < p.T; ++t) {
    const SharedToken<kKeys>& s_token = s_tokens[t];
    float k[kAccesses];
    load_shared(k, s_token.k + key0);
    float along_k[kVector] = {}, along_q[kVector] = {};
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
    const int own = lane * kVector + group * kVector / Block::kGroups;
    store_shared<kLeft>(s_sums + warp * kColumns + own, along_k);
    store_shared<kLeft>(s_sums + (kWarps + warp) * kColumns + own, along_q);
    __syncthreads();
    const float decay = s_token.decay;
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
  keep(last);
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
  if (present(args.initial_state) && present(args.final_state) && args.initial_state.dtype != args.final_state.dtype) {
    return "needs initial_state and final_state of one dtype";
  }
  for (const Tensor* t : {&args.state_pool, &args.initial_state, &args.final_state}) {
    if (!moves_in_vectors(*t)) return "needs contiguous states on 16-byte boundaries";
  }
  return {};
}

size_t workspace_size(const Arguments&, const Problem&) { return 0; }

// [K, V] states below which a block takes few columns of one: two blocks for each of a large GPU's 132 multiprocessors.
constexpr int64_t kFewStates = 264;

// How a state is spread over threads; each as measured (docs/design/cuda_generic.md).
template <int kOfThreads, int kOfBlocks, int kOfAccesses, bool kOfStreams>
struct ColumnsUse {
  static constexpr int kThreads = kOfThreads, kBlocks = kOfBlocks, kAccesses = kOfAccesses;
  static constexpr bool kStreams = kOfStreams;
};
template <int kOfThreads, int kOfBlocks, int kOfColumns, bool kOfStreams>
struct RowsUse {
  static constexpr int kThreads = kOfThreads, kBlocks = kOfBlocks, kColumns = kOfColumns;
  static constexpr bool kStreams = kOfStreams;
};

template <class State, int kKeys, class Use>
Status launch_columns(const Problem& p, DecodeParams params, cudaStream_t stream) {
  using Warp = Columns<State, kKeys, Use>;
  params.slices = static_cast<int32_t>(ceil_div(p.V, Warp::kBlockColumns));
  return launch_kernel("decode", decode_columns_kernel<State, kKeys, Use>, p.N * p.Hv * params.slices, Use::kThreads, 0,
                       stream, params.overlaps != 0, params);
}

template <class State, int kKeys, class Use>
Status launch_rows(const Problem& p, DecodeParams params, cudaStream_t stream) {
  using Block = Rows<State, kKeys, Use>;
  params.slices = static_cast<int32_t>(ceil_div(p.V, Block::kColumns));
  return launch_kernel("decode", decode_rows_kernel<State, kKeys, Use>, p.N * p.Hv * params.slices, Use::kThreads,
                       Block::shared_bytes(params.T), stream, params.overlaps != 0, params);
}

template <class State, int kKeys>
Status launch_for(const Problem& p, bool v_first, const DecodeParams& params, cudaStream_t stream) {
  constexpr bool kHalf = sizeof(State) == 2;
  if (v_first) {
    return launch_columns<State, kKeys, ColumnsUse<128, 4, kHalf && kKeys == 64 ? 4 : 8, kHalf>>(p, params, stream);
  }
  if (p.N * p.Hv < kFewStates) return launch_rows<State, kKeys, RowsUse<256, 3, 32, kHalf>>(p, params, stream);
  return launch_rows<State, kKeys, RowsUse<256, 3, 64, kHalf>>(p, params, stream);
}

template <class State>
Status launch_with(const Problem& p, bool v_first, const DecodeParams& params, cudaStream_t stream) {
  return p.K == 64 ? launch_for<State, 64>(p, v_first, params, stream)
                   : launch_for<State, 128>(p, v_first, params, stream);
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
  params.overlaps = allows_overlap(args.options.device_index);
  params.l2norm = args.options.use_qk_l2norm_in_kernel != 0;
  params.scale = static_cast<float>(p.scale);

  const Tensor& states =
      pooled ? args.state_pool : (present(args.initial_state) ? args.initial_state : args.final_state);
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
