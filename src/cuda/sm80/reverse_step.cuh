// One step of the reverse pass for a strip of 16 value columns, by one warp (docs/kernels/sm80.md has the equations).
// Tiles are transposed as in the forward: rows are value columns.
#pragma once

#include "cuda/sm80/backward_params.h"
#include "cuda/sm80/forward_step.cuh"

namespace flash_qla::cuda::sm80 {

// A stage of the reverse pass: as the forward's, with another record and dO in the place of V. The forward pass beside
// it takes stages of the same size.
template <int kKeys>
struct ReverseTraits {
  using Tr = Traits<kKeys>;
  using Record = ReverseRecord<Tr::kStep>;
  static_assert(sizeof(Record) >= sizeof(typename Tr::Record) && sizeof(Record) % 16 == 0);
  static constexpr int kValuesAt = Tr::kRecordAt + static_cast<int>(sizeof(Record));
  static constexpr int stage_bytes(int strips) { return kValuesAt + strips * Tr::kValueBytes; }
  static constexpr int stages(int strips) {
    return Tr::kStagesAt + 3 * stage_bytes(strips) <= static_cast<int>(kMostSharedBytes) ? 3 : 2;
  }
  static constexpr int shared_bytes(int strips) { return Tr::kStagesAt + stages(strips) * stage_bytes(strips); }
  static_assert(shared_bytes(most_strips(kKeys)) <= static_cast<int>(kMostSharedBytes));
};

// What numbers of T are multiplied by before they are rounded, and after the product: powers of two. fp16 has its full
// precision down to 6e-5 alone, and a gradient that has decayed is soon below.
template <class T>
struct Range {
  static constexpr bool kNarrow = std::is_same_v<T, __half>;
  float up = 1.f, down = 1.f;

  Range() = default;
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
      constexpr int kBias = 127, kTop = 14, kMost = 60, kInfinity = 255;
      const int exponent = static_cast<int>(__float_as_uint(most) >> 23);
      const int power = exponent == kInfinity ? 0 : min(kTop + kBias - exponent, kMost);
      up = __uint_as_float(static_cast<uint32_t>(kBias + power) << 23);
      down = __uint_as_float(static_cast<uint32_t>(kBias - power) << 23);
    }
  }
};

template <int kTiles>
__device__ __forceinline__ void multiply_all(Sums<kTiles>& sums, float factor) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums.x[i][e] *= factor;
  }
}

template <class T, int kKeys>
class ReverseStep : public Step<T, kKeys> {
  using Base = Step<T, kKeys>;
  using Base::kKeyTiles, Base::kTokenTiles, Base::lane_, Base::multiply;

 public:
  using typename Base::State, typename Base::Tokens;
  using Tr = Traits<kKeys>;
  using Record = typename ReverseTraits<kKeys>::Record;
  using PackedTokens = Packed<kTokenTiles>;
  using Base::Base;

  __device__ __forceinline__ void load_d_o(PackedTokens& d_o) const {
#pragma unroll
    for (int pair = 0; pair < kTokenTiles / 2; ++pair) this->load_values(pair, d_o.x[pair]);
  }

  // Columns by a number of each token.
  __device__ __forceinline__ void multiply_tokens(Tokens& sums, size_t vector, float factor = 1.f) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float2 by = token_pair(this->vector_at(vector), i, lane_);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.x[i][e] *= (e % 2 == 0 ? by.x : by.y) * factor;
    }
  }

  // dO becomes scale gamma dO, rounded in the range that is returned.
  __device__ __forceinline__ Range<T> scale_d_o(PackedTokens& d_o) const {
    Tokens sums;
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float2 x = unpack2<T>(d_o.x[i / 2][i % 2 * 2 + row]);
        sums.x[i][2 * row] = x.x;
        sums.x[i][2 * row + 1] = x.y;
      }
    }
    multiply_tokens(sums, offsetof(Record, scaled_gamma));
    return pack_in_range(sums, d_o);
  }

  template <int kTiles>
  static __device__ __forceinline__ Range<T> pack_in_range(Sums<kTiles>& sums, Packed<kTiles>& packed) {
    const Range<T> range(sums);
    if (Range<T>::kNarrow) multiply_all(sums, range.up);
    pack<T>(sums, packed);
    return range;
  }

  // sums += left M for a triangular matrix M of the record, which lies transposed.
  __device__ __forceinline__ void multiply_transposed(Tokens& sums, const PackedTokens& left, size_t at) const {
    BlockStream<triangle_blocks(Tr::kStep)> blocks(this->vector_at(at), lane_);
    int number = 0;
#pragma unroll
    for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
#pragma unroll
      for (int column = 0; column < 2 * pair + 2; ++column) {
        const uint32_t upper = column == 2 * pair + 1 ? 0u : blocks.take(number++);
        const uint32_t lower = blocks.take(number++);
        multiply(sums.x[column], left.x[pair], upper, lower);
      }
    }
  }
};

}  // namespace flash_qla::cuda::sm80
