// A of every chunk, and the sums of its gates, for the backward: by a kernel of their own, so that the forward of a
// training step is that of any other call.
//
// A = (I + lower(diag(beta) K K^T))^-1 depends on nothing but a chunk's keys and betas, so no chunk waits for another:
// what the forward's kernels hide beside the chain of states in two warps of each SM, all warps of the card do here in
// some microseconds. It is launched behind the forward, whose blocks let it start when they have started themselves: it
// takes the SMs that the forward leaves idle, and those that become free.
#include <type_traits>

#include "../../common/bulk.cuh"
#include "../../common/mbarrier.cuh"
#include "../../common/tma.cuh"
#include "fast_inverse.cuh"
#include "inverse.h"
#include "launch_kernel.h"

namespace flash_qla::cuda::sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 5;  // with 96 registers a thread, which suffice for the inverse and for half of K K^T
// Two warps do a chunk of two value heads of one key head: each makes half of K K^T's blocks, and inverts for one head.
constexpr int kTeam = 2;
static_assert(kTeam * kChunk * kChunk * 2 == kChunk * kHeadDim * 2);
constexpr uint32_t kBytesTile = kChunk * kChunk * 2;
constexpr uint32_t kBytesKeys = kChunk * kHeadDim * 2;

// FastInverse makes A diag(x) of a chunk of mild decay; here x is ones.
template <typename Element_>
struct InverseTraits {
  using Element = Element_;
  static constexpr uint32_t kGateColumnA = 0;
  static constexpr uint32_t kGateMild = 80 * 4;
  // Of chunks that decay faster: not for use.
  static constexpr uint32_t kGateSum = 0, kGatePair = 0, kGateRow = 0;
};
constexpr uint32_t kBytesGate = 84 * 4;
// For each team K of a chunk, [half][token][64], and in its place the tiles that its warps invert in.
constexpr uint32_t kSmemKeys = 0;
constexpr uint32_t kSmemGate = kSmemKeys + kWarps * kBytesTile;
constexpr uint32_t kSmemBarriers = kSmemGate + kBytesGate;  // keys are there; one for each team
constexpr uint32_t kSmemBytes = kSmemBarriers + 8 * kWarps;

// The last sequence that starts at or before a token; 0 if none does. By a whole warp.
__device__ __forceinline__ int32_t sequence_before(const ChunkForwardArgs& args, int32_t token, int lane) {
  if (args.cu_seqlens == nullptr) {
    return min(token / static_cast<int32_t>(args.dense_length), args.num_sequences - 1);
  }
  int32_t first = 0, count = args.num_sequences;  // it is one of these
  while (count > 1) {
    const int32_t step = (count + 31) / 32, at = first + lane * step;
    const bool before = lane * step < count && load_index(args.cu_seqlens, args.cu_seqlens_are_64_bit, at) <= token;
    const uint32_t found = __ballot_sync(0xffffffffu, before);
    const int32_t last = found != 0 ? 31 - __clz(found) : 0;
    count = min(step, count - last * step);
    first += last * step;
  }
  return first;
}

template <typename Element>
struct ChunkInverse {
  using Traits = InverseTraits<Element>;
  // Of the ten 16x16 blocks of the lower triangle one warp makes those of rows 0 to 15 and 48 to 63, the other the
  // rest.
  static constexpr int kBlocks = 5;
  template <int kMember>
  static constexpr bool takes(int i) {
    return (i == 0 || i == 3) == (kMember == 0);
  }
  const ChunkInverseParams& p;
  uint32_t tiles, keys_there, gate;  // K, and then a tile for each warp of the team; what FastInverse asks of the gates
  int team, member, lane;

  __device__ void meet() const { named_barrier_sync(1 + team, 32 * kTeam); }

  // What is not the same for both, with the warp's number as a constant.
  template <typename Work>
  __device__ __forceinline__ void as_member(Work work) const {
    if (member == 0) {
      work(std::integral_constant<int, 0>());
    } else {
      work(std::integral_constant<int, 1>());
    }
  }

  // The warp's blocks of K K^T, as the sums of mma.sync.
  template <int kMember>
  __device__ void multiply_keys(float (&kkt)[kBlocks][8]) const {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 8; ++i) kkt[b][i] = 0.0f;
    }
    // Rows of a left operand come by eight of one column and the next, of a right one by columns first.
    const uint32_t left = tiles + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t right = tiles + ((lane & 7) + 8 * (lane >> 4)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint32_t half = (step >> 2) * kBytesTile, column = (step & 3) << 5;
      uint32_t y[4][4];
#pragma unroll
      for (int j = 0; j < (kMember == 0 ? 4 : 3); ++j) load_matrix_x4((right ^ column) + half + j * 2048, y[j]);
      int b = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!takes<kMember>(i)) continue;
        uint32_t x[4];
        load_matrix_x4((left ^ column) + half + i * 2048, x);
