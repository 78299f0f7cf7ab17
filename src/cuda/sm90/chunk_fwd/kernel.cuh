// The fused Hopper forward: one persistent block per SM, a tile is one (sequence, value head), names as in docs/math.md.
//
// Two state warpgroups carry S^T in fp32 registers, 64 rows of V each, and run the recurrent products with A from registers:
//   W = V - gamma K S0,  V' = Ag W,  O = scale gamma Q S0 + P V',  S1 = gC S0 + K^T (gC/gamma) V'     (all transposed: M = V, N = tokens)
// Two auxiliary warpgroups take every second chunk each and make, off that chain, the gates, A_g and P; they also run the copy engine.
// All chunks of all tiles of a block form one numbered stream m = 0, 1, ..; its records are in a ring that one thread fills six ahead.
#pragma once

#include "../../common/fragment.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "../../common/wgmma.cuh"
#include "kernel_params.h"
#include "traits.h"

namespace flash_qla::cuda::sm90 {

inline constexpr int kFirstChunk = 1;
inline constexpr int kLastChunk = 2;
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kGateFloor = -80.0f;  // e^-80 is nothing in fp32; a larger step would ruin the differences of the sum

// What the roles need to know of one chunk.
struct alignas(16) ChunkRecord {
  int32_t row;       // first token
  int32_t valid;     // tokens in it, 0 for an empty sequence; -1 after the last chunk
  int32_t flags;     // kFirstChunk, kLastChunk of its tile
  int32_t head;      // value head
  int32_t sequence;
  int16_t half;      // which half of V, with V split
  int16_t key_head;
  int32_t chunk;     // counted over all sequences
  int32_t position;  // counted in its sequence
  int64_t slot_in;   // initial and final state slots, -1: none
  int64_t slot_out;
};
static_assert(sizeof(ChunkRecord) == 48);

// The producer thread's place in the tile list.
struct alignas(16) ChunkWalker {
  ChunkRecord next;
  int32_t remaining;  // tokens of the tile not yet produced; -1: the tile is done
  int32_t tile;       // tile to open next
};
static_assert(sizeof(ChunkWalker) == 64);

// The block's dynamic shared memory. A function, not a pointer handed down: its address is a constant that needs no register.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}
__device__ __forceinline__ uint32_t smem() { return smem_address(shared_memory()); }

__device__ __forceinline__ int64_t load_index(const void* data, bool is_64_bit, int64_t i) {
  return is_64_bit ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// Tokens of sequence i, kept inside the tensors whatever the offsets say: nothing is ever written out of bounds.
__device__ __forceinline__ PlannedSequence sequence_at(const ChunkForwardArgs& args, int32_t i) {
  if (args.cu_seqlens == nullptr) {
    const int32_t length = static_cast<int32_t>(args.dense_length);
    return {i * length, length, i, i * ((length + kChunk - 1) / kChunk)};
  }
  int64_t start = load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, i);
  int64_t end = load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, static_cast<int64_t>(i) + 1);
  start = min(max(start, int64_t{0}), args.num_tokens);
  end = min(max(end, start), args.num_tokens);
  return {static_cast<int32_t>(start), static_cast<int32_t>(end - start), i, 0};
}

__device__ __forceinline__ int64_t resolve_slot(const StateSet& set, int64_t sequence) {
  if (set.data == nullptr) return -1;
  if (set.indices == nullptr) return sequence;
  const int64_t slot = load_index(set.indices, set.indices_are_64_bit, sequence);
  return slot <= set.null_index || slot < 0 || slot >= set.slots ? -1 : slot;
}

__device__ __forceinline__ int64_t element_size(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

__device__ __forceinline__ char* state_matrix(const StateSet& set, int64_t slot, int32_t head) {
  return static_cast<char*>(set.data) + (slot * set.slot_stride + head * set.head_stride) * element_size(set.type);
}

// Opens the next tile that has anything to do.
template <typename Traits>
__device__ __forceinline__ void open_tile(const ChunkForwardKernelParams& p, ChunkWalker& walker) {
  const ChunkForwardArgs& args = p.args;
  while (walker.tile < p.tiles) {
    int32_t tile = walker.tile;
    walker.tile = p.plan != nullptr ? static_cast<int32_t>(gridDim.x + atomicAdd(p.ticket, 1u)) : tile + static_cast<int32_t>(gridDim.x);
    int32_t half = 0;
    if constexpr (Traits::kStateGroups == 1) {
      half = tile & 1;
      tile >>= 1;
    }
    const int32_t rank = tile / args.num_value_heads;
    const PlannedSequence sequence = p.plan != nullptr ? p.plan[rank] : sequence_at(args, rank);
    ChunkRecord& r = walker.next;
    r.slot_out = resolve_slot(args.final_state, sequence.index);
    if (sequence.length <= 0 && r.slot_out < 0) continue;
    r.slot_in = resolve_slot(args.initial, sequence.index);
    if (args.has_initial_state != nullptr && args.has_initial_state[sequence.index] == 0) r.slot_in = -1;
    r.row = sequence.start;
    r.flags = kFirstChunk;
    r.head = tile - rank * args.num_value_heads;
    r.sequence = sequence.index;
    r.half = static_cast<int16_t>(half);
    r.key_head = static_cast<int16_t>(r.head / (args.num_value_heads / args.num_key_heads));
    r.chunk = sequence.first_chunk;
    r.position = 0;
    walker.remaining = max(sequence.length, 0);
    if (r.slot_in >= 0) {
      l2_prefetch(state_matrix(args.initial, r.slot_in, r.head), kHeadDim * kHeadDim * static_cast<uint32_t>(element_size(args.initial.type)));
    }
    return;
  }
}

// Writes the record of chunk m.
template <typename Traits>
__device__ __forceinline__ void produce_chunk(const ChunkForwardKernelParams& p, uint32_t m) {
  ChunkWalker& walker = *reinterpret_cast<ChunkWalker*>(shared_memory() + Traits::kSmemWalker);
  ChunkRecord& record = reinterpret_cast<ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m % Traits::kChunkRing];
  if (walker.remaining < 0) open_tile<Traits>(p, walker);
  if (walker.remaining < 0) {
    record.valid = -1;
    return;
  }
  ChunkRecord r = walker.next;
  r.valid = min(walker.remaining, kChunk);
  walker.remaining -= r.valid;
  if (walker.remaining == 0) {
    r.flags |= kLastChunk;
    walker.remaining = -1;
  }
  record = r;
  walker.next.row = r.row + kChunk;
  walker.next.flags = 0;
  walker.next.chunk = r.chunk + 1;
  walker.next.position = r.position + 1;
}

