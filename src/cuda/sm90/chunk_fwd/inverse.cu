// A of every chunk, and the sums of its gates, for the backward: by a kernel of their own, so that the forward of a
// training step is that of any other call.
//
// A = (I + lower(diag(beta) K K^T))^-1 depends on nothing but a chunk's keys and betas, so no chunk waits for another:
// what the forward's kernels hide beside the chain of states in two warps of each SM, all warps of the card do here in
// some microseconds. It is launched behind the forward, whose blocks let it start when they have started themselves: it
// takes the SMs that the forward leaves idle, and those that become free.
#include <type_traits>

#include "../../common/bulk.cuh"
#include "fast_inverse.cuh"
#include "inverse.h"
#include "launch_kernel.h"

namespace flash_qla::cuda::sm90 {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocksPerSm = 5;  // with 96 registers a thread, which suffice for the inverse and for half of K K^T
constexpr uint32_t kBytesTile = kChunk * kChunk * 2;

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
constexpr uint32_t kSmemBytes = kWarps * kBytesTile + kBytesGate;

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

// Two warps do a chunk of two value heads of one key head: each makes half of K K^T's blocks, and inverts for one head.
constexpr int kTeam = 2;

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
  template <int kMember>
  static constexpr int kOctets = kMember == 0 ? 8 : 6;  // of rows of K that it needs

  const ChunkForwardArgs& args;
  uint32_t tiles, gate;  // a tile for each warp of the team; what FastInverse asks of the gates
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

  // The warp's blocks of K K^T of 64 rows, `valid` of which are there, as the sums of mma.sync. The sum over the
  // columns goes in an order of its own: a lane's 16 bytes of a row are its operands of two steps.
  template <int kMember>
  __device__ void multiply_keys(float (&kkt)[kBlocks][8], const char* keys, int64_t row_bytes, int valid) const {
    // All of it on its way into L2, which is then waited for once.
    if constexpr (kMember == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * i + (lane >> 1);
        if (row < valid) l2_prefetch_line(keys + row * row_bytes + 128 * (lane & 1));
      }
    }
    const int rows = valid - (lane >> 2);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 8; ++i) kkt[b][i] = 0.0f;
    }
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      uint32_t y[kOctets<kMember>][4];
      const char* at = keys + (lane >> 2) * row_bytes + 16 * (lane & 3) + 64 * part;
#pragma unroll
      for (int r = 0; r < kOctets<kMember>; ++r) {
        uint4 piece = make_uint4(0u, 0u, 0u, 0u);
        if (8 * r < rows) piece = __ldg(reinterpret_cast<const uint4*>(at + 8 * r * row_bytes));
        y[r][0] = piece.x, y[r][1] = piece.y, y[r][2] = piece.z, y[r][3] = piece.w;
      }
#pragma unroll
      for (int s = 0; s < 4; s += 2) {
        int b = 0;
#pragma unroll
        for (int i = 0; i < kOctets<kMember> / 2; ++i) {
          if (!takes<kMember>(i)) continue;
#pragma unroll
          for (int j = 0; j <= i; ++j, ++b) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              mma_m16n8k16<Element>(kkt[b] + 4 * n, y[2 * i][s], y[2 * i + 1][s], y[2 * i][s + 1], y[2 * i + 1][s + 1],
                                    y[2 * j + n][s], y[2 * j + n][s + 1]);
            }
          }
        }
      }
    }
  }

  // The betas of tokens `lane` and 32 + lane.
  __device__ float2 load_betas(int32_t row, int head, int valid) const {
    if (args.beta == nullptr) return make_float2(1.0f, 1.0f);
    const float* beta = args.beta + int64_t{row + lane} * args.beta_token_stride + head * args.beta_head_stride;
    return make_float2(lane < valid ? __ldg(beta) : 0.0f,
                       32 + lane < valid ? __ldg(beta + 32 * args.beta_token_stride) : 0.0f);
  }

  // The warp's blocks of -M of a value head into its tile, fp16, transposed (store_kkt()).
  template <int kMember>
  __device__ void store_products(const float (&kkt)[kBlocks][8], float2 betas, uint32_t tile) const {
    const uint32_t row = tile + (8 * (lane >> 4) + (lane & 7)) * 128;
    int b = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!takes<kMember>(i)) continue;
      const uint32_t column = ((2 * i + ((lane >> 3) & 1)) ^ (lane & 7)) << 4;
      const float of_rows = i < 2 ? -betas.x : -betas.y;
      const float low = __shfl_sync(0xffffffffu, of_rows, (16 * i & 31) + (lane >> 2));
      const float high = __shfl_sync(0xffffffffu, of_rows, (16 * i & 31) + 8 + (lane >> 2));
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

  // A's rows, from the warp's tile: zeros right of the diagonal blocks.
  __device__ void store_rows(int32_t first_row, int head, int valid, uint32_t tile) const {
    const int64_t row_bytes = int64_t{args.num_value_heads} * kChunk * 2;
    char* out =
        static_cast<char*>(args.a) + (first_row + (lane >> 3)) * row_bytes + head * (kChunk * 2) + 16 * (lane & 7);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 4 * i + (lane >> 3), piece = lane & 7;
      uint4 x = load_shared_u4(tile + row * 128 + ((piece ^ (row & 7)) << 4));
      if (piece >> 1 > row >> 4) x = make_uint4(0u, 0u, 0u, 0u);
      if (row < valid) *reinterpret_cast<uint4*>(out + 4 * i * row_bytes) = x;
    }
  }

  // g of tokens 2 lane and the next.
  __device__ float2 load_gates(int32_t row, int head, int valid) const {
    float2 pair = make_float2(0.0f, 0.0f);
    if (args.g == nullptr) return pair;
    const float* g = args.g + int64_t{row + 2 * lane} * args.g_token_stride + head * args.g_head_stride;
    if (2 * lane < valid) pair.x = __ldg(g);
    if (2 * lane + 1 < valid) pair.y = __ldg(g + args.g_token_stride);
    return pair;
  }
  __device__ void store_sums(float2 g, int32_t row, int head, int valid) const {
    const GateSums sum = sum_gates(g, lane);
    float* out = args.g_cumsum + int64_t{row + 2 * lane} * args.num_value_heads + head;
    if (2 * lane < valid) out[0] = sum.x;
    if (2 * lane + 1 < valid) out[args.num_value_heads] = sum.y;
  }

  // A chunk of kTeam value heads from `first` on, or of fewer, of one key head.
  __device__ void run(int32_t row, int valid, int key_head, int first, int heads) const {
    const int head = first + member;
    const bool own = member < heads;
    float2 g = make_float2(0.0f, 0.0f);
    if (own && args.g_cumsum != nullptr) g = load_gates(row, head, valid);
    if (args.a != nullptr) {
      float2 betas[kTeam];
#pragma unroll
      for (int i = 0; i < kTeam; ++i) betas[i] = load_betas(row, first + min(i, heads - 1), valid);
      const char* keys =
          static_cast<const char*>(args.k) + 2 * (row * args.k_token_stride + key_head * args.k_head_stride);
      as_member([&](auto which) {
        float kkt[kBlocks][8];
        multiply_keys<which>(kkt, keys, 2 * args.k_token_stride, valid);
#pragma unroll
        for (int i = 0; i < kTeam; ++i) store_products<which>(kkt, betas[i], tiles + i * kBytesTile);
      });
      meet();
      if (own) {
        const uint32_t tile = tiles + member * kBytesTile;
        FastInverse<Traits>::run(tile, gate, gate, gate + Traits::kGateMild, __shfl_sync(0xffffffffu, lane, lane),
                                 [] {});
        __syncwarp();
        store_rows(row, head, valid, tile);
      }
      meet();  // the tiles may be written again
    }
    if (own && args.g_cumsum != nullptr) store_sums(g, row, head, valid);
  }
};

