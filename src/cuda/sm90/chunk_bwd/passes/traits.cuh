// What the roles of the kernel of the two passes (passes/kernel.cuh) share: its forms, stages and barriers, states in
// registers and on their way, and what a block knows of its work.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"
#include "cuda/sm90/chunk_bwd/gates.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90::bwd {

constexpr int kMostStages = 6;

// What a block has, and whether it makes G o A and P itself.
enum Variant {
  kHalfVariant,   // half of V
  kBothVariant,   // both halves of V, a warpgroup each, and makes them
  kExactVariant,  // half of V; what is kept of states is kept in fp32 too (exact_products.cuh)
};

template <Variant kVariant>
struct PassTraits {
  static constexpr bool kBoth = kVariant == kBothVariant;
  static constexpr int kHalves = kBoth ? 2 : 1;     // of V, each by a warpgroup
  static constexpr int kCopyWarp = kBoth ? 12 : 4;  // the first of four
  static constexpr int kThreads = (kCopyWarp + 4) * 32;
  // Both halves: in all what 512 threads start with, 128 each. Else there are enough for everyone.
  static constexpr int kStateRegisters = 192, kOtherRegisters = 64;

  // A stage of the forward pass: K, V (V' on its way out later), G o A (both halves: A at first).
  static constexpr uint32_t kFwdK = 0;
  static constexpr uint32_t kFwdV = kFwdK + kTokensBytes;
  static constexpr uint32_t kFwdGA = kFwdV + kHalves * kTileBytes;
  static constexpr uint32_t kFwdStage = kFwdGA + kTileBytes;
  // A stage of the reverse pass: K, Q, dO (dv on its way out later), G o A (both halves: A at first), P.
  static constexpr uint32_t kRevK = 0;
  static constexpr uint32_t kRevQ = kRevK + kTokensBytes;
  static constexpr uint32_t kRevDo = kRevQ + kTokensBytes;
  static constexpr uint32_t kRevGA = kRevDo + kHalves * kTileBytes;
  static constexpr uint32_t kRevP = kRevGA + kTileBytes;
  static constexpr uint32_t kRevStage = kRevP + kTileBytes;

  // As many stages as fit: a stage is on its way for 1 to 2 us and worked on for 1.3, and of both halves prepared
  // for 1.
  static constexpr int kRevStages = 3, kFwdStages = kHalves == 2 ? 4 : 6;
  static constexpr uint32_t kStagesBytes =
      kRevStages * kRevStage > kFwdStages* kFwdStage ? kRevStages* kRevStage : kFwdStages* kFwdStage;

  // The state on its way out, gates of each stage.
  static constexpr uint32_t kOut = kStagesBytes;
  static constexpr uint32_t kGates = kOut + 2 * kTileBytes;
  static constexpr int kGateStages = kFwdStages > kRevStages ? kFwdStages : kRevStages;
  static constexpr uint32_t kBarriers = kGates + kGateStages * kPassGateBytes;
  static constexpr uint32_t kBarrierCount = 5 * kMostStages + 4;
  static constexpr uint32_t kStored = kBarriers + 8 * kBarrierCount;  // steps whose stores are in memory
  static constexpr uint32_t kMade =
      kStored + 4;  // steps whose tiles prepare.cuh has left; of both halves: whose gates are kept
  static constexpr uint32_t kBytes = 1024 + kMade + 4;  // 1024: the tiles' alignment
  static_assert(kFwdStages <= kMostStages && kRevStages <= kMostStages);
  static_assert(kBytes <= 232448, "shared memory of one block on sm_90");
};

constexpr uint32_t kStateBarrier = 1, kPrepareBarrier = 2;  // named barriers of the groups

// A stage is loaded (copy engine); of both halves: its gates are made and G o A is there ("gated"); empty again. What
// goes out is written by the state group and stored by a warp that has nothing else to do, so that the chain of
// products waits neither for the copy engine nor for the fence before it: the state from a place of its own, V' or dv
// from the stage.
struct PassBarriers {
  uint32_t base;
  __device__ uint32_t loaded(int stage) const { return base + 40 * stage; }
  __device__ uint32_t gates(int stage) const { return base + 40 * stage + 8; }
  __device__ uint32_t gated(int stage) const { return base + 40 * stage + 16; }
  __device__ uint32_t empty(int stage) const { return base + 40 * stage + 24; }
  // A stage's own, for the storing warp may be several steps behind, but never by a whole round of the stages, which it
  // gives back.
  __device__ uint32_t tokens_full(int stage) const { return base + 40 * stage + 32; }
  // Of each half of V: its state is in the place that they take in turns; it may be put there.
  __device__ uint32_t state_full(int half = 0) const { return base + 40 * kMostStages + 16 * half; }
  __device__ uint32_t state_empty(int half = 0) const { return state_full(half) + 8; }
};

