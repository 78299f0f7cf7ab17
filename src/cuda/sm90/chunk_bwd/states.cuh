// The two serial passes, side by side in one launch: the forward one keeps S at each pair's start and V', the reverse
// one keeps dS at each pair's end and writes dv. Neither needs the other, so a short batch fills twice the
// multiprocessors.
//
// A block has one pass of one sequence (or segment of it: segments.cuh), value head and half of V, or both halves, each
// with a warpgroup (StatesForm). States are held transposed, S^T [64 of V, 128 of K], as fp32 accumulators of one
// warpgroup: packed, they are the A operand of the next product, and S never waits for shared memory. In the fused form
// two more warpgroups run ahead: one makes G o A of A where that landed, one P (the reverse pass's). Of the last one, a
// warp loads, one stores, one counts what is stored, and one makes the gate vectors (fused) or knows what prepare.cuh
// has left.
#pragma once

#include "cuda/sm90/chunk_bwd/device.cuh"
#include "cuda/sm90/chunk_bwd/gates.cuh"
#include "cuda/sm90/chunk_bwd/segments.cuh"

namespace flash_qla::cuda::sm90 {

constexpr int kMostStatesStages = 6;

// What a block has, and whether it makes G o A and P itself.
enum StatesForm {
  kHalfForm,   // half of V
  kFusedForm,  // half of V, and makes them
  kWholeForm,  // both halves of V, a warpgroup each
};

template <StatesForm kForm>
struct StatesTraits {
  static constexpr bool kFused = kForm == kFusedForm;
  static constexpr int kHalves = kForm == kWholeForm ? 2 : 1;  // of V, each by a warpgroup
  static constexpr int kCopyWarp = kFused ? 12 : 4 * kHalves;  // the first of four
  static constexpr int kThreads = (kCopyWarp + 4) * 32;
  // Fused: in all what 512 threads start with, 128 each. Both halves: what 384 do, 168 each. Else there are enough for
  // everyone.
  static constexpr bool kMovesRegisters = kForm != kHalfForm;
  static constexpr int kStateRegisters = 232, kPrepareRegisters = 112, kCopyRegisters = kFused ? 56 : 40;

  // A stage of the forward pass: K, V (V' on its way out later), G o A (fused: A at first).
  static constexpr uint32_t kFwdK = 0;
  static constexpr uint32_t kFwdV = kFwdK + kTokensBytes;
  static constexpr uint32_t kFwdGA = kFwdV + kHalves * kTileBytes;
  static constexpr uint32_t kFwdStage = kFwdGA + kTileBytes;
  // A stage of the reverse pass: K, Q, dO (dv on its way out later), G o A (fused: A at first), P (fused: elsewhere).
  static constexpr uint32_t kRevK = 0;
  static constexpr uint32_t kRevQ = kRevK + kTokensBytes;
  static constexpr uint32_t kRevDo = kRevQ + kTokensBytes;
  static constexpr uint32_t kRevGA = kRevDo + kHalves * kTileBytes;
  static constexpr uint32_t kRevP = kRevGA + kTileBytes;
  static constexpr uint32_t kRevStage = kRevP + (kFused ? 0 : kTileBytes);

  // As many stages as fit: a stage is on its way for 1 to 2 us and worked on for 1.3, and when fused prepared for 1.
  static constexpr int kRevStages = kFused ? 4 : 3, kFwdStages = kHalves == 2 ? 4 : 6;
  static constexpr uint32_t kStagesBytes =
      kRevStages * kRevStage > kFwdStages* kFwdStage ? kRevStages* kRevStage : kFwdStages* kFwdStage;

  // The state on its way out, when fused P of the reverse pass's next step (it is read early in a step, so one is
  // enough), gates of each stage.
  static constexpr uint32_t kOut = kStagesBytes;
  static constexpr uint32_t kP = kOut + 2 * kTileBytes;
  static constexpr uint32_t kFwdGates = kP, kRevGates = kP + (kFused ? kTileBytes : 0);
  template <bool kReverse>
  static constexpr uint32_t kGates = kReverse ? kRevGates : kFwdGates;
  static constexpr uint32_t kFwdEnd = kFwdGates + kFwdStages * kPassGateBytes;
  static constexpr uint32_t kRevEnd = kRevGates + kRevStages * kPassGateBytes;
  static constexpr uint32_t kBarriers = kFwdEnd > kRevEnd ? kFwdEnd : kRevEnd;
  static constexpr uint32_t kBarrierCount = 5 * kMostStatesStages + 6;
  static constexpr uint32_t kStored = kBarriers + 8 * kBarrierCount;  // steps whose stores are in memory
  static constexpr uint32_t kMade = kStored + 4;  // steps whose tiles prepare.cuh has left; fused: whose gates are kept
  static constexpr uint32_t kBytes = 1024 + kMade + 4;  // 1024: the tiles' alignment
  static_assert(kFwdStages <= kMostStatesStages && kRevStages <= kMostStatesStages);
  static_assert(kBytes <= 232448, "shared memory of one block on sm_90");
};

constexpr uint32_t kStateBarrier = 1, kPBarrier = 2, kGateBarrier = 3;  // named barriers of the groups
constexpr uint32_t kOtherHalfBarrier = 2;                               // of the second half of V, where nobody makes P

// A stage is loaded (copy engine); fused: its gates are made and G o A is there ("gated"); empty again. What goes out
// is written by the state group and stored by a warp that has nothing else to do, so that the chain of products waits
// neither for the copy engine nor for the fence before it: the state from a place of its own, V' or dv from the stage.
struct StatesBarriers {
  uint32_t base;
  __device__ uint32_t loaded(int stage) const { return base + 40 * stage; }
  __device__ uint32_t gates(int stage) const { return base + 40 * stage + 8; }
  __device__ uint32_t gated(int stage) const { return base + 40 * stage + 16; }
  __device__ uint32_t empty(int stage) const { return base + 40 * stage + 24; }
  // A stage's own, for the storing warp may be several steps behind, but never by a whole round of the stages, which it
  // gives back.
  __device__ uint32_t tokens_full(int stage) const { return base + 40 * stage + 32; }
  // Of each half of V: its state is in the place that they take in turns; it may be put there.
  __device__ uint32_t state_full(int half = 0) const { return base + 40 * kMostStatesStages + 16 * half; }
  __device__ uint32_t state_empty(int half = 0) const { return state_full(half) + 8; }
  __device__ uint32_t P_full() const { return state_full(2); }
  __device__ uint32_t P_empty() const { return state_full(2) + 8; }
};

// A place in the ring of stages.
template <int kStages>
struct StatesCursor {
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

// S^T from memory, or zeros.
__device__ __forceinline__ void load_state(float (&S)[64], const StridedTensor& t, bool v_first, int64_t n, int head,
                                           int v0, const Lane& at) {
  if (t.data == nullptr) {
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] = 0.0f;
    return;
  }
  const int64_t k_stride = t.stride[v_first ? 3 : 2], v_stride = t.stride[v_first ? 2 : 3];
  const int64_t first = state_offset(t, v_first, n, head, 2 * (at.lane % 4), v0 + 16 * at.warp + at.lane / 4);
  with_type(t.type, [&](auto type) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        S[4 * j + i] = load_element_of<type()>(t, first + (8 * j + i % 2) * k_stride + 8 * (i / 2) * v_stride);
      }
    }
  });
}

