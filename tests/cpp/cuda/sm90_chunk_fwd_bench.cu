// Development harness of the fused Hopper forward: checks against a token recurrence in fp64 on the device, and times.
//   sm90_chunk_fwd_bench check [filter]    every case once, poisoned outputs, then repeated runs compared bit by bit
//   sm90_chunk_fwd_bench split [filter]    the rows of docs/design/sequence_split.md: without and with a split,
//   interleaved sm90_chunk_fwd_bench repeat [filter]   the same rows: 1,000 runs with a split compared bit by bit
//   sm90_chunk_fwd_bench soak [count]      one graph replayed with other lengths and gates, each checked
//   sm90_chunk_fwd_bench time [filter] [option]   the rows of docs/design/sm90_forward.md: median of graph replays,
//   error checked first; option: a variant, and 4 for fp16, 8 saved, 16 dense, 32 auto_cp, 64 strong decay
//   of three quarters of the heads, 128 of all
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

#include "cuda/sm90/chunk_fwd/params.h"
#include "cuda/sm90/chunk_fwd/split.h"
#include "flash_qla/flash_qla.h"

namespace {

using namespace flash_qla::cuda::sm90;

#define CHECK_CUDA(call)                                                                      \
  do {                                                                                        \
    const cudaError_t status_ = (call);                                                       \
    if (status_ != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(2);                                                                           \
    }                                                                                         \
  } while (0)

// kBenchmark: a quarter of the heads does not decay, the others by 3.2 a chunk; kDecay: all by 3.2 a chunk; kMixed: all
// do in runs of a few thousand tokens; kGrowth: by 1 a chunk, with keys of norm 2 and beta 2, so that the bound on what
// is dropped never lets anything go. kStrong: three quarters by some 800 a chunk; kAllStrong: all.
enum class Gates { kBenchmark, kZero, kStrong, kExtreme, kDecay, kMixed, kGrowth, kAllStrong };

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
  ElementType state_type = ElementType::kFloat32;
  bool pool = false;
  bool some_from_zero = false;  // every third sequence has no initial state
  ChunkForwardVariant variant = ChunkForwardVariant::kAuto;
  SplitMode split = SplitMode::kOff;
  bool force_split = false;
  double bar_ms = 0.0;
  float scale = 0.08838834764831845f;
};

__device__ uint32_t hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<uint32_t>(x);
}
__device__ float uniform(uint64_t x) { return (hash(x) + 0.5f) * (1.0f / 4294967296.0f); }
__device__ float normal(uint64_t x) { return sqrtf(-2.0f * logf(uniform(2 * x))) * cospif(2.0f * uniform(2 * x + 1)); }

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
  if (mode == 7) value = 16.0f * logsigmoid * (u < 0.01f ? 60.0f : 1.0f);
  if (mode == 3) value = u < 0.1f ? -1e4f * uniform(i * 7 + 3) : logsigmoid / 16.0f;
  if (mode == 5) value = (i / hv + head * 700) / 2500 % 2 == 0 ? logsigmoid / 16.0f : 1e-3f * logsigmoid;
  if (mode == 6) value = -1.0f / 64.0f;
  g[i] = value;
  const float b = 1.0f / (1.0f + expf(-normal((seed << 40) + (int64_t{1} << 39) + i)));
  beta[i] = mode == 6 ? 2.0f : near_one ? 0.98f + 0.02f * b : b;
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

__global__ void count_differences(const uint32_t* a, const uint32_t* b, int64_t n, unsigned* differences) {
  unsigned mine = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    mine += a[i] != b[i];
  }
  if (mine > 0) atomicAdd(differences, mine);
}

// A sum that tells two sets of results apart, in whatever order its terms come.
__global__ void add_up(const uint32_t* a, int64_t n, unsigned* sum) {
  unsigned mine = 0;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const unsigned x = (a[i] ^ static_cast<unsigned>(i) * 2654435761u) * 2246822519u;
    mine += (x ^ x >> 15) * 3266489917u;
  }
  atomicAdd(sum, mine);
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

__device__ double load_any(const void* p, int64_t i, int type) {
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

// |(I + M) A - I| over the chunk, relative to |I|, by one block of 64 threads for each chunk and head.
template <typename T>
__global__ void check_a(const __grid_constant__ OracleArgs args, int sequence, double* worst) {
  const int64_t begin = args.offsets[sequence] + blockIdx.x * 64;
  const int count = static_cast<int>(min(int64_t{64}, args.offsets[sequence + 1] - begin));
  const int head = blockIdx.y, key_head = head / (args.hv / args.hq), j = threadIdx.x;
  double error = 0;
  if (j < count) {
    for (int i = 0; i < count; ++i) {
      auto a = [&](int r) {
        return static_cast<double>(
            static_cast<float>(static_cast<const T*>(args.a)[((begin + r) * args.hv + head) * 64 + j]));
      };
      double sum = a(i);
      for (int r = 0; r < i; ++r) {
        double dot = 0;
        for (int c = 0; c < 128; ++c) {
          dot += static_cast<double>(
                     static_cast<float>(static_cast<const T*>(args.k)[((begin + i) * args.hq + key_head) * 128 + c])) *
                 static_cast<double>(
                     static_cast<float>(static_cast<const T*>(args.k)[((begin + r) * args.hq + key_head) * 128 + c]));
        }
        sum += args.beta[(begin + i) * args.hv + head] * dot * a(r);
      }
      sum -= i == j;
      error += sum * sum;
    }
    error /= 1.0;
  }
  for (int i = 16; i > 0; i /= 2) error += __shfl_xor_sync(~0u, error, i);
  if (j % 32 == 0) atomicAdd(worst, error);
}

template <typename T>
T* device_alloc(int64_t count) {
  T* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, std::max<int64_t>(count, 16) * sizeof(T)));
  return p;
}

