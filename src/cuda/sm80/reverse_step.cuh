// One step of the reverse pass for a strip of 16 value columns, by one warp (docs/kernels/sm80_backward.md has the
// equations). Tiles are transposed as in the forward: rows are value columns.
#pragma once

#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/forward_step.cuh"

namespace flash_qla::cuda::sm80 {

// A stage of the reverse pass: as the forward's, with another record and dO in the place of V. The forward pass beside
// it takes stages of the same size.
template <int kKeys>
using ReverseTraits = Traits<kKeys, ReverseRecord>;
static_assert(sizeof(ReverseRecord) >= sizeof(StepRecord));

// What numbers of T are multiplied by before they are rounded, and after the product: powers of two. fp16 has its full
// precision down to 6e-5 alone, and a gradient that has decayed is soon below.
template <class T>
struct Range {
  static constexpr bool kNarrow = std::is_same_v<T, __half>;
  static constexpr int kBias = 127, kMantissaBits = 23;
  int power = 0;  // of two. One number for both factors: with 256 keys each register counts

  Range() = default;
  __device__ __forceinline__ float up() const { return __int_as_float((kBias + power) << kMantissaBits); }
  __device__ __forceinline__ float down() const { return __int_as_float((kBias - power) << kMantissaBits); }
  // For a warp's numbers: the largest comes to 2^14, half of the way to the largest of fp16 or more.
  template <int kTiles>
  __device__ __forceinline__ explicit Range(const Sums<kTiles>& sums) {
    if constexpr (kNarrow) {
      float most = 0.f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) most = fmaxf(most, fabsf(sums.x[i][e]));
      }
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
      }
      constexpr int kTop = 14, kMost = 60, kInfinity = 255;
      const int exponent = __float_as_int(most) >> kMantissaBits;
      power = exponent == kInfinity ? 0 : min(kTop + kBias - exponent, kMost);
    }
  }
};

// Products that do not wait for each other stand one behind the other: of a pair of tiles of tokens what waits for one
// sum has the products of another in between.
template <class T, int kKeys>
class ReverseStep {
 public:
  using Tr = Traits<kKeys>;
  static constexpr int kTokenTiles = Tr::kTokenTiles, kKeyTiles = Tr::kKeyTiles, kPairs = kTokenTiles / 2;
  using State = Sums<kKeyTiles>;
  using Tokens = Sums<kTokenTiles>;
  using PackedTokens = Packed<kTokenTiles>;
  using Blocks = BlockStream<kKeys <= 192>;  // with 256 keys there are no registers for more

  // `stage`: shared address of the step's stage; `values`: of this strip's dO in it.
  __device__ __forceinline__ ReverseStep(uint32_t stage, uint32_t values, int lane)
      : stage_(stage), values_(values), lane_(lane) {}

  // dV' = diag(gamma_C / gamma) K dS1 + P^T dO, rounded as well; dS becomes gamma_C dS1 + Q^T diag(scale gamma) dO in
  // the range of scaled dO. `packed`: dS1 rounded in its range.
  __device__ __forceinline__ void begin(State& state, const Packed<kKeyTiles>& packed, const Range<T>& of_state,
                                        Tokens& sums, PackedTokens& rounded, Range<T>& of_d_o,
                                        Range<T>& of_sums) const {
    sums.clear();
    const BlockReader<kKeys> keys(stage_ + Tr::kKeysAt, lane_, Order::kRightOperand);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        uint32_t b[4];
        load_matrix_x4(keys.at(pair, k), b);
        mma_m16n8k16<T>(sums.x[2 * pair], packed.x[k], b[0], b[1]);
        mma_m16n8k16<T>(sums.x[2 * pair + 1], packed.x[k], b[2], b[3]);
      }
    }
    // Without it ptxas brings the loads of dO forward over the products, and with 256 keys it spills for them.
    if (kKeys == 256) __syncwarp();
    Tokens scaled_sums;
    PackedTokens scaled;
    of_d_o = scale_d_o(scaled_sums, scaled);
    state.scale(decay() * of_state.down() * of_d_o.up());
    Blocks blocks;
    blocks.start(record_at(offsetof(ReverseRecord, scores)), lane_);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
      multiply_tokens(sums, pair, offsetof(ReverseRecord, to_end), of_state.down());
