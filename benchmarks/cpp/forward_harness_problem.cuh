// What forward_harness runs: a call of the Hopper forward with its tensors, made on the device, and its errors
// against a token recurrence in fp64.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/sm90/chunk_fwd/launch.h"
#include "cuda/sm90/context_parallel/plan_args.h"
namespace flash_qla::cuda::sm90::bench {

using namespace fwd;
using namespace cp;

#define CHECK_CUDA(call)                                                                      \
  do {                                                                                        \
    const cudaError_t status_ = (call);                                                       \
    if (status_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(2);                                                                           \
    }                                                                                         \
  } while (0)

// kBenchmark: a quarter of the heads does not decay, the others by 3.2 a chunk; kDecay: all by 3.2 a chunk; kMixed: all
// do in runs of a few thousand tokens. kStrong: three quarters by some 800 a chunk; kAllStrong: all.
enum class Gates { kBenchmark, kZero, kStrong, kExtreme, kDecay, kMixed, kAllStrong };

struct Case {
  std::string name;
  int hq = 2, hv = 2;
  std::vector<int> lengths;
  Gates gates = Gates::kBenchmark;
  bool h0 = true;
  bool v_first = false;
  bool correlated = false;
  bool half = false;
  bool dense = false;
  bool offsets_64 = false;
  bool save = false;         // h, A and the gates' sums
  bool save_a = false;       // A and the gates' sums
  bool poison_tail = false;  // NaN in all of q, k, v, g, beta after each sequence's end (padding) and in odd sequences
  int padding = 0;           // tokens after the last offset
  DType state_type = DType::kFloat32;
  bool pool = false;
  bool some_from_zero = false;  // every third sequence has no initial state
  Variant variant = Variant::kAuto;
  Mode split = Mode::kOff;
  bool force_split = false;
  double bar_ms = 0.0;
  float scale = 0.08838834764831845f;
};

__device__ inline uint32_t hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__device__ inline float uniform(uint64_t x) { return (hash(x) + 0.5f) * (1.0f / 4294967296.0f); }
__device__ inline float normal(uint64_t x) {
  return sqrtf(-2.0f * logf(uniform(2 * x))) * cospif(2.0f * uniform(2 * x + 1));
}

template <typename T>
__global__ void fill_rows(T* x, int64_t rows, uint64_t seed, bool normalise, bool correlated) {
  const int64_t row = blockIdx.x;
  const int c = threadIdx.x;
  float value = normal((seed << 40) + row * 128 + c);
  if (correlated) value = 0.25f * value + normal((seed << 40) + (int64_t{1} << 38) + c);
  if (normalise) {
    __shared__ float sums[4];
    float sum = value * value;
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (c % 32 == 0) sums[c / 32] = sum;
    __syncthreads();
    value *= rsqrtf(sums[0] + sums[1] + sums[2] + sums[3] + 1e-6f);
  }
  x[row * 128 + c] = static_cast<T>(value);
}

__global__ void fill_gates(float* g, float* beta, int64_t tokens, int hv, int mode, bool near_one, uint64_t seed) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= tokens * hv) return;
  const int head = static_cast<int>(i % hv);
  const float x = normal((seed << 40) + 2 * i), u = uniform((seed << 40) + (int64_t{1} << 38) + i);
  const float logsigmoid = -log1pf(expf(-x));
  float value = logsigmoid / 16.0f;
  if (mode == 1 || (mode < 3 && head % 4 == 3)) value = 0.0f;
  if (mode == 2) value = head % 4 == 3 ? 0.0f : 16.0f * logsigmoid * (u < 0.01f ? 60.0f : 1.0f);
  if (mode == 6) value = 16.0f * logsigmoid * (u < 0.01f ? 60.0f : 1.0f);
  if (mode == 3) value = u < 0.1f ? -1e4f * uniform(i * 7 + 3) : logsigmoid / 16.0f;
  if (mode == 5) value = (i / hv + head * 700) / 2500 % 2 == 0 ? logsigmoid / 16.0f : 1e-3f * logsigmoid;
  g[i] = value;
  const float b = 1.0f / (1.0f + expf(-normal((seed << 40) + (int64_t{1} << 39) + i)));
  beta[i] = near_one ? 0.98f + 0.02f * b : b;
}

