// dbeta and dg of a sequence's last tokens once more, in fp32, where a final state's gradient decides them. Where gates
// are strong it reaches few tokens, and outweighs all else in them. Each of their dbeta is then one inner product of
// rows that were rounded to 16 bits, and each dg one of states, which can cancel to less than their rounding leaves
// (docs/numerics.md). In a sequence of one pair of chunks it may be so for every token; and where such a sequence's
// gates keep little, dg is that of few tokens without it, or less than what fp32 sums of larger terms that cancel
// leave.
//
// A window of one or two chunks ends with the sequence, S0 is the state before it, H the final state's gradient. With
// e_j = v_j - gamma_j S0^T k_j - sum over i < j of G_ji (k_j k_i) u_i, u = beta e, dv = beta du and
// du_j = gP / gamma_j H^T k_j + sum over i >= j of scale G_ij (q_i k_j) dO_i - sum over i > j of G_ij (k_i k_j) dv_i:
//   dbeta_j = <du_j, e_j>
//   dg_t    = gP <H, S0> + sum over j >= t of gamma_j (scale q_j^T S0 dO_j - k_j^T S0 dv_j)
//           + sum over i < t of gP / gamma_i k_i^T H u_i
//           + sum over i < t <= j of G_ji (scale (q_j k_i) <dO_j, u_i> - (k_j k_i) <dv_j, u_i>).
// Nothing in dg cancels but by its own: a token's product with itself is in no sum. All of these are sums over columns
// of V, of which four blocks of a cluster have a quarter each.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/sm90/chunk_bwd/gradients/layout.cuh"
#include "cuda/sm90/chunk_bwd/last_window.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kLastTokensThreads = 256;
constexpr int kSlices = 4;  // blocks of a cluster; more columns of V would not fit shared memory
constexpr int kSlice = kHeadDim / kSlices;
constexpr float kFarApart = -64.0f;  // log2 of a decay that is as good as none
constexpr int kSolved = 16;          // tokens solved one after another; the others' part in them is a product

template <typename T>
struct LastTokensMemory {
  // Rows of keys are 16 bytes more than they hold, and rows of a slice likewise: neighbouring rows in banks of their
  // own.
  T keys[kWindow][kHeadDim + 8], queries[kWindow][kHeadDim + 8];
  T d_o[kWindow][kSlice + 8];
  float pairs[kWindow][kWindow + 4];   // G_ij k_i k_j below the diagonal; at [j][i] scale G_ij q_i k_j, i >= j
  float state[kHeadDim][kSlice + 4];   // S0, then H
  float error[kWindow][kSlice + 4];    // e
  float read[kWindow][kSlice + 4];     // S0^T k
  float d_value[kWindow][kSlice + 4];  // du
  // By tokens: what is known of the gates, the sums that dg is made of, and the slice's part of the results.
  float cumsum[kWindow], beta[kWindow], from_start[kWindow], to_end[kWindow];
  float by_row[2][kWindow], by_column[kLastTokensThreads / 32][kWindow];
  float d_beta_of_slice[kWindow], d_g_of_slice[kWindow];
  float warp_sums[kLastTokensThreads / 32];
  WindowSums window;
};
static_assert(sizeof(LastTokensMemory<__half>) <= 227 * 1024);

// Sums over the eight lanes that share tokens.
__device__ __forceinline__ float sum_of_eight(float x) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The work of one sequence and head; names as above.
template <typename T>
struct LastTokens {
  const Args& p;
  LastTokensMemory<T>& memory;
  SequenceInfo sequence;
  int n, head, v;  // v: the slice's first column
  LastWindow window;
  int thread = threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Of a product with the slice's columns a thread has four tokens by four columns; eight lanes have a token. A warp's
  // tokens follow one another: rows in banks of their own.
  int column = static_cast<int>(threadIdx.x) % 8 * 4;
  static constexpr int kStep = kLastTokensThreads / 8;
  __device__ int token(int i) const { return thread / 8 + kStep * i; }

