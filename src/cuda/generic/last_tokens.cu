#include "cuda/generic/last_tokens.cuh"

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/warp.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 256;  // a value column each
static_assert(kThreads >= FLASH_QLA_MAX_HEAD_DIM);
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16;             // tokens at once
constexpr int kKeySlice = 64;         // keys at once
constexpr int64_t kMostBlocks = 132;  // each of them has scratch

// Sums over the value columns, of each token and warp.
struct TokenSums {
  float from[kLastTokens];    // what is added up from a token on
  float before[kLastTokens];  // and before it
  float d_beta[kLastTokens];
};

struct Memory {
  float pairs[kLastTokens][kLastTokens + 4];  // B_ji at [j][i], A_ji at [i][j]
  float rows[3][kRows][kKeySlice + 4];
  TokenSums sums[kWarps];
  double c[kLastTokens];
  float g[kLastTokens], beta[kLastTokens], gamma[kLastTokens], to_end[kLastTokens];
  float corner[kWarps];
  int chosen;
};
static_assert(sizeof(Memory) <= 99 * 1024);

// The tokens of one sequence and value head.
struct Window {
  int64_t n, b, token, row, chunk;  // the first token in its batch row and among B * T; its chunk
  int head, key_head, count;
  bool starts;  // the sequence
};

__device__ Window find_window(const LastTokensParams& p, int64_t item) {
  Window w;
  w.n = item / p.Hv;
  w.head = static_cast<int>(item % p.Hv);
  w.key_head = w.head / p.group;
  const DeviceSequence sequence = sequence_at(p.sequences, w.n);
  const int64_t chunks = ceil_div(sequence.length, kChunkSize), first = chunks > 2 ? chunks - 2 : 0;
  w.b = sequence.b;
  w.token = sequence.begin + first * kChunkSize;
  w.row = sequence.b * p.sequences.T + w.token;
  w.chunk = sequence.first_chunk + first;
  w.count = static_cast<int>(sequence.length - first * kChunkSize);
  w.starts = first == 0;
  return w;
}

