#include "cuda/common/prepare.cuh"

#include "cuda/common/warp.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Grid-stride index of this warp among `rows` rows, one row a warp.
__device__ int64_t first_row() { return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; }
__device__ int64_t row_step() { return static_cast<int64_t>(gridDim.x) * kWarps; }

// Row r of [B, T, heads, ..].
struct RowPlace {
  int64_t b, t, head;
};

__device__ RowPlace row_place(int64_t r, int64_t T, int64_t heads) {
  // A division of 64 bits is a hundred instructions, more than all else that is done to a row.
  constexpr int64_t kNarrow = int64_t{1} << 31;
  if (r < kNarrow && T < kNarrow && heads < kNarrow) {
    const uint32_t row = static_cast<uint32_t>(r), token = row / static_cast<uint32_t>(heads);
    const uint32_t b = token / static_cast<uint32_t>(T);
    return {b, token - b * static_cast<uint32_t>(T), row - token * static_cast<uint32_t>(heads)};
  }
  return {r / heads / T, r / heads % T, r % heads};
}

// A row in the registers of a warp: lane l has elements [4 l + 128 j, + 4), j < kQuads, so that one load of four of
// them serves where they lie side by side. Zero past the row's end.
template <class Real, int kQuads>
struct Row {
  Real x[kQuads][4];
};

__device__ int quad_start(int j) { return 4 * (threadIdx.x % 32) + 128 * j; }

template <class Real, int kQuads>
__device__ Row<Real, kQuads> load_row(const DeviceTensor& t, int64_t offset, int size) {
  Row<Real, kQuads> row{};
  if constexpr (std::is_same_v<Real, float>) {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const float4 x = unpack(t, load_raw_quad(t, offset, quad_start(j), size));
      row.x[j][0] = x.x;
      row.x[j][1] = x.y;
      row.x[j][2] = x.z;
      row.x[j][3] = x.w;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = quad_start(j) + e;
        if (i < size) row.x[j][e] = load<Real>(t, offset + i * t.stride[3]);
      }
    }
  }
  return row;
}

// Rounds to t's dtype.
template <class Real, int kQuads>
__device__ void store_row(const DeviceTensor& t, int64_t offset, int size, const Row<Real, kQuads>& row) {
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int start = quad_start(j);
    if (start >= size) continue;
    const Real(&x)[4] = row.x[j];
    if (t.quads && t.dtype == static_cast<int32_t>(DType::kBFloat16)) {
      auto* to = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(t.data) + offset + start);
      to[0] = __floats2bfloat162_rn(static_cast<float>(x[0]), static_cast<float>(x[1]));
      to[1] = __floats2bfloat162_rn(static_cast<float>(x[2]), static_cast<float>(x[3]));
    } else if (t.quads && t.dtype == static_cast<int32_t>(DType::kFloat16)) {
      auto* to = reinterpret_cast<__half2*>(static_cast<__half*>(t.data) + offset + start);
      to[0] = __floats2half2_rn(static_cast<float>(x[0]), static_cast<float>(x[1]));
      to[1] = __floats2half2_rn(static_cast<float>(x[2]), static_cast<float>(x[3]));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (start + e < size) store<Real>(t, offset + (start + e) * t.stride[3], x[e]);
      }
    }
  }
}

// <a, b>, summed in Sum.
template <class Sum, class Real, int kQuads>
__device__ Sum dot(const Row<Real, kQuads>& a, const Row<Real, kQuads>& b) {
  Sum sum = 0;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += static_cast<Sum>(a.x[j][e]) * static_cast<Sum>(b.x[j][e]);
  }
  return warp_sum(sum);
}

template <class Sum, class Real, int kQuads>
__device__ Sum inverse_norm_of(const Row<Real, kQuads>& row) {
  return Sum(1) / sqrt(dot<Sum>(row, row) + Sum(kL2NormEps));
}

// Rows that a warp has on their way at once: one would leave most of the memory's bandwidth unused.
constexpr int kRowsAtOnce = 4;

