// A of every chunk, and the sum of its gates, for the backward: by a kernel of their own, so that the forward of a
// training step is that of any other call.
//
// A = (I + lower(diag(beta) K K^T))^-1 depends on nothing but a chunk's keys and betas, so no chunk waits for another:
// what the kernels of the forward hide beside the chain of states in two warps, all warps of the card do here in a few
// microseconds. It is launched behind the forward, whose blocks let it start when they have: it takes the SMs that the
// forward leaves idle, and those that become free.
#include <algorithm>

#include "../../common/bulk.cuh"
#include "fast_inverse.cuh"
#include "inverse.h"
#include "launch_kernel.h"

namespace flash_qla::cuda::sm90 {
namespace {

// A warp does a chunk of a key head and its value heads by itself.
constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// K K^T of a chunk is 80 registers a thread, the inverse takes 60 besides: 168, and so three blocks to an SM.
constexpr int kBlocksPerSm = 3;
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
__device__ __forceinline__ int32_t sequence_before(const ChunkForwardArgs& args, int64_t token, int lane) {
  if (args.cu_seqlens == nullptr) {
    return static_cast<int32_t>(min(token / args.dense_length, static_cast<int64_t>(args.num_sequences - 1)));
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
  const ChunkForwardArgs& args;
  uint32_t tile, gate;
  int lane;

  // The lower blocks of K K^T of 64 rows, `valid` of which are there; as the sums of mma.sync. The sum over the columns
  // of K goes in an order of its own, so that a lane has 16 bytes of a row for two steps.
  __device__ void multiply_keys(float (&kkt)[10][8], const char* rows, int64_t row_bytes, int valid) const {
    const char* at = rows + (lane >> 2) * row_bytes + 16 * (lane & 3);
#pragma unroll
    for (int b = 0; b < 10; ++b) {
#pragma unroll
      for (int i = 0; i < 8; ++i) kkt[b][i] = 0.0f;
    }
#pragma unroll 1
    for (int part = 0; part < 4; ++part) {
      uint32_t x[8][4];
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        uint4 piece = make_uint4(0u, 0u, 0u, 0u);
        if (8 * r + (lane >> 2) < valid)
          piece = __ldg(reinterpret_cast<const uint4*>(at + 8 * r * row_bytes + 64 * part));
        x[r][0] = piece.x, x[r][1] = piece.y, x[r][2] = piece.z, x[r][3] = piece.w;
      }
#pragma unroll
      for (int s = 0; s < 4; s += 2) {
        int b = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j <= i; ++j, ++b) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              mma_m16n8k16<Element>(kkt[b] + 4 * n, x[2 * i][s], x[2 * i + 1][s], x[2 * i][s + 1], x[2 * i + 1][s + 1],
                                    x[2 * j + n][s], x[2 * j + n][s + 1]);
            }
          }
        }
      }
    }
  }

  // -M of a value head into the tile, fp16, transposed (store_kkt()).
  __device__ void store_products(const float (&kkt)[10][8], const float* beta, int64_t token_stride, int valid) const {
    const uint32_t row = tile + (8 * (lane >> 4) + (lane & 7)) * 128;
    float factor[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      const int token = 8 * r + (lane >> 2);
      factor[r] = token >= valid ? 0.0f : beta == nullptr ? -1.0f : -__ldg(beta + token * token_stride);
    }
    int b = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t column = ((2 * i + ((lane >> 3) & 1)) ^ (lane & 7)) << 4;
      const float low = factor[2 * i], high = factor[2 * i + 1];
#pragma unroll
      for (int j = 0; j <= i; ++j, ++b) {
        const float (&x)[8] = kkt[b];
        // Right of a block's own diagonal nothing is for use: no register is kept for its upper quarter.
        store_matrix_x4_trans(
            row + j * 2048 + column, pack2<__half>(low * x[0], low * x[1]), pack2<__half>(high * x[2], high * x[3]),
            i == j ? 0u : pack2<__half>(low * x[4], low * x[5]), pack2<__half>(high * x[6], high * x[7]));
      }
    }
    __syncwarp();
  }

  // The tile's rows of tokens, zeros right of the diagonal blocks.
  __device__ void store_rows(void* first_row, int valid) const {
    const int64_t row_bytes = int64_t{args.num_value_heads} * kChunk * 2;
    char* out = static_cast<char*>(first_row) + (lane >> 3) * row_bytes + 16 * (lane & 7);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = 4 * i + (lane >> 3), piece = lane & 7;
      uint4 x = load_shared_u4(tile + row * 128 + ((piece ^ (row & 7)) << 4));
      if (piece >> 1 > row >> 4) x = make_uint4(0u, 0u, 0u, 0u);
      if (row < valid) *reinterpret_cast<uint4*>(out + 4 * i * row_bytes) = x;
    }
    __syncwarp();
  }

  __device__ void save_sums(int64_t row, int head, int valid) const {
    float x = 0.0f, y = 0.0f;
    if (args.g != nullptr) {
      const float* g = args.g + (row + 2 * lane) * args.g_token_stride + head * args.g_head_stride;
      if (2 * lane < valid) x = *g;
      if (2 * lane + 1 < valid) y = g[args.g_token_stride];
    }
    const GateSums sum = sm90::sum_gates(make_float2(x, y), lane);
    float* out = args.g_cumsum + (row + 2 * lane) * args.num_value_heads + head;
    if (2 * lane < valid) out[0] = sum.x;
    if (2 * lane + 1 < valid) out[args.num_value_heads] = sum.y;
  }

  // A chunk of a key head.
  __device__ void run(int64_t row, int valid, int key_head) const {
    const int group = args.num_value_heads / args.num_key_heads, first = key_head * group;
    if (args.g_cumsum != nullptr) {
#pragma unroll 1
      for (int head = first; head < first + group; ++head) save_sums(row, head, valid);
    }
    if (args.a == nullptr) return;
    float kkt[10][8];
    multiply_keys(kkt,
                  static_cast<const char*>(args.k) + 2 * (row * args.k_token_stride + key_head * args.k_head_stride),
                  2 * args.k_token_stride, valid);
#pragma unroll 1
    for (int head = first; head < first + group; ++head) {
      const float* beta = args.beta;
      if (beta != nullptr) beta += row * args.beta_token_stride + head * args.beta_head_stride;
      store_products(kkt, beta, args.beta_token_stride, valid);
      FastInverse<Traits>::run(tile, gate, gate, gate + Traits::kGateMild, __shfl_sync(0xffffffffu, lane, lane), [] {});
      __syncwarp();
      store_rows(static_cast<char*>(args.a) + 2 * (row * args.num_value_heads + head) * kChunk, valid);
    }
  }
};