template <typename T>
__global__ void fill_state(T* x, int64_t n, uint64_t seed) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) x[i] = static_cast<T>(0.3f * normal((seed << 40) + i));
}

template <typename T>
__global__ void poison_rows(T* x, int64_t row_elements, const int* rows, int count, float value) {
  const int64_t row = rows[blockIdx.x];
  for (int64_t c = threadIdx.x; c < row_elements; c += blockDim.x) x[row * row_elements + c] = static_cast<T>(value);
}

struct OracleArgs {
  const void *q, *k, *v, *o;
  const float *g, *beta;
  const void *h0, *ht;  // [N, Hv, K, V] or [.., V, K]
  const void* h;        // [chunks, Hv, ..] or null
  const void* a;        // [T, Hv, 64] or null
  const float* g_cumsum;
  const int64_t* offsets;       // [N + 1]
  const int64_t* first_chunks;  // [N]
  const int64_t *slots_in, *slots_out;
  double* sums;  // per tile: |o - ref|^2, |ref|^2, |state - ref|^2, |ref|^2, h, h, cumsum error, -
  int hq, hv, v_first, state_type;
  float scale;
};

__device__ inline double load_any(const void* p, int64_t i, int type) {
  if (type == 0) return static_cast<const float*>(p)[i];
  if (type == 1) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return __half2float(static_cast<const __half*>(p)[i]);
}

// One block per tile, 512 threads: thread (column dv = tid / 4, quarter = tid % 4) holds 32 rows of one column of S.
template <typename T>
__global__ void __launch_bounds__(512) oracle(const __grid_constant__ OracleArgs args) {
  const int sequence = blockIdx.x / args.hv, head = blockIdx.x % args.hv;
  const int dv = threadIdx.x / 4, part = threadIdx.x % 4, key_head = head / (args.hv / args.hq);
  const int64_t begin = args.offsets[sequence], end = args.offsets[sequence + 1];
  const int64_t sk = args.v_first ? 1 : 128, sv = args.v_first ? 128 : 1;
  double s[32];
  const int64_t in = args.slots_in[sequence];
  for (int i = 0; i < 32; ++i) {
    s[i] = in >= 0 ? load_any(args.h0, (in * args.hv + head) * 16384 + (part * 32 + i) * sk + dv * sv, args.state_type)
                   : 0.0;
  }
  __shared__ double k[128], q[128];
  double error = 0, norm = 0, h_error = 0, h_norm = 0, c_error = 0, sum_g = 0;
  for (int64_t t = begin; t < end; ++t) {
    __syncthreads();
    if (threadIdx.x < 128) {
      k[threadIdx.x] = static_cast<float>(static_cast<const T*>(args.k)[(t * args.hq + key_head) * 128 + threadIdx.x]);
      q[threadIdx.x] = static_cast<float>(static_cast<const T*>(args.q)[(t * args.hq + key_head) * 128 + threadIdx.x]);
    }
    __syncthreads();
    const double g = args.g[t * args.hv + head], beta = args.beta[t * args.hv + head], decay = exp(g);
    if ((t - begin) % 64 == 0) {
      sum_g = 0;
      if (args.h != nullptr) {
        const int64_t row = args.first_chunks[sequence] + (t - begin) / 64;
        for (int i = 0; i < 32; ++i) {
          const double got = static_cast<float>(
              static_cast<const T*>(args.h)[(row * args.hv + head) * 16384 + (part * 32 + i) * sk + dv * sv]);
          h_error += (got - s[i]) * (got - s[i]);
          h_norm += s[i] * s[i];
        }
      }
    }
    sum_g += fmax(g, -80.0);
    if (args.g_cumsum != nullptr)
      c_error = fmax(c_error, fabs(args.g_cumsum[t * args.hv + head] - sum_g) / (1 + fabs(sum_g)));
    double product = 0;
    for (int i = 0; i < 32; ++i) {
      s[i] *= decay;
      product += s[i] * k[part * 32 + i];
    }
    product += __shfl_xor_sync(~0u, product, 1);
    product += __shfl_xor_sync(~0u, product, 2);
    const double v = static_cast<float>(static_cast<const T*>(args.v)[(t * args.hv + head) * 128 + dv]);
    const double u = beta * (v - product);
    double out = 0;
    for (int i = 0; i < 32; ++i) {
      s[i] += k[part * 32 + i] * u;
      out += s[i] * q[part * 32 + i];
    }
    out += __shfl_xor_sync(~0u, out, 1);
    out += __shfl_xor_sync(~0u, out, 2);
    out *= args.scale;
    if (part == 0) {
      const double got = static_cast<float>(static_cast<const T*>(args.o)[(t * args.hv + head) * 128 + dv]);
      error += (got - out) * (got - out);
      norm += out * out;
    }
  }
  double s_error = 0, s_norm = 0;
  const int64_t slot = args.slots_out[sequence];
  if (slot >= 0) {
    for (int i = 0; i < 32; ++i) {
      const double got =
          load_any(args.ht, (slot * args.hv + head) * 16384 + (part * 32 + i) * sk + dv * sv, args.state_type);
      s_error += (got - s[i]) * (got - s[i]);
      s_norm += s[i] * s[i];
    }
  }
  double* sums = args.sums + blockIdx.x * 8;
  atomicAdd(&sums[0], error);
  atomicAdd(&sums[1], norm);
  atomicAdd(&sums[2], s_error);
  atomicAdd(&sums[3], s_norm);
  atomicAdd(&sums[4], h_error);
  atomicAdd(&sums[5], h_norm);
  if (threadIdx.x == 0) sums[6] = c_error;
}