#pragma unroll
        for (int j = 0; j <= i; ++j, ++b) {
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            mma_m16n8k16<Element>(kkt[b] + 4 * n, x[0], x[1], x[2], x[3], y[j][2 * n], y[j][2 * n + 1]);
          }
        }
      }
    }
  }

  // Of the warp's own 32 tokens, one a lane, as store_products() asks for them.
  __device__ float load_beta(int32_t row, int head, int valid) const {
    const int token = member == 1 ? 16 + lane : lane < 16 ? lane : 32 + lane;
    if (token >= valid) return 0.0f;
    if (p.args.beta == nullptr) return 1.0f;
    return __ldg(p.args.beta + int64_t{row + token} * p.args.beta_token_stride + head * p.args.beta_head_stride);
  }

  // The warp's blocks of -M of a value head into its tile, fp16, transposed (store_kkt()).
  template <int kMember>
  __device__ void store_products(const float (&kkt)[kBlocks][8], float beta, uint32_t tile) const {
    const uint32_t row = tile + (8 * (lane >> 4) + (lane & 7)) * 128;
    int b = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!takes<kMember>(i)) continue;
      const uint32_t column = ((2 * i + ((lane >> 3) & 1)) ^ (lane & 7)) << 4;
      const int from = (i < 2 ? 0 : 16) + (lane >> 2);  // the lane that has the first row's
      const float low = -__shfl_sync(0xffffffffu, beta, from);
      const float high = -__shfl_sync(0xffffffffu, beta, from + 8);
#pragma unroll
      for (int j = 0; j <= i; ++j, ++b) {
        const float (&x)[8] = kkt[b];
        // Right of a block's own diagonal nothing is for use: no register is kept for its upper quarter.
        store_matrix_x4_trans(
            row + j * 2048 + column, pack2<__half>(low * x[0], low * x[1]), pack2<__half>(high * x[2], high * x[3]),
            i == j ? 0u : pack2<__half>(low * x[4], low * x[5]), pack2<__half>(high * x[6], high * x[7]));
      }
    }
  }

  // A from the warp's tile: zeros right of the diagonal blocks.
  __device__ void store_inverse(int32_t row, int head, int valid, uint32_t tile) const {
    // Of the six blocks there the inverse has left zeros in (0, 1) and (2, 3).
    const uint32_t rows = tile + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 2; j < 4; ++j) store_matrix_x4((rows ^ (j << 5)) + i * 2048, 0u, 0u, 0u, 0u);
    }
    __syncwarp();
    if (valid == kChunk) {
      fence_proxy_async();
      __syncwarp();
      if (elect_one()) {
        tma_store_4d(&p.a, tile, 0, row, 0, head);
        tma_store_commit();
        tma_store_wait_all();
      }
    } else {  // what follows are another sequence's rows
      const int64_t row_bytes = int64_t{p.args.num_value_heads} * kChunk * 2;
      char* out = static_cast<char*>(p.args.a) + row * row_bytes + head * (kChunk * 2) + 16 * (lane & 7);
#pragma unroll 1
      for (int i = lane >> 3; i < valid; i += 4) {
        *reinterpret_cast<uint4*>(out + i * row_bytes) = load_shared_u4(tile + i * 128 + (((lane & 7) ^ (i & 7)) << 4));
      }
    }
  }

  // A of a chunk and kTeam value heads from `first` on, or of fewer, of one key head; the team's chunk number `count`.
  __device__ void invert(int32_t row, int valid, int key_head, int first, int heads, uint32_t count) const {
    if (member == 0 && elect_one()) {
      mbarrier_arrive_expect(keys_there, kBytesKeys);
      tma_load_4d(tiles, &p.k, keys_there, 0, row, 0, key_head);
    }
    float betas[kTeam];
#pragma unroll
    for (int i = 0; i < kTeam; ++i) betas[i] = load_beta(row, first + min(i, heads - 1), valid);
    mbarrier_wait(keys_there, count & 1);
    if (valid < kChunk) {
      clear_tail_rows(tiles, 2, valid, 32 * member + lane, 32 * kTeam);
      meet();
    }
    float kkt[kBlocks][8];
    as_member([&](auto which) { multiply_keys<which>(kkt); });
    meet();  // the keys have been read
    as_member([&](auto which) {
#pragma unroll
      for (int i = 0; i < kTeam; ++i) store_products<which>(kkt, betas[i], tiles + i * kBytesTile);
    });
    meet();
    if (member < heads) {
      const uint32_t tile = tiles + member * kBytesTile;
      FastInverse<Traits>::run(tile, gate, gate, gate + Traits::kGateMild, static_cast<int>(threadIdx.x % 32), [] {});
      __syncwarp();
      store_inverse(row, first + member, valid, tile);
    }
    fence_proxy_async();  // the next keys' copy comes after what this thread has read
    meet();
  }

  // The gates' sums of a chunk, a head a lane: so that a row of heads is whole sectors.
  __device__ void sum_gates(int32_t row, int valid, int head) const {
    const ChunkForwardArgs& args = p.args;
    if (head >= args.num_value_heads) return;
    const float* g = args.g + row * args.g_token_stride + head * args.g_head_stride;
    float* out = args.g_cumsum + int64_t{row} * args.num_value_heads + head;
    float sum = 0.0f;
    constexpr int kAtOnce = 16;  // loads under way
#pragma unroll 1
    for (int t = 0; t < valid; t += kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        x[i] = args.g != nullptr && t + i < valid ? __ldg(g + (t + i) * args.g_token_stride) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        sum += x[i] < kGateFloor ? kGateFloor : x[i];  // keeps NaN
        if (t + i < valid) out[int64_t{t + i} * args.num_value_heads] = sum;
      }
    }
  }
};

