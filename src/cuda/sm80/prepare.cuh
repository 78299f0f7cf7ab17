// What the serial passes and the gradients need of a chunk and does not depend on a state: the triangular inverses, the
// products of queries and keys, and the gates (docs/kernels/sm80.md, sm80_backward.md). A block takes a chunk of 64
// tokens of a key head, and the value heads of its group one pair after another.
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/substitution.cuh"
#include "cuda/sm80/tile.cuh"

namespace flash_qla::cuda::sm80 {

inline constexpr int kPrepareWarps = 4, kPrepareThreads = 32 * kPrepareWarps;
// Value heads at a time: a warp makes the same columns of the inverses of both.
inline constexpr int kHeadsAtOnce = 2;

__device__ __forceinline__ float2 load_pair(const float* at) { return *reinterpret_cast<const float2*>(at); }
__device__ __forceinline__ void store_pair(float* at, float x, float y) {
  *reinterpret_cast<float2*>(at) = make_float2(x, y);
}

// c is summed from the step's start here.
struct alignas(128) HeadGates : ChunkGates {
  float total;  // sum of g
};

// Where a block works. In shared memory, where it takes no registers in between.
struct alignas(128) PreparePlace {
  int b, token, chunk;  // the chunk's first token in its batch row, and its number
  int count;            // tokens
  int key_head, first_head, last_head;
  bool writes_rows;  // of several blocks to a group one writes the normalised rows
  bool skipped;      // the sequence is
};

// A block's shared memory: its place, gates, and behind them the tiles of keys and queries and, once these are
// multiplied, matrices in their place.
struct PrepareMemory {
  PreparePlace* place;
  HeadGates* gates;  // of kHeadsAtOnce heads
  char* tiles;
  int matrix;  // floats of one