// One thread's 64 values of S^T, rows (V) dv and dv + 8, columns (K) 8j + 2q and the next, from or to a state matrix.
template <typename Store, bool kVFirst, bool kWrite>
__device__ __forceinline__ void move_state(Store* matrix, float (&s)[64], int dv, int q) {
  constexpr int kStrideK = kVFirst ? 1 : kHeadDim;
  constexpr int kStrideV = kVFirst ? kHeadDim : 1;
  Store* base = matrix + dv * kStrideV + 2 * q * kStrideK;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Store* element = base + (8 * j + (i & 1)) * kStrideK + 8 * (i >> 1) * kStrideV;
      if constexpr (kWrite) {
        *element = static_cast<Store>(s[4 * j + i]);
      } else {
        s[4 * j + i] = static_cast<float>(*element);
      }
    }
  }
}

template <bool kWrite>
__device__ __forceinline__ void move_state(void* matrix, ElementType type, bool v_first, float (&s)[64], int dv, int q) {
  if (type == ElementType::kFloat32) {
    v_first ? move_state<float, true, kWrite>(static_cast<float*>(matrix), s, dv, q)
            : move_state<float, false, kWrite>(static_cast<float*>(matrix), s, dv, q);
  } else if (type == ElementType::kBFloat16) {
    v_first ? move_state<__nv_bfloat16, true, kWrite>(static_cast<__nv_bfloat16*>(matrix), s, dv, q)
            : move_state<__nv_bfloat16, false, kWrite>(static_cast<__nv_bfloat16*>(matrix), s, dv, q);
  } else {
    v_first ? move_state<__half, true, kWrite>(static_cast<__half*>(matrix), s, dv, q)
            : move_state<__half, false, kWrite>(static_cast<__half*>(matrix), s, dv, q);
  }
}

// The place of a warp and lane in the fragments of one 64-row tile.
struct LanePlace {
  int warp, lane, q, row;   // q = lane % 4, row = 16 warp + lane / 4
  uint32_t swizzle;         // 16-byte chunk exclusive-or of the lane's ldmatrix / stmatrix row
  uint32_t trans_row;       // byte offset of that row, 16-row block 0: transposed (row = token or column, chunk = warp's 16 rows)
  uint32_t trans_chunk;     // swizzled chunk, in bytes
};

__device__ __forceinline__ LanePlace lane_place(int thread) {
  LanePlace at;
  at.warp = (thread >> 5) & 3;
  at.lane = thread & 31;
  at.q = at.lane & 3;
  at.row = 16 * at.warp + (at.lane >> 2);
  at.swizzle = at.lane & 7;
  at.trans_row = (8 * (at.lane >> 4) + (at.lane & 7)) * 128;
  at.trans_chunk = ((2 * at.warp + ((at.lane >> 3) & 1)) ^ at.swizzle) << 4;
  return at;
}

// ---------------------------------------------------------------------------------------------------------------- auxiliary role

// All gate vectors of one chunk, by one warp; lane l holds tokens 2l and 2l + 1. Every exponent is a difference, at most 0 for g <= 0.
template <typename Traits>
__device__ __forceinline__ void make_gates(const ChunkForwardArgs& args, const ChunkRecord& chunk, uint32_t gate, int lane) {
  copy_async_wait_all();
  __syncwarp();
  float2 g = load_shared_f2(gate + Traits::kGateSum + 8 * lane);
  float2 beta = load_shared_f2(gate + Traits::kGateBeta + 8 * lane);
  if (args.beta == nullptr) {
    beta.x = 2 * lane < chunk.valid ? 1.0f : 0.0f;
    beta.y = 2 * lane + 1 < chunk.valid ? 1.0f : 0.0f;
  }
  g.x = g.x < kGateFloor ? kGateFloor : g.x;  // keeps NaN
  g.y = g.y < kGateFloor ? kGateFloor : g.y;
  float sum = g.x + g.y;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += below;
  }
  float before = __shfl_up_sync(0xffffffffu, sum, 1);
  before = lane == 0 ? 0.0f : before;
  if constexpr (Traits::kSave) {
    if (args.g_cumsum != nullptr && chunk.half == 0) {
      float* out = args.g_cumsum + (static_cast<int64_t>(chunk.row) + 2 * lane) * args.num_value_heads + chunk.head;
      if (2 * lane < chunk.valid) out[0] = before + g.x;
      if (2 * lane + 1 < chunk.valid) out[args.num_value_heads] = sum;
    }
  }
  const float cx = (before + g.x) * kLog2e;
  const float cy = sum * kLog2e;
  const float block_end = __shfl_sync(0xffffffffu, cy, lane | 7);
  float previous_end = __shfl_sync(0xffffffffu, cy, (lane & 24) - 1);
  previous_end = lane < 8 ? 0.0f : previous_end;
  const float chunk_end = __shfl_sync(0xffffffffu, cy, 31);
  const int i = (lane >> 2) & 3, j = lane & 3;
  const float pair_row = __shfl_sync(0xffffffffu, cy, 8 * i - 1);
  const float pair_column = __shfl_sync(0xffffffffu, cy, 8 * j + 7);

  const float gamma_x = exp2_approx(cx), gamma_y = exp2_approx(cy);
  const float column_x = exp2_approx(block_end - cx), column_y = exp2_approx(block_end - cy);
  const uint32_t permuted = gate + ((lane & 3) * 20 + (lane >> 2) * 2) * 4;
  const uint32_t natural = gate + 8 * lane;
  store_shared_f2(permuted + Traits::kGateDecay, gamma_x, gamma_y);
  store_shared_f2(permuted + Traits::kGateScaled, gamma_x * args.scale, gamma_y * args.scale);
  store_shared_f2(permuted + Traits::kGateRest, exp2_approx(chunk_end - cx), exp2_approx(chunk_end - cy));
  store_shared_f2(permuted + Traits::kGateColumnA, column_x * beta.x, column_y * beta.y);
  store_shared_f2(permuted + Traits::kGateColumnP, column_x * args.scale, column_y * args.scale);
  store_shared_f2(natural + Traits::kGateRow, exp2_approx(cx - previous_end), exp2_approx(cy - previous_end));
  store_shared_f2(natural + Traits::kGateBeta, beta.x, beta.y);
  store_shared_f2(natural + Traits::kGateSum, cx, cy);
  if (lane < 16) store_shared_f1(gate + Traits::kGatePair + 4 * lane, i > j ? exp2_approx(pair_row - pair_column) : 0.0f);
}

