// A of every chunk, and the sums of its gates, for the backward: by a kernel of their own, so that the forward of a
// training step is that of any other call.
//
// A = (I + lower(diag(beta) K K^T))^-1 depends on nothing but a chunk's keys and betas, so no chunk waits for another:
// what the forward's kernels hide beside the chain of states in two warps of each SM, all warps of the card do here in
// some microseconds. It is launched after the forward, whose blocks let it start when they have started themselves: it
// takes the SMs that the forward leaves idle, and those that become free.
#include <type_traits>

#include "cuda/common/bulk.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/mbarrier.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/sm90/chunk_fwd/save_a.h"
#include "cuda/sm90/chunk_fwd/sequences.cuh"
#include "cuda/sm90/common/device.cuh"
#include "cuda/sm90/common/tile.cuh"
#include "cuda/sm90/common/ut_transform.cuh"

namespace flash_qla::cuda::sm90::fwd {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr uint32_t kBytesTile = kChunk * kChunk * 2;
constexpr uint32_t kBytesKeys = kChunk * kHeadDim * 2;

// The warps of a team do a chunk of as many value heads of one key head: each makes its part of K K^T's blocks, and
// inverts for one head. Of two: tiles lie where the keys were, and a team does what starts in one window of 64 tokens.
// Of four (three value heads or more to a key head): K K^T is made once for all four, keys have a place of their own,
// so that the next chunk's come while this one is inverted, and a team goes through four windows.
template <int kTeam_>
struct TeamShape {
  static constexpr int kTeam = kTeam_;
  static constexpr bool kAhead = kTeam == 4;
  static constexpr int kTeams = kWarps / kTeam;  // in a block
  static constexpr int kMostWindows = kAhead ? 4 : 1;
  // 96 registers a thread, which suffice for the inverse and for half of K K^T; with keys ahead shared memory is what
  // there is less of.
  static constexpr int kBlocksPerSm = kAhead ? 4 : 5;
  // Of the ten 16x16 blocks of the lower triangle, rows i and columns j: which warp makes them.
  static constexpr int member_of(int i, int j) {
    if (kTeam == 2) return i == 0 || i == 3 ? 0 : 1;
    return i == 3 && j == 3 ? 3 : 3 - i;
  }
  static constexpr bool takes(int member, int i, int j) { return j <= i && member_of(i, j) == member; }
  static constexpr bool takes_row(int member, int i) { return i == first_row(member) || i == last_row(member); }
  static constexpr bool takes_column(int member, int j) {
    return takes(member, 0, j) || takes(member, 1, j) || takes(member, 2, j) || takes(member, 3, j);
  }
  static constexpr int kBlocks = kTeam == 2 ? 5 : 3;  // of a warp, at most
  // A warp's rows are within two rows of blocks.
  __host__ __device__ static constexpr int first_row(int member) { return kTeam == 2 ? member : 3 - member; }
  __host__ __device__ static constexpr int last_row(int member) {
    return kTeam == 2 ? 3 - member : member == 3 ? 3 : 3 - member;
  }

