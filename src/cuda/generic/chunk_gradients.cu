#include "cuda/generic/chunk_gradients.cuh"

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/warp.cuh"

namespace flash_qla::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = static_cast<int>(kChunkSize);
constexpr int kTile = 4;  // a thread computes 4 x 4 elements of a 64 x 64 product
constexpr int kSide = kChunk / kTile;
static_assert(kSide * kSide == kThreads);
constexpr int kPanel = 32;          // of the dimension that a product sums over, staged at once
constexpr int kKeyTile = kChunk;    // keys computed at once
constexpr int kPitch = kChunk + 4;  // 4 floats of padding: rows stay on 16-byte boundaries and start in different banks

using Square = float[kChunk][kPitch];
using Panel = float[kPanel][kPitch];  // transposed: [summed index][row]
using Accumulator = float[kTile][kTile];

// 80 KiB: two blocks fit a Hopper multiprocessor, one fits every other GPU from sm_80 up (99 KiB on the smallest).
struct Memory {
  Square P;  // scale * P
  Square R;  // R + R^T
  union {
    struct {
      Panel tokens[3];
      Panel states[2];
    } panels;
    struct {
      Square q, k;
    } keys;
    Square M;
  };
  double c[kChunk];
  float beta[kChunk];
  float gamma[kChunk];   // e^{c_i}
  float rest[kChunk];    // gamma_C / gamma_i
  float x[kChunk];       // gamma_i (scale <q_i, S0 do_i> - <k_i, S0 de_i>)
  float y[kChunk];       // (gamma_C / gamma_i) <k_i, D1 u_i>
  float across[kChunk];  // sum_{i >= t, j < t} M_ij
  float z[kThreads / 32];
};

__device__ void zero(Accumulator& a) {
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
#pragma unroll
    for (int j = 0; j < kTile; ++j) a[i][j] = 0.f;
  }
}

__device__ float4 quad_at(const float* p) { return *reinterpret_cast<const float4*>(p); }

__device__ void add_outer(Accumulator& sum, float4 a, float4 b) {
  const float left[] = {a.x, a.y, a.z, a.w}, right[] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
#pragma unroll
    for (int j = 0; j < kTile; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
  }
}

// One chunk of one value head.
struct Place {
  int64_t n, b, token, flat;  // sequence, batch row, first token in the row and among B * T
  int head, count;
  bool first, last;
};

__device__ bool find_place(const GradientParams& p, Place* place) {
  const int64_t chunk = blockIdx.x / p.in.Hv;
  if (chunk >= total_chunks(p.sequences)) return false;
  place->n = sequence_of_chunk(p.sequences, chunk);
  const DeviceSequence sequence = sequence_at(p.sequences, place->n);
  const int64_t t0 = (chunk - sequence.first_chunk) * kChunkSize, left = sequence.length - t0;
  place->b = sequence.b;
  place->token = sequence.begin + t0;
  place->flat = sequence.b * p.sequences.T + place->token;
  place->head = static_cast<int>(blockIdx.x % p.in.Hv);
  place->count = static_cast<int>(left < kChunkSize ? left : kChunkSize);
  place->first = t0 == 0;
  place->last = left <= kChunkSize;
  return true;
}

// A thread's part of a panel on its way to shared memory: rows [0, count) of x at the chunk's tokens, elements
// [from, from + kPanel) of `size`.
struct RawPanel {
  RawQuad quads[2];
};
static_assert(kThreads / 32 * 8 == kChunk && kPanel == 32);
__device__ int panel_row() { return 8 * (threadIdx.x / 32) + threadIdx.x % 32 / 4; }
__device__ int panel_column(int m) { return 4 * (threadIdx.x % 4 + 4 * m); }

__device__ RawPanel load_panel(const DeviceTensor& x, const Place& place, int head, int from, int size) {
  RawPanel raw;
  const bool valid = x.data != nullptr && panel_row() < place.count;
  const int64_t offset = offset_of(x, place.b, place.token + panel_row(), head);
#pragma unroll
  for (int m = 0; m < 2; ++m) raw.quads[m] = load_raw_quad(x, offset, from + panel_column(m), valid ? size : 0);
  return raw;
}

__device__ void store_panel(Panel& panel, const DeviceTensor& x, const RawPanel& raw) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float4 quad = unpack(x, raw.quads[m]);
    const int at = panel_column(m), row = panel_row();
    panel[at][row] = quad.x;
    panel[at + 1][row] = quad.y;
    panel[at + 2][row] = quad.z;
    panel[at + 3][row] = quad.w;
  }
}