// Raw g and beta of a chunk into its gate stage, zeros past the end.
template <typename Traits>
__device__ __forceinline__ void load_gates(const ChunkForwardArgs& args, const ChunkRecord& chunk, uint32_t gate, int lane) {
#pragma unroll
  for (int t = lane; t < kChunk; t += 32) {
    const bool valid = t < chunk.valid;
    const int64_t row = chunk.row + (valid ? t : 0);
    const float* g = args.g != nullptr ? args.g + row * args.g_token_stride + chunk.head * args.g_head_stride : nullptr;
    const float* beta = args.beta != nullptr ? args.beta + row * args.beta_token_stride + chunk.head * args.beta_head_stride : nullptr;
    // With nothing to read, any mapped address does: zero bytes are taken from it.
    copy_async_4(gate + Traits::kGateSum + 4 * t, g != nullptr ? g : args.q, valid && g != nullptr);
    copy_async_4(gate + Traits::kGateBeta + 4 * t, beta != nullptr ? beta : args.q, valid && beta != nullptr);
  }
}

// Zeros rows valid..63 of `halves` 64x64 swizzled half tiles, so that what follows the sequence in memory, Inf and NaN included,
// meets no product. By one whole warpgroup; the caller synchronises.
__device__ __forceinline__ void clear_tail_rows(uint32_t tile, int halves, int valid, int thread) {
  const int per_half = (kChunk - valid) * 8;
  for (int i = thread; i < per_half * halves; i += 128) {
    const int half = i >= per_half;
    store_shared_u4(tile + half * kChunk * 128 + valid * 128 + (i - half * per_half) * 16, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
}

// Multiplies the lower triangle of a 64x64 accumulator by G and beta (A_g) or by scale G (P) and stores it as a wgmma operand.
// Blocks below the diagonal: G_ij = row_i * pair_IJ * column_j; diagonal blocks: the exponential of the difference itself.
// x: the three left column blocks; y: the warp's block on the diagonal.
template <typename Traits, bool kIsA>
__device__ __forceinline__ void store_gated(const float* x, float (&y)[8], uint32_t tile, uint32_t gate, float scale,
                                            const LanePlace& at) {
  using Element = typename Traits::Element;
  const uint32_t row_address = tile + (16 * at.warp + (at.lane & 15)) * 128;
  {
    const float sum0 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row);
    const float sum1 = load_shared_f1(gate + Traits::kGateSum + 4 * at.row + 32);
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint32_t columns = gate + (16 * at.warp + 8 * b + 2 * at.q) * 4;
      const float2 sum = load_shared_f2(columns + Traits::kGateSum);
      float2 factor = make_float2(scale, scale);
      if constexpr (kIsA) factor = load_shared_f2(columns + Traits::kGateBeta);
      const int i = at.lane >> 2, j = 8 * b + 2 * at.q;
      y[4 * b + 0] = j <= i ? y[4 * b + 0] * exp2_approx(sum0 - sum.x) * factor.x : 0.0f;
      y[4 * b + 1] = j + 1 <= i ? y[4 * b + 1] * exp2_approx(sum0 - sum.y) * factor.y : 0.0f;
      y[4 * b + 2] = j <= i + 8 ? y[4 * b + 2] * exp2_approx(sum1 - sum.x) * factor.x : 0.0f;
      y[4 * b + 3] = j + 1 <= i + 8 ? y[4 * b + 3] * exp2_approx(sum1 - sum.y) * factor.y : 0.0f;
    }
    store_matrix_x4(row_address + (((2 * at.warp + (at.lane >> 4)) ^ at.swizzle) << 4), pack2<Element>(y[0], y[1]),
                    pack2<Element>(y[2], y[3]), pack2<Element>(y[4], y[5]), pack2<Element>(y[6], y[7]));
  }
  const float row0 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row);
  const float row1 = load_shared_f1(gate + Traits::kGateRow + 4 * at.row + 32);
  constexpr uint32_t kColumn = kIsA ? Traits::kGateColumnA : Traits::kGateColumnP;
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float pair = load_shared_f1(gate + Traits::kGatePair + 16 * at.warp + 4 * b);
      const float4 column = load_shared_f4(gate + kColumn + 80 * at.q + 16 * b);
      const float f0 = row0 * pair, f1 = row1 * pair;
      const float* z = x + 8 * b;
      store_matrix_x4(row_address + (((2 * b + (at.lane >> 4)) ^ at.swizzle) << 4),
                      pack2<Element>(z[0] * (f0 * column.x), z[1] * (f0 * column.y)),
                      pack2<Element>(z[2] * (f1 * column.x), z[3] * (f1 * column.y)),
                      pack2<Element>(z[4] * (f0 * column.z), z[5] * (f0 * column.w)),
                      pack2<Element>(z[6] * (f1 * column.z), z[7] * (f1 * column.w)));
    }
  }
}

// The warp's block on the diagonal of a 64x64 accumulator.
__device__ __forceinline__ float diagonal_block(const float (&x)[32], int i, int warp) {
  return warp == 0 ? x[i] : warp == 1 ? x[8 + i] : warp == 2 ? x[16 + i] : x[24 + i];
}