  // Keys of a chunk, [half][token][64], and the tiles that the team's warps invert in.
  static constexpr uint32_t kTilesAt = kAhead ? kBytesKeys : 0;
  static constexpr uint32_t kBytesTeam = kTilesAt + kTeam * kBytesTile;
  static_assert(kAhead || kBytesTeam == kBytesKeys);
  static constexpr uint32_t kSmemGate = kTeams * kBytesTeam;
  static constexpr uint32_t kSmemBarriers = kSmemGate + kPlainGateBytes;  // keys are there; one for each team
  static constexpr uint32_t kSmemBytes = kSmemBarriers + 8 * kTeams;
};

// The last sequence that starts at or before a token; 0 if none does. By a whole warp.
__device__ __forceinline__ int32_t sequence_before(const Args& args, int32_t token, int lane) {
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

// Rows of a chunk; valid 0: none.
struct ChunkRows {
  int32_t row, valid;
};

// The chunks that start in a team's windows, one after another; by a whole warp.
struct ChunksOfWindows {
  const Args& args;
  int32_t begin, tokens;  // of the windows
  int32_t sequence;       // to look at next
  ChunkRows rest{0, 0};   // of the sequence looked at: its next chunk, and all of its tokens from there on

  __device__ ChunksOfWindows(const Args& arguments, int32_t window, int32_t window_tokens, int lane)
      : args(arguments), begin(window), tokens(window_tokens), sequence(sequence_before(arguments, window, lane)) {}

  __device__ ChunkRows take() {
    while (rest.valid <= 0 && sequence < args.num_sequences) {
      const SequenceSpan s = sequence_at(args, sequence);
      if (s.start - begin >= tokens) return {0, 0};
      // Of the sequence's tokens, where the first chunk starts that is within the windows.
      const int32_t first = s.start >= begin ? 0 : (begin - s.start + kChunk - 1) / kChunk * kChunk;
      if (first < s.length && initial_slot(args, sequence) != kSkipSequence) rest = {s.start + first, s.length - first};
      ++sequence;
    }
    if (rest.valid <= 0 || rest.row - begin >= tokens) return {0, 0};
    const ChunkRows chunk{rest.row, min(rest.valid, kChunk)};
    rest.row += chunk.valid;
    rest.valid -= chunk.valid;
    return chunk;
  }
};

template <typename Element, typename Shape>
struct ChunkInverse {
  using Traits = PlainInverseTraits<Element>;
  static constexpr int kTeam = Shape::kTeam, kBlocks = Shape::kBlocks;
  const SaveAArgs& p;
  uint32_t keys, tiles;       // K, and a tile for each warp of the team
  uint32_t keys_there, gate;  // a barrier; what UtTransform asks of the gates
  int team, member, lane;

  __device__ void meet() const { named_barrier_sync(1 + team, 32 * kTeam); }

  // What is not the same for all, with the warp's number as a constant.
  template <int kMember = 0, typename Work>
  __device__ __forceinline__ void as_member(Work work) const {
    if (kMember == kTeam - 1 || member == kMember) {
      work(std::integral_constant<int, kMember>());
    } else if constexpr (kMember + 1 < kTeam) {
      as_member<kMember + 1>(work);
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
    const uint32_t left = keys + (lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    const uint32_t right = keys + ((lane & 7) + 8 * (lane >> 4)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const uint32_t half = (step >> 2) * kBytesTile, column = (step & 3) << 5;
      uint32_t y[4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (Shape::takes_column(kMember, j)) load_matrix_x4((right ^ column) + half + j * 2048, y[j]);
      }
      int b = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!Shape::takes_row(kMember, i)) continue;
        uint32_t x[4];
        load_matrix_x4((left ^ column) + half + i * 2048, x);
#pragma unroll
        for (int j = 0; j <= i; ++j) {
          if (!Shape::takes(kMember, i, j)) continue;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            mma_m16n8k16<Element>(kkt[b] + 4 * n, x[0], x[1], x[2], x[3], y[j][2 * n], y[j][2 * n + 1]);
          }
          ++b;
        }
      }
    }
  }

  // Of the warp's own two rows of blocks, a token a lane, as store_products() asks for them.
  __device__ float load_beta(const ChunkRows& chunk, int head) const {
    const int token = 16 * (lane < 16 ? Shape::first_row(member) : Shape::last_row(member)) + (lane & 15);
    if (token >= chunk.valid) return 0.0f;
    if (p.args.beta == nullptr) return 1.0f;
    return __ldg(p.args.beta + int64_t{chunk.row + token} * p.args.beta_token_stride + head * p.args.beta_head_stride);
  }

  // The warp's blocks of -M of a value head into its tile, fp16, transposed (store_kkt()).
  template <int kMember>
  __device__ void store_products(const float (&kkt)[kBlocks][8], float beta, uint32_t tile) const {
    const uint32_t row = tile + (8 * (lane >> 4) + (lane & 7)) * 128;
    int b = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!Shape::takes_row(kMember, i)) continue;
      const uint32_t column = ((2 * i + ((lane >> 3) & 1)) ^ (lane & 7)) << 4;
      const int from = (i == Shape::first_row(kMember) ? 0 : 16) + (lane >> 2);  // the lane that has the first row's
      const float low = -__shfl_sync(0xffffffffu, beta, from);
      const float high = -__shfl_sync(0xffffffffu, beta, from + 8);
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        if (!Shape::takes(kMember, i, j)) continue;
        const float (&x)[8] = kkt[b++];
        // Right of a block's own diagonal nothing is for use: no register is kept for its upper quarter.
        store_matrix_x4_trans(
            row + j * 2048 + column, pack2<__half>(low * x[0], low * x[1]), pack2<__half>(high * x[2], high * x[3]),
            i == j ? 0u : pack2<__half>(low * x[4], low * x[5]), pack2<__half>(high * x[6], high * x[7]));
      }
    }
  }

  // A from the warp's tile: zeros right of the diagonal blocks. Lane 0 waits for it before the tile is written again.
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
      if (lane == 0) {
        tma_store_4d(&p.a, tile, 0, row, 0, head);
        tma_store_commit();
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

  __device__ void load_keys(const ChunkRows& chunk, int key_head) const {
    if (member != 0 || lane != 0) return;
    mbarrier_arrive_expect(keys_there, kBytesKeys);
    tma_load_4d(keys, &p.k, keys_there, 0, chunk.row, 0, key_head);
  }
  __device__ void load_betas(float (&betas)[kTeam], const ChunkRows& chunk, int first, int heads) const {
#pragma unroll
    for (int i = 0; i < kTeam; ++i) betas[i] = load_beta(chunk, first + min(i, heads - 1));
  }

  // A of the chunks and of kTeam value heads from `first` on, or of fewer, of one key head.
  __device__ void invert(ChunksOfWindows& chunks, int key_head, int first, int heads) const {
    ChunkRows now = chunks.take();
    if (now.valid == 0) return;
    float betas[kTeam];
    load_keys(now, key_head);
    load_betas(betas, now, first, heads);
    const uint32_t tile = tiles + member * kBytesTile;
#pragma unroll 1
    for (uint32_t count = 0;; ++count) {
      const ChunkRows next = chunks.take();
      mbarrier_wait(keys_there, count & 1);
      if (now.valid < kChunk) {
        zero_tail_rows(keys, 2, now.valid, 32 * member + lane, 32 * kTeam);
        meet();
      }
      float kkt[kBlocks][8];
      as_member([&](auto which) { multiply_keys<which>(kkt); });
      if constexpr (Shape::kAhead) {
        if (lane == 0) tma_store_wait_read();  // of the chunk before
        fence_proxy_async();                   // the next keys' copy comes after what this thread has read
      }
      meet();  // the keys have been read, and the tiles
      if (Shape::kAhead && next.valid > 0) load_keys(next, key_head);
      as_member([&](auto which) {
#pragma unroll
        for (int i = 0; i < kTeam; ++i) store_products<which>(kkt, betas[i], tiles + i * kBytesTile);
      });
      if (Shape::kAhead && next.valid > 0) load_betas(betas, next, first, heads);
      meet();
      if (member < heads) {
        UtTransform<Traits>::run(tile, gate, gate, gate + Traits::kGateMild, static_cast<int>(threadIdx.x % 32), [] {});
        __syncwarp();
        store_inverse(now.row, first + member, now.valid, tile);
      }
      if (next.valid == 0) break;
      if constexpr (!Shape::kAhead) {
        if (lane == 0) tma_store_wait_read();
        fence_proxy_async();
        meet();
        load_keys(next, key_head);
        load_betas(betas, next, first, heads);
      }
      now = next;
    }
    if (lane == 0) tma_store_wait_all();
  }

  // The gates' sums of a chunk, a head a lane: so that a row of heads is whole sectors.
  __device__ void sum_gates(int32_t row, int valid, int head) const {
    const Args& args = p.args;
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

// What a launch has to do: for each so many windows of 64 tokens so many teams make A, each of some of a key head's
// value heads, and so many the gates' sums, each warp of a window and of 32 heads.
template <typename Shape>
struct WindowTeams {
  uint32_t parts;      // of a key head's value heads
  uint32_t sum_parts;  // of all value heads
  uint32_t inverses, sums;
  __host__ __device__ WindowTeams(const Args& args, uint32_t windows)
      : parts((args.num_value_heads / args.num_key_heads + Shape::kTeam - 1) / Shape::kTeam),
        sum_parts((args.num_value_heads + 31) / 32),
        inverses(args.a != nullptr ? parts * args.num_key_heads : 0),
        sums(args.g_cumsum != nullptr ? (windows * sum_parts + Shape::kTeam - 1) / Shape::kTeam : 0) {}
};

// A team takes the chunks that start in its windows: one to each, or where sequences are short some more. So nobody
// needs to know before how many chunks there are.
template <typename Element, typename Shape>
__global__ void __launch_bounds__(kThreads, Shape::kBlocksPerSm)
    sm90_chunk_inverse_kernel(const __grid_constant__ SaveAArgs p) {
  const Args& args = p.args;
  constexpr int kTeam = Shape::kTeam, kTeams = Shape::kTeams;
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int team = warp / kTeam;
  if (threadIdx.x < kPlainGateBytes / 4) store_shared_f1(smem() + Shape::kSmemGate + 4 * threadIdx.x, 1.0f);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTeams; ++i) mbarrier_init(smem() + Shape::kSmemBarriers + 8 * i, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const uint32_t keys = smem() + team * Shape::kBytesTeam;
  const int member = warp % kTeam;
  const ChunkInverse<Element, Shape> inverse{
      p,      keys, keys + Shape::kTilesAt, smem() + Shape::kSmemBarriers + 8 * team, smem() + Shape::kSmemGate, team,
      member, lane};
  const uint32_t windows = Shape::kMostWindows > 1 ? static_cast<uint32_t>(p.windows) : 1;
  const WindowTeams<Shape> teams(args, windows);
  const uint32_t item = blockIdx.x * kTeams + team, number = item / (teams.inverses + teams.sums);
  const uint32_t part = item - number * (teams.inverses + teams.sums);
  const int64_t first_token = int64_t{number} * windows * kChunk;
  if (part < teams.inverses) {
    if (first_token < args.num_tokens) {
      const uint32_t group = args.num_value_heads / args.num_key_heads, key_head = part / teams.parts;
      const uint32_t first_head = (part - key_head * teams.parts) * kTeam;  // of the group
      ChunksOfWindows chunks(args, static_cast<int32_t>(first_token), static_cast<int32_t>(windows) * kChunk, lane);
      inverse.invert(chunks, static_cast<int>(key_head), static_cast<int>(key_head * group + first_head),
                     static_cast<int>(min(static_cast<uint32_t>(kTeam), group - first_head)));
    }
  } else {
    const uint32_t sum = (part - teams.inverses) * kTeam + member, window = sum / teams.sum_parts;
    const int64_t token = first_token + window * kChunk;
    if (window < windows && token < args.num_tokens) {
      ChunksOfWindows chunks(args, static_cast<int32_t>(token), kChunk, lane);
#pragma unroll 1
      for (ChunkRows chunk = chunks.take(); chunk.valid > 0; chunk = chunks.take()) {
        inverse.sum_gates(chunk.row, chunk.valid, static_cast<int>(sum - window * teams.sum_parts) * 32 + lane);
      }
    }
  }
  // It must not end before the forward that it was started beside: who comes next waits for this kernel alone. The last
  // block, so that none is held up by a waiting one's place.
  if (blockIdx.x == gridDim.x - 1) wait_for_predecessors();
}

template <typename Element, typename Shape>
cudaError_t launch(const SaveAArgs& params, cudaStream_t stream) {
  const Args& args = params.args;
  const void* kernel = reinterpret_cast<const void*>(&sm90_chunk_inverse_kernel<Element, Shape>);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(Shape::kSmemBytes));
  if (error != cudaSuccess) return error;
  // With few teams the card is better used by more of them, with many a team's first keys are waited for less often:
  // its time goes by its windows and about one more.
  int sms = 0;
  if (const cudaError_t failed = count_multiprocessors(&sms); failed != cudaSuccess) return failed;
  SaveAArgs launched = params;
  int64_t blocks = 0, least = INT64_MAX;
  for (int windows = 1; windows <= Shape::kMostWindows; ++windows) {
    const WindowTeams<Shape> teams(args, static_cast<uint32_t>(windows));
    const int64_t tokens = int64_t{windows} * kChunk;
    const int64_t items = (args.num_tokens + tokens - 1) / tokens * (teams.inverses + teams.sums);
    const int64_t needed = (items + Shape::kTeams - 1) / Shape::kTeams, at_once = int64_t{sms} * Shape::kBlocksPerSm;
    const int64_t time = (needed + at_once - 1) / at_once * (windows + 1);
    if (time >= least) continue;
    least = time;
    blocks = needed;
    launched.windows = windows;
  }
  const LaunchConfig shape(static_cast<int64_t>(blocks), kThreads, Shape::kSmemBytes, stream, true);
  return launch_function(kernel, shape, launched);
}

template <typename Element>
cudaError_t launch(const SaveAArgs& params, cudaStream_t stream) {
  return params.args.num_value_heads / params.args.num_key_heads > 2 ? launch<Element, TeamShape<4>>(params, stream)
                                                                     : launch<Element, TeamShape<2>>(params, stream);
}

}  // namespace

cudaError_t launch_save_a(const SaveAArgs& params, cudaStream_t stream) {
  return params.args.type == DType::kFloat16 ? launch<__half>(params, stream) : launch<__nv_bfloat16>(params, stream);
}

}  // namespace flash_qla::cuda::sm90::fwd
