// A strip's state and outputs in the caller's tensors.
#pragma once

#include "cuda/sm80/forward_step.cuh"

namespace flash_qla::cuda::sm80 {

// What a warp carries: 16 value columns of one (sequence, value head), from `column` on.
struct StripPlace {
  int head, column, lane;
  int K, V;
};

// A lane's elements of a [K, V] state, whatever its dtype and strides.
class StateView {
 public:
  __device__ __forceinline__ StateView(const DeviceStates& t, int64_t row, const StripPlace& place)
      : dtype_(t.dtype), column_(place.column + place.lane / 4), key_(place.lane % 4 * 2), K_(place.K), V_(place.V) {
    const int64_t size = is_wide() ? 4 : 2;
    key_bytes_ = t.key * size;
    eight_values_ = 8 * t.value * size;
    data_ = static_cast<char*>(t.data) + (row * t.row + place.head * t.head + column_ * t.value + key_ * t.key) * size;
  }
  // Calls f(element, pointer) for those of a lane's four elements of a tile of eight keys that are inside.
  template <class Function>
  __device__ __forceinline__ void for_each(int tile, Function f) const {
    char* at = data_ + tile * 8 * key_bytes_;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (8 * tile + key_ + e % 2 < K_ && column_ + e / 2 * 8 < V_) {
        f(e, at + e % 2 * key_bytes_ + (e / 2 > 0 ? eight_values_ : 0));
      }
    }
  }
  __device__ __forceinline__ float load(const char* at) const {
    if (is_wide()) return *reinterpret_cast<const float*>(at);
    const uint16_t raw = *reinterpret_cast<const uint16_t*>(at);
    return is_bf16() ? __uint_as_float(static_cast<uint32_t>(raw) << 16) : __half2float(__ushort_as_half(raw));
  }
  __device__ __forceinline__ void store(char* at, float x) const {
    if (is_wide()) {
      *reinterpret_cast<float*>(at) = x;
    } else {
      *reinterpret_cast<uint16_t*>(at) =
          is_bf16() ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
    }
  }

 private:
  __device__ __forceinline__ bool is_wide() const { return dtype_ == static_cast<int32_t>(DType::kFloat32); }
  __device__ __forceinline__ bool is_bf16() const { return dtype_ == static_cast<int32_t>(DType::kBFloat16); }
  char* data_;
  int64_t key_bytes_, eight_values_;
  int32_t dtype_;
  int column_, key_, K_, V_;
};

template <int kTiles>
__device__ __forceinline__ void load_state(Sums<kTiles>& state, const DeviceStates& from, int64_t row,
                                           const StripPlace& place) {
  const StateView view(from, row, place);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    view.for_each(tile, [&](int e, const char* at) { state.x[tile][e] = view.load(at); });
  }
}

template <int kTiles>
__device__ __forceinline__ void store_state(const Sums<kTiles>& state, const DeviceStates& to, int64_t row,
                                            const StripPlace& place) {
  const StateView view(to, row, place);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    view.for_each(tile, [&](int e, char* at) { view.store(at, state.x[tile][e]); });
  }
}

// O of `count` tokens of a step to their rows of `columns` values, `o` being the first: transposed, and eight bytes of
// a row a lane, so that a row's 32 bytes are written at once.
template <class T, int kTiles>
__device__ __forceinline__ void store_outputs(const Sums<kTiles>& sums, uint16_t* o, int64_t stride, int columns,
                                              int count, const StripPlace& place) {
  const bool odd = place.lane % 2 != 0;
  const int token = place.lane / 4, column = place.column + (odd ? 8 : 0) + place.lane % 4 / 2 * 4;
  uint16_t* at = o + token * stride + column;
#pragma unroll
  for (int i = 0; i < kTiles; ++i, at += 8 * stride) {
    // A lane has values 2 (l % 4) and the next of the first eight and of the last eight, and its neighbour those beside
    // them: an even lane gives its last for the neighbour's first.
    const uint32_t first = transpose_8x8(pack2<T>(sums.x[i][0], sums.x[i][1]));
    const uint32_t last = transpose_8x8(pack2<T>(sums.x[i][2], sums.x[i][3]));
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? first : last, 1);
    if (8 * i + token < count && column < columns) {
      *reinterpret_cast<uint2*>(at) = odd ? make_uint2(got, last) : make_uint2(first, got);
    }
  }
}

}  // namespace flash_qla::cuda::sm80