template <class Real, int kQuads>
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(int64_t rows, int64_t T, int64_t heads, int K, int out_size, DeviceTensor x, DeviceTensor out,
                     float* inverse_norms) {
  for (int64_t first = first_row(); first < rows; first += kRowsAtOnce * row_step()) {
    Row<Real, kQuads> row[kRowsAtOnce];
    int64_t to[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t r = first + i * row_step();
      if (r >= rows) break;
      const RowPlace at = row_place(r, T, heads);
      row[i] = load_row<Real, kQuads>(x, offset_of(x, at.b, at.t, at.head), K);
      to[i] = offset_of(out, at.b, at.t, at.head);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int64_t r = first + i * row_step();
      if (r >= rows) break;
      const Real scale = inverse_norm_of<Real>(row[i]);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) row[i].x[j][e] *= scale;
      }
      store_row(out, to[i], out_size, row[i]);
      if (inverse_norms != nullptr && threadIdx.x % 32 == 0) inverse_norms[r] = static_cast<float>(scale);
    }
  }
}

template <int kQuads>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(int64_t rows, int64_t T, int64_t heads, int size,
                                                             int to_size, DeviceTensor from, DeviceTensor to) {
  for (int64_t r = first_row(); r < rows; r += row_step()) {
    const RowPlace at = row_place(r, T, heads);
    store_row(to, offset_of(to, at.b, at.t, at.head), to_size,
              load_row<float, kQuads>(from, offset_of(from, at.b, at.t, at.head), size));
  }
}

template <class Real>
__global__ void __launch_bounds__(kThreads)
    prepare_gates_kernel(int64_t items, int64_t Hv, SequenceTable sequences, const __grid_constant__ Gates gates,
                         Real* out_log_decay, Real* out_beta) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < items; i += step) {
    const auto [b, t, head] = row_place(i, sequences.T, Hv);
    const bool chunk_start = gates.g_is_cumsum && starts_chunk(sequences, t);
    const bool inside = in_a_sequence(sequences, t);
    if (out_log_decay != nullptr) {
      out_log_decay[i] = inside ? clamp_log_decay(log_decay<Real>(gates, b, t, head, chunk_start)) : Real(0);
    }
    if (out_beta != nullptr) out_beta[i] = inside ? effective_beta<Real>(gates, b, t, head) : Real(0);
  }
}

template <class Real, int kQuads>
__global__ void __launch_bounds__(kThreads)
    finish_keys_kernel(int64_t rows, int64_t Hq, int64_t group, int K, SequenceTable sequences, DeviceTensor parts,
                       DeviceTensor x, bool l2norm, DeviceTensor inverse_norm, DeviceTensor dx) {
  for (int64_t r = first_row(); r < rows; r += row_step()) {
    const RowPlace at = row_place(r, sequences.T, Hq);
    const int64_t to = offset_of(dx, at.b, at.t, at.head);
    Row<Real, kQuads> dy{};
    if (!in_a_sequence(sequences, at.t)) {
      store_row(dx, to, K, dy);
      continue;
    }
    for (int64_t member = 0; member < group; ++member) {  // heads of a group are neighbours
      const auto part = load_row<Real, kQuads>(parts, offset_of(parts, at.b, at.t, at.head * group + member), K);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dy.x[j][e] += part.x[j][e];
      }
    }
    if (l2norm || inverse_norm.data != nullptr) {
      // dx = r (dy - <dy, x> r^2 x): the derivative of x r(x); where x is normalised already, r^2 is part of it. In
      // double: where dy lies along x, which is always with one key, what is left of the difference is small.
      const auto row = load_row<Real, kQuads>(x, offset_of(x, at.b, at.t, at.head), K);
      const double scale = l2norm ? inverse_norm_of<double>(row)
                                  : load<double>(inverse_norm, offset_of(inverse_norm, at.b, at.t, at.head));
      const double along = dot<double>(dy, row) * (l2norm ? scale * scale : 1.0);
#pragma unroll
      for (int j = 0; j < kQuads; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dy.x[j][e] =
              static_cast<Real>(scale * (static_cast<double>(dy.x[j][e]) - along * static_cast<double>(row.x[j][e])));
        }
      }
    }
    store_row(dx, to, K, dy);
  }
}

