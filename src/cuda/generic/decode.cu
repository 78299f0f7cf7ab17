// Path "cuda_decode": a few tokens a sequence at the speed of memory. The state is read once and written once, 16 bytes
// a thread and access, all of a thread's loads in flight before the first is used, and stays in registers as it was
// read: nothing turns it round. A [V, K] state goes to warps that know nothing of each other, each with some columns; a
// [K, V] state to blocks that add up over their warps' keys. Activations and l2 norm are computed on the way.
#include "cuda/common/bulk.cuh"
#include "cuda/common/gates.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/pool.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

constexpr int kValueQuantum = 16;  // V is a multiple of it, so that columns of 16-bit states fill 16-byte accesses

// Division of numbers below 2^31 by one that the host knows, in three instructions: a warp that has nothing else to do
// waits for every one of a division's twenty.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  static Divisor by(int64_t divisor) {
    Divisor d{static_cast<uint32_t>(divisor), 0, 0};
    while ((int64_t{1} << d.shift) < divisor) ++d.shift;
    d.multiplier = static_cast<uint32_t>((((uint64_t{1} << d.shift) - d.divisor) << 32) / d.divisor + 1);
    return d;
  }
  __device__ uint32_t quotient(uint32_t x) const { return (__umulhi(x, multiplier) + x) >> shift; }
};

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

// kStreams: says that the state will not be needed again soon.
template <class State, bool kStreams>
__device__ Vector<State> load_vector(const State* data) {
  const uint4* from = reinterpret_cast<const uint4*>(data);
  const uint4 raw = kStreams ? __ldcs(from) : *from;
  return {raw.x, raw.y, raw.z, raw.w};
}