  __device__ __forceinline__ PrepareMemory(char* memory, bool whole)
      : place(reinterpret_cast<PreparePlace*>(memory)),
        gates(reinterpret_cast<HeadGates*>(memory + sizeof(PreparePlace))),
        tiles(memory + sizeof(PreparePlace) + kHeadsAtOnce * sizeof(HeadGates)),
        matrix(lower_floats(whole)) {}
  __device__ __forceinline__ float* kk() const { return reinterpret_cast<float*>(tiles); }  // K K^T
  __device__ __forceinline__ float* qk() const { return kk() + matrix; }                    // Q K^T
  __device__ __forceinline__ float* inverse(int head) const { return kk() + (2 + head) * matrix; }
};

// `whole`: matrices have blocks between steps, which A has.
template <int kKeys>
constexpr size_t prepare_shared_bytes(bool whole) {
  const size_t tiles = 2 * kChunk * kKeys * 2;
  const size_t matrices = (2 + kHeadsAtOnce) * static_cast<size_t>(lower_floats(whole)) * sizeof(float);
  return sizeof(PreparePlace) + kHeadsAtOnce * sizeof(HeadGates) + (tiles > matrices ? tiles : matrices);
}

__device__ inline bool find_place(const PrepareParams& p, PreparePlace* place) {
  const unsigned parts = (p.group + p.heads_per_block - 1) / p.heads_per_block;
  const unsigned of_group = blockIdx.x % parts, rest = blockIdx.x / parts;
  place->chunk = static_cast<int>(rest / p.Hq);
  if (place->chunk >= (p.parts != nullptr ? p.chunks : total_chunks(p.sequences))) return false;
  if (p.parts != nullptr) {
    const DeviceSequence part = p.parts[place->chunk];
    place->b = static_cast<int>(part.b);
    place->token = static_cast<int>(part.begin);
    place->count = static_cast<int>(part.length);
    place->skipped = false;
  } else {
    const int64_t n = sequence_of_chunk(p.sequences, place->chunk);
    const DeviceSequence sequence = sequence_at(p.sequences, n);
    const int64_t t0 = (place->chunk - sequence.first_chunk) * kChunk, left = sequence.length - t0;
    place->b = static_cast<int>(sequence.b);
    place->token = static_cast<int>(sequence.begin + t0);
    place->count = static_cast<int>(left < kChunk ? left : kChunk);
    place->skipped = read_slot(p.pool_indices, n) == kSkipRow;
  }
  place->key_head = static_cast<int>(rest % p.Hq);
  place->first_head = place->key_head * p.group + static_cast<int>(of_group) * p.heads_per_block;
  place->last_head = min(place->first_head + p.heads_per_block, (place->key_head + 1) * p.group);
  place->writes_rows = of_group == 0;
  return place->count > 0;
}

// Divides the rows of a tile by their norms, in place and in `out` (elements of a row side by side).
template <class T, int kKeys>
__device__ void normalize_rows(char* tile, uint16_t* out, int64_t out_stride, int K, int count) {
  constexpr int kWords = kKeys / 2, kPerLane = (kWords + 31) / 32;
  constexpr int kAtOnce = 4;  // rows of a warp: their shuffles wait beside each other
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int first = warp; first < count; first += kPrepareWarps * kAtOnce) {
    float2 x[kAtOnce][kPerLane];
    float sum[kAtOnce];
    const auto word = [&](int n, int i) {
      const int w = lane + 32 * i;
      return reinterpret_cast<uint32_t*>(tile + piece_offset<kKeys>(first + n * kPrepareWarps, w / 4) + w % 4 * 4);
    };
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      sum[n] = 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const bool inside = lane + 32 * i < kWords && first + n * kPrepareWarps < count;
        x[n][i] = inside ? unpack2<T>(*word(n, i)) : make_float2(0.f, 0.f);
        sum[n] = fmaf(x[n][i].x, x[n][i].x, fmaf(x[n][i].y, x[n][i].y, sum[n]));
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], distance);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int row = first + n * kPrepareWarps;
      const float scale = 1.f / sqrtf(sum[n] + static_cast<float>(kL2NormEps));
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int w = lane + 32 * i;
        if (row >= count || w >= kWords) continue;
        const uint32_t packed = pack2<T>(x[n][i].x * scale, x[n][i].y * scale);
        *word(n, i) = packed;
        if (out != nullptr && 2 * w < K) *reinterpret_cast<uint32_t*>(out + row * out_stride + 2 * w) = packed;
      }
    }
  }
}

// K K^T and Q K^T within each step, by blocks of 16x16 on and below the diagonal: a warp makes a row of blocks of a
// step. The inverse of the whole chunk also wants K K^T between the steps (`whole`), of which two warps make a row
// each.
template <class T, int kKeys>
__device__ void multiply_rows(const PrepareMemory& s, bool whole) {
  static_assert(kStepsPerChunk == 2 && kStep == 2 * kSide && kPrepareWarps == kSides);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32, step = row / 2;
  const bool lower = row % 2 != 0;  // the second row of its step: two blocks
  const uint32_t keys = smem_address(s.tiles), queries = keys + kChunk * kKeys * 2;
  const BlockReader<kKeys> left_keys(keys, lane, Order::kLeftOperand), left_queries(queries, lane, Order::kLeftOperand);
  const BlockReader<kKeys> right(keys, lane, Order::kRightOperand);
  Sums<2> kk{}, qk{};
  Sums<2> more[2] = {};  // of lower rows their second blocks, of the others what is between the steps
#pragma unroll 2
  for (int k = 0; k < kKeys / 16; ++k) {
    uint32_t a[4], of_queries[4], b[4];
    load_matrix_x4(left_keys.at(row, k), a);
    load_matrix_x4(left_queries.at(row, k), of_queries);
    load_matrix_x4(right.at(2 * step, k), b);
    multiply_two<T>(kk, 0, a, b);
    multiply_two<T>(qk, 0, of_queries, b);
    if (!lower) continue;
    load_matrix_x4(right.at(2 * step + 1, k), b);
    multiply_two<T>(more[0], 0, a, b);
    multiply_two<T>(more[1], 0, of_queries, b);
  }
  if (whole && !lower) {
#pragma unroll 2
    for (int k = 0; k < kKeys / 16; ++k) {
      uint32_t a[4];
      load_matrix_x4(left_keys.at(2 + step, k), a);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        multiply_block<T, false>(more[j], 0, a, right.at(j, k));
      }
    }
  }
  __syncthreads();  // the tiles have been read: the products take their place
  const auto keep = [&](float* matrix, int i, int j, const Sums<2>& sums) {
    float* to = matrix + lower_block(i, j) + lane / 4 * kSide + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_pair(to + 8 * half, sums.x[half][0], sums.x[half][1]);
      store_pair(to + 8 * kSide + 8 * half, sums.x[half][2], sums.x[half][3]);
    }
  };
  keep(s.kk(), row, 2 * step, kk);
  keep(s.qk(), row, 2 * step, qk);
  if (lower) {
    keep(s.kk(), row, 2 * step + 1, more[0]);
    keep(s.qk(), row, 2 * step + 1, more[1]);
  } else if (whole) {
    keep(s.kk(), 2 + step, 0, more[0]);
    keep(s.kk(), 2 + step, 1, more[1]);
  }
}

