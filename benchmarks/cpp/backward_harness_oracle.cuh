// What backward_harness compares with: the token recurrence and its reverse in fp64 on the device, and errors by heads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda/sm90/chunk_bwd/traits.h"

namespace flash_qla::cuda::sm90::bwd::bench {

#define CHECK(...)                                                                                  \
  do {                                                                                              \
    const cudaError_t error_ = (__VA_ARGS__);                                                       \
    if (error_ != cudaSuccess) {                                                                    \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #__VA_ARGS__, cudaGetErrorString(error_)); \
      std::exit(2);                                                                                 \
    }                                                                                               \
  } while (0)

template <typename T>
struct Buffer {
  T* data = nullptr;
  size_t count = 0;
  explicit Buffer(size_t n = 0) : count(n) {
    if (n > 0) CHECK(cudaMalloc(&data, n * sizeof(T)));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  void fill(int byte) {
    if (count > 0) CHECK(cudaMemset(data, byte, count * sizeof(T)));
  }
  void upload(const std::vector<T>& host) {
    CHECK(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> host(count);
    if (count > 0) CHECK(cudaMemcpy(host.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

inline uint16_t to_bits(float x, bool fp16) {
  if (fp16) {
    const __half h = __float2half_rn(x);
    uint16_t b;
    std::memcpy(&b, &h, 2);
    return b;
  }
  const __nv_bfloat16 h = __float2bfloat16_rn(x);
  uint16_t b;
  std::memcpy(&b, &h, 2);
  return b;
}
__host__ __device__ inline double from_bits(uint16_t b, bool fp16) {
  if (fp16) {
    __half_raw r;
    r.x = b;
    return static_cast<double>(__half2float(__half(r)));
  }
  __nv_bfloat16_raw r;
  r.x = b;
  return static_cast<double>(__bfloat162float(__nv_bfloat16(r)));
}

// ---- fp64 oracle: one block a (sequence, value head), the recurrence and its reverse token by token ----
struct OracleArguments {
  int Hq, Hv, group;
  bool fp16;
  double scale;
  const uint16_t *q, *k, *v, *d_o;  // [tokens, heads, 128]
  const double *g, *beta;           // [tokens, Hv]; g: clamped log decay
  const double *h0, *dht;           // [N, Hv, 128 k, 128 v]
  const int *start, *first_slot;    // [N + 1] tokens, [N]
  double *dq, *dk, *dv, *u;         // [tokens, Hv, 128]
  double *dg, *dbeta;               // [tokens, Hv]
  double* dh0;                      // [N, Hv, 128, 128]
  double *S, *dS;                   // [slots, Hv, 128, 128]: chunk starts, chunk ends
  double* scratch;                  // [N * Hv, 65, 128, 128]
};

constexpr int kOracleThreads = 512;

__device__ inline double block_sum(double x, double* buffer) {
  for (int s = 16; s > 0; s /= 2) x += __shfl_xor_sync(0xffffffffu, x, s);
  __syncthreads();
  if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int i = 0; i < kOracleThreads / 32; ++i) sum += buffer[i];
  __syncthreads();
  return sum;
}

// out[v] = sum_k M[k][v] x[k]
__device__ inline void columns(const double* M, const double* x, double* out, double* buffer) {
  const int v = threadIdx.x % 128, part = threadIdx.x / 128;
  double sum = 0;
  for (int k = part * 32; k < part * 32 + 32; ++k) sum += M[k * 128 + v] * x[k];
  __syncthreads();
  buffer[part * 128 + v] = sum;
  __syncthreads();
  if (part == 0) out[v] = buffer[v] + buffer[128 + v] + buffer[256 + v] + buffer[384 + v];
  __syncthreads();
}

// out[k] = sum_v M[k][v] x[v]
__device__ inline void rows(const double* M, const double* x, double* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int k = warp * 8; k < warp * 8 + 8; ++k) {
    double sum = 0;
    for (int v = lane; v < 128; v += 32) sum += M[k * 128 + v] * x[v];
    for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, s);
    if (lane == 0) out[k] = sum;
  }
  __syncthreads();
}

__global__ __launch_bounds__(kOracleThreads) void oracle_kernel(const OracleArguments a) {
  extern __shared__ double shared[];
  double* dS = shared;  // 128 x 128
  double *q = dS + 16384, *k = q + 128, *d_o = k + 128, *read = d_o + 128, *error = read + 128, *u = error + 128,
         *dv = u + 128;
  double *du = dv + 128, *x = du + 128, *y = x + 128, *buffer = y + 128;  // buffer: 512
  const int head = blockIdx.x % a.Hv, n = blockIdx.x / a.Hv, thread = threadIdx.x;
  const int begin = a.start[n], length = a.start[n + 1] - begin, chunks = (length + 63) / 64;
  double* states = a.scratch + static_cast<int64_t>(blockIdx.x) * 65 * 16384;
  const int64_t state_at = (static_cast<int64_t>(n) * a.Hv + head) * 16384;

  auto load = [&](int t) {
    const int64_t token = begin + t, row = (token * a.Hv + head) * 128, key_row = (token * a.Hq + head / a.group) * 128;
    if (thread < 128) {
      q[thread] = from_bits(a.q[key_row + thread], a.fp16);
      k[thread] = from_bits(a.k[key_row + thread], a.fp16);
      d_o[thread] = a.d_o == nullptr ? 0.0 : from_bits(a.d_o[row + thread], a.fp16);
    }
    __syncthreads();
  };
  // From the state before token t to the one after it; leaves error and u.
  auto step = [&](int t, const double* before, double* after) {
    const int64_t token = begin + t, row = (token * a.Hv + head) * 128;
    const double decay = exp(a.g[token * a.Hv + head]), beta = a.beta[token * a.Hv + head];
    columns(before, k, read, buffer);
    if (thread < 128) {
      error[thread] = from_bits(a.v[row + thread], a.fp16) - decay * read[thread];
      u[thread] = beta * error[thread];
      a.u[row + thread] = u[thread];
    }
    __syncthreads();
    for (int i = thread; i < 16384; i += kOracleThreads) after[i] = decay * before[i] + k[i / 128] * u[i % 128];
    __syncthreads();
  };

  for (int i = thread; i < 16384; i += kOracleThreads) states[i] = a.h0 == nullptr ? 0.0 : a.h0[state_at + i];
  __syncthreads();
  for (int c = 0; c < chunks; ++c) {
    double* saved = a.S + (static_cast<int64_t>(a.first_slot[n] + c) * a.Hv + head) * 16384;
    for (int i = thread; i < 16384; i += kOracleThreads) saved[i] = states[i];
    for (int t = c * 64; t < min(length, c * 64 + 64); ++t) {
      load(t);
      step(t, states, states);
    }
  }
  for (int i = thread; i < 16384; i += kOracleThreads) dS[i] = a.dht == nullptr ? 0.0 : a.dht[state_at + i];
  __syncthreads();
  for (int c = chunks - 1; c >= 0; --c) {
    const int64_t tile = (static_cast<int64_t>(a.first_slot[n] + c) * a.Hv + head) * 16384;
    for (int i = thread; i < 16384; i += kOracleThreads) {
      a.dS[tile + i] = dS[i];
      states[i] = a.S[tile + i];
    }
    __syncthreads();
    const int end = min(length, c * 64 + 64);
    for (int t = c * 64; t < end; ++t) {
      load(t);
      step(t, states + (t - c * 64) * 16384, states + (t - c * 64 + 1) * 16384);
    }
    for (int t = end - 1; t >= c * 64; --t) {
      const int64_t token = begin + t, row = (token * a.Hv + head) * 128;
      const double* before = states + (t - c * 64) * 16384;
      const double decay = exp(a.g[token * a.Hv + head]), beta = a.beta[token * a.Hv + head];
      load(t);
      columns(before, k, read, buffer);
      if (thread < 128) {
        error[thread] = from_bits(a.v[row + thread], a.fp16) - decay * read[thread];
        u[thread] = beta * error[thread];
      }
      __syncthreads();
      rows(before + 16384, d_o, x);
      if (thread < 128) a.dq[row + thread] = a.scale * x[thread];
      for (int i = thread; i < 16384; i += kOracleThreads) dS[i] += a.scale * q[i / 128] * d_o[i % 128];
      __syncthreads();
      rows(dS, u, x);
      columns(dS, k, du, buffer);
      const double dbeta = block_sum(thread < 128 ? du[thread] * error[thread] : 0.0, buffer);
      if (thread < 128) {
        dv[thread] = beta * du[thread];
        a.dv[row + thread] = dv[thread];
      }
      __syncthreads();
      rows(before, dv, y);
      if (thread < 128) a.dk[row + thread] = x[thread] - decay * y[thread];
      double dot = 0;
      for (int i = thread; i < 16384; i += kOracleThreads) {
        dS[i] -= k[i / 128] * dv[i % 128];
        dot += dS[i] * decay * before[i];
        dS[i] *= decay;
      }
      dot = block_sum(dot, buffer);
      if (thread == 0) {
        a.dbeta[token * a.Hv + head] = dbeta;
        a.dg[token * a.Hv + head] = dot;
      }
    }
  }
  for (int i = thread; i < 16384; i += kOracleThreads) a.dh0[state_at + i] = dS[i];
}

// A of every chunk by forward substitution in fp64, rounded. One block a (slot, head), a thread a column.
__global__ void solve_kernel(const uint16_t* k, const double* beta, const int4* chunks, int Hq, int Hv, bool fp16,
                             uint16_t* A) {
  const int slot = blockIdx.x / Hv, head = blockIdx.x % Hv, group = Hv / Hq;
  const int token = chunks[slot].x, valid = chunks[slot].y;
  __shared__ double L[64][65];
  for (int i = threadIdx.x; i < 64 * 64; i += 64) {
    const int r = i / 64, c = i % 64;
    double sum = 0;
    if (c < r && r < valid) {
      for (int d = 0; d < 128; ++d) {
        sum += from_bits(k[(static_cast<int64_t>(token + r) * Hq + head / group) * 128 + d], fp16) *
               from_bits(k[(static_cast<int64_t>(token + c) * Hq + head / group) * 128 + d], fp16);
      }
      sum *= beta[static_cast<int64_t>(token + r) * Hv + head];
    }
    L[r][c] = sum;
  }
  __syncthreads();
  double x[64];
  for (int r = 0; r < valid; ++r) {
    double sum = r == threadIdx.x ? 1.0 : 0.0;
    for (int c = 0; c < r; ++c) sum -= L[r][c] * x[c];
    x[r] = sum;
    const uint16_t bits = fp16 ? __half_as_ushort(__double2half(sum)) : __bfloat16_as_ushort(__double2bfloat16(sum));
    A[(static_cast<int64_t>(token + r) * Hv + head) * 64 + threadIdx.x] = bits;
  }
}

// ---- comparison: per head, |out - ref|^2 and |ref|^2 ----
struct Error {
  double worst = 0, mean = 0;
};

template <typename Load>
__global__ void compare_kernel(Load load, int64_t count, double* sums) {
  double diff = 0, ref = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    double out, want;
    load(static_cast<int>(blockIdx.y), i, &out, &want);
    diff += (out - want) * (out - want);
    ref += want * want;
  }
  for (int s = 16; s > 0; s /= 2) {
    diff += __shfl_xor_sync(0xffffffffu, diff, s);
    ref += __shfl_xor_sync(0xffffffffu, ref, s);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(sums + 2 * blockIdx.y, diff);
    atomicAdd(sums + 2 * blockIdx.y + 1, ref);
  }
}

template <typename Load>
Error compare(int heads, int64_t count, Load load) {
  Buffer<double> sums(2 * heads);
  sums.fill(0);
  if (count > 0) compare_kernel<<<dim3(64, heads), 256>>>(load, count, sums.data);
  CHECK(cudaDeviceSynchronize());
  const std::vector<double> s = sums.download();
  Error e;
  for (int h = 0; h < heads; ++h) {
    const double x = s[2 * h + 1] > 0 ? std::sqrt(s[2 * h] / s[2 * h + 1]) : std::sqrt(s[2 * h]);
    e.mean += x / heads;
    if (!(x <= e.worst) && !std::isnan(e.worst)) e.worst = x;
  }
  return e;
}

struct RowsAgainst {  // out [tokens, heads, columns] of 16-bit or fp32 against the sum over a group of ref [tokens,
                      // heads * group, columns]
  const void* out;
  const double* ref;
  int heads, group, columns;
  int kind;  // 0 bf16, 1 fp16, 2 fp32
  __device__ void operator()(int head, int64_t i, double* o, double* r) const {
    const int64_t token = i / columns, column = i % columns;
    const int64_t at = (token * heads + head) * columns + column;
    *o = kind == 2 ? static_cast<double>(static_cast<const float*>(out)[at])
                   : from_bits(static_cast<const uint16_t*>(out)[at], kind == 1);
    double sum = 0;
    for (int m = 0; m < group; ++m) sum += ref[((token * heads + head) * group + m) * columns + column];
    *r = sum;
  }
};

struct StateAgainst {  // S: image [pairs, Hv][2 halves of K][128 v][64 k] against ref [slots, Hv, k, v]
  const uint8_t* image;
  const double* ref;
  const int* slots;  // [pairs]: which chunk's
  int Hv;
  bool fp16;
  __device__ void operator()(int head, int64_t i, double* o, double* r) const {
    const int64_t slot = slots[i / 16384];
    const int k = i % 16384 / 128, v = i % 128;
    const int64_t tile = i / 16384 * Hv + head;
    const int row = v, piece = (k % 64) / 8;
    const uint8_t* at =
        image + tile * kStateBytes + (k / 64) * kStateHalfBytes + row * 128 + ((piece ^ (row & 7)) << 4) + (k % 8) * 2;
    *o = from_bits(*reinterpret_cast<const uint16_t*>(at), fp16);
    *r = ref[(slot * Hv + head) * 16384 + i % 16384];
  }
};

// dS as rows [2 halves of K][64 v][2 halves of V][64 k] of scratch, or of dq and dk, against ref [slots, Hv, k, v].
struct StateGradsAgainst {
  const uint16_t *dq, *dk, *scratch;
  const double* ref;
  const int *slots, *tokens, *places;  // [pairs]: which chunk's, first row in dq and dk (-1: in scratch), place there
  int Hv, group;
  bool fp16;
  __device__ void operator()(int head, int64_t i, double* o, double* r) const {
    const int64_t pair = i / 16384;
    const int k = i % 16384 / 128, v = i % 128, column = v / 64 * 64 + k % 64;
    const int64_t row = v % 64 + k / 64 * 64;
    const uint16_t* at =
        tokens[pair] < 0
            ? scratch + ((static_cast<int64_t>(places[pair]) * Hv + head) * 128 + row) * 128
            : ((head + 1) % group == 0 ? dk : dq) + ((tokens[pair] + row) * (Hv / group) + head / group) * 128;
    *o = from_bits(at[column], fp16);
    *r = ref[(slots[pair] * static_cast<int64_t>(Hv) + head) * 16384 + i % 16384];
  }
};

struct NewValuesAgainst {  // image [slots, Hv][2 halves of V][64][64] against ref [tokens, Hv, 128]
  const uint8_t* image;
  const double* ref;
  const int4* chunks;
  int Hv;
  bool fp16;
  __device__ void operator()(int head, int64_t i, double* o, double* r) const {
    const int64_t slot = i / 8192;
    const int row = i % 8192 / 128, v = i % 128, piece = (v % 64) / 8;
    const uint8_t* at = image + (slot * Hv + head) * kTokensBytes + (v / 64) * kTileBytes + row * 128 +
                        ((piece ^ (row & 7)) << 4) + (v % 8) * 2;
    *o = from_bits(*reinterpret_cast<const uint16_t*>(at), fp16);
    *r = row < chunks[slot].y ? ref[((static_cast<int64_t>(chunks[slot].x) + row) * Hv + head) * 128 + v] : 0.0;
  }
};

}  // namespace flash_qla::cuda::sm90::bwd::bench
