// The gradients of q, k, the gates and beta, chunk by chunk, from the states and errors that the passes have left. A
// block takes a chunk of 64 tokens and a key head, and the value heads of its group one after another; a warp has 16
// tokens and half of the keys. With more than 128 keys the block goes through them in two slices.
//   dQ    = scale diag(gamma) dO S0^T + dP K             dP = scale G o (dO E^T) B
//   plus  = -diag(gamma) B Z S0^T + D K                  D  = -B (G o strict(Z E^T)) B
//   minus = diag(gamma_C / gamma) B E dS1^T + dP^T Q + D^T K
// and dK = plus + minus, dbeta_i = <Z_i, E_i>, and of the sum of log decays up to token i the gradient is
// <q_i, dq_i> + <k_i, plus_i> - <k_i, minus_i>, to which the chunk's end adds gamma_C <dS1, S0> and what dS1 has given
// to minus.
#pragma once

#include "cuda/common/dynamic_shared.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/forward_step.cuh"

namespace flash_qla::cuda::sm80 {

inline constexpr int kGradientsWarps = 8, kGradientsThreads = 32 * kGradientsWarps;
inline constexpr int kTokenStrips = kGradientsWarps / 2;  // of 16 tokens
inline constexpr int kValueSlice = 32;                    // value columns at once
static_assert(kTokenStrips * kStrip == kChunkSize);

template <int kKeys>
struct GradientsTraits {
  static constexpr int kSlices = kKeys <= 128 ? 1 : 2, kSlice = kKeys / kSlices;  // of the keys
  static constexpr int kTiles = kSlice / 16;                                      // of a warp: half of the slice
  static constexpr int kChunkTokens = static_cast<int>(kChunkSize);
  // A stage: 32 value columns of dO, E, Z, S and dS. dP and D take its place once it has been read.
  static constexpr int kTokensBytes = kChunkTokens * kValueSlice * 2, kStateBytes = kSlice * kValueSlice * 2;
  static constexpr int kErrorsAt = kTokensBytes, kDErrorsAt = 2 * kTokensBytes, kStatesAt = 3 * kTokensBytes,
                       kGradientsAt = kStatesAt + kStateBytes, kStageBytes = kGradientsAt + kStateBytes;
  static constexpr int kScoresBytes = kChunkBlocks * kChunkBlocks * kBlockBytes;
  static_assert(2 * kScoresBytes <= kStageBytes);
  static constexpr int kRowsBytes = kChunkTokens * kSlice * 2;
};

struct GradientsSums {
  ChunkGates gates[2];  // of this head, and of the next one
  float by_token[2][kChunkSize];    // of each half of the keys: the gradient of c
  float from_end[2][kChunkSize];    // and its part through dS1
  float of_states[kGradientsWarps];  // <dS1, S0>
};

template <int kKeys>
constexpr size_t gradients_shared_bytes() {
  using Tr = GradientsTraits<kKeys>;
  return 2 * Tr::kRowsBytes + 2 * Tr::kStageBytes + sizeof(GradientsSums);
}
static_assert(gradients_shared_bytes<128>() <= kMostSharedBytes && gradients_shared_bytes<256>() <= kMostSharedBytes);

// dO of a value slice, [64 x 32]: rows of 64 bytes, whose 16-byte pieces change places every second row.
__device__ __forceinline__ uint32_t slice_offset(int row, int piece) {
  return static_cast<uint32_t>(row * 64 + (piece ^ (row >> 1 & 3)) * 16);
}

// A lane's address in four 8x8 blocks of a matrix of blocks, `row` of them side by side: blocks (down, right), (down +
// 1, right), (down, right + 1), (down + 1, right + 1), or the second and third changed.
__device__ __forceinline__ uint32_t four_blocks(uint32_t blocks, int row, int down, int right, int lane,
                                                bool right_first = false) {
  const int matrix = lane / 8, low = matrix & 1, high = matrix >> 1;
  const int i = down + (right_first ? high : low), j = right + (right_first ? low : high);
  return blocks + static_cast<uint32_t>((i * row + j) * kBlockBytes + lane % 8 * 16);
}

template <class T, int kKeys>
class Gradients {
  using Tr = GradientsTraits<kKeys>;
  static constexpr int kTiles = Tr::kTiles, kScoreTiles = kTokenStrips;
  using Keys = Sums<kTiles>;

