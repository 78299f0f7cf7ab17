// The gradients of q, k, the gates and beta, chunk by chunk, from the states and errors that the passes have left. A
// block takes a chunk of 64 tokens and a key head, and the value heads of its group one after another; a warp has 16
// tokens and half of the keys. With more than 128 keys the block goes through them in two slices.
//   dQ    = scale diag(gamma) dO S0^T + dP K             dP = scale G o (dO E^T) B
//   plus  = -diag(gamma) B Z S0^T + D K                  D  = -B (G o strict(Z E^T)) B
//   minus = diag(gamma_C / gamma) B E dS1^T + dP^T Q + D^T K
// and dK = plus + minus, dbeta_i = <k_i, minus_i> / beta_i = <Z_i, E_i>, and of the sum of log decays up to token i the
// gradient is <q_i, dq_i> + <k_i, plus_i> - <k_i, minus_i>, to which the chunk's end adds gamma_C <dS1, S0> and what
// dS1 has given to minus.
#pragma once

#include "cuda/sm80/forward_step.cuh"
#include "cuda/sm80/gradients_memory.cuh"

namespace flash_qla::cuda::sm80 {

template <class T, int kKeys>
class Gradients {
  using Tr = GradientsTraits<kKeys>;
  static constexpr int kTiles = Tr::kTiles, kScoreTiles = kTokenStrips;
  using Keys = Sums<kTiles>;
  using Scores = Sums<kScoreTiles>;

 public:
  __device__ __forceinline__ explicit Gradients(const GradientsParams& p) : p_(p), lane_(threadIdx.x % 32) {}

  __device__ void run(int64_t chunk, int key_head) {
    if (threadIdx.x == 0) find_place(chunk, key_head);
    for (int slice = 0; slice < Tr::kSlices; ++slice) {
      __syncthreads();
      if (Tr::kSlices > 1 && threadIdx.x == 0) memory().slice = slice;
      __syncthreads();
      run_slice();
    }
  }

 private:
  __device__ void find_place(int64_t chunk, int key_head) const {
    const DeviceSequence sequence = sequence_at(p_.sequences, sequence_of_chunk(p_.sequences, chunk));
    const int64_t t0 = (chunk - sequence.first_chunk) * kChunkSize, left = sequence.length - t0;
    const int64_t token = sequence.begin + t0, matrix = chunk * p_.Hv + key_head * p_.group;
    const int64_t token_bytes = matrix * p_.value_blocks * kChunkBlocks * kBlockBytes;
    const int64_t state_bytes = matrix * p_.value_blocks * (kKeys / 8) * kBlockBytes;
    memory().errors = p_.matrices.errors + token_bytes;
    memory().d_errors = p_.matrices.d_errors + token_bytes;
    memory().states = p_.matrices.states + state_bytes;
    memory().gradients = p_.matrices.gradients + state_bytes;
    memory().d_o = row_at(p_.d_o, sequence.b, token, key_head * p_.group);
    memory().gates = p_.gates + matrix;
    memory().row = sequence.b * p_.sequences.T + token;
    memory().d_beta = p_.d_beta + memory().row * p_.Hv + key_head * p_.group;
    memory().d_log_decay = p_.d_log_decay + memory().row * p_.Hv + key_head * p_.group;
    memory().key_head = key_head;
    memory().b = static_cast<int>(sequence.b);
    memory().token = static_cast<int>(token);
    memory().count = static_cast<int>(left < kChunkSize ? left : kChunkSize);
    memory().starts = t0 == 0 && p_.starts_from_zero;
  }