// Gradient of a raw gate and of A_log through one token.
template <class Real>
struct GateGradient {
  Real dg, dA_log;
};

template <class Real>
__device__ GateGradient<Real> through_gate(const SequenceTable& sequences, const Gates& gates, int64_t b, int64_t t,
                                           int64_t head, Real d_log_decay) {
  const bool chunk_start = gates.g_is_cumsum && starts_chunk(sequences, t);
  const Real g = log_decay<Real>(gates, b, t, head, chunk_start);
  if (g < Real(kMinLogDecay)) return {Real(0), Real(0)};  // the clamp: the exact limit
  if (!gates.use_gate) return {d_log_decay, Real(0)};
  const Real raw = load<Real>(gates.g, offset_of(gates.g, b, t, head));
  return {d_log_decay * gate_rate<Real>(gates, head) * sigmoid(biased_gate(gates, raw, head)), d_log_decay * g};
}

// Tokens that one block takes: each of its warps eight, so that a few thousand tokens already fill a GPU.
constexpr int64_t kPartTokens = 8 * kWarps;

// dg and dbeta of tokens [part * kPartTokens, ...), and where wanted sums [parts, 2, Hv]: dA_log and ddt_bias of these
// tokens. A lane has a head, a warp every kWarps-th token. The order of the additions depends on the number of tokens
// alone.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    finish_gates_kernel(int64_t tokens, int64_t Hv, SequenceTable sequences, const __grid_constant__ Gates gates,
                        const Real* d_log_decay, const Real* d_beta, const __grid_constant__ GateGradients out,
                        double* sums) {
  __shared__ double s_sums[kWarps][2][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t begin = blockIdx.x * kPartTokens;
  const int64_t end = begin + kPartTokens < tokens ? begin + kPartTokens : tokens;
  for (int64_t first_head = 0; first_head < Hv; first_head += 32) {
    const int64_t head = first_head + lane;
    double dA_log = 0, ddt_bias = 0;
    for (int64_t i = begin + warp; i < end && head < Hv; i += kWarps) {
      const int64_t b = i / sequences.T, t = i - b * sequences.T;
      const bool inside = in_a_sequence(sequences, t);
      if (out.dg.data != nullptr || sums != nullptr) {
        GateGradient<Real> gradient{};
        if (inside) gradient = through_gate(sequences, gates, b, t, head, d_log_decay[i * Hv + head]);
        if (out.dg.data != nullptr) store<Real>(out.dg, offset_of(out.dg, b, t, head), gradient.dg);
        // A gate of -inf has no gradient; its product with the infinite log decay would be NaN.
        if (gradient.dA_log != Real(0)) dA_log += gradient.dA_log;
        ddt_bias += gradient.dg;
      }
      if (out.dbeta.data != nullptr) {
        Real dbeta = inside ? d_beta[i * Hv + head] : Real(0);
        if (inside && gates.use_sigmoid) {
          const Real y = sigmoid(load<Real>(gates.beta, offset_of(gates.beta, b, t, head)));
          dbeta *= Real(gates.beta_range) * y * (Real(1) - y);
        }
        store<Real>(out.dbeta, offset_of(out.dbeta, b, t, head), dbeta);
      }
    }
    if (sums == nullptr) continue;
    s_sums[warp][0][lane] = dA_log;
    s_sums[warp][1][lane] = ddt_bias;
    __syncthreads();
    if (warp < 2 && head < Hv) {
      double sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += s_sums[w][warp][lane];
      sums[(blockIdx.x * 2 + warp) * Hv + head] = sum;
    }
    __syncthreads();
  }
}

// A block a head.
__global__ void __launch_bounds__(kThreads)
    store_gate_sums_kernel(int64_t parts, int64_t Hv, const double* sums, DeviceTensor dA_log, DeviceTensor ddt_bias) {
  __shared__ double s_sums[2][kWarps];
  const int64_t head = blockIdx.x;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    double sum = 0;
    for (int64_t part = threadIdx.x; part < parts; part += kThreads) sum += sums[(part * 2 + which) * Hv + head];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) s_sums[which][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= 2) return;
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += s_sums[threadIdx.x][w];
  const DeviceTensor& out = threadIdx.x == 0 ? dA_log : ddt_bias;
  if (out.data != nullptr) store<double>(out, offset_of(out, head), sum);
}

