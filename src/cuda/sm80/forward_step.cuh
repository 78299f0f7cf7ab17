// One step of the serial pass for a strip of 16 value columns, by one warp (docs/kernels/sm80.md has the equations).
// All tiles are transposed: rows are value columns, so that the results of one product are the left operand of the
// next.
#pragma once

#include "cuda/sm80/tile.cuh"

namespace flash_qla::cuda::sm80 {

// A step's stage as the warp of a strip reads it.
template <class T, int kKeys>
struct StepStage {
  using Tr = Traits<kKeys>;

  // `offset`: in the step's record.
  __device__ __forceinline__ uint32_t record_at(size_t offset) const {
    return stage + Tr::kRecordAt + static_cast<uint32_t>(offset);
  }
  // Of a number for each token in the record those of the lane's two columns of a tile.
  __device__ __forceinline__ float2 token_pair(size_t offset, int tile) const {
    return load_shared_f2(record_at(offset) + static_cast<uint32_t>(tile * 8 + lane % 4 * 2) * 4);
  }
  // S^T += left X for the rows X of keys or queries of a pair of tiles of tokens.
  __device__ __forceinline__ void add_rows(Sums<Tr::kKeyTiles>& state, const uint32_t (&left)[4], int rows_at,
                                           int pair) const {
    const BlockReader<kKeys> rows(stage + static_cast<uint32_t>(rows_at), lane, Order::kLeftOperand);
#pragma unroll
    for (int tile = 0; tile < Tr::kKeyTiles; tile += 2) {
      multiply_block<T, true>(state, tile, left, rows.at(pair, tile / 2));
    }
  }

  uint32_t stage, values;  // shared addresses of the stage, and of this strip's V or dO in it
  int lane;
};

// A step in the order of its tokens, a group of tiles at a time. The errors of a group are a chain of dependent
// instructions: what other products there are stand between its links, those of the next group and those that follow
// from the one before.
template <class T, int kKeys, bool kOutputs>
class Step {
 public:
  using Tr = Traits<kKeys>;
  using Stage = StepStage<T, kKeys>;
  static constexpr int kTokenTiles = Tr::kTokenTiles, kKeyTiles = Tr::kKeyTiles;
  // Tiles of a group: two, the least that a product sums over. With 256 keys the whole step, as there are no registers
  // for the products of two groups, nor for those with queries beside those with keys.
  static constexpr int kTiles = kKeys <= 192 ? 2 : kTokenTiles, kGroups = kTokenTiles / kTiles;
  static constexpr bool kAhead = kGroups > 1;
  using State = Sums<kKeyTiles>;
  using Group = Sums<kTiles>;
  using PackedGroup = Packed<kTiles>;

  // The first products of a step. `packed`: the state, rounded.
  __device__ __forceinline__ void begin(const Stage& stage, const Packed<kKeyTiles>& packed) {
    s_ = stage;
    multiply<true, kAhead && kOutputs>(packed, 0);
  }