  __device__ int row() const { return sequence.token + window.chunk * kChunk; }  // of the window's first token
  __device__ float gamma(int t) const { return exp2_approx(memory.cumsum[t]); }
  __device__ float to_end(int t) const { return exp2_approx(memory.cumsum[kWindow - 1] - memory.cumsum[t]); }

  __device__ void load_rows(const StridedTensor& t, T (&to)[kWindow][kHeadDim + 8], int of_head) const {
#pragma unroll
    for (int turn = 0; turn < kWindow * (kHeadDim / 8) / kLastTokensThreads; ++turn) {
      const int i = turn * kLastTokensThreads + thread, at = i / (kHeadDim / 8), piece = i % (kHeadDim / 8);
      uint4 x = make_uint4(0, 0, 0, 0);
      if (at < window.tokens) {
        x = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(t.data) +
                                            row_offset(t, sequence.batch, row() + at, of_head) + 8 * piece);
      }
      *reinterpret_cast<uint4*>(&to[at][8 * piece]) = x;
    }
  }

  __device__ void load_window() const {
    load_rows(p.k, memory.keys, head / p.group);
    load_rows(p.q, memory.queries, head / p.group);
    if (thread < kWindow) {
      const int last = window.tokens - 1, chunk = window.chunk + thread / kChunk;
      memory.cumsum[thread] = decay_at(p, sequence, window.chunk, head, min(thread, last));
      memory.beta[thread] =
          thread <= last ? gates_of_chunk(p, sequence, chunk, head)[3 * kChunk + thread % kChunk] : 0.0f;
    }
    for (int i = thread; i < kLastTokensThreads / 32 * kWindow; i += kLastTokensThreads) {
      memory.by_column[i / kWindow][i % kWindow] = 0.0f;
    }
  }

  // K K^T and Q K^T: their operands have 16 bits as they are, and the sums 32.
  __device__ void multiply_pairs() const {
    const int g = lane / 4, q = lane % 4, first = 16 * warp;
    if (first >= window.tokens) return;
    const auto bits = [](const T* at) { return *reinterpret_cast<const uint32_t*>(at); };
    for (int block = 0; block <= 2 * warp + 1; ++block) {
      float kk[4] = {}, qk[4] = {};
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        const int at = 16 * step + 2 * q;
        const T *right = &memory.keys[8 * block + g][at], *keys = &memory.keys[first + g][at],
                *queries = &memory.queries[first + g][at];
        constexpr int kDown = 8 * (kHeadDim + 8);
        mma_m16n8k16<T>(kk, bits(keys), bits(keys + kDown), bits(keys + 8), bits(keys + kDown + 8), bits(right),
                        bits(right + 8));
        mma_m16n8k16<T>(qk, bits(queries), bits(queries + kDown), bits(queries + 8), bits(queries + kDown + 8),
                        bits(right), bits(right + 8));
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int i = first + g + x / 2 * 8, j = 8 * block + 2 * q + x % 2;
        if (j > i) continue;
        const float apart = memory.cumsum[i] - memory.cumsum[j], decay = apart < kFarApart ? 0.0f : exp2_approx(apart);
        if (j < i) memory.pairs[i][j] = decay * kk[x];
        memory.pairs[j][i] = p.scale * decay * qk[x];
      }
    }
  }

  // The slice's columns of the state before the window.
  __device__ void load_first_state() const {
    const int pair = window.chunk / 2;
    if (pair == 0) {
      load_columns(p.initial_state, [](float& to, float x) { to = x; });
    } else {
      const uint8_t* tile = p.states + (static_cast<int64_t>(sequence.first_pair + pair) * p.Hv + head) * kStateBytes;
      for (int i = thread; i < kSlice * (kHeadDim / 8); i += kLastTokensThreads) {
        const int c = i / (kHeadDim / 8), piece = i % (kHeadDim / 8);
        const uint4 x =
            *reinterpret_cast<const uint4*>(tile + piece / 8 * kStateHalfBytes + tile_piece(0, v + c, piece % 8));
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 two = unpack2<T>(words[w]);
          memory.state[8 * piece + 2 * w][c] = two.x;
          memory.state[8 * piece + 2 * w + 1][c] = two.y;
        }
      }
    }
    if (window.chunk % 2 == 0) return;
    // The window starts with a pair's second chunk: over the first one, by its V'.
    __syncthreads();
    const int k = thread % kHeadDim, c = thread / kHeadDim * (kSlice / 2), chunk = window.chunk - 1;
    const float* gates = gates_of_chunk(p, sequence, chunk, head);
    const auto* key = static_cast<const uint16_t*>(p.k.data) +
                      row_offset(p.k, sequence.batch, sequence.token + chunk * kChunk, head / p.group) + k;
    const uint8_t* values = p.v_new + (static_cast<int64_t>(sequence.first_slot + chunk) * p.Hv + head) * kTokensBytes +
                            (v + c) / 64 * kTileBytes;
    float sum[kSlice / 2];