__device__ __forceinline__ void store_state(const float (&S)[64], const StridedTensor& t, bool v_first, int64_t n,
                                            int head, int v0, const Lane& at) {
  const int64_t k_stride = t.stride[v_first ? 3 : 2], v_stride = t.stride[v_first ? 2 : 3];
  const int64_t first = state_offset(t, v_first, n, head, 2 * (at.lane % 4), v0 + 16 * at.warp + at.lane / 4);
  with_type(t.type, [&](auto type) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store_element_of<type()>(t, first + (8 * j + i % 2) * k_stride + 8 * (i / 2) * v_stride, S[4 * j + i]);
      }
    }
  });
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

// S^T += X^T [64 of V, 64 tokens] Y [64 tokens, 128 of K].
template <typename T>
__device__ __forceinline__ void add_outer(float (&S)[64], const uint32_t (&x)[16], uint32_t sY) {
  const uint64_t desc = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 0; j < 4; ++j) mma_rs_n128_trans<T>(S, x + 4 * j, wgmma_advance(desc, j * 2048));
}

// Its first or second 32 tokens alone.
template <typename T>
__device__ __forceinline__ void add_outer_half(float (&S)[64], const uint32_t (&x)[16], uint32_t sY, int half) {
  const uint64_t desc = wgmma_descriptor(sY, kTileBytes);
#pragma unroll
  for (int j = 2 * half; j < 2 * half + 2; ++j) mma_rs_n128_trans<T>(S, x + 4 * j, wgmma_advance(desc, j * 2048));
}

// Where the state of a pass comes from and goes to: the caller's tensor, an edge of segments (its index), or
enum StateEnd : int { kStateGiven = -1, kStateZero = -2, kStateIdentity = -3, kStateDropped = -4 };

// What all roles know of their block's work.
struct StatesWork {
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
  __device__ int64_t tile(const ChunkBackwardParams& p, int c) const {
    return static_cast<int64_t>(sequence.first_slot + c) * p.Hv + head;
  }
  __device__ int64_t state_tile(const ChunkBackwardParams& p, int c) const {
    return static_cast<int64_t>(sequence.first_pair + c / 2) * p.Hv + head;
  }
  // The pass is at an edge of a pair before the step-th turn, which somebody wants: its state is kept.
  __device__ bool keeps_state(int step) const {
    const int c = chunk(step);
    return step >= warmup && (((c & 1) != 0) == reverse || (reverse && c + 1 == sequence.chunks()));
  }
};

// The edges as a tensor [index, 1, 128 of V, 128 of K].
__device__ __forceinline__ StridedTensor edge_tensor(const ChunkBackwardParams& p) {
  return {p.edges, {kDim * kDim, 0, kDim, 1}, DType::kFloat32};
}

