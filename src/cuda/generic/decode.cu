// Path "cuda_decode": a few tokens a sequence at the speed of memory. The state is read once and written once, 16 bytes
// a thread and access, all of a thread's loads in flight before the first is used; activations and l2 norm are computed
// on the way. A block stages the tokens of one (row, value head) in shared memory and passes over groups of its
// columns, loading the next group while it computes one.
#include "cuda/generic/gates.cuh"
#include "cuda/generic/pool.cuh"
#include "cuda/paths.h"

namespace flash_qla {
namespace cuda {
namespace {

using Arguments = flash_qla_forward_arguments;

constexpr int kLanes = 8;          // lanes per column: a sum over the keys is three shuffles
constexpr int kValueQuantum = 16;  // V is a multiple of it, so that columns of 16-bit states fill 16-byte accesses

// How a state's dtype and layout are spread over threads, each as measured on an H200 with 256 rows of 32 heads of 128
// x 128 (milliseconds; a kernel that only reads and writes the states takes 0.257 and 0.129).
template <class State, int kKeys, bool kValueFirst>
struct Spread {
  static constexpr bool kHalf = sizeof(State) == 2;
  // Threads of a block. With 128 a block's rows of 16-bit values would be pieces of 64 bytes: 0.204, with 256 0.194,
  // with 512, of which a multiprocessor has room for one block, 0.309.
  static constexpr int kThreads = kHalf && !kValueFirst ? 256 : 128;
  // State elements of a thread, and blocks that share a multiprocessor. [V, K] in float32: 16 and six blocks 0.275, 32
  // and four 0.280; in 16 bits, streaming, 0.163 and 0.147. [K, V] with 16 has rows half as long: 0.385.
  static constexpr int kStatePerThread = kValueFirst && !kHalf ? 16 : 32;
  static constexpr int kBlocks =
      kValueFirst && !kHalf ? (kKeys == 128 ? 6 : 5) : 512 / kThreads;  // 64 keys: six would spill
  // Whether accesses say that the state will not be needed again soon. 16 bits: 0.147 instead of 0.163; float32 [V, K]:
  // 0.279 instead of 0.275.
  static constexpr bool kStreams = kHalf;
};

struct DecodeParams {
  DeviceTensor q, k, v, o;  // [N, T, heads, dim]
  Gates gates;
  PoolIndices pool;
  DeviceStates source;       // the pool, or initial_state, or absent: zero
  DeviceStates destination;  // the pool, or final_state, or absent: not kept
  int32_t T, V, Hv, group;
  int32_t passes;  // groups of columns per block
  int32_t l2norm;
  float scale;
};
static_assert(std::is_trivially_copyable_v<DecodeParams>);

__device__ float lane_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

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

// A block's columns of one state in registers: state[c][kRun * j + i] of thread (group, lane) belongs to column
// column_of(c) of the block and to key key_of(j) + i.
template <class State, int kKeys, bool kValueFirst>
struct Columns {
  using Use = Spread<State, kKeys, kValueFirst>;
  static constexpr int kThreads = Use::kThreads;
  static constexpr int kGroups = kThreads / kLanes;
  static constexpr int kVector = Vector<State>::kSize;
  static constexpr int kWord = kPerWord<State>;
  static constexpr int kPerLane = kKeys / kLanes;
  static constexpr int kColumns = Use::kStatePerThread / kPerLane;
  static constexpr int kBlockColumns = kColumns * kGroups;
  // Keys of a lane that lie side by side: a 16-byte access of [V, K]; four floats of q and k in shared memory
  // otherwise.
  static constexpr int kRun = kValueFirst ? kVector : 4;
  // [K, V] states pass through shared memory, which turns rows of values into columns of keys, as words of one or two
  // values. One word of padding keeps keys in different banks.
  static constexpr int kRowWords = kBlockColumns / kWord, kPitch = kRowWords + 1;
  static constexpr int kSharedWords = kValueFirst ? 0 : kKeys * kPitch;

  // A thread's 16-byte accesses to a state: of its columns, or with [K, V] of rows of values.
  static constexpr int kAccesses = kColumns * kPerLane / kVector;
  using Raw = Vector<State>[kAccesses];

  static __device__ int key_of(int j) { return kRun * (threadIdx.x % kLanes + kLanes * j); }
  // Two values that share a word belong to one thread.
  static __device__ int column_of(int c) {
    const int group = threadIdx.x / kLanes;
    return kValueFirst ? c * kGroups + group : kWord * (c / kWord * kGroups + group) + c % kWord;
  }

