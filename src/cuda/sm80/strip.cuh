// A strip's state and outputs in the caller's tensors.
#pragma once

#include "cuda/sm80/forward_step.cuh"

namespace flash_qla::cuda::sm80 {

// What a warp carries: 16 value columns of one (sequence, value head), from `column` on.
struct StripPlace {
  int head, column, lane;
  int K, V;
};

// Goes through a lane's elements of a [K, V] state, whatever its strides: calls visit(tile, element, reference) for
// those that are inside. No instruction waits for another one's data, and few are needed for an element: this code runs
// once in a block, so that fetching it takes as long as the state itself.
template <class Element, int kTiles, class Visit>
__device__ __forceinline__ void visit_elements(const DeviceStates& t, int64_t row, const StripPlace& place,
                                               Visit visit) {
  const int column = place.column + place.lane / 4, first_key = place.lane % 4 * 2;
  Element* at =
      static_cast<Element*>(t.data) + row * t.row + place.head * t.head + column * t.value + first_key * t.key;
  // Keys from the lane's first on, of both of its columns.
  const int keys[] = {column < place.V ? place.K - first_key : 0, column + 8 < place.V ? place.K - first_key : 0};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile, at += 8 * t.key) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * tile + e % 2 < keys[e / 2]) visit(tile, e, at[e % 2 * t.key + e / 2 * 8 * t.value]);
    }
  }
}

// The same for a state's elements of whatever dtype.
template <int kTiles, class Visit>
__device__ __forceinline__ void visit_state(const DeviceStates& t, int64_t row, const StripPlace& place, Visit visit) {
  if (t.dtype == static_cast<int32_t>(DType::kFloat32)) {
    visit_elements<float, kTiles>(t, row, place, visit);
  } else if (t.dtype == static_cast<int32_t>(DType::kBFloat16)) {
    visit_elements<__nv_bfloat16, kTiles>(t, row, place, visit);
  } else {
    visit_elements<__half, kTiles>(t, row, place, visit);
  }
}

// What is outside stays as it is.
template <int kTiles>
__device__ __forceinline__ void load_state(Sums<kTiles>& state, const DeviceStates& from, int64_t row,
                                           const StripPlace& place) {
  visit_state<kTiles>(from, row, place,
                      [&](int tile, int e, const auto& element) { state.x[tile][e] = static_cast<float>(element); });
}

template <int kTiles>
__device__ __forceinline__ void store_state(const Sums<kTiles>& state, const DeviceStates& to, int64_t row,
                                            const StripPlace& place) {
  visit_state<kTiles>(to, row, place, [&](int tile, int e, auto& element) {
    element = static_cast<std::remove_reference_t<decltype(element)>>(state.x[tile][e]);
  });
}

// The identity, whose value columns are keys.
template <int kTiles>
__device__ __forceinline__ void set_identity(Sums<kTiles>& state, const StripPlace& place) {
  state.each([&](float& x, int tile, int e) {
    const int key = 8 * tile + place.lane % 4 * 2 + e % 2, column = place.column + place.lane / 4 + e / 2 * 8;
    x = key == column ? 1.f : 0.f;
  });
}

// Rounded, as 8x8 blocks: those of the first eight value columns side by side from `to` on, those of the others
// `row_bytes` behind them. A warp writes a block at once.
template <int kTiles>
__device__ __forceinline__ void store_blocks(const Packed<kTiles>& packed, char* to, int64_t row_bytes) {
  uint32_t* at = reinterpret_cast<uint32_t*>(to) + threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTiles; ++i, at += kBlockBytes / 4) {
    at[0] = packed.x[i / 2][i % 2 * 2];
    at[row_bytes / 4] = packed.x[i / 2][i % 2 * 2 + 1];
  }
}

// Rows of O of a strip: eight bytes of a row a lane, so that the 32 bytes of a row are written at once.
class OutputRows {
 public:
  OutputRows() = default;
  // `o`: the row of token 0 of `count`; `columns` values in it. The rows that come first are those of token `first`,
  // which may be below 0.
  __device__ __forceinline__ OutputRows(const uint16_t* o, int64_t stride, int columns, int count, int first,
                                        const StripPlace& place)
      : stride_(stride) {
    const int column = place.column + place.lane % 2 * 8 + place.lane % 4 / 2 * 4, row = place.lane / 4;
    at_ = const_cast<uint16_t*>(o) + (row + first) * stride + column;
    // A lane whose columns are past the row's end has no tokens.
    count_ = column < columns && row < count ? count - row : 0;
    recompute_from(count_);  // made once
  }
  // The next 8 kTiles tokens, from `first` on.
  template <int kTiles>
  __device__ __forceinline__ void store(const Packed<kTiles>& packed, int first) {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      // A lane has values 2 (l % 4) and the next of the first eight and of the last eight, and its neighbour those
      // beside them: an even lane gives its last for the neighbour's first.
      const uint32_t low = transpose_8x8(packed.x[i / 2][i % 2 * 2]);
      const uint32_t high = transpose_8x8(packed.x[i / 2][i % 2 * 2 + 1]);
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
      // One comparison: a token below 0 is a large number.
      store_global_u2_if(static_cast<uint32_t>(first + 8 * i) < static_cast<uint32_t>(count_), at_,
                         odd ? make_uint2(got, high) : make_uint2(low, got));
      at_ += 8 * stride_;
      recompute_from(at_);  // multiples of the stride are not kept in registers
    }
  }
  // A pass for its states alone leaves nothing of its errors.
  template <int kTiles>
  __device__ __forceinline__ void keep(const Packed<kTiles>&) {}

 private:
  uint16_t* at_;
  int64_t stride_;
  int count_;  // of the tokens whose row the lane has, those that are there
};

}  // namespace flash_qla::cuda::sm80