std::vector<void*> pool_of_buffers;
template <typename T>
T* scratch(int64_t count) {
  T* p = device_alloc<T>(count);
  pool_of_buffers.push_back(p);
  return p;
}

struct Problem {
  ChunkForwardArgs args;
  OracleArgs oracle;
  int64_t tokens = 0, chunks = 0, state_elements = 0;
  size_t workspace_bytes = 0;
};

int sm_count() {
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
  const int64_t bytes = c.state_type == ElementType::kFloat32 ? 4 : 2;
  char* h0 = scratch<char>(p.state_elements * bytes);
  char* ht = scratch<char>(p.state_elements * bytes);
  if (p.state_elements > 0) {
    const unsigned blocks = static_cast<unsigned>((p.state_elements + 255) / 256);
    if (c.state_type == ElementType::kFloat32)
      fill_state<<<blocks, 256>>>(reinterpret_cast<float*>(h0), p.state_elements, seed + 5);
    if (c.state_type == ElementType::kBFloat16)
      fill_state<<<blocks, 256>>>(reinterpret_cast<__nv_bfloat16*>(h0), p.state_elements, seed + 5);
    if (c.state_type == ElementType::kFloat16)
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

  ChunkForwardArgs& a = p.args;
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
  a.type = c.half ? ElementType::kFloat16 : ElementType::kBFloat16;
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

void poison_outputs(const Problem& p) {
  const ChunkForwardArgs& a = p.args;
  CHECK_CUDA(cudaMemset(a.o, 0xff, p.tokens * a.num_value_heads * 256));
  CHECK_CUDA(
      cudaMemset(a.final_state.data, 0xff, p.state_elements * (a.final_state.type == ElementType::kFloat32 ? 4 : 2)));
  CHECK_CUDA(cudaMemset(a.workspace, 0xff, p.workspace_bytes));
  if (a.a != nullptr) CHECK_CUDA(cudaMemset(a.a, 0xff, p.tokens * a.num_value_heads * 128));
  if (a.g_cumsum != nullptr) CHECK_CUDA(cudaMemset(a.g_cumsum, 0xff, p.tokens * a.num_value_heads * 4));
  if (a.h != nullptr) CHECK_CUDA(cudaMemset(a.h, 0xff, p.chunks * a.num_value_heads * 32768));
}

void release() {
  CHECK_CUDA(cudaDeviceSynchronize());
  for (void* p : pool_of_buffers) cudaFree(p);
  pool_of_buffers.clear();
}

struct Errors {
  double o = 0, o_worst = 0, state = 0, state_worst = 0, h = 0, cumsum = 0, a = 0;
  int bad_tiles = 0;
  std::vector<double> o_heads, state_heads;  // relative, of each value head over all sequences
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
  std::vector<double> heads(c.hv * 4, 0.0);
  for (int i = 0; i < tiles; ++i) {
    const double* x = &sums[i * 8];
    if (c.poison_tail && (i / c.hv) % 2 == 1) continue;
    const double eo = x[1] > 0 ? std::sqrt(x[0] / x[1]) : std::sqrt(x[0]),
                 es = x[3] > 0 ? std::sqrt(x[2] / x[3]) : std::sqrt(x[2]);
    if (!(eo < 0.02) || !(es < 0.02)) {
      if (e.bad_tiles++ < 3)
        std::printf("  bad tile seq %d head %d len %d: o %.3g state %.3g\n", i / c.hv, i % c.hv, c.lengths[i / c.hv],
                    eo, es);
    }
    e.o_worst = std::max(e.o_worst, eo), e.state_worst = std::max(e.state_worst, es);
    for (int j = 0; j < 4; ++j) heads[i % c.hv * 4 + j] += x[j];
    o[0] += x[0], o[1] += x[1], s[0] += x[2], s[1] += x[3], h[0] += x[4], h[1] += x[5];
    e.cumsum = std::max(e.cumsum, x[6]);
  }
  for (int i = 0; i < c.hv; ++i) {
    e.o_heads.push_back(std::sqrt(heads[i * 4] / heads[i * 4 + 1]));
    e.state_heads.push_back(std::sqrt(heads[i * 4 + 2] / heads[i * 4 + 3]));
  }
  e.o = o[1] > 0 ? std::sqrt(o[0] / o[1]) : std::sqrt(o[0]);
  e.state = s[1] > 0 ? std::sqrt(s[0] / s[1]) : std::sqrt(s[0]);
  e.h = h[1] > 0 ? std::sqrt(h[0] / h[1]) : std::sqrt(h[0]);
  if (p.args.a != nullptr) {
    double* worst = scratch<double>(1);
    CHECK_CUDA(cudaMemset(worst, 0, 8));
    int64_t rows = 0;
    for (int i = 0; i < n; ++i) {
      if (c.poison_tail && i % 2 == 1) continue;
      if (c.lengths[i] > 0) check_a<T><<<dim3((c.lengths[i] + 63) / 64, c.hv), 64>>>(p.oracle, i, worst);
      rows += c.lengths[i];
    }
    double total = 0;
    CHECK_CUDA(cudaMemcpy(&total, worst, 8, cudaMemcpyDeviceToHost));
    if (rows > 0) e.a = std::sqrt(total / (rows * c.hv));
  }
  return e;
}

uint64_t checksum(const void* device, int64_t bytes) {
  std::vector<uint64_t> host((bytes + 7) / 8, 0);
  CHECK_CUDA(cudaMemcpy(host.data(), device, bytes, cudaMemcpyDeviceToHost));
  uint64_t sum = 1469598103934665603ull;
  for (uint64_t x : host) sum = (sum ^ x) * 1099511628211ull;
  return sum;
}

template <typename T>
bool run_check(const Case& c, int repeats) {
  Problem p = build<T>(c, 17);
  poison_outputs(p);
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const Errors e = measure<T>(c, p);
  int64_t tail = 0;
  if (c.padding > 0) {
    std::vector<uint16_t> rows(static_cast<size_t>(c.padding) * c.hv * 128);
    CHECK_CUDA(cudaMemcpy(rows.data(), static_cast<T*>(p.args.o) + (p.tokens - c.padding) * c.hv * 128, rows.size() * 2,
                          cudaMemcpyDeviceToHost));
    for (uint16_t x : rows) tail += x != 0;
  }
  const int64_t o_bytes = p.tokens * c.hv * 256,
                s_bytes = p.state_elements * (c.state_type == ElementType::kFloat32 ? 4 : 2);
  const auto bits = [&] {
    uint64_t sum = checksum(p.args.o, o_bytes) ^ checksum(p.args.final_state.data, s_bytes);
    if (p.args.a != nullptr) sum ^= checksum(p.args.a, p.tokens * c.hv * 128);
    if (p.args.g_cumsum != nullptr) sum ^= checksum(p.args.g_cumsum, p.tokens * c.hv * 4);
    return sum;
  };
  const uint64_t before = bits();
  int different = 0;
  for (int i = 0; i < repeats; ++i) {
    CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
    if (i % 10 == 9 || i == repeats - 1) different += bits() != before;
  }
  // The kernel that makes A behind the forward has the same bits; of other NaN.
  bool other_a = false;
  if (c.save_a && c.split == SplitMode::kAuto && !c.poison_tail) {
    const uint64_t a = checksum(p.args.a, p.tokens * c.hv * 128);
    ChunkForwardArgs other = p.args;
    other.split = SplitMode::kOff;
    poison_outputs(p);
    CHECK_CUDA(launch_chunk_forward(other, c.variant, nullptr));
    other_a = checksum(p.args.a, p.tokens * c.hv * 128) != a;
  }
  const double bound = c.correlated ? 8e-3 : 5e-3;
  const bool ok = e.bad_tiles == 0 && e.o < bound && e.state < bound && e.h < bound && e.cumsum < 1e-5 && e.a < 1e-2 &&
                  tail == 0 && different == 0 && !other_a;
  std::printf("%s %-34s o %.2e (%.2e) state %.2e (%.2e)", ok ? "ok  " : "FAIL", c.name.c_str(), e.o, e.o_worst, e.state,
              e.state_worst);
  if (c.save || c.save_a) std::printf(" h %.2e cumsum %.1e A %.2e", e.h, e.cumsum, e.a);
  if (tail != 0) std::printf(" tail %lld", static_cast<long long>(tail));
  if (different != 0) std::printf(" DIFFERENT %d", different);
  if (other_a) std::printf(" A DIFFERS");
  std::printf("\n");
  std::fflush(stdout);
  release();
  return ok;
}

template <typename T>
void run_time(const Case& c) {
  Problem p = build<T>(c, 23);
  poison_outputs(p);
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const Errors e = measure<T>(c, p);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  for (int i = 0; i < 5; ++i) CHECK_CUDA(cudaGraphLaunch(exec, stream));
  std::vector<float> times;
  for (int i = 0; i < 21; ++i) {
    CHECK_CUDA(cudaEventRecord(start, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaEventRecord(stop, stream));
    CHECK_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const double ms = times[times.size() / 2];
  const int sms = c.variant == ChunkForwardVariant::kSplitV ? 2 : c.variant == ChunkForwardVariant::kRelay ? 4 : 1;
  const int tiles = static_cast<int>(c.lengths.size()) * c.hv * sms;
  const double steps = static_cast<double>((tiles + 131) / 132) * ((c.lengths[0] + 63) / 64);
  std::printf("%-26s %8.4f ms (min %.4f)  bar %.4f  %5.3f us/step  o %.2e (%.2e) state %.2e%s\n", c.name.c_str(), ms,
              times[0], c.bar_ms, ms * 1e3 / steps, e.o, e.o_worst, e.state, e.bad_tiles ? "  WRONG" : "");
  std::fflush(stdout);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  release();
}

// Median milliseconds of graph replays, the graphs taking turns.
std::vector<double> time_graphs(const std::vector<ChunkForwardArgs>& calls, ChunkForwardVariant variant, int rounds) {
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  std::vector<cudaGraphExec_t> graphs;
  for (const ChunkForwardArgs& args : calls) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK_CUDA(launch_chunk_forward(args, variant, stream));
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    graphs.push_back(exec);
  }
  cudaEvent_t start, stop;
  CHECK_CUDA(cudaEventCreate(&start));
  CHECK_CUDA(cudaEventCreate(&stop));
  std::vector<std::vector<float>> times(calls.size());
  for (int i = -3; i < rounds; ++i) {
    for (size_t j = 0; j < graphs.size(); ++j) {
      CHECK_CUDA(cudaEventRecord(start, stream));
      CHECK_CUDA(cudaGraphLaunch(graphs[j], stream));
      CHECK_CUDA(cudaEventRecord(stop, stream));
      CHECK_CUDA(cudaEventSynchronize(stop));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
      if (i >= 0) times[j].push_back(ms);
    }
  }
  std::vector<double> medians;
  for (std::vector<float>& t : times) {
    std::sort(t.begin(), t.end());
    medians.push_back(t[t.size() / 2]);
  }
  for (cudaGraphExec_t exec : graphs) CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaEventDestroy(start));
  CHECK_CUDA(cudaEventDestroy(stop));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return medians;
}

// One row without and with a split: times, and errors per head.
bool run_split(Case c) {
  using T = __nv_bfloat16;
  c.split = SplitMode::kAuto;
  Problem p = build<T>(c, 23);
  const bool planned = decide_split(p.args, sm_count()).planned;
  ChunkForwardArgs unsplit = p.args;
  unsplit.split = SplitMode::kOff;
  Errors errors[2];
  for (int i = 0; i < 2; ++i) {
    poison_outputs(p);
    CHECK_CUDA(launch_chunk_forward(i == 0 ? unsplit : p.args, c.variant, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    errors[i] = measure<T>(c, p);
  }
  // Of the results with a split: builds that cut alike have the same.
  unsigned* sum_of_bits = scratch<unsigned>(1);
  CHECK_CUDA(cudaMemset(sum_of_bits, 0, 4));
  add_up<<<264, 256>>>(static_cast<const uint32_t*>(p.args.o), p.tokens * c.hv * 64, sum_of_bits);
  add_up<<<264, 256>>>(static_cast<const uint32_t*>(p.args.final_state.data), p.state_elements, sum_of_bits);
  unsigned bits = 0;
  CHECK_CUDA(cudaMemcpy(&bits, sum_of_bits, 4, cudaMemcpyDeviceToHost));
  SplitCounters plan{};
  if (planned) CHECK_CUDA(cudaMemcpy(&plan, p.args.workspace, sizeof(plan), cudaMemcpyDeviceToHost));
  double worse = 0;
  for (int i = 0; i < c.hv; ++i) {
    worse = std::max(
        {worse, errors[1].o_heads[i] / errors[0].o_heads[i], errors[1].state_heads[i] / errors[0].state_heads[i]});
  }
  const std::vector<double> ms = time_graphs({unsplit, p.args}, c.variant, 15);
  const bool ok = errors[0].bad_tiles + errors[1].bad_tiles == 0 && worse <= 1.1;
  std::printf("%s %-22s off %7.4f on %7.4f ms  bar %.3f%s | o %.2e -> %.2e state %.2e -> %.2e, worst head x%.3f | ",
              ok ? "ok  " : "FAIL", c.name.c_str(), ms[0], ms[1], c.bar_ms,
              c.bar_ms > 0 && ms[1] > c.bar_ms ? " MISSED" : "", errors[0].o, errors[1].o, errors[0].state,
              errors[1].state, worse);
  std::printf("bits %08x spacing %d merge %d/%d tiles %d+%d+%d+%d+%d, %d joint, chains %u%s%s\n", bits, plan.spacing,
              plan.light_merge, plan.heavy_merge, plan.states.tiles, plan.outputs.tiles, plan.outputs.dependent_tiles,
              plan.halves.tiles, plan.halves.dependent_tiles, plan.joint_tiles, plan.progress.pieces / kCombineSlices,
              plan.even == 1 ? " (even)" : "", planned ? "" : " (not planned)");
  std::fflush(stdout);
  release();
  return ok;
}

// `count` runs of one row, all outputs compared bit by bit with the first.
bool run_repeat(Case c, int count) {
  using T = __nv_bfloat16;
  c.split = SplitMode::kAuto;
  Problem p = build<T>(c, 29);
  poison_outputs(p);
  const int64_t o_bytes = p.tokens * c.hv * 256, s_bytes = p.state_elements * 4;
  char* o = scratch<char>(o_bytes);
  char* s = scratch<char>(s_bytes);
  unsigned* differences = scratch<unsigned>(1);
  CHECK_CUDA(cudaMemset(differences, 0, 4));
  for (int i = 0; i < count; ++i) {
    CHECK_CUDA(launch_chunk_forward(p.args, c.variant, nullptr));
    if (i == 0) {
      CHECK_CUDA(cudaMemcpyAsync(o, p.args.o, o_bytes, cudaMemcpyDeviceToDevice));
      CHECK_CUDA(cudaMemcpyAsync(s, p.args.final_state.data, s_bytes, cudaMemcpyDeviceToDevice));
    }
    count_differences<<<264, 256>>>(static_cast<const uint32_t*>(p.args.o), reinterpret_cast<const uint32_t*>(o),
                                    o_bytes / 4, differences);
    count_differences<<<264, 256>>>(static_cast<const uint32_t*>(p.args.final_state.data),
                                    reinterpret_cast<const uint32_t*>(s), s_bytes / 4, differences);
    if (i % 100 == 0) poison_outputs(p);
  }
  unsigned found = 0;
  CHECK_CUDA(cudaMemcpy(&found, differences, 4, cudaMemcpyDeviceToHost));
  std::printf("%s %-22s %d runs, %u words differ\n", found == 0 ? "ok  " : "FAIL", c.name.c_str(), count, found);
  std::fflush(stdout);
  release();
  return found == 0;
}

// One graph of a call of up to 6 sequences and 12,288 tokens; lengths and gates change in place between replays.
bool run_soak(int count) {
  using T = __nv_bfloat16;
  Case c;
  c.name = "soak", c.hq = 2, c.hv = 4, c.split = SplitMode::kAuto;
  c.lengths = {12288, 0, 0, 0, 0, 0};
  Problem p = build<T>(c, 31);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CHECK_CUDA(launch_chunk_forward(p.args, c.variant, stream));
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  uint64_t state = 88172645463325252ull;
  auto below = [&](int n) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<int>(state % static_cast<uint64_t>(n));
  };
  bool ok = true;
  double worst = 0;
  int checked = 0;
  for (int i = 0; i < count && ok; ++i) {
    int left = 12288;
    std::vector<int> offsets(1, 0);
    std::vector<int64_t> wide(1, 0);
    for (size_t s = 0; s < c.lengths.size(); ++s) {
      c.lengths[s] = below(3) == 0 ? below(100) : below(left + 1);
      c.lengths[s] = std::min(c.lengths[s], left);
      left -= c.lengths[s];
      offsets.push_back(12288 - left);
      wide.push_back(12288 - left);
    }
    CHECK_CUDA(cudaMemcpyAsync(const_cast<void*>(p.args.cu_seqlens), offsets.data(), offsets.size() * 4,
                               cudaMemcpyHostToDevice, stream));
    CHECK_CUDA(cudaMemcpyAsync(const_cast<int64_t*>(p.oracle.offsets), wide.data(), wide.size() * 8,
                               cudaMemcpyHostToDevice, stream));
    if (i % 10 == 0) {
      const int modes[] = {0, 1, 2, 4, 5};
      fill_gates<<<12288 * c.hv / 256, 256, 0, stream>>>(const_cast<float*>(p.args.g), const_cast<float*>(p.args.beta),
                                                         12288, c.hv, modes[below(5)], false, 100 + i);
    }
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    if (i % 50 == 0) {
      CHECK_CUDA(cudaStreamSynchronize(stream));
      const Errors e = measure<T>(c, p);
      worst = std::max({worst, e.o_worst, e.state_worst});
      ok = e.bad_tiles == 0;
      ++checked;
    }
  }
  CHECK_CUDA(cudaStreamSynchronize(stream));
  std::printf("%s soak: %d replays of one graph, %d checked, worst tile %.2e\n", ok ? "ok  " : "FAIL", count, checked,
              worst);
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaStreamDestroy(stream));
  release();
  return ok;
}

// The forms in which several SMs work on a head.
constexpr std::pair<const char*, ChunkForwardVariant> kSharedForms[] = {{"split", ChunkForwardVariant::kSplitV},
                                                                        {"relay", ChunkForwardVariant::kRelay}};

std::vector<Case> check_cases() {
  std::vector<Case> cases;
  auto add = [&](const char* name, int hq, int hv, std::vector<int> lengths) -> Case& {
    cases.push_back({});
    Case& c = cases.back();
    c.name = name, c.hq = hq, c.hv = hv, c.lengths = std::move(lengths);
    return c;
  };
  add("1x64 no h0", 1, 1, {64}).h0 = false;
  add("1x64", 1, 1, {64});
  add("1x128", 1, 1, {128});
  add("1x256", 1, 2, {256});
  add("1x1024 dense", 2, 4, {1024}).dense = true;
  add("2x192 dense", 2, 4, {192, 192}).dense = true;
  add("mixed", 2, 8, {37, 300, 64, 129, 1});
  add("mixed long", 2, 4, {1, 63, 64, 65, 127, 129, 300, 1000});
  {
    Case& c = add("zero lengths", 2, 4, {0, 70, 0, 0, 128, 0});
    c.offsets_64 = true, c.padding = 77;
  }
  add("all empty", 2, 4, {0, 0, 0});
  {
    Case& c = add("v first, pool bf16", 2, 4, {100, 64, 257, 1, 63, 200, 128, 90});
    c.v_first = true, c.pool = true, c.state_type = ElementType::kBFloat16;
  }
  {
    Case& c = add("pool fp32", 2, 4, {100, 64, 257, 1, 63, 200, 128, 90});
    c.pool = true;
  }
  add("g zero", 2, 4, {500}).gates = Gates::kZero;
  add("g strong", 2, 8, {500, 129}).gates = Gates::kStrong;
  add("g extreme", 2, 8, {500, 129}).gates = Gates::kExtreme;
  add("correlated", 2, 8, {500, 129}).correlated = true;
  {
    Case& c = add("NaN neighbours", 2, 4, {100, 64, 30, 100, 129, 64, 1, 65});
    c.poison_tail = true, c.padding = 40;
  }
  {
    Case& c = add("many tiles", 4, 16, {});
    for (int i = 0; i < 60; ++i) c.lengths.push_back((i * 37) % 400);
  }
  // Few enough sequences that blocks sort them, and deal their tiles (of 132 multiprocessors), or take tickets.
  add("two tiles to a block", 4, 32, {0, 300, 1, 64, 129, 700, 65, 2}).padding = 33;
  add("dealt, very unequal", 4, 32, {20, 130, 64, 0, 1500, 5, 300, 1, 70}).padding = 3;
  for (const bool unequal : {false, true}) {
    Case& c = add(unequal ? "sorted, tickets, very unequal" : "sorted, tickets", 4, 32, {});
    for (int i = 0; i < 31; ++i) c.lengths.push_back(unequal && i == 7 ? 2000 : (i * 53) % 300);
    c.padding = 5;
  }
  // Initial states that come ahead of their tiles beside tiles without any, of one chunk and of more, in turns.
  for (const bool v_first : {false, true}) {
    Case& c = add(v_first ? "some from zero, v first" : "some from zero", 4, 32, {});
    for (int i = 0; i < 27; ++i) c.lengths.push_back(i % 2 ? 1 + (i * 37) % 64 : (i * 53) % 300);
    c.some_from_zero = true, c.v_first = v_first;
  }
  add("fp16 mixed", 2, 8, {37, 300, 64, 129, 1}).half = true;
  // The same where a sequence's bits may depend on the batch: another kernel.
  for (size_t i = 0, whole = cases.size(); i < whole; ++i) {
    for (const bool half : {false, true}) {
      Case c = cases[i];
      if (half && c.half) continue;
      c.name = (half ? "any bits, fp16, " : "any bits, ") + c.name;
      c.half |= half, c.split = SplitMode::kAuto, c.variant = ChunkForwardVariant::kWholeHead;
      cases.push_back(c);
      // Kernels of their own as well.
      const std::string name = c.name;
      c.name = name + ", A", c.save_a = true;
      cases.push_back(c);
      c.name = name + ", A and h", c.save_a = false, c.save = true;
      cases.push_back(c);
    }
    // And with each number of SMs to a head.
    for (const auto& [form, variant] : kSharedForms) {
      Case c = cases[i];
      c.name = form + (", " + c.name);
      c.variant = variant;
      cases.push_back(c);
    }
  }
  for (const auto& [form, variant] : kSharedForms) {
    const std::string name = form;
    add((name + " mixed").c_str(), 2, 8, {37, 300, 64, 129, 1, 500}).variant = variant;
    {
      Case& c = add((name + " NaN, v first").c_str(), 2, 4, {100, 64, 30, 100, 129, 64, 1, 65});
      c.variant = variant, c.poison_tail = true, c.v_first = true, c.padding = 9;
    }
    {
      Case& c = add(("save, v first, " + name).c_str(), 2, 8, {37, 300, 64, 129, 1});
      c.save = true, c.v_first = true, c.variant = variant;
    }
    {
      Case& c = add(("fp16 save, " + name).c_str(), 2, 8, {37, 300, 64, 129, 1});
      c.save = true, c.half = true, c.variant = variant;
    }
  }
  {
    Case& c = add("save", 2, 8, {37, 300, 64, 129, 1});
    c.save = true;
  }
  for (SplitMode mode : {SplitMode::kAuto, SplitMode::kInvariant}) {
    const std::string name = mode == SplitMode::kAuto ? "cut, " : "cut by length, ";
    auto add_cut = [&](const char* what, int hq, int hv, std::vector<int> lengths) -> Case& {
      Case& c = add((name + what).c_str(), hq, hv, std::move(lengths));
      c.split = mode, c.force_split = true;
      return c;
    };
    add_cut("1x2048", 2, 8, {2048});
    add_cut("1x2048 g zero", 2, 8, {2048}).gates = Gates::kZero;
    add_cut("1x4096 dense", 2, 4, {4096}).dense = true;
    add_cut("2x1000 dense", 2, 4, {1000, 1000}).dense = true;
    add_cut("mixed gates", 2, 8, {9000, 300, 5000}).gates = Gates::kMixed;
    add_cut("decay", 2, 8, {9000, 300, 5000}).gates = Gates::kDecay;
    add_cut("strong", 2, 8, {3000, 129}).gates = Gates::kStrong;
    add_cut("extreme", 2, 8, {3000, 129}).gates = Gates::kExtreme;
    add_cut("fp16", 2, 8, {2037, 300, 64, 1290, 1}).half = true;
    add_cut("no h0", 2, 8, {2037, 300, 64, 1290, 1}).h0 = false;
    {
      Case& c = add_cut("zero lengths, padding", 2, 4, {0, 700, 0, 0, 1280, 0});
      c.offsets_64 = true, c.padding = 777;
    }
    add_cut("all empty", 2, 4, {0, 0, 0});
    {
      Case& c = add_cut("v first, pool bf16", 2, 4, {1000, 640, 257, 1, 63, 2000, 128, 900});
      c.v_first = true, c.pool = true, c.state_type = ElementType::kBFloat16;
    }
    {
      Case& c = add_cut("NaN neighbours", 2, 4, {1000, 640, 300, 1000, 1290, 64, 1, 650});
      c.poison_tail = true, c.padding = 40;
    }
    for (const auto& [form, variant] : kSharedForms) {
      Case& c = add_cut((std::string(form) + ", v first").c_str(), 2, 4, {1000, 640, 300, 1});
      c.v_first = true, c.variant = variant;
    }
    add_cut("save", 2, 8, {2037, 300, 64, 1290, 1}).save = true;
    add_cut("many", 4, 16, {}).lengths.assign(60, 333);
  }
  for (auto [name, lengths] : {std::pair<const char*, std::vector<int>>{"auto 1x8192", {8192}},
                               {"auto long and short", {64, 9000, 300, 1, 0, 5000}},
                               {"auto 20 equal", std::vector<int>(20, 500)}}) {
    Case& c = add(name, 2, 8, lengths);
    c.split = SplitMode::kAuto;
  }
  // Lengths are looked at first: uncut, with a poisoned tail behind them, and cut.
  for (auto [name, lengths] : {std::pair<const char*, std::vector<int>>{"asked 2x16384", {16384, 16384}},
                               {"asked 28672+4096", {28672, 4096}}}) {
    Case& c = add(name, 8, 24, lengths);
    c.split = SplitMode::kAuto, c.padding = 77;
  }
  {
    Case& c = add("scale 0", 2, 2, {200});
    c.scale = 0.0f;
  }
  return cases;
}

// The rows of docs/design/sequence_split.md.
std::vector<Case> split_cases() {
  struct Row {
    int hq, hv;
    std::vector<int> lengths;
    double bar;
    Gates gates;
  };
  const Gates b = Gates::kBenchmark;
  const Row rows[] = {{2, 8, {32768}, 0.140, b},
                      {2, 8, {8192}, 0.065, b},
                      {2, 8, {2048}, 0.040, b},
                      {4, 16, {32768}, 0.25, b},
                      {4, 16, {8192}, 0.090, b},
                      {8, 24, {32768}, 0.37, b},
                      {8, 32, {32768}, 0.47, b},
                      {8, 32, {8192}, 0.145, b},
                      {8, 32, {2048}, 0.060, b},
                      {16, 48, {32768}, 0.65, b},
                      {16, 48, {8192, 8192, 8192, 8192}, 0.50, b},
                      {16, 64, {32768}, 0.80, b},
                      {16, 64, {28672, 4096}, 0.80, b},
                      {2, 8, {32768}, 0.194, Gates::kZero},
                      {8, 32, {32768}, 0.638, Gates::kZero},
                      {8, 32, {16384}, 0.0, Gates::kZero},
                      {8, 32, {8192}, 0.0, Gates::kZero},
                      {16, 32, {32768}, 0.0, Gates::kZero},
                      {16, 32, {8192}, 0.0, Gates::kZero},
                      {2, 8, {4096}, 0.0, Gates::kZero},
                      {2, 8, {8192}, 0.0, Gates::kZero},
                      {2, 8, {16384}, 0.0, Gates::kZero},
                      {4, 16, {8192}, 0.0, Gates::kZero},
                      {4, 16, {16384}, 0.0, Gates::kZero},
                      {4, 16, {32768}, 0.0, Gates::kZero},
                      {16, 16, {8192}, 0.0, Gates::kZero},
                      {16, 16, {16384}, 0.0, Gates::kZero},
                      {8, 24, {32768}, 0.0, Gates::kZero},
                      {8, 24, {16384}, 0.0, Gates::kZero},
                      {4, 16, {4096}, 0.0, Gates::kZero},
                      {8, 24, {8192}, 0.0, Gates::kZero},
                      {2, 8, {4096, 4096}, 0.0, Gates::kZero},
                      {2, 8, {8192}, 0.0, Gates::kDecay},
                      {4, 16, {4096}, 0.0, Gates::kDecay},
                      {8, 24, {8192}, 0.0, Gates::kDecay},
                      {4, 16, {8192}, 0.0, Gates::kDecay},
                      {4, 16, {32768}, 0.0, Gates::kDecay},
                      {16, 16, {8192}, 0.0, Gates::kDecay},
                      {2, 8, {32768}, 0.0, Gates::kDecay},
                      {8, 32, {32768}, 0.0, Gates::kDecay},
                      // No bar of their own: the best peer that was recorded.
                      {2, 8, {4096}, 0.078, b},
                      {2, 8, {4096, 4096}, 0.112, b},
                      {4, 16, {16384}, 0.230, b},
                      {4, 16, {4096}, 0.106, b},
                      {4, 16, {1024, 7168}, 0.149, b},
                      {16, 16, {8192}, 0.152, b},
                      {16, 16, {4096}, 0.109, b},
                      {8, 24, {4096}, 0.131, b},
                      {8, 24, {12288, 4096}, 0.339, b},
                      {8, 24, {1024, 7168}, 0.211, b},
                      {8, 32, {28672, 4096}, 0.743, b},
                      {16, 32, {4096, 28672}, 0.775, b},
                      {32, 32, {8192}, 0.238, b},
                      {4, 16, {2048}, 0.080, b},
                      {8, 32, {4096}, 0.141, b},
                      {16, 48, {8192}, 0.355, b},
                      {16, 32, {12288, 4096}, 0.401, b},
                      {16, 48, {28672, 4096}, 1.249, b},
                      {16, 48, {16384}, 0.656, b},
                      {8, 24, {16384, 16384}, 0.598, b},
                      {8, 24, {28672, 4096}, 0.603, b},
                      // Where a split has little or nothing to give.
                      {8, 24, std::vector<int>(4, 2048), 0.098, b},
                      {4, 16, std::vector<int>(8, 1024), 0.058, b},
                      {4, 16, {12288, 4096}, 0.0, b},
                      {4, 16, {8192, 8192}, 0.0, b},
                      {4, 16, {16384, 16384}, 0.0, b},
                      {16, 48, {16384, 16384}, 0.0, b},
                      {16, 48, std::vector<int>(8, 4096), 0.0, b},
                      {8, 24, std::vector<int>(8, 4096), 0.0, b},
                      {8, 32, {16384}, 0.0, b},
                      {8, 24, {8192}, 0.0, b},
                      {8, 32, {16384, 16384}, 0.0, b},
                      {8, 32, {4096, 4096}, 0.0, b},
                      {16, 64, {8192, 8192, 8192, 8192}, 0.0, b},
                      {16, 64, std::vector<int>(8, 1024), 0.0, b},
                      {8, 32, {8192, 8192, 8192, 8192}, 0.0, b},
                      {8, 32, std::vector<int>(8, 1024), 0.0, b},
                      {2, 8, std::vector<int>(8, 1024), 0.0, b}};
  std::vector<Case> cases;
  for (const Row& r : rows) {
    Case c;
    c.name = std::to_string(r.hq) + "/" + std::to_string(r.hv) + " ";
    const bool equal =
        std::count(r.lengths.begin(), r.lengths.end(), r.lengths[0]) == static_cast<int>(r.lengths.size());
    if (equal) c.name += std::to_string(r.lengths.size()) + "x" + std::to_string(r.lengths[0]);
    for (size_t i = 0; !equal && i < r.lengths.size(); ++i) c.name += (i > 0 ? "+" : "") + std::to_string(r.lengths[i]);
    if (r.gates == Gates::kZero) c.name += " g zero";
    if (r.gates == Gates::kDecay) c.name += " all decay";
    c.hq = r.hq, c.hv = r.hv, c.bar_ms = r.bar, c.lengths = r.lengths, c.gates = r.gates;
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> time_cases() {
  struct Row {
    int hq, hv, n, length;
    double bar;
  };
  const Row rows[] = {{16, 64, 4, 8192, 0.58},  {16, 64, 8, 4096, 0.60},  {16, 64, 4, 2048, 0.155},
                      {16, 64, 8, 1024, 0.158}, {16, 64, 1, 32768, 0.95}, {16, 64, 1, 8192, 0.26},
                      {16, 48, 8, 4096, 0.46},  {8, 32, 4, 8192, 0.295},  {8, 32, 8, 4096, 0.30},
                      {8, 32, 4, 2048, 0.084},  {8, 32, 8, 1024, 0.086},  {8, 24, 4, 2048, 0.083},
                      {16, 16, 4, 8192, 0.26},  {4, 16, 8, 1024, 0.047},  {2, 8, 8, 1024, 0.042}};
  std::vector<Case> cases;
  for (const Row& r : rows) {
    Case c;
    c.name =
        std::to_string(r.hq) + "/" + std::to_string(r.hv) + " " + std::to_string(r.n) + "x" + std::to_string(r.length);
    c.hq = r.hq, c.hv = r.hv, c.bar_ms = r.bar;
    c.lengths.assign(r.n, r.length);
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("%s", flash_qla::build_info().c_str());
  const std::string command = argc > 1 ? argv[1] : "check";
  const std::string filter = argc > 2 ? argv[2] : "";
  const int option = argc > 3 ? std::atoi(argv[3]) : -1;
  bool ok = true;
  if (command == "check") {
    for (const Case& c : check_cases()) {
      if (c.name.find(filter) == std::string::npos) continue;
      const int repeats = option >= 0 ? option : 50;
      ok &= c.half ? run_check<__half>(c, repeats) : run_check<__nv_bfloat16>(c, repeats);
    }
    std::printf(ok ? "all ok\n" : "FAILURES\n");
  } else if (command == "split" || command == "repeat") {
    for (Case& c : split_cases()) {
      if (c.name.find(filter) == std::string::npos) continue;
      if (command == "split" && option >= 0) c.variant = static_cast<ChunkForwardVariant>(option);
      ok &= command == "split" ? run_split(c) : run_repeat(c, option >= 0 ? option : 1000);
    }
  } else if (command == "soak") {
    ok = run_soak(filter.empty() ? 10000 : std::atoi(filter.c_str()));
  } else {
    for (Case& c : time_cases()) {
      if (c.name.find(filter) == std::string::npos) continue;
      if (option >= 0)
        c.variant = static_cast<ChunkForwardVariant>(option & 3), c.half = option & 4, c.save = option & 8,
        c.dense = option & 16, c.split = option & 32 ? SplitMode::kAuto : c.split,
        c.gates = option & 128  ? Gates::kAllStrong
                  : option & 64 ? Gates::kStrong
                                : c.gates;
      c.half ? run_time<__half>(c) : run_time<__nv_bfloat16>(c);
    }
  }
  return ok ? 0 : 1;
}
