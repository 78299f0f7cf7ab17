// One step of the serial pass for a strip of 16 value columns, by one warp (docs/kernels/sm80.md has the equations).
// All tiles are transposed: rows are value columns, so that the results of one product are the left operand of the
// next.
#pragma once

#include "cuda/common/mbarrier.cuh"
#include "cuda/sm80/tile.cuh"

namespace flash_qla::cuda::sm80 {

// fp32 sums of a warp, [16 x 8 kTiles]: lane l has rows l / 4 (elements 0, 1) and l / 4 + 8 (2, 3), columns
// 8 tile + 2 (l % 4) and the next.
template <int kTiles>
struct Sums {
  float x[kTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = 0.f;
    }
  }
};

// The same rounded to 16 bits, as the left operands of products that sum over the columns.
template <int kTiles>
struct Packed {
  uint32_t x[kTiles / 2][4];
};

template <class T, int kTiles>
__device__ __forceinline__ void pack(const Sums<kTiles>& from, Packed<kTiles>& to) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
      to.x[i / 2][i % 2 * 2 + row] = pack2<T>(from.x[i][2 * row], from.x[i][2 * row + 1]);
  }
}

// A number for each token: those of a lane's two columns of a tile.
__device__ __forceinline__ float2 token_pair(uint32_t vector, int tile, int lane) {
  return load_shared_f2(vector + static_cast<uint32_t>(tile * 8 + lane % 4 * 2) * 4);
}

template <class T, int kKeys>
class Step {
 public:
  using Tr = Traits<kKeys>;
  using Record = typename Tr::Record;
  static constexpr int kTokenTiles = Tr::kTokenTiles, kKeyTiles = Tr::kKeyTiles;
  using State = Sums<kKeyTiles>;
  using Tokens = Sums<kTokenTiles>;

  // `stage`: shared address of the step's stage; `values`: of this strip's V in it.
  __device__ __forceinline__ Step(uint32_t stage, uint32_t values, int lane)
      : stage_(stage), values_(values), lane_(lane) {}

  // sums += S^T X^T for the rows X of keys or queries of tokens [16 first, 16 last).
  __device__ __forceinline__ void multiply_rows(Tokens& sums, const Packed<kKeyTiles>& state, int rows_at, int first,
                                                int last) const {
    const BlockReader<kKeys> rows(stage_ + static_cast<uint32_t>(rows_at), lane_, Order::kRightOperand);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
        if (pair < first || pair >= last) continue;
        uint32_t b[4];
        load_matrix_x4(rows.at(pair, k), b);
        multiply(sums.x[2 * pair], state.x[k], b[0], b[1]);
        multiply(sums.x[2 * pair + 1], state.x[k], b[2], b[3]);
      }
    }
  }

  // sums = V^T - (S^T K^T) diag(gamma), from the products.
  __device__ __forceinline__ void subtract_from_values(Tokens& sums) const {
    const int matrix = lane_ / 8, row = (matrix >> 1) * 8 + lane_ % 8;
    const uint32_t lane_values = values_ + value_offset(row, matrix & 1);
#pragma unroll
    for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
      uint32_t v[4];
      load_matrix_x4_trans(lane_values + static_cast<uint32_t>(pair * 16 * 32), v[0], v[1], v[2], v[3]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 gamma = token_pair(vector_at(offsetof(Record, gamma)), 2 * pair + i, lane_);
        float (&w)[4] = sums.x[2 * pair + i];
        const float2 low = unpack2<T>(v[2 * i]), high = unpack2<T>(v[2 * i + 1]);
        w[0] = fmaf(-gamma.x, w[0], low.x);
        w[1] = fmaf(-gamma.y, w[1], low.y);
        w[2] = fmaf(-gamma.x, w[2], high.x);
        w[3] = fmaf(-gamma.y, w[3], high.y);
      }
    }
  }

  // sums += left M^T for a triangular matrix M of the record, [tokens x tokens].
  __device__ __forceinline__ void multiply_triangle(Tokens& sums, const Packed<kTokenTiles>& left, size_t at) const {
    BlockStream<triangle_blocks(Tr::kStep)> blocks(vector_at(at), lane_);
    int number = 0;
#pragma unroll
    for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
#pragma unroll
      for (int row = 0; row < kTokenTiles; ++row) {
        if (row < 2 * pair) continue;
        const uint32_t upper = blocks.take(number++);
        const uint32_t lower = row == 2 * pair ? 0u : blocks.take(number++);
        multiply(sums.x[row], left.x[pair], upper, lower);
      }
    }
  }

  // E^T, and the same times beta gamma_C / gamma, rounded.
  __device__ __forceinline__ void pack_errors(const Tokens& errors, Packed<kTokenTiles>& plain,
                                              Packed<kTokenTiles>& scaled) const {
    pack<T>(errors, plain);
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float2 factor = token_pair(vector_at(offsetof(Record, update)), i, lane_);
      const float (&e)[4] = errors.x[i];
      scaled.x[i / 2][i % 2 * 2] = pack2<T>(e[0] * factor.x, e[1] * factor.y);
      scaled.x[i / 2][i % 2 * 2 + 1] = pack2<T>(e[2] * factor.x, e[3] * factor.y);
    }
  }

  __device__ __forceinline__ void scale_outputs(Tokens& sums) const {
#pragma unroll
    for (int i = 0; i < kTokenTiles; ++i) {
      const float2 gamma = token_pair(vector_at(offsetof(Record, scaled_gamma)), i, lane_);
      sums.x[i][0] *= gamma.x;
      sums.x[i][1] *= gamma.y;
      sums.x[i][2] *= gamma.x;
      sums.x[i][3] *= gamma.y;
    }
  }

  // S^T = decay S^T + scaled K.
  __device__ __forceinline__ void update(State& state, const Packed<kTokenTiles>& scaled) const {
    const float decay = load_shared_f1(vector_at(offsetof(Record, decay)));
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) state.x[i][e] *= decay;
    }
    const BlockReader<kKeys> keys(stage_ + Tr::kKeysAt, lane_, Order::kLeftOperand);
#pragma unroll
    for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; tile += 2) {
        uint32_t b[4];
        load_matrix_x4_trans(keys.at(pair, tile / 2), b[0], b[1], b[2], b[3]);
        multiply(state.x[tile], scaled.x[pair], b[0], b[1]);
        multiply(state.x[tile + 1], scaled.x[pair], b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ uint32_t vector_at(size_t offset) const {
    return stage_ + Tr::kRecordAt + static_cast<uint32_t>(offset);
  }

 private:
  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16<T>(sum, a[0], a[1], a[2], a[3], b0, b1);
  }
  uint32_t stage_, values_;
  int lane_;
};

}  // namespace flash_qla::cuda::sm80
