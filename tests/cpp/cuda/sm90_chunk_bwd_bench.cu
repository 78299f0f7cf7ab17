// Development harness of the Hopper backward: every intermediate and every gradient against an fp64 token recurrence,
// bitwise repeats, neighbours poisoned with NaN, and the time of each kernel. Stands alone: its own oracle, random
// inputs, no framework.
//   sm90_chunk_bwd_bench check [part of a case's name] | time [part of a row's name [chunks of a segment [fused |
//   both]]]
// Built with nvcc -std=c++20 -O3 --extended-lambda --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Isrc
// -Iinclude from this file and src/cuda/sm90/chunk_bwd/{chunk_bwd_bf16,chunk_bwd_fp16,launch}.cu.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/sm90/chunk_bwd/launch.h"
#include "cuda/sm90/chunk_bwd/traits.h"
#include "flash_qla/flash_qla.hpp"

namespace {

using namespace flash_qla;
using namespace flash_qla::cuda::sm90::bwd;

#define CHECK(...)                                                                                  \
  do {                                                                                              \
    const cudaError_t error_ = (__VA_ARGS__);                                                       \
    if (error_ != cudaSuccess) {                                                                    \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #__VA_ARGS__, cudaGetErrorString(error_)); \
      std::exit(2);                                                                                 \
    }                                                                                               \
  } while (0)

struct Case {
  std::string name;
  int Hq, Hv;
  std::vector<int> lengths;  // of the sequences
  bool varlen = true;        // else dense: equal lengths
  bool h0 = true, dht = true, d_o = true, A = true, cumsum = false, v_first = false, fp16 = false, half_gates = false;
  bool strong = false;      // decay down to -1000, some growth
  bool small_beta = false;  // a third of the betas 0 or tiny
  int padding = 0;          // tokens after the last sequence
  bool int64_offsets = false;
  int segment_chunks = 0;                    // -1: what choose_chunk_backward_plan says
  bool fused = false, whole_values = false;  // forms of the passes
  bool exact = false;                        // states in fp32 too, where the call is small
  int run_chunks = 0;                        // as segment_chunks
  int distinct_tokens = 1 << 30;             // drawn; those after them repeat them (for times alone)
};

template <typename T>
struct Buffer {
  T* data = nullptr;
  size_t count = 0;
  bool owned = true;
  explicit Buffer(size_t n = 0) : count(n) {
    if (n > 0) CHECK(cudaMalloc(&data, n * sizeof(T)));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (owned) cudaFree(data);
  }
  // Its contents to memory that belongs to somebody else.
  void move_to(void* place) {
    CHECK(cudaMemcpy(place, data, count * sizeof(T), cudaMemcpyDeviceToDevice));
    if (owned) CHECK(cudaFree(data));
    data = static_cast<T*>(place);
    owned = false;
  }
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

uint16_t to_bits(float x, bool fp16) {
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
__host__ __device__ double from_bits(uint16_t b, bool fp16) {
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

__device__ double block_sum(double x, double* buffer) {
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
__device__ void columns(const double* M, const double* x, double* out, double* buffer) {
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
__device__ void rows(const double* M, const double* x, double* out) {
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

// The card's clock and power while it works, from the driver's management library; zeros where there is none.
class Card {
 public:
  Card() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (library == nullptr) return;
    auto find = [&](auto* function, const char* name) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      return *function != nullptr;
    };
    int (*init)() = nullptr;
    int (*by_bus)(const char*, void**) = nullptr;
    char bus[32];
    int device = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetPCIBusId(bus, sizeof(bus), device));
    if (!find(&init, "nvmlInit_v2") || !find(&by_bus, "nvmlDeviceGetHandleByPciBusId_v2") ||
        !find(&clock_, "nvmlDeviceGetClockInfo") || !find(&power_, "nvmlDeviceGetPowerUsage") || init() != 0 ||
        by_bus(bus, &handle_) != 0) {
      handle_ = nullptr;
    }
  }
  unsigned mhz() const {
    unsigned x = 0;
    return handle_ != nullptr && clock_(handle_, 1, &x) == 0 ? x : 0;  // 1: of the multiprocessors
  }
  unsigned watts() const {
    unsigned x = 0;
    return handle_ != nullptr && power_(handle_, &x) == 0 ? x / 1000 : 0;
  }

 private:
  void* handle_ = nullptr;
  int (*clock_)(void*, int, unsigned*) = nullptr;
  int (*power_)(void*, unsigned*) = nullptr;
};

// ---- one case ----
struct Outputs {
  std::vector<uint16_t> dq, dk, dv;
  std::vector<float> dg, dbeta, dh0;
  bool operator==(const Outputs& o) const {
    auto same = [](const auto& a, const auto& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
    };
    return same(dq, o.dq) && same(dk, o.dk) && same(dv, o.dv) && same(dg, o.dg) && same(dbeta, o.dbeta) &&
           same(dh0, o.dh0);
  }
};

class Runner {
 public:
  explicit Runner(const Case& c) : c_(c) {
    N_ = static_cast<int>(c.lengths.size());
    start_.push_back(0);
    for (int length : c.lengths) start_.push_back(start_.back() + length);
    tokens_ = start_.back() + c.padding;
    for (int n = 0; n < N_; ++n) {
      first_slot_.push_back(static_cast<int>(chunks_.size()));
      for (int t = 0; t < c.lengths[n]; t += 64)
        chunks_.push_back(make_int4(start_[n] + t, std::min(64, c.lengths[n] - t), n, 0));
    }
    make_inputs();
    make_params();
  }

  const Outputs& checked() const { return checked_; }

  // Returns whether everything is within bounds.
  bool check() {
    OracleBuffers ref(*this);
    run_oracle(&ref);
    const int kind = c_.fp16 ? 1 : 0, slots = static_cast<int>(chunks_.size());
    bool good = true;
    std::printf("%-28s", c_.name.c_str());
    auto report = [&](const char* name, const Error& e, double bound) {
      const bool ok = e.worst <= bound;
      good &= ok;
      std::printf(" %s %.1e/%.1e%s", name, e.mean, e.worst, ok ? "" : "(!)");
    };
    Buffer<int4> chunks(chunks_.size());
    if (slots > 0) chunks.upload(chunks_);
    // S is kept at the start of a pair of chunks, dS at its end.
    std::vector<int> first, last, grad_tokens, grad_places;
    for (int n = 0; n < N_; ++n) {
      const int chunk_count = (c_.lengths[n] + 63) / 64;
      for (int c = 0; c < chunk_count; c += 2) {
        first.push_back(first_slot_[n] + c);
        last.push_back(first_slot_[n] + std::min(c + 1, chunk_count - 1));
        const bool in_outputs = p_.grads_in_outputs && c_.lengths[n] - 64 * c >= 128;
        grad_tokens.push_back(in_outputs ? start_[n] + 64 * c : -1);
        grad_places.push_back(p_.grads_in_outputs ? n : static_cast<int>(grad_places.size()));
      }
    }
    const int64_t pairs = static_cast<int64_t>(first.size());
    Buffer<int> first_slots(first.size()), last_slots(last.size()), tokens(first.size()), places(first.size());
    if (pairs > 0) {
      first_slots.upload(first);
      last_slots.upload(last);
      tokens.upload(grad_tokens);
      places.upload(grad_places);
    }
    // What the passes leave; the gradients may take the places of dS.
    run({true, true, true, false});
    report("h", compare(c_.Hv, pairs * 16384, StateAgainst{p_.states, ref.S.data, first_slots.data, c_.Hv, c_.fp16}),
           8e-3);
    report("V'", compare(c_.Hv, slots * 8192ll, NewValuesAgainst{p_.v_new, ref.u.data, chunks.data, c_.Hv, c_.fp16}),
           8e-3);
    const int group = c_.Hv / c_.Hq;
    report("dS",
           compare(c_.Hv, pairs * 16384,
                   StateGradsAgainst{dq_.data, dk_.data, reinterpret_cast<const uint16_t*>(p_.state_grads), ref.dS.data,
                                     last_slots.data, tokens.data, places.data, c_.Hv, group, c_.fp16}),
           8e-3);
    run();
    const int64_t T = tokens_;
    report("dq", compare(c_.Hq, T * 128, RowsAgainst{dq_.data, ref.dq.data, c_.Hq, group, 128, kind}), 8e-3);
    report("dk", compare(c_.Hq, T * 128, RowsAgainst{dk_.data, ref.dk.data, c_.Hq, group, 128, kind}), 8e-3);
    report("dv", compare(c_.Hv, T * 128, RowsAgainst{dv_.data, ref.dv.data, c_.Hv, 1, 128, kind}), 8e-3);
    report("db", compare(c_.Hv, T, RowsAgainst{dbeta_.data, ref.dbeta.data, c_.Hv, 1, 1, 2}), 1.5e-2);
    report("dg", compare(c_.Hv, T, RowsAgainst{dg_.data, ref.dg.data, c_.Hv, 1, 1, 2}), 1.5e-2);
    Error dh0{};
    for (int n = 0; n < N_; ++n) {
      const int64_t at = static_cast<int64_t>(n) * c_.Hv * 16384;
      const float* out = dh0_.data + at;
      const double* want = ref.dh0.data + at;
      const bool v_first = c_.v_first;
      auto load = [out, want, v_first] __device__(int head, int64_t i, double* o, double* r) {
        const int64_t k = i / 128, v = i % 128;
        *o = out[head * 16384ll + (v_first ? v * 128 + k : i)];
        *r = want[head * 16384ll + i];
      };
      const Error e = compare(c_.Hv, 16384, load);
      dh0.mean += e.mean / N_;
      if (!(e.worst <= dh0.worst) && !std::isnan(dh0.worst)) dh0.worst = e.worst;
    }
    report("dh0", dh0, 8e-3);

    const Outputs& outputs_once = checked_ = outputs();
    bool repeats = true;
    for (int i = 0; i < 3; ++i) {
      run();
      repeats &= outputs() == outputs_once;
    }
    good &= repeats;
    std::printf(" repeat %s", repeats ? "same" : "DIFFERS(!)");
    if (c_.varlen && N_ > 2) {
      const bool kept = neighbours_unharmed(outputs_once);
      good &= kept;
      std::printf(" nan-neighbour %s", kept ? "ok" : "LEAKS(!)");
    }
    std::printf(" %s\n", good ? "ok" : "FAILED");
    std::fflush(stdout);
    return good;
  }

  void time() {
    run();
    // Of runs of `calls` in a row: a call by itself has the caches and the power that the pause before it left.
    auto median = [&](Parts stage, int calls = 1) {
      cudaEvent_t begin, end;
      CHECK(cudaEventCreate(&begin));
      CHECK(cudaEventCreate(&end));
      std::vector<float> ms;
      for (int i = 0; i < 12; ++i) {
        if (!stage.plan) CHECK(cudaMemset(p_.next_item, 0, sizeof(*p_.next_item)));  // what that kernel would do
        CHECK(cudaEventRecord(begin));
        for (int call = 0; call < calls; ++call) CHECK(launch_chunk_backward(p_, maps_, stage, nullptr));
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float x = 0;
        CHECK(cudaEventElapsedTime(&x, begin, end));
        if (i > 1) ms.push_back(x / static_cast<float>(calls));
      }
      std::sort(ms.begin(), ms.end());
      return ms[ms.size() / 2];
    };
    const float all = median({true, true, true, true}), plan = median({true, false, false, false});
    const float prepare = median({false, true, false, false}), states = median({false, false, true, false});
    const float gradients = median({false, false, false, true});
    const float in_a_row = median({true, true, true, true}, 5);
    std::printf(
        "%-14s %s segments of %2d: total %.4f ms (five in a row %.4f): plan %.4f prepare %.4f states %.4f gradients "
        "%.4f\n",
        c_.name.c_str(),
        p_.whole_values ? "both "
        : p_.fused      ? "fused"
                        : "     ",
        p_.segment_chunks, all, in_a_row, plan, prepare, states, gradients);
    std::fflush(stdout);
  }

  // As below, the tensors and the scratch at other addresses each time, of two stretches of memory in turns.
  void time_in_places(const std::vector<Case>& plans, int rounds, int places) {
    constexpr size_t kStretch = size_t{5} << 30, kUnit = size_t{2} << 20;
    Buffer<char> stretches[2] = {Buffer<char>(kStretch), Buffer<char>(kStretch)};
    std::mt19937_64 rng(7);
    for (int place = 0; place < places; ++place) {
      size_t at = 0;
      const auto take = [&](size_t bytes) {
        at = (at + kUnit - 1) / kUnit * kUnit + (place == 0 ? 0 : rng() % 32 * kUnit + rng() % 4096 * 512);
        char* taken = stretches[place % 2].data + at;
        at += bytes;
        if (at > kStretch) {
          std::printf("no room\n");
          std::exit(2);
        }
        return taken;
      };
      for (auto* b : {&q_, &k_, &v_, &do_, &A_, &dq_, &dk_, &dv_}) b->move_to(take(2 * b->count));
      for (auto* b : {&g_, &beta_, &dg_, &dbeta_, &h0_, &dht_, &dh0_}) b->move_to(take(4 * b->count));
      workspace_place_ = take(size_t{1} << 30);
      make_params(false);
      std::printf("place %d: q %p workspace %p\n", place, static_cast<void*>(q_.data), workspace_place_);
      time_in_turns(plans, rounds);
    }
  }

  // Each plan's calls without a pause, as many as take `ms` milliseconds: the card throttles as it does in training.
  void time_hot(const std::vector<Case>& plans, float ms) {
    static const Card card;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (const Case& plan : plans) {
      make_plan(plan);
      std::vector<float> times;
      float spent = 0, early = 0;
      double mhz = 0;
      int counted = 0;
      while (spent < ms) {
        CHECK(cudaEventRecord(begin));
        for (int call = 0; call < 5; ++call) CHECK(launch_chunk_backward(p_, maps_, {}, nullptr));
        CHECK(cudaEventRecord(end));
        const unsigned now = card.mhz();
        CHECK(cudaEventSynchronize(end));
        float x = 0;
        CHECK(cudaEventElapsedTime(&x, begin, end));
        spent += x;
        if (spent < ms / 2) {
          early = x / 5;
          continue;
        }
        times.push_back(x / 5);
        mhz += now;
        ++counted;
      }
      std::sort(times.begin(), times.end());
      std::printf("%-44s %-18s hot: median %.4f least %.4f most %.4f (half-way %.4f), %.0f MHz\n", c_.name.c_str(),
                  plan.name.c_str(), times[times.size() / 2], times[0], times.back(), early, mhz / counted);
    }
  }

  // Each plan's calls, five in a row, in turns with the others': medians and the least.
  void time_in_turns(const std::vector<Case>& plans, int rounds) {
    std::vector<std::vector<float>> ms(plans.size());
    std::vector<std::string> how(plans.size());
    static const Card card;
    std::vector<unsigned> mhz(plans.size()), watts(plans.size());
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int round = 0; round <= rounds; ++round) {
      for (size_t i = 0; i < plans.size(); ++i) {
        make_plan(plans[i]);
        constexpr int kCalls = 5;
        for (int call = -1; call < kCalls; ++call) {
          if (call == 0) CHECK(cudaEventRecord(begin));
          CHECK(launch_chunk_backward(p_, maps_, {true, true, true, plans[i].name.find("alone") == std::string::npos},
                                      nullptr));
        }
        CHECK(cudaEventRecord(end));
        mhz[i] = card.mhz();  // while it works
        watts[i] = card.watts();
        CHECK(cudaEventSynchronize(end));
        float x = 0;
        CHECK(cudaEventElapsedTime(&x, begin, end));
        if (round > 0) ms[i].push_back(x / kCalls);
        how[i] = std::string(p_.whole_values ? "both"
                             : p_.fused      ? "fused"
                                             : "half") +
                 (p_.segment_chunks > 0 ? " segments " + std::to_string(p_.segment_chunks) : "") +
                 (p_.run_chunks > 0 ? " runs " + std::to_string(p_.run_chunks) : "");
      }
    }
    for (size_t i = 0; i < plans.size(); ++i) {
      std::sort(ms[i].begin(), ms[i].end());
      std::printf("%-44s %-24s %-18s median %.4f least %.4f most %.4f; at last %u MHz %u W\n", c_.name.c_str(),
                  plans[i].name.c_str(), how[i].c_str(), ms[i][ms[i].size() / 2], ms[i][0], ms[i].back(), mhz[i],
                  watts[i]);
    }
  }

 private:
  struct OracleBuffers {
    Buffer<double> dq, dk, dv, u, dg, dbeta, dh0, S, dS, scratch;
    explicit OracleBuffers(const Runner& r)
        : dq(r.tokens_ * r.c_.Hv * 128ll),
          dk(dq.count),
          dv(dq.count),
          u(dq.count),
          dg(r.tokens_ * static_cast<int64_t>(r.c_.Hv)),
          dbeta(dg.count),
          dh0(r.N_ * r.c_.Hv * 16384ll),
          S(r.chunks_.size() * r.c_.Hv * 16384ll),
          dS(S.count),
          scratch(r.N_ * r.c_.Hv * 65ll * 16384) {
      for (Buffer<double>* b : {&dq, &dk, &dv, &u, &dg, &dbeta}) b->fill(0);
    }
  };

  void make_inputs() {
    std::mt19937_64 rng(1234 + tokens_ + c_.Hv);
    // The sum of four uniform numbers, scaled to variance 1: a row of 32768 tokens and 32 heads has 400 million
    // numbers.
    auto normal = [](std::mt19937_64& r) {
      const uint64_t bits = r();
      const int sum = static_cast<int>(bits & 0xffff) + static_cast<int>(bits >> 16 & 0xffff) +
                      static_cast<int>(bits >> 32 & 0xffff) + static_cast<int>(bits >> 48) - 131070;
      return static_cast<float>(sum) * (1.7320508f / 65536.0f);
    };
    std::uniform_real_distribution<float> uniform;
    std::normal_distribution<float> with_tails;  // of betas: one in 60,000 is below 2^-6
    const int64_t T = tokens_;
    auto rows = [&](int heads, bool unit) {
      std::vector<uint16_t> x(T * heads * 128);
      const int64_t drawn = std::min<int64_t>(T, c_.distinct_tokens) * heads;
      for (int64_t r = 0; r < drawn; ++r) {
        float row[128], sum = 0;
        for (float& e : row) {
          e = normal(rng);
          sum += e * e;
        }
        const float factor = unit ? 1.0f / std::sqrt(sum) : 1.0f;
        for (int d = 0; d < 128; ++d) x[r * 128 + d] = to_bits(row[d] * factor, c_.fp16);
      }
      for (int64_t i = drawn * 128; i < T * heads * 128; ++i) x[i] = x[i - drawn * 128];
      return x;
    };
    hq_ = rows(c_.Hq, true);
    hk_ = rows(c_.Hq, true);
    hv_ = rows(c_.Hv, false);
    hdo_ = rows(c_.Hv, false);
    hg_.resize(T * c_.Hv);
    hbeta_.resize(T * c_.Hv);
    for (int64_t i = 0; i < T * c_.Hv; ++i) {
      const int head = i % c_.Hv;
      const float x = normal(rng), logsigmoid = -std::log1p(std::exp(-x));
      float g = head % 4 == 3 ? 0.0f : logsigmoid / 16;
      if (c_.strong)
        g = head % 2 == 0 ? 8 * logsigmoid : (uniform(rng) < 0.02f ? -1000.0f : (uniform(rng) < 0.05f ? 0.2f : g));
      float beta = 1.0f / (1.0f + std::exp(-with_tails(rng)));
      if (c_.small_beta && uniform(rng) < 0.3f) beta = uniform(rng) < 0.5f ? 0.0f : 0.01f * uniform(rng);
      hg_[i] = c_.half_gates ? static_cast<float>(from_bits(to_bits(g, false), false)) : g;
      hbeta_[i] = c_.half_gates ? static_cast<float>(from_bits(to_bits(beta, false), false)) : beta;
    }
    hh0_.resize(N_ * c_.Hv * 16384ll);
    hdht_.resize(hh0_.size());
    for (float& x : hh0_) x = normal(rng);
    for (float& x : hdht_) x = normal(rng) / 8;
  }

  void upload_inputs() {
    q_.upload(hq_);
    k_.upload(hk_);
    v_.upload(hv_);
    do_.upload(hdo_);
    std::vector<float> g = hg_;
    if (c_.cumsum) {
      for (const int4& chunk : chunks_) {
        for (int h = 0; h < c_.Hv; ++h) {
          float sum = 0;
          for (int t = 0; t < chunk.y; ++t) {
            float& x = g[(chunk.x + t) * static_cast<int64_t>(c_.Hv) + h];
            sum += std::max(x, -80.0f);
            x = sum;
          }
        }
      }
    }
    if (c_.half_gates) {
      std::vector<uint16_t> bits(g.size());
      for (size_t i = 0; i < g.size(); ++i) bits[i] = to_bits(g[i], false);
      CHECK(cudaMemcpy(g_.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
      for (size_t i = 0; i < g.size(); ++i) bits[i] = to_bits(hbeta_[i], false);
      CHECK(cudaMemcpy(beta_.data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice));
    } else {
      g_.upload(g);
      beta_.upload(hbeta_);
    }
    h0_.upload(hh0_);
    dht_.upload(hdht_);
  }

  void make_params(bool first_time = true) {
    if (first_time) upload_inputs();
    const int64_t T = tokens_;
    const DType type = c_.fp16 ? DType::kFloat16 : DType::kBFloat16;
    const DType gate_type = c_.half_gates ? DType::kBFloat16 : DType::kFloat32;
    p_ = {};
    p_.B = c_.varlen ? 1 : N_;
    p_.T = static_cast<int>(c_.varlen ? T : T / N_);
    p_.N = N_;
    p_.Hq = c_.Hq;
    p_.Hv = c_.Hv;
    p_.group = c_.Hv / c_.Hq;
    p_.per_sequence = c_.varlen ? 0 : (p_.T + 63) / 64;
    p_.chunk_bound = c_.varlen ? p_.T / 64 + N_ : N_ * p_.per_sequence;
    p_.scale = 1.0f / std::sqrt(128.0f);
    p_.g_is_cumsum = c_.cumsum;
    p_.state_v_first = c_.v_first;
    p_.has_d_o = c_.d_o;
    p_.has_dq_and_dk = true;
    if (c_.varlen) {
      if (c_.int64_offsets) {
        offsets64_.upload(std::vector<int64_t>(start_.begin(), start_.end()));
        p_.cu_seqlens = offsets64_.data;
        p_.cu_seqlens_64 = true;
      } else {
        offsets_.upload(start_);
        p_.cu_seqlens = offsets_.data;
      }
      p_.cu_seqlens_stride = 1;
    }
    auto tokens = [&](void* data, int heads, int64_t columns, DType t) {
      return StridedTensor{data, {p_.T * heads * columns, heads * columns, columns, 1}, t};
    };
    p_.g = tokens(g_.data, c_.Hv, 1, gate_type);
    p_.beta = tokens(beta_.data, c_.Hv, 1, gate_type);
    p_.k = tokens(k_.data, c_.Hq, 128, type);
    p_.q = tokens(q_.data, c_.Hq, 128, type);
    if (c_.d_o) p_.d_o = tokens(do_.data, c_.Hv, 128, type);
    p_.may_be_exact = c_.exact && c_.dht;
    p_.v = tokens(v_.data, c_.Hv, 128, type);
    if (c_.A) p_.A = tokens(A_.data, c_.Hv, 64, type);
    const StridedTensor states{nullptr, {c_.Hv * 16384ll, 16384, 128, 1}, DType::kFloat32};
    if (c_.h0) (p_.initial_state = states).data = h0_.data;
    if (c_.dht) (p_.dht = states).data = dht_.data;
    (p_.dh0 = states).data = dh0_.data;
    p_.dq = tokens(dq_.data, c_.Hq, 128, type);
    p_.dk = tokens(dk_.data, c_.Hq, 128, type);
    p_.dv = tokens(dv_.data, c_.Hv, 128, type);
    p_.dg = tokens(dg_.data, c_.Hv, 1, DType::kFloat32);
    p_.dbeta = tokens(dbeta_.data, c_.Hv, 1, DType::kFloat32);
    make_plan(c_);
    if (first_time && c_.A && !chunks_.empty()) {
      Buffer<int4> chunks(chunks_.size());
      chunks.upload(chunks_);
      Buffer<double> beta(hbeta_.size());
      beta.upload(std::vector<double>(hbeta_.begin(), hbeta_.end()));
      A_.fill(0xff);
      solve_kernel<<<static_cast<int>(chunks_.size()) * c_.Hv, 64>>>(k_.data, beta.data, chunks.data, c_.Hq, c_.Hv,
                                                                     c_.fp16, A_.data);
      CHECK(cudaDeviceSynchronize());
    }
  }

  // How the kernels go through the call.
  void make_plan(const Case& plan) {
    c_.segment_chunks = plan.segment_chunks;
    c_.fused = plan.fused;
    c_.whole_values = plan.whole_values;
    c_.run_chunks = plan.run_chunks;
    auto tokens = [&](void* data, int heads) {
      return StridedTensor{data, {p_.T * heads * 128ll, heads * 128ll, 128, 1}, p_.v.type};
    };
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(workspace_));
    p_.segment_chunks = c_.segment_chunks >= 0 ? c_.segment_chunks : choose_segment_chunks(p_, 132);
    p_.fused = c_.fused;
    p_.whole_values = c_.whole_values;
    p_.run_chunks = c_.run_chunks >= 0 ? c_.run_chunks : choose_run_chunks(p_, 132);
    workspace_bytes_ = chunk_backward_workspace_size(p_);
    workspace_ = nullptr;
    if (workspace_place_ == nullptr) CHECK(cudaMalloc(&workspace_, workspace_bytes_));
    bind_chunk_backward_workspace(&p_, workspace_place_ != nullptr ? workspace_place_ : workspace_);
    CHECK(make_chunk_backward_maps(p_, tokens(q_.data, c_.Hq), tokens(do_.data, c_.Hv), &maps_));
  }

  void run_oracle(OracleBuffers* ref) {
    Buffer<int> start(start_.size()), slots(std::max<size_t>(1, first_slot_.size()));
    start.upload(start_);
    slots.upload(first_slot_);
    std::vector<double> g(hg_.size());
    for (size_t i = 0; i < g.size(); ++i) g[i] = std::max(hg_[i], -80.0f);
    Buffer<double> dg(g.size()), beta(g.size()), h0(hh0_.size()), dht(hh0_.size());
    dg.upload(g);
    beta.upload(std::vector<double>(hbeta_.begin(), hbeta_.end()));
    auto states = [&](const std::vector<float>& from) {
      std::vector<double> x(from.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const size_t base = i / 16384 * 16384, k = i % 16384 / 128, v = i % 128;
        x[i] = from[base + (c_.v_first ? v * 128 + k : k * 128 + v)];
      }
      return x;
    };
    h0.upload(states(hh0_));
    dht.upload(states(hdht_));
    OracleArguments a{};
    a.Hq = c_.Hq;
    a.Hv = c_.Hv;
    a.group = c_.Hv / c_.Hq;
    a.fp16 = c_.fp16;
    a.scale = p_.scale;
    a.q = q_.data;
    a.k = k_.data;
    a.v = v_.data;
    a.d_o = c_.d_o ? do_.data : nullptr;
    a.g = dg.data;
    a.beta = beta.data;
    a.h0 = c_.h0 ? h0.data : nullptr;
    a.dht = c_.dht ? dht.data : nullptr;
    a.start = start.data;
    a.first_slot = slots.data;
    a.dq = ref->dq.data;
    a.dk = ref->dk.data;
    a.dv = ref->dv.data;
    a.u = ref->u.data;
    a.dg = ref->dg.data;
    a.dbeta = ref->dbeta.data;
    a.dh0 = ref->dh0.data;
    a.S = ref->S.data;
    a.dS = ref->dS.data;
    a.scratch = ref->scratch.data;
    constexpr int kBytes = (16384 + 10 * 128 + 512) * 8;
    CHECK(cudaFuncSetAttribute(oracle_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    oracle_kernel<<<N_ * c_.Hv, kOracleThreads, kBytes>>>(a);
    CHECK(cudaDeviceSynchronize());
    // A clamped decay has no gradient.
    if (!c_.cumsum) {
      std::vector<double> host = ref->dg.download();
      for (size_t i = 0; i < host.size(); ++i) {
        if (hg_[i] < -80.0f) host[i] = 0.0;
      }
      ref->dg.upload(host);
    }
  }

  void run(Parts stage = {}) {
    for (Buffer<uint16_t>* b : {&dq_, &dk_, &dv_}) b->fill(0xff);
    for (Buffer<float>* b : {&dg_, &dbeta_, &dh0_}) b->fill(0xff);
    CHECK(cudaMemset(workspace_, 0xff, workspace_bytes_));
    const cudaError_t launched = launch_chunk_backward(p_, maps_, stage, nullptr);
    const cudaError_t done = cudaDeviceSynchronize();
    if (launched != cudaSuccess || done != cudaSuccess) {
      std::printf("%s: launch %s, run %s\n", c_.name.c_str(), cudaGetErrorString(launched), cudaGetErrorString(done));
      std::exit(3);
    }
  }

  Outputs outputs() {
    return {dq_.download(), dk_.download(), dv_.download(), dg_.download(), dbeta_.download(), dh0_.download()};
  }

  // NaN in every input of sequence 1 changes no bit elsewhere.
  bool neighbours_unharmed(const Outputs& clean) {
    const auto q = hq_, k = hk_, v = hv_, d_o = hdo_;
    const auto g = hg_, beta = hbeta_;
    auto poison = [&](auto& x, int64_t per_token, auto value) {
      std::fill(x.begin() + start_[1] * per_token, x.begin() + start_[2] * per_token, value);
    };
    const uint16_t nan = c_.fp16 ? 0x7e00 : 0x7fc0;
    poison(hq_, c_.Hq * 128, nan);
    poison(hk_, c_.Hq * 128, nan);
    poison(hv_, c_.Hv * 128, nan);
    poison(hdo_, c_.Hv * 128, nan);
    poison(hg_, c_.Hv, NAN);
    poison(hbeta_, c_.Hv, NAN);
    upload_inputs();
    run();
    Outputs dirty = outputs();
    auto restore = [&](auto& x, const auto& from, int64_t per_token) {
      std::copy(from.begin() + start_[1] * per_token, from.begin() + start_[2] * per_token,
                x.begin() + start_[1] * per_token);
    };
    restore(dirty.dq, clean.dq, c_.Hq * 128);
    restore(dirty.dk, clean.dk, c_.Hq * 128);
    restore(dirty.dv, clean.dv, c_.Hv * 128);
    restore(dirty.dg, clean.dg, c_.Hv);
    restore(dirty.dbeta, clean.dbeta, c_.Hv);
    std::copy(clean.dh0.begin() + c_.Hv * 16384ll, clean.dh0.begin() + 2 * c_.Hv * 16384ll,
              dirty.dh0.begin() + c_.Hv * 16384ll);
    hq_ = q;
    hk_ = k;
    hv_ = v;
    hdo_ = d_o;
    hg_ = g;
    hbeta_ = beta;
    upload_inputs();
    return dirty == clean;
  }

  Case c_;
  int N_ = 0, tokens_ = 0;
  std::vector<int> start_, first_slot_;
  std::vector<int4> chunks_;
  std::vector<uint16_t> hq_, hk_, hv_, hdo_;
  std::vector<float> hg_, hbeta_, hh0_, hdht_;
  int64_t count(int heads, int64_t columns) const {
    int64_t tokens = c_.padding;
    for (int length : c_.lengths) tokens += length;
    return std::max<int64_t>(1, tokens) * heads * columns;
  }
  int64_t state_count() const { return static_cast<int64_t>(c_.lengths.size()) * c_.Hv * 16384; }
  Buffer<uint16_t> q_{static_cast<size_t>(count(c_.Hq, 128))}, k_{q_.count}, v_{static_cast<size_t>(count(c_.Hv, 128))},
      do_{v_.count}, A_{static_cast<size_t>(count(c_.Hv, 64))}, dq_{q_.count}, dk_{q_.count}, dv_{v_.count};
  Buffer<float> g_{static_cast<size_t>(count(c_.Hv, 1))}, beta_{g_.count}, dg_{g_.count}, dbeta_{g_.count},
      h0_{static_cast<size_t>(state_count())}, dht_{h0_.count}, dh0_{h0_.count};
  Buffer<int> offsets_{c_.lengths.size() + 1};
  Buffer<int64_t> offsets64_{c_.lengths.size() + 1};
  Outputs checked_;
  Args p_{};
  Maps maps_{};
  void* workspace_ = nullptr;
  char* workspace_place_ = nullptr;  // where it is to lie, in memory of somebody else
  size_t workspace_bytes_ = 0;

 public:
  ~Runner() { cudaFree(workspace_); }
};

std::vector<Case> check_cases() {
  std::vector<Case> cases;
  auto add = [&](std::string name, int Hq, int Hv, std::vector<int> lengths) -> Case& {
    Case c;
    c.name = std::move(name);
    c.Hq = Hq;
    c.Hv = Hv;
    c.lengths = std::move(lengths);
    cases.push_back(std::move(c));
    return cases.back();
  };
  add("1x64", 1, 1, {64}).varlen = false;
  add("1x256 A solved", 1, 1, {256}).A = false;
  add("1x1000, small beta", 1, 2, {1000}).small_beta = true;
  {
    Case& c = add("1x600 fp16, padding", 2, 4, {600});
    c.fp16 = true;
    c.small_beta = true;
    c.padding = 70;
  }
  add("varlen GVA", 2, 4, {37, 300, 0, 64, 129, 1}).padding = 20;
  {
    Case& c = add("dense 2x200 GVA cumsum", 2, 6, {200, 200});
    c.varlen = false;
    c.cumsum = true;
  }
  {
    Case& c = add("40 heads, two groups", 20, 40, {130, 65, 192});
    c.v_first = true;
    c.int64_offsets = true;
  }
  {
    Case& c = add("strong decay", 2, 4, {300, 129, 64});
    c.strong = true;
    c.A = false;
  }
  {
    Case& c = add("small beta", 2, 4, {100, 200, 64});
    c.small_beta = true;
  }
  {
    Case& c = add("fp16 bf16 gates", 2, 4, {100, 200, 65});
    c.fp16 = true;
    c.half_gates = true;
    c.small_beta = true;
  }
  {
    Case& c = add("no states, no A", 2, 2, {100, 200, 65});
    c.h0 = c.dht = c.A = false;
  }
  {
    Case& c = add("segments", 2, 4, {1600, 37, 0, 2049, 512});
    c.segment_chunks = 9;
    c.padding = 7;
  }
  {
    Case& c = add("segments dense cumsum", 2, 8, {1500, 1500});
    c.segment_chunks = 8;
    c.varlen = false;
    c.cumsum = true;
    c.v_first = true;
  }
  {
    Case& c = add("segments strong, no states", 1, 4, {1300, 700, 1});
    c.segment_chunks = 3;
    c.strong = true;
    c.h0 = c.dht = c.A = false;
  }
  {
    Case& c = add("segments fp16", 2, 4, {1400, 200, 900});
    c.segment_chunks = 4;
    c.fp16 = true;
    c.half_gates = true;
    c.small_beta = true;
  }
  {
    Case& c = add("runs", 2, 8, {4000});
    c.run_chunks = 10;
    c.padding = 7;
  }
  {
    Case& c = add("runs dense cumsum", 2, 4, {2560});
    c.run_chunks = 12;
    c.varlen = false;
    c.cumsum = true;
    c.v_first = true;
  }
  {
    Case& c = add("runs strong, no states", 1, 4, {1950});
    c.run_chunks = 16;
    c.strong = true;
    c.h0 = c.dht = c.A = false;
  }
  {
    Case& c = add("runs fp16", 4, 4, {1400});
    c.run_chunks = 10;
    c.fp16 = true;
    c.half_gates = true;
    c.small_beta = true;
  }
  add("no dO", 2, 2, {100, 200, 65}).d_o = false;
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  std::printf("%s", flash_qla::build_info().c_str());
  const std::string mode = argc > 1 ? argv[1] : "check";
  const std::string wanted = argc > 2 ? argv[2] : "";
  bool good = true;
  if (mode == "check") {
    for (Case c : check_cases()) {
      if (c.name.find(wanted) == std::string::npos) continue;
      // All forms have the same bits, but for what is cut into pieces and for dg with states in fp32.
      const bool same_bits = c.segment_chunks == 0 && c.run_chunks == 0;
      Outputs first;
      const std::string name = c.name;
      const auto check = [&](const char* form) {
        c.name = form + name;
        Runner runner(c);
        good &= runner.check();
        if (!same_bits || c.exact) return;
        const Outputs& outputs = runner.checked();
        if (first.dq.empty()) first = outputs;
        if (!(outputs == first)) std::printf("%s: not the bits of the first form\n", c.name.c_str());
        good &= outputs == first;
      };
      check("");
      c.fused = true;
      check("fused ");
      c.whole_values = true;
      check("both halves of V, fused, ");
      c.fused = c.whole_values = false;
      c.exact = true;
      check("states in fp32 ");
    }
    std::printf("%s\n", good ? "all checks passed" : "CHECKS FAILED");
  } else if (mode == "turns" || mode == "places" || mode == "hot") {
    // turns Hq/Hv:length,length,.. rounds plan ..: a plan is "rule", or what follows joined by commas: fused, half,
    // both (fused, of both halves of V), alone (without the gradients), s and r with segments' and runs' chunks.
    // places: of a sixth as many rounds at each of six places in memory. hot: milliseconds without a pause for rounds.
    Case c;
    c.name = wanted;
    const size_t colon = wanted.find(':');
    std::sscanf(wanted.c_str(), "%d/%d", &c.Hq, &c.Hv);
    std::stringstream lengths(wanted.substr(colon + 1));
    for (std::string x; std::getline(lengths, x, ',');) c.lengths.push_back(std::stoi(x));
    c.cumsum = true;
    c.distinct_tokens = 2048;
    std::vector<Case> plans;
    for (int i = 4; i < argc; ++i) {
      Case plan = c;
      plan.name = argv[i];
      plan.segment_chunks = plan.name == "rule" ? -1 : 0;
      plan.run_chunks = plan.name == "rule" ? -1 : 0;
      std::stringstream parts(plan.name);
      for (std::string x; std::getline(parts, x, ',');) {
        if (x == "fused" || x == "both") plan.fused = true;
        if (x == "both") plan.whole_values = true;
        if (x[0] == 's') plan.segment_chunks = std::stoi(x.substr(1));
        if (x[0] == 'r' && x != "rule") plan.run_chunks = std::stoi(x.substr(1));
      }
      plans.push_back(plan);
    }
    const int rounds = std::stoi(argv[3]);
    if (mode == "places") {
      Runner(c).time_in_places(plans, std::max(1, rounds / 6), 6);
    } else if (mode == "hot") {
      Runner(c).time_hot(plans, static_cast<float>(rounds));
    } else {
      Runner(c).time_in_turns(plans, rounds);
    }
  } else {
    struct Row {
      int Hq, Hv, sequences, length;
    };
    const std::vector<Row> table = {{16, 32, 1, 8192},  {16, 32, 4, 2048}, {16, 32, 8, 1024}, {8, 16, 1, 8192},
                                    {8, 16, 8, 1024},   {4, 8, 1, 8192},   {2, 4, 1, 8192},   {2, 4, 8, 1024},
                                    {16, 32, 1, 32768}, {8, 16, 1, 32768}, {4, 8, 1, 32768},  {2, 4, 1, 32768},
                                    {1, 2, 1, 640},     {4, 8, 1, 1024},   {8, 16, 1, 1000},  {16, 32, 1, 512}};
    for (const Row& row : table) {
      Case c;
      c.name = std::to_string(row.Hq) + "/" + std::to_string(row.Hv) + " " + std::to_string(row.sequences) + "x" +
               std::to_string(row.length);
      if (c.name.find(wanted) == std::string::npos) continue;
      c.Hq = row.Hq;
      c.Hv = row.Hv;
      c.segment_chunks = argc > 3 ? std::atoi(argv[3]) : -1;
      c.fused = argc > 4 && std::string(argv[4]) == "fused";
      c.whole_values = argc > 4 && std::string(argv[4]) == "both";
      c.exact = argc > 4 && std::string(argv[4]) == "exact";
      c.run_chunks = -1;
      c.cumsum = true;  // what the forward hands over
      c.lengths.assign(row.sequences, row.length);
      Runner runner(c);
      if (mode == "timecheck" && row.length * row.sequences <= 8192 && row.Hv <= 16) good &= runner.check();
      runner.time();
    }
  }
  return good ? 0 : 1;
}