__device__ __forceinline__ void start_state(float (&S)[64], const ChunkBackwardParams& p, const StatesWork& work,
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
__device__ __forceinline__ void finish_state(const float (&S)[64], const ChunkBackwardParams& p, const StatesWork& work,
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

// A gate vector in order, at the same columns.
__device__ __forceinline__ void load_columns(float (&x)[16], uint32_t vector, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 pair = load_shared_f2(vector + (8 * j + 2 * (lane % 4)) * 4);
    x[2 * j] = pair.x;
    x[2 * j + 1] = pair.y;
  }
}

template <typename T, StatesForm kForm>
__device__ __forceinline__ void forward_states(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                               const StatesBarriers& bars, Lane at) {
  using Traits = StatesTraits<kForm>;
  const uint32_t out = smem + Traits::kOut;
  float S[64];
  start_state(S, p, work, p.initial_state, at);
  const int group = Traits::kHalves == 2 ? work.half : 0;
  // The phase of state_empty that has to have ended: before the first state one has, of the half that begins.
  uint32_t kept = 1 ^ group;

  StatesCursor<Traits::kFwdStages> cursor;
  const auto gates_of = [&] { return smem + Traits::template kGates<false> + cursor.stage * kPassGateBytes; };
  // What the step at the cursor takes of its stage besides the operands of products, while the products of the step
  // before still run: beside these a load takes 100 clocks.
  float beta[16], step_factor[16];
  uint32_t v[16];
  const auto fetch = [&](int step) {
    const uint32_t base = smem + cursor.stage * Traits::kFwdStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kFwdK, sV = base + Traits::kFwdV + group * kTileBytes;
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (work.has_tail(step)) {
      if constexpr (Traits::kFused) {  // those who prepare it zero its last rows
        mbarrier_wait(bars.gated(cursor.stage), cursor.phase);
      } else {
        const int valid = work.info(work.chunk(step)).valid, thread = 32 * at.warp + at.lane;
        zero_tail(sK, valid, thread, 128);
        zero_tail(sK + kTileBytes, valid, thread, 128);
        zero_tail(sV, valid, thread, 128);
        fence_proxy_async();
        named_barrier_sync(group == 0 ? kStateBarrier : kOtherHalfBarrier, 128);
      }
    }

    if constexpr (Traits::kFused) mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    load_vector(beta, sGates + kPassBeta, at.lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_matrix_x4_trans(transposed_piece(sV, j, at), v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]);
    }
    load_vector(step_factor, sGates + kPassStep, at.lane);
  };
  if (work.steps > 0) fetch(0);
  for (int step = 0; step < work.steps; ++step) {
    // Addresses made from these are made again in each step, not kept in registers that the accumulators need.
    asm volatile("" : "+r"(at.warp), "+r"(at.lane));
    const int stage = cursor.stage;
    const uint32_t base = smem + stage * Traits::kFwdStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kFwdK, sV = base + Traits::kFwdV + group * kTileBytes;
    const uint32_t sGA = base + Traits::kFwdGA;

    // u = S^T K^T; under it the state on its way out.
    uint32_t packed[32];
    pack_state<T>(packed, S);
    float u[32];
    wgmma_fence();
    state_times_keys<T>(u, packed, sK);
    wgmma_commit();
    // Which product is rounded by itself and which in the sum below is said here: all forms have the same bits.
    float beta_v[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 x = unpack2<T>(v[i]);
      beta_v[2 * i] = __fmul_rn(beta[2 * (i / 2)], x.x);
      beta_v[2 * i + 1] = __fmul_rn(beta[2 * (i / 2) + 1], x.y);
    }
    if constexpr (Traits::kFused) mbarrier_wait(bars.gated(stage), cursor.phase);
    if (work.keeps_state(step)) {
      mbarrier_wait(bars.state_empty(group), kept);
      put_state(out, packed, at);
      arrive_warp(bars.state_full(group), at.lane);
      kept ^= 1;
    }
    wgmma_wait<0>();
    pin(packed);
    pin(u);
    float ratio[16];
    load_vector(ratio, sGates + kPassRatio, at.lane);
    const float gamma_end = exp2_approx(load_shared_f1(sGates + (kChunk - 1) * 4));

    // V'^T = (beta W)^T (G o A)^T, W = V - gamma K S: a token's own share, which is most of it, in fp32, those of
    // others by the product.
    uint32_t w[16];
    float v_new[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v_new[2 * i] = fmaf(step_factor[2 * (i / 2)], u[2 * i], beta_v[2 * i]);
      v_new[2 * i + 1] = fmaf(step_factor[2 * (i / 2) + 1], u[2 * i + 1], beta_v[2 * i + 1]);
      w[i] = pack2<T>(v_new[2 * i], v_new[2 * i + 1]);
    }
    const uint64_t ga_desc = wgmma_descriptor(sGA);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) mma_rs_n64<T>(v_new, w + 4 * j, wgmma_advance(ga_desc, j * 32));
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 64; ++i) S[i] *= gamma_end;
    wgmma_wait<0>();
    pin(w);
    pin(v_new);

    // S = gC S + K^T diag(gC / gamma) V', and under it V' on its way out.
    uint32_t scaled[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      scaled[i] = pack2<T>(ratio[2 * (i / 2)] * v_new[2 * i], ratio[2 * (i / 2) + 1] * v_new[2 * i + 1]);
    }
    wgmma_fence();
    add_outer<T>(S, scaled, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t plain[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) plain[i] = pack2<T>(v_new[8 * j + 2 * i], v_new[8 * j + 2 * i + 1]);
      store_matrix_x4_trans(transposed_piece(sV, j, at), plain[0], plain[1], plain[2], plain[3]);
    }
    arrive_warp(bars.tokens_full(stage), at.lane);
    cursor.advance();
    if (step + 1 < work.steps) fetch(step + 1);
    wgmma_wait<0>();
    pin(scaled);
    pin(S);
    arrive_warp(bars.empty(stage), at.lane);
  }
  wgmma_wait<0>();
  pin(S);
  finish_state(S, p, work, StridedTensor{}, at);
}