  // Starts the loads; nothing waits for them until unpack().
  static __device__ void load(Raw& raw, const DeviceStates& t, int64_t base, int column0, int V) {
#pragma unroll
    for (int m = 0; m < kAccesses; ++m) {
      raw[m] = {};
      if constexpr (kValueFirst) {
        constexpr int kPerColumn = kPerLane / kVector;
        const int column = column0 + column_of(m / kPerColumn);
        if (column < V) {
          raw[m] = load_vector<State, Use::kStreams>(
              t.data, base + static_cast<int64_t>(column) * kKeys + key_of(m % kPerColumn));
        }
      } else {
        constexpr int kChunks = kBlockColumns / kVector, kKeyStep = kThreads / kChunks;
        const int column = column0 + threadIdx.x % kChunks * kVector;
        const int64_t row = threadIdx.x / kChunks + m * kKeyStep;
        if (column < V) raw[m] = load_vector<State, Use::kStreams>(t.data, base + row * V + column);
      }
    }
  }

  static __device__ void unpack(float (&state)[kColumns][kPerLane], const Raw& raw, uint32_t* s_turn) {
    if constexpr (kValueFirst) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const Vector<State>& vector = raw[c * (kPerLane / kVector) + i / kVector];
          state[c][i] = unpack_word<State>(vector.words[i % kVector / kWord], i % kWord);
        }
      }
    } else {
      constexpr int kChunks = kBlockColumns / kVector, kKeyStep = kThreads / kChunks;
#pragma unroll
      for (int m = 0; m < kAccesses; ++m) {
        uint32_t* row = s_turn + (threadIdx.x / kChunks + m * kKeyStep) * kPitch + threadIdx.x % kChunks * 4;
#pragma unroll
        for (int w = 0; w < 4; ++w) row[w] = raw[m].words[w];
      }
      __syncthreads();
#pragma unroll
      for (int c = 0; c < kColumns; c += kWord) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const uint32_t word = s_turn[(key_of(i / kRun) + i % kRun) * kPitch + column_of(c) / kWord];
#pragma unroll
          for (int w = 0; w < kWord; ++w) state[c + w][i] = unpack_word<State>(word, w);
        }
      }
      __syncthreads();
    }
  }

  static __device__ void store(const float (&state)[kColumns][kPerLane], const DeviceStates& t, int64_t base,
                               int column0, int V, uint32_t* s_turn) {
    if constexpr (kValueFirst) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int column = column0 + column_of(c);
        if (column >= V) continue;
#pragma unroll
        for (int j = 0; j < kPerLane / kVector; ++j) {
          Vector<State> vector;
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float* from = &state[c][j * kVector + w * kWord];
            vector.words[w] = pack_word<State>(from[0], from[kWord - 1]);
          }
          store_vector<State, Use::kStreams>(t.data, base + static_cast<int64_t>(column) * kKeys + key_of(j), vector);
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < kColumns; c += kWord) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          s_turn[(key_of(i / kRun) + i % kRun) * kPitch + column_of(c) / kWord] =
              pack_word<State>(state[c][i], state[c + kWord - 1][i]);
        }
      }
      __syncthreads();
      constexpr int kChunks = kBlockColumns / kVector, kKeyStep = kThreads / kChunks;
      const int chunk = threadIdx.x % kChunks, column = column0 + chunk * kVector;
#pragma unroll
      for (int m = 0; m < kAccesses; ++m) {
        const int row = threadIdx.x / kChunks + m * kKeyStep;
        Vector<State> vector;
#pragma unroll
        for (int w = 0; w < 4; ++w) vector.words[w] = s_turn[row * kPitch + chunk * 4 + w];
        if (column < V)
          store_vector<State, Use::kStreams>(t.data, base + static_cast<int64_t>(row) * V + column, vector);
      }
      __syncthreads();
    }
  }
};

// The tokens of a row in shared memory, with the options applied.
template <int kKeys>
struct SharedTokens {
  struct alignas(16) Key {
    float q[kKeys], k[kKeys];
    float decay, beta;
  };
  Key* keys;  // [T]
  float* v;   // [T, columns of the block]

  static __host__ __device__ size_t bytes(int T, int columns) {
    return static_cast<size_t>(T) * (sizeof(Key) + sizeof(float) * static_cast<size_t>(columns));
  }
};

// Fills them in two steps, so that the loads of the first tokens run beside those of the state. A warp takes one row of
// q or k at a time, one thread the gates of a token.
template <int kKeys, int kThreads>
class TokenStage {
 public:
  static_assert(kKeys / 4 <= 32);

  __device__ TokenStage(const DecodeParams& p, int64_t n, int head, int column0, int columns)
      : p_(p), n_(n), head_(head), column0_(column0), columns_(columns) {}

  __device__ void load_first() {
    row_ = load_row(threadIdx.x / 32);
    value_ = load_value(threadIdx.x);
    if (gate_token() < p_.T && gate_token() >= 0) {
      const Gates& gates = p_.gates;
      if (gates.g.data != nullptr) g_ = load_raw(gates.g, offset_of(gates.g, n_, gate_token(), head_));
      if (gates.beta.data != nullptr) beta_ = load_raw(gates.beta, offset_of(gates.beta, n_, gate_token(), head_));
    }
  }