// The values of the chunk's tokens: gradients of o and u, and errors.
__device__ void stage_values(Panel (&panels)[3], const GradientParams& p, const Place& place, int from) {
  const RawPanel d_o = load_panel(p.in.x, place, place.head, from, p.in.V);
  const RawPanel du = load_panel(p.du, place, place.head, from, p.in.V);
  const RawPanel errors = load_panel(p.errors, place, place.head, from, p.in.V);
  store_panel(panels[0], p.in.x, d_o);
  store_panel(panels[1], p.du, du);
  store_panel(panels[2], p.errors, errors);
}

// A state of the chunk: inside the sequence it lies in the workspace, at the sequence's ends with the caller or
// nowhere.
struct StateSource {
  const float* boundary;  // [V, padded K] or NULL
  int64_t padded_keys;
  DeviceStates given;
  int64_t given_base;
  __device__ bool present() const { return boundary != nullptr || given.data != nullptr; }
  __device__ float4 load(int value, int key, int V, int K) const {
    if (value >= V || !present()) return make_float4(0.f, 0.f, 0.f, 0.f);
    if (boundary != nullptr) {
      return key < padded_keys ? quad_at(boundary + value * padded_keys + key) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = key + i < K ? flash_qla::cuda::load<float>(given, given_base + value * given.value + (key + i) * given.key)
                         : 0.f;
    }
    return make_float4(x[0], x[1], x[2], x[3]);
  }
};

__device__ StateSource state_source(const BoundaryStates& inside, const DeviceStates& end, bool at_end, int64_t token,
                                    const Place& place, int Hv, int V) {
  StateSource source{};
  if (at_end) {
    source.given = end;
    source.given_base = place.n * end.row + place.head * end.head;
  } else {
    source.boundary = boundary_column(inside, token, Hv, place.head, V, 0);
    source.padded_keys = inside.padded_keys;
  }
  return source;
}

// c, gamma, gamma_C / gamma and beta of the chunk's tokens; zeros past its end.
__device__ void stage_gates(Memory& s, const GradientParams& p, const Place& place) {
  const int i = threadIdx.x;
  if (i < kChunk) {
    const bool valid = i < place.count;
    s.c[i] = valid && p.in.g.data != nullptr
                 ? clamp_log_decay(load<double>(p.in.g, offset_of(p.in.g, place.b, place.token + i, place.head)))
                 : 0.0;
    s.beta[i] = !valid ? 0.f
                : p.in.beta.data == nullptr
                    ? 1.f
                    : load<float>(p.in.beta, offset_of(p.in.beta, place.b, place.token + i, place.head));
    s.x[i] = s.y[i] = 0.f;
  }
  __syncthreads();
  double sum = 0.0, total = 0.0;
  if (i < kChunk) {
    for (int j = 0; j < place.count; ++j) {
      total += s.c[j];
      if (j == i) sum = total;
    }
  }
  __syncthreads();
  if (i < kChunk) {
    const bool valid = i < place.count;
    s.c[i] = sum;
    s.gamma[i] = valid ? expf(static_cast<float>(sum)) : 0.f;
    s.rest[i] = valid ? expf(static_cast<float>(total - sum)) : 0.f;
  }
  __syncthreads();
}

// scale * P into s.P, R + R^T into s.R, M into s.M; d_beta.
__device__ void compute_token_products(Memory& s, const GradientParams& p, const Place& place, int row0, int col0) {
  Accumulator do_e, du_e, qk, kk;
  zero(do_e);
  zero(du_e);
  zero(qk);
  zero(kk);
  for (int from = 0; from < p.in.V; from += kPanel) {
    stage_values(s.panels.tokens, p, place, from);
    __syncthreads();
#pragma unroll 4
    for (int r = 0; r < kPanel; ++r) {
      const float4 e = quad_at(&s.panels.tokens[2][r][col0]);
      add_outer(do_e, quad_at(&s.panels.tokens[0][r][row0]), e);
      add_outer(du_e, quad_at(&s.panels.tokens[1][r][row0]), e);
    }
    __syncthreads();
  }
  const int key_head = place.head / p.in.group;
  for (int from = 0; from < p.in.K; from += kPanel) {
    const RawPanel q = load_panel(p.in.q, place, key_head, from, p.in.K);
    const RawPanel k = load_panel(p.in.k, place, key_head, from, p.in.K);
    store_panel(s.panels.tokens[0], p.in.q, q);
    store_panel(s.panels.tokens[1], p.in.k, k);
    __syncthreads();
#pragma unroll 4
    for (int r = 0; r < kPanel; ++r) {
      const float4 k = quad_at(&s.panels.tokens[1][r][col0]);
      add_outer(qk, quad_at(&s.panels.tokens[0][r][row0]), k);
      add_outer(kk, quad_at(&s.panels.tokens[1][r][row0]), k);
    }
    __syncthreads();
  }
  const float scale = static_cast<float>(p.scale);
#pragma unroll
  for (int a = 0; a < kTile; ++a) {
#pragma unroll
    for (int b = 0; b < kTile; ++b) {
      const int i = row0 + a, j = col0 + b;
      const bool lower = j < i && i < place.count, diagonal = j == i && i < place.count;
      const float G = lower ? expf(static_cast<float>(s.c[i] - s.c[j])) : 1.f;
      const float P = lower || diagonal ? scale * G * s.beta[j] * do_e[a][b] : 0.f;
      const float R = lower ? G * s.beta[i] * s.beta[j] * du_e[a][b] : 0.f;
      s.P[i][j] = P;
      s.M[i][j] = lower ? qk[a][b] * P - kk[a][b] * R : 0.f;
      if (j < i) s.R[i][j] = s.R[j][i] = R;
      if (j == i) s.R[i][i] = 0.f;
      if (diagonal) p.d_beta[(place.flat + i) * p.in.Hv + place.head] = du_e[a][b];
    }
  }
  __syncthreads();
}