  __device__ void run_slice() {
    const int value_slices = (p_.value_blocks + 3) / 4;
    copy_slice(keys(), p_.k);
    copy_slice(keys() + Tr::kRowsBytes, p_.q);
    load_values(0, 0, 0);
    int parity = 0;
    Keys dq{}, dk{};
    for (int member = 0; member < p_.group; ++member) {
      Keys of_q{}, plus{}, minus{};   // dO S0^T, Z S0^T and E dS1^T, before the factors of their rows
      Scores by_d_o{}, by_d_error{};  // dO E^T and Z E^T
      float of_states = 0.f;          // <dS1, S0>
      for (int values = 0; values < value_slices; ++values, parity ^= 1) {
        const bool more = values + 1 < value_slices;
        if (more || member + 1 < p_.group) {
          load_values(more ? member : member + 1, more ? values + 1 : 0, parity ^ 1);
        } else {
          cp_async_commit();
        }
        cp_async_wait<1>();
        __syncthreads();
        recompute_from(lane_);
        add_slice(stage(parity), of_q, plus, minus, by_d_o, by_d_error, of_states);
        __syncthreads();
      }
      parity ^= 1;  // the last stage once more
      const ChunkGates& gates = memory().of_heads[member % 3];
      write_scores(stage(parity), gates, by_d_o, by_d_error, slice() == 0 ? memory().d_beta + member : nullptr);
      of_states = warp_sum(of_states);
      if (lane_ == 0) memory().of_states[threadIdx.x / 32] = of_states;
      scale_rows(gates, of_q, plus, minus);
      __syncthreads();
      add_scores(stage(parity), of_q, plus, minus);
      sum_tokens(of_q, plus, minus);
      __syncthreads();
      if (threadIdx.x < 32) store_gates(gates, member);
      parity ^= 1;
      dq.each([&](float& x, int i, int e) {
        x += of_q.x[i][e];
        dk.x[i][e] += plus.x[i][e] + minus.x[i][e];
      });
    }
    store_rows(dq, keys() + Tr::kRowsBytes, p_.dq);
    store_rows(dk, keys(), p_.dk);
  }

  // Shared memory: tiles of keys and of queries, two stages, and the rest.
  static __device__ __forceinline__ uint32_t keys() { return smem_address(dynamic_shared<char>()); }
  static __device__ __forceinline__ GradientsMemory& memory() {
    return *reinterpret_cast<GradientsMemory*>(dynamic_shared<char>() + 2 * Tr::kRowsBytes + 2 * Tr::kStageBytes);
  }
  __device__ __forceinline__ uint32_t stage(int parity) const {
    return keys() + static_cast<uint32_t>(2 * Tr::kRowsBytes + parity * Tr::kStageBytes);
  }
  __device__ __forceinline__ int strip() const { return threadIdx.x / 32 % kTokenStrips; }
  __device__ __forceinline__ int half() const { return threadIdx.x / 32 / kTokenStrips; }
  __device__ __forceinline__ int slice() const { return Tr::kSlices > 1 ? memory().slice : 0; }
  // Rows of tokens that the lane has of a C fragment: this and the eighth after it.
  __device__ __forceinline__ int row() const { return strip() * kStrip + lane_ / 4; }

  // ---- loads

  // The slice's keys of rows of q or k.
  __device__ __forceinline__ void copy_slice(uint32_t tile, const Rows& rows) const {
    const uint16_t* from = row_at(rows, memory().b, memory().token, memory().key_head) + slice() * Tr::kSlice;
    TileCopier<Tr::kSlice, kChunk, kGradientsThreads>(min(rows.pieces - slice() * Tr::kSlice / 8, Tr::kSlice / 8),
                                                      threadIdx.x)
        .copy(tile, from, rows.token, memory().count);
  }