// Adds |A - (I + M)^-1|^2 and |(I + M)^-1|^2 of a chunk and head to the head's two sums, by one block of 64 threads for
// each: a thread solves for one column.
template <typename T>
__global__ void check_a(const __grid_constant__ OracleArgs args, int sequence, double* sums) {
  const int64_t begin = args.offsets[sequence] + blockIdx.x * 64;
  const int count = static_cast<int>(min(int64_t{64}, args.offsets[sequence + 1] - begin));
  const int head = blockIdx.y, key_head = head / (args.hv / args.hq), j = threadIdx.x;
  const auto key = [&](int row, int c) {
    const T* const k = static_cast<const T*>(args.k) + ((begin + row) * args.hq + key_head) * 128;
    return static_cast<double>(static_cast<float>(k[c]));
  };
  __shared__ double M[64][64];
  for (int r = 0; j < count && r < j; ++r) {
    double dot = 0;
    for (int c = 0; c < 128; ++c) dot += key(j, c) * key(r, c);
    M[j][r] = args.beta[(begin + j) * args.hv + head] * dot;
  }
  __syncthreads();
  double error = 0, norm = 0, column[64];
  for (int i = j; i < count; ++i) {
    column[i] = i == j;
    for (int r = j; r < i; ++r) column[i] -= M[i][r] * column[r];
  }
  for (int i = 0; j < count && i < count; ++i) {
    const double want = i < j ? 0.0 : column[i];
    const double got = static_cast<float>(static_cast<const T*>(args.a)[((begin + i) * args.hv + head) * 64 + j]);
    error += (got - want) * (got - want);
    norm += want * want;
  }
  for (int i = 16; i > 0; i /= 2) {
    error += __shfl_xor_sync(~0u, error, i);
    norm += __shfl_xor_sync(~0u, norm, i);
  }
  if (j % 32 == 0) {
    atomicAdd(&sums[2 * head], error);
    atomicAdd(&sums[2 * head + 1], norm);
  }
}

template <typename T>
T* device_alloc(int64_t count) {
  T* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<int64_t>(count, 16) * sizeof(T)));
  return p;
}

inline std::vector<void*> pool_of_buffers;
template <typename T>
T* scratch(int64_t count) {
  T* p = device_alloc<T>(count);
  pool_of_buffers.push_back(p);
  return p;
}

struct Problem {
  Args args;
  OracleArgs oracle;
  int64_t tokens = 0, chunks = 0, state_elements = 0;
  size_t workspace_bytes = 0;
};