// Sequences lie side by side: outside are the tokens before the first and after the last. No other row is looked at.
__global__ void __launch_bounds__(kThreads)
    zero_outside_kernel(int64_t heads, int64_t size, SequenceTable sequences, DeviceTensor x) {
  const int64_t begin = sequences.bounds[0], inside = sequences.bounds[sequences.N] - begin;
  const int64_t rows = (sequences.T - inside) * heads;
  for (int64_t r = first_row(); r < rows; r += row_step()) {
    const RowPlace at = row_place(r, sequences.T, heads);
    const int64_t to = offset_of(x, 0, at.t < begin ? at.t : at.t + inside, at.head);
    for (int64_t i = threadIdx.x % 32; i < size; i += 32) store<double>(x, to + i * x.stride[3], 0.0);
  }
}

// One block a (row, head).
__global__ void __launch_bounds__(kThreads)
    zero_unused_h_kernel(int64_t Hv, int K, int V, SequenceTable sequences, const __grid_constant__ PoolIndices pool,
                         DeviceStates h) {
  const int64_t row = blockIdx.x / Hv, head = blockIdx.x % Hv;
  if (row < total_chunks(sequences) && read_slot(pool, sequence_of_chunk(sequences, row)) != kSkipRow) return;
  for (int e = threadIdx.x; e < K * V; e += kThreads) {
    store<float>(h, row * h.row + head * h.head + e / V * h.key + e % V * h.value, 0.f);
  }
}

// Calls f with the quads of a row as a constant.
template <class Function>
Status with_quads(int64_t size, Function f) {
  static_assert(FLASH_QLA_MAX_HEAD_DIM <= 256);
  return size <= 128 ? f(std::integral_constant<int, 1>()) : f(std::integral_constant<int, 2>());
}

}  // namespace

template <class Real>
Status launch_normalize(const Problem& p, const DeviceTensor& x, const DeviceTensor& out, float* inverse_norms,
                        cudaStream_t stream, int64_t out_size) {
  const int64_t rows = p.B * p.T * p.Hq;
  return with_quads(p.K, [&](auto quads) {
    return launch("normalize", normalize_kernel<Real, quads()>, blocks_for(rows, kWarps * kRowsAtOnce), kThreads, 0,
                  stream, rows, p.T, p.Hq, static_cast<int>(p.K), static_cast<int>(out_size > 0 ? out_size : p.K), x,
                  out, inverse_norms);
  });
}

Status launch_copy_rows(const Problem& p, int64_t heads, int64_t size, const DeviceTensor& from, const DeviceTensor& to,
                        cudaStream_t stream, int64_t to_size) {
  const int64_t rows = p.B * p.T * heads;
  return with_quads(size, [&](auto quads) {
    return launch("copy_rows", copy_rows_kernel<quads()>, blocks_for(rows, kWarps), kThreads, 0, stream, rows, p.T,
                  heads, static_cast<int>(size), static_cast<int>(to_size > 0 ? to_size : size), from, to);
  });
}

template <class Real>
Status launch_prepare_gates(const Problem& p, const SequenceTable& sequences, const Gates& gates, Real* log_decay,
                            Real* beta, cudaStream_t stream) {
  const int64_t items = p.B * p.T * p.Hv;
  return launch("prepare_gates", prepare_gates_kernel<Real>, blocks_for(items, kThreads), kThreads, 0, stream, items,
                p.Hv, sequences, gates, log_decay, beta);
}