  // Value columns [32 values, 32 values + 32) of a head of the group into a stage: what belongs to tokens by half of
  // the warps, the states by the others. Blocks past the last one become zero.
  __device__ __forceinline__ void load_values(int member, int values, int parity) const {
    constexpr int kThreads = kGradientsThreads / 2;
    int thread = threadIdx.x;
    recompute_from(thread);
    const bool of_tokens = thread < kThreads;
    thread %= kThreads;
    const uint32_t to = stage(parity) + static_cast<uint32_t>(thread) * 16;
    const int first = member * p_.value_blocks + kValueSlice / 8 * values;  // block of value columns
    const int room = p_.value_blocks - kValueSlice / 8 * values;
    if (of_tokens) {
      // Steps without tokens have left nothing.
      constexpr int kTurns = Tr::kTokensBytes / 16 / kThreads;
      const bool left_something = thread / 8 % kChunkBlocks * 8 / kStep * kStep < memory().count;
      const uint32_t at = static_cast<uint32_t>(first * kChunkBlocks * kBlockBytes + thread * 16);
      const int row = thread / 4, d_o_piece = kValueSlice / 8 * values + thread % 4, count = memory().count;
      const uint16_t* d_o = memory().d_o + row * p_.d_o.token + member * p_.d_o.head + 8 * d_o_piece;
      const bool given = d_o_piece < p_.d_o.pieces;
      const char *errors = memory().errors, *d_errors = memory().d_errors;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        constexpr int kRows = kThreads / 4, kValueBlocks = kThreads / 8 / kChunkBlocks;
        const bool inside = left_something && turn * kValueBlocks + thread / 8 / kChunkBlocks < room;
        const uint32_t piece = inside ? at + turn * kThreads * 16 : 0u;
        cp_async_16_or_zero(to + Tr::kErrorsAt + turn * kThreads * 16, errors + piece, inside);
        cp_async_16_or_zero(to + Tr::kDErrorsAt + turn * kThreads * 16, d_errors + piece, inside);
        const bool reads = given && turn * kRows + row < count;
        const void* from = reads ? static_cast<const void*>(d_o + turn * kRows * p_.d_o.token) : errors;
        cp_async_16_or_zero(stage(parity) + piece_offset<kValueSlice>(row, thread % 4) + turn * kRows * 64, from,
                            reads);
      }
      if (values == 0 && thread < static_cast<int>(sizeof(ChunkGates) / 16)) {
        cp_async_16(smem_address(&memory().of_heads[member % 3]) + static_cast<uint32_t>(thread) * 16,
                    reinterpret_cast<const char*>(memory().gates + member) + thread * 16);
      }
    } else {
      constexpr int kTurns = Tr::kStateBytes / 16 / kThreads;
      static_assert(Tr::kStateBytes % (16 * kThreads) == 0);
      const char *states = memory().states, *gradients = memory().gradients;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int i = turn * kThreads + thread, row = i / Tr::kSlice;  // a row of blocks has kSlice pieces
        const bool inside = row < room;
        const uint32_t at =
            inside ? static_cast<uint32_t>(((first + row) * kKeys + slice() * Tr::kSlice) * 16 + i % Tr::kSlice * 16)
                   : 0u;
        cp_async_16_or_zero(to + Tr::kStatesAt + turn * kThreads * 16, states + at, inside);
        cp_async_16_or_zero(to + Tr::kGradientsAt + turn * kThreads * 16, gradients + at, inside);
      }
    }
    cp_async_commit();
  }

  // ---- products with a slice of the values

  __device__ __forceinline__ void add_slice(uint32_t stage, Keys& of_q, Keys& plus, Keys& minus, Scores& by_d_o,
                                            Scores& by_d_error, float& of_states) const {
    constexpr int kStateRow = Tr::kSlice / 8;
#pragma unroll
    for (int k = 0; k < kValueSlice / 16; ++k) {
      uint32_t d_o[4], d_error[4];
      load_matrix_x4(stage + piece_offset<kValueSlice>(strip() * kStrip + lane_ % 16, 2 * k + lane_ / 16), d_o);
      load_matrix_x4_trans(four_blocks(stage + Tr::kDErrorsAt, kChunkBlocks, 2 * k, 2 * strip(), lane_, true), d_error);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        uint32_t s[4];
        load_matrix_x4_trans(four_blocks(stage + Tr::kStatesAt, kStateRow, 2 * k, half() * kTiles + tile, lane_), s);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16<T>(of_q.x[tile + i], d_o, s[2 * i], s[2 * i + 1]);
          mma_m16n8k16<T>(plus.x[tile + i], d_error, s[2 * i], s[2 * i + 1]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kScoreTiles; tile += 2) {
        if (tile > strip()) continue;
        uint32_t e[4];
        load_matrix_x4_trans(four_blocks(stage + Tr::kErrorsAt, kChunkBlocks, 2 * k, first_column() + tile, lane_), e);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (tile + i > strip()) continue;
          mma_m16n8k16<T>(by_d_o.x[tile + i], d_o, e[2 * i], e[2 * i + 1]);
          mma_m16n8k16<T>(by_d_error.x[tile + i], d_error, e[2 * i], e[2 * i + 1]);
        }
      }
      uint32_t error[4];
      load_matrix_x4_trans(four_blocks(stage + Tr::kErrorsAt, kChunkBlocks, 2 * k, 2 * strip(), lane_, true), error);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        multiply_block<T, true>(minus, tile, error,
                                four_blocks(stage + Tr::kGradientsAt, kStateRow, 2 * k, half() * kTiles + tile, lane_));
      }
    }
    // The diagonals of S0 dS1^T, of two tiles of keys a warp: a right operand of eight columns is half of a left one of
    // as many rows. A lane has rows lane / 4 and that + 8, and columns 2 (lane % 4) and the next.
    if (2 * kTokenStrips > kTiles && 2 * strip() >= kTiles) return;
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kValueSlice / 16; ++k) {
      uint32_t s[4], d[4];
      const uint32_t at = four_blocks(stage, kStateRow, 2 * k, half() * kTiles + 2 * strip(), lane_);
      load_matrix_x4_trans(at + Tr::kStatesAt, s);
      load_matrix_x4_trans(at + Tr::kGradientsAt, d);
      const uint32_t upper[4] = {s[0], 0u, s[1], 0u}, lower[4] = {0u, s[2], 0u, s[3]};
      mma_m16n8k16<T>(sums, upper, d[0], d[1]);
      mma_m16n8k16<T>(sums, lower, d[2], d[3]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (lane_ / 4 == lane_ % 4 * 2 + e) of_states += sums[e] + sums[2 + e];
    }
  }
  // The tiles of eight columns on and left of a strip's diagonal are shared by two warps: strip() + 1 of them from
  // here.
  __device__ __forceinline__ int first_column() const { return half() * (strip() + 1); }

  // ---- products with tokens

  // dP and D, [64 x 64], as blocks. d_beta: of the head and the first token, where it is not from minus; null: it is
  // there.
  __device__ __forceinline__ void write_scores(uint32_t to, const ChunkGates& gates, const Scores& by_d_o,
                                               const Scores& by_d_error, float* d_beta) const {
#pragma unroll
    for (int tile = 0; tile < kScoreTiles; ++tile) {
      if (tile > strip()) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row() + 8 * r, j = 8 * (first_column() + tile) + lane_ % 4 * 2;
        float score[2], correction[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float c = (gates.high[i] - gates.high[j + e]) + (gates.low[i] - gates.low[j + e]);
          const float G = (j + e <= i ? exp2_approx(c) : 0.f) * gates.beta[j + e];
          const float d_error = by_d_error.x[tile][2 * r + e];
          score[e] = j + e <= i ? p_.scale * G * by_d_o.x[tile][2 * r + e] : 0.f;
          correction[e] = j + e < i ? -gates.beta[i] * G * d_error : 0.f;
          if (j + e == i && i < memory().count && d_beta != nullptr && !from_minus<T>(gates.beta[i])) {
            d_beta[static_cast<int64_t>(i) * p_.Hv] = d_error;
          }
        }
        const uint32_t at =
            static_cast<uint32_t>(((2 * strip() + r) * kChunkBlocks + first_column() + tile) * kBlockBytes + lane_ * 4);
        store_shared_f1(to + at, __uint_as_float(pack2<T>(score[0], score[1])));
        store_shared_f1(to + Tr::kScoresBytes + at, __uint_as_float(pack2<T>(correction[0], correction[1])));
      }
    }
  }

  // The factors of rows, on sums over all values.
  __device__ __forceinline__ void scale_rows(const ChunkGates& gates, Keys& of_q, Keys& plus, Keys& minus) const {
    constexpr int kLast = kChunk - 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row() + 8 * r;
      const float gamma = exp2_approx(gates.high[i]), beta = gates.beta[i];
      const float to_end = beta * exp2_approx((gates.high[kLast] - gates.high[i]) + (gates.low[kLast] - gates.low[i]));
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          of_q.x[tile][e] *= p_.scale * gamma;
          plus.x[tile][e] *= -gamma * beta;
          minus.x[tile][e] *= to_end;
        }
      }
      const float from_end = quad_sum(dot(keys(), i, r, minus));
      if (lane_ % 4 == 0) memory().from_end[half()][i] = from_end;
    }
  }
  // The lane's two keys of a tile of the warp's half, of a row of keys or queries.
  __device__ __forceinline__ float2 pair_of(uint32_t rows, int i, int tile) const {
    const uint32_t at =
        rows + piece_offset<Tr::kSlice>(i, half() * kTiles + tile) + static_cast<uint32_t>(lane_ % 4) * 4;
    return unpack2<T>(__float_as_uint(load_shared_f1(at)));
  }

  __device__ __forceinline__ void add_scores(uint32_t scores, Keys& of_q, Keys& plus, Keys& minus) const {
    const uint32_t corrections = scores + Tr::kScoresBytes, queries = keys() + Tr::kRowsBytes;
#pragma unroll
    for (int pair = 0; pair < kTokenStrips; ++pair) {
      if (pair <= strip()) {  // rows of dP and D
        uint32_t score[4], correction[4];
        load_matrix_x4(four_blocks(scores, kChunkBlocks, 2 * strip(), 2 * pair, lane_), score);
        load_matrix_x4(four_blocks(corrections, kChunkBlocks, 2 * strip(), 2 * pair, lane_), correction);
        add_rows(of_q, score, keys(), pair, &plus, correction);
      }
      if (pair >= strip()) {  // columns
        uint32_t score[4], correction[4];
        load_matrix_x4_trans(four_blocks(scores, kChunkBlocks, 2 * pair, 2 * strip(), lane_, true), score);
        load_matrix_x4_trans(four_blocks(corrections, kChunkBlocks, 2 * pair, 2 * strip(), lane_, true), correction);
        add_rows(minus, score, queries, pair);
        add_rows(minus, correction, keys(), pair);
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
      load_matrix_x4_trans(reader.at(pair, half() * (kTiles / 2) + tile / 2), b);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        mma_m16n8k16<T>(sums.x[tile + i], left, b[2 * i], b[2 * i + 1]);
        if (others != nullptr) mma_m16n8k16<T>(others->x[tile + i], other_left, b[2 * i], b[2 * i + 1]);
      }
    }
  }

  // ---- results

  __device__ __forceinline__ void sum_tokens(const Keys& of_q, const Keys& plus, const Keys& minus) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row() + 8 * r;
      const float of_minus = dot(keys(), i, r, minus), of_keys = dot(keys(), i, r, plus) - of_minus;
      const float sum = quad_sum(dot(keys() + Tr::kRowsBytes, i, r, of_q) + of_keys);
      const float sum_of_minus = quad_sum(of_minus);
      if (lane_ % 4 == 0) {
        memory().by_token[half()][i] = sum;
        memory().of_minus[half()][i] = sum_of_minus;
      }
    }
  }

  // dbeta from minus, and from the gradients of c those of the log decays: sums over the tokens from each on. By one
  // warp, a lane two tokens. A second slice of the keys adds to what the first one has left.
  __device__ __forceinline__ void store_gates(const ChunkGates& gates, int member) const {
    float x[2], from_end = 0.f;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int t = 2 * lane_ + e;
      x[e] = memory().by_token[0][t] + memory().by_token[1][t];
      from_end += memory().from_end[0][t] + memory().from_end[1][t];
    }
    float through_states = 0.f;