template <class Record>
__device__ __forceinline__ Record* record_at(Record* records, const PrepareParams& p, int64_t chunk, int head,
                                             int step) {
  return records + (chunk * p.Hv + head) * kStepsPerChunk + step;
}

// Gates of value heads from `first` on, a token a thread: beta, and log decays where their sums will be.
__device__ inline void load_gates(const PrepareParams& p, const PreparePlace& place, int first, int heads,
                                  HeadGates* gates) {
  static_assert(kPrepareThreads == kHeadsAtOnce * kChunk);
  const int of = threadIdx.x / kChunk, head = first + of, t = threadIdx.x % kChunk;
  if (of >= heads) return;
  float g = 0.f, beta = 0.f;
  if (t < place.count) {
    g = clamp_log_decay(log_decay<float>(p.gates, place.b, place.token + t, head, t == 0));
    beta = effective_beta<float>(p.gates, place.b, place.token + t, head);
  }
  gates[of].high[t] = g;
  gates[of].beta[t] = beta;
}

// The sums of a value head's log decays, by one warp: in double, to shared memory and to the records.
__device__ inline void sum_gates(const PrepareParams& p, const PreparePlace& place, int head, HeadGates& s) {
  constexpr int kLanesPerStep = kStep / 2;
  constexpr double kLog2E = 1.4426950408889634;
  const int lane = threadIdx.x % 32, step = lane / kLanesPerStep;
  const float2 gs = load_pair(s.high + 2 * lane), betas = load_pair(s.beta + 2 * lane);  // of a lane's two tokens
  const float g[] = {gs.x, gs.y}, beta[] = {betas.x, betas.y};
  const double sum = prefix_sum(static_cast<double>(g[0]) + static_cast<double>(g[1]), lane);
  double before = __shfl_up_sync(0xffffffffu, sum, 1);
  if (lane == 0) before = 0.0;
  const double of_first_step = __shfl_sync(0xffffffffu, sum, kLanesPerStep - 1);
  const double of_chunk = __shfl_sync(0xffffffffu, sum, 31);
  const double start = step == 0 ? 0.0 : of_first_step;
  const double end = ((step == 0 ? of_first_step : of_chunk) - start) * kLog2E;
  const double c[2] = {before + static_cast<double>(g[0]), sum};
  StepRecord& record = *record_at(p.records, p, place.chunk, head, step);
  const int at = 2 * (lane % kLanesPerStep);
  float high[2], low[2], gamma[2], update[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const double local = (c[e] - start) * kLog2E;
    high[e] = static_cast<float>(local);
    low[e] = static_cast<float>(local - static_cast<double>(high[e]));
    gamma[e] = exp2_approx(high[e]);
    update[e] = beta[e] * exp2_approx(static_cast<float>(end - local));
    const int t = 2 * lane + e;
    if (p.g_cumsum.data != nullptr && t < place.count) {
      store<float>(p.g_cumsum, offset_of(p.g_cumsum, place.b, place.token + t, head), static_cast<float>(c[e]));
    }
  }
  store_pair(s.high + 2 * lane, high[0], high[1]);
  store_pair(s.low + 2 * lane, low[0], low[1]);
  store_pair(record.gamma + at, gamma[0], gamma[1]);
  store_pair(record.update + at, update[0], update[1]);
  store_pair(record.scaled_gamma + at, p.scale * gamma[0], p.scale * gamma[1]);
  if (lane == 0) s.total = static_cast<float>(of_chunk);
  if (lane % kLanesPerStep < 4) record.decay[lane % kLanesPerStep] = exp2_approx(static_cast<float>(end));
}