// across_t = sum_{i >= t, j < t} M_ij: sums of the rows up to each column, then sums of the columns from each row down.
__device__ void sum_across(Memory& s) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < kChunk; i += kThreads / 32) {
    const float a = s.M[i][2 * lane], b = s.M[i][2 * lane + 1];
    const float sum = prefix_sum(a + b, lane);
    const float before = __shfl_up_sync(0xffffffffu, sum, 1);
    s.M[i][2 * lane] = lane == 0 ? 0.f : before;
    s.M[i][2 * lane + 1] = (lane == 0 ? 0.f : before) + a;
  }
  __syncthreads();
  if (threadIdx.x < kChunk) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < kChunk; ++i) sum += s.M[i][threadIdx.x];
    s.across[threadIdx.x] = sum;
  }
  __syncthreads();
}

// Sum over the threads that share rows of a product, in all of them.
__device__ float row_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < kSide; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Keys [key0, key0 + kKeyTile) of the parts of dq and dk, and what they add to x, y and <S0, D1>.
__device__ void compute_keys(Memory& s, const GradientParams& p, const Place& place, const StateSource& start,
                             const StateSource& end, int key0, int row0, int col0, float* z) {
  Accumulator do_S, du_S, e_D;
  zero(do_S);
  zero(du_S);
  zero(e_D);
  // Also where both states are absent, which is zero: 0 * NaN is NaN.
  for (int from = 0; from < p.in.V; from += kPanel) {
    stage_values(s.panels.tokens, p, place, from);
#pragma unroll
    for (int m = 0; m < kPanel * kSide / kThreads; ++m) {
      const int index = threadIdx.x + m * kThreads, row = index / kSide, key = 4 * (index % kSide);
      const float4 S = start.load(from + row, key0 + key, p.in.V, p.in.K);
      const float4 D = end.load(from + row, key0 + key, p.in.V, p.in.K);
      *reinterpret_cast<float4*>(&s.panels.states[0][row][key]) = S;
      *reinterpret_cast<float4*>(&s.panels.states[1][row][key]) = D;
      *z += S.x * D.x + S.y * D.y + S.z * D.z + S.w * D.w;
    }
    __syncthreads();
#pragma unroll 4
    for (int r = 0; r < kPanel; ++r) {
      const float4 S = quad_at(&s.panels.states[0][r][col0]);
      add_outer(do_S, quad_at(&s.panels.tokens[0][r][row0]), S);
      add_outer(du_S, quad_at(&s.panels.tokens[1][r][row0]), S);
      add_outer(e_D, quad_at(&s.panels.tokens[2][r][row0]), quad_at(&s.panels.states[1][r][col0]));
    }
    __syncthreads();
  }

  const int key_head = place.head / p.in.group;
  constexpr int kRows = kChunk * kSide / kThreads;  // quads of a row of q or k per thread
  RawQuad q[kRows], k[kRows];
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const int index = threadIdx.x + m * kThreads, row = index / kSide, key = 4 * (index % kSide);
    const int size = row < place.count ? p.in.K : 0;
    q[m] = load_raw_quad(p.in.q, offset_of(p.in.q, place.b, place.token + row, key_head), key0 + key, size);
    k[m] = load_raw_quad(p.in.k, offset_of(p.in.k, place.b, place.token + row, key_head), key0 + key, size);
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const int index = threadIdx.x + m * kThreads, row = index / kSide, key = 4 * (index % kSide);
    *reinterpret_cast<float4*>(&s.keys.q[row][key]) = unpack(p.in.q, q[m]);
    *reinterpret_cast<float4*>(&s.keys.k[row][key]) = unpack(p.in.k, k[m]);
  }
  __syncthreads();

  const float scale = static_cast<float>(p.scale);
  Accumulator dq, dk;