// A place in the ring of stages.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// A thread's place in its warpgroup.
struct Lane {
  int warp, lane;
};

// visit(type, register, offset) of each of the thread's numbers of S^T in memory.
template <typename Visit>
__device__ __forceinline__ void visit_state(const StridedTensor& t, bool v_first, int64_t n, int head, int v0,
                                            const Lane& at, Visit visit) {
  const int64_t k_stride = t.stride[v_first ? 3 : 2], v_stride = t.stride[v_first ? 2 : 3];
  const int64_t first = state_offset(t, v_first, n, head, 2 * (at.lane % 4), v0 + 16 * at.warp + at.lane / 4);
  with_type(t.type, [&](auto type) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        visit(type, 4 * j + i, first + (8 * j + i % 2) * k_stride + 8 * (i / 2) * v_stride);
      }
    }
  });
}

// S^T from memory, or zeros.
__device__ __forceinline__ void load_state(float (&S)[64], const StridedTensor& t, bool v_first, int64_t n, int head,
                                           int v0, const Lane& at) {
  if (t.data == nullptr) {
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] = 0.0f;
    return;
  }
  visit_state(t, v_first, n, head, v0, at,
              [&](auto type, int i, int64_t offset) { S[i] = load_element_of<type()>(t, offset); });
}

__device__ __forceinline__ void store_state(const float (&S)[64], const StridedTensor& t, bool v_first, int64_t n,
                                            int head, int v0, const Lane& at) {
  visit_state(t, v_first, n, head, v0, at,
              [&](auto type, int i, int64_t offset) { store_element_of<type()>(t, offset, S[i]); });
}

// Packed S^T (A operand order) to its tiles [2 halves of K][64 of V][64 of K].
__device__ __forceinline__ void put_state(uint32_t tiles, const uint32_t (&packed)[32], const Lane& at) {
  // The swizzle in one exclusive or: the row's part of it is the lane's, and a piece's is a constant.
  const uint32_t first = tile_piece(tiles, 16 * at.warp + (at.lane & 15), at.lane >> 4);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    store_matrix_x4((first ^ (2 * (step % 4) << 4)) + (step / 4) * kTileBytes, packed[4 * step], packed[4 * step + 1],
                    packed[4 * step + 2], packed[4 * step + 3]);
  }
}

// Where a lane's 8x8 matrix of tokens 16j.. and the group's V columns 16 warp.. lies in a tile [64 tokens][64 of V],
// transposed.
__device__ __forceinline__ uint32_t transposed_piece(uint32_t tile, int j, const Lane& at) {
  const int matrix = at.lane >> 3;
  return tile_piece(tile, 16 * j + 8 * (matrix >> 1) + (at.lane & 7), 2 * at.warp + (matrix & 1));
}

template <typename T>
__device__ __forceinline__ void pack_state(uint32_t (&packed)[32], const float (&S)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) packed[i] = pack2<T>(S[2 * i], S[2 * i + 1]);
}

// acc^T [64 of V, 64 tokens] = S^T K^T.
template <typename T>
__device__ __forceinline__ void state_times_keys(float (&acc)[32], const uint32_t (&packed)[32], uint32_t sK) {
  const uint64_t desc = wgmma_descriptor(sK);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint64_t b = wgmma_advance(desc, (step / 4) * kTileBytes + (step % 4) * 32);
    if (step == 0) {
      mma_rs_n64_init<T>(acc, packed, b);
    } else {
      mma_rs_n64<T>(acc, packed + 4 * step, b);
    }
  }
}

// The accumulator's 32 columns of the first or the second half of a chunk.
__device__ __forceinline__ float (&columns_of(float (&acc)[32], int half))[16] {
  return *reinterpret_cast<float (*)[16]>(acc + 16 * half);
}

// acc^T [64 of V, 64 tokens] += X^T [64 of V, 64 tokens] L^T, L a lower triangle: what the second 32 tokens would give
// to the first is left out.
template <typename T>
__device__ __forceinline__ void add_to_later(float (&acc)[32], const uint32_t (&x)[16], uint32_t sL) {
  const uint64_t desc = wgmma_descriptor(sL);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    mma_rs_n32<T>(columns_of(acc, 1), x + 4 * j, wgmma_advance(desc, kTileBytes / 2 + j * 32));
    if (j < 2) mma_rs_n32<T>(columns_of(acc, 0), x + 4 * j, wgmma_advance(desc, j * 32));
  }
}