// A token multiplies a state by e^g (I - beta k k^T), whose norm is at most e^g max(1, |1 - beta |k|^2|).
__device__ inline void write_decay(const PrepareParams& p, const PreparePlace& place, int head, const HeadGates& s,
                                   const float* kk) {
  const int lane = threadIdx.x % 32;
  float bound = 0.f;
#pragma unroll
  for (int t = lane; t < kChunk; t += 32) {
    bound += __logf(fmaxf(1.f, fabsf(1.f - s.beta[t] * kk[lower_index(t, t)])));
  }
  bound = warp_sum(bound);
  if (lane == 0) p.decays[static_cast<int64_t>(place.chunk) * p.Hv + head] = s.total + bound;
}

// Calls visit(step, row, column, i, j, at) for the blocks on and below the diagonals of both steps, by all warps: `at`
// is a lane's place in a block, elements (i, j) and (i, j + 1) of the chunk's matrix. A warp writes a block of 128
// bytes at once.
template <class Visit>
__device__ __forceinline__ void visit_blocks(Visit visit) {
  static_assert(kTileRows == kPrepareWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int step = 0; step < kStepsPerChunk; ++step) {
    const int row = step % 2 == 0 ? warp : kTileRows - 1 - warp;  // a long row of the one and a short one of the other
#pragma unroll 1
    for (int column = 0; column <= row; ++column) {
      visit(step, row, column, step * kStep + 8 * row + lane / 4, step * kStep + 8 * column + lane % 4 * 2, lane * 4);
    }
  }
}

// G_ij for two elements of a row or column. Above the diagonal the exponent may be large: there it is 0. The first
// difference is exact where it is small, as the two sums are near each other then.
__device__ __forceinline__ float decay_between(bool above, float high_i, float high_j, float low_i, float low_j) {
  return above ? 0.f : exp2_approx((high_i - high_j) + (low_i - low_j));
}

// strict(G o T) of value heads from `first` on, and with kOutputs P B; or with kReverse for the reverse pass strict(G o
// A) and P. s.inverse: T or A.
template <class T, bool kOutputs, bool kReverse>
__device__ void write_triangles(const PrepareParams& p, const PrepareMemory& s, int64_t chunk, int first, int heads) {
  visit_blocks([&](int step, int row, int column, int i, int j, int at) {
    const int element = lower_index(i, j);
    at += (kReverse ? reverse_block(row, column) : triangle_block(row, column)) * kBlockBytes;
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      if (h >= heads) break;
      const HeadGates& gates = s.gates[h];
      const float high = gates.high[i], low = gates.low[i];
      const float2 high_j = load_pair(gates.high + j), low_j = load_pair(gates.low + j);
      const float2 inverse = load_pair(s.inverse(h) + element);
      const float x = decay_between(j > i, high, high_j.x, low, low_j.x);
      const float y = decay_between(j + 1 > i, high, high_j.y, low, low_j.y);
      StepRecord& record = *record_at(p.records, p, chunk, first + h, step);
      ReverseRecord& reverse = *record_at(p.reverse_records, p, chunk, first + h, step);
      // On and above the diagonal nothing is multiplied, not even by 0: what lies there may be anything.
      *reinterpret_cast<uint32_t*>((kReverse ? reverse.inverse : record.transform) + at) =
          pack2<T>(j < i ? x * inverse.x : 0.f, j + 1 < i ? y * inverse.y : 0.f);
      const float2 product = load_pair(s.qk() + element), beta = load_pair(gates.beta + j);
      if constexpr (kOutputs) {
        *reinterpret_cast<uint32_t*>(record.outputs + at) = pack2<T>(
            j > i ? 0.f : p.scale * product.x * x * beta.x, j + 1 > i ? 0.f : p.scale * product.y * y * beta.y);
      } else if constexpr (kReverse) {
        *reinterpret_cast<uint32_t*>(reverse.scores + at) =
            pack2<T>(j > i ? 0.f : p.scale * x * product.x, j + 1 > i ? 0.f : p.scale * y * product.y);
      }
    }
  });
}