 public:
  __device__ __forceinline__ Gradients(const GradientsParams& p, char* memory)
      : p_(p),
        sums_(*reinterpret_cast<GradientsSums*>(memory + 2 * Tr::kRowsBytes + 2 * Tr::kStageBytes)),
        keys_(smem_address(memory)),
        lane_(threadIdx.x % 32),
        strip_(threadIdx.x / 32 % kTokenStrips),
        half_(threadIdx.x / 32 / kTokenStrips) {}

  __device__ void run(int64_t chunk, int key_head) {
    const int64_t n = sequence_of_chunk(p_.sequences, chunk);
    const DeviceSequence sequence = sequence_at(p_.sequences, n);
    const int64_t t0 = (chunk - sequence.first_chunk) * kChunkSize, left = sequence.length - t0;
    chunk_ = chunk;
    b_ = sequence.b;
    token_ = sequence.begin + t0;
    count_ = static_cast<int>(left < kChunkSize ? left : kChunkSize);
    starts_ = t0 == 0 && p_.starts_from_zero;
    for (int slice = 0; slice < Tr::kSlices; ++slice) run_slice(slice, key_head);
  }

 private:
  __device__ void run_slice(int slice, int key_head) {
    const int first_key = slice * Tr::kSlice, value_slices = (p_.value_blocks + 3) / 4;
    if (slice > 0) __syncthreads();
    const auto copy = [&](uint32_t tile, const Rows& rows) {
      copy_rows<Tr::kSlice, Tr::kChunkTokens, kGradientsThreads>(tile, row_at(rows, b_, token_, key_head) + first_key,
                                                                 rows.token, p_.K - first_key, count_, threadIdx.x);
    };
    copy(keys_, p_.k);
    copy(keys_ + Tr::kRowsBytes, p_.q);
    load(slice, key_head * p_.group, 0, 0);
    int parity = 0;
    Keys dq, dk;
    dq.clear();
    dk.clear();
    for (int member = 0; member < p_.group; ++member) {
      const int head = key_head * p_.group + member;
      Keys of_q, plus, minus;  // d O S0^T, Z S0^T and E dS1^T, before the factors of their rows
      Sums<kScoreTiles> by_d_o, by_d_error;  // dO E^T and Z E^T
      float of_states[2][4] = {};
      of_q.clear();
      plus.clear();
      minus.clear();
      by_d_o.clear();
      by_d_error.clear();
      for (int values = 0; values < value_slices; ++values, parity ^= 1) {
        const bool more_values = values + 1 < value_slices;
        if (more_values || member + 1 < p_.group) {
          load(slice, more_values ? head : head + 1, more_values ? values + 1 : 0, parity ^ 1);
        } else {
          cp_async_commit();
        }
        cp_async_wait<1>();
        __syncthreads();
        add_slice(stage(parity), of_q, plus, minus, by_d_o, by_d_error, of_states);
        __syncthreads();
      }
      parity ^= 1;  // the last stage once more
      write_scores(stage(parity), slice, head, by_d_o, by_d_error);
      add_states(of_states);
      scale_rows(head, of_q, plus, minus);
      __syncthreads();
      add_scores(stage(parity), of_q, plus, minus);
      sum_tokens(of_q, plus, minus);
      __syncthreads();
      if (threadIdx.x < 32) store_log_decay(slice, head);
      parity ^= 1;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          dq.x[i][e] += of_q.x[i][e];
          dk.x[i][e] += plus.x[i][e] + minus.x[i][e];
        }
      }
    }
    store_rows(dq, keys_ + Tr::kRowsBytes, p_.dq, p_.dq_parts, p_.q_inverse_norms, key_head, first_key);
    store_rows(dk, keys_, p_.dk, p_.dk_parts, p_.k_inverse_norms, key_head, first_key);
  }

  __device__ __forceinline__ uint32_t stage(int parity) const {
    return keys_ + static_cast<uint32_t>(2 * Tr::kRowsBytes + parity * Tr::kStageBytes);
  }
  // Rows of tokens that the lane has of a C fragment: this and the eighth after it.
  __device__ __forceinline__ int row() const { return strip_ * kStrip + lane_ / 4; }

  // ---- loads

  // Value columns [32 values, 32 values + 32) of a head into a stage.
  __device__ __forceinline__ void load(int slice, int head, int values, int parity) const {
    const uint32_t to = stage(parity);
    const int thread = threadIdx.x;
    {
      const int row = thread / 4, piece = thread % 4, room = 2 * (p_.V - kValueSlice * values - 8 * piece);
      const bool inside = p_.d_o.data != nullptr && row < count_ && room > 0;
      const void* from = inside ? static_cast<const void*>(row_at(p_.d_o, b_, token_ + row, head) +
                                                           kValueSlice * values + 8 * piece)
                                : p_.errors;
      cp_async_16(to + slice_offset(row, piece), from, inside ? min(room, 16) : 0);
    }
    const int64_t matrix = (chunk_ * p_.Hv + head) * p_.value_blocks + kValueSlice / 8 * values;
    const int room = p_.value_blocks - kValueSlice / 8 * values;  // blocks of value columns
    {
      // Steps without tokens have left nothing.
      constexpr int kStepBlocks = step_tokens(kKeys) / 8;
      const int block = thread / 8, last = (count_ + 8 * kStepBlocks - 1) / (8 * kStepBlocks) * kStepBlocks;
      const bool inside = block / kChunkBlocks < room && block % kChunkBlocks < last;
      const int64_t at = inside ? (matrix * kChunkBlocks + block) * kBlockBytes + thread % 8 * 16 : 0;
      cp_async_16(to + Tr::kErrorsAt + static_cast<uint32_t>(thread) * 16, p_.errors + at, inside ? 16 : 0);
      cp_async_16(to + Tr::kDErrorsAt + static_cast<uint32_t>(thread) * 16, p_.d_errors + at, inside ? 16 : 0);
    }
#pragma unroll
    for (int i = thread; i < Tr::kStateBytes / 16; i += kGradientsThreads) {
      const bool inside = i / Tr::kSlice < room;  // a row of blocks has kSlice pieces
      const int64_t at =
          inside ? (matrix + i / Tr::kSlice) * kKeys * 16 + (slice * Tr::kSlice + i % Tr::kSlice) * 16 : 0;
      cp_async_16(to + Tr::kStatesAt + static_cast<uint32_t>(i) * 16, p_.states + at, inside ? 16 : 0);
      cp_async_16(to + Tr::kGradientsAt + static_cast<uint32_t>(i) * 16, p_.gradients + at, inside ? 16 : 0);
    }
    if (values == 0 && thread < static_cast<int>(sizeof(ChunkGates) / 16)) {
      cp_async_16(smem_address(&gates_of(head)) + static_cast<uint32_t>(thread) * 16,
                  reinterpret_cast<const char*>(p_.gates + chunk_ * p_.Hv + head) + thread * 16, 16);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ const ChunkGates& gates_of(int head) const { return sums_.gates[head % 2]; }

  // ---- products with a slice of the values

  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16<T>(sum, a[0], a[1], a[2], a[3], b0, b1);
  }
  static __device__ __forceinline__ void load_trans(uint32_t at, uint32_t (&r)[4]) {
    load_matrix_x4_trans(at, r[0], r[1], r[2], r[3]);
  }

  __device__ __forceinline__ void add_slice(uint32_t stage, Keys& of_q, Keys& plus, Keys& minus,
                                            Sums<kScoreTiles>& by_d_o, Sums<kScoreTiles>& by_d_error,
                                            float (&of_states)[2][4]) const {
    constexpr int kStateRow = Tr::kSlice / 8;
#pragma unroll
    for (int k = 0; k < kValueSlice / 16; ++k) {
      uint32_t d_o[4], error[4], d_error[4];
      load_matrix_x4(stage + slice_offset(row_of_left(), 2 * k + lane_ / 16), d_o);
      load_trans(four_blocks(stage + Tr::kErrorsAt, kChunkBlocks, 2 * k, 2 * strip_, lane_, true), error);
      load_trans(four_blocks(stage + Tr::kDErrorsAt, kChunkBlocks, 2 * k, 2 * strip_, lane_, true), d_error);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        uint32_t s[4], d[4];
        load_trans(four_blocks(stage + Tr::kStatesAt, kStateRow, 2 * k, half_ * kTiles + tile, lane_), s);
        load_trans(four_blocks(stage + Tr::kGradientsAt, kStateRow, 2 * k, half_ * kTiles + tile, lane_), d);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply(of_q.x[tile + i], d_o, s[2 * i], s[2 * i + 1]);
          multiply(plus.x[tile + i], d_error, s[2 * i], s[2 * i + 1]);
          multiply(minus.x[tile + i], error, d[2 * i], d[2 * i + 1]);
        }
        // The diagonals of S0 dS1^T: a right operand of eight columns is half of a left one of as many rows.
        if (tile / 2 == strip_) {
          const uint32_t left[4] = {s[0], s[2], s[1], s[3]};
          multiply(of_states[0], left, d[0], d[1]);
          multiply(of_states[1], left, d[2], d[3]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; tile += 2) {
        if (tile > strip_) continue;
        uint32_t e[4];
        load_trans(four_blocks(stage + Tr::kErrorsAt, kChunkBlocks, 2 * k, first_column() + tile, lane_), e);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (tile + i > strip_) continue;
          multiply(by_d_o.x[tile + i], d_o, e[2 * i], e[2 * i + 1]);
          multiply(by_d_error.x[tile + i], d_error, e[2 * i], e[2 * i + 1]);
        }
      }
    }
  }
  __device__ __forceinline__ int row_of_left() const { return strip_ * kStrip + lane_ % 16; }
  // The tiles of eight columns on and left of a strip's diagonal are shared by two warps: strip_ + 1 of them from here.
  __device__ __forceinline__ int first_column() const { return half_ * (strip_ + 1); }

  __device__ __forceinline__ void add_states(const float (&sums)[2][4]) const {
    float sum = 0.f;
    // The lane's elements of a diagonal: rows lane / 4 and that + 8 against columns 2 (lane % 4) and the next.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (lane_ / 4 == lane_ % 4 * 2 + e) sum += sums[0][e] + sums[1][2 + e];
    }
    sum = warp_sum(sum);
    if (lane_ == 0) sums_.of_states[threadIdx.x / 32] = sum;
  }
  static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
  }

  // ---- products with tokens

  // dP and D, [64 x 64], as blocks; dbeta.
  __device__ __forceinline__ void write_scores(uint32_t to, int slice, int head, const Sums<kScoreTiles>& by_d_o,
                                               const Sums<kScoreTiles>& by_d_error) const {
    const ChunkGates& gates = gates_of(head);
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
      if (tile > strip_) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row() + 8 * r, j = 8 * (first_column() + tile) + lane_ % 4 * 2;
        float score[2], correction[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float c =
              (gates.sum_high[i] - gates.sum_high[j + e]) + (gates.sum_low[i] - gates.sum_low[j + e]);
          const float G = (j + e <= i ? __expf(c) : 0.f) * gates.beta[j + e];
          const float d_error = by_d_error.x[tile][2 * r + e];
          score[e] = j + e <= i ? p_.scale * G * by_d_o.x[tile][2 * r + e] : 0.f;
          correction[e] = j + e < i ? -gates.beta[i] * G * d_error : 0.f;
          if (j + e == i && i < count_ && slice == 0) {
            p_.d_beta[((b_ * p_.sequences.T + token_ + i) * p_.Hv + head)] = d_error;
          }
        }
        const uint32_t at = static_cast<uint32_t>(((2 * strip_ + r) * kChunkBlocks + first_column() + tile) *
                                                  kBlockBytes + lane_ * 4);
        store_shared(to + at, pack2<T>(score[0], score[1]));
        store_shared(to + Tr::kScoresBytes + at, pack2<T>(correction[0], correction[1]));
      }
    }
  }
  static __device__ __forceinline__ void store_shared(uint32_t at, uint32_t x) {
    store_shared_f1(at, __uint_as_float(x));
  }

  // The factors of rows, on sums over all values.
  __device__ __forceinline__ void scale_rows(int head, Keys& of_q, Keys& plus, Keys& minus) const {
    const ChunkGates& gates = gates_of(head);
    constexpr int kLast = Tr::kChunkTokens - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row() + 8 * r;
      const float gamma = __expf(gates.sum_high[i]), beta = gates.beta[i];
      const float to_end =
          beta * __expf((gates.sum_high[kLast] - gates.sum_high[i]) + (gates.sum_low[kLast] - gates.sum_low[i]));
      float from_end = 0.f;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 k = pair_of(keys_, i, tile);
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          of_q.x[tile][e] *= p_.scale * gamma;
          plus.x[tile][e] *= -gamma * beta;
          minus.x[tile][e] *= to_end;
          from_end = fmaf(e % 2 == 0 ? k.x : k.y, minus.x[tile][e], from_end);
        }
      }
      from_end = quad_sum(from_end);
      if (lane_ % 4 == 0) sums_.from_end[half_][i] = from_end;
    }
  }
  // The lane's two keys of a tile of the warp's half, of a row of keys or queries.
  __device__ __forceinline__ float2 pair_of(uint32_t rows, int i, int tile) const {
    const uint32_t at = rows + piece_offset<Tr::kSlice>(i, half_ * kTiles + tile) + static_cast<uint32_t>(lane_ % 4) * 4;
    return unpack2<T>(__float_as_uint(load_shared_f1(at)));
  }
  // Over the four lanes that share rows.
  static __device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }

  __device__ __forceinline__ void add_scores(uint32_t scores, Keys& of_q, Keys& plus, Keys& minus) const {
    const uint32_t corrections = scores + Tr::kScoresBytes, queries = keys_ + Tr::kRowsBytes;
#pragma unroll
    for (int pair = 0; pair < kTokenStrips; ++pair) {
      if (pair <= strip_) {  // rows of dP and D
        uint32_t score[4], correction[4];
        load_matrix_x4(four_blocks(scores, kChunkBlocks, 2 * strip_, 2 * pair, lane_), score);
        load_matrix_x4(four_blocks(corrections, kChunkBlocks, 2 * strip_, 2 * pair, lane_), correction);
        add_rows(of_q, score, keys_, pair, &plus, correction);
      }
      if (pair >= strip_) {  // columns
        uint32_t score[4], correction[4];
        load_trans(four_blocks(scores, kChunkBlocks, 2 * pair, 2 * strip_, lane_, true), score);
        load_trans(four_blocks(corrections, kChunkBlocks, 2 * pair, 2 * strip_, lane_, true), correction);
        add_rows(minus, score, queries, pair);
        add_rows(minus, correction, keys_, pair);
      }
    }
  }
  // sums += left X for rows X of tokens [16 pair, 16 pair + 16); and a second product of the same rows.
  __device__ __forceinline__ void add_rows(Keys& sums, const uint32_t (&left)[4], uint32_t rows, int pair,
                                           Keys* others = nullptr, const uint32_t (&other_left)[4] = {}) const {
    const BlockReader<Tr::kSlice> reader(rows, lane_, Order::kLeftOperand);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t b[4];
      load_trans(reader.at(pair, half_ * (kTiles / 2) + tile / 2), b);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply(sums.x[tile + i], left, b[2 * i], b[2 * i + 1]);
        if (others != nullptr) multiply(others->x[tile + i], other_left, b[2 * i], b[2 * i + 1]);
      }
    }
  }

  // ---- results

  __device__ __forceinline__ void sum_tokens(const Keys& of_q, const Keys& plus, const Keys& minus) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row() + 8 * r;
      float sum = 0.f;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 k = pair_of(keys_, i, tile), q = pair_of(keys_ + Tr::kRowsBytes, i, tile);
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          const float of_k = plus.x[tile][e] - minus.x[tile][e];
          sum = fmaf(e % 2 == 0 ? q.x : q.y, of_q.x[tile][e], fmaf(e % 2 == 0 ? k.x : k.y, of_k, sum));
        }
      }
      sum = quad_sum(sum);
      if (lane_ % 4 == 0) sums_.by_token[half_][i] = sum;
    }
  }

  // From the gradients of c those of the log decays: sums over the tokens from each on. By one warp, a lane two tokens.
  __device__ __forceinline__ void store_log_decay(int slice, int head) const {
    float x[2], from_end = 0.f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = 2 * lane_ + e;
      x[e] = sums_.by_token[0][t] + sums_.by_token[1][t];
      from_end += sums_.from_end[0][t] + sums_.from_end[1][t];
    }
    float through_states = 0.f;