// M = strict_lower(diag(beta) K K^T) from the accumulator of K K^T into the inverse's workspace: diagonal 16x16 blocks in fp32,
// column-major; the blocks below as fp16, transposed: tile[column][row].
template <typename Traits>
__device__ __forceinline__ void store_kkt(const float (&kkt)[32], uint32_t tile, uint32_t diagonal, uint32_t gate, const LanePlace& at) {
  const float beta0 = load_shared_f1(gate + Traits::kGateBeta + 4 * at.row);
  const float beta1 = load_shared_f1(gate + Traits::kGateBeta + 4 * at.row + 32);
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    if (b < at.warp) {
      const float* x = kkt + 8 * b;
      store_matrix_x4_trans(tile + b * 2048 + at.trans_row + at.trans_chunk, pack2<__half>(beta0 * x[0], beta0 * x[1]),
                            pack2<__half>(beta1 * x[2], beta1 * x[3]), pack2<__half>(beta0 * x[4], beta0 * x[5]),
                            pack2<__half>(beta1 * x[6], beta1 * x[7]));
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = diagonal_block(kkt, i, at.warp);
    // Element (r, c) of the block is float c * 16 + ((r / 4) ^ (c / 2 % 4)) * 4 + r % 4: no worse than two-way bank conflicts.
    const int r = (at.lane >> 2) + 8 * ((i >> 1) & 1);
    const int c = 2 * at.q + 8 * (i >> 2) + (i & 1);
    store_shared_f1(diagonal + (c * 16 + (((r >> 2) ^ at.q) << 2) + (r & 3)) * 4, x * ((i >> 1) & 1 ? beta1 : beta0));
  }
}

// Solves (I + M_ww) [X_w | D_w] = [M_w below the diagonal | I] for the warp's 16 rows in fp32, in place; a lane owns columns
// `lane` and `lane + 32`. X = D M_below and D, block-diagonal, share the tile: A = (I + X)^-1 D.
__device__ __forceinline__ void solve_diagonal_blocks(uint32_t tile, uint32_t diagonal, const LanePlace& at) {
  float x[2][16];
  const uint32_t address = tile + at.lane * 128 + (((2 * at.warp) ^ at.swizzle) << 4);  // rows 0..7; rows 8..15 at address ^ 16
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int identity = at.lane + 32 * h - 16 * at.warp;  // the column of I, if 0..15; negative: a column of M
    const uint4 low = load_shared_u4(address + 4096 * h), high = load_shared_u4((address ^ 16) + 4096 * h);
    const uint32_t packed[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack2<__half>(packed[i]);
      x[h][2 * i] = identity < 0 ? pair.x : (identity == 2 * i ? 1.0f : 0.0f);
      x[h][2 * i + 1] = identity < 0 ? pair.y : (identity == 2 * i + 1 ? 1.0f : 0.0f);
    }
  }