// What a launch has to do: for each window of 64 tokens so many teams make A, each of one or two value heads, and so
// many the gates' sums, of 64 heads each.
struct WindowTeams {
  uint32_t parts;  // of a key head's value heads
  uint32_t inverses, sums;
  __host__ __device__ explicit WindowTeams(const ChunkForwardArgs& args)
      : parts((args.num_value_heads / args.num_key_heads + kTeam - 1) / kTeam),
        inverses(args.a != nullptr ? parts * args.num_key_heads : 0),
        sums(args.g_cumsum != nullptr ? (args.num_value_heads + 32 * kTeam - 1) / (32 * kTeam) : 0) {}
};

// A team takes the chunks that start in a window of 64 tokens: one, or where sequences are short some more. So nobody
// needs to know before how many chunks there are.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sm90_chunk_inverse_kernel(const __grid_constant__ ChunkInverseParams p) {
  const ChunkForwardArgs& args = p.args;
  constexpr int kTeams = kWarps / kTeam;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int team = warp / kTeam;
  if (threadIdx.x < kBytesGate / 4) store_shared_f1(smem() + kSmemGate + 4 * threadIdx.x, 1.0f);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTeams; ++i) mbarrier_init(smem() + kSmemBarriers + 8 * i, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const ChunkInverse<Element> inverse{p,
                                      smem() + kSmemKeys + team * kBytesKeys,
                                      smem() + kSmemBarriers + 8 * team,
                                      smem() + kSmemGate,
                                      team,
                                      warp % kTeam,
                                      lane};
  const WindowTeams teams(args);
  const uint32_t item = blockIdx.x * kTeams + team, window_number = item / (teams.inverses + teams.sums);
  const int64_t first_token = int64_t{window_number} * kChunk;
  if (first_token < args.num_tokens) {
    const int32_t window = static_cast<int32_t>(first_token);
    const uint32_t of_window = item - window_number * (teams.inverses + teams.sums);
    const uint32_t group = args.num_value_heads / args.num_key_heads, key_head = of_window / teams.parts;
    const uint32_t first_head = (of_window - key_head * teams.parts) * kTeam;  // of the group
    uint32_t count = 0;
#pragma unroll 1
    for (int32_t i = sequence_before(args, window, lane); i < args.num_sequences; ++i) {
      const PlannedSequence s = sequence_at(args, i);
      if (s.start - window >= kChunk) break;
      // Of the sequence's tokens, where the chunk starts.
      const int32_t first = s.start >= window ? 0 : (window - s.start + kChunk - 1) / kChunk * kChunk;
      if (first >= s.length || s.start + first - window >= kChunk) continue;
      if (initial_slot(args, i) == kSkipSequence) continue;
      const int valid = min(s.length - first, kChunk);
      if (of_window >= teams.inverses) {
        inverse.sum_gates(s.start + first, valid, ((of_window - teams.inverses) * kTeam + warp % kTeam) * 32 + lane);
        continue;
      }
      inverse.invert(s.start + first, valid, static_cast<int>(key_head),
                     static_cast<int>(key_head * group + first_head), static_cast<int>(min(kTeam, group - first_head)),
                     count++);
    }
  }
  // It must not end before the forward that it was started beside: who comes next waits for this kernel alone. The last
  // block, so that none is held up by a waiting one's place.
  if (blockIdx.x == gridDim.x - 1) wait_for_predecessors();
}

}  // namespace

cudaError_t launch_chunk_inverse(const ChunkInverseParams& params, cudaStream_t stream) {
  const ChunkForwardArgs& args = params.args;
  const void* kernel = args.type == ElementType::kFloat16
                           ? reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<__half>)
                           : reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<__nv_bfloat16>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSmemBytes));
  if (error != cudaSuccess) return error;
  const WindowTeams teams(args);
  const int64_t items = (args.num_tokens + kChunk - 1) / kChunk * (teams.inverses + teams.sums);
  constexpr int kTeams = kWarps / kTeam;
  return launch_kernel(kernel, static_cast<int>((items + kTeams - 1) / kTeams), kThreads, kSmemBytes, params, true,
                       stream);
}

}  // namespace flash_qla::cuda::sm90