template <typename T, StatesForm kForm>
__device__ __forceinline__ void reverse_states(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                               const StatesBarriers& bars, Lane at) {
  using Traits = StatesTraits<kForm>;
  const uint32_t out = smem + Traits::kOut;
  float dS[64];
  start_state(dS, p, work, p.dht, at);
  const int group = Traits::kHalves == 2 ? work.half : 0;
  uint32_t kept = 1 ^ group;  // as in the forward pass

  StatesCursor<Traits::kRevStages> cursor;
  const auto gates_of = [&] { return smem + Traits::template kGates<true> + cursor.stage * kPassGateBytes; };
  uint32_t d_o[16];
  float factor[16], ratio[16];
  const auto fetch = [&](int step) {  // as in the forward pass
    const uint32_t base = smem + cursor.stage * Traits::kRevStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ;
    const uint32_t sDo = base + Traits::kRevDo + group * kTileBytes;
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (work.has_tail(step)) {
      if constexpr (Traits::kFused) {  // those who prepare it zero its last rows
        mbarrier_wait(bars.gated(cursor.stage), cursor.phase);
        mbarrier_wait(bars.P_full(), step & 1);
      } else {
        const int valid = work.info(work.chunk(step)).valid, thread = 32 * at.warp + at.lane;
        for (int k_half = 0; k_half < 2; ++k_half) {
          zero_tail(sK + k_half * kTileBytes, valid, thread, 128);
          zero_tail(sQ + k_half * kTileBytes, valid, thread, 128);
        }
        zero_tail(sDo, valid, thread, 128);
        fence_proxy_async();
        named_barrier_sync(group == 0 ? kStateBarrier : kOtherHalfBarrier, 128);
      }
    }

    if constexpr (Traits::kFused) mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    load_vector(factor, sGates + kPassFactor, at.lane);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      load_matrix_x4_trans(transposed_piece(sDo, j, at), d_o[4 * j], d_o[4 * j + 1], d_o[4 * j + 2], d_o[4 * j + 3]);
    }
    load_vector(ratio, sGates + kPassRatio, at.lane);
  };
  if (work.steps > 0) fetch(0);
  for (int step = 0; step < work.steps; ++step) {
    // Addresses made from these are made again in each step, not kept in registers that the accumulators need.
    asm volatile("" : "+r"(at.warp), "+r"(at.lane));
    const int stage = cursor.stage;
    const uint32_t base = smem + stage * Traits::kRevStage, sGates = gates_of();
    const uint32_t sK = base + Traits::kRevK, sQ = base + Traits::kRevQ;
    const uint32_t sDo = base + Traits::kRevDo + group * kTileBytes;
    const uint32_t sGA = base + Traits::kRevGA, sP = Traits::kFused ? smem + Traits::kP : base + Traits::kRevP;

    // K dS, transposed, which waits for nothing but K, then P^T dO; under them dS on its way out.
    uint32_t packed[32];
    float k_dS[32], p_do[32];
    pack_state<T>(packed, dS);
    const float gamma_end = exp2_approx(load_shared_f1(sGates + (kChunk - 1) * 4));
#pragma unroll
    for (int i = 0; i < 64; ++i) dS[i] *= gamma_end;
    wgmma_fence();
    state_times_keys<T>(k_dS, packed, sK);
    wgmma_commit();
    uint32_t scaled[16];
    scale_tokens<T>(scaled, d_o, factor);
    if constexpr (Traits::kFused) mbarrier_wait(bars.P_full(), step & 1);
    const uint64_t p_desc = wgmma_descriptor(sP);
    wgmma_fence();
    mma_rs_n64_trans_init<T>(p_do, d_o, p_desc);
#pragma unroll
    for (int j = 1; j < 4; ++j) mma_rs_n64_trans<T>(p_do, d_o + 4 * j, wgmma_advance(p_desc, j * 2048));
    wgmma_commit();

    // dS = gC dS + Q^T diag(scale gamma) dO fills the gaps in the chain of products: half of it here, half after Z.
    wgmma_fence();
    add_outer_half<T>(dS, scaled, sQ, 0);
    wgmma_commit();
    if (work.keeps_state(step)) {
      mbarrier_wait(bars.state_empty(group), kept);
      put_state(out, packed, at);
      arrive_warp(bars.state_full(group), at.lane);
      kept ^= 1;
    }
    if constexpr (Traits::kFused) mbarrier_wait(bars.gated(stage), cursor.phase);
    wgmma_wait<1>();
    pin(packed);
    pin(d_o);
    pin(k_dS);
    pin(p_do);
    float step_factor[16], given[16];
    load_vector(step_factor, sGates + kPassStep, at.lane);
    load_vector(given, sGates + kPassGiven, at.lane);
    if constexpr (Traits::kFused) arrive_warp(bars.P_empty(), at.lane);

    // dV' = diag(gC / gamma) K dS + P^T dO, then Z = (G o A)^T dV', a token's own share in fp32.
    uint32_t d_v_new[16];
    float Z[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      Z[2 * i] = ratio[2 * (i / 2)] * k_dS[2 * i] + p_do[2 * i];
      Z[2 * i + 1] = ratio[2 * (i / 2) + 1] * k_dS[2 * i + 1] + p_do[2 * i + 1];
      d_v_new[i] = pack2<T>(Z[2 * i], Z[2 * i + 1]);
    }
    const uint64_t ga_desc = wgmma_descriptor(sGA);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; ++j) mma_rs_n64_trans<T>(Z, d_v_new + 4 * j, wgmma_advance(ga_desc, j * 2048));
    wgmma_commit();
    add_outer_half<T>(dS, scaled, sQ, 1);
    wgmma_commit();
    wgmma_wait<1>();
    pin(d_v_new);
    pin(Z);

    // dS += K^T dU, dU = -diag(gamma beta) Z; dv = beta Z (traits.h says what small betas get).
    uint32_t dU[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      dU[i] = pack2<T>(step_factor[2 * (i / 2)] * Z[2 * i], step_factor[2 * (i / 2) + 1] * Z[2 * i + 1]);
    }
    wgmma_fence();
    add_outer<T>(dS, dU, sK);
    wgmma_commit();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t d_v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d_v[i] = pack2<T>(given[4 * j + 2 * (i / 2)] * Z[8 * j + 2 * i],
                          given[4 * j + 2 * (i / 2) + 1] * Z[8 * j + 2 * i + 1]);
      }
      store_matrix_x4_trans(transposed_piece(sDo, j, at), d_v[0], d_v[1], d_v[2], d_v[3]);
    }
    arrive_warp(bars.tokens_full(stage), at.lane);
    cursor.advance();
    if (step + 1 < work.steps) fetch(step + 1);
    wgmma_wait<0>();
    pin(scaled);
    pin(dU);
    pin(dS);
    arrive_warp(bars.empty(stage), at.lane);
  }

  wgmma_wait<0>();
  pin(dS);
  finish_state(dS, p, work, p.dh0, at);
}

// One thread of a warp that has nothing else to do: counts chunks for the gradients when all that this block leaves of
// them is in memory. Counting waits for memory, longer now and then than a step takes.
template <StatesForm kForm>
__device__ __forceinline__ void count_chunks(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem) {
  using Traits = StatesTraits<kForm>;
  const bool keeps_gates = Traits::kFused && work.reverse && work.half == 0;
  auto wait_for = [](uint32_t steps, int step) {
    while (load_shared_acquire(steps) <= static_cast<uint32_t>(step)) __nanosleep(100);
  };
  uint32_t uncounted = 0;
  for (int step = work.warmup; step < work.steps; ++step) {
    const int c = work.chunk(step);
    const bool alone = c % 2 == 0 && (c + 1) * kChunk >= work.sequence.length;
    uncounted += (alone ? 2 : 1) * Traits::kHalves;
    if (step + 1 < work.steps && work.chunk(step + 1) / 2 == c / 2) continue;  // the pair's other chunk is next
    wait_for(smem + Traits::kStored, step);
    if (keeps_gates) wait_for(smem + Traits::kMade, step);
    add_release(p.progress + static_cast<int64_t>(work.sequence.first_pair + c / 2) * p.Hq + work.key_head, uncounted);
    uncounted = 0;
  }
}