#pragma unroll
  for (int k = 0; k < 15; ++k) {
#pragma unroll
    for (int c = (k + 1) / 4; c < 4; ++c) {
      const float4 m = load_shared_f4(diagonal + k * 64 + ((c ^ ((k >> 1) & 3)) << 4));
      const float below[4] = {m.x, m.y, m.z, m.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = 4 * c + i;
        if (r > k) {
          x[0][r] = fmaf(-below[i], x[0][k], x[0][r]);
          x[1][r] = fmaf(-below[i], x[1][k], x[1][r]);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t packed[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) packed[i] = pack2<__half>(x[h][2 * i], x[h][2 * i + 1]);
    store_shared_u4(address + 4096 * h, make_uint4(packed[0], packed[1], packed[2], packed[3]));
    store_shared_u4((address ^ 16) + 4096 * h, make_uint4(packed[4], packed[5], packed[6], packed[7]));
  }
}

// A = (I + X)^-1 D = (I - X + X^2 - X^3) D from the tile that holds both; X^4 = 0, and of X^3 only block (3, 0) is not zero.
// fp16 operands, fp32 accumulators; the left operands stay in registers. a: the blocks of columns 0..47 left of the diagonal
// (elsewhere zero); diagonal: the warp's block of D, which is A's.
__device__ __forceinline__ void invert(float (&a)[3][8], float (&diagonal)[8], uint32_t tile, const LanePlace& at) {
  const uint64_t base = wgmma_descriptor(tile);
  auto block = [&](int k, int n) { return wgmma_advance(base, n * 2048 + k * 32); };
  uint32_t x[3][4];
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    load_matrix_x4_trans(tile + b * 2048 + at.trans_row + at.trans_chunk, x[b][0], x[b][1], x[b][2], x[b][3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[b][i] = b < at.warp ? x[b][i] : 0u;
  }
  float square0[8], square1[8], cube[8];
  wgmma_fence();
  mma_rs_n16_init<__half>(square0, x[1], block(1, 0));
  mma_rs_n16<__half>(square0, x[2], block(2, 0));
  mma_rs_n16_init<__half>(square1, x[2], block(2, 1));
  wgmma_commit();
  wgmma_wait<0>();
  pin(square0);
  pin(square1);
  uint32_t y[3][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[1][i] = pack2<__half>(square1[2 * i], square1[2 * i + 1]);
  pin(y[1]);
  wgmma_fence();
  mma_rs_n16_init<__half>(cube, y[1], block(1, 0));
  wgmma_commit();
  wgmma_wait<0>();
  pin(cube);
  pin(y[1]);
  // The identity of I - X + .. meets D_w only, in the diagonal block: left out here.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x0 = unpack2<__half>(x[0][i]);
    y[0][i] = pack2<__half>(square0[2 * i] - cube[2 * i] - x0.x, square0[2 * i + 1] - cube[2 * i + 1] - x0.y);
    const float2 x1 = unpack2<__half>(x[1][i]);
    y[1][i] = pack2<__half>(square1[2 * i] - x1.x, square1[2 * i + 1] - x1.y);
    y[2][i] = x[2][i] ^ 0x80008000u;
  }
  wgmma_fence();
#pragma unroll
  for (int b = 0; b < 3; ++b) mma_rs_n16_init<__half>(a[b], y[b], block(b, b));
  wgmma_commit();
  uint32_t d[4];
  load_matrix_x4_trans(tile + at.warp * 2048 + at.trans_row + at.trans_chunk, d[0], d[1], d[2], d[3]);
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < 3; ++b) {
    pin(a[b]);
    pin(y[b]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<__half>(d[i]);
    diagonal[2 * i] = pair.x;
    diagonal[2 * i + 1] = pair.y;
  }
}

template <typename T>
__device__ __forceinline__ void product_64x64(float (&d)[32], uint32_t a_tile, uint32_t b_tile) {
  const uint64_t a = wgmma_descriptor(a_tile), b = wgmma_descriptor(b_tile);
  wgmma_fence();
  mma_ss_n64_init<T>(d, a, b);
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const uint32_t offset = (i >> 2) * kChunk * 128 + (i & 3) * 32;
    mma_ss_n64<T>(d, wgmma_advance(a, offset), wgmma_advance(b, offset));
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
}

template <typename Traits>
struct AuxRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  int group;   // 0 or 1
  int thread;  // 0..127

  // Hides a number from the compiler, so that addresses made from it are recomputed, not kept: registers are short here.
  template <typename Number>
  static __device__ Number opaque(Number value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  __device__ int opaque_thread() const { return opaque(thread); }

  __device__ const ChunkRecord& record(uint32_t m) const {
    return reinterpret_cast<const ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m % Traits::kChunkRing];
  }
  __device__ uint32_t stage_k(uint32_t m) const { return smem() + Traits::kSmemK + m % Traits::kStagesK * Traits::kBytesK; }
  __device__ uint32_t stage_q(uint32_t m) const { return smem() + Traits::kSmemQ + m % Traits::kStagesQ * Traits::kBytesK; }
  __device__ uint32_t stage_v(uint32_t m) const { return smem() + Traits::kSmemV + m % Traits::kStagesV * Traits::kBytesV; }
  __device__ uint32_t stage_gate(uint32_t m) const { return smem() + Traits::kSmemGate + m % Traits::kStagesGate * Traits::kBytesGate; }
  __device__ uint32_t inverse_tile() const { return smem() + Traits::kSmemInverse + opaque(group) * Traits::kBytesMatrix; }
  __device__ uint32_t diagonal_blocks() const {
    return smem() + Traits::kSmemDiagonal + opaque(group) * Traits::kBytesDiagonal + (opaque_thread() >> 5) * 1024;
  }
  __device__ void sync() const { named_barrier_sync(1 + group, 128); }

  // By one thread each.
  __device__ void load_k(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid < 0) return;
    const uint32_t barrier = smem() + Traits::kFullK + 8 * (m % Traits::kStagesK);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(stage_k(m), &p.k, barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_q(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid < 0) return;
    const uint32_t barrier = smem() + Traits::kFullQ + 8 * (m % Traits::kStagesQ);
    mbarrier_arrive_expect(barrier, Traits::kBytesK);
    tma_load_4d(stage_q(m), &p.q, barrier, 0, c.row, 0, c.key_head);
  }
  __device__ void load_v(uint32_t m, uint32_t barrier) const {
    const ChunkRecord& c = record(m);
    mbarrier_arrive_expect(barrier, Traits::kBytesV);
    tma_load_4d(stage_v(m), &p.v, barrier, 0, c.row, c.half, c.head);
  }

  // O of chunk m from its V stage to global memory: the copy engine where the chunk is full, rows by hand at a sequence's end.
  __device__ void store_o(uint32_t m) const {
    const ChunkRecord& c = record(m);
    if (c.valid == kChunk) {
      if (thread == 0) {
        fence_proxy_async();
        tma_store_4d(&p.o, stage_v(m), 0, c.row, c.half, c.head);
        tma_store_commit();
      }
    } else if (c.valid > 0) {
      constexpr int kPieces = Traits::kDv / 8;
      Element* out = static_cast<Element*>(p.args.o) + c.row * p.args.o_token_stride + c.head * p.args.o_head_stride + c.half * 64;
      for (int i = thread; i < c.valid * kPieces; i += 128) {
        const int row = i / kPieces, piece = i % kPieces;
        const uint4 value = load_shared_u4(stage_v(m) + (piece >> 3) * Traits::kHalf + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
        *reinterpret_cast<uint4*>(out + row * p.args.o_token_stride + piece * 8) = value;
      }
      sync();
    }
  }

  __device__ void save_a(const float (&a)[3][8], const float (&diagonal)[8], const ChunkRecord& c, const LanePlace& at) const {
    if (p.args.a == nullptr || c.half != 0) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row + 8 * h;
      if (row >= c.valid) continue;
      uint32_t* out = reinterpret_cast<uint32_t*>(static_cast<Element*>(p.args.a) +
                                                  ((static_cast<int64_t>(c.row) + row) * p.args.num_value_heads + c.head) * kChunk);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float* x = b < 3 ? a[b] : diagonal;  // zeros right of the diagonal
        const uint32_t low = b < at.warp ? pack2<Element>(x[2 * h], x[2 * h + 1]) : 0u;
        const uint32_t high = b < at.warp ? pack2<Element>(x[4 + 2 * h], x[5 + 2 * h]) : 0u;
        out[8 * b + at.q] = b == at.warp ? pack2<Element>(diagonal[2 * h], diagonal[2 * h + 1]) : low;
        out[8 * b + 4 + at.q] = b == at.warp ? pack2<Element>(diagonal[4 + 2 * h], diagonal[5 + 2 * h]) : high;
      }
    }
  }

  // Everything the state groups need for chunk m. Waits for the end of chunk m - 2 in the middle: until then only memory of its own.
  __device__ void prepare(uint32_t m) {
    const int valid = record(m).valid;
    if (opaque_thread() >> 5 == 1) make_gates<Traits>(p.args, record(m), stage_gate(m), opaque_thread() & 31);

    // K K^T, its blocks into the inverse's workspace, the inverse.
    mbarrier_wait(smem() + Traits::kFullK + 8 * (m % Traits::kStagesK), m / Traits::kStagesK & 1);
    if (valid < kChunk) {
      clear_tail_rows(stage_k(m), 2, valid, thread);
      sync();
    }
    {
      float kkt[32];
      product_64x64<Element>(kkt, stage_k(m), stage_k(m));
      sync();  // the gates are there, and every warp is done with the previous inverse
      store_kkt<Traits>(kkt, inverse_tile(), diagonal_blocks(), stage_gate(m), lane_place(opaque_thread()));
    }
    __syncwarp();
    solve_diagonal_blocks(inverse_tile(), diagonal_blocks(), lane_place(opaque_thread()));
    fence_proxy_async();
    sync();
    {
      float a[3][8], diagonal[8];
      invert(a, diagonal, inverse_tile(), lane_place(opaque_thread()));
      m = opaque(m);
      if (m >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (m & 1), (m - 2) >> 1 & 1);
      if constexpr (Traits::kSave) save_a(a, diagonal, record(m), lane_place(opaque_thread()));
      store_gated<Traits, true>(a[0], diagonal, smem() + Traits::kSmemA + (m & 1) * Traits::kBytesMatrix, stage_gate(m), 1.0f,
                                lane_place(opaque_thread()));
    }
    fence_proxy_async();
    __syncwarp();
    if ((thread & 31) == 0) mbarrier_arrive(smem() + Traits::kFullA + 8 * (m & 1));

    // The stages of chunk m - 2, and O of chunk m - 3, are this group's to pass on.
    m = opaque(m);
    if (m >= 3) store_o(m - 3);
    if (thread == 0) {
      if (group == 0) {
#pragma unroll 1
        for (uint32_t ahead = 4; ahead < 6; ++ahead) produce_chunk<Traits>(p, m + ahead);
      }
      load_k(m + 2);
      if (record(m + 1).valid >= 0) load_q(m + 1);
    }
    if (opaque_thread() >> 5 == 1 && record(m + 2).valid >= 0) {
      load_gates<Traits>(p.args, record(m + 2), stage_gate(m + 2), opaque_thread() & 31);
    }

    // Q K^T and P.
    m = opaque(m);
    mbarrier_wait(smem() + Traits::kFullQ + 8 * (m % Traits::kStagesQ), m / Traits::kStagesQ & 1);
    float qkt[32];
    product_64x64<Element>(qkt, stage_q(m), stage_k(m));
    m = opaque(m);
    const uint32_t full_p = smem() + Traits::kFullP + 8 * (m & 1);
    if (thread == 0) {
      tma_store_wait_read();  // O of chunk m - 3 has left V's stage
      load_v(m, record(m).valid == kChunk ? full_p : smem() + Traits::kTailV + 8 * group);
    }
    const LanePlace at = lane_place(opaque_thread());
    float diagonal[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) diagonal[i] = diagonal_block(qkt, i, at.warp);
    store_gated<Traits, false>(qkt, diagonal, smem() + Traits::kSmemP + (m & 1) * Traits::kBytesMatrix, stage_gate(m), p.args.scale, at);
    fence_proxy_async();
    if (record(m).valid < kChunk) clear_tail_v(m, record(m).valid, full_p);
    __syncwarp();
    if ((thread & 31) == 0) mbarrier_arrive(full_p);
  }

  // At a sequence's end V comes through a barrier of this group's own, and is passed on once its tail is cleared.
  __device__ void clear_tail_v(uint32_t m, int valid, uint32_t full_p) {
    uint32_t& tails = reinterpret_cast<uint32_t*>(shared_memory() + Traits::kTailCount)[group];
    mbarrier_wait(smem() + Traits::kTailV + 8 * group, tails & 1);
    clear_tail_rows(stage_v(m), Traits::kStateGroups, valid, thread);
    sync();
    if (thread == 0) {
      ++tails;
      mbarrier_arrive(full_p);
    }
  }

  __device__ void run() {
    if (thread == 0) {
      load_k(group);
      if (group == 0) load_q(0);
    }
    if (thread >> 5 == 1 && record(group).valid >= 0) load_gates<Traits>(p.args, record(group), stage_gate(group), thread & 31);
    uint32_t m = group;
#pragma unroll 1
    for (; record(m).valid >= 0; m += 2) prepare(m);
    // The last chunks' O: the chunk after the last counts as done once the state groups have written the last O.
    const bool follows_end = m > 0 && record(m - 1).valid < 0;
    for (uint32_t i = m; i <= (follows_end ? m : m + 2); i += 2) {
      if (i >= 2) mbarrier_wait(smem() + Traits::kDone + 8 * (i & 1), (i - 2) >> 1 & 1);
      if (i >= 3) store_o(i - 3);
    }
    if (thread == 0) tma_store_wait_all();
  }
};

// -------------------------------------------------------------------------------------------------------------------- state role

template <typename Traits>
struct StateRole {
  using Element = typename Traits::Element;
  const ChunkForwardKernelParams& p;
  int group;  // which 64 rows of V
  LanePlace at;

  __device__ const ChunkRecord& record(uint32_t m) const {
    return reinterpret_cast<const ChunkRecord*>(shared_memory() + Traits::kSmemChunks)[m % Traits::kChunkRing];
  }
  __device__ int first_row(const ChunkRecord& c) const { return 64 * (group + c.half) + at.row; }

  __device__ void load_initial(float (&s)[64], const ChunkRecord& c) const {
    if (c.slot_in >= 0) {
      const StateSet& set = p.args.initial;
      move_state<false>(state_matrix(set, c.slot_in, c.head), set.type, p.args.state_v_first, s, first_row(c), at.q);
    } else {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    }
  }

  // The state at the chunk's start, as the products below see it.
  __device__ void save_h(const uint32_t (&packed)[32], const ChunkRecord& c) const {
    if (p.args.h == nullptr) return;
    Element* base = static_cast<Element*>(p.args.h) +
                    (static_cast<int64_t>(c.chunk) * p.args.num_value_heads + c.head) * (kHeadDim * kHeadDim);
    const int dv = first_row(c);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int row = dv + 8 * (i & 1), column = 8 * (i >> 1) + 2 * at.q;
      if (p.args.state_v_first) {
        *reinterpret_cast<uint32_t*>(base + row * kHeadDim + column) = packed[i];
      } else {
        uint16_t* element = reinterpret_cast<uint16_t*>(base + column * kHeadDim + row);
        element[0] = static_cast<uint16_t>(packed[i] & 0xffff);
        element[kHeadDim] = static_cast<uint16_t>(packed[i] >> 16);
      }
    }
  }

  // The state after every n-th full chunk of a sequence.
  __device__ void save_checkpoint(float (&s)[64], const ChunkRecord& c) const {
    const ChunkForwardArgs& args = p.args;
    if (args.checkpoints == nullptr || c.valid < kChunk || (c.position + 1) % args.checkpoint_every_chunks != 0) return;
    const int64_t row = args.checkpoint_cu_starts[c.sequence] + (c.position + 1) / args.checkpoint_every_chunks - 1;
    char* matrix = static_cast<char*>(args.checkpoints) +
                   (row * args.num_value_heads + c.head) * (kHeadDim * kHeadDim) * element_size(args.checkpoint_type);
    move_state<true>(matrix, args.checkpoint_type, args.state_v_first, s, first_row(c), at.q);
  }

  // O^T of a chunk into the V stage it no longer needs, for the auxiliary group to send.
  __device__ void put_o(const float (&o)[32], uint32_t stage) const {
    const uint32_t address = stage + group * Traits::kHalf + at.trans_row + at.trans_chunk;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const float* x = o + 8 * b;
      store_matrix_x4_trans(address + b * 2048, pack2<Element>(x[0], x[1]), pack2<Element>(x[2], x[3]), pack2<Element>(x[4], x[5]),
                            pack2<Element>(x[6], x[7]));
    }
  }

  __device__ void run() const {
    float s[64];  // S^T: rows V, columns K
    float o[32];  // O^T: rows V, columns tokens
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] = 0.0f;
    uint32_t stage_q = 0, stage_v = 0, previous_v = Traits::kStagesV - 1;
    uint32_t m = 0;