template <class State, bool kStreams>
__device__ void store_vector(State* data, const Vector<State>& vector) {
  uint4* to = reinterpret_cast<uint4*>(data);
  const uint4 raw = make_uint4(vector.words[0], vector.words[1], vector.words[2], vector.words[3]);
  if constexpr (kStreams) {
    __stcs(to, raw);
  } else {
    // As one access: of an assignment the compiler makes four, which takes a tenth more with 16 rows.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
                 : "memory");
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

template <int kSize>
__device__ float dot(const float (&a)[kSize], const float (&b)[kSize]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kSize; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// Where a thread finds what it reads first, apart from the row's slot that the states' addresses still lack. A kernel
// works this out while it waits for those before it.
struct FirstAddresses {
  uint64_t index, source, destination;
  uint64_t q, k, v, g, beta, A_log, dt_bias;
};

__device__ inline uint64_t address_of(const DeviceTensor& t, int64_t offset) {
  return reinterpret_cast<uint64_t>(t.data) + static_cast<uint64_t>(offset) * (is_wide(t) ? 4 : 2);
}

__device__ inline uint32_t load_raw_at(const DeviceTensor& t, uint64_t address) {
  return is_wide(t) ? *reinterpret_cast<const uint32_t*>(address) : *reinterpret_cast<const uint16_t*>(address);
}

// g and beta of a token and what their activations take, as they were read; and what comes of them.
struct RawGates {
  uint32_t g = 0, beta = 0, A_log = 0, dt_bias = 0;
};
struct Rates {
  float decay, beta;
};

__device__ inline RawGates load_gates(const Gates& gates, const FirstAddresses& at) {
  RawGates raw;
  if (gates.g.data != nullptr) raw.g = load_raw_at(gates.g, at.g);
  if (gates.beta.data != nullptr) raw.beta = load_raw_at(gates.beta, at.beta);
  if (gates.use_gate) {
    raw.A_log = load_raw_at(gates.A_log, at.A_log);
    if (gates.dt_bias.data != nullptr) raw.dt_bias = load_raw_at(gates.dt_bias, at.dt_bias);
  }
  return raw;
}

__device__ inline Rates rates_of(const Gates& gates, const RawGates& raw) {
  float g = gates.g.data == nullptr ? 0.f : unpack(gates.g, raw.g);
  if (gates.use_gate) {
    if (gates.dt_bias.data != nullptr) g += unpack(gates.dt_bias, raw.dt_bias);
    g = -expf(unpack(gates.A_log, raw.A_log)) * softplus(g);
  }
  float beta = gates.beta.data == nullptr ? 1.f : unpack(gates.beta, raw.beta);
  if (gates.use_sigmoid) beta = gates.beta_range * sigmoid(beta);
  return {expf(clamp_log_decay(g)), beta};
}

// Which row, value head and slice of its columns a block has.
struct Place {
  int64_t n;
  int head, slice;
};

__device__ inline Place place_of(const DecodeParams& p) {
  const uint32_t rest = p.slices.quotient(blockIdx.x), n = p.heads.quotient(rest);
  return {n, static_cast<int>(rest - n * p.heads.divisor), static_cast<int>(blockIdx.x - rest * p.slices.divisor)};
}

// Of an element of row 0 and the block's head.
template <class State>
__device__ uint64_t state_address(const DeviceStates& states, int head, int64_t place) {
  return reinterpret_cast<uint64_t>(static_cast<State*>(states.data) + head * states.head + place);
}

// Before the first access to memory: waits for the kernels that came before in the stream, where this one was allowed
// to start beside their end, and then allows as much to the next.
__device__ inline void begin_after_predecessors([[maybe_unused]] const FirstAddresses& at) {
#if __CUDA_ARCH__ >= 900
  // No address has all its bits set. Asking makes the compiler work them out before the wait and not behind it.
  if ((at.index & at.source & at.destination & at.q & at.k & at.v & at.g & at.beta & at.A_log & at.dt_bias) ==
      ~uint64_t{0}) {
    __trap();
  }
  wait_for_predecessors();
  launch_dependents();
#endif
}

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

// A token in shared memory, with the options applied.
template <int kKeys>
struct SharedToken {
  alignas(16) float q[kKeys], k[kKeys];
  float decay, beta;
  float kq;  // <k, q>
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

// The first kLeft of them to shared memory, likewise.
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

// Fills shared memory with a row's tokens and their values in two steps, so that the loads of the first ones run beside
// those of the state. A warp takes q and k of one token at a time, a thread of the last warp its gates.
template <int kKeys, bool kOneToken, int kThreads, int kColumns>
class TokenStage {
 public:
  static_assert(kKeys / 4 <= 32 && kColumns <= kThreads);

  __device__ TokenStage(const DecodeParams& p, int64_t n, int head, int column0)
      : p_(p), n_(n), head_(head), column0_(column0) {}

  // Of the tokens that load_first() reads.
  __device__ void find_first(FirstAddresses& at) const {
    const int t = kOneToken ? 0 : min(warp(), tokens() - 1), key_head = this->key_head();
    at.q = address_of(p_.q, offset_of(p_.q, n_, t, key_head, key()));
    at.k = address_of(p_.k, offset_of(p_.k, n_, t, key_head, key()));
    at.v = address_of(p_.v, value_offset(threadIdx.x));
    const Gates& gates = p_.gates;
    at.g = address_of(gates.g, offset_of(gates.g, n_, gate_token(), head_));
    at.beta = address_of(gates.beta, offset_of(gates.beta, n_, gate_token(), head_));
    at.A_log = address_of(gates.A_log, offset_of(gates.A_log, head_));
    at.dt_bias = address_of(gates.dt_bias, offset_of(gates.dt_bias, head_));
  }

  __device__ void load_first(const FirstAddresses& at) {
    if (warp() < tokens()) {
      if (p_.q.quads && p_.k.quads) {
        if (key() < kKeys) {
          q_ = load_quad_at(p_.q, at.q);
          k_ = load_quad_at(p_.k, at.k);
        }
      } else {
        load_keys(kOneToken ? 0 : warp());
      }
    }
    if (has_value(threadIdx.x)) value_ = load_raw_at(p_.v, at.v);
    if (has_gates()) gates_ = load_gates(p_.gates, at);
  }

  __device__ void store_all(SharedToken<kKeys>* s_tokens, float* s_values) {
    if (warp() < tokens()) store_keys(s_tokens[kOneToken ? 0 : warp()]);
    store_value(s_values, threadIdx.x, value_);
    if constexpr (!kOneToken) {
      for (int t = warp() + kThreads / 32; t < tokens(); t += kThreads / 32) {
        load_keys(t);
        store_keys(s_tokens[t]);
      }
      for (int i = threadIdx.x + kThreads; i < tokens() * kColumns; i += kThreads) {
        store_value(s_values, i, has_value(i) ? load_raw(p_.v, value_offset(i)) : 0);
      }
    }
    if (has_gates()) {
      const Rates rates = rates_of(p_.gates, gates_);
      s_tokens[gate_token()].decay = rates.decay;
      s_tokens[gate_token()].beta = rates.beta;
    }
  }

 private:
  __device__ int tokens() const { return kOneToken ? 1 : p_.T; }
  static __device__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ int key() { return 4 * static_cast<int>(threadIdx.x % 32); }
  // The last warp's threads: with few tokens it has no keys to take.
  __device__ int gate_token() const { return kOneToken ? 0 : static_cast<int>(threadIdx.x) - (kThreads - 32); }
  __device__ bool has_gates() const {
    return threadIdx.x >= kThreads - 32 && static_cast<int>(threadIdx.x) - (kThreads - 32) < tokens();
  }

  __device__ int key_head() const { return static_cast<int>(p_.group.quotient(static_cast<uint32_t>(head_))); }
  static __device__ RawQuad load_quad_at(const DeviceTensor& t, uint64_t address) {
    RawQuad raw{};
    if (is_wide(t)) {
      const uint4 bits = *reinterpret_cast<const uint4*>(address);
      raw = {bits.x, bits.y, bits.z, bits.w};
    } else {
      const uint2 bits = *reinterpret_cast<const uint2*>(address);
      raw.x[0] = bits.x;
      raw.x[1] = bits.y;
    }
    return raw;
  }
  __device__ void load_keys(int t) {
    q_ = load_raw_quad(p_.q, offset_of(p_.q, n_, t, key_head()), key(), kKeys);
    k_ = load_raw_quad(p_.k, offset_of(p_.k, n_, t, key_head()), key(), kKeys);
  }
  __device__ void store_keys(SharedToken<kKeys>& token) const {
    float4 q = unpack(p_.q, q_), k = unpack(p_.k, k_);
    if (p_.l2norm) {
      q = normalized(p_.q.dtype, q);
      k = normalized(p_.k.dtype, k);
    }
    const float kq = lane_sum<32>(k.x * q.x + k.y * q.y + k.z * q.z + k.w * q.w);
    if (key() < kKeys) {
      *reinterpret_cast<float4*>(token.q + key()) = q;
      *reinterpret_cast<float4*>(token.k + key()) = k;
    }
    if (key() == 0) token.kq = kq;
  }

  // The i-th of the block's values.
  __device__ bool has_value(int i) const {
    return i < tokens() * kColumns && column0_ + (kOneToken ? i : i % kColumns) < p_.V;
  }
  __device__ int64_t value_offset(int i) const {
    return offset_of(p_.v, n_, kOneToken ? 0 : i / kColumns, head_, column0_ + (kOneToken ? i : i % kColumns));
  }
  __device__ void store_value(float* s_values, int i, uint32_t raw) const {
    if (i < tokens() * kColumns) s_values[i] = unpack(p_.v, raw);
  }

  static __device__ float4 normalized(int32_t dtype, float4 x) {
    const float sum = lane_sum<32>(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w);
    const float r = 1.f / sqrtf(sum + static_cast<float>(kL2NormEps));
    const float2 low = round_pair(dtype, make_float2(x.x * r, x.y * r));
    const float2 high = round_pair(dtype, make_float2(x.z * r, x.w * r));
    return make_float4(low.x, low.y, high.x, high.y);
  }

  const DecodeParams& p_;
  int64_t n_;
  int head_, column0_;
  RawQuad q_{}, k_{};
  uint32_t value_ = 0;
  RawGates gates_;
};

// [V, K] states: the keys of a column lie side by side. A warp has all keys of some columns.
template <class State, int kKeys, class Use>
struct Columns {
  static constexpr int kVector = Vector<State>::kSize;  // keys of a lane
  static constexpr int kLanes = kKeys / kVector;        // lanes of a column
  static constexpr int kGroups = 32 / kLanes;           // columns of an access of a warp
  static constexpr int kAccesses = Use::kAccesses;
  static constexpr int kWarpColumns = kAccesses * kGroups;
  static constexpr int kColumns = Use::kThreads / 32 * kWarpColumns;
  static_assert(kValueQuantum % kWarpColumns == 0, "a warp has all of its columns or none");
  static_assert(kLanes % kAccesses == 0, "a lane ends up with one column's sums");

  // In shared memory: the tokens and their values (float).
  static size_t shared_bytes(int T) {
    return static_cast<size_t>(T) * (sizeof(SharedToken<kKeys>) + sizeof(float) * kColumns);
  }
};

template <class State, int kKeys, bool kOneToken, class Use>
__global__ void __launch_bounds__(Use::kThreads, Use::kBlocks)
    decode_columns_kernel(const __grid_constant__ DecodeParams p) {
  using Block = Columns<State, kKeys, Use>;
  constexpr int kVector = Block::kVector, kLanes = Block::kLanes, kGroups = Block::kGroups;
  constexpr int kAccesses = Block::kAccesses, kColumns = Block::kColumns;
  extern __shared__ float4 s_memory[];
  const int tokens = kOneToken ? 1 : p.T;
  SharedToken<kKeys>* s_tokens = reinterpret_cast<SharedToken<kKeys>*>(s_memory);
  float* s_values = reinterpret_cast<float*>(s_tokens + tokens);  // [T][kColumns]

  const Place place = place_of(p);
  const int64_t n = place.n;
  const int head = place.head, column0 = place.slice * kColumns;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % 32 / kLanes;
  const int warp_column = static_cast<int>(threadIdx.x) / 32 * Block::kWarpColumns;
  const bool inside = column0 + warp_column < p.V;
  const int key0 = lane * kVector;
  // The column whose sums the lane ends up with, and whether it is the one of several such that stores o.
  constexpr int kPerColumn = kLanes / kAccesses;
  const int own = warp_column + lane / kPerColumn * kGroups + group;
  const auto store_output = [&](int t, float o) {
    if (inside && lane % kPerColumn == 0) store<float>(p.o, offset_of(p.o, n, t, head, column0 + own), o);
  };
  constexpr int kStep = kGroups * kKeys;  // between accesses
  const int64_t place_in_state = static_cast<int64_t>(column0 + warp_column + group) * kKeys + key0;

  TokenStage<kKeys, kOneToken, Use::kThreads, kColumns> stage(p, n, head, column0);
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
      raw[a] = load_vector<State, Use::kStreams>(from + a * kStep);
    }
  }
  const RawIndex raw_last = load_last_row(p, n);
  stage.store_all(s_tokens, s_values);
  __syncthreads();
  if (!inside) return;

  float state[kAccesses][kVector];
#pragma unroll
  for (int a = 0; a < kAccesses; ++a) unpack<State>(state[a], raw[a]);
  const auto keep = [&](int64_t row) {
    if (row < 0) return;
    State* to = reinterpret_cast<State*>(at.destination) + row * p.destination.row;
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
    const float own_u = s_token.beta * fmaf(-decay, along_k[0], s_values[t * kColumns + own]);
    store_output(t, p.scale * fmaf(decay, along_q[0], own_u * s_token.kq));
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
  extern __shared__ float4 s_memory[];
  const int tokens = kOneToken ? 1 : p.T;
  SharedToken<kKeys>* s_tokens = reinterpret_cast<SharedToken<kKeys>*>(s_memory);
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

  TokenStage<kKeys, kOneToken, Use::kThreads, kColumns> stage(p, n, head, column0);
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

// Where a kernel goes, and whether it may start beside the end of the one before it there.
struct Queue {
  cudaStream_t stream;
  bool overlaps;
};

template <class Block, class Kernel>
Status launch_slices(const Problem& p, Kernel kernel, int threads, DecodeParams params, const Queue& queue) {
  const int64_t slices = ceil_div(p.V, Block::kColumns);
  params.slices = Divisor::by(slices);
  return launch_kernel("decode", kernel, p.N * p.Hv * slices, threads, Block::shared_bytes(params.T), queue.stream,
                       queue.overlaps, params);
}

template <class State, int kKeys, class Use>
Status launch_columns(const Problem& p, const DecodeParams& params, const Queue& queue) {
  return launch_slices<Columns<State, kKeys, Use>>(
      p, p.T == 1 ? decode_columns_kernel<State, kKeys, true, Use> : decode_columns_kernel<State, kKeys, false, Use>,
      Use::kThreads, params, queue);
}

template <class State, int kKeys, class Use>
Status launch_rows(const Problem& p, const DecodeParams& params, const Queue& queue) {
  return launch_slices<Rows<State, kKeys, Use>>(
      p, p.T == 1 ? decode_rows_kernel<State, kKeys, true, Use> : decode_rows_kernel<State, kKeys, false, Use>,
      Use::kThreads, params, queue);
}

template <class State, int kKeys>
Status launch_for(const Problem& p, bool v_first, const DecodeParams& params, const Queue& queue) {
  constexpr bool kHalf = sizeof(State) == 2;
  using OfColumns = std::conditional_t<kHalf, ColumnsUse<128, 7, 4, true>, ColumnsUse<128, 5, 8, false>>;
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