#pragma unroll
    for (int i = 0; i < kSlice / 2; ++i) sum[i] = gates[2 * kChunk - 1] * memory.state[k][c + i];
#pragma unroll 4
    for (int i = 0; i < kChunk; ++i) {
      const float x = gates[2 * kChunk + i] * unpack2<T>(key[i * p.k.stride[1]]).x;
#pragma unroll
      for (int j = 0; j < kSlice / 2; j += 8) {
        const uint4 y = *reinterpret_cast<const uint4*>(values + tile_piece(0, i, (v + c + j) % 64 / 8));
        const uint32_t words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const float2 two = unpack2<T>(words[w]);
          sum[j + 2 * w] = fmaf(x, two.x, sum[j + 2 * w]);
          sum[j + 2 * w + 1] = fmaf(x, two.y, sum[j + 2 * w + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSlice / 2; ++i) memory.state[k][c + i] = sum[i];
  }

  // take(element in shared memory, the caller's) for the slice's columns of [n, head]; zeros of an absent tensor.
  template <typename Take>
  __device__ void load_columns(const StridedTensor& t, Take take) const {
    with_type(t.type, [&](auto type) {
      constexpr int kTurns = kHeadDim * kSlice / kLastTokensThreads, kAtOnce = 8;  // loads on their way together
#pragma unroll 1
      for (int turn = 0; turn < kTurns; turn += kAtOnce) {
        float x[kAtOnce];
        // Neighbours in memory by neighbouring threads.
        const auto k = [&](int i) { return p.state_v_first ? i % kHeadDim : i / kSlice; };
        const auto c = [&](int i) { return p.state_v_first ? i / kHeadDim : i % kSlice; };
#pragma unroll
        for (int at = 0; at < kAtOnce; ++at) {
          const int i = (turn + at) * kLastTokensThreads + thread;
          x[at] = t.data == nullptr
                      ? 0.0f
                      : load_element_of<type()>(t, state_offset(t, p.state_v_first, n, head, k(i), v + c(i)));
        }
#pragma unroll
        for (int at = 0; at < kAtOnce; ++at) {
          const int i = (turn + at) * kLastTokensThreads + thread;
          take(memory.state[k(i)][c(i)], x[at]);
        }
      }
    });
  }

  __device__ void load_d_o() const {
#pragma unroll
    for (int turn = 0; turn < kWindow * (kSlice / 8) / kLastTokensThreads; ++turn) {
      const int i = turn * kLastTokensThreads + thread, at = i / (kSlice / 8), piece = i % (kSlice / 8);
      uint4 x = make_uint4(0, 0, 0, 0);
      if (at < window.tokens && p.has_d_o) {
        x = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p.d_o.data) +
                                            row_offset(p.d_o, sequence.batch, row() + at, head) + v + 8 * piece);
      }
      *reinterpret_cast<uint4*>(&memory.d_o[at][8 * piece]) = x;
    }
  }

  // Four rows times the state's four columns.
  __device__ void multiply_state(const T (&rows)[kWindow][kHeadDim + 8], float (&acc)[4][4]) const {
#pragma unroll 4
    for (int k = 0; k < kHeadDim; k += 2) {
      const float4 a = *reinterpret_cast<const float4*>(&memory.state[k][column]);
      const float4 b = *reinterpret_cast<const float4*>(&memory.state[k + 1][column]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack2<T>(*reinterpret_cast<const uint32_t*>(&rows[token(i)][k]));
        acc[i][0] = fmaf(x.x, a.x, fmaf(x.y, b.x, acc[i][0]));
        acc[i][1] = fmaf(x.x, a.y, fmaf(x.y, b.y, acc[i][1]));
        acc[i][2] = fmaf(x.x, a.z, fmaf(x.y, b.z, acc[i][2]));
        acc[i][3] = fmaf(x.x, a.w, fmaf(x.y, b.w, acc[i][3]));
      }
    }
  }
  // Sums over the slice's columns of four tokens: of x(i, c) of the thread's columns; by the first of eight lanes to
  // add(token, sum).
  template <typename X, typename Add>
  __device__ void sum_columns(X x, Add add) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = sum_of_eight(x(i, 0) + x(i, 1) + x(i, 2) + x(i, 3));
      if (column == 0) add(token(i), sum);
    }
  }

  // What S0 gives: its reads, what is left of v, and its part of dg by dO.
  __device__ void read_first_state() const {
    float keys[4][4] = {}, queries[4][4] = {};
    multiply_state(memory.keys, keys);
    multiply_state(memory.queries, queries);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token(i);
      uint2 x = make_uint2(0, 0);
      if (at < window.tokens) {
        x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p.v.data) +
                                            row_offset(p.v, sequence.batch, row() + at, head) + v + column);
      }
      const float2 low = unpack2<T>(x.x), high = unpack2<T>(x.y);
      const float values[4] = {low.x, low.y, high.x, high.y}, decay = gamma(at);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        memory.read[at][column + c] = keys[i][c];
        memory.error[at][column + c] = values[c] - decay * keys[i][c];
      }
    }
    sum_columns([&](int i, int c) { return static_cast<float>(memory.d_o[token(i)][column + c]) * queries[i][c]; },
                [&](int t, float sum) { memory.from_start[t] = gamma(t) * p.scale * sum; });
  }

  // e, from the first token on (kBack: du, from the last one on): x_i -= sum over the j before i of pairs beta_j x_j.
  template <bool kBack>
  __device__ void solve(float (&x)[kWindow][kSlice + 4]) const {
    const auto pair = [&](int i, int j) { return kBack ? memory.pairs[j][i] : memory.pairs[i][j]; };
    const int blocks = (window.tokens + kSolved - 1) / kSolved;
    for (int turn = 0; turn < blocks; ++turn) {
      const int block = kBack ? blocks - 1 - turn : turn, first = block * kSolved;
      const int from = kBack ? first + kSolved : 0, to = kBack ? blocks * kSolved : first;
      constexpr int kRows = kSolved / (kLastTokensThreads / 32);
      float sum[kRows] = {};
#pragma unroll 4
      for (int j = from; j < to; ++j) {
        const float y = memory.beta[j] * x[j][lane];
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] = fmaf(pair(first + warp * kRows + r, j), y, sum[r]);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[first + warp * kRows + r][lane] -= sum[r];
      __syncthreads();
      if (warp == 0) {
        const auto at = [&](int r) { return kBack ? first + kSolved - 1 - r : first + r; };
        float y[kSolved];
#pragma unroll
        for (int r = 0; r < kSolved; ++r) y[r] = x[at(r)][lane];
#pragma unroll
        for (int r = 0; r < kSolved; ++r) {
          const float solved = memory.beta[at(r)] * y[r];
#pragma unroll
          for (int later = r + 1; later < kSolved; ++later) y[later] = fmaf(-pair(at(later), at(r)), solved, y[later]);
        }
#pragma unroll
        for (int r = 0; r < kSolved; ++r) x[at(r)][lane] = y[r];
      }
      __syncthreads();
    }
  }

  // du but for the tokens' parts in one another, and the final state's part of dg.
  __device__ void begin_d_values() const {
    float acc[4][4] = {};
    multiply_state(memory.keys, acc);
    sum_columns([&](int i, int c) { return acc[i][c] * memory.error[token(i)][column + c]; },
                [&](int t, float sum) { memory.to_end[t] = to_end(t) * memory.beta[t] * sum; });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float decay = token(i) < window.tokens ? to_end(token(i)) : 0.0f;
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][c] *= decay;
    }