  __device__ void store_all(const SharedTokens<kKeys>& s_tokens) {
    store_row(s_tokens, threadIdx.x / 32, row_);
    for (int row = threadIdx.x / 32 + kThreads / 32; row < 2 * p_.T; row += kThreads / 32) {
      store_row(s_tokens, row, load_row(row));
    }
    store_value(s_tokens, threadIdx.x, value_);
#pragma unroll 4
    for (int i = threadIdx.x + kThreads; i < p_.T * columns_; i += kThreads) store_value(s_tokens, i, load_value(i));
    if (gate_token() < p_.T && gate_token() >= 0) store_gates(s_tokens.keys[gate_token()]);
  }

 private:
  // The last warp's threads: with one token it has no row to take.
  __device__ int gate_token() const { return static_cast<int>(threadIdx.x) - (kThreads - 32); }

  // Row 2 t is q of token t, row 2 t + 1 its k.
  __device__ const DeviceTensor& row_tensor(int row) const { return row % 2 == 0 ? p_.q : p_.k; }
  __device__ RawQuad load_row(int row) const {
    if (row >= 2 * p_.T) return {};
    const DeviceTensor& x = row_tensor(row);
    return load_raw_quad(x, offset_of(x, n_, row / 2, head_ / p_.group), 4 * (threadIdx.x % 32), kKeys);
  }
  __device__ void store_row(const SharedTokens<kKeys>& s_tokens, int row, const RawQuad& raw) const {
    if (row >= 2 * p_.T) return;  // the same for a whole warp
    const DeviceTensor& x = row_tensor(row);
    float4 quad = unpack(x, raw);
    if (p_.l2norm) quad = normalized(x, quad);
    const int key = 4 * (threadIdx.x % 32);
    typename SharedTokens<kKeys>::Key& token = s_tokens.keys[row / 2];
    if (key < kKeys) *reinterpret_cast<float4*>((row % 2 == 0 ? token.q : token.k) + key) = quad;
  }

  __device__ uint32_t load_value(int i) const {
    const int column = column0_ + i % columns_;
    return i < p_.T * columns_ && column < p_.V ? load_raw(p_.v, offset_of(p_.v, n_, i / columns_, head_, column)) : 0;
  }
  __device__ void store_value(const SharedTokens<kKeys>& s_tokens, int i, uint32_t raw) const {
    if (i < p_.T * columns_) s_tokens.v[i] = unpack(p_.v, raw);
  }

  __device__ void store_gates(typename SharedTokens<kKeys>::Key& token) const {
    const Gates& gates = p_.gates;
    float g = gates.g.data == nullptr ? 0.f : unpack(gates.g, g_);
    if (gates.use_gate) g = gate_rate<float>(gates, head_) * softplus(biased_gate(gates, g, head_));
    float beta = gates.beta.data == nullptr ? 1.f : unpack(gates.beta, beta_);
    if (gates.use_sigmoid) beta = gates.beta_range * sigmoid(beta);
    token.decay = expf(clamp_log_decay(g));
    token.beta = beta;
  }

  static __device__ float4 normalized(const DeviceTensor& x, float4 quad) {
    float sum = quad.x * quad.x + quad.y * quad.y + quad.z * quad.z + quad.w * quad.w;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    const float r = 1.f / sqrtf(sum + static_cast<float>(kL2NormEps));
    const float2 low = round_pair(x.dtype, make_float2(quad.x * r, quad.y * r));
    const float2 high = round_pair(x.dtype, make_float2(quad.z * r, quad.w * r));
    return make_float4(low.x, low.y, high.x, high.y);
  }

  const DecodeParams& p_;
  int64_t n_;
  int head_, column0_, columns_;
  RawQuad row_{};
  uint32_t value_ = 0, g_ = 0, beta_ = 0;
};