// One warp: what goes out, to memory; it gives the stages back.
template <StatesForm kForm, bool kReverse>
__device__ __forceinline__ void store_tiles(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                            StatesWork work, uint32_t smem, const StatesBarriers& bars, int lane) {
  using Traits = StatesTraits<kForm>;
  const uint32_t out = smem + Traits::kOut, stored = smem + Traits::kStored;
  uint32_t kept = 0;  // phase of state_full
  StatesCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    asm volatile("" : "+r"(work.head), "+r"(work.sequence.batch), "+r"(lane));  // as in the passes
    const int c = work.chunk(step);
    const ChunkInfo chunk = work.info(c);
    const int64_t tile = work.tile(p, c);
    const uint32_t tokens = smem + cursor.stage * (kReverse ? Traits::kRevStage : Traits::kFwdStage) +
                            (kReverse ? Traits::kRevDo : Traits::kFwdV);
    const bool wanted = step >= work.warmup, keeps = work.keeps_state(step);
    if (keeps) {
      for (int group = 0; group < Traits::kHalves; ++group) {
        mbarrier_wait(bars.state_full(group), kept);
        if (lane == 0) {
          fence_proxy_async();
          uint8_t* to = (kReverse ? p.state_grads : p.states) + work.state_tile(p, c) * kStateBytes +
                        (work.half + group) * kTileBytes;
          bulk_store(to, out, kTileBytes);
          bulk_store(to + kStateHalfBytes, out + kTileBytes, kTileBytes);
        }
        if constexpr (Traits::kHalves == 2) {
          if (lane == 0) {
            tma_store_commit();
            tma_store_wait_read();
          }
          arrive_warp(bars.state_empty(group ^ 1), lane);
        }
      }
      kept ^= 1;
    }
    mbarrier_wait(bars.tokens_full(cursor.stage), cursor.phase);
    if (wanted) {
      if (kReverse && chunk.valid < kChunk) {
        // The copy engine knows no sequence ends.
        for (int piece = lane; piece < chunk.valid * 8; piece += 32) {
          const int row = piece / 8, within = piece % 8;
          uint16_t* to = static_cast<uint16_t*>(p.dv.data) +
                         row_offset(p.dv, chunk.batch, chunk.token + row, work.head) + 64 * work.half + 8 * within;
          for (int group = 0; group < Traits::kHalves; ++group) {
            *reinterpret_cast<uint4*>(to + 64 * group) =
                load_shared_u4(tile_piece(tokens + group * kTileBytes, row, within));
          }
        }
      } else if (lane == 0) {
        fence_proxy_async();
        if (kReverse) {
          for (int group = 0; group < Traits::kHalves; ++group) {
            tma_store_5d(&maps.dv, tokens + group * kTileBytes, 0, chunk.token, work.half + group, work.head,
                         chunk.batch);
          }
        } else {
          bulk_store(p.v_new + tile * kTokensBytes + work.half * kTileBytes, tokens, Traits::kHalves * kTileBytes);
        }
      }
      if (lane == 0) {
        tma_store_commit();  // a group a step
        tma_store_wait_read();
      }
    }
    arrive_warp(bars.empty(cursor.stage), lane);
    if (keeps && Traits::kHalves == 1) arrive_warp(bars.state_empty(), lane);
    // What was left two steps ago has had the time that it takes.
    if (lane == 0 && step > 0) {
      tma_store_wait_but<2>();
      store_shared_release(stored, step - 1);
    }
  }
  if (lane == 0) {
    tma_store_wait_all();
    store_shared_release(stored, work.steps);
  }
}

// One thread of a warp of its own: tells the one below for how many steps prepare.cuh has left what the copy engine is
// to load. To ask takes as long as a step.
__device__ __forceinline__ void watch_prepared(const ChunkBackwardParams& p, const StatesWork& work,
                                               uint32_t prepared) {
  constexpr int kSteps = 8;  // asked for at once
  for (int known = 0; known < work.steps;) {
    uint32_t done[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int slot = work.sequence.first_slot + work.chunk(min(known + i, work.steps - 1));
      done[i] = load_relaxed(p.prepared + static_cast<int64_t>(slot) * p.Hq + work.key_head);
    }
    if (done[0] == 0) {
      __nanosleep(100);
      continue;
    }
    acquire_loads();
    bool all = true;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      all &= done[i] != 0;
      known += all;
    }
    store_shared_release(prepared, known);
  }
}

// One thread: the tensors' tiles into the stages.
template <StatesForm kForm, bool kReverse>
__device__ __forceinline__ void load_stages(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                            const StatesWork& work, uint32_t smem, const StatesBarriers& bars) {
  using Traits = StatesTraits<kForm>;
  [[maybe_unused]] uint32_t prepared = 0;  // steps
  StatesCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    const ChunkInfo chunk = work.info(work.chunk(step));
    const uint32_t bar = bars.loaded(cursor.stage);
    const uint32_t base = smem + cursor.stage * (kReverse ? Traits::kRevStage : Traits::kFwdStage);
    if constexpr (!Traits::kFused) {
      if (p.beside && static_cast<uint32_t>(step) >= prepared) {
        while ((prepared = load_shared_acquire(smem + Traits::kMade)) <= static_cast<uint32_t>(step)) {
        }
        fence_proxy_async_all();
      }
    }
    mbarrier_wait(bars.empty(cursor.stage), cursor.phase ^ 1);  // the first round finds all stages empty
    mbarrier_arrive_expect(bar,
                           (kReverse ? Traits::kRevStage : Traits::kFwdStage) + (Traits::kFused ? 0 : kPassGateBytes));
    if constexpr (kReverse) {
      // P is made of these first.
      for (int half = 0; half < 2; ++half) {
        tma_load_5d(base + Traits::kRevQ + half * kTileBytes, &maps.q, bar, 0, chunk.token, half, work.key_head,
                    chunk.batch);
      }
    }
    static_assert(Traits::kFwdK == Traits::kRevK);
    for (int half = 0; half < 2; ++half) {
      tma_load_5d(base + Traits::kFwdK + half * kTileBytes, &maps.k, bar, 0, chunk.token, half, work.key_head,
                  chunk.batch);
    }
    const uint32_t sGA = base + (kReverse ? Traits::kRevGA : Traits::kFwdGA);
    if constexpr (Traits::kFused) {
      tma_load_5d(sGA, &maps.A, bar, 0, chunk.token, 0, work.head, chunk.batch);
    } else {
      const int64_t tile = work.tile(p, work.chunk(step));
      bulk_load(sGA, p.GA + tile * kTileBytes, kTileBytes, bar);
      bulk_load(smem + Traits::template kGates<kReverse> + cursor.stage * kPassGateBytes,
                p.gates + tile * p.gate_stride + kGateBytes / sizeof(float), kPassGateBytes, bar);
      if constexpr (kReverse) bulk_load(base + Traits::kRevP, p.P + tile * kTileBytes, kTileBytes, bar);
    }
    if constexpr (kReverse) {
      // Without dO: a tile wholly outside the tensor, which arrives as zeros.
      for (int group = 0; group < Traits::kHalves; ++group) {
        tma_load_5d(base + Traits::kRevDo + group * kTileBytes, &maps.d_o, bar, 0, p.has_d_o ? chunk.token : -kChunk,
                    work.half + group, work.head, chunk.batch);
      }
    } else {
      for (int group = 0; group < Traits::kHalves; ++group) {
        // A transition has no values: outside the tensor as well.
        tma_load_5d(base + Traits::kFwdV + group * kTileBytes, &maps.v, bar, 0,
                    work.transition() ? -kChunk : chunk.token, work.half + group, work.head, chunk.batch);
      }
    }
  }
}