  // From the state at the step's start to that at its end, both as sums and rounded. rows.store(sums, token): O of a
  // group from that token on, `first` being the step's first one; that of the last group is left to finish(). Without
  // outputs, rows.keep(E of a group, rounded).
  template <class Rows>
  __device__ __forceinline__ void run(State& state, Packed<kKeyTiles>& packed, Rows& rows, int first) {
    errors_.clear();
    made_.clear();
    transform_.start(s_.record_at(offsetof(StepRecord, transform)), s_.lane);
    if (kOutputs && kAhead) outputs_.start(s_.record_at(offsetof(StepRecord, outputs)), s_.lane);
    PackedGroup plain, scaled;  // E of the group before
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group + 1 < kGroups) multiply<true, kOutputs>(packed, group + 1);
      const PackedGroup w = subtract_from_values(group);
      if (group == 0) state.scale(load_shared_f1(s_.record_at(offsetof(StepRecord, decay))));
      if (group > 0) update(state, scaled, group - 1);
      add_triangle(transform_, errors_, keys_[group], w, group);
      if constexpr (kOutputs) {
        if (group > 0) {
          add_outputs(plain, group - 1);
          rows.store(pack<T>(queries_[group - 1]), first + (group - 1) * 8 * kTiles);
        }
      }
      pack_errors(plain, scaled, group);
      if constexpr (!kOutputs) rows.keep(plain);
    }
    constexpr int kLast = kGroups - 1;
    if constexpr (kOutputs && !kAhead) {
      multiply<false, true>(packed, 0);
      outputs_.start(s_.record_at(offsetof(StepRecord, outputs)), s_.lane);
      add_outputs(plain, kLast);
      rows.store(pack<T>(queries_[0]), first);
    }
    update(state, scaled, kLast);
    if (kOutputs && kAhead) add_outputs(plain, kLast);
    packed = pack<T>(state);
  }
  // O of the last group of the step before the one whose first token is `next`, where it is not stored yet: behind
  // products that do not wait for it.
  static constexpr int kRowsLater = kAhead ? 8 * kTiles : 0;
  template <class Rows>
  __device__ __forceinline__ void finish(Rows& rows, int next) const {
    if constexpr (kOutputs && kAhead) rows.store(pack<T>(queries_[kGroups - 1]), next - kRowsLater);
  }

 private:
  // S^T K^T and S^T Q^T of a group, or one of them.
  template <bool kByKeys, bool kByQueries>
  __device__ __forceinline__ void multiply(const Packed<kKeyTiles>& state, int group) {
    const BlockReader<kKeys> rows(s_.stage + Tr::kKeysAt, s_.lane, Order::kRightOperand);
    if (kByKeys) keys_[group].clear();
    if (kByQueries) queries_[group].clear();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        const uint32_t at = rows.at(group * kTiles / 2 + pair, k);
        if (kByKeys) multiply_block<T, false>(keys_[group], 2 * pair, state.x[k], at);
        if (kByQueries) multiply_block<T, false>(queries_[group], 2 * pair, state.x[k], at + Tr::kQueriesAt);
      }
    }
  }

  // W = V - diag(gamma) K S0 of a group, rounded; in the place of its products with keys W and what the groups before
  // add to it in E.
  __device__ __forceinline__ PackedGroup subtract_from_values(int group) {
    Group& sums = keys_[group];
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      uint32_t v[4];
      load_values(s_.values, group * kTiles / 2 + pair, s_.lane, v);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile = 2 * pair + i;
        const float2 gamma = s_.token_pair(offsetof(StepRecord, gamma), group * kTiles + tile);
        float (&x)[4] = sums.x[tile];
        const float2 low = unpack2<T>(v[2 * i]), high = unpack2<T>(v[2 * i + 1]);
        x[0] = fmaf(-gamma.x, x[0], low.x);
        x[1] = fmaf(-gamma.y, x[1], low.y);
        x[2] = fmaf(-gamma.x, x[2], high.x);
        x[3] = fmaf(-gamma.y, x[3], high.y);
      }
    }
    const PackedGroup w = pack<T>(sums);
    if (group > 0) sums.each([&](float& x, int i, int e) { x += errors_.x[group * kTiles + i][e]; });
    return w;
  }

  // E of a group, rounded, and E times beta gamma_C / gamma.
  __device__ __forceinline__ void pack_errors(PackedGroup& plain, PackedGroup& scaled, int group) const {
    const Group& errors = keys_[group];
    plain = pack<T>(errors);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 factor = s_.token_pair(offsetof(StepRecord, update), group * kTiles + i);
      const float (&e)[4] = errors.x[i];
      scaled.x[i / 2][i % 2 * 2] = pack2<T>(e[0] * factor.x, e[1] * factor.y);
      scaled.x[i / 2][i % 2 * 2 + 1] = pack2<T>(e[2] * factor.x, e[3] * factor.y);
    }
  }

  // O = scale diag(gamma) Q S0 + (P B) E of a group, in the place of its products with queries.
  __device__ __forceinline__ void add_outputs(const PackedGroup& errors, int group) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 gamma = s_.token_pair(offsetof(StepRecord, scaled_gamma), group * kTiles + i);
      float (&o)[4] = queries_[group].x[i];
      const float (&before)[4] = made_.x[group * kTiles + i];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float factor = e % 2 == 0 ? gamma.x : gamma.y;
        o[e] = group == 0 ? factor * o[e] : fmaf(factor, o[e], before[e]);
      }
    }
    add_triangle(outputs_, made_, queries_[group], errors, group);
  }

  // Adds left M^T for the columns of a triangular matrix M that are this group's tokens: to the group itself, and to
  // what later groups will have.
  __device__ __forceinline__ void add_triangle(BlockStream<kAhead, false>& blocks, Sums<kTokenTiles>& later, Group& own,
                                               const PackedGroup& left, int group) const {
#pragma unroll
    for (int i = 0; i < kTiles / 2; ++i) {
      const int pair = group * kTiles / 2 + i;
#pragma unroll
      for (int row = 0; row < kTokenTiles; ++row) {
        if (row < 2 * pair) continue;
        // Above the diagonal there is no block.
        const uint32_t upper = blocks.take(triangle_block(row, 2 * pair));
        const uint32_t lower = row == 2 * pair ? 0u : blocks.take(triangle_block(row, 2 * pair + 1));
        mma_m16n8k16<T>(row < (group + 1) * kTiles ? own.x[row % kTiles] : later.x[row], left.x[i], upper, lower);
      }
    }
  }

  // S^T += (beta gamma_C / gamma E)^T K, the sum over a group's tokens; gamma_C S^T is there already.
  __device__ __forceinline__ void update(State& state, const PackedGroup& scaled, int group) const {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      s_.add_rows(state, scaled.x[pair], Tr::kKeysAt, group * kTiles / 2 + pair);
    }
  }

  Stage s_;
  Group keys_[kGroups], queries_[kGroups];  // products, which become errors and outputs
  Sums<kTokenTiles> errors_, made_;         // what the errors and outputs of a group have of the groups before it
  BlockStream<kAhead, false> transform_, outputs_;
};

}  // namespace flash_qla::cuda::sm80