// ---- of the backward

// Gates of a value head as the reverse pass and the gradients take them, a token a thread.
__device__ inline void write_gates(const PrepareParams& p, const HeadGates& s, int64_t chunk, int head, int t) {
  const int step = t / kStep, at = t % kStep, last = (step + 1) * kStep - 1;
  const float high = s.high[t], low = s.low[t], beta = s.beta[t], gamma = exp2_approx(high);
  ReverseRecord& record = *record_at(p.reverse_records, p, chunk, head, step);
  record.to_end[at] = exp2_approx((s.high[last] - high) + (s.low[last] - low));
  record.scaled_gamma[at] = p.scale * gamma;
  record.minus_gamma[at] = -gamma;
  record.beta[at] = beta;
  if (at < 4) record.decay[at] = exp2_approx(s.high[last]);
  double sum = static_cast<double>(high) + static_cast<double>(low);
  if (step > 0) sum += static_cast<double>(s.high[kStep - 1]) + static_cast<double>(s.low[kStep - 1]);
  ChunkGates& gates = p.chunk_gates[chunk * p.Hv + head];
  const float rounded = static_cast<float>(sum);
  gates.high[t] = rounded;
  gates.low[t] = static_cast<float>(sum - static_cast<double>(rounded));
  gates.beta[t] = beta;
}

// ---- the kernel

// Rows of A of a value head; zeros where the sequence is skipped (no inverse).
__device__ inline void write_A(const PrepareParams& p, const PreparePlace& place, int head, const float* inverse) {
  for (int e = threadIdx.x; e < place.count * kChunk; e += kPrepareThreads) {
    const int row = e / kChunk, column = e % kChunk;
    const float x = inverse != nullptr && column <= row ? inverse[lower_index(row, column)] : 0.f;
    store<float>(p.A, offset_of(p.A, place.b, place.token + row, head, column), x);
  }
}

// What a skipped sequence leaves.
__device__ inline void write_zeros(const PrepareParams& p, const PreparePlace& place) {
  for (int head = place.first_head; head < place.last_head; ++head) {
    if (p.A.data != nullptr) write_A(p, place, head, nullptr);
    if (p.g_cumsum.data != nullptr && static_cast<int>(threadIdx.x) < place.count) {
      store<float>(p.g_cumsum, offset_of(p.g_cumsum, place.b, place.token + threadIdx.x, head), 0.f);
    }
  }
}

// Blocks of a multiprocessor: what registers allow, and with more keys shared memory. Of compute capability 12.0 it
// holds no more than three whatever the keys, and ptxas 13.0 spills for a fourth.
constexpr int prepare_blocks(int keys) { return keys <= 128 && kArchitecture < 1200 ? 4 : 3; }