// One warp: the gate vectors into the stages; the reverse pass's first half keeps them for the gradients.
template <typename T, bool kReverse>
__device__ __forceinline__ void make_gate_stages(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                                 const StatesBarriers& bars, int lane) {
  using Traits = StatesTraits<kFusedForm>;
  const bool may_keep = kReverse && work.half == 0;
  if (work.steps == 0) return;
  StatesCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  // Two chunks' are on their way while a stage is waited for: beside the copy engine's loads they take longer than a
  // step.
  auto load = [&](int step) {
    return load_gates(p, work.info(work.chunk(min(step, work.steps - 1))), work.head, lane);
  };
  const auto make = [&](int step, RawGates& raw) {
    const int c = work.chunk(step), valid = work.info(c).valid;
    const bool keeps = may_keep && step >= work.warmup;
    const Gates gates = make_gates(p, raw, valid, lane);
    raw = load(step + 2);
    const bool small = keeps && any_small_beta(gates, p.small_beta, valid, lane);
    mbarrier_wait(bars.empty(cursor.stage), cursor.phase ^ 1);
    store_pass_gates<T>(smem + Traits::template kGates<kReverse> + cursor.stage * kPassGateBytes, gates, p.scale,
                        p.small_beta, lane);
    arrive_warp(bars.gates(cursor.stage), lane);
    if (keeps) {
      const int64_t tile = work.tile(p, c);
      float2* kept = reinterpret_cast<float2*>(p.gates + tile * p.gate_stride) + lane;
      kept[0] = gates.cumsum;
      kept[kChunk / 2] = gates.gamma;
      kept[kChunk] = gates.ratio;
      kept[3 * kChunk / 2] = gates.beta;
      if (small && lane == 0) note_small_beta(p, static_cast<int>(tile));
      __syncwarp();
      if (lane == 0) store_shared_release(smem + Traits::kMade, step + 1);
    }
    cursor.advance();
  };
  // By turns in two places: to move one to the other would be to wait for it.
  RawGates even = load(0), odd = load(1);
  for (int step = 0; step < work.steps; step += 2) {
    make(step, even);
    if (step + 1 < work.steps) make(step + 1, odd);
  }
}

// The cumsum at a thread's two rows; past the end -infinity, so that G is 0 there.
__device__ __forceinline__ void load_row_cumsums(float (&c_row)[2], uint32_t sGates, int valid, const Lane& at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 16 * at.warp + at.lane / 4 + 8 * h;
    c_row[h] = row < valid ? load_shared_f1(sGates + row * 4) : -INFINITY;
  }
}

// Which packed pairs of a thread lie on or below the diagonal of a block of 16 x 16 on it (strictly: below it alone):
// words to mask them with, so that what is above (infinite G, whatever A holds there) leaves no trace.
__device__ __forceinline__ void diagonal_masks(uint32_t (&diagonal)[4], int lane, bool strictly) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
    const int below = lane / 4 + 8 * (part % 2) - (8 * (part / 2) + 2 * (lane % 4)) - static_cast<int>(strictly);
    diagonal[part] = (below >= 0 ? 0xffffu : 0u) | (below >= 1 ? 0xffff0000u : 0u);
  }
}

// Where a lane's part of 16 rows by 16 columns j lies in a tile, for loads and stores of four 8x8 matrices.
__device__ __forceinline__ uint32_t block_piece(uint32_t tile, int j, const Lane& at) {
  return tile_piece(tile, 16 * at.warp + (at.lane & 15), 2 * j + (at.lane >> 4));
}

// One warpgroup: in each stage A becomes G o A below the diagonal. On it both are 1: what that multiplies the state
// group adds in fp32.
template <typename T, bool kReverse>
__device__ __forceinline__ void gate_stages(const StatesWork& work, uint32_t smem, const StatesBarriers& bars,
                                            const Lane& at) {
  using Traits = StatesTraits<kFusedForm>;
  uint32_t diagonal[4];
  diagonal_masks(diagonal, at.lane, true);
  StatesCursor<kReverse ? Traits::kRevStages : Traits::kFwdStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    const int valid = work.info(work.chunk(step)).valid;
    const uint32_t base = smem + cursor.stage * (kReverse ? Traits::kRevStage : Traits::kFwdStage);
    const uint32_t sGA = base + (kReverse ? Traits::kRevGA : Traits::kFwdGA);
    const uint32_t sGates = smem + Traits::template kGates<kReverse> + cursor.stage * kPassGateBytes;
    float c_row[2];
    mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    load_row_cumsums(c_row, sGates, valid, at);
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (valid < kChunk) {
      const int thread = 32 * at.warp + at.lane;
      zero_tail(base + (kReverse ? Traits::kRevDo : Traits::kFwdV), valid, thread, 128);
      if constexpr (!kReverse) {
        for (int half = 0; half < 2; ++half) zero_tail(base + Traits::kFwdK + half * kTileBytes, valid, thread, 128);
      }
      zero_tail(sGA, valid, thread, 128);
      named_barrier_sync(kGateBarrier, 128);
    }
    // The loops stay loops: what these warps execute takes instruction fetches from the chain of products.
#pragma unroll 1
    for (int j = 0; j <= at.warp; ++j) {
      uint32_t a[4];
      load_matrix_x4(block_piece(sGA, j, at), a[0], a[1], a[2], a[3]);
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // bit 0: row + 8, bit 1: column + 8
        const float2 c = load_shared_f2(sGates + (16 * j + 8 * (part / 2) + 2 * (at.lane % 4)) * 4);
        const float2 x = unpack2<T>(a[part]);
        a[part] = pack2<T>(exp2_approx(c_row[part % 2] - c.x) * x.x, exp2_approx(c_row[part % 2] - c.y) * x.y) &
                  (j < at.warp ? ~0u : diagonal[part]);
      }
      store_matrix_x4(block_piece(sGA, j, at), a[0], a[1], a[2], a[3]);
    }