#pragma unroll 2
    for (int j = warp * 4; j < window.tokens; ++j) {  // from the warp's first token on
      const uint2 x = *reinterpret_cast<const uint2*>(&memory.d_o[j][column]);
      const float2 low = unpack2<T>(x.x), high = unpack2<T>(x.y);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (j < kStep * i + warp * 4) continue;
        const float factor = j >= token(i) ? memory.pairs[token(i)][j] : 0.0f;
        acc[i][0] = fmaf(factor, low.x, acc[i][0]);
        acc[i][1] = fmaf(factor, low.y, acc[i][1]);
        acc[i][2] = fmaf(factor, high.x, acc[i][2]);
        acc[i][3] = fmaf(factor, high.y, acc[i][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) memory.d_value[token(i)][column + c] = acc[i][c];
    }
  }

  // dbeta, and S0's part of dg by dv.
  __device__ void sum_tokens() const {
    const auto d_value = [&](int i, int c) { return memory.d_value[token(i)][column + c]; };
    sum_columns([&](int i, int c) { return d_value(i, c) * memory.error[token(i)][column + c]; },
                [&](int t, float sum) { memory.d_beta_of_slice[t] = sum; });
    sum_columns([&](int i, int c) { return d_value(i, c) * memory.read[token(i)][column + c]; },
                [&](int t, float sum) { memory.from_start[t] -= gamma(t) * memory.beta[t] * sum; });
  }

  // The tokens' parts of dg in one another: a thread has a row, and every second column.
  __device__ void sum_pairs() const {
    const int j = thread % kWindow, half = thread / kWindow;
    const bool inside = j < window.tokens;
    float d_o[kSlice], d_value[kSlice], sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kSlice; ++c) {
      d_o[c] = static_cast<float>(memory.d_o[j][c]);
      d_value[c] = inside ? memory.beta[j] * memory.d_value[j][c] : 0.0f;
    }
    for (int i = half; i < min(j - lane + 31, window.tokens); i += 2) {
      const bool before = inside && i < j;
      const float query = before ? memory.pairs[i][j] : 0.0f, key = before ? memory.pairs[j][i] : 0.0f;
      if (!__any_sync(0xffffffffu, query != 0.0f || key != 0.0f)) continue;
      float by_d_o = 0.0f, by_d_value = 0.0f;
#pragma unroll
      for (int c = 0; c < kSlice; c += 4) {
        const float4 e = *reinterpret_cast<const float4*>(&memory.error[i][c]);
        by_d_o = fmaf(d_o[c], e.x, fmaf(d_o[c + 1], e.y, fmaf(d_o[c + 2], e.z, fmaf(d_o[c + 3], e.w, by_d_o))));
        by_d_value = fmaf(d_value[c], e.x,
                          fmaf(d_value[c + 1], e.y, fmaf(d_value[c + 2], e.z, fmaf(d_value[c + 3], e.w, by_d_value))));
      }
      const float x = before ? memory.beta[i] * (query * by_d_o - key * by_d_value) : 0.0f;
      sum += x;
      const float of_column = warp_sum(x);
      if (lane == 0) memory.by_column[warp][i] = of_column;
    }
    memory.by_row[half][j] = sum;
  }

  // The slice's part of dg of the thread's token. corner: of gP <H, S0>.
  __device__ float d_g_of_slice(float corner) const {
    float d_g = corner;
#pragma unroll 4
    for (int t = 0; t < window.tokens; ++t) {
      float of_columns = 0.0f;
#pragma unroll
      for (int w = 0; w < kLastTokensThreads / 32; ++w) of_columns += memory.by_column[w][t];
      const float from = memory.from_start[t] + (memory.by_row[0][t] + memory.by_row[1][t] - of_columns);
      d_g += t < thread ? memory.to_end[t] : from;
    }
    return d_g;
  }

  // To memory, where it is a number and was one; by the cluster's first block.
  __device__ void store() const {
    if (thread >= window.tokens) return;
    const auto replace = [&](const StridedTensor& t, float (&of_slice)[kWindow]) {
      float sum = 0.0f;
#pragma unroll
      for (uint32_t rank = 0; rank < kSlices; ++rank) {
        sum += load_cluster_f1(cluster_address(smem_address(&of_slice[thread]), rank));
      }
      const int64_t at = row_offset(t, sequence.batch, row() + thread, head);
      if (isfinite(sum) && isfinite(load_element(t, at))) store_element(t, at, sum);
    };
    if (p.dbeta.data != nullptr) replace(p.dbeta, memory.d_beta_of_slice);
    if (p.dg.data == nullptr) return;
    const int chunk = thread / kChunk;
    const ChunkInfo info = {row() + chunk * kChunk, min(kChunk, window.tokens - chunk * kChunk), n, sequence.batch};
    if (!has_no_gate_gradient(p, info, head, thread % kChunk, 0.0f)) replace(p.dg, memory.d_g_of_slice);
  }

  __device__ void correct() const {
    load_window();
    load_first_state();
    load_d_o();
    __syncthreads();
    multiply_pairs();
    read_first_state();
    __syncthreads();
    float corner = 0.0f;
    load_columns(p.dht, [&corner](float& to, float x) {
      corner = fmaf(to, x, corner);
      to = x;
    });
    solve<false>(memory.error);
    begin_d_values();
    __syncthreads();
    solve<true>(memory.d_value);
    sum_tokens();
    sum_pairs();
    corner = warp_sum(corner);
    if (lane == 0) memory.warp_sums[warp] = corner;
    __syncthreads();
    if (thread < window.tokens) {
      corner = 0.0f;
      for (int w = 0; w < kLastTokensThreads / 32; ++w) corner += memory.warp_sums[w];
      memory.d_g_of_slice[thread] = d_g_of_slice(gamma(kWindow - 1) * corner);
    }
    cluster_sync();
    if (v == 0) store();
    __syncwarp();
    cluster_sync();  // all has been read
  }
};

// Clusters of kSlices blocks go through what small_betas.cuh has listed.
template <typename T>
__global__ __launch_bounds__(kLastTokensThreads, 1) void sm90_chunk_bwd_last_tokens_kernel(const Args p) {
  launch_dependents();
  wait_for_predecessors();
  extern __shared__ __align__(16) uint8_t shared[];
  auto& memory = *reinterpret_cast<LastTokensMemory<T>*>(shared);
  const int clusters = static_cast<int>(gridDim.x) / kSlices;
  for (int place = static_cast<int>(blockIdx.x) / kSlices; place < *p.last_count; place += clusters) {
    const int item = p.last_items[place], n = item / p.Hv, head = item - n * p.Hv;
    const SequenceInfo sequence = sequence_info(p, n);
    const LastWindow window = find_window(p, sequence, head, memory.window);
    LastTokens<T>{p, memory, sequence, n, head, static_cast<int>(cluster_rank()) * kSlice, window}.correct();
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