// acc^T (+)= X^T L: what the first 32 tokens would give to the second is left out. kInit: no sum is taken up.
template <typename T, bool kInit>
__device__ __forceinline__ void add_to_earlier(float (&acc)[32], const uint32_t (&x)[16], uint32_t sL) {
  const uint64_t desc = wgmma_descriptor(sL);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint64_t b = wgmma_advance(desc, j * 2048);
    if (kInit && j == 0) {
      mma_rs_n32_trans_init<T>(columns_of(acc, 0), x, b);
    } else {
      mma_rs_n32_trans<T>(columns_of(acc, 0), x + 4 * j, b);
    }
    if (kInit && j == 2) {
      mma_rs_n32_trans_init<T>(columns_of(acc, 1), x + 4 * j, wgmma_advance(b, 64));
    } else if (j >= 2) {
      mma_rs_n32_trans<T>(columns_of(acc, 1), x + 4 * j, wgmma_advance(b, 64));
    }
  }
}

// S^T += X^T [64 of V, 64 tokens] Y [64 tokens, 128 of K], as add_product(), of the first or second 32 tokens alone.
template <typename T>
__device__ __forceinline__ void add_product_half(float (&S)[64], const uint32_t (&x)[16], uint32_t sY, int half) {
  const uint64_t desc = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 2 * half; j < 2 * half + 2; ++j) mma_rs_n128_trans<T>(S, x + 4 * j, wgmma_advance(desc, j * 2048));
}

// Whether blocks start while the plan kernel runs.
template <Variant kVariant>
__device__ __forceinline__ bool starts_beside_plan(const Args& p) {
  return PassTraits<kVariant>::kBoth && p.N == 1 && !p.makes_A;
}

// Where the state of a pass comes from and goes to: the caller's tensor, an edge of segments (its index), or
enum StateEnd : int { kStateGiven = -1, kStateZero = -2, kStateIdentity = -3, kStateDropped = -4 };

// What all roles know of their block's work.
struct PassWork {
  SequenceInfo sequence;
  int n, head, key_head;
  int half;  // of V
  bool reverse;
  int first, steps;  // chunks: the first one, and how many
  int warmup;        // steps whose tiles nobody wants
  int64_t start, finish;

  __device__ bool transition() const { return start == kStateIdentity; }  // of the state alone: no values
  // The chunk of the step-th turn.
  __device__ int chunk(int step) const { return reverse ? first - step : first + step; }
  __device__ ChunkInfo info(int c) const {
    return {sequence.token + c * kChunk, min(kChunk, sequence.length - c * kChunk), n, sequence.batch};
  }
  __device__ bool has_tail(int step) const { return (chunk(step) + 1) * kChunk > sequence.length; }
  __device__ int64_t tile(const Args& p, int c) const {
    return static_cast<int64_t>(sequence.first_slot + c) * p.Hv + head;
  }
  __device__ int64_t state_tile(const Args& p, int c) const {
    return static_cast<int64_t>(sequence.first_pair + c / 2) * p.Hv + head;
  }
  // The index-th of a pass over whole sequences: both halves of V of a value head, then the next head, sequence by
  // sequence.
  __device__ __forceinline__ void take_whole(const Args& p, uint32_t index) {
    half = static_cast<int>(index % 2);
    head = static_cast<int>(index / 2 % static_cast<uint32_t>(p.Hv));
    n = static_cast<int>(index / 2 / static_cast<uint32_t>(p.Hv));
    sequence = sequence_info(p, n);
    key_head = head / p.group;
    steps = sequence.chunks();
    first = reverse ? steps - 1 : 0;
  }
  // A reverse pass that ends in dh0, which somebody wants.
  __device__ bool makes_dh0(const Args& p) const {
    return reverse && steps > 0 && finish == kStateGiven && p.dh0.data != nullptr && p.has_d_o;
  }
  // The pass is at an edge of a pair before the step-th turn, which somebody wants: its state is kept.
  __device__ bool keeps_state(int step) const {
    const int c = chunk(step);
    return step >= warmup && (((c & 1) != 0) == reverse || (reverse && c + 1 == sequence.chunks()));
  }
};

// S^T of the pair that the step belongs to, in fp32, where somebody wants it.
template <Variant kVariant>
__device__ __forceinline__ void keep_exact(const float (&S)[64], const Args& p, const PassWork& work, int step,
                                           const Lane& at) {
  if constexpr (kVariant == kExactVariant) {
    if (!work.keeps_state(step)) return;
    float* kept = exact_state(p, work.sequence, work.n, work.chunk(step) / 2, work.head, work.reverse);
    if (kept == nullptr) return;
    auto* to = reinterpret_cast<float4*>(kept) + work.half * (kHeadDim * kHeadDim / 8) + 32 * at.warp + at.lane;
#pragma unroll
    for (int i = 0; i < 16; ++i) to[128 * i] = make_float4(S[4 * i], S[4 * i + 1], S[4 * i + 2], S[4 * i + 3]);
  }
}