#pragma unroll 1
    for (int j = at.warp + 1; j < 4; ++j) store_matrix_x4(block_piece(sGA, j, at), 0, 0, 0, 0);
    fence_proxy_async();
    arrive_warp(bars.gated(cursor.stage), at.lane);
  }
}

// One warpgroup: P = scale G o (Q K^T) of the reverse pass's chunks.
template <typename T>
__device__ __forceinline__ void make_P(const ChunkBackwardParams& p, const StatesWork& work, uint32_t smem,
                                       const StatesBarriers& bars, const Lane& at) {
  using Traits = StatesTraits<kFusedForm>;
  uint32_t diagonal[4];
  diagonal_masks(diagonal, at.lane, false);
  StatesCursor<Traits::kRevStages> cursor;
  for (int step = 0; step < work.steps; ++step, cursor.advance()) {
    const int valid = work.info(work.chunk(step)).valid;
    const uint32_t sK = smem + cursor.stage * Traits::kRevStage + Traits::kRevK;
    const uint32_t sQ = smem + cursor.stage * Traits::kRevStage + Traits::kRevQ;
    mbarrier_wait(bars.loaded(cursor.stage), cursor.phase);
    if (valid < kChunk) {
      for (int half = 0; half < 2; ++half) {
        zero_tail(sK + half * kTileBytes, valid, 32 * at.warp + at.lane, 128);
        zero_tail(sQ + half * kTileBytes, valid, 32 * at.warp + at.lane, 128);
      }
      fence_proxy_async();
      named_barrier_sync(kPBarrier, 128);
    }
    const uint32_t sGates = smem + Traits::template kGates<true> + cursor.stage * kPassGateBytes;
    float qk[32], c_row[2], c[16];
    const uint64_t q_desc = wgmma_descriptor(sQ), k_desc = wgmma_descriptor(sK);
    wgmma_fence();
#pragma unroll
    for (int k_step = 0; k_step < 8; ++k_step) {
      const uint32_t by = (k_step / 4) * kTileBytes + (k_step % 4) * 32;
      if (k_step == 0) {
        mma_ss_n64_init<T>(qk, wgmma_advance(q_desc, by), wgmma_advance(k_desc, by));
      } else {
        mma_ss_n64<T>(qk, wgmma_advance(q_desc, by), wgmma_advance(k_desc, by));
      }
    }
    wgmma_commit();
    mbarrier_wait(bars.gates(cursor.stage), cursor.phase);
    load_row_cumsums(c_row, sGates, valid, at);
    load_columns(c, sGates, at.lane);
    mbarrier_wait(bars.P_empty(), (step & 1) ^ 1);
    wgmma_wait<0>();
    pin(qk);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t packed[4] = {};
      if (j <= at.warp) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int i = 8 * j + 4 * (part / 2) + 2 * (part % 2);
          const float g0 = exp2_approx(c_row[part % 2] - c[4 * j + 2 * (part / 2)]);
          const float g1 = exp2_approx(c_row[part % 2] - c[4 * j + 2 * (part / 2) + 1]);
          packed[part] =
              pack2<T>(p.scale * g0 * qk[i], p.scale * g1 * qk[i + 1]) & (j < at.warp ? ~0u : diagonal[part]);
        }
      }
      store_matrix_x4(block_piece(smem + Traits::kP, j, at), packed[0], packed[1], packed[2], packed[3]);
    }
    fence_proxy_async();
    arrive_warp(bars.P_full(), at.lane);
  }
}

template <typename T, StatesForm kForm, bool kReverse>
__device__ __forceinline__ void run_states(const ChunkBackwardParams& p, const ChunkBackwardMaps& maps,
                                           const StatesWork& work, uint32_t smem, const StatesBarriers& bars, int warp,
                                           int lane) {
  using Traits = StatesTraits<kForm>;
  constexpr int kCopyWarp = Traits::kCopyWarp;
  if (warp >= kCopyWarp) {
    if constexpr (Traits::kMovesRegisters) release_registers<Traits::kCopyRegisters>();
    if (warp == kCopyWarp && lane == 0) load_stages<kForm, kReverse>(p, maps, work, smem, bars);
    if (warp == kCopyWarp + 1) store_tiles<kForm, kReverse>(p, maps, work, smem, bars, lane);
    if (warp == kCopyWarp + 2) {
      if (lane == 0) count_chunks<kForm>(p, work, smem);
      // For the kernel after this one, which waits for this one alone.
      if (p.beside) wait_for_predecessors();
    }
    if (warp == kCopyWarp + 3) {
      if constexpr (Traits::kFused) {
        make_gate_stages<T, kReverse>(p, work, smem, bars, lane);
      } else {
        if (p.beside && lane == 0) watch_prepared(p, work, smem + Traits::kMade);
      }
    }
  } else if (Traits::kFused && warp >= 8) {
    if constexpr (Traits::kFused) {
      release_registers<Traits::kPrepareRegisters>();
      gate_stages<T, kReverse>(work, smem, bars, {warp - 8, lane});
    }
  } else if (Traits::kFused && warp >= 4) {
    if constexpr (Traits::kFused) {
      release_registers<Traits::kPrepareRegisters>();
      if constexpr (kReverse) make_P<T>(p, work, smem, bars, {warp - 4, lane});
    }
  } else {
    if constexpr (Traits::kMovesRegisters) claim_registers<Traits::kStateRegisters>();
    StatesWork mine = work;
    if constexpr (Traits::kHalves == 2) mine.half = warp / 4;
    if constexpr (kReverse) {
      reverse_states<T, kForm>(p, mine, smem, bars, {warp % 4, lane});
    } else {
      forward_states<T, kForm>(p, mine, smem, bars, {warp % 4, lane});
    }
  }
}