// A team takes the chunks of one or two value heads that start in a window of 64 tokens: one, or where sequences are
// short some more. So nobody needs to know before how many chunks there are.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sm90_chunk_inverse_kernel(const __grid_constant__ ChunkForwardArgs args) {
  constexpr int kTeams = kWarps / kTeam;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int team = warp / kTeam;
  const uint32_t gate = smem() + kWarps * kBytesTile;
  if (threadIdx.x < kBytesGate / 4) store_shared_f1(gate + 4 * threadIdx.x, 1.0f);
  __syncthreads();
  const ChunkInverse<Element> inverse{args, smem() + team * kTeam * kBytesTile, gate, team, warp % kTeam, lane};
  const int group = args.num_value_heads / args.num_key_heads, parts = (group + kTeam - 1) / kTeam;
  const int64_t item = int64_t{blockIdx.x} * kTeams + team, first_token = item / (parts * args.num_key_heads) * kChunk;
  if (first_token < args.num_tokens) {
    const int32_t window = static_cast<int32_t>(first_token);
    const int of_window = static_cast<int>(item % (parts * args.num_key_heads));
    const int key_head = of_window / parts, first_head = of_window % parts * kTeam;  // of the group
#pragma unroll 1
    for (int32_t i = sequence_before(args, window, lane); i < args.num_sequences; ++i) {
      const PlannedSequence s = sequence_at(args, i);
      if (s.start - window >= kChunk) break;
      // Of the sequence's tokens, where the chunk starts.
      const int32_t first = s.start >= window ? 0 : (window - s.start + kChunk - 1) / kChunk * kChunk;
      if (first >= s.length || s.start + first - window >= kChunk) continue;
      if (initial_slot(args, i) == kSkipSequence) continue;
      inverse.run(s.start + first, min(s.length - first, kChunk), key_head, key_head * group + first_head,
                  min(kTeam, group - first_head));
    }
  }
  // It must not end before the forward that it was started beside: who comes next waits for this kernel alone. The last
  // block, so that none is held up by a waiting one's place.
  if (blockIdx.x == gridDim.x - 1) wait_for_predecessors();
}

template <typename Element>
cudaError_t launch_typed(const ChunkForwardArgs& args, cudaStream_t stream) {
  const void* kernel = reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<Element>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSmemBytes));
  if (error != cudaSuccess) return error;
  const int64_t group = args.num_value_heads / args.num_key_heads;
  const int64_t items = (args.num_tokens + kChunk - 1) / kChunk * args.num_key_heads * ((group + kTeam - 1) / kTeam);
  constexpr int kTeams = kWarps / kTeam;
  return launch_kernel(kernel, static_cast<int>((items + kTeams - 1) / kTeams), kThreads, kSmemBytes, args, true,
                       stream);
}

}  // namespace

cudaError_t launch_chunk_inverse(const ChunkForwardArgs& args, cudaStream_t stream) {
  return args.type == ElementType::kFloat16 ? launch_typed<__half>(args, stream)
                                            : launch_typed<__nv_bfloat16>(args, stream);
}

}  // namespace flash_qla::cuda::sm90