#pragma unroll
      for (int row = pair; row < kPairs; ++row) {
        uint32_t d_o[4];
        load_values(values_, row, lane_, d_o);
        multiply_triangle(blocks, sums, d_o, row, pair);
      }
      add_rows(state, scaled.x[pair], Tr::kQueriesAt, pair);
    }
    of_sums = pack_in_range(sums, rounded);
  }

  // Z = dV' + strict(G o A)^T dV'.
  __device__ __forceinline__ void solve(Tokens& sums, const PackedTokens& rounded, const Range<T>& of_sums) const {
    Blocks blocks;
    blocks.start(record_at(offsetof(ReverseRecord, inverse)), lane_);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
#pragma unroll
      for (int row = pair; row < kPairs; ++row) multiply_triangle(blocks, sums, rounded.x[row], row, pair);
    }
    if (Range<T>::kNarrow) sums.scale(of_sums.down());
  }

  // dV = B Z, rounded; dS0 = dS - K^T diag(gamma) dV.
  __device__ __forceinline__ void finish(State& state, Tokens& sums, PackedTokens& d_v, const Range<T>& of_d_o) const {
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) multiply_tokens(sums, pair, offsetof(ReverseRecord, beta));
    pack<T>(sums, d_v);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) multiply_tokens(sums, pair, offsetof(ReverseRecord, minus_gamma));
    PackedTokens left;
    const Range<T> range = pack_in_range(sums, left);
    if (Range<T>::kNarrow) state.scale(of_d_o.down() * range.up());
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) add_rows(state, left.x[pair], Tr::kKeysAt, pair);
    if (Range<T>::kNarrow) state.scale(range.down());
  }

  // dS += factor Q^T R, R being what rounding has left of diag(scale gamma) dO. Nothing is left of what is not finite.
  __device__ __forceinline__ void add_rest(State& state, float factor) const {
    static_assert(!Range<T>::kNarrow);
    Tokens rest;
    PackedTokens packed;
    scale_d_o(rest, packed);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 kept = unpack2<T>(packed.x[i / 2][i % 2 * 2 + e / 2]);
        const float left = factor * (rest.x[i][e] - (e % 2 == 0 ? kept.x : kept.y));
        rest.x[i][e] = isfinite(left) ? left : 0.f;
      }
    }
    pack<T>(rest, packed);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) add_rows(state, packed.x[pair], Tr::kQueriesAt, pair);
  }

  // e^c at the step's end.
  __device__ __forceinline__ float decay() const { return load_shared_f1(record_at(offsetof(ReverseRecord, decay))); }

  // Rounded in the range that is returned; the sums are left in it.
  template <int kTiles>
  static __device__ __forceinline__ Range<T> pack_in_range(Sums<kTiles>& sums, Packed<kTiles>& packed) {
    const Range<T> range(sums);
    if (Range<T>::kNarrow) sums.scale(range.up());
    pack<T>(sums, packed);
    return range;
  }

 private:
  // scale gamma dO in the range that is returned, and rounded.
  __device__ __forceinline__ Range<T> scale_d_o(Tokens& sums, PackedTokens& scaled) const {
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
      uint32_t d_o[4];
      load_values(values_, pair, lane_, d_o);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = unpack2<T>(d_o[i]);
        sums.x[2 * pair + i / 2][i % 2 * 2] = x.x;
        sums.x[2 * pair + i / 2][i % 2 * 2 + 1] = x.y;
      }
      multiply_tokens(sums, pair, offsetof(ReverseRecord, scaled_gamma));
    }
    return pack_in_range(sums, scaled);
  }

  // Columns of two tiles by a number of each token.
  __device__ __forceinline__ void multiply_tokens(Tokens& sums, int pair, size_t vector, float factor = 1.f) const {
#pragma unroll
    for (int i = 2 * pair; i < 2 * pair + 2; ++i) {
      const float2 by = token_pair(record_at(vector), i, lane_);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.x[i][e] *= (e % 2 == 0 ? by.x : by.y) * factor;
    }
  }

  // sums += left M of two tiles of columns, for a pair of block rows of a triangular matrix M of the record.
  __device__ __forceinline__ void multiply_triangle(Blocks& blocks, Tokens& sums, const uint32_t (&left)[4], int row,
                                                    int pair) const {
#pragma unroll
    for (int column = 2 * pair; column < 2 * pair + 2; ++column) {
      const bool above = row == pair && column % 2 == 1;
      const uint32_t upper = above ? 0u : blocks.take(transposed_block(2 * row, column));
      const uint32_t lower = blocks.take(transposed_block(2 * row + 1, column));
      mma_m16n8k16<T>(sums.x[column], left, upper, lower);
    }
  }

  // dS^T += left X for the rows X of keys or queries of a pair of tiles of tokens.
  __device__ __forceinline__ void add_rows(State& state, const uint32_t (&left)[4], int rows_at, int pair) const {
    const BlockReader<kKeys> rows(stage_ + static_cast<uint32_t>(rows_at), lane_, Order::kLeftOperand);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; tile += 2) {
      uint32_t b[4];
      load_matrix_x4_trans(rows.at(pair, tile / 2), b);
      mma_m16n8k16<T>(state.x[tile], left, b[0], b[1]);
      mma_m16n8k16<T>(state.x[tile + 1], left, b[2], b[3]);
    }
  }

  __device__ __forceinline__ uint32_t record_at(size_t offset) const {
    return stage_ + Tr::kRecordAt + static_cast<uint32_t>(offset);
  }

  uint32_t stage_, values_;
  int lane_;
};

}  // namespace flash_qla::cuda::sm80