class LastTokens {
 public:
  __device__ LastTokens(const LastTokensParams& p, Memory& s, const Window& w)
      : p_(p), s_(s), w_(w), column_(threadIdx.x), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32) {
    x_ = p.scratch + blockIdx.x * (2 * kLastTokens * p.V) + column_;
    d_v_ = x_ + kLastTokens * p.V;
    has_column_ = column_ < p.V;
  }

  // By the gates alone.
  __device__ bool is_chosen() const {
    const int t = threadIdx.x;
    if (t < kLastTokens) {
      const bool inside = t < w_.count;
      s_.g[t] =
          inside ? clamp_log_decay(log_decay<float>(p_.gates, w_.b, w_.token + t, w_.head, t % kChunkSize == 0)) : 0.f;
      s_.beta[t] = inside ? effective_beta<float>(p_.gates, w_.b, w_.token + t, w_.head) : 0.f;
    }
    __syncthreads();
    if (t < kLastTokens) {
      double c = 0.0, last = 0.0;
      for (int j = 0; j < w_.count; ++j) {
        last += static_cast<double>(s_.g[j]);
        if (j <= t) c = last;
      }
      s_.c[t] = c;
      s_.gamma[t] = expf(static_cast<float>(c));
      s_.to_end[t] = expf(static_cast<float>(last - c));
    }
    __syncthreads();
    if (t == 0) {
      float reached = 0.f, kept = 0.f;
      for (int j = 0; j < w_.count; ++j) {
        const float decay = expf(s_.g[j]);
        reached = fmaf(s_.to_end[j], s_.to_end[j], reached);
        kept = fmaf(decay, decay, kept);
      }
      const bool given = p_.dht.data != nullptr, whole = w_.starts && p_.exact_short;
      s_.chosen = w_.count > 0 && ((whole && (given || kept < kFewKept)) || (given && reached < kFewReached));
    }
    __syncthreads();
    return s_.chosen != 0;
  }

  __device__ void run() {
    multiply_pairs();
    forward();
    reverse();
    store();
  }

 private:
  __device__ int blocks() const { return (w_.count + kRows - 1) / kRows; }

  // Keys [key, key + kKeySlice) of tokens [kRows block, ..) as floats; zeros where there are none.
  __device__ void stage(float (&to)[kRows][kKeySlice + 4], const DeviceTensor& x, int block, int key) const {
    static_assert(kRows * kKeySlice == 4 * kThreads);
    const int row = threadIdx.x / (kKeySlice / 4), at = threadIdx.x % (kKeySlice / 4) * 4, t = block * kRows + row;
    const int64_t offset = offset_of(x, w_.b, w_.token + t, w_.key_head);
    *reinterpret_cast<float4*>(&to[row][at]) = unpack(x, load_raw_quad(x, offset, key + at, t < w_.count ? p_.K : 0));
  }
  static __device__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
  }
  static __device__ float4 quad(const float* p) { return *reinterpret_cast<const float4*>(p); }

  __device__ void multiply_pairs() const {
    const int r = threadIdx.x / kRows, c = threadIdx.x % kRows;
    for (int J = 0; J < blocks(); ++J) {
      for (int I = 0; I <= J; ++I) {
        float kk = 0.f, qk = 0.f;
        for (int key = 0; key < p_.K; key += kKeySlice) {
          __syncthreads();
          stage(s_.rows[0], p_.k, J, key);
          stage(s_.rows[1], p_.q, J, key);
          stage(s_.rows[2], p_.k, I, key);
          __syncthreads();
          for (int e = 0; e < kKeySlice; e += 4) {
            const float4 right = quad(&s_.rows[2][c][e]);
            kk = dot(quad(&s_.rows[0][r][e]), right, kk);
            qk = dot(quad(&s_.rows[1][r][e]), right, qk);
          }
        }
        const int j = J * kRows + r, i = I * kRows + c;
        if (i > j) continue;
        const float G = expf(static_cast<float>(s_.c[j] - s_.c[i]));
        if (i < j) s_.pairs[j][i] = G * kk;
        s_.pairs[i][j] = p_.scale * G * qk;
      }
    }
    __syncthreads();
  }
  __device__ float A(int j, int i) const { return s_.pairs[i][j]; }
  __device__ float B(int j, int i) const { return s_.pairs[j][i]; }

  __device__ float value(const DeviceTensor& x, int t) const {
    if (!has_column_ || t >= w_.count || x.data == nullptr) return 0.f;
    return load<float>(x, offset_of(x, w_.b, w_.token + t, w_.head, column_));
  }
  // Element (key, the thread's column) of a caller's state.
  __device__ float element(const DeviceStates& t, int key) const {
    if (!has_column_ || key >= p_.K || t.data == nullptr) return 0.f;
    return load<float>(t, w_.n * t.row + w_.head * t.head + key * t.key + column_ * t.value);
  }
  __device__ float first_state(int key) const {
    if (w_.starts) return element(p_.initial_state, key);
    if (!has_column_ || key >= p_.K) return 0.f;
    const ChunkStates& s = p_.states;
    const int64_t matrix = (w_.chunk * p_.Hv + w_.head) * s.value_blocks + column_ / 8;
    DeviceTensor view{};
    view.data = const_cast<uint16_t*>(s.data);
    view.dtype = p_.type;
    return load<float>(view, (matrix * s.key_blocks + key / 8) * 64 + column_ % 8 * 8 + key % 8);
  }

  // sums[r] += state^T row r, for staged keys (and others for staged queries) from `key` on.
  template <bool kBoth, class State>
  __device__ void multiply_state(float (&of_keys)[kRows], float (&of_queries)[kRows], int key, State state) const {
#pragma unroll 2
    for (int e = 0; e < kKeySlice; e += 4) {
      const float4 x = make_float4(state(key + e), state(key + e + 1), state(key + e + 2), state(key + e + 3));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        of_keys[r] = dot(quad(&s_.rows[0][r][e]), x, of_keys[r]);
        if (kBoth) of_queries[r] = dot(quad(&s_.rows[1][r][e]), x, of_queries[r]);
      }
    }
  }

  __device__ void forward() const {
    for (int J = 0; J < blocks(); ++J) {
      const int first = J * kRows;
      float x[kRows] = {}, y[kRows] = {}, u[kRows];
      for (int key = 0; key < p_.K; key += kKeySlice) {
        __syncthreads();
        stage(s_.rows[0], p_.k, J, key);
        stage(s_.rows[1], p_.q, J, key);
        __syncthreads();
        multiply_state<true>(x, y, key, [&](int k) { return first_state(k); });
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        x[r] *= s_.gamma[first + r];
        y[r] *= p_.scale * s_.gamma[first + r];
      }
      for (int i = 0; i < first; ++i) {
        const float u_i = has_column_ ? s_.beta[i] * (value(p_.v, i) - x_[i * p_.V]) : 0.f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          x[r] = fmaf(B(first + r, i), u_i, x[r]);
          y[r] = fmaf(A(first + r, i), u_i, y[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first + r >= w_.count) break;
#pragma unroll
        for (int i = 0; i < r; ++i) {
          x[r] = fmaf(B(first + r, first + i), u[i], x[r]);
          y[r] = fmaf(A(first + r, first + i), u[i], y[r]);
        }
        u[r] = s_.beta[first + r] * (value(p_.v, first + r) - x[r]);
        if (has_column_) x_[(first + r) * p_.V] = x[r];
        const float from = warp_sum(value(p_.d_o, first + r) * y[r]);
        if (lane_ == 0) s_.sums[warp_].from[first + r] = from;
      }
    }
  }

  __device__ void reverse() const {
    float corner = 0.f;
    for (int key = 0; key < p_.K; ++key) corner = fmaf(first_state(key), element(p_.dht, key), corner);
    corner = warp_sum(corner);
    if (lane_ == 0) s_.corner[warp_] = corner;
    for (int J = blocks() - 1; J >= 0; --J) {
      const int first = J * kRows, last = first + kRows;
      float h[kRows] = {}, z[kRows] = {}, d_o[kRows], d_v[kRows];
      for (int key = 0; key < p_.K; key += kKeySlice) {
        __syncthreads();
        stage(s_.rows[0], p_.k, J, key);
        __syncthreads();
        multiply_state<false>(h, z, key, [&](int k) { return element(p_.dht, k); });
      }
      for (int j = last; j < w_.count; ++j) {
        const float d_o_j = value(p_.d_o, j), d_v_j = has_column_ ? d_v_[j * p_.V] : 0.f;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          z[r] = fmaf(A(j, first + r), d_o_j, fmaf(-B(j, first + r), d_v_j, z[r]));
        }
      }
#pragma unroll
      for (int r = kRows - 1; r >= 0; --r) {
        const int t = first + r;
        d_o[r] = value(p_.d_o, t);
        d_v[r] = 0.f;
        if (t >= w_.count) continue;
        h[r] *= s_.to_end[t];
#pragma unroll
        for (int j = r + 1; j < kRows; ++j) {
          if (first + j >= w_.count) break;
          z[r] = fmaf(A(first + j, t), d_o[j], fmaf(-B(first + j, t), d_v[j], z[r]));
        }
        const float d_u = fmaf(A(t, t), d_o[r], h[r] + z[r]), x = has_column_ ? x_[t * p_.V] : 0.f;
        const float e = value(p_.v, t) - x, u = s_.beta[t] * e;
        d_v[r] = s_.beta[t] * d_u;
        if (has_column_) d_v_[t * p_.V] = d_v[r];
        const float from = warp_sum(d_v[r] * x + u * z[r]), before = warp_sum(u * h[r]), d_beta = warp_sum(d_u * e);
        if (lane_ == 0) {
          s_.sums[warp_].from[t] -= from;
          s_.sums[warp_].before[t] = before;
          s_.sums[warp_].d_beta[t] = d_beta;
        }
      }
    }
  }

  // Where it is a number and was one.
  __device__ void store() const {
    __syncthreads();
    const int t = threadIdx.x;
    if (t >= w_.count) return;
    const auto total = [&](const float (TokenSums::*of)[kLastTokens], int j) {
      float sum = 0.f;
      for (int warp = 0; warp < kWarps; ++warp) sum += (s_.sums[warp].*of)[j];
      return sum;
    };
    float d_g = 0.f;
    for (int warp = 0; warp < kWarps; ++warp) d_g += s_.corner[warp];
    d_g *= s_.gamma[w_.count - 1];
    for (int j = 0; j < w_.count; ++j) d_g += j < t ? total(&TokenSums::before, j) : total(&TokenSums::from, j);
    const auto replace = [&](float* to, float x) {
      float& at = to[(w_.row + t) * p_.Hv + w_.head];
      if (fabsf(x) < INFINITY && fabsf(at) < INFINITY) at = x;
    };
    replace(p_.d_beta, total(&TokenSums::d_beta, t));
    // A first token without a state before it has nothing to forget.
    if (t > 0 || !w_.starts || p_.initial_state.data != nullptr) replace(p_.d_log_decay, d_g);
  }

  const LastTokensParams& p_;
  Memory& s_;
  const Window w_;
  int column_, lane_, warp_;
  bool has_column_;
  float *x_, *d_v_;  // of the thread's column, rows of V
};

__global__ void __launch_bounds__(kThreads, 1) last_tokens_kernel(const __grid_constant__ LastTokensParams p) {
  Memory& s = *dynamic_shared<Memory>();
  for (int64_t item = blockIdx.x; item < p.sequences.N * p.Hv; item += gridDim.x) {
    LastTokens tokens(p, s, find_window(p, item));
    if (tokens.is_chosen()) tokens.run();
    __syncthreads();
  }
}

int64_t last_tokens_blocks(const Problem& p) { return p.N * p.Hv < kMostBlocks ? p.N * p.Hv : kMostBlocks; }

}  // namespace

bool has_last_tokens(const Problem& p, const Tensor& dht) { return present(dht) || p.varlen || p.T <= kLastTokens; }

int64_t last_tokens_scratch(const Problem& p) { return last_tokens_blocks(p) * 2 * kLastTokens * p.V; }

Status launch_last_tokens(const Problem& p, const LastTokensParams& params, cudaStream_t stream) {
  return launch("last_tokens", last_tokens_kernel, last_tokens_blocks(p), kThreads, sizeof(Memory), stream, params);
}

}  // namespace flash_qla::cuda