#pragma unroll 1
    for (;; ++m) {
      const ChunkRecord& chunk = record(m);
      if (chunk.valid < 0) break;
      if (chunk.flags & kFirstChunk) load_initial(s, chunk);
      const uint32_t slot = m & 1, parity = m >> 1 & 1;
      const uint32_t k_tile = smem() + Traits::kSmemK + m % Traits::kStagesK * Traits::kBytesK;
      const uint32_t q_tile = smem() + Traits::kSmemQ + stage_q * Traits::kBytesK;
      const uint32_t v_base = smem() + Traits::kSmemV;
      const uint32_t gate = smem() + Traits::kSmemGate + m % Traits::kStagesGate * Traits::kBytesGate;
      const uint32_t columns = gate + 80 * at.q;
      // P of this chunk covers K, Q, V and the gates as well: its makers have waited for them, V arrives on the same barrier.
      mbarrier_wait(smem() + Traits::kFullP + 8 * slot, parity);

      wgmma_wait<0>();
      pin(s);
      pin(o);
      // u^T = S0^T K^T, then o^T = S0^T Q^T behind it.
      uint32_t packed[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) packed[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
      if constexpr (Traits::kSave) save_h(packed, chunk);
      float u[32];
      const uint64_t k_rows = wgmma_descriptor(k_tile), q_rows = wgmma_descriptor(q_tile);
      wgmma_fence();
      mma_rs_n64_init<Element>(u, packed, k_rows);
#pragma unroll
      for (int i = 1; i < 8; ++i) {
        mma_rs_n64<Element>(u, packed + 4 * i, wgmma_advance(k_rows, (i >> 2) * Traits::kHalf + (i & 3) * 32));
      }
      wgmma_commit();
      // O of the previous chunk leaves while S K runs. (The first time: zeros into a stage that nothing reads before its load.)
      put_o(o, v_base + previous_v * Traits::kBytesV);
      wgmma_fence();
      mma_rs_n64_init<Element>(o, packed, q_rows);
#pragma unroll
      for (int i = 1; i < 8; ++i) {
        mma_rs_n64<Element>(o, packed + 4 * i, wgmma_advance(q_rows, (i >> 2) * Traits::kHalf + (i & 3) * 32));
      }
      wgmma_commit();
      // Under both products: gC S0, and V in the accumulator's layout.
      const float last = load_shared_f1(gate + Traits::kGateDecay + Traits::kGateLast);
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= last;
      uint32_t v[16];
      const uint32_t v_rows = v_base + stage_v * Traits::kBytesV + group * Traits::kHalf + at.trans_row + at.trans_chunk;
#pragma unroll
      for (int b = 0; b < 4; ++b) load_matrix_x4_trans(v_rows + b * 2048, v[4 * b], v[4 * b + 1], v[4 * b + 2], v[4 * b + 3]);
      wgmma_wait<0>();
      pin(u);
      pin(o);
      pin(packed);

      // W^T = V^T - u^T diag(gamma)
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float4 gamma = load_shared_f4(columns + Traits::kGateDecay + 16 * b);
        const float* x = u + 8 * b;
        float2 y = unpack2<Element>(v[4 * b]);
        v[4 * b] = pack2<Element>(fmaf(-gamma.x, x[0], y.x), fmaf(-gamma.y, x[1], y.y));
        y = unpack2<Element>(v[4 * b + 1]);
        v[4 * b + 1] = pack2<Element>(fmaf(-gamma.x, x[2], y.x), fmaf(-gamma.y, x[3], y.y));
        y = unpack2<Element>(v[4 * b + 2]);
        v[4 * b + 2] = pack2<Element>(fmaf(-gamma.z, x[4], y.x), fmaf(-gamma.w, x[5], y.y));
        y = unpack2<Element>(v[4 * b + 3]);
        v[4 * b + 3] = pack2<Element>(fmaf(-gamma.z, x[6], y.x), fmaf(-gamma.w, x[7], y.y));
      }
      // V'^T = W^T Ag^T; tokens 0..31 need the first two 16-token steps only, Ag being lower triangular.
      mbarrier_wait(smem() + Traits::kFullA + 8 * slot, parity);
      const uint64_t a_rows = wgmma_descriptor(smem() + Traits::kSmemA + slot * Traits::kBytesMatrix);
      float low[16], high[16];
      wgmma_fence();
      mma_rs_n32_init<Element>(low, v, a_rows);
      mma_rs_n32_init<Element>(high, v, wgmma_advance(a_rows, 4096));
      mma_rs_n32<Element>(low, v + 4, wgmma_advance(a_rows, 32));
      mma_rs_n32<Element>(high, v + 4, wgmma_advance(a_rows, 4096 + 32));
      mma_rs_n32<Element>(high, v + 8, wgmma_advance(a_rows, 4096 + 64));
      mma_rs_n32<Element>(high, v + 12, wgmma_advance(a_rows, 4096 + 96));
      wgmma_commit();
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float4 gamma = load_shared_f4(columns + Traits::kGateScaled + 16 * b);
        float* x = o + 8 * b;
        x[0] *= gamma.x, x[1] *= gamma.y, x[2] *= gamma.x, x[3] *= gamma.y;
        x[4] *= gamma.z, x[5] *= gamma.w, x[6] *= gamma.z, x[7] *= gamma.w;
      }
      wgmma_wait<0>();
      pin(low);
      pin(high);
      pin(v);

      // O^T += V'^T P^T
      uint32_t corrected[16];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        corrected[i] = pack2<Element>(low[2 * i], low[2 * i + 1]);
        corrected[8 + i] = pack2<Element>(high[2 * i], high[2 * i + 1]);
      }
      const uint64_t p_rows = wgmma_descriptor(smem() + Traits::kSmemP + slot * Traits::kBytesMatrix);
      pin(o);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_rs_n64<Element>(o, corrected + 4 * i, wgmma_advance(p_rows, 32 * i));
      // S1^T = gC S0^T + (V'^T diag(gC / gamma)) K
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const float4 rest = load_shared_f4(columns + Traits::kGateRest + 16 * b);
        const float* x = b < 2 ? low + 8 * b : high + 8 * (b - 2);
        v[4 * b] = pack2<Element>(x[0] * rest.x, x[1] * rest.y);
        v[4 * b + 1] = pack2<Element>(x[2] * rest.x, x[3] * rest.y);
        v[4 * b + 2] = pack2<Element>(x[4] * rest.z, x[5] * rest.w);
        v[4 * b + 3] = pack2<Element>(x[6] * rest.z, x[7] * rest.w);
      }
      const uint64_t k_columns = wgmma_descriptor(k_tile, Traits::kHalf);
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) mma_rs_n128_trans<Element>(s, v + 4 * i, wgmma_advance(k_columns, 2048 * i));
      wgmma_commit();
      wgmma_wait<0>();
      pin(o);
      pin(s);
      pin(corrected);
      pin(v);
      if (at.lane == 0) mbarrier_arrive(smem() + Traits::kDone + 8 * slot);

      if constexpr (Traits::kSave) save_checkpoint(s, chunk);
      if ((chunk.flags & kLastChunk) && chunk.slot_out >= 0) {
        const StateSet& set = p.args.final_state;
        move_state<true>(state_matrix(set, chunk.slot_out, chunk.head), set.type, p.args.state_v_first, s, first_row(chunk), at.q);
      }
      previous_v = stage_v;
      stage_q = stage_q == Traits::kStagesQ - 1 ? 0 : stage_q + 1;
      stage_v = stage_v == Traits::kStagesV - 1 ? 0 : stage_v + 1;
    }
    put_o(o, smem() + Traits::kSmemV + previous_v * Traits::kBytesV);
    __syncwarp();
    if (at.lane == 0) mbarrier_arrive(smem() + Traits::kDone + 8 * (m & 1));
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) sm90_chunk_forward_kernel(const __grid_constant__ ChunkForwardKernelParams p) {
  // The warpgroup by a shuffle, so that the compiler knows it to be the same in all lanes.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStagesK; ++i) mbarrier_init(smem() + Traits::kFullK + 8 * i, 1);
    for (int i = 0; i < Traits::kStagesQ; ++i) mbarrier_init(smem() + Traits::kFullQ + 8 * i, 1);
    for (int i = 0; i < Traits::kStagesMatrix; ++i) {
      mbarrier_init(smem() + Traits::kFullA + 8 * i, 4);                         // the warps of an auxiliary group
      mbarrier_init(smem() + Traits::kFullP + 8 * i, 5);                         // ... and V
      mbarrier_init(smem() + Traits::kDone + 8 * i, 4 * Traits::kStateGroups);   // the warps of the state groups
      mbarrier_init(smem() + Traits::kTailV + 8 * i, 1);
    }
    mbarrier_init_fence();
    tma_prefetch_map(&p.q);
    tma_prefetch_map(&p.k);
    tma_prefetch_map(&p.v);
    tma_prefetch_map(&p.o);
    ChunkWalker& walker = *reinterpret_cast<ChunkWalker*>(shared_memory() + Traits::kSmemWalker);
    reinterpret_cast<uint2*>(shared_memory() + Traits::kTailCount)[0] = make_uint2(0, 0);
    walker.remaining = -1;
    walker.tile = blockIdx.x;
    asm volatile("griddepcontrol.wait;" ::: "memory");  // the planner, if there is one, was launched just before
#pragma unroll 1
    for (uint32_t m = 0; m < 4; ++m) produce_chunk<Traits>(p, m);
  }
  // Blocks of A_g and P right of the diagonal are never written: zero once.
  for (uint32_t i = threadIdx.x * 16; i < 2 * Traits::kStagesMatrix * Traits::kBytesMatrix; i += Traits::kThreads * 16) {
    store_shared_u4(smem() + Traits::kSmemA + i, make_uint4(0, 0, 0, 0));
  }
  fence_proxy_async();
  __syncthreads();

  if (group < Traits::kAuxGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kAuxRegisters));
    AuxRole<Traits> role{p, group, thread};
    #ifndef NO_AUX
    role.run();
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kStateRegisters));
    StateRole<Traits> role{p, group - Traits::kAuxGroups, lane_place(thread)};
    #ifndef NO_STATE
    role.run();
#endif
  }
}

template <typename Traits>
ChunkForwardKernel describe_kernel() {
  return {reinterpret_cast<const void*>(&sm90_chunk_forward_kernel<Traits>), Traits::kThreads, Traits::kSmemBytes, Traits::kStateGroups};
}

}  // namespace flash_qla::cuda::sm90