// Once the tiles are there: their products in their place, and before it the rows' norms taken out.
template <class T, int kKeys, bool kNormalizes>
__device__ __forceinline__ void multiply_tiles(const PrepareParams& p, const PreparePlace& place,
                                               const PrepareMemory& s, bool whole) {
  cp_async_wait<0>();
  __syncthreads();
  if (kNormalizes && (p.normal_q != nullptr || p.normal_k != nullptr)) {
    const int64_t stride = static_cast<int64_t>(p.Hq) * p.row_elements;
    const int64_t at = (place.b * p.sequences.T + place.token) * stride + place.key_head * p.row_elements;
    const auto normalize = [&](char* tile, uint16_t* out) {
      if (out == nullptr) return;
      normalize_rows<T, kKeys>(tile, place.writes_rows ? out + at : nullptr, stride, p.K, place.count);
    };
    normalize(s.tiles, p.normal_k);
    normalize(s.tiles + kChunk * kKeys * 2, p.normal_q);
    __syncthreads();
  }
  multiply_rows<T, kKeys>(s, whole);
}

// kBackward: leaves what the backward needs, with one inverse after the other, in the place of outputs.
template <class T, int kKeys, bool kBackward>
__global__ void __launch_bounds__(kPrepareThreads, prepare_blocks(kKeys))
    sm80_prepare_kernel(const __grid_constant__ PrepareParams p) {
  const bool wants_A = !kBackward && p.A.data != nullptr;
  const PrepareMemory s(dynamic_shared<char>(), wants_A);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0 && !find_place(p, s.place)) s.place->count = 0;
  __syncthreads();
  const PreparePlace& place = *s.place;
  if (place.count == 0) return;
  if (!kBackward && place.skipped) return write_zeros(p, place);

  // Keys and queries on their way to tiles one behind the other, and meanwhile the first gates.
  const TileCopier<kKeys, kChunk, kPrepareThreads> copier(p.k.pieces, threadIdx.x);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Rows rows = i == 0 ? p.k : p.q;
    copier.copy(smem_address(s.tiles) + i * kChunk * kKeys * 2, row_at(rows, place.b, place.token, place.key_head),
                rows.token, place.count);
  }
  cp_async_commit();
#pragma unroll 1
  for (int first = place.first_head; first < place.last_head; first += kHeadsAtOnce) {
    const int heads = min(kHeadsAtOnce, place.last_head - first);
    load_gates(p, place, first, heads, s.gates);
    if (first == place.first_head) multiply_tiles<T, kKeys, !kBackward>(p, place, s, wants_A);
    __syncthreads();
    // Every second warp sums gates: it has the second block of columns of a step's inverse, a third of the work.
    const int sums_of = warp % 2 == 0 ? kHeadsAtOnce : warp / 2;
    if (sums_of < heads) {
      sum_gates(p, place, first + sums_of, s.gates[sums_of]);
      if (!kBackward && p.decays != nullptr) write_decay(p, place, first + sums_of, s.gates[sums_of], s.kk());
    }
    // A warp makes a block of columns, each half of it for a head of its own; behind an odd last head one makes none.
    const int slot = min(lane / kSide, heads - 1), last = (warp / 2 + 1) * 2;
    const int block = lane < heads * kSide ? warp : kSides;
    const float* beta = s.gates[slot].beta;
    if (wants_A) {
      substitute<true>(s.kk(), beta, s.inverse(slot), block, kSides, lane % kSide);
      __syncthreads();
      for (int h = 0; h < heads; ++h) write_A(p, place, first + h, s.inverse(h));
      __syncthreads();
    }
    substitute<false>(s.kk(), beta, s.inverse(slot), block, last, lane % kSide);
    __syncthreads();
    write_triangles<T, !kBackward, false>(p, s, place.chunk, first, heads);
    if constexpr (kBackward) {
      const int of = threadIdx.x / kChunk;
      if (of < heads) write_gates(p, s.gates[of], place.chunk, first + of, threadIdx.x % kChunk);
      __syncthreads();
      substitute<true>(s.kk(), beta, s.inverse(slot), block, last, lane % kSide);
      __syncthreads();
      write_triangles<T, false, true>(p, s, place.chunk, first, heads);
    }
    __syncthreads();
  }
}

}  // namespace flash_qla::cuda::sm80