inline int sm_count() {
  int count = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

template <typename T>
Problem build(const Case& c, uint64_t seed) {
  Problem p;
  const int n = static_cast<int>(c.lengths.size());
  std::vector<int64_t> offsets(n + 1, 0), first(n, 0), slots_in(n), slots_out(n);
  std::vector<uint8_t> has_initial(n);
  for (int i = 0; i < n; ++i) {
    offsets[i + 1] = offsets[i] + c.lengths[i];
    first[i] = p.chunks;
    p.chunks += (c.lengths[i] + 63) / 64;
  }
  p.tokens = offsets[n] + c.padding;
  const int64_t T_ = p.tokens;
  T* q = scratch<T>(T_ * c.hq * 128);
  T* k = scratch<T>(T_ * c.hq * 128);
  T* v = scratch<T>(T_ * c.hv * 128);
  T* o = scratch<T>(T_ * c.hv * 128);
  float* g = scratch<float>(T_ * c.hv);
  float* beta = scratch<float>(T_ * c.hv);
  if (T_ > 0) {
    fill_rows<T><<<T_ * c.hq, 128>>>(q, T_ * c.hq, seed + 1, true, false);
    fill_rows<T><<<T_ * c.hq, 128>>>(k, T_ * c.hq, seed + 2, true, c.correlated);
    fill_rows<T><<<T_ * c.hv, 128>>>(v, T_ * c.hv, seed + 3, false, false);
    fill_gates<<<(T_ * c.hv + 255) / 256, 256>>>(g, beta, T_, c.hv, static_cast<int>(c.gates), c.correlated, seed + 4);
  }
  CHECK_CUDA(cudaGetLastError());
  if (c.poison_tail) {  // every odd sequence and the padding become NaN (even rows) or Inf (odd rows)
    std::vector<int> rows;
    for (int i = 1; i < n; i += 2) {
      for (int64_t t = offsets[i]; t < offsets[i + 1]; ++t) rows.push_back(static_cast<int>(t));
    }
    for (int64_t t = offsets[n]; t < T_; ++t) rows.push_back(static_cast<int>(t));
    int* device_rows = scratch<int>(rows.size());
    CHECK_CUDA(cudaMemcpy(device_rows, rows.data(), rows.size() * sizeof(int), cudaMemcpyHostToDevice));
    const int count = static_cast<int>(rows.size());
    if (count > 0) {
      poison_rows<<<count, 128>>>(q, int64_t{128} * c.hq, device_rows, count, NAN);
      poison_rows<<<count, 128>>>(k, int64_t{128} * c.hq, device_rows, count, NAN);
      poison_rows<<<count, 128>>>(v, int64_t{128} * c.hv, device_rows, count, INFINITY);
      poison_rows<<<count, 128>>>(g, static_cast<int64_t>(c.hv), device_rows, count, NAN);
      poison_rows<<<count, 128>>>(beta, static_cast<int64_t>(c.hv), device_rows, count, NAN);
    }
  }
  const int64_t slots = c.pool ? 2 * n + 3 : n;
  p.state_elements = slots * c.hv * 16384;
  const int64_t bytes = c.state_type == DType::kFloat32 ? 4 : 2;
  char* h0 = scratch<char>(p.state_elements * bytes);
  char* ht = scratch<char>(p.state_elements * bytes);
  if (p.state_elements > 0) {
    const unsigned blocks = static_cast<unsigned>((p.state_elements + 255) / 256);
    if (c.state_type == DType::kFloat32)
      fill_state<<<blocks, 256>>>(reinterpret_cast<float*>(h0), p.state_elements, seed + 5);
    if (c.state_type == DType::kBFloat16)
      fill_state<<<blocks, 256>>>(reinterpret_cast<__nv_bfloat16*>(h0), p.state_elements, seed + 5);
    if (c.state_type == DType::kFloat16)
      fill_state<<<blocks, 256>>>(reinterpret_cast<__half*>(h0), p.state_elements, seed + 5);
  }
  for (int i = 0; i < n; ++i) {
    const bool from_zero = !c.h0 || (c.some_from_zero && i % 3 == 1);
    slots_in[i] = from_zero ? -1 : c.pool ? 2 * n + 1 - 2 * i : i;
    has_initial[i] = !from_zero;
    slots_out[i] = c.pool ? (i % 7 == 6 ? -1 : 2 * i + 1) : i;
  }
  auto upload = [](const std::vector<int64_t>& x) {
    int64_t* d = scratch<int64_t>(x.size());
    CHECK_CUDA(cudaMemcpy(d, x.data(), x.size() * sizeof(int64_t), cudaMemcpyHostToDevice));
    return d;
  };
  int64_t* d_offsets = upload(offsets);
  std::vector<int> offsets_32(offsets.begin(), offsets.end());
  int* d_offsets_32 = scratch<int>(n + 1);
  CHECK_CUDA(cudaMemcpy(d_offsets_32, offsets_32.data(), (n + 1) * sizeof(int), cudaMemcpyHostToDevice));

  Args& a = p.args;
  a.q = q, a.k = k, a.v = v, a.o = o, a.g = g, a.beta = beta;
  a.q_token_stride = a.k_token_stride = c.hq * 128;
  a.v_token_stride = a.o_token_stride = c.hv * 128;
  a.q_head_stride = a.k_head_stride = a.v_head_stride = a.o_head_stride = 128;
  a.g_token_stride = a.beta_token_stride = c.hv;
  a.g_head_stride = a.beta_head_stride = 1;
  if (c.h0) a.initial.data = h0;
  a.final_state.data = ht;
  for (StateSet* set : {&a.initial, &a.final_state}) {
    set->slot_stride = static_cast<int64_t>(c.hv) * 16384;
    set->head_stride = 16384;
    set->slots = slots;
    set->type = c.state_type;
    set->indices_are_64_bit = 1;
  }
  if (c.some_from_zero) {
    uint8_t* flags = scratch<uint8_t>(n);
    CHECK_CUDA(cudaMemcpy(flags, has_initial.data(), n, cudaMemcpyHostToDevice));
    a.has_initial_state = flags;
  }
  int64_t* d_in = upload(slots_in);
  int64_t* d_out = upload(slots_out);
  if (c.pool) a.initial.indices = d_in, a.final_state.indices = d_out;
  if (!c.dense) {
    a.cu_seqlens = c.offsets_64 ? static_cast<const void*>(d_offsets) : d_offsets_32;
    a.cu_seqlens_are_64_bit = c.offsets_64;
  } else {
    a.dense_length = c.lengths[0];
  }
  a.num_tokens = T_;
  a.num_sequences = n;
  a.num_key_heads = c.hq;
  a.num_value_heads = c.hv;
  a.state_v_first = c.v_first;
  a.type = c.half ? DType::kFloat16 : DType::kBFloat16;
  a.scale = c.scale;
  if (c.save || c.save_a) {
    a.g_cumsum = scratch<float>(T_ * c.hv);
    a.a = scratch<T>(T_ * c.hv * 64);
  }
  if (c.save) {
    a.h = scratch<T>(p.chunks * c.hv * 16384);
    a.h_rows = p.chunks;
  }
  a.split = c.split;
  a.force_split = c.force_split;
  p.workspace_bytes = chunk_forward_workspace_size(a, sm_count());
  a.workspace = scratch<char>(p.workspace_bytes);
  p.oracle = {q,
              k,
              v,
              o,
              g,
              beta,
              h0,
              ht,
              a.h,
              a.a,
              a.g_cumsum,
              d_offsets,
              upload(first),
              d_in,
              d_out,
              scratch<double>(std::max(1, n * c.hv) * 8),
              c.hq,
              c.hv,
              c.v_first,
              static_cast<int>(c.state_type),
              c.scale};
  CHECK_CUDA(cudaDeviceSynchronize());
  return p;
}

inline void poison_outputs(const Problem& p) {
  const Args& a = p.args;
  CHECK_CUDA(cudaMemset(a.o, 0xff, p.tokens * a.num_value_heads * 256));
  CHECK_CUDA(cudaMemset(a.final_state.data, 0xff, p.state_elements * (a.final_state.type == DType::kFloat32 ? 4 : 2)));
  CHECK_CUDA(cudaMemset(a.workspace, 0xff, p.workspace_bytes));
  if (a.a != nullptr) CHECK_CUDA(cudaMemset(a.a, 0xff, p.tokens * a.num_value_heads * 128));
  if (a.g_cumsum != nullptr) CHECK_CUDA(cudaMemset(a.g_cumsum, 0xff, p.tokens * a.num_value_heads * 4));
  if (a.h != nullptr) CHECK_CUDA(cudaMemset(a.h, 0xff, p.chunks * a.num_value_heads * 32768));
}

inline void release() {
  CHECK_CUDA(cudaDeviceSynchronize());
  for (void* p : pool_of_buffers) cudaFree(p);
  pool_of_buffers.clear();
}

struct Errors {
  double o = 0, o_worst = 0, state = 0, state_worst = 0, h = 0, cumsum = 0, a = 0;
  int bad_tiles = 0;
};

template <typename T>
Errors measure(const Case& c, Problem& p) {
  Errors e;
  const int n = static_cast<int>(c.lengths.size()), tiles = n * c.hv;
  if (tiles == 0) return e;
  CHECK_CUDA(cudaMemset(p.oracle.sums, 0, tiles * 64));
  oracle<T><<<tiles, 512>>>(p.oracle);
  CHECK_CUDA(cudaDeviceSynchronize());
  std::vector<double> sums(tiles * 8);
  CHECK_CUDA(cudaMemcpy(sums.data(), p.oracle.sums, tiles * 64, cudaMemcpyDeviceToHost));
  double o[2] = {}, s[2] = {}, h[2] = {};
  for (int i = 0; i < tiles; ++i) {
    const double* x = &sums[i * 8];
    if (c.poison_tail && (i / c.hv) % 2 == 1) continue;
    const double eo = x[1] > 0 ? std::sqrt(x[0] / x[1]) : std::sqrt(x[0]),
                 es = x[3] > 0 ? std::sqrt(x[2] / x[3]) : std::sqrt(x[2]);
    constexpr double kWrong = 0.02;  // a tile of few tokens may be off by several times the bound, a wrong one by all
    if (!(eo < kWrong) || !(es < kWrong)) {
      if (e.bad_tiles++ < 3)
        std::printf("  bad tile seq %d head %d len %d: o %.3g state %.3g\n", i / c.hv, i % c.hv, c.lengths[i / c.hv],
                    eo, es);
    }
    e.o_worst = std::max(e.o_worst, eo), e.state_worst = std::max(e.state_worst, es);
    o[0] += x[0], o[1] += x[1], s[0] += x[2], s[1] += x[3], h[0] += x[4], h[1] += x[5];
    e.cumsum = std::max(e.cumsum, x[6]);
  }
  e.o = o[1] > 0 ? std::sqrt(o[0] / o[1]) : std::sqrt(o[0]);
  e.state = s[1] > 0 ? std::sqrt(s[0] / s[1]) : std::sqrt(s[0]);
  e.h = h[1] > 0 ? std::sqrt(h[0] / h[1]) : std::sqrt(h[0]);
  if (p.args.a != nullptr) {
    double* of_heads = scratch<double>(2 * c.hv);
    CHECK_CUDA(cudaMemset(of_heads, 0, 16 * c.hv));
    for (int i = 0; i < n; ++i) {
      if (c.poison_tail && i % 2 == 1) continue;
      if (c.lengths[i] > 0) check_a<T><<<dim3((c.lengths[i] + 63) / 64, c.hv), 64>>>(p.oracle, i, of_heads);
    }
    std::vector<double> found(2 * c.hv);
    CHECK_CUDA(cudaMemcpy(found.data(), of_heads, 16 * c.hv, cudaMemcpyDeviceToHost));
    for (int i = 0; i < c.hv; ++i) {
      const double error = std::sqrt(found[2 * i] / std::max(found[2 * i + 1], 1e-300));
      e.a = std::isnan(error) ? error : std::max(e.a, error);
    }
  }
  return e;
}

}  // namespace flash_qla::cuda::sm90::bench