#pragma unroll
    for (int warp = 0; warp < kGradientsWarps; ++warp) through_states += sums_.of_states[warp];
    const float at_end = fmaf(__expf(gates_of(head).sum_high[Tr::kChunkTokens - 1]), through_states, warp_sum(from_end));
    float sum = x[0] + x[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_down_sync(0xffffffffu, sum, distance);
      if (lane_ + distance < 32) sum += other;
    }
    const float later = __shfl_down_sync(0xffffffffu, sum, 1);
    const float gradient[2] = {sum, lane_ == 31 ? x[1] : later + x[1]};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = 2 * lane_ + e;
      if (t >= count_) continue;
      float& to = p_.d_log_decay[(b_ * p_.sequences.T + token_ + t) * p_.Hv + head];
      float value = gradient[e] + at_end + (slice > 0 ? to : 0.f);
      // A first token without a state before it has nothing to forget: the sum of terms that cancel. NaN stays.
      if (t == 0 && starts_ && value == value) value = 0.f;
      to = value;
    }
  }

  // A group's dq or dk: through the l2 norm where the rows were divided by theirs, rounded once.
  __device__ __forceinline__ void store_rows(Keys& sums, uint32_t rows, const Rows& to, float* parts,
                                             const float* inverse_norms, int key_head, int first_key) const {
    if (to.data == nullptr && parts == nullptr) return;
    if (inverse_norms != nullptr) {
      __syncthreads();  // the sums of the halves are used again
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float along = 0.f;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float2 x = pair_of(rows, row() + 8 * r, tile);
          along = fmaf(x.x, sums.x[tile][2 * r], fmaf(x.y, sums.x[tile][2 * r + 1], along));
        }
        along = quad_sum(along);
        if (lane_ % 4 == 0) sums_.by_token[half_][row() + 8 * r] = along;
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row() + 8 * r;
      if (i >= count_) continue;
      const int64_t flat = (b_ * p_.sequences.T + token_ + i) * p_.Hq + key_head;
      const float scale = inverse_norms != nullptr ? inverse_norms[flat] : 1.f;
      const float along = inverse_norms != nullptr ? sums_.by_token[0][i] + sums_.by_token[1][i] : 0.f;
      uint16_t* at = const_cast<uint16_t*>(row_at(to, b_, token_ + i, key_head)) + first_key;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int key = 8 * (half_ * kTiles + tile) + lane_ % 4 * 2;
        if (first_key + key >= p_.K) continue;
        float x[2] = {sums.x[tile][2 * r], sums.x[tile][2 * r + 1]};
        if (parts != nullptr) {
          float* part = parts + flat * p_.K + first_key + key;
          part[0] = x[0];
          if (first_key + key + 1 < p_.K) part[1] = x[1];
          continue;
        }
        if (inverse_norms != nullptr) {  // dx = r (dy - <dy, y> y) with y = r x
          const float2 y = pair_of(rows, i, tile);
          x[0] = scale * fmaf(-along, y.x, x[0]);
          x[1] = scale * fmaf(-along, y.y, x[1]);
        }
        *reinterpret_cast<uint32_t*>(at + key) = pack2<T>(x[0], x[1]);
      }
    }
  }

  const GradientsParams& p_;
  GradientsSums& sums_;
  uint32_t keys_;  // tiles: keys, queries, and the stages behind them
  int lane_, strip_, half_;
  int64_t chunk_, b_, token_;  // the chunk's number, and its first token in its batch row
  int count_;                  // tokens
  bool starts_;                // a sequence, without a state
};

template <class T, int kKeys>
__global__ void __launch_bounds__(kGradientsThreads, 1)
    sm80_gradients_kernel(const __grid_constant__ GradientsParams p) {
  const int64_t chunk = blockIdx.x / p.Hq;
  if (chunk >= total_chunks(p.sequences)) return;
  Gradients<T, kKeys>(p, dynamic_shared<char>()).run(chunk, static_cast<int>(blockIdx.x % p.Hq));
}

}  // namespace flash_qla::cuda::sm80