// Whole sequences. Blocks: (reverse pass first: its steps are longer) x sequence x value head x half of V (or both).
__device__ __forceinline__ void find_sequence_work(const ChunkBackwardParams& p, int halves, StatesWork* work) {
  int index = blockIdx.x;
  const int one_pass = gridDim.x / 2;
  work->reverse = index < one_pass;
  if (!work->reverse) index -= one_pass;
  work->half = halves == 2 ? 0 : index % 2;
  if (halves == 1) index /= 2;
  work->head = index % p.Hv;
  work->n = index / p.Hv;
  work->sequence = sequence_info(p, work->n);
  work->steps = work->sequence.chunks();
  work->first = work->reverse ? work->steps - 1 : 0;
  work->warmup = 0;
  work->start = kStateGiven;
  work->finish = kStateGiven;
}

// Segments. Blocks: what the rounds kernel has listed x half of V. False: nothing to do.
__device__ __forceinline__ bool find_segment_work(const ChunkBackwardParams& p, bool second_round, StatesWork* work) {
  work->half = blockIdx.x % 2;
  const int index = blockIdx.x / 2, round = static_cast<int>(second_round);
  if (index >= p.round_counts[round]) return false;
  const SegmentWork listed = segment_work(round_list(p, round)[index]);
  const int head = listed.piece % p.Hv, segment = listed.piece / p.Hv;
  Segment s;
  if (!find_segment(p, segment, &s)) return false;
  work->head = head;
  work->n = s.n;
  work->sequence = s.sequence;
  const bool reverse = listed.pass == kReversePass;
  work->reverse = reverse;
  work->warmup = 0;
  work->steps = s.end - s.begin;
  work->first = reverse ? s.end - 1 : s.begin;
  if (listed.pass == kTransitionPass) {
    work->warmup = work->steps;
    work->start = kStateIdentity;
    work->finish = edge_index(p, segment, head, kEdgeTransition);
    return true;
  }
  const Edge edge = reverse ? kEdgeReverse : kEdgeForward;
  const SegmentPass at = segment_pass(p, s, segment, head, reverse);
  const int64_t left_behind = at.is_last ? kStateGiven : kStateDropped;
  if (at.warmup == kExact) {
    if (second_round) {
      work->start = edge_index(p, segment + (reverse ? 1 : -1), head, edge);
      work->finish = left_behind;
    } else {  // F or R, for the segment after it
      work->warmup = work->steps;
      work->start = kStateZero;
      work->finish = edge_index(p, segment, head, edge);
    }
    return true;
  }
  work->finish = at.feeds ? edge_index(p, segment, head, edge) : left_behind;
  const int warmup = at.warmup;
  work->warmup = warmup;
  work->steps += warmup;
  work->first -= reverse ? -warmup : warmup;
  const bool reaches_end = reverse ? work->first + 1 == s.sequence.chunks() : work->first == 0;
  work->start = reaches_end ? kStateGiven : kStateZero;
  return true;
}

template <typename T, StatesForm kForm>
__global__ __launch_bounds__(StatesTraits<kForm>::kThreads,
                             1) void sm90_chunk_bwd_states_kernel(const ChunkBackwardParams p,
                                                                  const __grid_constant__ ChunkBackwardMaps maps,
                                                                  bool second_round) {
  // In this order: the gradients' blocks, which wait for what these count, come when all of these have started, and
  // find the counters as the kernels before have left them.
  if (!p.beside) wait_for_predecessors();
  launch_dependents();
  using Traits = StatesTraits<kForm>;
  extern __shared__ uint8_t raw[];
  // The shuffle keeps it in a register: it is not made again in each step.
  const uint32_t smem = __shfl_sync(0xffffffffu, (smem_address(raw) + 1023u) & ~1023u, 0);
  const StatesBarriers bars = {smem + Traits::kBarriers};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  StatesWork work;
  if (kForm == kHalfForm && p.segment_chunks > 0) {  // the others have whole sequences alone
    if (!find_segment_work(p, second_round, &work)) return;
  } else {
    find_sequence_work(p, Traits::kHalves, &work);
  }
  work.key_head = work.head / p.group;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStatesStages; ++i) {
      mbarrier_init(bars.loaded(i), 1);
      mbarrier_init(bars.gates(i), kWarpArrivals);
      mbarrier_init(bars.gated(i), 4 * kWarpArrivals);
      mbarrier_init(bars.empty(i), (4 * Traits::kHalves + 1) * kWarpArrivals);
      mbarrier_init(bars.tokens_full(i), 4 * Traits::kHalves * kWarpArrivals);
    }
    for (int half = 0; half < 2; ++half) {
      mbarrier_init(bars.state_full(half), 4 * kWarpArrivals);
      mbarrier_init(bars.state_empty(half), kWarpArrivals);
    }
    mbarrier_init(bars.P_full(), 4 * kWarpArrivals);
    mbarrier_init(bars.P_empty(), 4 * kWarpArrivals);
    mbarrier_init_fence();
    store_shared_release(smem + Traits::kStored, 0);
    store_shared_release(smem + Traits::kMade, 0);
  }
  __syncthreads();

  if (work.reverse) {
    run_states<T, kForm, true>(p, maps, work, smem, bars, warp, lane);
  } else {
    run_states<T, kForm, false>(p, maps, work, smem, bars, warp, lane);
  }
}

}  // namespace flash_qla::cuda::sm90
