// One step of the reverse pass for a strip of 16 value columns, by one warp (docs/kernels/sm80_backward.md has the
// equations). Tiles are transposed as in the forward: rows are value columns.
#pragma once

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
  __device__ __forceinline__ explicit Range(Sums<kTiles>& sums) {
    if constexpr (kNarrow) {
      float most = 0.f;
      sums.each([&](float x, int, int) { most = fmaxf(most, fabsf(x)); });
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
  using Blocks = BlockStream<kKeys <= 192, true>;  // with 256 keys there are no registers for more

  explicit __device__ __forceinline__ ReverseStep(const StepStage<T, kKeys>& stage) : s_(stage) {}

  // `sums`: dV' = diag(gamma_C / gamma) K dS1 + P^T dO, then Z = dV' + strict(G o A)^T dV'; dS becomes
  // gamma_C dS1 + Q^T diag(scale gamma) dO in the range of scaled dO. `packed`: dS1 rounded in its range.
  __device__ __forceinline__ void begin(State& state, const Packed<kKeyTiles>& packed, const Range<T>& of_state,
                                        Tokens& sums) {
    sums.clear();
    const BlockReader<kKeys> keys(s_.stage + Tr::kKeysAt, s_.lane, Order::kRightOperand);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) {
        multiply_block<T, false>(sums, 2 * pair, packed.x[k], keys.at(pair, k));
      }
    }
    // Without it ptxas brings the loads of dO forward over the products, and with 256 keys it spills for them.
    if (kKeys == 256) __syncwarp();
    Tokens scaled_sums;
    PackedTokens scaled;
    of_d_o_ = scale_d_o(scaled_sums, scaled);
    state.scale(decay() * of_state.down() * of_d_o_.up());
    Blocks scores;
    scores.start(s_.record_at(offsetof(ReverseRecord, scores)), s_.lane);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
      multiply_tokens(sums, pair, offsetof(ReverseRecord, to_end), of_state.down());
#pragma unroll
      for (int row = pair; row < kPairs; ++row) {
        uint32_t d_o[4];
        load_values(s_.values, row, s_.lane, d_o);
        multiply_triangle(scores, sums, d_o, row, pair);
      }
      s_.add_rows(state, scaled.x[pair], Tr::kQueriesAt, pair);
    }
    PackedTokens rounded;
    const Range<T> range = pack_in_range(sums, rounded);
    Blocks inverse;
    inverse.start(s_.record_at(offsetof(ReverseRecord, inverse)), s_.lane);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
#pragma unroll
      for (int row = pair; row < kPairs; ++row) multiply_triangle(inverse, sums, rounded.x[row], row, pair);
    }
    if (Range<T>::kNarrow) sums.scale(range.down());
  }

  // Returns dV = B Z, rounded; dS0 = dS - K^T diag(gamma) dV. `sums`: Z.
  __device__ __forceinline__ PackedTokens finish(State& state, Tokens& sums) const {
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) multiply_tokens(sums, pair, offsetof(ReverseRecord, beta));
    const PackedTokens d_v = pack<T>(sums);
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) multiply_tokens(sums, pair, offsetof(ReverseRecord, minus_gamma));
    PackedTokens left;
    const Range<T> range = pack_in_range(sums, left);
    if (Range<T>::kNarrow) state.scale(of_d_o_.down() * range.up());
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) s_.add_rows(state, left.x[pair], Tr::kKeysAt, pair);
    if (Range<T>::kNarrow) state.scale(range.down());
    return d_v;
  }

  // dS += factor Q^T R, R being what rounding has left of diag(scale gamma) dO. Nothing is left of what is not finite.
  __device__ __forceinline__ void add_rest(State& state, float factor) const {
    static_assert(!Range<T>::kNarrow);
    Tokens rest;
    PackedTokens packed;
    scale_d_o(rest, packed);
    rest.each([&](float& x, int i, int e) {
      const float2 kept = unpack2<T>(packed.x[i / 2][i % 2 * 2 + e / 2]);
      const float left = factor * (x - (e % 2 == 0 ? kept.x : kept.y));
      x = isfinite(left) ? left : 0.f;
    });
    packed = pack<T>(rest);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) s_.add_rows(state, packed.x[pair], Tr::kQueriesAt, pair);
  }

  // e^c at the step's end.
  __device__ __forceinline__ float decay() const {
    return load_shared_f1(s_.record_at(offsetof(ReverseRecord, decay)));
  }

  // Rounded in the range that is returned; the sums are left in it.
  template <int kTiles>
  static __device__ __forceinline__ Range<T> pack_in_range(Sums<kTiles>& sums, Packed<kTiles>& packed) {
    const Range<T> range(sums);
    if (Range<T>::kNarrow) sums.scale(range.up());
    packed = pack<T>(sums);
    return range;
  }

 private:
  // scale gamma dO in the range that is returned, and rounded.
  __device__ __forceinline__ Range<T> scale_d_o(Tokens& sums, PackedTokens& scaled) const {
#pragma unroll
    for (int pair = kPairs - 1; pair >= 0; --pair) {
      uint32_t d_o[4];
      load_values(s_.values, pair, s_.lane, d_o);
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
      const float2 by = s_.token_pair(vector, i);
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
      const uint32_t upper = above ? 0u : blocks.take(reverse_block(2 * row, column));
      const uint32_t lower = blocks.take(reverse_block(2 * row + 1, column));
      mma_m16n8k16<T>(sums.x[column], left, upper, lower);
    }
  }

  StepStage<T, kKeys> s_;
  Range<T> of_d_o_;  // in which the state is between begin() and finish()
};

}  // namespace flash_qla::cuda::sm80