// A warp takes the chunks of one key head that start in a window of 64 tokens: one, or where sequences are short some
// more. So nobody needs to know how many chunks there are before.
template <typename Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    sm90_chunk_inverse_kernel(const __grid_constant__ ChunkForwardArgs args) {
  const int lane = threadIdx.x % 32;
  const uint32_t gate = smem() + kWarps * kBytesTile;
  if (threadIdx.x < kBytesGate / 4) store_shared_f1(gate + 4 * threadIdx.x, 1.0f);
  __syncthreads();
  const ChunkInverse<Element> inverse{args, smem() + threadIdx.x / 32 * kBytesTile, gate, lane};
  const int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t window = item / args.num_key_heads * kChunk;
  const int key_head = static_cast<int>(item % args.num_key_heads);
  if (window < args.num_tokens) {
#pragma unroll 1
    for (int32_t i = sequence_before(args, window, lane); i < args.num_sequences; ++i) {
      const PlannedSequence s = sequence_at(args, i);
      if (s.start >= window + kChunk) break;
      const int64_t into = max(window - s.start, int64_t{0});
      const int64_t first = (into + kChunk - 1) / kChunk * kChunk;  // of the sequence's tokens
      if (first >= s.length || s.start + first >= window + kChunk) continue;
      if (initial_slot(args, i) == kSkipSequence) continue;
      inverse.run(s.start + first, static_cast<int>(min(s.length - first, int64_t{kChunk})), key_head);
    }
  }
  // It must not end before the forward that it was started beside: who comes next waits for this kernel alone. The last
  // block, so that none is held up by a waiting one's place.
  if (blockIdx.x == gridDim.x - 1) wait_for_predecessors();
}

}  // namespace

cudaError_t launch_chunk_inverse(const ChunkForwardArgs& args, cudaStream_t stream) {
  const void* kernel = args.type == ElementType::kFloat16
                           ? reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<__half>)
                           : reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<__nv_bfloat16>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kSmemBytes));
  if (error != cudaSuccess) return error;
  const int64_t items = (args.num_tokens + kChunk - 1) / kChunk * args.num_key_heads;
  return launch_kernel(kernel, static_cast<int>((items + kWarps - 1) / kWarps), kThreads, kSmemBytes, args, true,
                       stream);
}

}  // namespace flash_qla::cuda::sm90