#pragma unroll
    for (int warp = 0; warp < kGradientsWarps; ++warp) through_states += memory().of_states[warp];
    const float at_end = fmaf(exp2_approx(gates.high[kChunk - 1]), through_states, warp_sum(from_end));
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
      if (t >= memory().count) continue;
      const int64_t at = static_cast<int64_t>(t) * p_.Hv + member;
      if (const float beta = gates.beta[t]; from_minus<T>(beta)) {
        float& to = memory().d_beta[at];
        to = (memory().of_minus[0][t] + memory().of_minus[1][t]) / beta + (slice() > 0 ? to : 0.f);
      }
      float& to = memory().d_log_decay[at];
      float value = gradient[e] + at_end + (slice() > 0 ? to : 0.f);
      // A first token without a state before it has nothing to forget: the sum of terms that cancel. NaN stays.
      if (t == 0 && memory().starts && value == value) value = 0.f;
      to = value;
    }
  }

  // A group's dq or dk: through the l2 norm where the rows were divided by theirs, rounded once. Slices of the keys
  // leave parts of what is to go through it.
  __device__ __forceinline__ void store_rows(Keys& sums, uint32_t rows, const KeyGradients& to) const {
    if (Tr::kSlices == 1 && to.inverse_norms.data != nullptr) {
      __syncthreads();  // the sums of the halves are used again
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = row() + 8 * r;
        const float along = quad_sum(dot(rows, i, r, sums));
        if (lane_ % 4 == 0) memory().by_token[half()][i] = along;
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // dx = (dy - <dy, y> y) / |x| with y = x / |x|
        const int i = row() + 8 * r;
        if (i >= memory().count) continue;
        const float scale = load<float>(to.inverse_norms,
                                        offset_of(to.inverse_norms, memory().b, memory().token + i, memory().key_head));
        const float along = memory().by_token[0][i] + memory().by_token[1][i];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const float2 y = pair_of(rows, i, tile);
          sums.x[tile][2 * r] = scale * fmaf(-along, y.x, sums.x[tile][2 * r]);
          sums.x[tile][2 * r + 1] = scale * fmaf(-along, y.y, sums.x[tile][2 * r + 1]);
        }
      }
    }
    const int first_key = slice() * Tr::kSlice + 8 * half() * kTiles + lane_ % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row() + 8 * r;
      if (i >= memory().count) continue;
      if (Tr::kSlices > 1 && to.parts != nullptr) {
        float* at = to.parts + ((memory().row + i) * p_.Hq + memory().key_head) * p_.K + first_key;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (first_key + 8 * tile + e < p_.K) at[8 * tile + e] = sums.x[tile][2 * r + e];
          }
        }
      } else if (to.rows.data != nullptr) {
        uint16_t* at =
            const_cast<uint16_t*>(row_at(to.rows, memory().b, memory().token + i, memory().key_head)) + first_key;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (first_key + 8 * tile >= p_.K) break;
          *reinterpret_cast<uint32_t*>(at + 8 * tile) = pack2<T>(sums.x[tile][2 * r], sums.x[tile][2 * r + 1]);
        }
      }
    }
  }
  // The lane's part of <row i of keys or queries, row r of the sums>.
  __device__ __forceinline__ float dot(uint32_t rows, int i, int r, const Keys& sums) const {
    recompute_from(i);
    float sum = 0.f;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float2 x = pair_of(rows, i, tile);
      sum = fmaf(x.x, sums.x[tile][2 * r], fmaf(x.y, sums.x[tile][2 * r + 1], sum));
    }
    return sum;
  }

  const GradientsParams& p_;
  int lane_;
};

template <class T, int kKeys>
__global__ void __launch_bounds__(kGradientsThreads, 1)
    sm80_gradients_kernel(const __grid_constant__ GradientsParams p) {
  const int64_t chunk = blockIdx.x / p.Hq;
  if (chunk >= total_chunks(p.sequences)) return;
  Gradients<T, kKeys>(p).run(chunk, static_cast<int>(blockIdx.x % p.Hq));
}

}  // namespace flash_qla::cuda::sm80