template <class Real>
Status launch_finish_keys(const Problem& p, const SequenceTable& sequences, const Real* parts, const DeviceTensor& x,
                          bool l2norm, const DeviceTensor& inverse_norm, const DeviceTensor& dx, cudaStream_t stream) {
  const int64_t rows = p.B * p.T * p.Hq;
  constexpr DType kType = std::is_same_v<Real, double> ? DType::kFloat64 : DType::kFloat32;
  const DeviceTensor of_heads = workspace_tensor(const_cast<Real*>(parts), kType, p.B, p.T, p.Hv, p.K);
  return with_quads(p.K, [&](auto quads) {
    return launch("finish_keys", finish_keys_kernel<Real, quads()>, blocks_for(rows, kWarps), kThreads, 0, stream, rows,
                  p.Hq, p.group, static_cast<int>(p.K), sequences, of_heads, x, l2norm, inverse_norm, dx);
  });
}

int64_t gate_sum_scratch(const Problem& p) { return ceil_div(p.B * p.T, kPartTokens) * 2 * p.Hv; }

template <class Real>
Status launch_finish_gates(const Problem& p, const SequenceTable& sequences, const Gates& gates,
                           const Real* d_log_decay, const Real* d_beta, const GateGradients& out, double* scratch,
                           cudaStream_t stream) {
  const int64_t tokens = p.B * p.T, parts = ceil_div(tokens, kPartTokens);
  const bool wants_sums = out.dA_log.data != nullptr || out.ddt_bias.data != nullptr;
  if (!wants_sums && out.dg.data == nullptr && out.dbeta.data == nullptr) return Status();
  double* sums = wants_sums ? scratch : nullptr;
  FLASH_QLA_RETURN_IF_ERROR(launch("finish_gates", finish_gates_kernel<Real>, parts, kThreads, 0, stream, tokens, p.Hv,
                                   sequences, gates, d_log_decay, d_beta, out, sums));
  if (!wants_sums) return Status();
  return launch("store_gate_sums", store_gate_sums_kernel, p.Hv, kThreads, 0, stream, parts, p.Hv,
                static_cast<const double*>(scratch), out.dA_log, out.ddt_bias);
}

Status launch_zero_outside(const Problem& p, const SequenceTable& sequences, const DeviceTensor& x, int64_t heads,
                           int64_t size, cudaStream_t stream) {
  if (!p.varlen || x.data == nullptr) return Status();
  // Most calls have few such rows or none: blocks enough to clear a whole tensor would take longer to start than to
  // return.
  constexpr int64_t kMostBlocks = 256;
  const int64_t blocks = blocks_for(p.T * heads, kWarps);
  return launch("zero_outside", zero_outside_kernel, blocks < kMostBlocks ? blocks : kMostBlocks, kThreads, 0, stream,
                heads, size, sequences, x);
}

Status launch_zero_unused_h(const Problem& p, const SequenceTable& sequences, const PoolIndices& pool,
                            const DeviceStates& h, cudaStream_t stream) {
  if (h.data == nullptr || (!p.varlen && !pool.used)) return Status();
  return launch("zero_unused_h", zero_unused_h_kernel, h.rows * p.Hv, kThreads, 0, stream, p.Hv, static_cast<int>(p.K),
                static_cast<int>(p.V), sequences, pool, h);
}

#define FLASH_QLA_INSTANTIATE(Real)                                                                                \
  template Status launch_normalize<Real>(const Problem&, const DeviceTensor&, const DeviceTensor&, float*,         \
                                         cudaStream_t, int64_t);                                                   \
  template Status launch_prepare_gates<Real>(const Problem&, const SequenceTable&, const Gates&, Real*, Real*,     \
                                             cudaStream_t);                                                        \
  template Status launch_finish_keys<Real>(const Problem&, const SequenceTable&, const Real*, const DeviceTensor&, \
                                           bool, const DeviceTensor&, const DeviceTensor&, cudaStream_t);          \
  template Status launch_finish_gates<Real>(const Problem&, const SequenceTable&, const Gates&, const Real*,       \
                                            const Real*, const GateGradients&, double*, cudaStream_t);
FLASH_QLA_INSTANTIATE(float)
FLASH_QLA_INSTANTIATE(double)
#undef FLASH_QLA_INSTANTIATE

}  // namespace flash_qla::cuda