#pragma unroll
  for (int a = 0; a < kTile; ++a) {
    const int i = row0 + a;
    float x = 0.f, y = 0.f;
#pragma unroll
    for (int b = 0; b < kTile; ++b) {
      const float q = s.keys.q[i][col0 + b], k = s.keys.k[i][col0 + b];
      dq[a][b] = scale * s.gamma[i] * do_S[a][b];
      const float through_start = s.gamma[i] * s.beta[i] * du_S[a][b];
      const float through_end = s.rest[i] * s.beta[i] * e_D[a][b];
      dk[a][b] = through_end - through_start;
      x += q * dq[a][b] - k * through_start;
      y += k * through_end;
    }
    x = row_sum(x);
    y = row_sum(y);
    if (col0 == 0) {
      s.x[i] += x;
      s.y[i] += y;
    }
  }
  for (int j0 = 0; j0 < kChunk; j0 += 4) {
    float4 P_rows[kTile];
#pragma unroll
    for (int a = 0; a < kTile; ++a) P_rows[a] = quad_at(&s.P[row0 + a][j0]);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int j = j0 + m;
      const auto element = [m](const float4& quad) {
        return m == 0 ? quad.x : m == 1 ? quad.y : m == 2 ? quad.z : quad.w;
      };
      const float4 q = quad_at(&s.keys.q[j][col0]), k = quad_at(&s.keys.k[j][col0]);
      const float4 R = quad_at(&s.R[j][row0]);
      add_outer(dq, make_float4(element(P_rows[0]), element(P_rows[1]), element(P_rows[2]), element(P_rows[3])), k);
      add_outer(dk, quad_at(&s.P[j][row0]), q);
      add_outer(dk, make_float4(-R.x, -R.y, -R.z, -R.w), k);
    }
  }
#pragma unroll
  for (int a = 0; a < kTile; ++a) {
    if (row0 + a >= place.count) continue;
    const int64_t base = ((place.flat + row0 + a) * p.in.Hv + place.head) * p.in.K + key0 + col0;
    if (p.in.K % 4 == 0) {
      if (key0 + col0 >= p.in.K) continue;
      *reinterpret_cast<float4*>(p.dq + base) = make_float4(dq[a][0], dq[a][1], dq[a][2], dq[a][3]);
      *reinterpret_cast<float4*>(p.dk + base) = make_float4(dk[a][0], dk[a][1], dk[a][2], dk[a][3]);
    } else {
#pragma unroll
      for (int b = 0; b < kTile; ++b) {
        if (key0 + col0 + b >= p.in.K) continue;
        p.dq[base + b] = dq[a][b];
        p.dk[base + b] = dk[a][b];
      }
    }
  }
  __syncthreads();  // the panels of the next tile lie over q and k
}

// Two blocks a multiprocessor: while one stages, the other multiplies.
__global__ void __launch_bounds__(kThreads, 2) chunk_gradients_kernel(const __grid_constant__ GradientParams p) {
  Memory& s = *dynamic_shared<Memory>();
  Place place;
  if (!find_place(p, &place)) return;
  const int row0 = kTile * (threadIdx.x / kSide), col0 = kTile * (threadIdx.x % kSide);
  stage_gates(s, p, place);
  compute_token_products(s, p, place, row0, col0);
  sum_across(s);

  const StateSource start = state_source(p.states, p.initial_state, place.first, place.flat, place, p.in.Hv, p.in.V);
  const StateSource end = state_source(p.gradients, p.dht, place.last, place.flat + kChunkSize, place, p.in.Hv, p.in.V);
  float z = 0.f;
  for (int key0 = 0; key0 < p.in.K; key0 += kKeyTile) {
    compute_keys(s, p, place, start, end, key0, row0, col0, &z);
  }

#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) z += __shfl_xor_sync(0xffffffffu, z, distance);
  if (threadIdx.x % 32 == 0) s.z[threadIdx.x / 32] = z;
  __syncthreads();
  if (threadIdx.x < place.count) {
    const int t = threadIdx.x;
    float through_states = 0.f;
    for (int w = 0; w < kThreads / 32; ++w) through_states += s.z[w];
    float sum = s.across[t] + s.gamma[place.count - 1] * through_states;
    for (int i = 0; i < place.count; ++i) sum += i < t ? s.y[i] : s.x[i];
    p.d_log_decay[(place.flat + t) * p.in.Hv + place.head] = sum;
  }
}

}  // namespace

Status launch_chunk_gradients(const Problem& p, const GradientParams& params, cudaStream_t stream) {
  return launch("chunk_gradients", chunk_gradients_kernel, p.chunk_bound * p.Hv, kThreads, sizeof(Memory), stream,
                params);
}

}  // namespace flash_qla::cuda