// A lane's keys of a row in shared memory.
template <int kRun, int kPerLane>
__device__ void read_row(float (&part)[kPerLane], const float* s_row) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 4) {
    const float4 quad = *reinterpret_cast<const float4*>(s_row + kRun * (lane + kLanes * (i / kRun)) + i % kRun);
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

template <class State, int kKeys, bool kValueFirst>
__global__ void __launch_bounds__(Spread<State, kKeys, kValueFirst>::kThreads,
                                  Spread<State, kKeys, kValueFirst>::kBlocks)
    decode_kernel(const __grid_constant__ DecodeParams p) {
  using Block = Columns<State, kKeys, kValueFirst>;
  extern __shared__ float4 s_memory[];
  SharedTokens<kKeys> s_tokens;
  s_tokens.keys = reinterpret_cast<typename SharedTokens<kKeys>::Key*>(s_memory);
  s_tokens.v = reinterpret_cast<float*>(s_tokens.keys + p.T);
  const int columns = p.passes * Block::kBlockColumns;
  uint32_t* s_turn = reinterpret_cast<uint32_t*>(s_tokens.v + p.T * columns);

  const int slices = (p.V + columns - 1) / columns;
  const unsigned rest = blockIdx.x / slices;
  const int first_column = static_cast<int>(blockIdx.x % slices) * columns;
  const int last_column = min(first_column + columns, p.V);
  const int head = static_cast<int>(rest % p.Hv), group = threadIdx.x / kLanes;
  const int64_t n = rest / p.Hv;
  const auto store_output = [&](int t, int column, float o) {
    if (threadIdx.x % kLanes == 0 && column < p.V) store<float>(p.o, offset_of(p.o, n, t, head, column), o);
  };

  // The first tokens are on their way while the slot's index and then the state are.
  TokenStage<kKeys, Block::kThreads> stage(p, n, head, first_column, columns);
  stage.load_first();
  const int64_t slot = read_slot(p.pool, n);
  if (slot == kSkipRow) {
    for (int t = 0; t < p.T; ++t) {
      for (int column = first_column + group; column < last_column; column += Block::kGroups)
        store_output(t, column, 0.f);
    }
    return;
  }
  const int64_t source_row = p.pool.used ? slot : n;
  const bool has_source = p.source.data != nullptr && source_row >= 0;
  const int64_t source = source_row * p.source.row + head * p.source.head;
  typename Block::Raw raw = {};
  if (has_source) Block::load(raw, p.source, source, first_column, p.V);
  stage.store_all(s_tokens);
  __syncthreads();
  const int64_t last_slot = p.pool.per_token ? kNoSlot : p.pool.used ? write_slot(p.pool, n, 0) : n;

  for (int column0 = first_column; column0 < last_column; column0 += Block::kBlockColumns) {
    float state[Block::kColumns][Block::kPerLane];
    Block::unpack(state, raw, s_turn);
    if (has_source && column0 + Block::kBlockColumns < last_column) {
      Block::load(raw, p.source, source, column0 + Block::kBlockColumns, p.V);
    }
    const auto keep = [&](int64_t row) {
      if (p.destination.data == nullptr || row < 0) return;
      Block::store(state, p.destination, row * p.destination.row + head * p.destination.head, column0, p.V, s_turn);
    };
    for (int t = 0; t < p.T; ++t) {
      const auto& s_token = s_tokens.keys[t];
      float q[Block::kPerLane], k[Block::kPerLane];
      read_row<Block::kRun>(q, s_token.q);
      read_row<Block::kRun>(k, s_token.k);
      const float decay = s_token.decay, beta = s_token.beta;
      // Both sums are taken of the state before the token, so that one pass over it serves u and o:
      // u = beta (v - e^g S^T k), o = scale (e^g S^T q + <k, q> u), S <- e^g S + k u^T
      const float kq = lane_sum(lane_dot(k, q));
#pragma unroll
      for (int c = 0; c < Block::kColumns; ++c) {
        const int column = column0 + Block::column_of(c);
        const float along_k = lane_sum(lane_dot(state[c], k)), along_q = lane_sum(lane_dot(state[c], q));
        const float u = beta * fmaf(-decay, along_k, s_tokens.v[t * columns + column - first_column]);
        store_output(t, column, p.scale * fmaf(decay, along_q, u * kq));
#pragma unroll
        for (int i = 0; i < Block::kPerLane; ++i) state[c][i] = fmaf(k[i], u, decay * state[c][i]);
      }
      if (p.pool.per_token) keep(write_slot(p.pool, n, t));
    }
    keep(last_slot);
  }
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

// Blocks below which a block takes one group of columns: two for each place on a large GPU (132 multiprocessors, four
// blocks each). With more of them at hand, one start serves several groups.
constexpr int64_t kEnoughBlocks = 1056;

template <class State, int kKeys, bool kValueFirst>
Status launch_for(const Problem& p, DecodeParams params, cudaStream_t stream) {
  using Block = Columns<State, kKeys, kValueFirst>;
  const int64_t groups = ceil_div(p.V, Block::kBlockColumns), most = p.N * p.Hv * groups / kEnoughBlocks;
  params.passes = static_cast<int32_t>(most < 1 ? 1 : most < groups ? most : groups);
  const size_t shared = SharedTokens<kKeys>::bytes(params.T, params.passes * Block::kBlockColumns) +
                        Block::kSharedWords * sizeof(uint32_t);
  return launch("decode", decode_kernel<State, kKeys, kValueFirst>, p.N * p.Hv * ceil_div(groups, params.passes),
                Block::kThreads, shared, stream, params);
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