// The edges as a tensor [index, 1, 128 of V, 128 of K].
__device__ __forceinline__ StridedTensor edge_tensor(const Args& p) {
  return {p.edges, {kHeadDim * kHeadDim, 0, kHeadDim, 1}, DType::kFloat32};
}

__device__ __forceinline__ void start_state(float (&S)[64], const Args& p, const PassWork& work,
                                            const StridedTensor& given, const Lane& at) {
  if (work.start >= 0) {
    load_state(S, edge_tensor(p), true, work.start, 0, 64 * work.half, at);
  } else if (work.start == kStateGiven) {
    load_state(S, given, p.state_v_first, work.n, work.head, 64 * work.half, at);
  } else {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = 64 * work.half + 16 * at.warp + at.lane / 4 + 8 * (i / 2), k = 8 * j + 2 * (at.lane % 4) + i % 2;
        S[4 * j + i] = work.start == kStateIdentity && v == k ? 1.0f : 0.0f;
      }
    }
  }
}

// given: NULL data when the caller wants no final state of this pass.
__device__ __forceinline__ void finish_state(const float (&S)[64], const Args& p, const PassWork& work,
                                             const StridedTensor& given, const Lane& at) {
  if (work.finish >= 0) {
    store_state(S, edge_tensor(p), true, work.finish, 0, 64 * work.half, at);
  } else if (work.finish == kStateGiven && given.data != nullptr) {
    store_state(S, given, p.state_v_first, work.n, work.head, 64 * work.half, at);
  }
}

__device__ __forceinline__ void arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  mbarrier_arrive_warp(barrier, lane);
}

// A state on its way out, when the one before it has left. kept: the phase of that.
__device__ __forceinline__ void hand_out_state(uint32_t out, const uint32_t (&packed)[32], const PassBarriers& bars,
                                               int group, uint32_t& kept, const Lane& at) {
  mbarrier_wait(bars.state_empty(group), kept);
  put_state(out, packed, at);
  arrive_warp(bars.state_full(group), at.lane);
  kept ^= 1;
}

// One of the passes' gate vectors (store_pass_gates) at the thread's 16 columns: x[2j + e] belongs to column
// 8j + 2 (lane % 4) + e.
__device__ __forceinline__ void load_vector(float (&x)[16], uint32_t vector, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = load_shared_f4(vector + pass_gate_piece(lane % 4, i));
    x[4 * i] = four.x;
    x[4 * i + 1] = four.y;
    x[4 * i + 2] = four.z;
    x[4 * i + 3] = four.w;
  }
}

// Packed dO^T times scale gamma of its tokens, given as store_pass_gates() leaves it.
template <typename T>
__device__ __forceinline__ void scale_tokens(uint32_t (&scaled)[16], const uint32_t (&x)[16],
                                             const float (&factor)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float first = factor[2 * (i / 2)], second = factor[2 * (i / 2) + 1];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      scaled[i] = scale2_split(x[i], __float_as_uint(first), __float_as_uint(second));
    } else {
      const float2 pair = unpack2<T>(x[i]);
      scaled[i] = pack2<T>(first * pair.x, second * pair.y);
    }
  }
}

// What rounding leaves of it, times kRestScale<T>, rounded as well: under decay dO of the first tokens is most of dh0,
// and this rounding most of dh0's error. In fp16, where what decays falls below the smallest numbers, the scale brings
// back twelve bits; the rest of the largest number, 16, stays in range.
template <typename T>
inline constexpr float kRestScale = std::is_same_v<T, __nv_bfloat16> ? 1.0f : 0x1p12f;
template <typename T>
__device__ __forceinline__ void rest_of_scaled_tokens(uint32_t (&rest)[16], const uint32_t (&x)[16],
                                                      const float (&factor)[16]) {
  uint32_t scaled[16];
  scale_tokens<T>(scaled, x, factor);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float first = factor[2 * (i / 2)], second = factor[2 * (i / 2) + 1];
    const float2 pair = unpack2<T>(x[i]), taken = unpack2<T>(scaled[i]);
    float2 left;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const float2 high = unpack2<T>(__float_as_uint(first)), low = unpack2<T>(__float_as_uint(second));
      left.x = fmaf(pair.x, low.x, fmaf(pair.x, high.x, -taken.x));
      left.y = fmaf(pair.y, low.y, fmaf(pair.y, high.y, -taken.y));
    } else {
      left = make_float2(fmaf(first, pair.x, -taken.x), fmaf(second, pair.y, -taken.y));
    }
    // Of an infinity nothing is left.
    rest[i] =
        pack2<T>(isfinite(taken.x) ? kRestScale<T> * left.x : 0.0f, isfinite(taken.y) ? kRestScale<T> * left.y : 0.0f);
  }
}

}  // namespace flash_qla::cuda::sm90::bwd
